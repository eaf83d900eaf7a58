"""The job that the launchers start: data-parallel, a checkpoint after every step, from which it goes on.

    train.py FOLDER [--steps N] [--pause S] [--fail HOST:STEP]       FOLDER is on a file system
                                                                     that all nodes share

FOLDER/rank0.json, ...: what each rank was told, by its rank as the script sees it. FOLDER/losses: a JSON line
for every step, the mean over all ranks. SIGTERM: the step is finished and saved, all ranks end with status 0.
--fail: the first process that comes to STEP on HOST kills itself, once.

DistributedDataParallel and torch.optim import torch._dynamo, half of the seconds that all of this takes: 24
launches do without.
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

FEATURES, HIDDEN, ROWS, RATE, MOMENTUM = 16, 64, 4, 0.05, 0.9
TOLD = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_PROCID",
    "OMPI_COMM_WORLD_RANK",
    "SLURM_JOB_ID",
    "SLURM_RESTART_COUNT",
    "TORCHELASTIC_RESTART_COUNT",
    "CUDA_VISIBLE_DEVICES",
    "HOLMES_LAB_NODE",
)


def new_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))


def step_of(model, velocity):
    """SGD with momentum, over what `grad` holds."""
    with torch.no_grad():
        for parameter, speed in zip(model.parameters(), velocity):
            speed.mul_(MOMENTUM).add_(parameter.grad)
            parameter.sub_(RATE * speed)
            parameter.grad = None


def new_velocity(model):
    return [torch.zeros_like(parameter) for parameter in model.parameters()]


def loss_of(model, step, rank):
    """Of the rows that this rank has in this step."""
    rows = torch.randn(ROWS, FEATURES, generator=torch.Generator().manual_seed(1000 * step + rank))
    return nn.functional.mse_loss(model(rows), rows.sum(1, keepdim=True).sin())


def expected(world, steps):
    """The losses of such a job, by one process."""
    model = new_model()
    velocity, found = new_velocity(model), []
    for step in range(1, steps + 1):
        loss = torch.stack([loss_of(model, step, rank) for rank in range(world)]).mean()
        loss.backward()
        step_of(model, velocity)
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
    told = {
        "host": socket.gethostname(),
        **{name: os.environ[name] for name in TOLD if name in os.environ},
    }
    (args.folder / f"rank{rank}.json").write_text(json.dumps(told))

    model = new_model()
    velocity, checkpoint, first = new_velocity(model), args.folder / "checkpoint", 1
    if checkpoint.exists():
        state, velocity, done = torch.load(checkpoint)
        model.load_state_dict(state)
        first = done + 1
    dist.barrier()  # all have read it before anybody writes the next
    for step in range(first, args.steps + 1):
        time.sleep(args.pause)
        if args.fail == f"{socket.gethostname()}:{step}":
            failed = args.folder / "failed"
            try:
                failed.touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
            except FileExistsError:
                pass
        loss = loss_of(model, step, rank)
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        step_of(model, velocity)
        both = torch.stack([loss.detach() / dist.get_world_size(), torch.tensor(float(bool(stop)))])
        dist.all_reduce(both)
        if rank == 0:
            partial = checkpoint.with_suffix(".partial")
            torch.save((model.state_dict(), velocity, step), partial)
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
