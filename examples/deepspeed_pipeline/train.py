"""Train a byte-level GPT with DeepSpeed's pipeline engine on English text that every Python installation has.

    torchrun --nproc-per-node 4 train.py --stages 2          two pipeline stages x two data-parallel ranks
    deepspeed --num_gpus 4 train.py --stages 2               the same with DeepSpeed's launcher
    python train.py                                          one process

An ordinary DeepSpeed script: NCCL on GPUs, gloo on CPUs. README.md shows what it prints.
"""

import contextlib
import io
import json
import logging
import os
import re
import statistics
import sys
import time
import warnings
from pathlib import Path

from options import Parser, deepspeed_config, parse_args

# torch and deepspeed are imported in the functions that use them: bad usage is told at once, and the
# environment that DeepSpeed reads on import is prepared first.
STARTED = time.time()


def prepare_environment():
    """What DeepSpeed must find before it is imported. A plain `python train.py` is a job of one process."""
    import torch

    if "RANK" not in os.environ and "OMPI_COMM_WORLD_RANK" not in os.environ:
        os.environ.update(
            RANK="0",
            LOCAL_RANK="0",
            WORLD_SIZE="1",
            LOCAL_WORLD_SIZE="1",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT="0",
        )
    if not torch.accelerator.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))


def start_distributed():
    """Join the job, on this process's GPU if it has one."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() == "cpu":
        # DeepSpeed would compile (half a minute) and load a shared-memory all-reduce that training does not
        # use and that leaves 66 MB for each process in /dev/shm. Its table of usable ops is where it asks
        # first.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # 0.16 and older: activation checkpointing makes one all the same
        if get_accelerator().Stream is None:
            type(get_accelerator()).Stream = staticmethod(lambda device: None)
    else:
        get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed()
    if deepspeed.comm.get_rank() != 0:
        deepspeed.utils.logger.setLevel(logging.ERROR)  # one rank's warnings are enough
    # about DeepSpeed's own calls
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")


def build_engine(args, parser: Parser):
    """The pipeline engine and the number of the model's parameters."""
    import deepspeed
    import torch
    from deepspeed.pipe import PipelineModule
    from model import count_parameters, layer_specs, next_byte_loss

    specs = layer_specs(args.layers, args.hidden, args.heads, args.sequence, args.tied)
    kind, _, pattern = args.partition_method.partition(":")
    names = sorted({spec.typename.__name__ for spec in specs})
    if kind == "type" and not any(re.search(pattern, name, re.IGNORECASE) for name in names):
        parser.error(
            f"--partition-method {args.partition_method} matches none of the layer classes "
            f"{', '.join(names)}"
        )

    # DeepSpeed prints every layer and its memory; and it broadcasts tied weights, which autograd must not
    # record.
    with contextlib.redirect_stdout(io.StringIO()):
        with torch.no_grad():
            model = PipelineModule(
                specs,
                num_stages=args.stages,
                loss_fn=next_byte_loss,
                partition_method=args.partition_method,
                # a layer's initial weights come from the layer's number, whatever its stage; DeepSpeed seeds
                # before each layer's forward pass, too (torch.manual_seed takes milliseconds on CPUs)
                seed_layers=True,
                seed_fn=lambda seed: torch.default_generator.manual_seed(int(seed)),
                base_seed=1000 * args.seed,
                activation_checkpoint_interval=args.activation_checkpoint,
                # the reentrant default would cut the embedding off from its gradient
                activation_checkpoint_func=deepspeed.checkpointing.non_reentrant_checkpoint,
            )
        if any(start == stop for start, stop in zip(model.parts, model.parts[1:])):
            parser.error(
                f"--partition-method {args.partition_method} leaves one of the {args.stages} stages "
                f"empty: borders {model.parts}"
            )
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=deepspeed_config(args)
        )
    return engine, count_parameters(specs)


def identity(args, engine) -> dict:
    """What a checkpoint and the job that resumes it must have in common."""
    names = (
        "layers",
        "hidden",
        "heads",
        "sequence",
        "tied",
        "stages",
        "partition_method",
        "dtype",
        "zero",
        "seed",
    )
    return {name: getattr(args, name) for name in names} | {
        "global_batch": engine.train_batch_size()
    }


