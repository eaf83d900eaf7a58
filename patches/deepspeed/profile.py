"""--holmes-profile under DeepSpeed's pipeline engine: which instruction is what, and which module which layer.

The engine's table of instructions is timed in a copy that only the engine measured sees, and only until the last step measured. ReduceTiedGrads is
always in its schedule: without tied layers the microseconds of nothing would say that the last stage waits for the first.
"""

from __future__ import annotations

import weakref
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.patches.deepspeed.features import PROFILE
from holmes_ext.patches.deepspeed.partition import class_name, most_frequent
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.runtime import session

KINDS = {
    "ForwardPass": "forward", "BackwardPass": "backward", "SendActivation": "send", "SendGrad": "send", "RecvActivation": "receive",
    "RecvGrad": "receive", "ReduceTiedGrads": "tied", "ReduceGrads": "reduce", "OptimizerStep": "optimizer",
}  # fmt: skip

#: engine -> its recorder, None once the profile is written.
_recorders: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def labels_of(module: Any) -> list[str | int]:
    """For each layer spec of the whole model "before", the number of the block, or "after"."""
    names = [class_name(spec) for spec in module._layer_specs]
    blocks = most_frequent(names)
    if blocks is None:
        raise HolmesError("--holmes-profile: the model has no layer class that repeats, so there is nothing to measure layer by layer")
    first, last, found, number = names.index(blocks), len(names) - 1 - names[::-1].index(blocks), [], -1
    for index, name in enumerate(names):
        number += name == blocks
        found.append("before" if index < first else "after" if index > last else number)
    return found


def _install(engine: Any, steps: int) -> Any:
    from torch.nn import Module

    from holmes_ext.runtime.measure.profile import recorder

    found = recorder(steps)
    module, labels = engine.module, labels_of(engine.module)
    own = zip(labels[module._local_start : module._local_stop], module.forward_funcs)
    found.watch([(label, layer) for label, layer in own if isinstance(layer, Module)])

    def timed(kind: str, function: Any) -> Any:
        def call(self, *args, **kwargs):
            with found.span(kind):
                return function(self, *args, **kwargs)

        return call

    kinds = KINDS if module.tied_comms else {name: kind for name, kind in KINDS.items() if kind != "tied"}
    engine._INSTRUCTION_MAP = {
        instruction: timed(kinds[instruction.__name__], function) if instruction.__name__ in kinds else function
        for instruction, function in type(engine)._INSTRUCTION_MAP.items()
    }
    return found


def _train_batch(wrapped, instance, args, kwargs):
    current = session.active()
    if current is None or not current.options.profile_steps:
        return wrapped(*args, **kwargs)
    if instance not in _recorders:
        _recorders[instance] = _install(instance, current.options.profile_steps)
    recorder = _recorders[instance]
    if recorder is None:
        return wrapped(*args, **kwargs)
    with recorder.step():
        result = wrapped(*args, **kwargs)
    if recorder.finished:
        _recorders[instance] = None
        recorder.release()
        del instance._INSTRUCTION_MAP
        _publish(current, instance, recorder)
    return result


def _publish(current: session.Session, engine: Any, recorder: Any) -> None:
    import deepspeed
    from deepspeed.runtime.pipe import p2p

    from holmes_ext.runtime.measure import profile, profile_file

    module, stages = engine.module, engine.num_stages
    labels = labels_of(module)[module._local_start : module._local_stop]
    gradients: dict[str | int, float] = {}
    for label, layer in zip(labels, module.forward_funcs):
        parameters = layer.parameters() if hasattr(layer, "parameters") else ()
        gradients[label] = gradients.get(label, 0.0) + sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
    activation = _activation_bytes(engine)
    edge = profile.probe_edges(engine.stage_id, stages, activation, engine.device, p2p.send, p2p.recv) if stages > 1 else 0.0
    group = engine.grid.get_data_parallel_group()
    profile_file.publish(
        current,
        {
            "framework": f"deepspeed {deepspeed.__version__}",
            "stage": engine.stage_id,
            "tensor": engine.grid.model_parallel_size,
            "micro_batches": engine.micro_batches,
            "steps": recorder.steps,
            "gradient_bytes": [[label, size] for label, size in gradients.items()],
            "activation_bytes": activation,
            "reduction": profile.probe_reduction(group, int(sum(gradients.values())), engine.device),
            "edge_s": edge,
            **recorder.report(),
        },
    )


def _activation_bytes(engine: Any) -> int:
    """Of what comes from the stage before, or on the first stage back from the next one: a gradient is as large as its activation."""
    if engine.num_stages == 1:
        return 0
    buffer = engine.grad_layer if engine.is_first_stage() else engine.pipe_recv_buf
    tensors = buffer if isinstance(buffer, (tuple, list)) else [buffer]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if hasattr(tensor, "numel"))


PATCHES = (
    Patch(
        PROFILE, "deepspeed.runtime.pipe.engine:PipelineEngine.train_batch",
        "--holmes-profile: where a step begins and ends; the rest is measured inside it", _train_batch,
    ),
)  # fmt: skip
