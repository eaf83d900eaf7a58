"""Lets jobs that train with DeepSpeed join other jobs: they train the same model and exchange weights.

Joined jobs (--holmes-join) each make training steps of their own. After a number of steps, the outer training
(join) averages their progress and writes new weights. For that it needs from DeepSpeed:

- the float32 weights that the optimizer of this rank updates
- the end of each step that changed the weights; a step may be skipped because gradients overflow
- a way to bring the model's own weights up to date after new weights were written:

    optimizer            float32 weights that a rank updates        after they were written
    ZeRO 0, float32      the parameters themselves                  nothing to do
    ZeRO 0, fp16         flat buffers of all parameters             copy them to the parameters
    bf16, ZeRO 1 and 2   a part of each flat buffer                 copy and all-gather (update_lp_params)
    ZeRO 3               a part of each parameter                   copy; parameters that stay gathered are
                                                                    gathered again

A job may have other data-parallel sizes and ZeRO stages than the jobs that it joins. Offloading, experts and
ZeRO++'s hpZ are refused, because they have not been tested.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from holmes_ext.join import training
from holmes_ext.join.settings import OuterSettings
from holmes_ext.patches.deepspeed.checkpoints import tag_of
from holmes_ext.patches.deepspeed.features import JOINED
from holmes_ext.patches.deepspeed.versions import offsets, read_by_version
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import by_name
from holmes_ext.words import tell_user


@by_name
def _reserve(call, instance):
    """Register the DeepSpeed engine as the object whose steps are training steps, then make its optimizer.

    DeepSpeed's optimizers contain a torch optimizer and call its step() once, to allocate its state. Without
    the registration, that call would count as a training step of a joined job, i.e. of a job that exchanges
    weights with other jobs.
    """
    # Only the first object in the process that calls reserve() or claim() is registered.
    training.reserve(instance)
    return call()  # DeepSpeedEngine._configure_optimizer


@by_name
def _take_model_step(call, instance):
    """Run DeepSpeed's optimizer step, and count it for the exchange of weights with other jobs.

    Before the first step of the training engine, this job connects to the other jobs. A step that
    DeepSpeed skips because gradients overflow is not counted.

    Args:
        call: Runs the wrapped DeepSpeedEngine._take_model_step with its arguments.
        instance: The DeepSpeed engine.
    """
    # Only the steps of one optimizer or engine of a process are counted: the first object for
    # which claim() is called. claim() returns whether that is this engine; it returns False in a job
    # that trains alone. Before the first step, claim() also connects to the other jobs; for that, it
    # calls _adapter().
    is_training_step = training.claim(instance, lambda: _adapter(instance))
    result = call()  # DeepSpeedEngine._take_model_step; sets _step_applied
    if is_training_step and instance._step_applied:  # not applied: gradients have overflowed
        samples = instance.train_micro_batch_size_per_gpu() * instance.gradient_accumulation_steps()
        training.stepped(samples)
    return result


def _adapter(engine: Any) -> training.FrameworkAdapter:
    """Return the functions by which the exchange with other jobs reads and writes an engine's weights."""
    from deepspeed.accelerator import get_accelerator

    return training.FrameworkAdapter(
        name="DeepSpeed",
        weights=lambda: _weights(engine),
        device=lambda: get_accelerator().current_device_name(),
        optimizer=engine.optimizer,
        # The outer training calls this after it has changed weights.
        written=lambda: _update_model_weights(engine),
        # Numbers of pipeline stages and tensor-parallel ranks: must be the same in all joined jobs.
        agreed={"sizes": _sizes(engine)},
        # Called before this job connects to the others. Returns the reason why it cannot exchange
        # weights with these settings, such as "experts are not supported"; None: it can.
        refusal=lambda settings: refusal(engine, settings),
    )


#: DeepSpeed's optimizers that contain a torch optimizer, and that _pieces() handles.
_KINDS = (
    "DeepSpeedZeroOptimizer",
    "DeepSpeedZeroOptimizer_Stage3",
    "BF16_Optimizer",
    "FP16_Optimizer",
)


