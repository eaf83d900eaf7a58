"""Train a byte-level GPT with megatron-core on Python's own documentation.

    torchrun --nproc-per-node 4 train.py --pipeline 2          two pipeline stages x two data-parallel ranks
    torchrun --nproc-per-node 4 train.py --tensor 2 --pipeline 2
    python train.py                                            one process

This is an ordinary megatron-core script: it uses megatron-core's GPTModel, DistributedDataParallel,
optimizer, schedules and checkpoints, with NCCL on GPUs and gloo on CPUs.
"""

import contextlib
import functools
import importlib.util
import inspect
import json
import os
import statistics
import sys
import time
import warnings
from pathlib import Path

from options import Parser, parse_args

STARTED = time.time()
SHIM = Path(__file__).resolve().parent / "on_cpu" / "megatron_cpu_shim.py"


def prepare():
    """Make this process able to import and run megatron-core, before the import.

    Known warnings are silenced. Without a launcher, the environment of a job with one process is
    set (RANK=0, WORLD_SIZE=1, ...). Without CUDA, a shim is loaded that lets megatron-core run on a
    CPU. The processes that megatron starts to write checkpoints call this function, too.
    """
    # Warnings about packages that this example does not need, and about old torch functions that
    # megatron-core calls.
    warnings.filterwarnings(
        "ignore",
        message=".*(Apex|Transformer "
        "Engine|torch_dist|autocast|_all_gather_base|reduce_scatter_base)",
    )
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if "RANK" not in os.environ:
        os.environ.update(
            RANK="0",
            LOCAL_RANK="0",
            WORLD_SIZE="1",
            LOCAL_WORLD_SIZE="1",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT="0",
        )
    import torch

    # megatron-core requires CUDA. The shim lets it run on a CPU, for experiments. Running the
    # module changes torch; its contents are not used.
    if not torch.cuda.is_available():
        spec = importlib.util.spec_from_file_location("megatron_cpu_shim", SHIM)
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


prepare()

import torch  # noqa: E402
from data import Batches, load_text  # noqa: E402
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from model import HAVE_TE, build_chunk, on_gpu, transformer_config  # noqa: E402


def start_distributed(args, parser: Parser):
    """Initialize torch.distributed, and make megatron-core's process groups.

    Args:
        args: The script's options.
        parser: Prints a usage error and ends the script if --context needs a Transformer Engine
            that is not installed.
    """
    if args.context > 1 and not HAVE_TE:
        parser.error(f"--context {args.context} needs Transformer Engine, which is not installed")
    if not torch.distributed.is_initialized():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("nccl" if on_gpu() else "gloo")
    parallel_state.initialize_model_parallel(
        args.tensor,
        args.pipeline,
        args.virtual_pipeline if args.virtual_pipeline > 1 else None,
        context_parallel_size=args.context,
        expert_model_parallel_size=args.expert,
        num_distributed_optimizer_instances=args.instances,
        order=args.order,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)


def build(args):
    """Return the model's configuration, its chunks on this rank, and their optimizer.

    Each chunk is in megatron-core's DistributedDataParallel.
    """
    config = transformer_config(args)
    chunks = config.virtual_pipeline_model_parallel_size
    chunk_numbers = range(chunks) if chunks else [None]
    modules = [build_chunk(config, args, number).cuda() for number in chunk_numbers]
    if args.dtype == "bf16":
        from megatron.core.transformer.module import Float16Module

        modules = [Float16Module(config, module) for module in modules]
    gathers = args.overlap and args.distributed_optimizer
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=args.overlap,
        bucket_size=args.bucket_size,
        overlap_param_gather=gathers,
        use_distributed_optimizer=args.distributed_optimizer,
        num_distributed_optimizer_instances=args.instances,
    )
    models = [
        DistributedDataParallel(config, ddp_config, module, disable_bucketing=index > 0)
        for index, module in enumerate(modules)
    ]
    overlap_option = {}
    if gathers and hasattr(OptimizerConfig, "overlap_param_gather"):
        overlap_option["overlap_param_gather"] = True
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=args.lr,
        weight_decay=0.0,
        adam_beta2=0.95,
        clip_grad=args.clip,
        bf16=args.dtype == "bf16",
        params_dtype=config.params_dtype,
        use_distributed_optimizer=args.distributed_optimizer,
        **overlap_option,
    )
    optimizer = get_megatron_optimizer(optimizer_config, models)
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if args.overlap:
        no_sync_functions = [model.no_sync for model in models]
        # megatron-core expects a list only if there are several chunks.
        config.no_sync_func = no_sync_functions if len(models) > 1 else no_sync_functions[0]
    return config, models, optimizer


def loss_of(labels, losses):
    """Return the mean loss of a micro-batch, as megatron-core's schedules expect it.

    The schedule multiplies the loss by the context-parallel size, so it is divided here. The reported loss is
    a clone, because the schedule changes the other in place.
    """
    loss = losses.float().mean()
    reported = {"loss": loss.detach().clone()}
    return loss / parallel_state.get_context_parallel_world_size(), reported


