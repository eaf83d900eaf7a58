"""Start of a job: identity of this process, agreement of all ranks on a plan, and a test of connections."""
