"""One training step of every rank, event by event."""
