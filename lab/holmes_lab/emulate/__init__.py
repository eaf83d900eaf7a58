"""Emulated accelerators of a job's ranks: they sleep for the time of a computation, and can be traced."""
