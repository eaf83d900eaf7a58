"""Telemetry's and the watchdog's view of a job: torch's process groups, and where the engines' steps begin and end.

Python code reaches the network through the methods of two classes of torch's, so these are the fewest places that see everything:

    dist.all_reduce, send, ... -> ProcessGroup.allreduce, send, ...   an operation starts
                                  Work.wait                           the program waits for one

torch's own C++ (DistributedDataParallel's reducer, functional collectives) goes past them. Without a recorder each costs one look.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from packaging.version import Version

from holmes_ext.patches.engine.patch import Patch, _installed
from holmes_ext.patches.megatron.version import MEGATRON, loaded_version
from holmes_ext.runtime.measure import telemetry

TORCH = "torch>=2.4"
DEEPSPEED = "deepspeed>=0.19,<0.20"
_C10D = "torch.distributed.distributed_c10d"

#: ProcessGroup's method -> (the operation, which argument is the payload). Of an all-gather and a reduce-scatter it is this rank's share.
METHODS = {
    "allreduce": ("all_reduce", 0), "allreduce_coalesced": ("all_reduce", 0), "broadcast": ("broadcast", 0), "reduce": ("reduce", 0),
    "allgather": ("all_gather", 1), "allgather_coalesced": ("all_gather", 1), "gather": ("gather", 1), "scatter": ("scatter", 0),
    "reduce_scatter": ("reduce_scatter", 0), "alltoall": ("all_to_all", 1), "barrier": ("barrier", None),
}  # fmt: skip
#: Those whose names changed.
_BEFORE_213 = {
    "_allgather_base": ("all_gather", 1), "allgather_into_tensor_coalesced": ("all_gather", 1), "_reduce_scatter_base": ("reduce_scatter", 0),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 0), "alltoall_base": ("all_to_all", 1),
}  # fmt: skip
_SINCE_213 = {
    "all_gather_single": ("all_gather", 1), "all_gather_single_coalesced": ("all_gather", 1), "reduce_scatter_single": ("reduce_scatter", 0),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 0), "all_to_all_single": ("all_to_all", 1),
}  # fmt: skip
METHODS |= _SINCE_213 if Version(_installed("torch") or "2.13") >= Version("2.13.0.dev0") else _BEFORE_213
POINT_TO_POINT = {"send": "send", "recv": "receive"}


def _bytes(value: Any) -> int:
    """Of a tensor, or of all in nested lists."""
    return sum(map(_bytes, value)) if isinstance(value, (list, tuple)) else value.nbytes


def _collective(name: str, payload: int | None) -> Callable[[Any], Any]:
    def replace(original: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            recorder = telemetry.recorder
            if recorder is None or payload is not None and len(args) <= payload:
                return original(self, *args, **kwargs)
            op = recorder.launch(self, name, 0 if payload is None else _bytes(args[payload]), None)
            return _started(recorder, op, self, original, args, kwargs)

        return call

    return replace


def _message(name: str) -> Callable[[Any], Any]:
    def replace(original: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            recorder = telemetry.recorder
            if recorder is None or len(args) < 2:
                return original(self, *args, **kwargs)
            op = recorder.launch(self, name, _bytes(args[0]), args[1])
            return _started(recorder, op, self, original, args, kwargs)

        return call

    return replace


def _started(recorder: telemetry.Recorder, op: telemetry.Op, group: Any, original: Any, args: tuple, kwargs: dict) -> Any:
    try:
        work = original(group, *args, **kwargs)
    except BaseException:
        recorder.failed(op)
        raise
    recorder.launched(op, work, group)
    return work


def _wait(original: Any) -> Any:
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = telemetry.recorder
        op = recorder.by_work.get(id(self)) if recorder is not None else None
        if op is None:
            return original(self, *args, **kwargs)
        if op.events is not None and recorder.keeps:
            return _wait_on_stream(op, lambda: original(self, *args, **kwargs))
        start = recorder.clock()
        result = original(self, *args, **kwargs)
        recorder.waited(self, op, start)
        return result

    return wait


def _wait_on_stream(op: telemetry.Op, wait: Callable[[], Any]) -> Any:
    """NCCL: it is the CUDA stream that waits; two events around tell for how long."""
    import torch

    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    result = wait()
    after.record()
    op.waits.append((before, after))
    return result


def _start_coalescing(original: Any) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if telemetry.recorder is not None:
            telemetry.recorder.coalescing[id(self)] = []
        return original(self, *args, **kwargs)

    return call


def _end_coalescing(original: Any) -> Any:
    """The one work of a block stands for its last operation; the others are over with it, as far as one can tell."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        work = original(self, *args, **kwargs)
        recorder = telemetry.recorder
        ops = recorder.coalescing.pop(id(self), []) if recorder is not None else []
        for op in ops[:-1]:
            recorder.finish(op)
        if ops:
            recorder.launched(ops[-1], work, self)
        return work

    return call


def _torch(method: str, replace: Callable[[Any], Any], reason: str, holder: str = "ProcessGroup") -> Patch:
    return Patch(feature="telemetry", target=f"{_C10D}:{holder}.{method}", versions=TORCH, replace=replace, reason=reason)


# --------------------------------------------------------------------------- steps


def _train_batch(wrapped, instance, args, kwargs):
    """PipelineEngine.train_batch is one step."""
    recorder = telemetry.recorder
    if recorder is None:
        return wrapped(*args, **kwargs)
    recorder.step_begins()
    result = wrapped(*args, **kwargs)
    recorder.step_done("engine", _tokens(instance))
    return result


