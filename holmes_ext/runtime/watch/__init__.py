"""Checks while a job trains: failed NICs and communication, late steps, differences from the plan."""
