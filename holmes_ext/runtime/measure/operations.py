"""One operation of torch.distributed, and its process group, as telemetry and the watchdog see them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holmes_ext.runtime import group_kinds as kinds
from holmes_ext.runtime import session
from holmes_ext.runtime.backend import backend_of, traits_of

if TYPE_CHECKING:
    from holmes_ext.plan.sizes import Sizes
    from holmes_ext.runtime.measure.on_device import Mark


class GroupTraffic:
    """A process group as this rank sees it: members, transport, operations started."""

    def __init__(self, process_group: Any):
        import torch.distributed as dist

        current = session.require()
        self.name = process_group.group_name
        self.ranks = tuple(dist.get_process_group_ranks(process_group))
        self.backend = backend_of(process_group)
        traits = traits_of(self.backend)
        self.is_on_device = traits.is_nccl  # its operations run on CUDA streams
        self.is_nccl2 = traits.is_nccl2
        self.description = str(process_group.group_desc or "").replace("undefined", "")
        made = [r.transport for r in current.groups if r.ranks == self.ranks and r.backend == self.backend]
        self.transport = made[-1] if made else current.transport(self.ranks, self.backend)
        self.world_size = current.plan.world_size
        self.collectives = 0
        self.messages: dict[tuple[str, int], int] = {}  # ("send" or "receive", the other's rank) -> how many
        self.on_device: deque[Op] = deque()  # over NCCL: those under way, in the order of their launch
        self.last_end = 0.0  # of those: one communicator works in that order

    def kind(self, sizes: Sizes | None, peer: int | None, rank: int) -> str:
        """What it is for; a message between two ranks may belong to the pipeline over any group."""
        if peer is not None and len(self.ranks) > 2 and kinds.described(self.description) in ("", "world"):
            return kinds.kind_of_ranks((rank, peer), sizes, self.world_size) if sizes else "other"
        return kinds.kind_of(self.ranks, self.description, sizes, self.world_size)


@dataclass(slots=True, eq=False)
class Op:
    """payload, sent: bytes (kinds.sent_bytes); peer: of a send or receive; number: which of the group's
    collectives, or messages with the peer; end: 0 while under way; block: began and ended with it."""

    group: GroupTraffic
    name: str
    payload: int
    sent: float
    peer: int | None
    number: int
    start: float
    end: float = 0.0
    waited: float = 0.0
    work: Any = None
    background: bool = False
    is_synchronous: bool = False  # called without async_op=True
    block: Sequence[Op] = ()
    # NCCL: before its launch; ended: after it, or after the stream has waited for it
    began: Mark | None = None
    ended: Mark | None = None
    waits: list[tuple[Mark, Mark]] = field(default_factory=list)  # NCCL: around the stream's waits
    seen_over: float = 0.0  # NCCL: when torch said so, and what it took
    duration: float = 0.0
