"""What is watched while a job runs: NICs, failures, steps that hang."""
