"""Patches of Lightning."""
