"""Reduces gradients in DeepSpeed's pipeline engine while the last backward pass of a step runs.

DeepSpeed's engine accumulates gradients over all micro-batches and reduces them after the last backward pass.
Gradients become final one after another during that pass. Here they are collected in buckets, and each bucket
is sent when all its gradients are final. The end of a step, in the engine's instructions:

    BackwardPass        of the last micro-batch: buckets 0, 1, 2, ... are sent
    ReduceTiedGrads     As in DeepSpeed: gradients of weights that two stages share are summed over the two.
    ReduceGrads         These gradients are sent in the last bucket. Then the stage waits for all buckets.
                        DeepSpeed would reduce all gradients here.
    OptimizerStep

Exception: CUDA_DEVICE_MAX_CONNECTIONS=1 gives a GPU a single hardware queue. In it, a bucket that waits for
the previous bucket holds up the backward pass. The stages before this one then wait longer for their
gradients. Therefore all stages but the first send their buckets after the backward pass, before
ReduceTiedGrads.

The sums are those of DeepSpeed: the same group, dtype and divisors. Only the division into buckets differs.
gradients.py finds the gradients that the optimizer will read.
"""

from __future__ import annotations

import weakref
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.patches.deepspeed.features import OVERLAP
from holmes_ext.patches.deepspeed.gradients import gradients_of
from holmes_ext.patches.deepspeed.p2p import grid_sizes
from holmes_ext.patches.deepspeed.versions import read_by_version
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import Call, by_name
from holmes_ext.runtime import session
from holmes_ext.runtime.backend import backend_of, one_hardware_queue
from holmes_ext.runtime.session import tell
from holmes_ext.words import tell_user

_ONE_QUEUE = (
    "CUDA_DEVICE_MAX_CONNECTIONS=1: the gradients of all stages but the first are sent after their last "
    "backward pass, which they would delay in the single hardware queue"
)
#: DeepSpeed's pipeline engine -> its overlapped reduction; None if DeepSpeed's own reduction is used.
_overlaps: weakref.WeakKeyDictionary[Any, _Overlap | None] = weakref.WeakKeyDictionary()


def unsupported(engine: Any) -> str | None:
    """Return why the gradient reduction of this DeepSpeed engine cannot overlap with its backward pass.

    Return None if it can. All ranks get the same answer.
    """
    from deepspeed.runtime.pipe.engine import PipelineEngine

    optimizer = engine.optimizer
    name = type(optimizer).__name__
    is_supported_wrapper = name in (
        "BF16_Optimizer",
        "FP16_Optimizer",
        "FP16_UnfusedOptimizer",
        "DeepSpeedZeroOptimizer",
    )
    is_plain_optimizer = optimizer is engine.basic_optimizer  # of torch, without a wrapper
    is_zero = name == "DeepSpeedZeroOptimizer"
    reasons = {  # reason -> True if it applies
        f"the engine is a {type(engine).__name__}, whose schedule is its own": type(engine)
        is not PipelineEngine,
        "the optimizer reduces gradients itself": not engine.pipeline_enable_backward_allreduce,
        f"the optimizer is a {name}": not is_plain_optimizer and not is_supported_wrapper,
        f"ZeRO stage {int(engine.zero_optimization_stage())}": engine.zero_optimization_stage() > 1,
        "mixture-of-experts layers": bool(engine.has_moe_layers),
        "expert parallelism": getattr(engine, "_autoep_folding_spec", None) is not None,
        "sparse gradients": any(
            getattr(module, "sparse", False) for module in engine.module.modules()
        ),
        "sequence parallelism": engine.sequence_parallel_size != 1,
        "torch_autocast": read_by_version("torch_autocast", engine),
        "the optimizer's state is offloaded": bool(engine.zero_use_cpu_optimizer()),
        "ZenFlow": read_by_version("zenflow", engine),
        "DeepCompile": read_by_version("deepcompile", engine),
        # ZeRO then sums the gradients of the micro-batches in another tensor than the parameter's
        # .grad. The reduction during the backward pass would send a .grad without the earlier
        # micro-batches.
        "ZeRO 1 accumulates beside the gradients": is_zero
        and read_by_version("sums_outside_grad", optimizer),
    }
    for reason, applies in reasons.items():
        if applies:
            return reason
    return None


