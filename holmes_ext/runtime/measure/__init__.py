"""Measurements of a running job: telemetry of operations, profiles of layers, probes of networks, clocks."""
