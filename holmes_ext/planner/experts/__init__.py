"""Placement of the experts of a mixture-of-experts model on expert parallel ranks."""
