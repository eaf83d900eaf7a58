"""Weights and outer state of a rank, and the elements that each rank exchanges with other jobs."""
