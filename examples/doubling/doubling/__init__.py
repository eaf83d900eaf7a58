"""Sums gradients across clusters by recursive doubling, with the flag --holmes-doubling."""