def context_parallel_part(tensor):
    """Return this context-parallel rank's two chunks of a tensor [batch, sequence].

    One chunk is from the front half of the sequence, the other is its mirror image from the back. So
    attention costs all ranks the same.
    """
    rank = parallel_state.get_context_parallel_rank()
    size = parallel_state.get_context_parallel_world_size()
    chunks = tensor.chunk(2 * size, dim=1)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim=1)


def forward_step(batches, model):
    """Run the forward pass of a micro-batch; megatron-core's schedules call this function.

    Returns:
        The output of this rank's part of the model, and a function that computes the loss from it.
    """
    tokens, labels = (tensor.cuda() for tensor in next(batches))
    sequence = tokens.shape[1]
    positions = torch.arange(sequence, device=tokens.device).expand_as(tokens)
    all_pairs = torch.ones(1, 1, sequence, sequence, dtype=torch.bool, device=tokens.device)
    mask = all_pairs.triu(1)  # True: a later token, which is not attended to
    batch = {"tokens": tokens, "labels": labels, "positions": positions}
    if parallel_state.get_context_parallel_world_size() > 1:
        batch = {name: context_parallel_part(tensor) for name, tensor in batch.items()}
    output = model(batch["tokens"], batch["positions"], mask, labels=batch["labels"])
    return output, functools.partial(loss_of, batch["labels"])


def train_step(args, batches, step, config, models, optimizer) -> tuple[float, float]:
    """Run one optimizer step.

    Returns:
        The loss of the global batch and the gradient norm, on every rank.
    """
    for model in models:
        model.zero_grad_buffer()
    optimizer.zero_grad()
    data = [batches.step(step) for _ in models]
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data if len(models) > 1 else data[0],
        model=models if len(models) > 1 else models[0],
        num_microbatches=args.micro_batches,
        seq_length=args.sequence,
        micro_batch_size=args.micro_batch,
        forward_only=False,
    )
    is_applied, norm, _ = optimizer.step()
    assert is_applied, "only a loss scaler skips steps, and there is none"
    loss = torch.zeros(1, device=torch.cuda.current_device())
    if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        loss += torch.stack([report["loss"] for report in reports]).mean()
        torch.distributed.all_reduce(
            loss, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
        )
        loss /= parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    last_stage = parallel_state.get_pipeline_model_parallel_last_rank()
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    torch.distributed.broadcast(loss, last_stage, group=pipeline)
    return loss.item(), float(norm or 0.0)


def state(models, optimizer, step: int, loading: bool) -> dict:
    """Return the content of a checkpoint, as megatron-core's sharded state.

    It can be loaded by a job that splits the model in another way.

    Args:
        models: This rank's model chunks, one for each virtual pipeline stage.
        optimizer: Megatron-core's optimizer.
        step: Number of finished steps.
        loading: False: the state is to be saved. True: the state is the target of a load. Then the
            optimizer allocates its state first, because a load fills existing tensors.
    """
    inner = getattr(optimizer, "chained_optimizers", [optimizer])[0]
    options = {}
    if "metadata" in inspect.signature(inner.sharded_state_dict).parameters:  # since 0.13
        options["metadata"] = {"distrib_optim_sharding_type": "fully_reshardable"}
    chunks = {
        f"model{index}": model.module.sharded_state_dict() for index, model in enumerate(models)
    }
    model_state = chunks["model0"] if len(models) == 1 else chunks
    return {
        **chunks,
        "optimizer": optimizer.sharded_state_dict(model_state, is_loading=loading, **options),
        "step": step,
    }


def identity(args) -> dict:
    """Return the settings that a checkpoint and the job that resumes it must share."""
    data_ranks = int(os.environ["WORLD_SIZE"]) // (args.tensor * args.pipeline * args.context)
    names = (
        "layers",
        "hidden",
        "heads",
        "experts",
        "sequence",
        "tied",
        "dtype",
        "distributed_optimizer",
        "seed",
    )
    return {name: getattr(args, name) for name in names} | {
        "global_batch": args.micro_batch * args.micro_batches * data_ranks
    }


def save(args, models, optimizer, step: int):
    """Write a checkpoint under args.save, a folder that all nodes must share."""
    if args.overlap and args.distributed_optimizer:
        # Without this, the new weights would be gathered during the next forward pass only.
        for model in models:
            model.start_param_sync(force_sync=True)
    folder = Path(args.save) / f"step{step}"
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    dist_checkpointing.save(state(models, optimizer, step, loading=False), str(folder))
    if torch.distributed.get_rank() == 0:
        latest = json.dumps({"step": step, **identity(args)}, indent=1)
        (Path(args.save) / "latest.json").write_text(latest + "\n")


