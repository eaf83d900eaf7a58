"""Actors that compute and wait, flows that share NICs: the event-driven core of step.py. Seconds, bits.

    actor     ("compute", kind, seconds, micro_batch, chunk)
              ("post", tag)
              ("post", tag, True): by who receives
              ("post", tag, True, sent): the same, and the word of it goes after `sent`, if that is on its way
              ("wait", tag, kind, micro_batch)
              ("wait", tag, kind, micro_batch, True): until all has left
    transfer  begins when all its parties posted it (rendezvous: blocking sends, collectives) and its channel
              is free; then a fixed time, then a flow; then all has left, and arrives latency_s later; then it
              posts `then` once. Who receives is known to wait latency_s after its post

Flows share NICs max-min fairly (progressive filling; Bertsekas and Gallager 1992, sec. 6.5.2), each way by
itself; one of `weight` stands for as many. Waiting is idle time until the transfer is ready (posted by all,
or what it follows is), and communication from then on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import Any, NamedTuple

from holmes_ext.errors import HolmesError

#: See the module.
Op = tuple[Any, ...]


class Span(NamedTuple):
    """What an actor did from start to end. kind: forward, backward, optimizer, idle, send, reduce, gather;
    across: between clusters."""

    kind: str
    start: float
    end: float
    micro_batch: int = -1
    chunk: int = 0
    across: bool = False


@dataclass(slots=True)
class Transfer:
    """parties: how many posts it needs. uses: (NIC, weight); limit_bps: what one flow reaches alone. channel:
    those of one channel follow each other in the order in which they became ready. across: between clusters.
    latency_s: of the way, which holds up nothing behind it. buffered: who sends need not wait until all has
    left, once it is ready."""

    parties: int
    fixed_s: float = 0.0
    bits: float = 0.0
    limit_bps: float = inf
    uses: tuple[tuple[Hashable, float], ...] = ()
    channel: Hashable = None
    then: Hashable = None
    across: bool = False
    latency_s: float = 0.0
    buffered: bool = False
    posts: int = field(default=0, init=False)
    gone: float = field(default=-1.0, init=False)
    ready: float = field(default=-1.0, init=False)
    ended: float = field(default=-1.0, init=False)
    left: float = field(default=0.0, init=False)
    rate: float = field(default=0.0, init=False)
    since: float = field(default=0.0, init=False)
    version: int = field(default=0, init=False)
    look: int = field(default=-1, init=False)
    waiting: list[tuple[int, float, Op]] = field(default_factory=list, init=False)
    has_left: bool = field(default=False, init=False)
    behind: list[Hashable] = field(
        default_factory=list, init=False
    )  # receives whose word goes after it

    def fresh(self) -> Transfer:
        """The same, not begun."""
        rest = self.uses, self.channel, self.then, self.across, self.latency_s, self.buffered
        return Transfer(self.parties, self.fixed_s, self.bits, self.limit_bps, *rest)


class Transfers(dict[Hashable, Transfer]):
    """Of one simulation, made when first named. templates: by tag, or by its first item (what, number)."""

    def __init__(self, templates: Mapping[Hashable, Transfer]):
        super().__init__()
        self.templates = templates

    def __missing__(self, tag: Any) -> Transfer:
        template = self.templates[tag] if tag in self.templates else self.templates[tag[0]]
        transfer = self[tag] = template.fresh()
        return transfer


class Simulation:
    """capacities: bits/s of every NIC, one way. run(): every actor's spans, without gaps from 0."""

    def __init__(
        self,
        programs: Sequence[Sequence[Op]],
        transfers: dict[Hashable, Transfer],
        capacities: dict[Hashable, float],
    ):
        self.programs, self.transfers, self.capacities = programs, transfers, capacities
        self.now, self.count = 0.0, 0
        self.heap: list[tuple[float, int, int, Any, int]] = []
        self.place = [0] * len(programs)
        self.spans: list[list[Span]] = [[] for _ in programs]
        self.flows: dict[Hashable, dict[Hashable, Transfer]] = {}  # NIC -> tag -> flow
        self.channels: dict[Hashable, deque[Hashable]] = {}
        self.carried: dict[Hashable, float] = {}  # NIC -> bits
        self.looks: dict[Hashable, int] = {}  # (uses, limit) of flows -> a number
        # looks of flows that are tied -> look -> bits/s
        self.rates: dict[tuple[int, ...], dict[int, float]] = {}

    def run(self) -> list[list[Span]]:
        for actor in range(len(self.programs)):
            self._advance(actor)
        while self.heap:
            self.now, _, what, item, version = heappop(self.heap)
            if what == 0:
                self._advance(item)
            elif what == 1:
                self._flow(item)
            elif what == 3:
                self._arrive(item)
            elif what == 4:
                self._post(item)
            elif self.transfers[item].version == version:
                self._end(item)
        for actor, program in enumerate(self.programs):
            if self.place[actor] < len(program):
                raise HolmesError(
                    f"simulation: actor {actor} deadlocks, waiting for {program[self.place[actor]][1]}"
                )
        return self.spans

    def _at(self, moment: float, what: int, item: Hashable, version: int = 0) -> None:
        self.count += 1
        heappush(self.heap, (moment, self.count, what, item, version))

    def _advance(self, actor: int) -> None:
        program, spans = self.programs[actor], self.spans[actor]
        while self.place[actor] < len(program):
            op = program[self.place[actor]]
            if op[0] == "wait":
                transfer = self.transfers[op[1]]
                if (transfer.gone if len(op) > 4 else transfer.ended) < 0:
                    transfer.waiting.append((actor, self.now, op))
                    return
                self.place[actor] += 1
            elif op[0] == "post":
                self.place[actor] += 1
                before = self.transfers[op[3]] if len(op) > 3 else None
                if before is not None and before.ready >= 0 and not before.has_left:
                    before.behind.append(op[1])
                elif len(op) > 2:
                    self._notice(op[1])
                else:
                    self._post(op[1])
            else:
                self.place[actor] += 1
                if op[2] > 0:
                    spans.append(Span(op[1], self.now, self.now + op[2], op[3], op[4]))
                    self._at(self.now + op[2], 0, actor)
                    return

    def _notice(self, tag: Hashable) -> None:
        """Who receives is known to wait a latency later."""
        if notice_s := self.transfers[tag].latency_s:
            self._at(self.now + notice_s, 4, tag)
        else:
            self._post(tag)

    def _post(self, tag: Hashable, ready: float | None = None) -> None:
        """ready: since when what comes before it was."""
        transfer = self.transfers[tag]
        transfer.posts += 1
        if transfer.posts < transfer.parties:
            return
        transfer.ready = self.now if ready is None else ready
        if transfer.buffered:
            transfer.gone = self.now
            self._release_senders(transfer)
        if transfer.channel is None:
            self._begin(tag)
            return
        queue = self.channels.setdefault(transfer.channel, deque())
        queue.append(tag)
        if len(queue) == 1:
            self._begin(tag)

    def _begin(self, tag: Hashable) -> None:
        self._at(self.now + self.transfers[tag].fixed_s, 1, tag)

    def _flow(self, tag: Hashable) -> None:
        transfer = self.transfers[tag]
        if transfer.bits <= 0:
            self._end(tag)
            return
        transfer.left, transfer.since = transfer.bits, self.now
        transfer.look = self.looks.setdefault((transfer.uses, transfer.limit_bps), len(self.looks))
        alone, rate = True, transfer.limit_bps
        for nic, weight in transfer.uses:
            others = self.flows.setdefault(nic, {})
            alone = alone and not others
            others[tag] = transfer
            self.carried[nic] = self.carried.get(nic, 0.0) + weight * transfer.bits
            if weight > 1e-9:
                rate = min(rate, self.capacities[nic] / weight)
        if alone:
            transfer.rate, transfer.version = rate, transfer.version + 1
            self._at(self.now + transfer.bits / rate, 2, tag, transfer.version)
        else:
            self._share({tag: transfer})

    def _end(self, tag: Hashable) -> None:
        transfer = self.transfers[tag]
        transfer.gone, transfer.has_left = self.now, True
        for notice in transfer.behind:
            self._notice(notice)
        around: dict[Hashable, Transfer] = {}
        for nic, _ in transfer.uses if transfer.bits > 0 else ():
            others = self.flows[nic]
            del others[tag]
            around.update(others)
        if around:
            self._share(around)
        if transfer.channel is not None:
            queue = self.channels[transfer.channel]
            queue.popleft()
            if queue:
                self._begin(queue[0])
        if transfer.latency_s:
            self._release_senders(transfer)
            self._at(self.now + transfer.latency_s, 3, tag)
        else:
            self._arrive(tag)

    def _arrive(self, tag: Hashable) -> None:
        transfer = self.transfers[tag]
        transfer.ended = self.now
        if transfer.then is not None:
            self._post(transfer.then, transfer.ready)
        self._release(transfer, transfer.waiting)

    def _release_senders(self, transfer: Transfer) -> None:
        self._release(transfer, [waiter for waiter in transfer.waiting if len(waiter[2]) > 4])
        transfer.waiting = [waiter for waiter in transfer.waiting if len(waiter[2]) <= 4]

    def _release(self, transfer: Transfer, waiting: list[tuple[int, float, Op]]) -> None:
        for actor, since, op in waiting:
            ready = min(max(since, transfer.ready), self.now)
            if ready > since:
                self.spans[actor].append(Span("idle", since, ready, op[3]))
            if self.now > ready:
                self.spans[actor].append(Span(op[2], ready, self.now, op[3], 0, transfer.across))
            self.place[actor] += 1
            self._at(self.now, 0, actor)

    def _share(self, seeds: dict[Hashable, Transfer]) -> None:
        """New rates for all flows that are tied to `seeds` by NICs."""
        tied, todo = dict(seeds), list(seeds.values())
        nics: set[Hashable] = set()
        while todo:
            for nic, _ in todo.pop().uses:
                if nic not in nics:
                    nics.add(nic)
                    for tag, flow in self.flows[nic].items():
                        if tag not in tied:
                            tied[tag] = flow
                            todo.append(flow)
        key = tuple(sorted([flow.look for flow in tied.values()]))
        if key not in self.rates:
            fair = _fair(tied, nics, self.capacities)
            self.rates[key] = {flow.look: fair[tag] for tag, flow in tied.items()}
        rates = self.rates[key]
        for tag, flow in tied.items():
            if (rate := rates[flow.look]) == flow.rate:
                continue
            flow.left -= flow.rate * (self.now - flow.since)
            flow.since, flow.rate = self.now, rate
            flow.version += 1
            self._at(self.now + max(0.0, flow.left) / rate, 2, tag, flow.version)


