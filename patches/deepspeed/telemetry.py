"""Where the steps of DeepSpeed's engines begin and end, and what its groups are for: telemetry, the watchdog
and the plan that learns look on. A step's messages have all come when it ends (edges.py), so any step may
begin with another number of micro-batches in flight."""

from __future__ import annotations

from functools import partial
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.patches import registry
from holmes_ext.patches.deepspeed.edges import unsupported
from holmes_ext.patches.deepspeed.features import ADAPT, EDGES, TELEMETRY
from holmes_ext.patches.deepspeed.p2p import grid_sizes
from holmes_ext.patches.deepspeed.profile import gradient_bytes, own_layers
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import by_name, inside, with_session
from holmes_ext.plan.sizes import Sizes
from holmes_ext.runtime.adapt.learning import begin_step
from holmes_ext.runtime.adapt.window import Stage
from holmes_ext.runtime.groups.backend import backend_of, network_api_of
from holmes_ext.runtime.measure import telemetry


@by_name
def _train_batch(call, instance):
    """Record the start and the end of a training step of the pipeline engine."""
    recorder = telemetry.recorder
    if recorder is None:
        return call()
    recorder.step_begins()
    result = call()
    recorder.step_done("engine", _tokens(instance))
    return result


def _tokens(engine: Any) -> int:
    """Of a batch on all ranks, where the first stage's input is whole numbers [batch, sequence]; else 0."""
    try:
        first = engine.pipe_buffers["inputs"][0]
        tensor = first[0] if isinstance(first, (tuple, list)) else first
        whole = tensor.dim() == 2 and not tensor.is_floating_point()
        return engine.train_batch_size() * tensor.shape[1] if whole and engine.is_first_stage() else 0
    except (AttributeError, KeyError, IndexError, TypeError):  # nothing of a trainer's business
        return 0


@by_name
def _engine_step(call, instance):
    """Record the end of a training step of the plain engine.

    A program calls DeepSpeedEngine.step() after every micro-batch; only the call at a gradient accumulation
    boundary updates the weights. That is asked first, because step() moves on to the next micro-batch.
    """
    recorder = telemetry.recorder
    ends_step = recorder is not None and instance.is_gradient_accumulation_boundary()
    result = call()
    if recorder is not None and ends_step:
        recorder.step_done("engine")
    return result


@by_name
def _learn_grid(call, instance):
    """Report the sizes of DeepSpeed's grid to the telemetry, which names process groups by them."""
    call()
    sizes = Sizes(
        pipeline=instance.pipe_parallel_size,
        tensor=instance.model_parallel_size,
        data=instance.data_parallel_size,
    )
    telemetry.learn_sizes(sizes)


def _stage(engine: Any) -> Stage:
    import deepspeed

    module, grid = engine.module, engine.grid
    try:
        layers = own_layers(module)
    except HolmesError:  # no class of layers repeats: a stage is one block
        layers = [(engine.stage_id, layer) for layer in module.forward_funcs]
    stages = {grid.stage_to_global(stage_id=stage): stage for stage in range(engine.num_stages)}
    return Stage(f"deepspeed {deepspeed.__version__}", engine.stage_id, grid.model_parallel_size,
                 engine.micro_batches, gradient_bytes(layers), stages)


@with_session
@by_name
def _exec_schedule(current, call, instance, pipe_schedule):
    """Let the number of micro-batches in flight adapt to measured times, before a training step begins.

    Only steps that edges.py schedules can change that number: training with DeepSpeed's own schedule class,
    and a plan that does not list every pass (--holmes-passes).
    """
    from deepspeed.runtime.pipe.schedule import TrainSchedule

    if not registry().is_on(EDGES.name):
        return call()
    network_api = network_api_of(backend_of())
    if not network_api or type(pipe_schedule) is not TrainSchedule or unsupported(instance):
        return call()
    sizes = grid_sizes(current, instance.grid)
    lists_passes = bool(current.plan_for(sizes).traffic_of(network_api).passes)
    if not lists_passes:
        begin_step(current, sizes, instance.micro_batches, network_api, lambda: _stage(instance))
    return call()


_PIPE = "deepspeed.runtime.pipe.engine:PipelineEngine"

PATCHES = (
    Patch(TELEMETRY, f"{_PIPE}.train_batch", "a step of the pipeline engine", _train_batch),
    Patch(TELEMETRY, "deepspeed.runtime.engine:DeepSpeedEngine.step", "a step of the plain engine",
          _engine_step),
    *(Patch(TELEMETRY, f"{_PIPE}._exec_{kind}_pass", "spans of the trace",
            inside(partial(telemetry.span, kind)))
      for kind in ("forward", "backward")),
    Patch(TELEMETRY, "deepspeed.runtime.pipe.topology:PipelineParallelGrid.__init__",
          "the pipeline's size tells what each group is for", _learn_grid, parameters=("topology",)),
    Patch(ADAPT, f"{_PIPE}._exec_schedule", "where a step of training begins", _exec_schedule),
)  # fmt: skip
