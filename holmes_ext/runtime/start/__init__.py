"""The start of a job: this process, the store, the vote of all ranks, the planned rank, the preflight."""
