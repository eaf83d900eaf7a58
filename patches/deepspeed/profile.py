"""Measures the layers of a model that DeepSpeed's pipeline engine trains (--holmes-profile).

The engine runs a schedule of instructions, such as ForwardPass, and looks up the function of each in a table
of its class. For the measured steps, the engine gets a copy of this table whose functions are timed; hooks of
the profiler (runtime/measure/profiler.py) time each layer.
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

#: Class of an instruction -> the kind of work as which the profile counts its time.
KINDS = {
    "ForwardPass": "forward", "BackwardPass": "backward", "SendActivation": "send", "SendGrad": "send",
    "RecvActivation": "receive", "RecvGrad": "receive", "ReduceTiedGrads": "tied", "ReduceGrads": "reduce",
    "OptimizerStep": "optimizer",
}  # fmt: skip

#: Engine -> its profiler; None once the profile has been written.
_profilers: weakref.WeakKeyDictionary[Any, Profiler | None] = weakref.WeakKeyDictionary()


def labels_of(module: Any) -> list[str | int]:
    """Return a label for each layer spec of the whole model, on all stages.

    The label is the number of the transformer block, "before" for specs before the first block, or "after"
    for specs after the last one. A spec between two blocks has the number of the first of them.

    Args:
        module: The PipelineModule.

    Raises:
        HolmesError: No class of layers repeats, so that the model has no blocks.
    """
    names = [class_name(spec) for spec in module._layer_specs]
    block_class = most_frequent(names)
    if block_class is None:
        raise HolmesError(
            "--holmes-profile: no layer class of the model repeats: nothing to measure layer by layer")
    block_indices = [index for index, name in enumerate(names) if name == block_class]
    labels: list[str | int] = []
    block_number = -1
    for index, name in enumerate(names):
        if name == block_class:
            block_number += 1
        if index < block_indices[0]:
            labels.append("before")
        elif index > block_indices[-1]:
            labels.append("after")
        else:
            labels.append(block_number)
    return labels


def own_layers(module: Any) -> list[tuple[str | int, Any]]:
    """Return the layers of this stage, each with its label (see labels_of)."""
    labels = labels_of(module)[module._local_start : module._local_stop]
    return list(zip(labels, module.forward_funcs))


def gradient_bytes(layers: list[tuple[str | int, Any]]) -> dict[str | int, float]:
    """Return the bytes of gradients for each label; layers without parameters count 0."""
    bytes_of_label: dict[str | int, float] = {}
    for label, layer in layers:
        parameters = layer.parameters() if hasattr(layer, "parameters") else ()
        layer_bytes = sum(p.nbytes for p in parameters if p.requires_grad)
        bytes_of_label[label] = bytes_of_label.get(label, 0.0) + layer_bytes
    return bytes_of_label


def _start_profiler(engine: Any, steps: int) -> Profiler:
    """Time each layer and each instruction of an engine, and return the profiler that collects the times.

    Args:
        steps: Training steps to measure.
    """
    from torch.nn import Module

    prof = profiler(steps)
    prof.watch([(label, layer) for label, layer in own_layers(engine.module) if isinstance(layer, Module)])

    timed_kinds = dict(KINDS)
    if not engine.module.tied_comms:
        # Without tied layers ReduceTiedGrads does nothing, but is in every schedule. Its few microseconds
        # would look as if the last stage waited for the first.
        del timed_kinds["ReduceTiedGrads"]
    class_table = type(engine)._INSTRUCTION_MAP
    engine._INSTRUCTION_MAP = dict(class_table)
    for instruction, function in class_table.items():
        kind = timed_kinds.get(instruction.__name__)
        if kind is not None:
            timed = prof.span(kind)  # a decorator that records a new span in every call
            engine._INSTRUCTION_MAP[instruction] = timed(function)
    return prof


@with_session
@by_name
def _train_batch(current, call, instance):
    """Measure one training step of the pipeline engine, and write the profile after the last measured step.

    The profiler starts at the engine's first step and is removed after the last measured step, so that later
    steps run at full speed.
    """
    if instance not in _profilers:
        _profilers[instance] = _start_profiler(instance, current.options.profile_steps)
    prof = _profilers[instance]
    if prof is None:  # the profile has been written
        return call()
    with prof.step():
        result = call()
    if prof.finished:
        _profilers[instance] = None
        prof.release()
        del instance._INSTRUCTION_MAP  # the copy with timed functions; the class has the original
        _write_profile(current, instance, prof)
    return result


def _write_profile(current: session.Session, engine: Any, prof: Profiler) -> None:
    """Collect the measurements of all stages, and write the profile on rank 0."""
    import deepspeed
    from deepspeed.runtime.pipe import p2p

    report = {
        "framework": f"deepspeed {deepspeed.__version__}",
        "stage": engine.stage_id,
        "tensor": engine.grid.model_parallel_size,
        "micro_batches": engine.micro_batches,
        "activation_bytes": _activation_bytes(engine),
    }
    publish(
        current,
        prof,
        report,
        stages=engine.num_stages,
        gradient_bytes=gradient_bytes(own_layers(engine.module)),
        group=engine.grid.get_data_parallel_group(),
        device=engine.device,
        send=p2p.send,
        receive=p2p.recv,
    )


def _activation_bytes(engine: Any) -> int:
    """Return the bytes of one activation between this stage and a neighbour; 0 for a single stage.

    The first stage receives no activation, but a gradient of the same size from the next stage.
    """
    if engine.num_stages == 1:
        return 0
    buffer = engine.grad_layer if engine.is_first_stage() else engine.pipe_recv_buf
    tensors = buffer if isinstance(buffer, (tuple, list)) else [buffer]
    return sum(tensor.nbytes for tensor in tensors if hasattr(tensor, "nbytes"))


PATCHES = (
    Patch(PROFILE, "deepspeed.runtime.pipe.engine:PipelineEngine.train_batch",
          "--holmes-profile: where a step begins and ends; the rest is measured inside it", _train_batch),
)
