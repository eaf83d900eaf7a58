"""Readers of node lists (Slurm, Kubernetes, hostfiles), and the cluster.toml made from them."""
