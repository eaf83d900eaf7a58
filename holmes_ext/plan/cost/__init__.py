"""What a step costs: the model, memory, messages, reductions, stages."""
