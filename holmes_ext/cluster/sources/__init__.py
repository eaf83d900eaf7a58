"""Other places that know nodes: Slurm, Kubernetes, hostfiles; what they say as clusters of a cluster.toml."""