class _Overlap:
    """Gradient reduction of one DeepSpeed pipeline engine that runs during its last backward pass."""

    def __init__(self, engine: Any):
        """Prepare a gradient reduction that overlaps with the last backward pass of a pipeline engine.

        The parameters are read later, by prepare().

        Args:
            engine: The pipeline engine, as a weak proxy.
        """
        self.engine = engine
        # Finds the gradients that the optimizer reads, and says how DeepSpeed would divide and sum
        # them.
        self.optimizer_gradients = gradients_of(engine)
        self.reducer: Any = None  # a GradientReducer that sends the buckets; made by prepare()
        self.backwards_left = 0  # backward passes until the end of the batch; 0 in evaluation

        # In a single hardware queue, a bucket blocks the kernels of the backward pass that come
        # after it. The stages before this one then wait longer for their gradients. So all stages
        # but the first hold their buckets back until the backward pass has ended.
        one_queue = engine.device.type == "cuda" and one_hardware_queue() and engine.num_stages > 1
        self.holds_buckets = one_queue and engine.stage_id > 0
        current = session.active()  # None if this process was started without holmes
        if one_queue and current is not None:
            tell(current, _ONE_QUEUE, once=True)

    @property
    def armed(self) -> bool:
        """True from the start of the last backward pass until the reduction has ended."""
        return self.reducer is not None and self.reducer.armed

    def prepare(self) -> None:
        """Make the reducer that averages gradients in buckets during a backward pass.

        An existing reducer is used again if the same parameters are trained. Otherwise a new one
        replaces it, for example after a layer was frozen. Its arguments follow DeepSpeed's
        settings, so that the averages are those of DeepSpeed's own reduction.
        """
        # Imported here, where torch has been loaded already.
        from holmes_ext.runtime.reduce.reducer import GradientReducer

        engine = self.engine
        gradients = self.optimizer_gradients
        # The parameters to reduce. gradients.reduces() tells whether DeepSpeed reduces a parameter.
        trained = [
            (name, parameter)
            for name, parameter in engine.module.named_parameters()
            if parameter.requires_grad and parameter.numel() and gradients.reduces(parameter)
        ]
        if self.reducer is not None:
            is_same_set = self.reducer.covers(parameter for _, parameter in trained)
            if is_same_set:
                return
            self.reducer.close()  # other parameters are trained now: remove the old reducer's hooks
        tied_weights = [weight for weight, _ in engine.module.get_tied_weights_and_groups()]
        self.reducer = GradientReducer(
            trained,
            engine.mpu.get_data_parallel_group(),
            average=engine.gradient_average,  # False: the sum over the ranks
            predivide=gradients.predivide(engine.dp_world_size),  # divisor before the sum
            gradient=gradients.gradient,  # parameter -> the gradient that the optimizer reads
            communication_dtype=gradients.communication_dtype,
            # A function: parameter -> list of (elements, rank), one for each part of the gradient
            # that only one rank needs. None: every rank needs all gradients, by an all-reduce.
            owners=gradients.owners(),
            deferred=tied_weights,  # sent last, after they have been summed over their stages
        )


def overlap_of(engine: Any) -> _Overlap | None:
    """Return the overlapped gradient reduction of a DeepSpeed engine, or None if DeepSpeed's own is used.

    Overlapped means that it runs during the last backward pass of a step. The first call decides:

    - Without a plan, every stage overlaps its reduction with the backward pass.
    - With a plan, a stage overlaps it if the plan says so.
    - If the engine does not support the overlap, no stage has it. Rank 0 then prints the reason.

    Raises:
        HolmesError: The option --holmes-require overlap is set, but the engine does not support it.
    """
    if engine in _overlaps:
        return _overlaps[engine]
    current = session.active()  # the plan and the options; None if holmes is off

    # True for each stage that is to overlap. A stage without data parallelism reduces nothing.
    wanted = [engine.is_data_parallel] * engine.num_stages
    if current is not None and engine.is_data_parallel:
        # The planned gradient reduction of each pipeline stage.
        planned_reductions = current.stages(grid_sizes(current, engine.grid), backend_of())
        wanted = [reduction.overlap for reduction in planned_reductions]
    reason = None
    if any(wanted):
        reason = _reason_against_overlap(engine, current)
    if reason:
        if current is not None and "overlap" in current.options.required_features:
            problem = "DeepSpeed's gradient reduction cannot be overlapped"
            raise HolmesError(f"--holmes-require overlap: {problem}: {reason}")
        if engine.global_rank == 0:
            tell_user(
                f"the gradient reduction is not overlapped, DeepSpeed's own is used: {reason}"
            )
    is_overlapped = wanted[engine.stage_id] and not reason
    overlap = None
    if is_overlapped:
        # A proxy: _overlaps has weak keys. If a value referred to the engine, its key, the entry
        # would keep the engine alive for ever.
        overlap = _Overlap(weakref.proxy(engine))
    _overlaps[engine] = overlap
    return overlap


def _reason_against_overlap(engine: Any, current: session.Session | None) -> str | None:
    """Return why the gradient reduction of this engine is not overlapped with its backward pass, or None.

    The reason is a feature of the engine that does not allow it, or the user's setting overlap_comm=false in
    DeepSpeed's configuration. With --holmes-overlap on, the setting does not count: ds_config.py has printed
    that the option contradicts it.
    """
    reason = unsupported(engine)
    if reason:
        return reason
    if current is not None and current.options.overlap == "auto":
        # _param_dict is ds_config as the user wrote it, without DeepSpeed's defaults.
        zero = engine._config._param_dict.get("zero_optimization", {})
        if zero.get("overlap_comm") is False:
            return "zero_optimization.overlap_comm is false"
    return None


