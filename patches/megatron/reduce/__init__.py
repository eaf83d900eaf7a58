"""How megatron-core reduces gradients under a plan."""
