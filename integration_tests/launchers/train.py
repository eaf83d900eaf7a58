"""The job that the launchers start: DistributedDataParallel, a checkpoint after every step, from which it goes on.

    train.py FOLDER [--steps N] [--pause S] [--fail HOST:STEP]       FOLDER is on a file system that all nodes share

FOLDER/rank0.json, ...: what each rank was told, by its rank as the script sees it. FOLDER/losses: a JSON line for every
step, the mean over all ranks. SIGTERM: the step is finished and saved, all ranks end with status 0. --fail: the first
process that comes to STEP on HOST kills itself, once.
"""

import argparse
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

FEATURES, HIDDEN, ROWS = 16, 64, 4
TOLD = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK",
        "SLURM_JOB_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT", "CUDA_VISIBLE_DEVICES", "HOLMES_LAB_NODE")


def new_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))


def new_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def loss_of(model, step, rank):
    """Of the rows that this rank has in this step."""
    rows = torch.randn(ROWS, FEATURES, generator=torch.Generator().manual_seed(1000 * step + rank))
    return nn.functional.mse_loss(model(rows), rows.sum(1, keepdim=True).sin())


def expected(world, steps):
    """The losses of such a job, by one process."""
    model = new_model()
    optimizer, found = new_optimizer(model), []
    for step in range(1, steps + 1):
        loss = torch.stack([loss_of(model, step, rank) for rank in range(world)]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--fail")
    parser.add_argument("--local_rank", "--local-rank", type=int)  # deepspeed's launcher gives it
    args = parser.parse_args()
    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    told = {"host": socket.gethostname(), **{name: os.environ[name] for name in TOLD if name in os.environ}}
    (args.folder / f"rank{rank}.json").write_text(json.dumps(told))

    model = new_model()
    optimizer, checkpoint, first = new_optimizer(model), args.folder / "checkpoint", 1
    if checkpoint.exists():
        model_state, optimizer_state, done = torch.load(checkpoint)
        model.load_state_dict(model_state)
        optimizer.load_state_dict(optimizer_state)
        first = done + 1
    dist.barrier()  # all have read it before anybody writes the next
    replica = nn.parallel.DistributedDataParallel(model)
    for step in range(first, args.steps + 1):
        time.sleep(args.pause)
        if args.fail == f"{socket.gethostname()}:{step}":
            failed = args.folder / "failed"
            try:
                failed.touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
            except FileExistsError:
                pass
        loss = loss_of(replica, step, rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        both = torch.stack([loss.detach() / dist.get_world_size(), torch.tensor(float(bool(stop)))])
        dist.all_reduce(both)
        if rank == 0:
            partial = checkpoint.with_suffix(".partial")
            torch.save((model.state_dict(), optimizer.state_dict(), step), partial)
            partial.replace(checkpoint)
            with open(args.folder / "losses", "a") as log:
                print(json.dumps({"step": step, "loss": both[0].item()}), file=log)
            print(f"step {step} saved", flush=True)
        if both[1]:
            if rank == 0:
                print(f"ended by SIGTERM after step {step}", flush=True)
            break
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(0)


if __name__ == "__main__":
    main()
