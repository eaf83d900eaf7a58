"""Emulated network of a lab: namespaces, links with limited rates, and delays between clusters."""
