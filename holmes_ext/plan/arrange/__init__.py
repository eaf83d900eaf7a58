"""Search for the order of nodes, and for what goes to which stage."""
