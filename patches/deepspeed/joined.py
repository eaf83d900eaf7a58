"""Joined jobs of DeepSpeed's engines: after each real step of the engine, on the weights that its optimizer
keeps in float32.

    stage 0, float32     the parameters themselves, on every rank      nothing to bring up to date
    stage 0, fp16        FP16_Optimizer's flat groups, on every rank   copied to the parameters
    bf16, ZeRO 1 and 2   this rank's partition of each flat group      update_lp_params(): copy and all-gather
    ZeRO 3               this rank's partition of each parameter       copied to what is gathered in the next
                                                                       forward; what persists is gathered now

The row is the model's parameters in its own order: neither data-parallel size nor stage matter. A step that
overflow skips leaves engine._step_applied false. What is not tried is refused: offload, experts, hpZ.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holmes_ext.patches.deepspeed.checkpoints import tag_of
from holmes_ext.patches.deepspeed.features import JOINED
from holmes_ext.patches.deepspeed.versions import offsets, read_by_version
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import by_name
from holmes_ext.runtime.outer import training
from holmes_ext.runtime.outer.settings import OuterSettings
from holmes_ext.words import tell_user


@by_name
def _reserve(call, instance):
    """Register the engine as the one whose steps count, before DeepSpeed constructs its optimizer.

    DeepSpeed's optimizers step the torch optimizer inside them once, with gradients of zero, to allocate its
    state. Registered first, that inner optimizer's step is not taken for a training step.
    """
    training.reserve(instance)
    return call()


@by_name
def _take_model_step(call, instance):
    """Join the outer training before the first step, and count every step that changed the weights.

    Both the plain and the pipeline engine take their optimizer's step in _take_model_step. It sets
    `_step_applied` to False when gradients overflow and the optimizer skips the step.
    """
    counts = training.claim(instance, lambda: _adapter(instance))
    result = call()
    if counts and instance._step_applied:
        samples = instance.train_micro_batch_size_per_gpu() * instance.gradient_accumulation_steps()
        training.stepped(samples)
    return result


def _adapter(engine: Any) -> training.FrameworkAdapter:
    from deepspeed.accelerator import get_accelerator

    return training.FrameworkAdapter(
        "DeepSpeed", lambda: _weights(engine), lambda: get_accelerator().current_device_name(),
        lambda: _written(engine), {"sizes": _sizes(engine)}, lambda settings: refusal(engine, settings),
    )  # fmt: skip


#: DeepSpeed's optimizers around a torch optimizer that are known here.
_KINDS = ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3", "BF16_Optimizer", "FP16_Optimizer")


def refusal(engine: Any, settings: OuterSettings) -> str | None:
    from torch.optim import Optimizer

    optimizer, kind = engine.optimizer, type(engine.optimizer).__name__
    if engine.has_moe_layers:
        return "experts are not supported"
    if any(getattr(optimizer, name, False) for name in ("cpu_offload", "offload_optimizer", "offload_param")):
        return "offloaded optimizer states and parameters are not supported"
    if engine.zero_hpz_partition_size() > 1:
        return "hpZ (zero_hpz_partition_size) is not supported"
    if not hasattr(optimizer, "param_groups") or not isinstance(optimizer, Optimizer) and kind not in _KINDS:
        return f"its optimizer {kind} is not supported"
    return training.refusal_of_copies(settings, _sizes(engine),
                                      bool(getattr(engine.module, "tied_comms", None)))


#: What DeepSpeed's grid and others' mpu call an axis, before "_world_size" or "_rank".
_AXES = {"pipe": ("get_pipe_parallel", "get_pipeline_model_parallel"),
         "model": ("get_slice_parallel", "get_tensor_model_parallel", "get_model_parallel")}


def _of_axis(engine: Any, axis: str, what: str, otherwise: int) -> int:
    grid = getattr(engine, "grid", None) or engine.mpu
    names = [name for prefix in _AXES[axis] if hasattr(grid, name := f"{prefix}_{what}")]
    return int(getattr(grid, names[0])()) if names else otherwise


def _sizes(engine: Any) -> dict[str, int]:
    return dict(zip(("pipeline", "tensor"), (_of_axis(engine, axis, "world_size", 1) for axis in _AXES)))


def _weights(engine: Any) -> training.WeightShards:
    named = {p: name for name, p in engine.module.named_parameters()}
    parts, seen, places = [], set(), []
    for p, first, flat in _pieces(engine.optimizer):
        seen.add(p)
        if flat.numel():
            parts.append((named[p], first, flat.detach()))
            places.append((flat, flat.data_ptr()))
    tensors = [(name, tuple(getattr(p, "ds_shape", p.shape)), "float32") for p, name in named.items()
               if p in seen]
    pipeline, tensor = (_of_axis(engine, axis, "rank", 0) for axis in _AXES)
    return training.WeightShards(f"pipeline {pipeline}, tensor {tensor}", tensors, parts,
                                 lambda: any(flat.data_ptr() != at for flat, at in places))


def _pieces(optimizer: Any) -> Iterator[tuple[Any, int, Any]]:
    """Each parameter that is stepped, the first element and a flat view of what this rank steps of it."""
    import deepspeed.comm as dist

    kind = type(optimizer).__name__
    if kind == "DeepSpeedZeroOptimizer":
        flats, places = optimizer.single_partition_of_fp32_groups, read_by_version("offsets", optimizer)
        for i, (group, flat) in enumerate(zip(optimizer.round_robin_bit16_groups, flats)):
            rank = dist.get_rank(group=optimizer.real_dp_process_group[i])
            yield from _cut(group, places[i], flat, rank * flat.numel())
    elif kind == "BF16_Optimizer":
        for i, (group, flat) in enumerate(zip(optimizer.bf16_groups, optimizer.fp32_groups_flat_partition)):
            rank = dist.get_rank(group=optimizer.real_dp_process_group[i])
            yield from _cut(group, offsets(group), flat, rank * flat.numel())
    elif kind == "DeepSpeedZeroOptimizer_Stage3":
        for group, flat in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat):
            place = 0
            for p in group:  # the same number of elements on each rank, the last ones filled up
                length = p.partition_numel()
                first = dist.get_rank(group=p.ds_process_group) * length
                yield p, min(first, p.ds_numel), flat.narrow(0, place,
                                                             max(0, min(length, p.ds_numel - first)))
                place += length
    elif kind == "FP16_Optimizer":
        for group, flat in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat):
            yield from _cut(group, offsets(group), flat, 0)
    else:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    yield p, 0, p.detach().view(-1)


def _cut(group: list[Any], offsets: list[int], flat: Any, begin: int) -> Iterator[tuple[Any, int, Any]]:
    """flat: elements [begin, begin + its length) of the group in which parameters stand at `offsets`."""
    for p, offset in zip(group, offsets):
        a, b = max(offset, begin), min(offset + p.numel(), begin + flat.numel())
        yield p, max(0, a - offset), flat.narrow(0, a - begin if a < b else 0, max(0, b - a))


def _written(engine: Any) -> None:
    """The weights of the next forward pass, from those written. Collective over data-parallel ranks."""
    optimizer, kind = engine.optimizer, type(engine.optimizer).__name__
    if kind in ("DeepSpeedZeroOptimizer", "BF16_Optimizer"):
        optimizer.update_lp_params()
    elif kind == "DeepSpeedZeroOptimizer_Stage3":
        optimizer._partition_all_parameters()  # what is whole is not gathered again: step() does the same
        for group in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        if kept := optimizer.persistent_parameters:
            kept[0].all_gather(kept)
    elif kind == "FP16_Optimizer":
        for p, _, flat in _pieces(optimizer):
            p.data.copy_(flat.view(p.shape))


@by_name
def _save(call, instance, save_dir, tag):
    """Save the state of the outer training in one file per rank, beside DeepSpeed's checkpoint files."""
    result = call()
    state = training.joined_state_dict()
    if state is not None:
        import torch

        tag = tag or f"global_step{instance.global_steps}"  # DeepSpeed's default
        torch.save(state, _file(save_dir, tag, instance))
    return result


