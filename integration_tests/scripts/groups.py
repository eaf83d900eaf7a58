"""A script that knows nothing of holmes: makes groups in every way torch has, uses each, prints what came out
as JSON.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
half = world // 2
groups = {
    "world": dist.group.WORLD,
    "new_group": [dist.new_group(list(range(half))), dist.new_group(list(range(half, world)))][
        rank >= half
    ],
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
print(
    json.dumps(
        {
            "rank": rank,
            "env": int(os.environ["RANK"]),
            "local": os.environ["LOCAL_RANK"],
            "argv": sys.argv[1:],
            "node": os.uname().nodename,
            "sums": sums,
            "holmes": "holmes_ext.job" in sys.modules,
        }
    )
)
dist.destroy_process_group()
