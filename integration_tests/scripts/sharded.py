"""A script without holmes that trains with FSDP2 and HSDP: replicas of sharded weights.

Weights are sharded inside each half of the ranks and replicated between the halves. Each rank prints its
rank, its node and the losses as JSON.
"""

import json
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group()  # names no backend
rank = dist.get_rank()
world = dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(
    *(nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 64)) for _ in range(3))
)
mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
for layer in (*model, model):
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
losses = []
for step in range(6):
    generator = torch.Generator().manual_seed(step)
    global_batch = torch.randn(world * 8, 64, generator=generator)
    batch = global_batch[rank * 8 : (rank + 1) * 8]
    loss = (model(batch) - batch.flip(1)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().clone()
    dist.all_reduce(total)
    losses.append(total.item() / world)
print(json.dumps({"rank": rank, "node": os.uname().nodename, "losses": losses}), flush=True)
dist.barrier()
os._exit(0)
