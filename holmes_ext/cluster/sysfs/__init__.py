"""Reader of the NICs in a /sys tree, of this node or captured on another; node.py is the entry point."""
