"""Reads the command line of a training script: flags of Megatron-LM, Megatron-DeepSpeed and DeepSpeed."""
