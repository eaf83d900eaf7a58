"""Reports training steps, passes and process groups of DeepSpeed's engines to other modules of holmes.

telemetry   (runtime/measure/telemetry.py) records when each training step begins and ends, and the purpose of
            each process group. The watchdog reads these records, too.
adapt       (holmes_ext/adapt) changes the plan while the job runs, by measured times. Before a training step
            it may change the number of micro-batches in flight of each pipeline stage: those whose
            forward pass has begun, and whose backward pass has not ended.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.patches import registry
from holmes_ext.patches.deepspeed.features import ADAPT, STAGE_LINKS, TELEMETRY
from holmes_ext.patches.deepspeed.p2p import grid_sizes
from holmes_ext.patches.deepspeed.profile import gradient_bytes, layers_of_stage
from holmes_ext.patches.deepspeed.stage_links import unsupported
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import Call, by_name, inside, with_session
from holmes_ext.plan.sizes import Sizes
from holmes_ext.runtime import hooks
from holmes_ext.runtime.backend import backend_of, network_api_of
from holmes_ext.runtime.measure import telemetry
from holmes_ext.runtime.measure.stage import Stage
from holmes_ext.runtime.session import Session

#: Dimensions of a tensor of token numbers: micro-batch and sequence.
TOKEN_DIMENSIONS = 2


@by_name
def _train_batch(call: Call, instance: Any) -> Any:
    """Run a training step of DeepSpeed's pipeline engine, and record when it begins and ends.

    This wrapper runs in place of PipelineEngine.train_batch; call() runs the original.
    """
    recorder = telemetry.recorder
    if recorder is None:
        return call()  # DeepSpeed's train_batch
    recorder.step_begins()
    result = call()
    tokens = _tokens_of_batch(instance)
    # "engine" is the source of this report. After it, the recorder ignores less reliable sources, such as
    # the step() of torch's optimizer.
    recorder.step_done("engine", tokens)
    return result


def _tokens_of_batch(engine: Any) -> int:
    """Return the number of tokens in the latest batch of all ranks, or 0 if it is not known.

    It is known on the first pipeline stage if the input of the model is a tensor of token numbers, i.e. of
    integers in the shape [micro-batch size, sequence length].
    """
    try:
        first = engine.pipe_buffers["inputs"][0]  # the inputs of a micro-batch
        tensor = first[0] if isinstance(first, (tuple, list)) else first
        is_token_numbers = tensor.dim() == TOKEN_DIMENSIONS and not tensor.is_floating_point()
        if not is_token_numbers or not engine.is_first_stage():
            return 0
        sequence_length = tensor.shape[1]
        sequences = engine.train_batch_size()  # of all ranks
        return sequences * sequence_length
    except (AttributeError, KeyError, IndexError, TypeError):
        return 0  # the input is something else; telemetry must not stop the training


@by_name
def _engine_step(call: Call, instance: Any) -> Any:
    """Run DeepSpeedEngine.step(), and record the end of a training step if the weights were updated.

    A program calls DeepSpeedEngine.step() after every micro-batch. Only the call at a gradient accumulation
    boundary updates the weights and ends a training step.
    """
    recorder = telemetry.recorder
    if recorder is None:
        return call()
    # Read before step(): it goes on to the next micro-batch.
    ends_step = instance.is_gradient_accumulation_boundary()
    result = call()
    if ends_step:
        recorder.step_done("engine")
    return result


@by_name
def _report_sizes(call: Call, instance: Any) -> Any:
    """Report the pipeline, tensor and data-parallel sizes to the telemetry.

    This wrapper runs in place of the constructor of DeepSpeed's PipelineParallelGrid. call() runs
    the constructor, which computes the sizes. The telemetry derives the purpose of each process
    group from them.
    """
    call()
    sizes = Sizes(
        pipeline=instance.pipe_parallel_size,
        tensor=instance.model_parallel_size,
        data=instance.data_parallel_size,
    )
    telemetry.learn_sizes(sizes)


def _describe_stage(engine: Any) -> Stage:
    """Describe this rank's pipeline stage, for the decision how many micro-batches are in flight.

    A micro-batch is in flight on a stage from its forward pass to its backward pass. More of them
    hide slower messages between stages, and need more memory.
    """
    import deepspeed

    module = engine.module
    grid = engine.grid
    try:
        layers = layers_of_stage(module)
    except HolmesError:
        # The model has no transformer blocks. Each stage counts as one, with the number of the stage.
        layers = [(engine.stage_id, layer) for layer in module.forward_funcs]
    stages = {grid.stage_to_global(stage_id=stage): stage for stage in range(engine.num_stages)}
    return Stage(
        framework=f"deepspeed {deepspeed.__version__}",
        stage=engine.stage_id,
        tensor=grid.model_parallel_size,
        micro_batches=engine.micro_batches,
        gradient_bytes=gradient_bytes(layers),
        stages=stages,  # rank -> stage, for one rank of each stage
    )


@with_session
@by_name
def _exec_schedule(current: Session, call: Call, instance: Any, pipe_schedule: Any) -> Any:
    """Let extensions change the planned number of micro-batches in flight, then run the training step.

    This wrapper runs in place of PipelineEngine._exec_schedule; call() runs the original.

    A micro-batch is in flight from its forward pass to its backward pass. The extension holmes_ext/adapt
    measures steps, and replaces the plan in the session if another number is faster. The wrapper of
    stage_links.py, inside call(), replaces DeepSpeed's schedule by one with the planned number. The
    extensions are not called:

    - if stage_links.py does not replace the schedule of this step
    - if the plan lists every pass (--holmes-schedule): this fixes the number
    """
    from deepspeed.runtime.pipe.schedule import TrainSchedule

    if not registry().is_on(STAGE_LINKS.name):  # the patches of stage_links.py
        return call()  # DeepSpeed's _exec_schedule
    network_api = network_api_of(backend_of())
    if not network_api:  # the backend is neither gloo nor NCCL
        return call()
    is_training = type(pipe_schedule) is TrainSchedule

    # Why stage_links.py cannot replace the schedule, or None.
    reason_against = unsupported(instance)
    if not is_training or reason_against:
        return call()
    sizes = grid_sizes(current, instance.grid)
    lists_passes = bool(current.plan_for(sizes).traffic_of(network_api).schedule)
    if not lists_passes:
        # Calls the extensions. One that starts to measure in this step reads the stage of this rank by
        # describe(). Later it may put a new plan into `current`, on all ranks in the same step.
        hooks.on_step(
            current,
            sizes,
            instance.micro_batches,
            network_api,
            describe=lambda: _describe_stage(instance),
        )
    return call()


_PIPE = "deepspeed.runtime.pipe.engine:PipelineEngine"

PATCHES = (
    Patch(
        TELEMETRY,
        f"{_PIPE}.train_batch",
        "a training step of the pipeline engine begins and ends here",
        _train_batch,
    ),
    Patch(
        TELEMETRY,
        "deepspeed.runtime.engine:DeepSpeedEngine.step",
        "a training step of the plain engine ends here",
        _engine_step,
    ),
    *(
        Patch(
            TELEMETRY,
            f"{_PIPE}._exec_{kind}_pass",
            "the trace shows forward and backward passes",
            inside(partial(telemetry.span, kind)),
        )
        for kind in ("forward", "backward")
    ),
    Patch(
        TELEMETRY,
        "deepspeed.runtime.pipe.topology:PipelineParallelGrid.__init__",
        "process groups are named by the sizes of the pipeline",
        _report_sizes,
        parameters=("topology",),
    ),
    Patch(ADAPT, f"{_PIPE}._exec_schedule", "a training step begins here", _exec_schedule),
)
