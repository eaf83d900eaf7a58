"""Data-parallel training job that the launchers start, with a checkpoint after every step.

    train.py FOLDER [--steps N] [--pause S] [--fail HOST:STEP]

FOLDER is on a file system that all nodes share. The job writes into it:

    rank0.json, ...    host and environment variables of each rank, by its rank as the script sees it
    losses             a JSON line for every step, with the mean over all ranks
    checkpoint         state after the last step, from which the job resumes

After SIGTERM, the step is finished and saved, and all ranks end with status 0. --fail: the first process
that comes to STEP on HOST kills itself, once.

The script does not use DistributedDataParallel and torch.optim, which import torch._dynamo: that would take
half of the time of each launch.
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

FEATURES = 16
HIDDEN = 64
ROWS = 4  # samples of a rank in each step
RATE = 0.05
MOMENTUM = 0.9
#: Environment variables that each rank records.
RECORDED = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
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
    """Update the weights by SGD with momentum, from the parameters' `grad`."""
    with torch.no_grad():
        for parameter, speed in zip(model.parameters(), velocity):
            speed.mul_(MOMENTUM).add_(parameter.grad)
            parameter.sub_(RATE * speed)
            parameter.grad = None


def new_velocity(model):
    return [torch.zeros_like(parameter) for parameter in model.parameters()]


def loss_of(model, step, rank):
    """Return the loss of a rank's samples in one step."""
    rows = torch.randn(ROWS, FEATURES, generator=torch.Generator().manual_seed(1000 * step + rank))
    return nn.functional.mse_loss(model(rows), rows.sum(1, keepdim=True).sin())


def expected(world, steps):
    """Return the losses of a job of `world` ranks, computed by one process."""
    model = new_model()
    velocity = new_velocity(model)
    losses = []
    for step in range(1, steps + 1):
        loss = torch.stack([loss_of(model, step, rank) for rank in range(world)]).mean()
        loss.backward()
        step_of(model, velocity)
        losses.append(loss.item())
    return losses


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
    variables = {name: os.environ[name] for name in RECORDED if name in os.environ}
    record = {"host": socket.gethostname(), **variables}
    (args.folder / f"rank{rank}.json").write_text(json.dumps(record))

    model = new_model()
    velocity = new_velocity(model)
    checkpoint = args.folder / "checkpoint"
    first_step = 1
    if checkpoint.exists():
        state, velocity, last_step = torch.load(checkpoint)
        model.load_state_dict(state)
        first_step = last_step + 1
    dist.barrier()  # all ranks have read the checkpoint before rank 0 writes the next
    for step in range(first_step, args.steps + 1):
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
        # One all-reduce for the mean loss, and for whether any rank has received SIGTERM.
        mean_loss = loss.detach() / dist.get_world_size()
        summed = torch.stack([mean_loss, torch.tensor(float(bool(stop)))])
        dist.all_reduce(summed)
        if rank == 0:
            partial = checkpoint.with_suffix(".partial")
            torch.save((model.state_dict(), velocity, step), partial)
            partial.replace(checkpoint)
            with open(args.folder / "losses", "a") as log:
                print(json.dumps({"step": step, "loss": summed[0].item()}), file=log)
            print(f"step {step} saved", flush=True)
        if summed[1]:
            if rank == 0:
                print(f"ended by SIGTERM after step {step}", flush=True)
            break
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(0)


if __name__ == "__main__":
    main()
