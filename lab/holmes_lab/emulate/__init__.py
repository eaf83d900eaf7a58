"""Emulation of accelerators by sleeping, and traces of the ranks of a job."""
