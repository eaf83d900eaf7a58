"""DeepSpeed's pipeline engine with its gradient reduction overlapped.

In the engine's schedule the network idles while the last micro-batch's backward runs, and the GPUs while the
network works. Under this patch the stage's gradients leave as they become final:

    schedule   ... BackwardPass m-1 | BackwardPass m           | ReduceTiedGrads | ReduceGrads | OptimizerStep
    stock                           |                          | tied            | everything  |
    here                            | bucket 0, bucket 1, ...  | tied            | tied, last  |
    one queue, not the first stage  |                          | buckets, tied   | tied, last  |

In one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1) a bucket that waits for the one before it holds up the
backward pass, and with it the stages that wait for its gradient; they give the reduction time afterwards.

The sums are the engine's own: same group, same dtype on the wire, same divisors; only the cut into buckets
differs. What is reduced is the gradient where the optimizer reads it: gradients.py.
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
from holmes_ext.patches.engine.wrap import by_name
from holmes_ext.runtime import session
from holmes_ext.runtime.groups.backend import backend_of, one_hardware_queue
from holmes_ext.runtime.groups.grid import tell
from holmes_ext.words import tell_user

_ONE_QUEUE = (
    "CUDA_DEVICE_MAX_CONNECTIONS=1: the gradients of all stages but the first are sent after their last "
    "backward pass, which they would delay in the single hardware queue"
)
#: engine -> its _Overlap, or None where its configuration is not supported.
_overlaps: weakref.WeakKeyDictionary[Any, _Overlap | None] = weakref.WeakKeyDictionary()


def unsupported(engine: Any) -> str | None:
    """Why this engine's reduction cannot be overlapped, or None; the same on all ranks."""
    from deepspeed.runtime.pipe.engine import PipelineEngine

    optimizer, kind = engine.optimizer, type(engine.optimizer).__name__
    known = ("BF16_Optimizer", "FP16_Optimizer", "FP16_UnfusedOptimizer", "DeepSpeedZeroOptimizer")
    zero = kind == "DeepSpeedZeroOptimizer"
    reasons = {
        f"the engine is a {type(engine).__name__}, whose schedule is its own":
            type(engine) is not PipelineEngine,
        "the optimizer reduces gradients itself": not engine.pipeline_enable_backward_allreduce,
        f"the optimizer is a {kind}": optimizer is not engine.basic_optimizer and kind not in known,
        f"ZeRO stage {int(engine.zero_optimization_stage())}": engine.zero_optimization_stage() > 1,
        "mixture-of-experts layers": bool(engine.has_moe_layers),
        "expert parallelism": getattr(engine, "_autoep_folding_spec", None) is not None,
        "sparse gradients": any(getattr(module, "sparse", False) for module in engine.module.modules()),
        "sequence parallelism": engine.sequence_parallel_size != 1,
        "torch_autocast": read_by_version("torch_autocast", engine),
        "the optimizer's state is offloaded": bool(engine.zero_use_cpu_optimizer()),
        "ZenFlow": read_by_version("zenflow", engine),
        "DeepCompile": read_by_version("deepcompile", engine),
        "ZeRO 1 accumulates beside the gradients": zero and read_by_version("accumulates_apart", optimizer),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


class _Overlap:
    """One engine's reducer. backwards_left: of the batch, 0 where the schedule is not of training."""

    def __init__(self, engine: Any):
        self.engine = engine
        self.source = gradients_of(engine)
        self.reducer: Any = None
        self.backwards_left = 0
        one_queue = engine.device.type == "cuda" and one_hardware_queue() and engine.num_stages > 1
        self.holds = one_queue and engine.stage_id > 0
        if one_queue and (current := session.active()):
            tell(current, _ONE_QUEUE, once=True)

    @property
    def armed(self) -> bool:
        return self.reducer is not None and self.reducer.armed

    def prepare(self) -> None:
        """A reducer with the engine's arithmetic (DeepSpeedEngine.allreduce_bucket, ZeRO's average_tensor),
        anew when the set of trained parameters changed (frozen layers)."""
        from holmes_ext.runtime.reduce.reducer import GradientReducer  # torch is there by now

        engine, source = self.engine, self.source
        named = engine.module.named_parameters()
        trained = [(name, p) for name, p in named if p.requires_grad and p.numel() and source.reduces(p)]
        if self.reducer is not None:
            if self.reducer.covers(p for _, p in trained):
                return
            self.reducer.close()
        self.reducer = GradientReducer(
            trained, engine.mpu.get_data_parallel_group(), average=engine.gradient_average,
            predivide=source.predivide(engine.dp_world_size), gradient=source.gradient,
            communication_dtype=source.communication_dtype, owners=source.owners(),
            deferred=[weight for weight, _ in engine.module.get_tied_weights_and_groups()])


def overlap_of(engine: Any) -> _Overlap | None:
    """The engine's _Overlap, also without a plan; None where the plan's stage does without, or it cannot be
    overlapped, which is told."""
    if engine not in _overlaps:
        current, wanted = session.active(), [engine.is_data_parallel] * engine.num_stages
        if current is not None and engine.is_data_parallel:
            stages = current.stages(grid_sizes(current, engine.grid), backend_of())
            wanted = [way.overlap for way in stages]
        reason = unsupported(engine) if any(wanted) else None
        # the user's own setting wins over auto; where it contradicts "on", ds_config.py has said so before
        if any(wanted) and not reason and current is not None and current.options.overlap == "auto":
            zero = engine._config._param_dict.get("zero_optimization", {})
            if zero.get("overlap_comm") is False:
                reason = "zero_optimization.overlap_comm is false"
        if reason and current is not None and "overlap" in current.options.required_features:
            what = "DeepSpeed's gradient reduction cannot be overlapped"
            raise HolmesError(f"--holmes-require overlap: {what}: {reason}")
        if reason and engine.global_rank == 0:  # also where the patches are on without a session
            tell_user(f"the gradient reduction is not overlapped, DeepSpeed's own is used: {reason}")
        ours = wanted[engine.stage_id] and not reason
        _overlaps[engine] = _Overlap(weakref.proxy(engine)) if ours else None
    return _overlaps[engine]


@by_name
def _begin(call, instance, pipe_schedule):
    """Count the backward passes of the batch that begins, to recognize the last one.

    DeepSpeed's _exec_schedule runs all instructions of one batch, of training or of evaluation.
    """
    from deepspeed.runtime.pipe.schedule import TrainSchedule

    if instance.optimizer is None:
        return call()
    overlap = overlap_of(instance)
    if overlap is not None:
        is_training = isinstance(pipe_schedule, TrainSchedule)
        overlap.backwards_left = instance.micro_batches if is_training else 0
    return call()


@by_name
def _backward(call, instance):
    """Reduce gradients while the last backward pass of a batch runs.

    DeepSpeed accumulates gradients over the micro-batches and reduces them after the last backward pass. In
    that pass each gradient becomes final, and the reducer sends a bucket as soon as all its gradients are.
    """
    overlap = overlap_of(instance)
    if overlap is None:
        return call()
    overlap.backwards_left -= 1
    if overlap.backwards_left != 0:
        return call()
    overlap.prepare()
    overlap.reducer.arm(hold=overlap.holds)  # hold: buckets wait until the pass has ended
    with overlap.source.folding():
        return call()


@by_name
def _reduce_tied(call, instance):
    """Send the buckets that were held back during the backward pass, then reduce the tied gradients.

    Tied gradients are summed with another stage, which may reach this instruction later. The buckets use
    that time.
    """
    overlap = _overlaps.get(instance)
    if overlap is not None and overlap.armed:
        overlap.reducer.release()
    return call()


@by_name
def _reduce(call, instance):
    """Finish the overlapped reduction, in place of DeepSpeed's reduction of all gradients.

    Gradients of tied weights, which were summed over their stages in the instruction before, are sent now.
    Then the reducer waits for all buckets.
    """
    overlap = _overlaps.get(instance)
    if overlap is None or not overlap.armed:
        return call()
    call.refuse_unread_arguments()
    overlap.reducer.finish()
    overlap.source.after()


_ENGINE = "deepspeed.runtime.pipe.engine:PipelineEngine"

PATCHES = (
    Patch(OVERLAP, f"{_ENGINE}._exec_schedule",
          "where a batch begins, to know which backward pass is its last", _begin),
    Patch(OVERLAP, f"{_ENGINE}._exec_backward_pass",
          "the engine reduces nothing before its last backward pass has ended", _backward,
          parameters=("buffer_id",)),
    Patch(OVERLAP, f"{_ENGINE}._exec_reduce_tied_grads",
          "after the last gradient's send, before any reduction", _reduce_tied),
    Patch(OVERLAP, f"{_ENGINE}._exec_reduce_grads",
          "what is left of the reduction, in place of the whole of it", _reduce),
)  # fmt: skip
