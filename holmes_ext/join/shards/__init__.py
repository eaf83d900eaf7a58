"""Weights and outer state of one rank, and which rank exchanges which elements with other jobs."""