@by_name
def _load(call, instance, load_dir, tag):
    """Load the state of the outer training after DeepSpeed loaded its checkpoint.

    A checkpoint without such a file is a job's that trained alone: this job then joins like a new one.
    """
    path, client_state = call()
    if path is None or not training.asked():  # DeepSpeed loaded nothing, or the job trains alone
        return path, client_state
    file = _file(load_dir, tag_of(load_dir, tag), instance)
    if file.exists():
        import torch

        training.load_joined_state_dict(torch.load(file, map_location="cpu", weights_only=True), str(file))
    elif instance.global_rank == 0:
        text = "holds no outer state: the job joins like a new one"
        tell_user(f"{file.parent} {text}")
    return path, client_state


def _file(directory: str, tag: str | None, engine: Any) -> Path:
    return Path(directory, str(tag), f"holmes_outer_rank_{engine.global_rank}.pt")


_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
PATCHES = (
    Patch(JOINED, f"{_ENGINE}._configure_optimizer", "its optimizers step while they are made", _reserve),
    Patch(JOINED, f"{_ENGINE}._take_model_step", "a real step is where rounds begin and end",
          _take_model_step),
    Patch(JOINED, f"{_ENGINE}.save_checkpoint", "outer state belongs to the checkpoint", _save),
    Patch(JOINED, f"{_ENGINE}.load_checkpoint", "outer state belongs to the checkpoint", _load),
)  # fmt: skip
