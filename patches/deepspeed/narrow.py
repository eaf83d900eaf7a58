"""DeepSpeed's pipeline edges between clusters with fewer bits (--holmes-edges bf16, int8).

Around p2p.send and p2p.recv of the engine's own or over a pair's group: what is sent is the narrowed tensor,
what is received is decoded into the engine's buffer (runtime/groups/wire.py). Where edges.py's mailbox
carries a message, it does that. The engine's messages about shapes, integers, pass as they are.
"""

from __future__ import annotations

from typing import Any

from holmes_ext.patches.deepspeed import edges
from holmes_ext.patches.deepspeed.features import NARROW
from holmes_ext.patches.deepspeed.p2p import grid_sizes, messages
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.runtime import session
from holmes_ext.runtime.groups.backend import backend_of, network_api_of
from holmes_ext.runtime.groups.wire import PLAIN, Wire

#: Whether the engine sends or receives shapes now.
_shapes = False


def _about_shapes(wrapped, instance, args, kwargs):
    """_send_tensor_meta, _recv_tensor_meta."""
    global _shapes
    _shapes = True
    try:
        return wrapped(*args, **kwargs)
    finally:
        _shapes = False


def _wire_to(stage: int) -> Wire:
    """Of this rank's edge to `stage`, a neighbour."""
    current, network_api = session.active(), network_api_of(backend_of())
    if current is None or not network_api or _shapes:
        return PLAIN
    from deepspeed.runtime.pipe import p2p

    grid: Any = p2p._grid
    my_stage, stages = grid.get_stage_id(), grid.pipe_parallel_size
    sizes = grid_sizes(current, stages, grid.get_slice_parallel_world_size())
    planned = current.plan_for(sizes).traffic_of(network_api).edges
    before = min(my_stage, stage) if abs(my_stage - stage) == 1 else stages - 1
    narrow = planned[before % len(planned)].narrow
    return Wire(narrow=narrow, edge=f"stage {my_stage}'s edge to stage {stage}") if narrow != "off" else PLAIN


def _wire_to_rank(peer: int) -> Wire:
    from deepspeed.runtime.pipe import p2p

    grid: Any = p2p._grid
    my_stage = grid.get_stage_id()
    near = (stage % grid.pipe_parallel_size for stage in (my_stage - 1, my_stage + 1))
    return _wire_to(next(stage for stage in near if grid.stage_to_global(stage_id=stage) == peer))


def _in_mailbox() -> bool:
    """Whether edges.py's mailbox carries the message; then it does the rest."""
    box = edges.opened()
    if box is not None:
        box.wire_to = _wire_to_rank
    return box is not None


def _narrowed(direction, stock, tensor, stage, async_op):
    if _in_mailbox():
        return stock(tensor, stage, async_op)
    wire = _wire_to(stage)
    if direction == "send":
        return stock(wire.outgoing(tensor), stage, async_op)
    part, finish = wire.incoming(tensor)
    done = stock(part, stage, async_op)
    finish()
    return done


_ENGINE = "deepspeed.runtime.pipe.engine:PipelineEngine"

PATCHES = (
    *messages(NARROW, _narrowed, "activations and gradients cross as wide as they are computed",
              "what was narrowed is widened"),
    *(Patch(NARROW, f"{_ENGINE}.{name}", "shapes, which are no activations, pass as they are", _about_shapes)
      for name in ("_send_tensor_meta", "_recv_tensor_meta")),
)  # fmt: skip
