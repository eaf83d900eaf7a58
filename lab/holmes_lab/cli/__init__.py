"""Commands of the lab: `holmes lab` and `holmes demo`."""
