"""Gradient reduction: buckets, overlap, a hierarchical all-reduce, compression."""
