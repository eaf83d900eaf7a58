"""Patches (changes of holmes) to torch.distributed, FSDP, DistributedDataParallel and pipelining."""
