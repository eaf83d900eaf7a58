"""Event-driven core of the step simulation: actors that compute and wait, flows that share NICs.

An actor (a rank, or several ranks that do the same) runs a program: a list of operations. A transfer
is a message or a collective, and its tag is its key. `kind` is that of the recorded span (Span.kind).

    ("compute", kind, seconds, micro_batch, chunk)
    ("post", tag)                          this actor is ready for the transfer
    ("post", tag, AS_RECEIVER)             the same by the receiver of a message: its notice (that it is
                                           ready) reaches the sender a latency later
    ("post", tag, AS_RECEIVER, sent, ...)  the same; the notice leaves after the messages `sent`,
                                           if they are still leaving
    ("wait", tag, kind, micro_batch)       wait until the transfer has arrived
    ("wait", tag, kind, micro_batch, AS_SENDER)    wait until all bytes have left

A transfer goes through these phases:

    posted by all parties (rendezvous) -> ready -> its channel is free -> fixed_s -> flow over NICs
    -> all bytes have left -> latency_s -> arrived -> posts the transfer `then` once

The transfers of a channel follow each other, like the messages of a connection.

Flows share the NICs max-min fairly, each direction by itself (progressive filling; Bertsekas and
Gallager 1992, sec. 6.5.2); a flow of weight w counts as w flows. A waiting actor is idle until the
transfer is ready, and communicates from then on. All times are seconds, all sizes bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import Any, NamedTuple

from holmes_ext.errors import HolmesError
from holmes_ext.planner.simulate.deadline import check_deadline

#: Operation of an actor's program (module docstring).
Op = tuple[Any, ...]
#: (actor, moment since when it waits, its operation). Plain tuples: creating them takes much of the
#: time.
_Waiter = tuple[int, float, Op]

#: Marks the post of a message's receiver, and the wait of its sender.
AS_RECEIVER = True
AS_SENDER = True
#: In operations that belong to no single micro-batch, and to no single chunk of the stage.
NO_MICRO_BATCH = -1
NO_CHUNK = 0
#: Lengths of operations with optional items.
_WAIT_LENGTH = 4  # a longer wait is the sender's
_POST_LENGTH = 2  # a longer post is the receiver's
#: Weights below this are rounding errors.
_NO_WEIGHT = 1e-9
#: Relative difference up to which two rates are equal.
_EQUAL_RATES = 1 + 1e-9


class Span(NamedTuple):
    """Interval in which an actor (rank) computes, waits idly or communicates, as its `kind` says."""

    kind: str  # forward, backward, weights, optimizer, idle, send, reduce or gather
    start: float  # seconds from the start of the step
    end: float
    micro_batch: int = -1  # -1: of no micro-batch
    chunk: int = 0
    across: bool = False  # communication between clusters


@dataclass(slots=True)
class Transfer:
    """A message or collective, and its state in a simulation."""

    #: Posts needed before it is ready.
    parties: int
    fixed_s: float = 0.0
    bits: float = 0.0
    #: Rate that a flow reaches alone.
    limit_bps: float = inf
    #: (NIC or other resource, weight of the flow there)
    uses: tuple[tuple[Hashable, float], ...] = ()
    #: Transfers of a channel follow each other, in the order of becoming ready.
    channel: Hashable = None
    #: Transfer to post when this transfer has arrived.
    then: Hashable = None
    #: Between clusters.
    across: bool = False
    #: Way of the last byte; it delays nothing behind this transfer.
    latency_s: float = 0.0
    #: The sender need not wait until all bytes have left, once the transfer is ready.
    buffered: bool = False

    posts: int = field(default=0, init=False)
    # Moments; negative before they come.
    ready: float = field(default=-1.0, init=False)
    sender_free: float = field(default=-1.0, init=False)  # the sender need not wait any longer
    ended: float = field(default=-1.0, init=False)  # arrived
    # The flow: bits that had not left at the moment `since`, and the rate from then on.
    left: float = field(default=0.0, init=False)
    rate: float = field(default=0.0, init=False)
    since: float = field(default=0.0, init=False)
    #: Number of rates so far; an end scheduled for an older rate is void.
    version: int = field(default=0, init=False)
    #: Flows with equal `uses` and `limit_bps` have the same number here: they always get equal
    #: rates.
    rate_class: int = field(default=-1, init=False)
    #: Actors that wait for it: (actor, since when, operation).
    waiting: list[_Waiter] = field(default_factory=list, init=False)
    has_left: bool = field(default=False, init=False)
    #: Tags of transfers whose receiver's notice leaves after this transfer, on the same connection.
    notices_behind: list[Hashable] = field(default_factory=list, init=False)

    def fresh(self) -> Transfer:
        """Return a copy of the transfer that has not begun."""
        return Transfer(
            self.parties,
            self.fixed_s,
            self.bits,
            self.limit_bps,
            self.uses,
            self.channel,
            self.then,
            self.across,
            self.latency_s,
            self.buffered,
        )


class Transfers(dict[Hashable, Transfer]):
    """Transfers of a simulation by tag (key), copied from templates when first used."""

    def __init__(self, templates: Mapping[Hashable, Transfer]):
        """Create a dictionary of transfers that copies a template when a key is first used.

        Args:
            templates: Tag (key) -> transfer to copy. A transfer that recurs in each micro-batch has the
                tag (name, micro-batch); a template with the key `name` serves for all micro-batches.
        """
        super().__init__()
        self.templates = templates

    def __missing__(self, tag: Any) -> Transfer:
        template = self.templates[tag] if tag in self.templates else self.templates[tag[0]]
        transfer = self[tag] = template.fresh()
        return transfer


class Simulation:
    """Discrete-event simulation of actors and the transfers between them."""

    def __init__(
        self,
        programs: Sequence[Sequence[Op]],
        transfers: dict[Hashable, Transfer],
        capacities: dict[Hashable, float],
    ):
        """Prepare a simulation of actors that compute and exchange data; run() executes it.

        Args:
            programs: Operations of every actor.
            transfers: Tag (key) -> transfer (a message or collective).
            capacities: Rate of every NIC (or other resource) in bits/s, one way.
        """
        self.programs = programs
        self.transfers = transfers
        self.capacities = capacities
        self.now = 0.0
        self.event_count = 0
        #: (moment, number, action, its argument); numbers keep the order of simultaneous events.
        self.events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        #: Index of the next operation of every actor.
        self.position = [0] * len(programs)
        self.spans: list[list[Span]] = [[] for _ in programs]
        self.flows: dict[Hashable, dict[Hashable, Transfer]] = {}  # NIC -> tag -> flow

        # Channel -> tags of its transfers that are ready, in order; the first is under way.
        self.channels: dict[Hashable, deque[Hashable]] = {}
        self.carried: dict[Hashable, float] = {}  # NIC -> bits
        # (NICs and weights, rate limit) of a flow -> its class: flows of a class get equal rates.
        self.rate_classes: dict[Hashable, int] = {}
        # Cache, as the same mix of flows recurs often: sorted classes of all flows that are
        # connected through NICs -> class -> bits/s.
        self.rates: dict[tuple[int, ...], dict[int, float]] = {}

    def run(self) -> list[list[Span]]:
        """Run all programs, and return the spans of every actor.

        An actor's spans follow each other from second 0 on; waiting is a span, too ("idle").

        Raises:
            HolmesError: An actor waits for a transfer that never comes.
            TimeIsOver: The deadline of simulations_until() has passed.
        """
        for actor in range(len(self.programs)):
            self._advance(actor)
        while self.events:
            check_deadline(self.event_count)
            self.now, _, action, argument = heappop(self.events)
            action(argument)
        for actor, program in enumerate(self.programs):
            if self.position[actor] < len(program):
                tag = program[self.position[actor]][1]
                raise HolmesError(f"simulation: actor {actor} deadlocks, waiting for {tag}")
        return self.spans

    def _at(self, moment: float, action: Callable[[Any], None], argument: Any) -> None:
        """Schedule `action(argument)` for a moment of the simulated time."""
        self.event_count += 1
        heappush(self.events, (moment, self.event_count, action, argument))

    def _advance(self, actor: int) -> None:
        """Execute an actor's operations until it computes, has to wait, or has no more.

        An actor is a rank, or several ranks that do the same. It goes on when an event ends its
        computation, or when a transfer (message or collective; `tag` is its key) releases it:

            ("compute", kind, seconds, micro_batch, chunk)
            ("post", tag)         It is ready for the transfer.
            ("wait", tag, kind, micro_batch)

        A receiver's "post" and a sender's "wait" of a message have more items, and so are longer.
        """
        program = self.programs[actor]
        while self.position[actor] < len(program):
            op = program[self.position[actor]]
            if op[0] == "wait":
                transfer = self.transfers[op[1]]
                # A sender waits until all bytes have left, a receiver until they have arrived.
                end = transfer.sender_free if len(op) > _WAIT_LENGTH else transfer.ended
                if end < 0:  # not yet
                    transfer.waiting.append((actor, self.now, op))
                    return
                self.position[actor] += 1
            elif op[0] == "post":
                self.position[actor] += 1
                if len(op) == _POST_LENGTH:
                    self._post(op[1])
                else:
                    self._post_receiver(op)
            else:  # compute
                self.position[actor] += 1
                _, kind, seconds, micro_batch, chunk = op
                if seconds > 0:
                    end = self.now + seconds
                    self.spans[actor].append(Span(kind, self.now, end, micro_batch, chunk))
                    self._at(end, self._advance, actor)
                    return

    def _post_receiver(self, op: Op) -> None:
        """Notify a message's sender that the receiver is ready, as soon as the connection is free.

        The receiver also sends its own messages to that peer over this connection, which transmits
        in order. If one of them is under way now, the notice waits until it has left.

        Args:
            op: The operation ("post", tag of the message to receive, AS_RECEIVER, *tags of earlier
                messages from the receiver to the same peer). A tag is the key of a transfer.
        """
        _post, tag, _as_receiver, *tags_before = op
        for tag_before in tags_before:
            sent = self.transfers[tag_before]
            has_begun = sent.ready >= 0  # `ready` is -1 until both sides have posted the transfer
            if has_begun and not sent.has_left:
                sent.notices_behind.append(tag)  # _end() sends the notice when `sent` has left
                return
        self._send_notice(tag)

    def _send_notice(self, tag: Hashable) -> None:
        """Send a receiver's notice that it is ready for a message; it takes a latency to arrive.

        Then the notice counts as the receiver's post of the transfer.
        """
        notice_s = self.transfers[tag].latency_s
        if notice_s:
            self._at(self.now + notice_s, self._post, tag)
        else:
            self._post(tag)

    def _post(self, tag: Hashable, ready: float | None = None) -> None:
        """Note that an actor is ready for a transfer; begin it if all are and its channel is free.

        Args:
            tag: Key of the transfer.
            ready: Moment at which the transfer counts as ready, if not now (transfers in a chain).
        """
        transfer = self.transfers[tag]
        transfer.posts += 1
        if transfer.posts < transfer.parties:
            return
        transfer.ready = self.now if ready is None else ready
        if transfer.buffered:  # the sender need not wait any longer
            transfer.sender_free = self.now
            self._release_senders(transfer)
        if transfer.channel is None:
            self._begin(tag)
            return
        queue = self.channels.setdefault(transfer.channel, deque())
        queue.append(tag)
        # If the channel is not free, _end() of the previous transfer begins this transfer.
        if len(queue) == 1:
            self._begin(tag)

    def _begin(self, tag: Hashable) -> None:
        """Schedule the start of a transfer's flow of bits, after its fixed startup time."""
        self._at(self.now + self.transfers[tag].fixed_s, self._start_flow, tag)

    def _start_flow(self, tag: Hashable) -> None:
        """Start to send the bits of a transfer as a flow; flows on the same NICs become slower.

        If no other flow uses its NICs, this flow gets the rate of the slowest NIC. Otherwise it shares
        NICs with other flows, these with further flows, and so on; all of them get new rates. A
        transfer without bits ends immediately.

        Transfer.uses has pairs of a NIC (or other resource) and a weight: the bits through the NIC
        for each bit of the flow. So a flow of weight w counts as w flows there.
        """
        transfer = self.transfers[tag]
        if transfer.bits <= 0:
            self._end(tag)
            return
        transfer.left = transfer.bits
        transfer.since = self.now
        # The class of flows that get the same rate, for the cache in _update_rates().
        transfer.rate_class = self.rate_classes.setdefault(
            (transfer.uses, transfer.limit_bps), len(self.rate_classes)
        )
        is_alone = True
        rate = transfer.limit_bps
        for nic, weight in transfer.uses:
            others = self.flows.setdefault(nic, {})
            is_alone = is_alone and not others
            others[tag] = transfer
            # Bits that passed each NIC in the whole step, for the reports.
            self.carried[nic] = self.carried.get(nic, 0.0) + weight * transfer.bits
            if weight > _NO_WEIGHT:  # below it, a weight is a rounding error: no load on this NIC
                rate = min(rate, self.capacities[nic] / weight)
        if is_alone:
            transfer.rate = rate
            transfer.version += 1  # voids the end that was scheduled for an older rate
            self._at(self.now + transfer.bits / rate, self._end_flow, (tag, transfer.version))
        else:
            self._update_rates({tag: transfer})

    def _end_flow(self, flow: tuple[Hashable, int]) -> None:
        """End the flow of a transfer's bits; do nothing if its rate has changed since this was scheduled.

        Args:
            flow: Key of the transfer, and the version of the rate for which its end was computed.
        """
        tag, version = flow
        if self.transfers[tag].version == version:
            self._end(tag)

    def _end(self, tag: Hashable) -> None:
        """End the sending of a transfer after all its bits have left, and start whatever waited for that.

        Its NICs are free for other flows, and the next transfer of its channel begins. Notices (a
        receiver is ready for a message) that were queued on the same connection are sent. The
        transfer itself arrives after its latency.
        """
        transfer = self.transfers[tag]
        transfer.sender_free = self.now
        transfer.has_left = True
        for waiting_tag in transfer.notices_behind:
            self._send_notice(waiting_tag)
        neighbours: dict[Hashable, Transfer] = {}  # flows on the same NICs
        for nic, _ in transfer.uses if transfer.bits > 0 else ():
            others = self.flows[nic]
            del others[tag]
            neighbours.update(others)
        if neighbours:
            self._update_rates(neighbours)
        if transfer.channel is not None:
            queue = self.channels[transfer.channel]
            queue.popleft()
            if queue:
                self._begin(queue[0])
        if transfer.latency_s:
            self._release_senders(transfer)
            self._at(self.now + transfer.latency_s, self._arrive, tag)
        else:
            self._arrive(tag)

    def _arrive(self, tag: Hashable) -> None:
        """Mark a transfer as arrived: start the next one of its chain, and let waiting actors go on."""
        transfer = self.transfers[tag]
        transfer.ended = self.now
        if transfer.then is not None:
            self._post(transfer.then, transfer.ready)
        self._release(transfer, transfer.waiting)

    def _release_senders(self, transfer: Transfer) -> None:
        """Let the actors continue that wait until all bits of their message have left."""
        senders: list[_Waiter] = []
        receivers: list[_Waiter] = []
        for waiter in transfer.waiting:
            _, _, op = waiter
            is_sender = len(op) > _WAIT_LENGTH
            (senders if is_sender else receivers).append(waiter)
        self._release(transfer, senders)
        transfer.waiting = receivers

    def _release(self, transfer: Transfer, waiting: Sequence[_Waiter]) -> None:
        """Let actors go on that waited for a transfer, and record their time as spans.

        An actor is idle until the transfer is ready, and communicates from then on.

        Args:
            transfer: Transfer that the actors wait for.
            waiting: (actor, moment since when it waits, its operation). The operation is ("wait",
                key, kind of the communication's span, micro-batch), and perhaps AS_SENDER.
        """
        for actor, since, op in waiting:
            _, _, kind, micro_batch = op[:_WAIT_LENGTH]  # without AS_SENDER
            ready = min(max(since, transfer.ready), self.now)
            if ready > since:
                self.spans[actor].append(Span("idle", since, ready, micro_batch))
            if self.now > ready:
                span = Span(
                    kind, ready, self.now, micro_batch, chunk=NO_CHUNK, across=transfer.across
                )
                self.spans[actor].append(span)
            self.position[actor] += 1
            self._at(self.now, self._advance, actor)

    def _update_rates(self, seeds: dict[Hashable, Transfer]) -> None:
        """Set new rates for `seeds` and for all flows connected to them through common NICs.

        Args:
            seeds: Key -> flow that began, or that shared a NIC with a flow that ended.
        """
        connected = dict(seeds)
        unvisited = list(seeds.values())
        nics: set[Hashable] = set()
        while unvisited:
            for nic, _ in unvisited.pop().uses:
                if nic not in nics:
                    nics.add(nic)
                    for tag, flow in self.flows[nic].items():
                        if tag not in connected:
                            connected[tag] = flow
                            unvisited.append(flow)
        # Equal mixes of flows have equal rates. They are computed once.
        key = tuple(sorted([flow.rate_class for flow in connected.values()]))
        if key not in self.rates:
            fair = _fair_rates(connected, nics, self.capacities)
            self.rates[key] = {flow.rate_class: fair[tag] for tag, flow in connected.items()}
        rates = self.rates[key]
        for tag, flow in connected.items():
            rate = rates[flow.rate_class]
            if rate == flow.rate:
                continue
            flow.left -= flow.rate * (self.now - flow.since)  # bits sent at the old rate
            flow.since = self.now
            flow.rate = rate
            flow.version += 1  # the end scheduled for the old rate is void
            end = self.now + max(0.0, flow.left) / rate
            self._at(end, self._end_flow, (tag, flow.version))


