"""Optimization of the order of passes on the stages of a pipeline."""
