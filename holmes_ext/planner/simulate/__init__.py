"""Event-driven simulation of one training step of every rank."""