def _fair_rates(
    flows: dict[Hashable, Transfer], nics: set[Hashable], capacities: dict[Hashable, float]
) -> dict[Hashable, float]:
    """Return the max-min fair rates of flows in bits/s, by progressive filling.

    All rates grow together until a NIC is full or a flow reaches its limit. Those flows keep their
    rate, and the others grow on.

    Args:
        flows: Key -> flow.
        nics: All NICs that the flows use.
        capacities: NIC -> bits/s.
    """
    if len(flows) == 1:
        ((tag, flow),) = flows.items()
        nics_bps = (capacities[nic] / weight for nic, weight in flow.uses if weight > _NO_WEIGHT)
        return {tag: min((flow.limit_bps, *nics_bps))}
    free_bps = {nic: capacities[nic] for nic in nics}
    weights = dict.fromkeys(nics, 0.0)  # of the growing flows on each NIC
    for flow in flows.values():
        for nic, weight in flow.uses:
            weights[nic] += weight
    rates: dict[Hashable, float] = {}
    growing = dict(flows)
    while growing:
        # `level`: rate of all growing flows at which the next NIC is full or a flow at its limit
        used = [nic for nic in nics if weights[nic] > _NO_WEIGHT]
        level = min((free_bps[nic] / weights[nic] for nic in used), default=inf)
        level = min(level, min(flow.limit_bps for flow in growing.values()))
        full = {nic for nic in used if free_bps[nic] / weights[nic] <= level * _EQUAL_RATES}
        for tag, flow in list(growing.items()):
            is_at_limit = flow.limit_bps <= level * _EQUAL_RATES
            if is_at_limit or any(nic in full for nic, _ in flow.uses):
                rates[tag] = level
                del growing[tag]
                for nic, weight in flow.uses:
                    free_bps[nic] -= weight * level
                    weights[nic] -= weight
    return rates
