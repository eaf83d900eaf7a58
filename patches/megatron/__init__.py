"""Patches of megatron-core, Megatron-LM and Megatron-DeepSpeed."""