def _fair(
    flows: dict[Hashable, Transfer], nics: set[Hashable], capacities: dict[Hashable, float]
) -> dict[Hashable, float]:
    """Max-min fair: all grow until a NIC is full or a flow at its limit; those stay, the others grow on."""
    if len(flows) == 1:
        ((tag, flow),) = flows.items()
        shares = (capacities[nic] / weight for nic, weight in flow.uses if weight > 1e-9)
        return {tag: min((flow.limit_bps, *shares))}
    left = {nic: capacities[nic] for nic in nics}
    weights = dict.fromkeys(nics, 0.0)
    for flow in flows.values():
        for nic, weight in flow.uses:
            weights[nic] += weight
    rates: dict[Hashable, float] = {}
    growing = dict(flows)
    while growing:
        level = min((left[nic] / weights[nic] for nic in nics if weights[nic] > 1e-9), default=inf)
        level = min(level, min(flow.limit_bps for flow in growing.values()))
        full = {
            nic
            for nic in nics
            if weights[nic] > 1e-9 and left[nic] / weights[nic] <= level * (1 + 1e-9)
        }
        for tag, flow in list(growing.items()):
            if flow.limit_bps <= level * (1 + 1e-9) or any(nic in full for nic, _ in flow.uses):
                rates[tag] = level
                del growing[tag]
                for nic, weight in flow.uses:
                    left[nic] -= weight * level
                    weights[nic] -= weight
    return rates
