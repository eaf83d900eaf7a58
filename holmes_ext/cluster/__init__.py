"""Hardware of a job: NICs from /sys, cluster.toml, fabrics, and links between clusters."""
