"""Messages between pipeline stages: sends go, receives are there beforehand, nobody waits longer than it
must.

    send   isend; its tensor is kept until it is known to have arrived
    recv   posted some passes in advance, so that a message travels while the stage computes: gloo
           sends nothing before the other end has posted its receive, and NCCL's sender waits for
           it. How early says receive_order.py

Each direction of a pair has a group. All launches of a step have one order in which each could wait for the
one before it (receive_order.py): no luck with streams, hardware queues or host waits is needed.

With NCCL isend and irecv run on their group's own stream. A send that is not waited for holds up no stream;
its tensor must outlive it, hence `keep`. A receive is waited for (the current stream waits) before its buffer
is copied on the current stream.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from holmes_ext.errors import HolmesError
from holmes_ext.runtime import session
from holmes_ext.runtime.groups.pairs import pair_group
from holmes_ext.runtime.groups.wire import PLAIN
from holmes_ext.runtime.watch import failure

if TYPE_CHECKING:
    from holmes_ext.runtime.groups.receive_order import Early, Flight, ListedEarly
    from holmes_ext.runtime.groups.wire import Wire

#: (shape, dtype) of a message.
Form = tuple[tuple[int, ...], Any]


def form_of(tensor: Any) -> Form:
    return tuple(tensor.shape), tensor.dtype


@dataclass
class _Sent:
    unit: tuple[str, int]
    work: Any
    keep: Any


def of_pairs(
    pairs: Iterable[tuple[int, int]], rank: int, stages: Mapping[int, int], pipeline: Any
) -> Mailbox:
    """The mailbox of `rank`, with a group for activations and one for gradients of each of `pairs` (the
    earlier stage first) that it is in; all ranks make them in one order. stages: of its pipeline's ranks;
    pipeline: a group whose settings theirs have."""
    groups = {}
    for pair in sorted(pairs):
        if rank in pair:
            earlier = rank == pair[0]
            neighbour = pair[1] if earlier else pair[0]
            both = [
                pair_group(pair, f"pipeline {what}", pipeline)
                for what in ("activations", "gradients")
            ]
            groups[neighbour, "send"], groups[neighbour, "recv"] = (
                both if earlier else reversed(both)
            )
    return Mailbox(groups, {peer: (stages[rank], stages[peer]) for peer, _ in groups})


class Mailbox:
    """groups: (neighbour, "send" or "recv") -> process group; ends: neighbour -> (my stage, its stage);
    wire_to: how tensors travel there. A message's form is that of what travels."""

    def __init__(self, groups: dict[tuple[int, str], Any], ends: Mapping[int, tuple[int, int]]):
        self._groups, self._ends = groups, ends
        #: neighbour -> 1 for the next stage's, -1 for that of the stage before.
        steps = {peer: its_stage - my_stage for peer, (my_stage, its_stage) in ends.items()}
        self.neighbours = {peer: step for peer, step in steps.items() if abs(step) == 1}
        self._announced: dict[int, Sequence[Form]] = {}  # of each micro-batch, to a neighbour
        self._checked: Counter[int] = Counter()  # messages to a neighbour in this step
        self.wire_to: Callable[[int], Wire] = lambda peer: PLAIN
        self._sent: dict[str, deque[_Sent]] = defaultdict(deque)
        self._expected: dict[int, Sequence[Form]] = {}  # of each micro-batch, from a neighbour
        self._seen: dict[int, list[Form]] = {}  # in a step of the engine's own schedule
        self._posted: dict[int, deque[tuple[Any, Any]]] = defaultdict(deque)
        self._count: Counter[int] = (
            Counter()
        )  # of micro-batches whose receives were posted in this step
        self._came: Counter[int] = Counter()  # messages in this step
        self.open, self.listening, self.unit = False, False, ("", 0)
        self._early: dict[int, Early | ListedEarly] = {}
        self._micro_batches = 0
        self._like: Any = None

    def expect(self, forms: Sequence[Form], peer: int) -> None:
        """What `peer` sends of every micro-batch."""
        self._expected[peer] = forms

    def listen(self) -> None:
        """A step of the engine's own schedule begins: its messages wait, and are remembered."""
        self.listening = True
        self._checked.clear()
        self._seen = {peer: [] for peer in self.neighbours}

    def leave_out(self, peer: int) -> None:
        """What came from `peer` so far was about its messages."""
        if self.listening:
            self._seen[peer] = []

    def learn(self, micro_batches: int) -> None:
        """That step is over: what came of each micro-batch is expected from now on. HolmesError: they
        differ."""
        for peer, forms in self._seen.items():
            of_each = forms[: len(forms) // micro_batches]
            if forms != of_each * micro_batches:
                my_stage, its_stage = self._ends[peer]
                stage_link = f"stage link from stage {its_stage} to stage {my_stage}: rank {peer}"
                advice = "--holmes-inflight off leaves sending to the engine"
                raise HolmesError(
                    f"{stage_link} does not send the same of each micro-batch; {advice}"
                )
            self.expect(of_each, peer)
        self.listening = False

    @property
    def knows(self) -> bool:
        """What all neighbours send. So it is on all ranks of a pipeline, or on none."""
        return self.neighbours.keys() <= self._expected.keys()

    def forget(self) -> None:
        """The messages of the next step may be others."""
        self._expected.clear()

    def begin(self, flight: Flight, micro_batches: int, like: Any) -> None:
        """A step of micro_batches begins, and `knows` holds. like: a tensor on the device."""
        self.open, self._like, self._micro_batches = True, like, micro_batches
        if (current := session.active()) is not None:
            current.in_flight = flight.in_flight
        for count in (self._count, self._came, self._checked):
            count.clear()
        self._early = {
            peer: flight.early(*self._ends[peer], micro_batches) for peer in self.neighbours
        }

    def announce(self, forms: Sequence[Form], peer: int) -> None:
        """What this rank sends `peer` of every micro-batch; () for what is not known."""
        self._announced[peer], self._checked[peer] = forms, 0

    @property
    def by_peer(self) -> dict[int, Any]:
        """One group for both directions, the same at both ends: that of activations."""
        return {
            peer: self._groups[peer, "send" if my_stage < its_stage else "recv"]
            for peer, (my_stage, its_stage) in self._ends.items()
        }

    def _check(self, tensor: Any, peer: int) -> None:
        """HolmesError where a tensor is not as announced: gloo would leave half a message in the receiver's
        buffer, or end the process."""
        if not (forms := self._announced.get(peer)):
            return
        micro_batch, place = divmod(self._checked[peer], len(forms))
        self._checked[peer] += 1
        if forms[place] != form_of(tensor):
            my_stage, its_stage = self._ends[peer]
            stage_link = f"stage link from stage {my_stage} to stage {its_stage} (to rank {peer})"
            said, now = (f"{shape} {dtype}" for shape, dtype in (forms[place], form_of(tensor)))
            advice = (
                "give all micro-batches the same shape (pad them, leave out a shorter last one)"
            )
            raise HolmesError(
                f"{stage_link}: micro-batch {micro_batch} is {now}, expected {said}; {advice}"
            )

    def send(self, tensor: Any, peer: int) -> None:
        import torch.distributed as dist

        self._check(tensor, peer)
        part, group = self.wire_to(peer).outgoing(tensor), self._groups[peer, "send"]
        if self.listening:
            dist.send(part, peer, group=group)
        else:
            self._sent[self.unit[0]].append(
                _Sent(self.unit, dist.isend(part, peer, group=group), part)
            )

    def passed(self, kind: str, index: int) -> None:
        """The pass of `kind` ("F", "B") of micro-batch `index` is launched, and all that it sends."""
        for peer, early in self._early.items():
            self._post(peer, early.after(kind, index))

    def recv(self, tensor: Any, peer: int) -> None:
        """Into `tensor`. HolmesError when another message than the expected is to come."""
        if self.listening:
            self._recv_now(tensor, peer)
            return
        index = self._came[peer] // len(self._expected[peer])
        self._came[peer] += 1
        self._post(peer, self._early[peer].before(index))
        buffer, work = self._posted[peer].popleft()
        part, finish = self.wire_to(peer).incoming(tensor)
        if form_of(buffer) != form_of(part):
            my_stage, its_stage = self._ends[peer]
            stage_link = (
                f"stage link from stage {its_stage} to stage {my_stage}: a message of rank {peer}"
            )
            said, now = (f"{shape} {dtype}" for shape, dtype in map(form_of, (buffer, part)))
            advice = "--holmes-inflight off leaves sending to the engine"
            raise HolmesError(
                f"{stage_link} was {said} in every step so far, but is {now} now; {advice}"
            )
        with self._naming(peer):
            work.wait()
        part.copy_(buffer)
        finish()

    def _recv_now(self, tensor: Any, peer: int) -> None:
        import torch.distributed as dist

        part, finish = self.wire_to(peer).incoming(tensor)
        self._seen[peer].append(form_of(part))
        with self._naming(peer):
            dist.recv(part, peer, group=self._groups[peer, "recv"])
        finish()

    def arrived(self, kind: str, index: float) -> None:
        """What `kind` sent up to micro-batch `index` has been received: waiting takes no time."""
        sent = self._sent[kind]
        while sent and sent[0].unit[1] <= index:
            sent.popleft().work.wait()

    def end(self) -> None:
        """All of the step has gone."""
        for kind in self._sent:
            self.arrived(kind, inf)
        self.open = False

    @contextmanager
    def _naming(self, peer: int) -> Iterator[None]:
        """HolmesError where what `peer` sends cannot come: at which stage link, and why as far as is
        known."""
        try:
            yield
        except RuntimeError as error:
            my_stage, its_stage = self._ends[peer]
            stage_link = f"stage link from stage {its_stage} (rank {peer}) to stage {my_stage}"
            raise HolmesError(
                failure.broken(stage_link, str(error)).removeprefix(failure.INPUT)
            ) from error

    def _post(self, peer: int, micro_batches: int) -> None:
        """Receives of the step's first micro_batches, where they are not there yet."""
        import torch.distributed as dist

        for _ in range(self._count[peer], min(micro_batches, self._micro_batches)):
            for shape, dtype in self._expected[peer]:
                buffer = self._like.new_empty(shape, dtype=dtype)
                work = dist.irecv(buffer, peer, group=self._groups[peer, "recv"])
                self._posted[peer].append((buffer, work))
            self._count[peer] += 1
