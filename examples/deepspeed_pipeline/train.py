"""Train a byte-level GPT with DeepSpeed's pipeline engine on Python's own documentation.

    torchrun --nproc-per-node 4 train.py --stages 2          two pipeline stages x two data-parallel ranks
    deepspeed --num_gpus 4 train.py --stages 2               the same with DeepSpeed's launcher
    python train.py                                          one process

This is an ordinary DeepSpeed script. It uses NCCL on GPUs and gloo on CPUs. README.md shows its output.
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

# torch and deepspeed are imported in the functions that use them: errors of the command line are printed at
# once, and the environment variables that DeepSpeed reads on import are set first.
STARTED = time.time()


def prepare_environment():
    """Set the environment variables that DeepSpeed reads when it is imported.

    Without a launcher (`python train.py`) the job has one process.
    """
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
    """Initialize DeepSpeed's communication, on this process's GPU if it has one."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() == "cpu":
        # DeepSpeed would compile (half a minute) and load a shared-memory all-reduce. Training does not use
        # it, and it leaves 66 MB for each process in /dev/shm. DeepSpeed first looks into this table of
        # compatible ops.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # DeepSpeed 0.16 and older makes a stream for activation checkpointing on CPUs, too.
        if get_accelerator().Stream is None:
            type(get_accelerator()).Stream = staticmethod(lambda device: None)
    else:
        get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed()
    if deepspeed.comm.get_rank() != 0:
        deepspeed.utils.logger.setLevel(logging.ERROR)  # one rank's warnings are enough
    # DeepSpeed itself calls deprecated functions of torch.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")


def build_engine(args, parser: Parser):
    """Return DeepSpeed's pipeline engine, and the number of the model's parameters.

    Args:
        args: The script's options.
        parser: Prints a usage error and ends the script if --partition-method does not fit the
            model.
    """
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

    # DeepSpeed prints every layer and its memory: the output is discarded. It broadcasts tied weights, which
    # autograd must not record.
    with contextlib.redirect_stdout(io.StringIO()):
        with torch.no_grad():
            model = PipelineModule(
                specs,
                num_stages=args.stages,
                loss_fn=next_byte_loss,
                partition_method=args.partition_method,
                # A layer's initial weights depend on the number of the layer, not on its stage. DeepSpeed
                # calls seed_fn before each layer's forward pass, too, where torch.manual_seed would take
                # milliseconds on CPUs.
                seed_layers=True,
                seed_fn=lambda seed: torch.default_generator.manual_seed(int(seed)),
                base_seed=1000 * args.seed,
                activation_checkpoint_interval=args.activation_checkpoint,
                # With the default, which is reentrant, the embedding would get no gradient.
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
    """Return the settings that a checkpoint and the job that resumes it must share."""
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
    """Load weights, optimizer state and step of args.load's latest checkpoint into the engine.

    engine.global_steps is then the number of steps that the checkpoint has. Nothing is returned.

    Args:
        args: The script's options.
        engine: DeepSpeed's pipeline engine.
        parser: Prints a usage error and ends the script if the checkpoint does not exist, is of a
            job with other settings, or already has args.steps steps.
    """
    import torch

    folder = Path(args.load)
    latest = folder / "latest"  # DeepSpeed's file with the name of the newest checkpoint
    if latest.is_file():
        folder = folder / latest.read_text().strip()
    file = folder / "identity.json"
    if not file.is_file():
        parser.error(
            f"--load {args.load}: no checkpoint of this script there (no latest, or no identity.json in the"
            " folder that it names)"
        )
    saved = json.loads(file.read_text())
    for name, value in identity(args, engine).items():
        if saved.get(name) != value:
            parser.error(
                f"--load {args.load}: saved with {name} {saved.get(name)}, but this job has {name} {value}"
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
    """Write a checkpoint under args.save, a folder that all nodes must share.

    When the checkpoint is complete, DeepSpeed writes its name into the file `latest`.
    """
    tag = f"step{engine.global_steps}"
    if rank == 0:
        folder = Path(args.save) / tag
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "identity.json").write_text(json.dumps(identity(args, engine), indent=1) + "\n")
    engine.save_checkpoint(args.save, tag=tag)


def train(args, parser: Parser):
    """Train up to step args.steps, save checkpoints, and print a summary on rank 0.

    Training starts at step 0, or with --load after the last step of that checkpoint.

    Args:
        args: The script's options.
        parser: Prints a usage error and ends the script if an option does not fit the model, the
            text or the checkpoint.
    """
    prepare_environment()
    from data import Batches, load_text
    from deepspeed import comm
    from tqdm import tqdm

    start_distributed()
    engine, parameters = build_engine(args, parser)
    rank = comm.get_rank()
    grid = engine.grid
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
    writes_log = args.log and rank == 0
    if writes_log and not args.load:
        Path(args.log).write_text("")
    losses = []  # loss of each step
    seconds = []  # duration of each step
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
            # Every rank receives the loss of the global batch.
            loss = engine.train_batch(batches.step(engine.global_steps)).item()
            seconds.append(time.perf_counter() - begin)
            losses.append(loss)
            bar.set_postfix_str(f"loss {loss:.4f}", refresh=False)
            bar.update()
            if writes_log:
                line = {
                    "step": engine.global_steps,
                    "loss": loss,
                    "seconds": seconds[-1],
                    "tokens_per_second": tokens / seconds[-1],
                }
                with open(args.log, "a") as log:
                    print(json.dumps(line), file=log)
            is_last = engine.global_steps == args.steps
            is_due = args.save_every and engine.global_steps % args.save_every == 0
            if args.save and (is_last or is_due):
                save(args, engine, rank)
    if rank == 0:
        median = statistics.median(seconds)
        print(
            f"{len(losses)} steps: loss {losses[0]:.4f} -> {losses[-1]:.4f}, median step {median:.4f} s,"
            f" {tokens / median:,.0f} tokens/s",
            flush=True,
        )
    # Without this, a thread of gloo may still hold a tensor when the interpreter ends, which can abort the
    # process.
    comm.barrier()
    comm.destroy_process_group()


if __name__ == "__main__":
    train(*parse_args())
