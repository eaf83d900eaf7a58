"""Describes patches (changes of holmes to frameworks), applies them and removes them."""
