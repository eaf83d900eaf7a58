"""Where megatron-core's steps begin and end, and what its groups are for (as patches/deepspeed/telemetry.py);
and where a checkpoint is whole that loads with other layers on a stage (dist_checkpointing's do)."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import Any

from holmes_ext.patches import registry
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import Running, by_name, inside, with_session
from holmes_ext.patches.megatron import core
from holmes_ext.patches.megatron.edges import unsupported_feature
from holmes_ext.patches.megatron.features import ADAPT, EDGES, RESTART, SCHEDULES, TELEMETRY, loaded_version
from holmes_ext.patches.megatron.joined import OPTIMIZER_STEPS
from holmes_ext.patches.megatron.profile import gradient_bytes
from holmes_ext.runtime.adapt.learning import begin_step
from holmes_ext.runtime.adapt.window import Stage
from holmes_ext.runtime.groups.backend import backend_of, group_ranks, network_api_of
from holmes_ext.runtime.measure import telemetry
from holmes_ext.runtime.start.restart import saved


@by_name
def _learn_sizes(call, instance):
    """Report the job's sizes to the telemetry, which names process groups by them.

    core.py's wrapper of initialize_model_parallel has read them when the call returns.
    """
    result = call()
    telemetry.learn_sizes(core.job.sizes)
    return result


@contextmanager
def _forward():
    """Record the forward pass of one micro-batch as a span, and the first one as the start of a step."""
    recorder = telemetry.recorder
    if recorder is not None and not recorder.armed:
        recorder.step_begins(exactly=False)
    with telemetry.span("forward"):
        yield


#: Optimizers whose step() is running. A chained optimizer steps others, whose ends are no ends of a step.
_optimizers = Running()


@by_name
def _optimizer_step(call, instance):
    """Record the outermost optimizer's step as a span, and its end as the end of the training step."""
    recorder = telemetry.recorder
    if recorder is None or _optimizers.instances:
        return call()
    with telemetry.span("optimizer"):
        with _optimizers.on(instance):
            result = call()
    recorder.step_done("engine")
    return result


def _stage(model: Any, micro_batches: int) -> Stage:
    from megatron.core import parallel_state

    ranks = group_ranks(parallel_state.get_pipeline_model_parallel_group())
    return Stage(
        f"megatron-core {loaded_version()}", parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(), micro_batches, gradient_bytes(model),
        {rank: stage for stage, rank in enumerate(ranks)},
    )  # fmt: skip


@with_session
@by_name
def _schedule(current, call, instance, model, num_microbatches, forward_only):
    """Let the number of micro-batches in flight adapt to measured times, before a training step begins.

    Only steps that edges.py runs can change that number: those of the 1F1B schedule, if the mailbox supports
    the configuration.
    """
    if core.job.sizes is None or forward_only:
        return call()
    from megatron.core import parallel_state
    from megatron.core.utils import get_model_config

    group = parallel_state.get_pipeline_model_parallel_group()
    if isinstance(group, list):  # a rank with several pipelines
        return call()
    network_api = network_api_of(backend_of(group))
    if not network_api or not registry().is_on(EDGES.name):
        return call()
    chunk = model[0] if isinstance(model, list) else model
    if unsupported_feature(get_model_config(chunk), call.arguments()):
        return call()
    begin_step(
        current,
        core.job.sizes,
        num_microbatches,
        network_api,
        lambda: _stage(chunk, num_microbatches),
    )
    return call()


@by_name
def _save(call, instance):
    """Note that a checkpoint is complete, when dist_checkpointing.save or its background writing ends.

    An asynchronous save returns a request, which the program finalizes once the files are written.
    """
    request = call()
    if request is None:
        saved()
    else:
        request.add_finalize_fn(saved)
    return request


PATCHES = (
    Patch(TELEMETRY, "megatron.core.parallel_state:initialize_model_parallel",
          "the job's sizes tell what each group is for", _learn_sizes),
    Patch(TELEMETRY, f"{SCHEDULES}:forward_step", "spans of the trace; the first one begins a step",
          inside(_forward)),
    Patch(TELEMETRY, f"{SCHEDULES}:backward_step", "spans of the trace",
          inside(partial(telemetry.span, "backward"))),
    *(Patch(TELEMETRY, target, "the end of a step", _optimizer_step) for target in OPTIMIZER_STEPS),
    Patch(ADAPT, f"{SCHEDULES}:forward_backward_pipelining_without_interleaving",
          "where a step of training begins", _schedule),
    Patch(RESTART, "megatron.core.dist_checkpointing.serialization:save",
          "no callback tells that a checkpoint is whole", _save),
)  # fmt: skip
