"""Script of one rank under holmes, on nodes with NCCL's network plugin and nodes without it.

    plugin_groups.py [NODE,...]      NODE: a node on which NCCL finds no plugin

It makes a group of all ranks and one of the first two, uses both, and prints the sums as JSON.
"""

import json
import os
import sys

import torch
import torch.distributed as dist

import holmes_ext

nodes_without_plugin = sys.argv[1].split(",") if len(sys.argv) > 1 else []
if os.environ["HOLMES_LAB_NODE"] in nodes_without_plugin:
    os.environ["NCCL_NET_PLUGIN"] = "none"
holmes_ext.enable()

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
everyone = list(range(dist.get_world_size()))
pair = dist.new_group(everyone[:2], group_desc="pair")
sums = []
for group in (dist.group.WORLD, pair):
    if dist.get_rank(group) < 0:
        continue
    tensor = torch.ones(100_000, device="cuda")
    dist.all_reduce(tensor, group=group)
    sums.append(float(tensor.mean()))
torch.cuda.synchronize()
print(json.dumps(sums))
dist.destroy_process_group()
