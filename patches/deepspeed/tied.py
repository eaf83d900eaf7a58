"""DeepSpeed's tied layers (TiedLayerSpec), whose gradients cross clusters once for a stage instead of once for each of
its data-parallel ranks.

    stock    _exec_reduce_tied_grads: every rank all-reduces the whole gradient with its twin of the other stage
    here     the sum over all ranks of both stages, in two levels, divided by the data-parallel ranks: what the average
             that follows (ReduceGrads) would make of it (runtime/reduce/tied.py)

The engine's order stays: after the stage's last backward pass, before its reduction. What overlaps the backward pass
(reduce.py) is under way meanwhile. Which gradient is summed (.grad, BF16_Optimizer's buffer) stays the engine's choice:
only its all-reduce takes another way. Megatron-DeepSpeed's pipeline is this engine.
"""

from __future__ import annotations

import weakref
from typing import Any

from holmes_ext.patches.deepspeed.features import TIED
from holmes_ext.patches.deepspeed.p2p import grid_sizes
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.runtime import session

#: The engine that sums tied gradients now.
_engine: Any = None
#: group of the ranks that share a weight -> its sum in two levels; None where the engine's own stays.
_sums: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _reduce_tied(wrapped, instance, args, kwargs):
    """_exec_reduce_tied_grads: the all-reduces inside it are of tied gradients."""
    global _engine
    _engine = instance
    try:
        return wrapped(*args, **kwargs)
    finally:
        _engine = None


def _all_reduce(wrapped, instance, args, kwargs):
    """deepspeed.comm.all_reduce(tensor, op, group, async_op), whose parameters a decorator hides."""
    current = session.active()
    if _engine is None or current is None:
        return wrapped(*args, **kwargs)
    given = dict(zip(("tensor", "op", "group", "async_op"), args)) | kwargs
    tensor, group = given["tensor"], given.get("group")
    if group not in _sums:
        from holmes_ext.runtime.reduce.tied import tied_sum_of  # torch is there by now

        sizes = grid_sizes(current, _engine.num_stages, _engine.grid.get_slice_parallel_world_size())
        _sums[group] = tied_sum_of(group, sizes, tensor.device.type)
    tied_sum = _sums[group]
    if tied_sum is None or not tied_sum.takes(tensor):
        return wrapped(*args, **kwargs)
    tied_sum(tensor, tied_sum.twins)


PATCHES = (
    Patch(
        TIED, "deepspeed.runtime.pipe.engine:PipelineEngine._exec_reduce_tied_grads",
        "tells the all-reduces of tied gradients from others", _reduce_tied,
        rebind=("deepspeed.runtime.pipe.engine:PipelineEngine._INSTRUCTION_MAP[ReduceTiedGrads]",),
    ),
    Patch(
        TIED, "deepspeed.comm.comm:all_reduce",
        "every data-parallel rank would send the whole gradient to another cluster", _all_reduce,
    ),
)  # fmt: skip
