"""Measures how long each layer of a model takes in DeepSpeed's pipeline engine (--holmes-profile).

The engine executes a list of instructions in each training step, such as ForwardPass and SendActivation. It
has a table from the class of an instruction to the function that executes it.

1. In the first step, the engine gets a copy of this table whose functions are timed. Hooks on the layers
   divide the time of a forward or backward pass among its layers (runtime/measure/profiler.py).
2. After the measured steps, the copy and the hooks are removed, and rank 0 writes the profile.
"""

from __future__ import annotations

import weakref
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.patches.deepspeed.features import PROFILE
from holmes_ext.patches.deepspeed.partition import class_name, most_frequent
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.engine.wrap import Call, by_name, with_session
from holmes_ext.runtime.measure.profile_file import publish
from holmes_ext.runtime.measure.profiler import Profiler, profiler
from holmes_ext.runtime.session import Session

#: Class of an instruction -> the kind of work that its time counts for in the profile.
KINDS = {
    "ForwardPass": "forward",
    "BackwardPass": "backward",
    "SendActivation": "send",
    "SendGrad": "send",
    "RecvActivation": "receive",
    "RecvGrad": "receive",
    "ReduceTiedGrads": "tied",
    "ReduceGrads": "reduce",
    "OptimizerStep": "optimizer",
}

#: Engine -> its profiler; None once the profile has been written.
_profilers: weakref.WeakKeyDictionary[Any, Profiler | None] = weakref.WeakKeyDictionary()


def labels_of(module: Any) -> list[str | int]:
    """Return a label for each layer of the model. The profile adds up times of layers with the same label.

    The model has a list of layers. Its transformer blocks are the layers of the class that occurs most often.
    The labels are:

    - the number of the block, from 0, for a block and for other layers between it and the next block
    - "before" for layers before the first block
    - "after" for layers after the last block

    Args:
        module: DeepSpeed's PipelineModule. The labels are for the layers of all its stages.

    Raises:
        HolmesError: The model has no transformer blocks, only functions and tied layers.
    """
    names = [class_name(spec) for spec in module._layer_specs]  # None for functions and tied layers
    block_class = most_frequent(names)  # the class of the transformer blocks
    if block_class is None:
        raise HolmesError(
            "--holmes-profile: no layer class of the model repeats: nothing to measure layer by layer"
        )
    block_indices = [index for index, name in enumerate(names) if name == block_class]
    labels: list[str | int] = []
    block_number = -1  # of the latest block; -1: before the first one
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


def layers_of_stage(module: Any) -> list[tuple[str | int, Any]]:
    """Return the layers of this rank's pipeline stage as pairs (label, layer).

    The label is the number of a transformer block in the whole model, "before" for layers before the first
    block, or "after" for layers after the last block.

    Args:
        module: DeepSpeed's PipelineModule.
    """
    labels = labels_of(module)[module._local_start : module._local_stop]
    return list(zip(labels, module.forward_funcs))


def gradient_bytes(layers: list[tuple[str | int, Any]]) -> dict[str | int, float]:
    """Return how many bytes of gradients the layers with each label have.

    Args:
        layers: Pairs of a label, such as the number of a transformer block, and a layer with this label. A
            layer that is a function has no parameters, and therefore 0 bytes.
    """
    bytes_of_label: dict[str | int, float] = {}
    for label, layer in layers:
        parameters = layer.parameters() if hasattr(layer, "parameters") else ()
        layer_bytes = sum(p.nbytes for p in parameters if p.requires_grad)
        bytes_of_label[label] = bytes_of_label.get(label, 0.0) + layer_bytes
    return bytes_of_label


