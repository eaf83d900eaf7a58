"""A small model whose gradients a GradientReducer or DistributedDataParallel averages: `apart.py reducer|ddp
STEPS LOG`; a JSON line for each step: its loss, and whether all ranks have the same weights after it."""

import json
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn

from holmes_ext import GradientReducer

WIDTH = 256


def alike(model):
    """Whether every rank has the same bits."""
    flat = torch.cat([weight.detach().flatten() for weight in model.parameters()]).view(torch.int32)
    digest = (flat.long() * torch.arange(1, len(flat) + 1, device=flat.device)).sum()[None]
    every = [torch.empty_like(digest) for _ in range(dist.get_world_size())]
    dist.all_gather(every, digest)
    return len(set(map(int, every))) == 1


if __name__ == "__main__":
    how, steps, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
    model = model.cuda() if gpu else model
    train = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.5) if how == "ddp" else model
    reducer = GradientReducer(model.named_parameters()) if how == "reducer" else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with open(path if rank == 0 else "/dev/null", "w") as log:
        for step in range(steps):
            inputs = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(ranks * step + rank))
            inputs = inputs.cuda() if gpu else inputs
            loss = (train(inputs) - inputs.roll(1, 1)).square().mean()
            with reducer.overlapped() if reducer is not None else nullcontext():
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach().clone()
            dist.all_reduce(total)
            line = {"step": step + 1, "loss": total.item() / ranks, "alike": alike(model)}
            print(json.dumps(line), file=log, flush=True)
    dist.destroy_process_group()