def refusal(engine: Any, settings: OuterSettings) -> str | None:
    """Return why a job with this DeepSpeed engine cannot exchange weights with other jobs, or None if it can.

    Args:
        engine: The DeepSpeed engine.
        settings: Settings of the exchange between jobs (--holmes-outer).
    """
    from torch.optim import Optimizer

    optimizer = engine.optimizer
    kind = type(optimizer).__name__
    if engine.has_moe_layers:
        return "experts are not supported"
    if any(
        getattr(optimizer, name, False)
        for name in ("cpu_offload", "offload_optimizer", "offload_param")
    ):
        return "offloaded optimizer states and parameters are not supported"
    if engine.zero_hpz_partition_size() > 1:
        return "hpZ (zero_hpz_partition_size) is not supported"
    is_known_optimizer = isinstance(optimizer, Optimizer) or kind in _KINDS
    if not is_known_optimizer or not hasattr(optimizer, "param_groups"):
        return f"its optimizer {kind} is not supported"
    has_tied_layers = bool(getattr(engine.module, "tied_comms", None))
    # A weight can have copies on several stages or ranks. Not all settings keep the copies equal.
    return training.refusal_of_copies(settings, _sizes(engine), has_tied_layers)


#: Names of an axis in the methods of DeepSpeed's grid and others' mpu, before "_world_size" or "_rank".
_AXES = {
    "pipe": ("get_pipe_parallel", "get_pipeline_model_parallel"),
    "model": ("get_slice_parallel", "get_tensor_model_parallel", "get_model_parallel"),
}


def _call_grid(engine: Any, axis: str, suffix: str, default: int) -> int:
    """Return the size of an axis of the model-parallel grid, or this process's rank on it.

    The grid is engine.grid (pipeline engines), or else engine.mpu (Megatron's).

    Args:
        engine: The DeepSpeed engine.
        axis: "pipe" (pipeline) or "model" (tensor-parallel).
        suffix: "world_size" or "rank".
        default: The result if the grid has no such method.
    """
    grid = getattr(engine, "grid", None) or engine.mpu  # engine.grid: of a pipeline engine
    for prefix in _AXES[axis]:
        method = getattr(grid, f"{prefix}_{suffix}", None)
        if method is not None:
            return int(method())
    return default


def _sizes(engine: Any) -> dict[str, int]:
    return {
        "pipeline": _call_grid(engine, "pipe", "world_size", default=1),
        "tensor": _call_grid(engine, "model", "world_size", default=1),
    }


def _weights(engine: Any) -> training.WeightShards:
    """Return the float32 weights that this rank's optimizer updates, as flat views of its buffers.

    With ZeRO, these are shards of parameters. So the result also has the names and whole shapes of all
    parameters that the ranks at this pipeline stage and tensor-parallel position update together.

    Args:
        engine: The DeepSpeed engine.
    """
    name_of = {parameter: name for name, parameter in engine.module.named_parameters()}
    updated = set()  # parameters that the ranks of this position update together
    parts = []  # (name, index of the first element in the parameter, view of the elements)
    addresses = []  # (view, address of its first element)
    for piece in _pieces(engine.optimizer):
        updated.add(piece.parameter)
        if piece.values.numel():
            parts.append((name_of[piece.parameter], piece.first, piece.values.detach()))
            addresses.append((piece.values, piece.values.data_ptr()))
    tensors = []  # name, shape, dtype
    for parameter, name in name_of.items():
        if parameter in updated:
            shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO 3: the whole shape
            tensors.append((name, tuple(shape), "float32"))
    pipeline = _call_grid(engine, "pipe", "rank", default=0)
    tensor = _call_grid(engine, "model", "rank", default=0)

    def has_moved() -> bool:
        """Return whether DeepSpeed has moved the weights to other memory since _weights() was called."""
        return any(view.data_ptr() != address for view, address in addresses)

    return training.WeightShards(
        position=f"pipeline {pipeline}, tensor {tensor}",
        tensors=tensors,
        parts=parts,
        moved=has_moved,
    )


