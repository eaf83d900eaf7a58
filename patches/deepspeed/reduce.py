"""DeepSpeed's pipeline engine with its gradient reduction overlapped.

The engine's schedule ends every batch with ReduceTiedGrads, ReduceGrads, OptimizerStep: the network idles
while the last micro-batch's backward runs, and the GPUs while the network works. Under this patch the stage's
gradients leave as they become final:

    schedule   ... BackwardPass m-1 | BackwardPass m           | ReduceTiedGrads | ReduceGrads | OptimizerStep
    stock                           |                          | tied            | everything  |
    here                            | bucket 0, bucket 1, ...  | tied            | tied, last  |
    one queue, not the first stage  |                          | buckets, tied   | tied, last  |

In one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1) a bucket that waits for the one before it holds up the
backward pass, and with it the stages that wait for its gradient; they give the reduction time afterwards.

The sums are the engine's own: same group, same dtype on the wire, same divisors; only the cut into buckets
differs. What is reduced is the gradient where the optimizer reads it: deepspeed_gradients.py.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.patches.deepspeed.features import OVERLAP
from holmes_ext.patches.deepspeed.gradients import gradients_of
from holmes_ext.patches.deepspeed.p2p import engine_sizes
from holmes_ext.patches.deepspeed.versions import ask
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import by_name
from holmes_ext.runtime import session
from holmes_ext.runtime.groups.backend import backend_of, one_hardware_queue
from holmes_ext.runtime.groups.grid import tell

_ONE_QUEUE = (
    "CUDA_DEVICE_MAX_CONNECTIONS=1: the gradients of all stages but the first are sent after their last "
    "backward pass, which they would delay in the single hardware queue"
)
#: engine -> its _Overlap, or None where its configuration is not supported.
_overlaps: weakref.WeakKeyDictionary[Any, _Overlap | None] = weakref.WeakKeyDictionary()


def unsupported(engine: Any) -> str | None:
    """Why this engine's reduction cannot be overlapped, or None; the same on all ranks."""
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
    from deepspeed.runtime.pipe.engine import PipelineEngine
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    kind = type(engine.optimizer)
    known = (BF16_Optimizer, FP16_Optimizer, FP16_UnfusedOptimizer, DeepSpeedZeroOptimizer)
    plain = engine.optimizer is engine.basic_optimizer
    zero = engine.optimizer if kind is DeepSpeedZeroOptimizer else None
    reasons = {
        f"the engine is a {type(engine).__name__}, whose schedule is its own":
            type(engine) is not PipelineEngine,
        "the optimizer reduces gradients itself": not engine.pipeline_enable_backward_allreduce,
        f"the optimizer is a {kind.__name__}": not plain and kind not in known,
        f"ZeRO stage {int(engine.zero_optimization_stage())}": engine.zero_optimization_stage() > 1,
        "mixture-of-experts layers": bool(engine.has_moe_layers),
        "expert parallelism": getattr(engine, "_autoep_folding_spec", None) is not None,
        "sparse gradients": any(getattr(module, "sparse", False) for module in engine.module.modules()),
        "sequence parallelism": engine.sequence_parallel_size != 1,
        "torch_autocast": ask("torch_autocast", engine),
        "the optimizer's state is offloaded": bool(engine.zero_use_cpu_optimizer()),
        "ZenFlow": ask("zenflow", engine),
        "DeepCompile": ask("deepcompile", engine),
        "ZeRO 1 accumulates beside the gradients": zero is not None and ask("accumulates_apart", zero),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


class _Overlap:
    """One engine's reducer, and where in the batch the engine is."""

    def __init__(self, engine: Any):
        from deepspeed.runtime.pipe.schedule import TrainSchedule

        self.engine = engine
        self.schedule_type = TrainSchedule
        self.source = gradients_of(engine)
        self.reducer: Any = None
        self.backwards_left = 0
        one_queue = engine.device.type == "cuda" and one_hardware_queue() and engine.num_stages > 1
        self.holds = one_queue and engine.stage_id > 0
        if one_queue and (current := session.active()):
            tell(current, _ONE_QUEUE, once=_ONE_QUEUE)

    def begin(self, schedule: Any) -> None:
        """A new schedule starts: count its backward passes down; zero: the schedule is not ours."""
        self.backwards_left = self.engine.micro_batches if isinstance(schedule, self.schedule_type) else 0

    def backward(self, run: Callable[[], Any]) -> Any:
        self.backwards_left -= 1
        if self.backwards_left != 0:
            return run()
        self._prepare()
        self.reducer.arm(hold=self.holds)
        with self.source.folding():
            return run()

    def release(self) -> None:
        """ReduceTiedGrads: the last gradient has been sent to the stage before."""
        if self.armed:
            self.reducer.release()

    def reduce(self) -> None:
        """ReduceGrads: launch the tied gradients (summed over the stages by now), wait for all."""
        self.reducer.finish()
        self.source.after()

    @property
    def armed(self) -> bool:
        return self.reducer is not None and self.reducer.armed

    def _prepare(self) -> None:
        """The reducer, anew when the set of trained parameters changed (frozen layers)."""
        named = self.engine.module.named_parameters()
        trained = [(name, p) for name, p in named if p.requires_grad and p.numel() and self.source.reduces(p)]
        if self.reducer is not None:
            if self.reducer.covers(p for _, p in trained):
                return
            self.reducer.close()
        self.reducer = _make_reducer(self.engine, trained, self.source)


def _make_reducer(engine: Any, trained: list[tuple[str, Any]], source: Any) -> Any:
    """One that does the engine's arithmetic (DeepSpeedEngine.allreduce_bucket, ZeRO's average_tensor)."""
    from holmes_ext.runtime.reduce.reducer import GradientReducer  # torch is there by now

    return GradientReducer(
        trained, engine.mpu.get_data_parallel_group(), average=engine.gradient_average,
        predivide=source.predivide(engine.dp_world_size),
        communication_dtype=source.communication_dtype,
        deferred=[weight for weight, _ in engine.module.get_tied_weights_and_groups()],
        gradient=source.gradient,
        owners=source.owners(),
    )


def overlap_of(engine: Any) -> _Overlap | None:
    """The engine's _Overlap; None where the plan does without, or it cannot be overlapped, which is told."""
    if engine not in _overlaps:
        current, wanted = session.active(), _wanted(engine)
        reason = (unsupported(engine) or _refused(engine, current)) if any(wanted) else None
        if reason and current is not None and "overlap" in current.options.required_features:
            what = "DeepSpeed's gradient reduction cannot be overlapped"
            raise HolmesError(f"--holmes-require overlap: {what}: {reason}")
        if reason and engine.global_rank == 0:  # also where the patches are on without a session
            text = f"the gradient reduction is not overlapped, DeepSpeed's own is used: {reason}"
            print(f"holmes: {text}", file=sys.stderr)
        ours = wanted[engine.stage_id] and not reason
        _overlaps[engine] = _Overlap(weakref.proxy(engine)) if ours else None
    return _overlaps[engine]


def _wanted(engine: Any) -> tuple[bool, ...]:
    """For each stage whether its reduction is to be overlapped, as the plan says; without one every one."""
    current = session.active()
    if current is None or not engine.is_data_parallel:
        return (bool(engine.is_data_parallel),) * engine.num_stages
    return tuple(way.overlap for way in current.stages(engine_sizes(current, engine), backend_of()))


def _refused(engine: Any, current: session.Session | None) -> str | None:
    """The user's own setting wins over auto; where --holmes-overlap on contradicts it,
    patches/deepspeed/ds_config.py has said so before."""
    zero = engine._config._param_dict.get("zero_optimization", {})
    automatic = current is not None and current.options.overlap == "auto"
    refused = automatic and zero.get("overlap_comm") is False
    return "zero_optimization.overlap_comm is false" if refused else None


@by_name
def _begin(wrapped, instance, pipe_schedule):
    """_exec_schedule: a batch begins."""
    if instance.optimizer is not None and (overlap := overlap_of(instance)):
        overlap.begin(pipe_schedule)
    return wrapped(pipe_schedule)


def _backward(wrapped, instance, args, kwargs):
    """_exec_backward_pass: the last one of the batch sends gradients as they become final."""
    overlap = overlap_of(instance)
    return overlap.backward(lambda: wrapped(*args, **kwargs)) if overlap else wrapped(*args, **kwargs)


def _reduce_tied(wrapped, instance, args, kwargs):
    """_exec_reduce_tied_grads: buckets that were held leave first, as tied weights wait for another stage."""
    if overlap := _overlaps.get(instance):
        overlap.release()
    return wrapped(*args, **kwargs)


def _reduce(wrapped, instance, args, kwargs):
    """_exec_reduce_grads: only what is still on its way is waited for."""
    overlap = _overlaps.get(instance)
    if overlap is None or not overlap.armed:
        return wrapped(*args, **kwargs)
    return overlap.reduce()


_ENGINE = "deepspeed.runtime.pipe.engine:PipelineEngine"

PATCHES = (
    Patch(OVERLAP, f"{_ENGINE}._exec_schedule",
          "where a batch begins, to know which backward pass is its last", _begin),
    Patch(OVERLAP, f"{_ENGINE}._exec_backward_pass",
          "the engine reduces nothing before its last backward pass has ended", _backward,
          parameters=("buffer_id",), rebind=(f"{_ENGINE}._INSTRUCTION_MAP[BackwardPass]",)),
    Patch(OVERLAP, f"{_ENGINE}._exec_reduce_tied_grads",
          "after the last gradient's send, before any reduction", _reduce_tied,
          rebind=(f"{_ENGINE}._INSTRUCTION_MAP[ReduceTiedGrads]",)),
    Patch(OVERLAP, f"{_ENGINE}._exec_reduce_grads",
          "what is left of the reduction, in place of the whole of it", _reduce,
          rebind=(f"{_ENGINE}._INSTRUCTION_MAP[ReduceGrads]",)),
)  # fmt: skip
