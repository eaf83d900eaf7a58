"""Trains a small model with DistributedDataParallel, and logs the loss of each step.

ddp.py STEPS LOG     LOG gets a JSON line for each step
"""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn

WIDTH = 256

if __name__ == "__main__":
    steps = int(sys.argv[1])
    path = sys.argv[2]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    layers = [layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with open(path if rank == 0 else "/dev/null", "w") as log:
        for step in range(steps):
            inputs = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(4 * step + rank))
            loss = (model(inputs) - inputs.roll(1, 1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach().clone()
            dist.all_reduce(total)
            print(json.dumps({"step": step + 1, "loss": total.item() / 4}), file=log, flush=True)
    dist.destroy_process_group()
