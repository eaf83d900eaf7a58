"""What `holmes report` shows: the files of a run's telemetry, what they add up to, traces and pictures."""
