"""Output that several commands share, such as tables."""
