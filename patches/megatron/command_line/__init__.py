"""A script's command line: what Megatron-LM's, Megatron-DeepSpeed's and DeepSpeed's flags say of a job."""
