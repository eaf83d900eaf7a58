"""Patches (changes of holmes while a job runs) to megatron-core, Megatron-LM and Megatron-DeepSpeed."""
