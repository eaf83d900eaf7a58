"""Script of one rank that makes process groups with and without a description (group_desc).

Every group is used once, except "never used".
"""

import os

import torch
import torch.distributed as dist

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
everyone = list(range(dist.get_world_size()))
groups = [
    dist.group.WORLD,
    dist.new_group(everyone, group_desc="described"),
    dist.new_group(everyone, group_desc="hashed name", use_local_synchronization=True),
]
dist.new_group(everyone, group_desc="never used")
without_description = dist.new_group(everyone)
for group in (*groups, without_description):
    dist.all_reduce(torch.ones(1, device="cuda"), group=group)
torch.cuda.synchronize()
dist.destroy_process_group()
