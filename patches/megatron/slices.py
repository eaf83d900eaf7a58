"""megatron-core's pipeline edges between clusters: each tensor rank sends its part of what all of them have.

Without sequence parallelism, which cuts them already, all t tensor ranks of a stage send the same activation,
and its gradient back: t times the bytes. Here each sends 1 / t and the receiving stage gathers inside its
node (runtime/groups/wire.py, which says why nobody waits for ever), under every schedule; where the mailbox
of edges.py carries the messages it does the same. --holmes-edges narrows what crosses in the same places."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holmes_ext.patches import registry
from holmes_ext.patches.engine.patch import Patch
from holmes_ext.patches.megatron import core
from holmes_ext.patches.megatron.features import P2P_MODULE, SLICES
from holmes_ext.patches.megatron.p2p import PARAMETERS
from holmes_ext.runtime import session
from holmes_ext.runtime.groups.backend import backend_of, group_ranks, network_api_of
from holmes_ext.runtime.groups.wire import Finish, Wire

#: Of the communication under way: neighbour's rank -> how tensors travel to and from it, if not as they are.
_wires: Mapping[int, Wire] = {}


class _Received:
    """A request whose wait() does the rest, once; keep: what lives until then."""

    def __init__(self, work: Any, finish: Finish | None, keep: Any = None):
        self._work, self._finish, self._keep = work, finish, keep

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
        if self._finish is not None:
            self._finish()
        self._work = self._finish = self._keep = None


def wires_of(config: Any) -> dict[int, Wire]:
    """Of this rank's neighbours; {} where all travels as it is. The same on all ranks of a stage."""
    current, sizes = session.active(), core.job.sizes
    if current is None or sizes is None or not registry().is_on(SLICES.name):
        return {}
    from megatron.core import parallel_state

    group = parallel_state.get_pipeline_model_parallel_group()
    if isinstance(group, list) or not (network_api := network_api_of(backend_of(group))):
        return {}
    edges = current.plan_for(sizes).traffic_of(network_api).edges
    ranks = group_ranks(group)
    tensor = parallel_state.get_tensor_model_parallel_group()
    wires, stage = {}, ranks.index(current.rank)
    # the edge from the last to the first stage too
    for index, other in ((stage, stage + 1), (stage - 1, stage - 1)):
        planned = edges[index % len(edges)]
        parts, other = 1 if config.sequence_parallel else planned.slices, other % len(ranks)
        if parts > 1 or planned.narrow != "off":
            name = f"stage {stage}'s edge to stage {other}"
            wires[ranks[other]] = Wire(parts, tensor.rank(), tensor, planned.narrow, name)
    return wires


def _communicate(wrapped, instance, args, kwargs):
    global _wires
    from megatron.core import parallel_state

    of_pipeline = instance.pp_group is parallel_state.get_pipeline_model_parallel_group()
    _wires = wires_of(instance.config) if of_pipeline else {}
    try:
        return wrapped(*args, **kwargs)
    finally:
        _wires = {}


def _exchange(wrapped, instance, args, kwargs):
    """_p2p_ops gives a dict of requests, each waited for when the schedule wants it; _batched_p2p_ops a list,
    waited for in its order."""
    given, finishes, sent = dict(kwargs), {}, []
    for side in ("prev", "next"):
        wire = _wires.get(kwargs[f"{side}_pipeline_rank"])
        send, recv = f"tensor_send_{side}", f"tensor_recv_{side}"
        if wire is not None and given[send] is not None:
            given[send] = wire.outgoing(given[send])
            sent.append(given[send])
        if wire is not None and given[recv] is not None:
            given[recv], finishes[f"recv_{side}"] = wire.incoming(given[recv])
    requests = wrapped(*args, **given)
    if isinstance(requests, dict):
        return {name: _Received(work, finishes.get(name), sent) for name, work in requests.items()}
    return [*requests, *(_Received(None, finish) for finish in finishes.values()),
            _Received(None, None, sent)]


PATCHES = (
    Patch(SLICES, f"{P2P_MODULE}:P2PCommunicator._communicate",
          "which of a stage's neighbours is in another cluster", _communicate,
          parameters=("tensor_send_next", "tensor_send_prev", "recv_prev", "recv_next", "tensor_shape")),
    *(Patch(SLICES, f"{P2P_MODULE}:{function}",
            "every tensor rank would send the same tensor to another cluster", _exchange,
            parameters=PARAMETERS)
      for function in ("_p2p_ops", "_batched_p2p_ops")),
)  # fmt: skip