def _tokens(engine: Any) -> int:
    """Tokens of a batch on all ranks, where the first stage's input is whole numbers [batch, sequence]; else 0."""
    try:
        first = engine.pipe_buffers["inputs"][0]
        tensor = first[0] if isinstance(first, (tuple, list)) else first
        whole = tensor.dim() == 2 and not tensor.is_floating_point()
        return engine.train_batch_size() * tensor.shape[1] if whole and engine.is_first_stage() else 0
    except (AttributeError, KeyError, IndexError, TypeError):  # nothing of a trainer's business
        return 0


def _engine_step(wrapped, instance, args, kwargs):
    """DeepSpeedEngine.step outside the pipeline: a step when gradients were accumulated long enough."""
    recorder = telemetry.recorder
    if recorder is None:
        return wrapped(*args, **kwargs)
    boundary = instance.is_gradient_accumulation_boundary()
    result = wrapped(*args, **kwargs)
    if boundary:
        recorder.step_done("engine")
    return result


def _span(kind: str, begins_step: bool = False):
    """A span around one of the framework's functions."""

    def wrapper(wrapped, instance, args, kwargs):
        recorder = telemetry.recorder
        if recorder is None:
            return wrapped(*args, **kwargs)
        if begins_step and not recorder.armed:
            recorder.step_begins(exactly=False)
        start = recorder.clock()
        result = wrapped(*args, **kwargs)
        recorder.span(kind, start, recorder.clock())
        return result

    return wrapper


def _learn_grid(wrapped, instance, args, kwargs):
    """DeepSpeed's sizes, where its grid is made."""
    result = wrapped(*args, **kwargs)
    if telemetry.recorder is not None:
        from holmes_ext.plan.sizes import Sizes

        sizes = Sizes(pipeline=instance.pipe_parallel_size, tensor=instance.model_parallel_size, data=instance.data_parallel_size)
        telemetry.recorder.learn_sizes(sizes)
    return result


def _learn_megatron(wrapped, instance, args, kwargs):
    """megatron-core's sizes; patches/megatron/core.py has read them when this returns."""
    result = wrapped(*args, **kwargs)
    from holmes_ext.patches.megatron.core import job

    if telemetry.recorder is not None and job.sizes is not None:
        telemetry.recorder.learn_sizes(job.sizes)
    return result


def _optimizer_step(wrapped, instance, args, kwargs):
    """megatron-core's optimizer ends a step; a chained one calls others, whose ends are not steps."""
    recorder = telemetry.recorder
    if recorder is None or _inside:
        return wrapped(*args, **kwargs)
    _inside.append(True)
    start = recorder.clock()
    try:
        result = wrapped(*args, **kwargs)
    finally:
        _inside.pop()
    recorder.span("optimizer", start, recorder.clock())
    recorder.step_done("engine")
    return result


_inside: list[bool] = []


def _megatron(target: str, wrap: Callable, reason: str) -> Patch:
    return Patch(feature="telemetry-megatron", target=f"megatron.core.{target}", versions=MEGATRON, version_of=loaded_version, wrap=wrap, reason=reason)


_PIPE = "deepspeed.runtime.pipe.engine:PipelineEngine"
_OPTIMIZER = "optimizer.optimizer:"
_STARTS = "operations are timed, and seen by the watchdog, where torch starts them"

PATCHES = (
    *(_torch(method, _collective(*about), _STARTS) for method, about in METHODS.items()),
    *(_torch(method, _message(name), _STARTS) for method, name in POINT_TO_POINT.items()),
    _torch("_start_coalescing", _start_coalescing, "operations inside a block have no work of their own"),
    _torch("_end_coalescing", _end_coalescing, "the work of a block of operations"),
    _torch("wait", _wait, "what the program waits for is what communication costs it", "Work"),
    Patch("telemetry-deepspeed", f"{_PIPE}.train_batch", DEEPSPEED, "a step of the pipeline engine", _train_batch),
    Patch("telemetry-deepspeed", "deepspeed.runtime.engine:DeepSpeedEngine.step", DEEPSPEED, "a step of the plain engine", _engine_step),
    Patch(
        "telemetry-deepspeed", f"{_PIPE}._exec_forward_pass", DEEPSPEED, "spans of the trace", _span("forward"),
        rebind=(f"{_PIPE}._INSTRUCTION_MAP[ForwardPass]",),
    ),
    Patch(
        "telemetry-deepspeed", f"{_PIPE}._exec_backward_pass", DEEPSPEED, "spans of the trace", _span("backward"),
        rebind=(f"{_PIPE}._INSTRUCTION_MAP[BackwardPass]",),
    ),
    Patch(
        "telemetry-deepspeed", "deepspeed.runtime.pipe.topology:PipelineParallelGrid.__init__", DEEPSPEED,
        "the pipeline's size tells what each group is for", _learn_grid, parameters=("topology",),
    ),
    _megatron("parallel_state:initialize_model_parallel", _learn_megatron, "the job's sizes tell what each group is for"),
    _megatron("pipeline_parallel.schedules:forward_step", _span("forward", True), "spans of the trace; the first one begins a step"),
    _megatron("pipeline_parallel.schedules:backward_step", _span("backward"), "spans of the trace"),
    *(_megatron(f"{_OPTIMIZER}{name}.step", _optimizer_step, "the end of a step") for name in ("MixedPrecisionOptimizer", "FP32Optimizer", "ChainedOptimizer")),
)  # fmt: skip
