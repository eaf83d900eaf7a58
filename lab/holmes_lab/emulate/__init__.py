"""What the lab puts in place of hardware: accelerators, and the trace of what they did."""
