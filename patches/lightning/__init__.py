"""Patches (changes of holmes) to Lightning."""