class _Piece(NamedTuple):
    """Consecutive elements of a parameter that this rank's optimizer updates."""

    parameter: Any
    first: int  # index of the first of these elements in the flattened parameter
    values: Any  # flat float32 view of the elements in the optimizer's buffer; may be empty


def _pieces(optimizer: Any) -> Iterator[_Piece]:
    """Yield, for each parameter of a DeepSpeed optimizer, the elements that this rank updates.

    ZeRO and BF16_Optimizer divide the elements among the data-parallel ranks. With other optimizers each rank
    updates all elements.
    """
    import deepspeed.comm as dist

    kind = type(optimizer).__name__
    if kind == "DeepSpeedZeroOptimizer":  # ZeRO 1 and 2
        # For each group: the index of each parameter's first element in the group's flat buffer.
        # From 0.19.7 on, DeepSpeed has padding between parameters of ZeRO 1 and 2. So the indices
        # are read from the optimizer; read_by_version() knows where the installed release has them.
        starts_of_groups = read_by_version("offsets", optimizer)
        groups = zip(optimizer.round_robin_bit16_groups, optimizer.single_partition_of_fp32_groups)
        for i, (group, partition) in enumerate(groups):
            rank = dist.get_rank(group=optimizer.real_dp_process_group[i])
            begin = rank * partition.numel()  # the partitions of all ranks have the same size
            yield from _pieces_of_buffer(group, starts_of_groups[i], partition, begin)
    elif kind == "BF16_Optimizer":
        groups = zip(optimizer.bf16_groups, optimizer.fp32_groups_flat_partition)
        for i, (group, partition) in enumerate(groups):
            rank = dist.get_rank(group=optimizer.real_dp_process_group[i])
            begin = rank * partition.numel()
            # offsets(): the same indices, added up from the parameters' sizes. This optimizer and
            # FP16_Optimizer have no padding between parameters.
            yield from _pieces_of_buffer(group, offsets(group), partition, begin)
    elif kind == "DeepSpeedZeroOptimizer_Stage3":
        for group, partition in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat):
            yield from _pieces_of_zero_3(group, partition)
    elif kind == "FP16_Optimizer":
        for group, buffer in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat):
            yield from _pieces_of_buffer(group, offsets(group), buffer, begin=0)
    else:  # torch's optimizer: it updates the model's own weights
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    yield _Piece(parameter, first=0, values=parameter.detach().view(-1))


def _pieces_of_buffer(
    parameters: list[Any], starts: list[int], partition: Any, begin: int
) -> Iterator[_Piece]:
    """Yield, for each parameter in a flat buffer, the elements in this rank's partition of the buffer.

    Args:
        parameters: The parameters in the buffer.
        starts: For each parameter, the index of its first element in the buffer.
        partition: A contiguous part of the buffer: the elements that this rank updates.
        begin: Index of the first element of the partition in the buffer.
    """
    end = begin + partition.numel()
    for parameter, start in zip(parameters, starts):
        # The overlap of parameter and partition, as indices in the buffer.
        piece_begin = max(start, begin)
        piece_end = min(start + parameter.numel(), end)
        if piece_begin < piece_end:
            values = partition.narrow(0, piece_begin - begin, piece_end - piece_begin)
        else:
            values = partition.narrow(0, 0, 0)  # empty: the parameter is in other ranks' partitions
        yield _Piece(parameter, first=piece_begin - start, values=values)


def _pieces_of_zero_3(parameters: list[Any], partition: Any) -> Iterator[_Piece]:
    """Yield, for each parameter, the elements that this rank updates under ZeRO 3.

    ZeRO 3 divides each parameter into equal parts for the data-parallel ranks. The last parts may be padded:
    they have fewer elements of the parameter, or none.

    Args:
        parameters: The parameters in the buffer, in order.
        partition: Flat buffer with this rank's part of each parameter, one after the other.
    """
    import deepspeed.comm as dist

    position = 0  # of the part in the buffer
    for parameter in parameters:
        part_length = parameter.partition_numel()
        first = dist.get_rank(group=parameter.ds_process_group) * part_length  # of this rank's part
        length = max(0, min(part_length, parameter.ds_numel - first))  # without padding
        values = partition.narrow(0, position, length)
        yield _Piece(parameter, first=min(first, parameter.ds_numel), values=values)
        position += part_length