def resume(args, engine, parser: Parser):
    """Continue from the latest checkpoint under args.load: weights, optimizer, step."""
    import torch

    latest = Path(args.load) / "latest"
    file = (
        latest.parent / (latest.read_text().strip() if latest.is_file() else "") / "identity.json"
    )
    if not file.is_file():
        parser.error(
            f"--load {args.load}: no checkpoint of this script there (no latest, or no identity.json in the"
            " folder that it names)"
        )
    saved, now = json.loads(file.read_text()), identity(args, engine)
    for name in now:
        if saved.get(name) != now[name]:
            parser.error(
                f"--load {args.load}: saved with {name} {saved.get(name)}, but this job has {name} "
                f"{now[name]}"
            )
    with torch.no_grad():
        engine.load_checkpoint(args.load)
    for group in engine.optimizer.param_groups:
        group["lr"] = args.lr
    if engine.global_steps >= args.steps:
        parser.error(
            f"--load {args.load}: the checkpoint has {engine.global_steps} steps,"
            f" --steps {args.steps} leaves nothing to do"
        )


def save(args, engine, rank: int):
    """Write a checkpoint under args.save, which all nodes must share; DeepSpeed names it in `latest` when all
    of it is there."""
    tag = f"step{engine.global_steps}"
    if rank == 0:
        folder = Path(args.save) / tag
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "identity.json").write_text(json.dumps(identity(args, engine), indent=1) + "\n")
    engine.save_checkpoint(args.save, tag=tag)


def train(args, parser: Parser):
    """Train from the first or the resumed step to args.steps and tell how it went."""
    prepare_environment()
    from data import Batches, load_text
    from deepspeed import comm
    from tqdm import tqdm

    start_distributed()
    engine, parameters = build_engine(args, parser)
    rank, grid = comm.get_rank(), engine.grid
    text = load_text()
    try:
        batches = Batches(
            text,
            args.sequence,
            engine.train_micro_batch_size_per_gpu(),
            engine.gradient_accumulation_steps(),
            grid.get_data_parallel_world_size(),
            grid.get_data_parallel_rank(),
            args.seed,
        )
    except ValueError as error:
        parser.error(f"--sequence {args.sequence}: {error}")
    if args.load:
        resume(args, engine, parser)

    tokens = engine.train_batch_size() * args.sequence
    if rank == 0:
        borders = engine.module.parts
        stages = "+".join(str(stop - start) for start, stop in zip(borders, borders[1:]))
        print(
            f"{comm.get_world_size()} processes: pipeline {args.stages} x data {batches.data_ranks}, "
            f"stages of {stages} layers; {parameters / 1e6:.2f} M parameters, {args.dtype}, ZeRO "
            f"{args.zero}; {tokens:,} tokens a step of the text's {len(text):,}; "
            f"ready after {time.time() - STARTED:.1f} s",
            flush=True,
        )
    log = open(args.log, "a" if args.load else "w") if args.log and rank == 0 else None
    losses, seconds = [], []
    with tqdm(
        total=args.steps,
        initial=engine.global_steps,
        unit="step",
        disable=rank != 0,
        dynamic_ncols=True,
        mininterval=0.1 if sys.stderr.isatty() else 10,
    ) as bar:
        while engine.global_steps < args.steps:
            begin = time.perf_counter()
            # of the global batch, on every rank
            loss = engine.train_batch(batches.step(engine.global_steps)).item()
            seconds.append(time.perf_counter() - begin)
            losses.append(loss)
            bar.set_postfix_str(f"loss {loss:.4f}", refresh=False)
            bar.update()
            if log:
                print(
                    json.dumps(
                        {
                            "step": engine.global_steps,
                            "loss": loss,
                            "seconds": seconds[-1],
                            "tokens_per_second": tokens / seconds[-1],
                        }
                    ),
                    file=log,
                    flush=True,
                )
            if args.save and (
                engine.global_steps == args.steps
                or args.save_every
                and engine.global_steps % args.save_every == 0
            ):
                save(args, engine, rank)
    if rank == 0:
        median = statistics.median(seconds)
        print(
            f"{len(losses)} steps: loss {losses[0]:.4f} -> {losses[-1]:.4f}, median step {median:.4f} s,"
            f" {tokens / median:,.0f} tokens/s",
            flush=True,
        )
    # a gloo thread that still holds a tensor when the interpreter ends aborts the process, now and then
    comm.barrier()
    comm.destroy_process_group()


if __name__ == "__main__":
    train(*parse_args())