@by_name
def _start_countdown(call: Call, instance: Any, pipe_schedule: Any) -> Any:
    """Set the number of backward passes until the gradients of a batch are final, then run the batch.

    The number is the number of micro-batches in training, and 0 in evaluation. The patched function is
    DeepSpeed's _exec_schedule. It runs all instructions of a batch.
    """
    from deepspeed.runtime.pipe.schedule import TrainSchedule

    if instance.optimizer is None:  # evaluation only
        return call()
    overlap = overlap_of(instance)  # None if DeepSpeed's own reduction is used
    if overlap is not None:
        is_training = isinstance(pipe_schedule, TrainSchedule)
        # _run_backward counts down from this number.
        overlap.backwards_left = instance.micro_batches if is_training else 0
    return call()


@by_name
def _run_backward(call: Call, instance: Any) -> Any:
    """Run one backward pass. If it is the last one of the batch, reduce gradients at the same time.

    This wrapper runs in place of PipelineEngine._exec_backward_pass; call() runs the original. DeepSpeed
    accumulates gradients over the micro-batches, so each becomes final in the last backward pass.
    An object called the reducer averages them in buckets over the data-parallel ranks. It sends a
    bucket as soon as all gradients in it are final.
    """
    overlap = overlap_of(instance)  # None if DeepSpeed's own reduction is used
    if overlap is None:
        return call()  # DeepSpeed's _exec_backward_pass
    overlap.backwards_left -= 1  # _start_countdown has set it to the number of micro-batches
    if overlap.backwards_left != 0:
        return call()
    overlap.prepare()  # makes the reducer
    # With hold=True, no bucket is sent before _send_held_buckets runs.
    overlap.reducer.arm(hold=overlap.holds_buckets)
    # BF16_Optimizer has float32 sums of gradients. Inside last_backward(), each gradient is added to its sum
    # when its bucket is sent.
    with overlap.optimizer_gradients.last_backward():
        return call()


@by_name
def _send_held_buckets(call: Call, instance: Any) -> Any:
    """Send gradients that the last backward pass held back, then let DeepSpeed sum tied gradients.

    Tied gradients are those of weights that two pipeline stages share. This wrapper runs instead of
    DeepSpeed's _exec_reduce_tied_grads, the first instruction after the backward pass. call() runs
    the original: it sums the tied gradients.

    Normally a bucket of gradients is sent while the backward pass goes on. With a single hardware
    queue (CUDA_DEVICE_MAX_CONNECTIONS=1), a send would block the later kernels of the backward
    pass. Therefore this stage holds its buckets back until the backward pass has ended. The sum of
    tied gradients may wait for the other stage. The buckets are sent first, so that they travel in
    that time.
    """
    overlap = _overlaps.get(instance)  # None if DeepSpeed's own reduction is used
    # armed: _run_backward has started the reduction of this batch, and it has not ended yet
    if overlap is not None and overlap.armed:
        overlap.reducer.release()  # sends the held buckets; does nothing if none was held back
    return call()  # DeepSpeed's _exec_reduce_tied_grads


@by_name
def _finish_reduction(call: Call, instance: Any) -> Any:
    """Wait until the gradients that were sent during the backward pass are reduced on all ranks.

    This replaces DeepSpeed's _exec_reduce_grads: that would reduce all gradients now. Only gradients of tied
    weights are still sent here: the instruction before has summed them over their stages.
    """
    overlap = _overlaps.get(instance)
    # armed: _run_backward has started the reduction of this batch, and it has not ended yet
    if overlap is None or not overlap.armed:
        return call()  # DeepSpeed's own reduction
    # DeepSpeed passes no arguments here. The next line raises if a later DeepSpeed does.
    call.refuse_unread_arguments()
    overlap.reducer.finish()  # sends the last gradients, and waits
    # ZeRO 1: collect the gradients of this rank's partition, as DeepSpeed does after its own reduction.
    overlap.optimizer_gradients.after_reduction()
    return None  # like DeepSpeed's _exec_reduce_grads


_ENGINE = "deepspeed.runtime.pipe.engine:PipelineEngine"

PATCHES = (
    Patch(
        OVERLAP,
        f"{_ENGINE}._exec_schedule",
        "a batch begins here; the backward passes are counted from then on",
        _start_countdown,
    ),
    Patch(
        OVERLAP,
        f"{_ENGINE}._exec_backward_pass",
        "the engine reduces nothing before its last backward pass has ended",
        _run_backward,
        parameters=("buffer_id",),
    ),
    Patch(
        OVERLAP,
        f"{_ENGINE}._exec_reduce_tied_grads",
        "gradients that were held back are sent before any reduction waits",
        _send_held_buckets,
    ),
    Patch(
        OVERLAP,
        f"{_ENGINE}._exec_reduce_grads",
        "waits for the rest of the reduction, instead of reducing all gradients",
        _finish_reduction,
    ),
)
