"""The commands of `holmes`, one module for each."""
