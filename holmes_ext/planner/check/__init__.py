"""--holmes-check: prints what a job would do and gain, and ends it before its first step."""
