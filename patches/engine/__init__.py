"""Patches as values, the registry that applies and undoes them, and where they land."""
