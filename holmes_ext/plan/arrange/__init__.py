"""Search for the order of the nodes and for the nodes of each stage."""
