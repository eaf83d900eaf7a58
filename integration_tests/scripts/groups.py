"""A script without holmes that makes process groups in every way of torch, and uses each.

Each rank prints the sums and its environment as a JSON line.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
rank = dist.get_rank()
world = dist.get_world_size()
half = world // 2
first_half = dist.new_group(list(range(half)))
second_half = dist.new_group(list(range(half, world)))
groups = {
    "world": dist.group.WORLD,
    "new_group": first_half if rank < half else second_half,
    "new_subgroups": dist.new_subgroups(half)[0],
    "mesh": init_device_mesh("cpu", (2, half), mesh_dim_names=("pp", "dp"))["dp"].get_group(),
}
sums = {}
for name, group in groups.items():
    value = torch.tensor([float(rank)])
    dist.all_reduce(value, group=group)
    sums[name] = value.item()
big = torch.ones(500_000)
for _ in range(4):
    dist.all_reduce(big, group=groups["new_group"])
report = {
    "rank": rank,
    "env": int(os.environ["RANK"]),
    "local": os.environ["LOCAL_RANK"],
    "argv": sys.argv[1:],
    "node": os.uname().nodename,
    "sums": sums,
    "holmes": "holmes_ext.job" in sys.modules,
}
print(json.dumps(report))
dist.destroy_process_group()
