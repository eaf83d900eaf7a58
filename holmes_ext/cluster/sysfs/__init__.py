"""Reader of the NICs in a /sys tree; node.py is the entry point."""
