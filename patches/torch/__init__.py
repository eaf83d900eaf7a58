"""Patches of torch.distributed."""
