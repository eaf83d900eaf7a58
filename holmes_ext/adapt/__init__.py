"""A plan that learns while the job runs: measured, decided again, taken by all ranks at one step's
boundary."""
