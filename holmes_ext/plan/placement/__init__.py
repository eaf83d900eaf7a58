"""Which ranks hold which stage: one value, what of it is alike, and how it is found."""
