"""Clusters of a job: their nodes, NICs and networks, from /sys, cluster.toml and schedulers."""
