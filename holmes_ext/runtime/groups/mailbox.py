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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.runtime.groups.members import members_group
from holmes_ext.runtime.groups.wire import PLAIN, Wire
from holmes_ext.runtime.watch import failure

#: (shape, dtype) of a message.
Form = tuple[tuple[int, ...], Any]


@dataclass
class _Sent:
    unit: tuple[str, int]
    work: Any
    keep: Any


def of_pairs(pairs: Iterable[tuple[int, int]], rank: int, stages: Mapping[int, int], **options: Any) -> Mailbox:
    """The mailbox of `rank`, with a group for activations and one for gradients of each of `pairs` (of neighbouring
    stages, the earlier first) that it is in. All ranks make them in the same order. stages: of the ranks of its
    pipeline; options: new_group's."""
    groups = {}
    for pair in sorted(pairs):
        if rank in pair:
            first = rank == pair[0]
            ways = [members_group(pair, f"pipeline {way}", **options) for way in ("activations", "gradients")]
            groups[pair[first], "send"], groups[pair[first], "recv"] = ways if first else reversed(ways)
    return Mailbox(groups, {peer: (stages[rank], stages[peer]) for peer, _ in groups})


def window(held: Sequence[int], stage: int) -> int:
    """Of how many micro-batches a stage receives messages in advance: those that an edge may have on the way, and one.

    held: micro-batches in flight, by stage.
    """
    edges = [one - other for one, other in zip(held, held[1:])]
    return 1 + max(1, *edges[max(0, stage - 1) : stage + 1])


class Mailbox:
    """One rank's. groups: (neighbour, "send" or "recv") -> process group, one for each direction of a pair. ends:
    neighbour -> (own stage, its stage). wire_to: how tensors travel to and from a neighbour; a message's form is
    that of what travels."""

    def __init__(self, groups: dict[tuple[int, str], Any], ends: Mapping[int, tuple[int, int]]):
        self._groups, self._ends = groups, ends
        self._announced: dict[int, Sequence[Form]] = {}  # of each micro-batch, to a neighbour
        self._place: tuple[tuple[str, int], int, int] = (("", 0), -1, 0)  # unit, neighbour, messages so far
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

    def announce(self, forms: Sequence[Form], peer: int) -> None:
        """What this rank sends `peer` of every micro-batch; () for what is not known."""
        self._announced[peer], self._place = forms, (("", 0), -1, 0)

    def group(self, peer: int, direction: str) -> Any:
        """Over which a message travels to (direction "send") or from ("recv") a neighbour."""
        return self._groups[peer, direction]

    @property
    def by_peer(self) -> dict[int, Any]:
        """One group for both directions, the same at both ends: that of activations."""
        ways = {peer: "send" if own < other else "recv" for peer, (own, other) in self._ends.items()}
        return {peer: self._groups[peer, way] for peer, way in ways.items()}

    def check(self, tensor: Any, peer: int) -> None:
        """HolmesError where the tensor that is to be sent is not as it was announced: the receiver has a buffer of that
        shape, and gloo would leave half a message in it, or end the process."""
        before, forms = self._place, self._announced.get(peer, ())
        place = before[2] + 1 if before[:2] == (self.unit, peer) else 0
        self._place = self.unit, peer, place
        form = tuple(tensor.shape), tensor.dtype
        if place < len(forms) and forms[place] != form:
            own, other = self._ends[peer]
            told = f"pipeline edge from stage {own} to stage {other} (to rank {peer}): micro-batch"
            said, now = (f"{tuple(shape)} {dtype}" for shape, dtype in (forms[place], form))
            way = "give all micro-batches the same shape (pad them, leave out a shorter last one)"
            raise HolmesError(f"{told} {self.unit[1]} is {now}, announced was {said}; {way}")

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
            self._wait(self._irecv(part, peer), peer)
            finish()
            return
        buffer, work = self._posted[peer].popleft()
        if (tuple(buffer.shape), buffer.dtype) != form:
            own, other = self._ends[peer]
            edge = f"pipeline edge from stage {other} to stage {own}: a message of rank {peer}"
            said, now = (f"{tuple(shape)} {dtype}" for shape, dtype in ((buffer.shape, buffer.dtype), form))
            way = "--holmes-inflight off leaves sending to the engine"
            raise HolmesError(f"{edge} was {said} in every step and is to be {now} now; {way}")
        self._wait(work, peer)
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

    def _wait(self, work: Any, peer: int) -> None:
        """For what `peer` sends. HolmesError where that cannot come: at which edge, and why as far as is known."""
        try:
            work.wait()
        except RuntimeError as error:
            own, other = self._ends[peer]
            edge = f"pipeline edge from stage {other} (rank {peer}) to stage {own}"
            raise HolmesError(failure.broken(edge, str(error)).removeprefix(failure.INPUT)) from error

    def _post(self, peer: int) -> None:
        if self._next[peer] < len(self._known[peer]):
            shape, dtype = self._known[peer][self._next[peer]]
            buffer = self._like.new_empty(shape, dtype=dtype)
            self._posted[peer].append((buffer, self._irecv(buffer, peer)))
            self._next[peer] += 1
