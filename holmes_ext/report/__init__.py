"""Parts of `holmes report`: reading the telemetry of a run, summing it up, and traces of single steps."""
