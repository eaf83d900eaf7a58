"""Where megatron-core's steps begin and end, and what its groups are for: telemetry and the watchdog look on."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import inside
from holmes_ext.patches.megatron.core import job
from holmes_ext.patches.megatron.features import TELEMETRY
from holmes_ext.runtime.measure import telemetry


def _learn_sizes(wrapped, instance, args, kwargs):
    """patches/megatron/core.py has read them when initialize_model_parallel returns."""
    result = wrapped(*args, **kwargs)
    telemetry.learn_sizes(job.sizes)
    return result


@contextmanager
def _forward():
    """One micro-batch; the first one begins a step."""
    recorder = telemetry.recorder
    if recorder is not None and not recorder.armed:
        recorder.step_begins(exactly=False)
    with telemetry.span("forward"):
        yield


def _optimizer_step(wrapped, instance, args, kwargs):
    """The end of a step; a chained optimizer calls others, whose ends are not steps."""
    recorder = telemetry.recorder
    if recorder is None or _inside:
        return wrapped(*args, **kwargs)
    _inside.append(True)
    try:
        with telemetry.span("optimizer"):
            result = wrapped(*args, **kwargs)
    finally:
        _inside.pop()
    recorder.step_done("engine")
    return result


_inside: list[bool] = []
_SCHEDULES = "megatron.core.pipeline_parallel.schedules:"
_OPTIMIZERS = ("MixedPrecisionOptimizer", "FP32Optimizer", "ChainedOptimizer")

PATCHES = (
    Patch(
        TELEMETRY, "megatron.core.parallel_state:initialize_model_parallel",
        "the job's sizes tell what each group is for", _learn_sizes,
    ),
    Patch(TELEMETRY, f"{_SCHEDULES}forward_step", "spans of the trace; the first one begins a step", inside(_forward)),
    Patch(TELEMETRY, f"{_SCHEDULES}backward_step", "spans of the trace", inside(partial(telemetry.span, "backward"))),
    *(Patch(TELEMETRY, f"megatron.core.optimizer.optimizer:{name}.step", "the end of a step", _optimizer_step)
      for name in _OPTIMIZERS),
)  # fmt: skip