def _start_profiler(engine: Any, steps: int) -> Profiler:
    """Start to time the layers and the instructions of a pipeline engine, and return the profiler.

    The profile sums the time of instructions by kind of work, such as "forward", "send" or "reduce".

    The engine looks up the function of each instruction, such as ForwardPass, in the table _INSTRUCTION_MAP
    of its class. The engine object gets a copy of the table with timed functions. The copy hides the table of
    the class.

    Args:
        steps: Number of training steps to measure.
    """
    from torch.nn import Module

    prof = profiler(steps)
    labelled_modules = []
    for label, layer in layers_of_stage(engine.module):
        if isinstance(layer, Module):  # some layers are functions: they take no hooks
            labelled_modules.append((label, layer))
    prof.watch(labelled_modules)  # adds hooks that time each module

    timed_kinds = dict(KINDS)  # name of an instruction -> kind of work
    if not engine.module.tied_comms:
        # The model has no tied layers, whose gradients the first and the last stage would sum. DeepSpeed
        # executes ReduceTiedGrads all the same, but it sends nothing. The profile would show its few
        # microseconds as such a sum.
        del timed_kinds["ReduceTiedGrads"]

    # Class of an instruction -> function that executes it.
    class_table = type(engine)._INSTRUCTION_MAP
    engine._INSTRUCTION_MAP = dict(class_table)
    for instruction, function in class_table.items():
        kind = timed_kinds.get(instruction.__name__)
        if kind is not None:
            time_each_call = prof.span(kind)  # a context manager, here used as a decorator
            engine._INSTRUCTION_MAP[instruction] = time_each_call(function)
    return prof


@with_session
@by_name
def _train_batch(current: Session, call: Call, instance: Any) -> Any:
    """Run one training step of the pipeline engine, and measure it if it is one of the first steps.

    This wrapper runs in place of PipelineEngine.train_batch; call() runs the original. The option
    --holmes-profile sets how many steps are measured. After the last of them, the profiler is
    removed, so that later steps run at full speed, and the profile is written.
    """
    if instance not in _profilers:  # the first step
        _profilers[instance] = _start_profiler(instance, current.options.profile_steps)
    prof = _profilers[instance]
    if prof is None:  # the profile has been written
        return call()  # DeepSpeed's train_batch
    with prof.step():
        result = call()
    if prof.finished:  # this was the last measured step
        _profilers[instance] = None  # later steps are not measured
        prof.release()  # removes the hooks from the layers
        del instance._INSTRUCTION_MAP  # the copy with timed functions; the class has the original
        _write_profile(current, instance, prof)
    return result


def _write_profile(current: Session, engine: Any, prof: Profiler) -> None:
    """Collect the measurements of all ranks, and write them to the profile's file on rank 0.

    publish() first also measures the gradient reduction and the transfers between stages alone, while nothing
    else runs. All ranks must therefore call this function.

    Args:
        current: Session of holmes in this process.
        engine: The pipeline engine.
        prof: The measured times of this rank.
    """
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
        gradient_bytes=gradient_bytes(layers_of_stage(engine.module)),
        group=engine.grid.get_data_parallel_group(),  # of the reduction that is measured
        device=engine.device,
        send=p2p.send,  # the transfers that are measured
        receive=p2p.recv,
    )


def _activation_bytes(engine: Any) -> int:
    """Return how many bytes this pipeline stage receives from a neighbouring stage for one micro-batch.

    The number is the size of an activation. The first stage receives no activation, but the gradient of an
    activation, of the same size. If there is only one stage, the result is 0.
    """
    if engine.num_stages == 1:
        return 0
    if engine.is_first_stage():
        receive_buffer = engine.grad_layer
    else:
        receive_buffer = engine.pipe_recv_buf
    tensors = receive_buffer if isinstance(receive_buffer, (tuple, list)) else [receive_buffer]
    return sum(tensor.nbytes for tensor in tensors if hasattr(tensor, "nbytes"))


PATCHES = (
    Patch(
        PROFILE,
        "deepspeed.runtime.pipe.engine:PipelineEngine.train_batch",
        "--holmes-profile measures a training step, and its parts while it runs",
        _train_batch,
    ),
)
