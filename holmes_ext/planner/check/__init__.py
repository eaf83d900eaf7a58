"""--holmes-check: prints a job's placement, networks and predicted step, and ends it before it trains."""
