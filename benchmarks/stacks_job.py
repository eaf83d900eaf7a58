"""Trains a model (examples/trainer) with one of several stacks, on every node of benchmarks/stacks.py.

    stacks_job.py ARGUMENTS OF examples/trainer/train.py --stack trainer | lightning | reducer | ddp

"reducer" is a plain loop with holmes_ext.GradientReducer, and "ddp" the same loop with
DistributedDataParallel.
"""

import importlib.util
import json
import runpy
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from holmes_ext import GradientReducer

ROOT = Path(__file__).resolve().parents[1]
TRAINER = ROOT / "examples" / "trainer" / "train.py"
SCRIPTS = {"trainer": TRAINER, "lightning": ROOT / "examples" / "lightning" / "train.py"}


def loop(by_reducer: bool) -> None:
    """Train in a plain loop, with a GradientReducer or with DistributedDataParallel."""
    spec = importlib.util.spec_from_file_location("trainer_example", TRAINER)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    args = example.arguments()
    dist.init_process_group()
    torch.manual_seed(args.seed)
    model = example.make_model(args)
    wrapped = model if by_reducer else nn.parallel.DistributedDataParallel(model)
    reducer = GradientReducer(model.named_parameters()) if by_reducer else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    data = example.Text(args.sequence)
    batches = iter(
        DataLoader(data, args.micro_batch, sampler=DistributedSampler(data, seed=args.seed))
    )
    log = None
    if args.log_file and dist.get_rank() == 0:
        log = open(args.log_file, "w")  # noqa: SIM115 - until the process ends
    for step in range(args.steps):
        began = time.perf_counter()
        if reducer:
            reducer.arm()
        loss = wrapped(**next(batches)).loss
        loss.backward()
        if reducer:
            reducer.finish()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if log:
            line = {"step": step + 1, "loss": total.item() / dist.get_world_size()}
            print(
                json.dumps({**line, "seconds": time.perf_counter() - began}), file=log, flush=True
            )
    dist.destroy_process_group()


def main() -> None:
    """Train the same model by one of several stacks: a training library, or a plain loop.

    The option --stack chooses the stack:

        trainer, lightning    the example script of transformers' Trainer, or of Lightning
        reducer               the plain loop, with GradientReducer of holmes
        ddp                   the plain loop, with DistributedDataParallel

    All other arguments of the command line are passed to the script or the loop.
    """
    position = sys.argv.index("--stack")
    stack = sys.argv[position + 1]
    del sys.argv[position : position + 2]
    if stack in SCRIPTS:
        sys.argv[0] = str(SCRIPTS[stack])
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        loop(by_reducer=stack == "reducer")


if __name__ == "__main__":
    main()
