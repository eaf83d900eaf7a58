"""What a running job measures of itself: telemetry, profiles, probes, clocks."""
