"""--holmes-profile under DeepSpeed's pipeline engine: which instruction is what, which module which layer.

The engine's table of instructions is timed in a copy that only the engine measured sees, and only until the
last step measured. ReduceTiedGrads is always in its schedule: without tied layers the microseconds of nothing
would say that the last stage waits for the first.
"""

from __future__ import annotations

import weakref
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.patches.deepspeed.features import PROFILE
from holmes_ext.patches.deepspeed.partition import class_name, most_frequent
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import by_name, with_session
from holmes_ext.runtime import session
from holmes_ext.runtime.measure.profile_file import publish
from holmes_ext.runtime.measure.profiler import Profiler, profiler

KINDS = {
    "ForwardPass": "forward", "BackwardPass": "backward", "SendActivation": "send", "SendGrad": "send",
    "RecvActivation": "receive", "RecvGrad": "receive", "ReduceTiedGrads": "tied", "ReduceGrads": "reduce",
    "OptimizerStep": "optimizer",
}  # fmt: skip

#: engine -> its profiler, None once the profile is written.
_profilers: weakref.WeakKeyDictionary[Any, Profiler | None] = weakref.WeakKeyDictionary()


def labels_of(module: Any) -> list[str | int]:
    """For each layer spec of the whole model "before", the number of the block, or "after"."""
    names = [class_name(spec) for spec in module._layer_specs]
    blocks = most_frequent(names)
    if blocks is None:
        raise HolmesError(
            "--holmes-profile: no layer class of the model repeats: nothing to measure layer by layer")
    first, last, labels, number = names.index(blocks), len(names) - 1 - names[::-1].index(blocks), [], -1
    for index, name in enumerate(names):
        number += name == blocks
        labels.append("before" if index < first else "after" if index > last else number)
    return labels


def own_layers(module: Any) -> list[tuple[str | int, Any]]:
    """(label, layer) of this stage."""
    return list(zip(labels_of(module)[module._local_start : module._local_stop], module.forward_funcs))


def gradient_bytes(layers: list[tuple[str | int, Any]]) -> dict[str | int, float]:
    by_label: dict[str | int, float] = {}
    for label, layer in layers:
        parameters = layer.parameters() if hasattr(layer, "parameters") else ()
        by_label[label] = by_label.get(label, 0.0) + sum(p.nbytes for p in parameters if p.requires_grad)
    return by_label


def _install(engine: Any, steps: int) -> Profiler:
    from torch.nn import Module

    prof = profiler(steps)
    prof.watch([(label, layer) for label, layer in own_layers(engine.module) if isinstance(layer, Module)])

    kinds = {name: kind for name, kind in KINDS.items() if kind != "tied" or engine.module.tied_comms}
    engine._INSTRUCTION_MAP = dict(type(engine)._INSTRUCTION_MAP)
    for instruction, function in type(engine)._INSTRUCTION_MAP.items():
        if instruction.__name__ in kinds:
            timed = prof.span(kinds[instruction.__name__])  # as a decorator: a new span in every call
            engine._INSTRUCTION_MAP[instruction] = timed(function)
    return prof


@with_session
@by_name
def _train_batch(current, call, instance):
    """Measure one training step of the pipeline engine; after the last measured one, write the profile.

    The profiler is installed at the engine's first step and removed after the last measured step, so that
    later steps run at full speed.
    """
    if instance not in _profilers:
        _profilers[instance] = _install(instance, current.options.profile_steps)
    prof = _profilers[instance]
    if prof is None:  # the profile has been written
        return call()
    with prof.step():
        result = call()
    if prof.finished:
        _profilers[instance] = None
        prof.release()
        del instance._INSTRUCTION_MAP  # the copy with timed functions; the class has the original
        _publish(current, instance, prof)
    return result


def _publish(current: session.Session, engine: Any, prof: Profiler) -> None:
    import deepspeed
    from deepspeed.runtime.pipe import p2p

    report = {
        "framework": f"deepspeed {deepspeed.__version__}", "stage": engine.stage_id,
        "tensor": engine.grid.model_parallel_size, "micro_batches": engine.micro_batches,
        "activation_bytes": _activation_bytes(engine),
    }  # fmt: skip
    publish(current, prof, report, stages=engine.num_stages,
            gradient_bytes=gradient_bytes(own_layers(engine.module)),
            group=engine.grid.get_data_parallel_group(), device=engine.device, send=p2p.send,
            receive=p2p.recv)  # fmt: skip


def _activation_bytes(engine: Any) -> int:
    """Of what comes from the stage before, or back to the first one: a gradient is as large."""
    if engine.num_stages == 1:
        return 0
    buffer = engine.grad_layer if engine.is_first_stage() else engine.pipe_recv_buf
    tensors = buffer if isinstance(buffer, (tuple, list)) else [buffer]
    return sum(tensor.nbytes for tensor in tensors if hasattr(tensor, "nbytes"))


PATCHES = (
    Patch(PROFILE, "deepspeed.runtime.pipe.engine:PipelineEngine.train_batch",
          "--holmes-profile: where a step begins and ends; the rest is measured inside it", _train_batch),
)