def _update_model_weights(engine: Any) -> None:
    """Bring the model's weights up to date after the optimizer's float32 weights were changed.

    All data-parallel ranks must call this function, because some optimizers gather weights from all of them.
    """
    optimizer = engine.optimizer
    kind = type(optimizer).__name__
    if kind in ("DeepSpeedZeroOptimizer", "BF16_Optimizer"):
        optimizer.update_lp_params()  # copies the float32 weights, and gathers all partitions
    elif kind == "DeepSpeedZeroOptimizer_Stage3":
        # As in the optimizer's step(): a parameter that is still gathered would not be gathered again.
        optimizer._partition_all_parameters()
        for group in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        persistent = optimizer.persistent_parameters  # small parameters that stay gathered
        if persistent:
            persistent[0].all_gather(persistent)
    elif kind == "FP16_Optimizer":  # each rank has all float32 weights
        for piece in _pieces(optimizer):
            piece.parameter.data.copy_(piece.values.view(piece.parameter.shape))


@by_name
def _save(call, instance, save_dir, tag):
    """Save a DeepSpeed checkpoint, and the outer-training state of each rank in a file beside it.

    The outer training exchanges weights with other jobs. If this job trains alone, no file is written
    for it.

    Args:
        call: Runs the wrapped DeepSpeedEngine.save_checkpoint with its arguments.
        instance: The DeepSpeed engine.
        save_dir: Folder of the checkpoints.
        tag: Name of the checkpoint; None: DeepSpeed's default.
    """
    result = call()  # DeepSpeedEngine.save_checkpoint
    state = training.joined_state_dict()  # None if this job trains alone
    if state is not None:
        import torch

        tag = tag or f"global_step{instance.global_steps}"  # DeepSpeed's default
        torch.save(state, _file(save_dir, tag, instance))
    return result


@by_name
def _load(call, instance, load_dir, tag):
    """Load a DeepSpeed checkpoint, and the state of the outer training that was saved with it.

    The outer training exchanges weights with other jobs. If the job trained alone when the checkpoint was
    saved, there is no such state. Then this job joins the other jobs like a new job.

    Args:
        call: Runs the wrapped DeepSpeedEngine.load_checkpoint with its arguments.
        instance: The DeepSpeed engine.
        load_dir: Folder of the checkpoints.
        tag: Name of the checkpoint; None: the latest.

    Returns:
        Result of load_checkpoint(): path of the checkpoint, or None, and the program's own state.
    """
    path, client_state = call()  # DeepSpeedEngine.load_checkpoint
    loaded_nothing = path is None
    trains_alone = not training.is_requested()  # without the option --holmes-join
    if loaded_nothing or trains_alone:
        return path, client_state
    file = _file(load_dir, tag_of(load_dir, tag), instance)  # written by _save for this rank
    if file.exists():
        import torch

        training.load_joined_state_dict(
            torch.load(file, map_location="cpu", weights_only=True), str(file)
        )
    elif instance.global_rank == 0:
        text = "holds no outer state: the job joins like a new one"
        tell_user(f"{file.parent} {text}")
    return path, client_state


def _file(directory: str, tag: str | None, engine: Any) -> Path:
    return Path(directory, str(tag), f"holmes_outer_rank_{engine.global_rank}.pt")


_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
PATCHES = (
    Patch(
        JOINED,
        f"{_ENGINE}._configure_optimizer",
        "its optimizers step while they are made",
        _reserve,
    ),
    Patch(
        JOINED,
        f"{_ENGINE}._take_model_step",
        "a real step is where rounds begin and end",
        _take_model_step,
    ),
    Patch(JOINED, f"{_ENGINE}.save_checkpoint", "outer state belongs to the checkpoint", _save),
    Patch(JOINED, f"{_ENGINE}.load_checkpoint", "outer state belongs to the checkpoint", _load),
)
