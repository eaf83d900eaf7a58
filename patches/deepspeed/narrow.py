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
from holmes_ext.patches.engine.wrap import Running
from holmes_ext.runtime import session
from holmes_ext.runtime.groups.backend import backend_of, network_api_of
from holmes_ext.runtime.groups.wire import PLAIN, Wire

#: The engine's methods that send and receive shapes.
_about_shapes = Running()


def _wire_to(stage: int) -> Wire:
    """Of this rank's edge to `stage`, a neighbour."""
    current, network_api = session.active(), network_api_of(backend_of())
    if current is None or not network_api or _about_shapes.instances:
        return PLAIN
    from deepspeed.runtime.pipe import p2p

    grid: Any = p2p._grid
    my_stage, stages = grid.get_stage_id(), grid.pipe_parallel_size
    planned = current.plan_for(grid_sizes(current, grid)).traffic_of(network_api).edges
    before = min(my_stage, stage) if abs(my_stage - stage) == 1 else stages - 1
    narrow = planned[before % len(planned)].narrow
    return Wire(narrow=narrow, edge=f"stage {my_stage}'s edge to stage {stage}") if narrow != "off" else PLAIN


def _narrowed(direction, stock, tensor, stage, async_op):
    wire, box = _wire_to(stage), edges.opened()
    if box is not None:  # edges.py's mailbox carries the message, and asks for it
        box.wire_to = lambda peer: wire
        return stock(tensor, stage, async_op)
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
