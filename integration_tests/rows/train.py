"""A small model that learns by data parallelism. The script knows of holmes only with --way reducer.

    train.py --log-file FILE [--way loop|reducer|ddp|fsdp1] [--save DIR [--save-after STEP]] [--load DIR]

    loop      an all-reduce for each gradient after the backward pass
    reducer   holmes_ext.GradientReducer in place of that loop
    ddp       torch's DistributedDataParallel
    fsdp1     torch's FullyShardedDataParallel, all weights sharded over all ranks

FILE gets a JSON line with the mean loss of each step. NCCL on GPUs, gloo on CPUs.
"""

import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

WIDTH, BLOCKS, ROWS = 64, 4, 8


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=("loop", "reducer", "ddp", "fsdp1"), default="loop")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--log-file", required=True)
    parser.add_argument("--save", help="folder of the checkpoint")
    parser.add_argument("--save-after", type=int, default=0, help="step after which it is saved")
    parser.add_argument("--load", help="folder of the checkpoint to go on from")
    parser.add_argument("--local_rank", "--local-rank", type=int)  # the deepspeed launcher adds it
    return parser.parse_args()


def new_model(device: torch.device) -> nn.Module:
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)]
    return nn.Sequential(*blocks).to(device)


def wrapped(model: nn.Module, way: str, device: torch.device) -> nn.Module:
    """Return the model as torch's own ways of data parallelism want it."""
    if way == "ddp":
        return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.02)
    if way == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        for index, block in enumerate(model):
            model[index] = FullyShardedDataParallel(block, use_orig_params=True, device_id=device)
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=device)
    return model


def average_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def rows_of(step: int, rank: int, device: torch.device) -> torch.Tensor:
    """Return the rows that a rank has in a step, the same in every run."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(ROWS, WIDTH, generator=generator).to(device)


def main() -> nn.Module:
    """Train, and return the model."""
    args = parse_args()
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        device = torch.device(accelerator.type, int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device.index)
    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = wrapped(new_model(device), args.way, device)
    # AdamW's steps would be the same with gradients that are wrong by a factor.
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0, momentum=0.9)
    reducer = None
    if args.way == "reducer":
        from holmes_ext import GradientReducer

        reducer = GradientReducer(model.named_parameters(), bucket_bytes=20_000)

    done = 0
    if args.load:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": 0}
        dcp.load(state, checkpoint_id=args.load)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        done = state["step"]

    log = open(args.log_file if rank == 0 else os.devnull, "w")
    for step in range(done + 1, args.steps + 1):
        rows = rows_of(step, rank, device)
        if reducer:
            reducer.arm()
        loss = (model(rows) - rows.roll(1, dims=1)).square().mean()
        loss.backward()
        if reducer:
            reducer.finish()
        elif args.way == "loop":
            average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        print(json.dumps({"step": step, "loss": total.item() / ranks}), file=log, flush=True)
        if args.save and step == args.save_after:
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": moments, "step": step}
            dcp.save(state, checkpoint_id=args.save)
    dist.barrier()
    dist.destroy_process_group()
    return model


if __name__ == "__main__":
    # The model lives as long as the process. DistributedDataParallel holds its process group, and
    # in torch 2.13 the destructor of a gloo group deadlocks now and then with gloo's threads, which
    # wait for the interpreter's lock.
    trained = main()
