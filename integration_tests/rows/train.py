"""Trains a small model with data parallelism, and logs the loss of each step.

    train.py --log-file FILE [--way loop|reducer|ddp|fsdp1] [--save DIR --save-after STEP] [--load DIR]

--way selects how gradients are averaged over the ranks:

    loop       an all-reduce for each gradient, after the backward pass
    reducer    holmes_ext.GradientReducer, which reduces buckets of gradients during the backward pass
    ddp        torch's DistributedDataParallel
    fsdp1      torch's FullyShardedDataParallel, with all weights sharded over all ranks

Only `reducer` imports holmes_ext. Rank 0 writes a JSON line with the mean loss of each step to FILE.
"""

import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

WIDTH = 64  # features of every layer
BLOCKS = 4  # each of a linear layer and tanh
ROWS = 8  # of a batch
LEARNING_RATE = 5.0
#: About one weight matrix (64 * 64 * 4 bytes), so that gradients are reduced in several buckets.
BUCKET_BYTES = 20_000


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=("loop", "reducer", "ddp", "fsdp1"), default="loop")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--log-file", required=True)
    parser.add_argument("--save", help="folder of the checkpoint")
    parser.add_argument("--save-after", type=int, default=0, help="step after which it is saved")
    parser.add_argument("--load", help="folder of the checkpoint to resume from")
    parser.add_argument("--local_rank", "--local-rank", type=int)  # the deepspeed launcher adds it
    return parser.parse_args()


def device_of_this_rank() -> torch.device:
    """Return the GPU of this rank, after making it torch's current device; without GPUs, the CPU."""
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    device = torch.device(accelerator.type, int(os.environ["LOCAL_RANK"]))
    torch.accelerator.set_device_index(device.index)
    return device


def new_model(device: torch.device) -> nn.Module:
    """Return a model with the same weights on every rank and in every run."""
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)]
    return nn.Sequential(*blocks).to(device)


def wrap_model(model: nn.Module, way: str, device: torch.device) -> nn.Module:
    """Return the model wrapped for data parallelism.

    Args:
        way: "ddp" or "fsdp1" for the wrappers of torch. For any other value, the model itself is
            returned.
    """
    if way == "ddp":
        return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=BUCKET_BYTES / 1e6)
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


def batch_of(step: int, rank: int, device: torch.device) -> torch.Tensor:
    """Return the batch of one rank in one step. It is the same in every run of the script."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(ROWS, WIDTH, generator=generator).to(device)


def save(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, folder: str) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": step}
    dcp.save(state, checkpoint_id=folder)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> int:
    """Load the weights and the optimizer's state, and return the step after which they were saved."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": 0}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    return state["step"]


def main() -> nn.Module:
    """Train the model, write the loss of each step to the log file, and return the model."""
    args = parse_args()
    torch.set_num_threads(1)
    device = device_of_this_rank()
    dist.init_process_group()
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    model = wrap_model(new_model(device), args.way, device)
    # Not AdamW: its steps do not change if all gradients are wrong by the same factor.
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    reducer = None
    if args.way == "reducer":
        from holmes_ext import GradientReducer

        reducer = GradientReducer(model.named_parameters(), bucket_bytes=BUCKET_BYTES)

    first_step = 1
    if args.load:
        first_step = load(model, optimizer, args.load) + 1

    log = open(args.log_file if rank == 0 else os.devnull, "w")  # noqa: SIM115 - open until the end
    for step in range(first_step, args.steps + 1):
        batch = batch_of(step, rank, device)
        if reducer:
            reducer.arm()  # from now on, a gradient is sent as soon as it is computed
        loss = (model(batch) - batch.roll(1, dims=1)).square().mean()
        loss.backward()
        if reducer:
            reducer.finish()  # waits until all gradients are averages
        elif args.way == "loop":
            average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()

        loss_sum = loss.detach().clone()
        dist.all_reduce(loss_sum)
        line = {"step": step, "loss": loss_sum.item() / world_size}
        print(json.dumps(line), file=log, flush=True)
        if args.save and step == args.save_after:
            save(model, optimizer, step, args.save)
    dist.barrier()
    dist.destroy_process_group()
    return model


if __name__ == "__main__":
    # The variable keeps the model alive until the process ends. DistributedDataParallel holds its
    # process group, and in torch 2.13 the destructor of a gloo group deadlocks now and then with
    # gloo's threads, which wait for the interpreter's lock.
    trained_model = main()
