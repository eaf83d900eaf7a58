"""Code that runs inside a training job: start, process groups, reductions, measurements, watchdog."""
