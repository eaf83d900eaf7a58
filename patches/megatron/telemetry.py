"""Reports to holmes when training steps and checkpoints of a megatron-core job begin and end.

Three features need this:

    telemetry-megatron    records the steps, and spans in them: forward and backward passes, the optimizer. It
                          also names process groups, by the job's parallel sizes.
    megatron-adapt        changes the number of micro-batches in flight between two steps, if another number
                          is faster by the measured times
    megatron-restart      restarts the job with other layers for each stage after a complete checkpoint of
                          dist_checkpointing, which any split of the layers can load
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from holmes_ext.patches import registry
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import Call, Running, by_name, inside, with_session
from holmes_ext.patches.megatron import core
from holmes_ext.patches.megatron.features import (
    ADAPT,
    OPTIMIZER_STEPS,
    RESTART,
    SCHEDULES,
    STAGE_LINKS,
    TELEMETRY,
    loaded_version,
)
from holmes_ext.patches.megatron.profile import gradient_bytes
from holmes_ext.patches.megatron.stage_links import unsupported_feature
from holmes_ext.runtime import hooks
from holmes_ext.runtime.backend import backend_of, group_ranks, network_api_of
from holmes_ext.runtime.measure import telemetry
from holmes_ext.runtime.measure.stage import Stage
from holmes_ext.runtime.session import Session


@by_name
def _learn_sizes(call: Call, instance: Any) -> Any:
    """Report the job's parallel sizes to the telemetry, which names process groups by them.

    This wrapper runs in place of megatron-core's initialize_model_parallel; call() runs the original. Another
    wrapper of the same function, in core.py, runs inside call(). It computes the sizes from the function's
    arguments, and stores them in core.job.sizes; None if holmes cannot plan the job.
    """
    result = call()
    telemetry.learn_sizes(core.job.sizes)
    return result


@contextmanager
def _recorded_forward_pass() -> Iterator[None]:
    """Record the forward pass of a micro-batch, run inside this context, as a span.

    It is put around megatron-core's forward_step. The first forward pass after an optimizer step
    also begins a new training step in the record.
    """
    recorder = telemetry.recorder
    if (
        recorder is not None and not recorder.is_in_step
    ):  # no step has begun since the last one ended
        recorder.step_begins(exactly=False)  # not exactly: the program may have read data before
    with telemetry.span("forward"):
        yield


#: Optimizers whose step() runs now, the outermost first. A chained optimizer steps others inside its own
#: step().
_optimizers = Running()


@by_name
def _optimizer_step(call: Call, instance: Any) -> Any:
    """Record begin and end of an optimizer's step(), and its end as the end of the training step.

    This wrapper runs in place of step() of each optimizer class; call() runs the original. If an optimizer
    steps others, only the outermost step() is recorded.
    """
    recorder = telemetry.recorder  # None if the telemetry is off
    is_inner_step = bool(_optimizers.instances)  # the step() of another optimizer calls this one
    if recorder is None or is_inner_step:
        return call()
    # A step() inside this one finds `instance` in _optimizers.instances.
    with telemetry.span("optimizer"), _optimizers.listed_as_running(instance):
        result = call()
    # "engine" is the source of this report. After it, the recorder ignores less reliable sources, such as
    # the step() of torch's optimizer that runs inside megatron-core's.
    recorder.step_done("engine")
    return result


def _describe_stage(model: Any, micro_batches: int) -> Stage:
    """Describe this rank's pipeline stage, for the decision how many micro-batches are in flight.

    Args:
        model: The model of this stage.
        micro_batches: Number of micro-batches in a step.
    """
    from megatron.core import parallel_state

    ranks = group_ranks(parallel_state.get_pipeline_model_parallel_group())
    return Stage(
        framework=f"megatron-core {loaded_version()}",
        stage=parallel_state.get_pipeline_model_parallel_rank(),
        tensor=parallel_state.get_tensor_model_parallel_world_size(),
        micro_batches=micro_batches,
        gradient_bytes=gradient_bytes(model),
        stages={rank: stage for stage, rank in enumerate(ranks)},
    )


@with_session
@by_name
def _run_step_with_extensions(
    current: Session,
    call: Call,
    instance: Any,
    model: Any,
    num_microbatches: Any,
    forward_only: Any,
) -> Any:
    """Let extensions change the number of micro-batches in flight, then run the training step.

    This wrapper runs in place of megatron-core's schedule function,
    forward_backward_pipelining_without_interleaving. call() runs that function: one step of the
    1F1B schedule. Before it, the extensions are called. One of them, holmes_ext/adapt, measures
    steps. It changes the number in the plan (current.plan) if another number is faster.

    The schedule function has a second wrapper, in stage_links.py. call() runs that, too: it runs
    the step with the planned number. In jobs where it cannot, the extensions are not called.

    Args:
        model: The model of this rank's stage, or a list of one.
        num_microbatches: Number of micro-batches in the step.
        forward_only: True in evaluation.
    """
    # core.job.sizes has the parallel sizes of the job; None if holmes cannot plan this job.
    if core.job.sizes is None or forward_only:
        return call()
    from megatron.core import parallel_state
    from megatron.core.utils import get_model_config

    group = parallel_state.get_pipeline_model_parallel_group()
    if isinstance(group, list):  # the rank is in several pipelines
        return call()
    network_api = network_api_of(backend_of(group))  # None if the backend is neither gloo nor NCCL
    stage_links_is_on = registry().is_on(STAGE_LINKS.name)  # the patches of stage_links.py
    if not network_api or not stage_links_is_on:
        return call()
    chunk = model[0] if isinstance(model, list) else model

    # A feature of the job that keeps the mailbox from transferring the messages, or None.
    if unsupported_feature(get_model_config(chunk), call.arguments()):
        return call()

    # Calls the extensions. One that starts to measure in this step reads the stage of this rank by
    # describe(). Later it may put a new plan into `current`, on all ranks in the same step.
    hooks.on_step(
        current,
        core.job.sizes,
        num_microbatches,
        network_api,
        describe=lambda: _describe_stage(chunk, num_microbatches),
    )
    return call()


@by_name
def _report_complete_checkpoint(call: Call, instance: Any) -> Any:
    """Note when a checkpoint of dist_checkpointing is complete.

    This wrapper runs in place of megatron.core.dist_checkpointing.save; call() runs the original. An
    asynchronous save returns a request: the checkpoint is complete when the program finalizes the request. A
    synchronous save returns None when the checkpoint is complete.
    """
    request = call()
    if request is None:
        hooks.on_checkpoint()  # the job may now restart from this checkpoint
    else:
        request.add_finalize_fn(hooks.on_checkpoint)
    return request


PATCHES = (
    Patch(
        TELEMETRY,
        "megatron.core.parallel_state:initialize_model_parallel",
        "process groups are named by the parallel sizes of the job",
        _learn_sizes,
    ),
    Patch(
        TELEMETRY,
        f"{SCHEDULES}:forward_step",
        "the trace shows forward passes; the first one begins a step",
        inside(_recorded_forward_pass),
    ),
    Patch(
        TELEMETRY,
        f"{SCHEDULES}:backward_step",
        "the trace shows backward passes",
        inside(partial(telemetry.span, "backward")),
    ),
    *(
        Patch(TELEMETRY, target, "the optimizer ends a training step", _optimizer_step)
        for target in OPTIMIZER_STEPS
    ),
    Patch(
        ADAPT,
        f"{SCHEDULES}:forward_backward_pipelining_without_interleaving",
        "a training step begins here",
        _run_step_with_extensions,
    ),
    Patch(
        RESTART,
        "megatron.core.dist_checkpointing.serialization:save",
        "megatron-core has no callback for a complete checkpoint",
        _report_complete_checkpoint,
    ),
)