def resume(args, models, optimizer, parser: Parser) -> int:
    """Load the latest checkpoint under args.load, and return the number of its step.

    Args:
        args: The script's options.
        models: This rank's model chunks, one for each virtual pipeline stage. Weights are loaded.
        optimizer: Megatron-core's optimizer. Its state is loaded.
        parser: Prints a usage error and ends the script if the checkpoint does not exist, is of a
            job with other settings, or already has args.steps steps.
    """
    file = Path(args.load) / "latest.json"
    if not file.is_file():
        parser.error(f"--load {args.load}: no checkpoint of this script there (no latest.json)")
    saved = json.loads(file.read_text())
    for name, value in identity(args).items():
        if saved.get(name) != value:
            parser.error(
                f"--load {args.load}: saved with {name} {saved.get(name)}, but this job has {name} {value}"
            )
    if saved["step"] >= args.steps:
        parser.error(
            f"--load {args.load}: the checkpoint has {saved['step']} steps, --steps {args.steps} leaves "
            f"nothing to do"
        )
    loaded = dist_checkpointing.load(
        state(models, optimizer, 0, loading=True), str(Path(args.load) / f"step{saved['step']}")
    )
    for index, model in enumerate(models):
        model.module.load_state_dict(loaded[f"model{index}"])
    optimizer.load_state_dict(loaded["optimizer"])
    return loaded["step"]


def describe(args, models, batches) -> str:
    """Return a line that describes how the model is split and how large it is.

    It also has the tokens of a step beside those of the whole training text, and the seconds since
    the script has begun (STARTED). All ranks must call this function together.
    """
    layers = torch.zeros(args.pipeline, dtype=torch.long, device=torch.cuda.current_device())
    # DistributedDataParallel wraps the model. With bf16, Float16Module wraps it inside, too.
    modules = [model.module.module if args.dtype == "bf16" else model.module for model in models]
    stage = parallel_state.get_pipeline_model_parallel_rank()
    layers[stage] = sum(len(module.decoder.layers) for module in modules)
    torch.distributed.all_reduce(layers, group=parallel_state.get_pipeline_model_parallel_group())
    parameters = sum(param.numel() for model in models for param in model.parameters())
    tokens = batches.data_ranks * args.micro_batches * args.micro_batch * args.sequence
    return (
        f"{os.environ['WORLD_SIZE']} processes: tensor {args.tensor} x pipeline {args.pipeline} x"
        f" data {batches.data_ranks}, stages of {'+'.join(map(str, layers.tolist()))} layers;"
        f" {parameters / 1e6:.2f} M parameters on rank 0, {args.dtype}; "
        f"{tokens:,} tokens a step of the text's {len(batches.text):,}; ready after "
        f"{time.time() - STARTED:.1f} s"
    )


def train(args, parser: Parser) -> list[dict]:
    """Train up to step args.steps, save checkpoints, and print a summary on rank 0.

    Training starts at step 0, or with --load after the last step of that checkpoint.

    Args:
        args: The script's options.
        parser: Prints a usage error and ends the script if an option does not fit the text, the
            checkpoint or the installed packages.

    Returns:
        An entry for each step, as in the log file.
    """
    from tqdm import tqdm

    start_distributed(args, parser)
    config, models, optimizer = build(args)
    rank = torch.distributed.get_rank()
    try:
        batches = Batches(
            load_text(),
            args.sequence,
            args.micro_batch,
            args.micro_batches,
            parallel_state.get_data_parallel_world_size(),
            parallel_state.get_data_parallel_rank(),
            args.seed,
        )
    except ValueError as error:
        parser.error(f"--sequence {args.sequence}: {error}")
    first = resume(args, models, optimizer, parser) if args.load else 0
    line = describe(args, models, batches)
    if rank == 0:
        print(line, flush=True)
    tokens = batches.data_ranks * args.micro_batches * args.micro_batch * args.sequence
    entries = []
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(
            tqdm(
                total=args.steps,
                initial=first,
                unit="step",
                disable=rank != 0,
                dynamic_ncols=True,
                mininterval=0.1 if sys.stderr.isatty() else 10,
            )
        )
        log = (
            stack.enter_context(open(args.log, "a" if args.load else "w"))
            if args.log and rank == 0
            else None
        )
        for step in range(first, args.steps):
            begin = time.perf_counter()
            loss, norm = train_step(args, batches, step, config, models, optimizer)
            seconds = time.perf_counter() - begin
            entries.append(
                {
                    "step": step + 1,
                    "loss": loss,
                    "grad_norm": norm,
                    "seconds": seconds,
                    "tokens_per_second": tokens / seconds,
                }
            )
            bar.set_postfix_str(f"loss {loss:.4f}", refresh=False)
            bar.update()
            if log:
                print(json.dumps(entries[-1]), file=log, flush=True)
            is_last = step + 1 == args.steps
            is_due = args.save_every and (step + 1) % args.save_every == 0
            if args.save and (is_last or is_due):
                save(args, models, optimizer, step + 1)
    if rank == 0:
        median = statistics.median(entry["seconds"] for entry in entries)
        first, last = entries[0]["loss"], entries[-1]["loss"]
        print(
            f"{len(entries)} steps: loss {first:.4f} -> {last:.4f}, median step {median:.4f} s, "
            f"{tokens / median:,.0f} tokens/s",
            flush=True,
        )
    return entries


if __name__ == "__main__":
    train(*parse_args())
    torch.distributed.destroy_process_group()
