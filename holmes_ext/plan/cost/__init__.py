"""Cost model of a training step: layers, memory, messages, reductions and pipeline stages."""
