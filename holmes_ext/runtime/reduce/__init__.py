"""Gradient reduction: buckets, overlap, two levels, compression."""
