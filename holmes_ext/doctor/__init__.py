"""Checks of `holmes doctor`: NICs, differences between nodes, variables, frameworks, training commands."""
