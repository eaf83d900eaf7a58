"""Rounds on a rank of a joined job: the thread that exchanges pseudo-gradients, and their aggregation."""
