"""Emulation of accelerators by sleeping, and traces of what the ranks of a job do."""
