"""Messages between pipeline stages that nobody waits for longer than it must: sends go, receives are there beforehand.

    send   isend; its tensor is kept until it is known to have arrived
    recv   the messages of a step are the same in every step: once that is seen, `window` receives are posted in advance
           for each neighbour, so that a message travels while the stage computes. gloo sends nothing before the other
           end has posted its receive, and NCCL's sender waits for it

Deadlock-free: nothing waits for a send inside a step, and each direction of a pair has a group of its own, in which
both ends have the same order (micro-batches in turn). So a receive waits only for what its sender has computed, which
is earlier in the order of all passes (patches/deepspeed/edges.py).

Under NCCL (read, not run): isend and irecv run on their group's own stream. A send that is not waited for holds up no
stream; its tensor must outlive it, hence `keep`. A receive is waited for (the current stream waits) before its buffer
is copied on the current stream.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.runtime.groups.members import members_group
from holmes_ext.runtime.groups.wire import PLAIN, Wire

#: (shape, dtype) of a message.
Form = tuple[tuple[int, ...], Any]


@dataclass
class _Sent:
    unit: tuple[str, int]
    work: Any
    keep: Any


def of_pairs(pairs: Iterable[tuple[int, int]], rank: int, **options: Any) -> Mailbox:
    """The mailbox of `rank`, with a group for activations and one for gradients of each of `pairs` (of neighbouring
    stages, the earlier first) that it is in. All ranks make them in the same order. options: new_group's."""
    groups = {}
    for pair in sorted(pairs):
        if rank in pair:
            first = rank == pair[0]
            ways = [members_group(pair, f"pipeline {way}", **options) for way in ("activations", "gradients")]
            groups[pair[first], "send"], groups[pair[first], "recv"] = ways if first else reversed(ways)
    return Mailbox(groups)


def window(held: Sequence[int], stage: int) -> int:
    """Of how many micro-batches a stage receives messages in advance: those that an edge may have on the way, and one.

    held: micro-batches in flight, by stage.
    """
    edges = [one - other for one, other in zip(held, held[1:])]
    return 1 + max(1, *edges[max(0, stage - 1) : stage + 1])


class Mailbox:
    """One rank's. groups: (neighbour, "send" or "recv") -> process group, one for each direction of a pair. wire_to:
    how tensors travel to and from a neighbour; a message's form is that of what travels."""

    def __init__(self, groups: dict[tuple[int, str], Any]):
        self._groups = groups
        self.wire_to: Callable[[int], Wire] = lambda peer: PLAIN
        self._sent: dict[str, deque[_Sent]] = defaultdict(deque)
        self._posted: dict[int, deque[tuple[Any, Any]]] = defaultdict(deque)
        self._came: dict[int, list[Form]] = defaultdict(list)  # in this step
        self._last: dict[int, list[Form]] = {}  # in the step before
        self._known: dict[int, list[Form]] = {}  # in each step
        self._next: dict[int, int] = {}  # of the known ones, the first that is not posted
        self.open, self.unit = False, ("", 0)
        self._like: Any = None

    def begin(self, window: int, micro_batches: int, like: Any) -> None:
        """A step of micro_batches begins. window: of how many micro-batches messages are received in advance from each
        neighbour. like: a tensor on the device."""
        self.open, self._like = True, like
        self._came.clear()
        for peer, known in self._known.items():
            self._next[peer] = 0
            for _ in range(window * len(known) // micro_batches):
                self._post(peer)

    def send(self, tensor: Any, peer: int) -> None:
        import torch.distributed as dist

        part = self.wire_to(peer).outgoing(tensor)
        work = dist.isend(part, peer, group=self._groups[peer, "send"])
        self._sent[self.unit[0]].append(_Sent(self.unit, work, part))

    def recv(self, tensor: Any, peer: int) -> None:
        """Into `tensor`. HolmesError when another message than in the steps before is expected."""
        part, finish = self.wire_to(peer).incoming(tensor)
        form = tuple(part.shape), part.dtype
        self._came[peer].append(form)
        if not self._posted[peer]:
            self._irecv(part, peer).wait()
            finish()
            return
        buffer, work = self._posted[peer].popleft()
        if (tuple(buffer.shape), buffer.dtype) != form:
            raise HolmesError(
                f"a message of rank {peer} was {tuple(buffer.shape)} {buffer.dtype} in every step and is to be"
                f" {form[0]} {form[1]} now; --holmes-inflight off leaves sending to the engine"
            )
        work.wait()
        part.copy_(buffer)
        self._post(peer)
        finish()

    def arrived(self, kind: str, index: float) -> None:
        """What the units of `kind` up to micro-batch `index` sent has been received; waiting for it takes no time."""
        sent = self._sent[kind]
        while sent and sent[0].unit[1] <= index:
            sent.popleft().work.wait()

    def end(self) -> None:
        """All of the step has gone; what came is compared with the step before."""
        for kind in self._sent:
            self.arrived(kind, inf)
        for peer, came in self._came.items():
            if self._last.get(peer) == came:
                self._known[peer] = came
            self._last[peer] = list(came)
        self.open = False

    def forget(self) -> None:
        """The messages of the next step may be others."""
        self._last.clear()
        self._known.clear()

    def _irecv(self, tensor: Any, peer: int) -> Any:
        import torch.distributed as dist

        return dist.irecv(tensor, peer, group=self._groups[peer, "recv"])

    def _post(self, peer: int) -> None:
        if self._next[peer] < len(self._known[peer]):
            shape, dtype = self._known[peer][self._next[peer]]
            buffer = self._like.new_empty(shape, dtype=dtype)
            self._posted[peer].append((buffer, self._irecv(buffer, peer)))
            self._next[peer] += 1
