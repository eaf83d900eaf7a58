"""Watchdog: names the rank or NIC that holds the job up while a training step is late.

    1. A thread on every rank looks at the clock a few times a second. It does nothing else while steps are on
       time: no connection is made, and the job's key-value store is not touched.
    2. A step is late if it takes much longer than the median step. Every rank whose step is late stores its
       state: the operations that it waits in, how many it has started, and the rates of its NICs.
    3. A rank that is stuck follows the chain of waiting ranks, from state to state:

           rank 0 waits for rank 2 in the data group -> rank 2 waits for rank 3 in its pipeline group
           -> rank 3 waits for no other rank: rank 3 is the cause

    4. A single rank prints a line with the cause. The key PREFIX/said decides between the ranks.

A rank has not reached an operation if it has started fewer operations in the same process group.

No rank waits for another here: a rank that stores no new state within four checks is reported as not
answering. If the store itself does not answer, the lowest waiting rank prints the operation it waits in.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from holmes_ext.runtime.measure.operations import Op
from holmes_ext.runtime.measure.telemetry import Recorder
from holmes_ext.runtime.start.store import ENDED_S
from holmes_ext.units import format_rate
from holmes_ext.words import some_of, tell_user

#: A late step counts as stuck if its oldest operation has at least this age, in seconds. If the median
#: step is longer, the median counts.
STUCK_S = 1.0
#: A step is late after so many times `floor_s` while the median is unknown: the first steps compile kernels,
#: tune them and make communicators.
FIRST_FLOORS = 12
#: Most lines that a job prints.
LINES = 20
_MOST_OPERATIONS = 8  # that a rank stores, the oldest first
_MOST_RANKS = 1024  # whose states a rank reads
_MOST_NICS = 4  # that a line lists
_CHECKS = 4  # checks to wait, so that other ranks can store their state
_LONGEST_PAUSE_S = 2.0  # between two checks
_SHORTEST_PAUSE_S = 0.25
_PAUSES_PER_FLOOR = 8
_LONGEST_MEDIAN_S = 10.0  # that is waited for: ranks may be late up to a step after each other
_NO_LINE_YET = "none -2 0"  # first value of PREFIX/said: RANK STEP LINES


@dataclass(frozen=True)
class Waiting:
    """An operation of torch.distributed that a rank has started and that is not over."""

    group: str  # torch's name of the process group
    kind: str  # purpose of the group, such as "data"
    operation: str  # such as "all_reduce"
    ranks: tuple[int, ...]  # of the group; of a send or receive both ends
    number: int  # of the operation among the group's collectives, or among the messages with `peer`
    peer: int | None  # the other end of a send or receive; None for a collective
    age: float  # seconds since its start
    fabric: str
    interface: str  # network interface of this node; "" if unknown

    @property
    def awaited(self) -> tuple[int, ...]:
        """Ranks that must take part before the operation can end."""
        return self.ranks if self.peer is None else (self.peer,)

    def __str__(self) -> str:
        """Return the operation in words, such as "the data group of ranks 0, 1 (all_reduce on ib)"."""
        network = f"{self.fabric} over {self.interface}" if self.interface else self.fabric
        return (
            f"the {self.kind} group of ranks {some_of(self.ranks)} ({self.operation} on {network})"
        )


@dataclass(frozen=True)
class State:
    """State of a rank whose step is late, as it is stored for other ranks."""

    rank: int
    node: str
    step: int
    check_count: int  # checks of this rank that found a late step; grows while the rank is alive
    waiting: tuple[Waiting, ...] = ()  # the oldest first
    started: Mapping[str, int] = field(default_factory=dict)  # group -> collectives started
    #: "send GROUP PEER" or "receive GROUP PEER" -> messages started.
    messages: Mapping[str, int] = field(default_factory=dict)
    nics: Mapping[str, float] = field(default_factory=dict)  # interface -> bits/s, both directions

    def has_reached(self, wait: Waiting, rank: int) -> bool:
        """Return whether this rank has started its part of the operation in which rank `rank` waits."""
        if wait.peer is None:
            return self.started.get(wait.group, 0) > wait.number
        counterpart = "receive" if wait.operation == "send" else "send"
        return self.messages.get(f"{counterpart} {wait.group} {rank}", 0) > wait.number

    def dump(self) -> str:
        """Serialize this state as JSON, as other ranks read it."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> State:
        """Parse a state from the JSON that dump() has written."""
        document = json.loads(text)
        waiting = []
        for entry in document.pop("waiting"):
            ranks = tuple(entry.pop("ranks"))
            waiting.append(Waiting(**entry, ranks=ranks))
        return cls(**document, waiting=tuple(waiting))


#: Returns the state of a rank; None if the rank does not answer.
Ask = Callable[[int], State | None]


class MissingRank(NamedTuple):
    """A rank that has not reached an operation that another rank waits in."""

    rank: int
    wait: Waiting  # the operation of the other rank


def blame(rank: int, ask: Ask, node_of: Callable[[int], str], rates: Mapping[str, int]) -> str:
    """Return the reason why a rank waits, in words.

    The search goes from `rank` to a rank that it waits for, and so on. It ends at a rank that does not wait,
    at operations that all ranks have reached, or at a rank that was visited before.

    Args:
        rank: The rank that is stuck.
        ask: Returns the state of a rank.
        node_of: Returns the name of a rank's node.
        rates: Fabric -> its rate in bits/s.

    Returns:
        The cause; "" if `rank` does not wait.
    """
    path: list[int] = []  # the ranks that were visited so far
    wait: Waiting | None = None  # the operation that the last of them waits in
    while True:
        state = ask(rank)
        name = f"rank {rank} on {node_of(rank)}"
        if state is None:
            return (
                f"{wait} waits for {name}, which does not answer: stopped, dead, or cut off from the "
                "job's store"
            )
        if not state.waiting:
            if wait is None:
                return ""
            return f"{wait} waits for {name}, which is in no operation: it computes, loads data or writes"
        path.append(rank)
        missing = _first_missing_rank(rank, state.waiting, ask)
        if missing is None:  # all ranks are there, so the network is slow
            return _slow_network(rank, state.waiting[0], ask, node_of, rates)
        rank, wait = missing
        if rank in path:
            circle = ", ".join(map(str, path[path.index(rank) :]))
            return (
                f"ranks {circle} wait for each other in a circle: {wait} waits for rank {rank} on "
                f"{node_of(rank)}"
            )


def _first_missing_rank(rank: int, operations: tuple[Waiting, ...], ask: Ask) -> MissingRank | None:
    """Return a rank that has not reached an operation that `rank` waits in; None if all have reached all.

    Operations are searched from the oldest on. In each, a rank without an answer precedes others.

    Args:
        rank: The rank that waits.
        operations: Operations that it waits in, oldest first. `awaited`: the ranks it waits for.
        ask: Returns the state of a rank; None if the rank does not answer.
    """
    for wait in operations:
        late_ranks = []
        for other in wait.awaited:
            if other == rank:
                continue
            state = ask(other)
            if state is None:
                return MissingRank(other, wait)
            if not state.has_reached(wait, rank):
                late_ranks.append(other)
        if late_ranks:
            return MissingRank(late_ranks[0], wait)
    return None


def _slow_network(
    rank: int, wait: Waiting, ask: Ask, node_of: Callable[[int], str], rates: Mapping[str, int]
) -> str:
    """Return the message for an operation that all ranks have reached and that still takes long.

    Args:
        rank, wait: A rank that waits, and the operation; wait.awaited are the ranks that must take part.
        ask: Returns the stored state of a rank, with its NICs' rates; None if it does not answer.
        node_of: Returns the name of a rank's node.
        rates: Fabric -> its stated rate in bits/s.
    """
    rates_seen = []  # (bits/s, the rank and its NIC in words)
    for member in dict.fromkeys((rank, *wait.awaited)):
        state = ask(member)
        if state is None:
            continue
        # The interface that the member uses in this group; if unknown, that of the waiting rank.
        same_group = [other for other in state.waiting if other.group == wait.group]
        interface = same_group[0].interface if same_group else wait.interface
        rate_bps = state.nics.get(interface)
        if rate_bps is not None:
            text = f"moves {format_rate(round(rate_bps))} over {interface}"
            rates_seen.append((rate_bps, f"rank {member} on {node_of(member)} {text}"))
    message = f"{wait}: all have arrived, the network is slow"
    if rates_seen:  # the slowest NICs of the ranks that take part
        message += ": " + ", ".join(text for _, text in sorted(rates_seen)[:_MOST_NICS])
    if wait.fabric in rates:  # once, after the list: the rate is that of all NICs of the fabric
        message += f" of {format_rate(rates[wait.fabric])}"
    return message


def _no_hint() -> str:
    return ""


@dataclass(eq=False)
class Watchdog:
    """Thread of a rank that reports late steps.

    A step is late after `factor` times the median step, but at least `floor_s` seconds. While there is no
    median yet, it is late after FIRST_FLOORS times `floor_s`.
    """

    recorder: Recorder
    factor: float
    floor_s: float
    #: Returns a new client of the job's store. It is called when the first step is late.
    connect: Callable[[], Any]
    prefix: str  # of the watchdog's keys in the store
    node_of: Callable[[int], str]  # rank -> name of its node
    rates: Mapping[str, int]  # fabric -> bits/s
    carried: Callable[[], Mapping[str, int]]  # returns: interface -> bytes moved so far
    host: int | None = None  # rank whose process hosts the store; None if torchrun's agent does
    say: Callable[[str], None] = tell_user
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    dump_hint: Callable[[], str] = _no_hint  # returns where torch's flight recorder writes, or ""

    def __post_init__(self) -> None:
        """Set the watchdog's initial state: no step checked, no connection to the job's store."""
        pause_s = max(_SHORTEST_PAUSE_S, self.floor_s / _PAUSES_PER_FLOOR)
        self.pause_s = min(_LONGEST_PAUSE_S, pause_s)
        self._store: Any = None
        self._check_count = 0
        self._alone_at = -1  # the step that say_alone() has printed a line about
        self._has_said_dump_hint = False
        #: Time of the last check that found a late step, and the bytes moved by each NIC until then.
        self._carried: tuple[float, Mapping[str, int]] | None = None
        self._ended = threading.Event()

    def start(self) -> None:
        """Start the thread that checks whether training steps are late."""
        self._ended.clear()
        self._thread = threading.Thread(target=self._run, name="holmes watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread that checks for late steps, and wait until it has ended."""
        # A thread that returns from the store during the interpreter's shutdown aborts the process.
        self._ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(ENDED_S)

    def _run(self) -> None:
        while not self._ended.wait(self.pause_s):
            try:
                self.check()
            except Exception:  # noqa: BLE001 - the store does not answer, or has ended before the job
                self._store = None
                self.say_alone()

    def check(self) -> None:
        """If the training step is late, store this rank's state, and print why the job is held up.

        Late: it takes longer than _limit_s(), several median steps. Other ranks read the stored
        state. A single rank of the job prints the cause: the rank or NIC that the others wait for.
        """
        if not self._late():
            self._carried = None  # so _nic_rates() begins anew at the next late step
            return
        state = self.state()
        self.tell(state)  # stores it for the other ranks
        median_s = self.recorder.median_s()
        # Stuck: in progress for a median step (before any has ended: _limit_s()), at least STUCK_S.
        stuck_s = max(STUCK_S, self._limit_s() if median_s is None else median_s)
        is_stuck = bool(state.waiting) and state.waiting[0].age >= stuck_s
        if self.recorder.is_in_step and is_stuck:  # between two steps, the program may do anything
            self._explain(state)

    def _late(self) -> bool:
        return self._so_far() >= self._limit_s()

    def _limit_s(self) -> float:
        """Return how many seconds a training step may take before it counts as late."""
        median_s = self.recorder.median_s()
        if median_s is None:
            return FIRST_FLOORS * self.floor_s
        return max(self.factor * median_s, self.floor_s)

    def _so_far(self) -> float:
        """Return the seconds since the current training step began."""
        return self.clock() - self.recorder.step_entered

    def state(self) -> State:
        """Return the operations that this rank has started and waits in, and the rates of its NICs."""
        recorder = self.recorder
        now = self.clock()
        self._record_completed()
        operations = recorder.in_flight()
        groups = list(recorder.groups.values())
        started = {group.name: group.collectives for group in groups}
        # (group, "send" or "receive", rank of the other end) -> messages started
        messages: dict[tuple[str, str, int], int] = {}
        for group in groups:
            for (direction, peer), count in list(group.messages.items()):  # other threads add to it
                messages[group.name, direction, peer] = count
        # With NCCL, the host launches operations ahead of the GPU, and the counts above contain all
        # launched ones. Operations that the GPU has not reached (not_begun()) are subtracted here.
        for op in recorder.not_begun():
            if op.peer is None:
                started[op.group.name] -= 1
            else:
                messages[op.group.name, op.name, op.peer] -= 1
        self._check_count += 1  # other ranks see from its growth that this rank is alive
        return State(
            rank=recorder.rank,
            node=self.node_of(recorder.rank),
            step=recorder.step,
            check_count=self._check_count,
            waiting=tuple(self._waiting(op, now) for op in operations[:_MOST_OPERATIONS]),
            started=started,
            messages={
                f"{direction} {group_name} {peer}": count
                for (group_name, direction, peer), count in messages.items()
            },
            nics=self._nic_rates(now),
        )

    def _record_completed(self) -> None:
        """Record the end of gloo's completed collectives, even if the program has not called wait() yet."""
        for op in list(self.recorder.open.values()):
            if op.work is None or op.peer is not None or op.group.is_on_device:
                continue
            work = op.work()  # a weak reference
            if work is not None and work.is_completed():
                self.recorder.finish(op)

    def _waiting(self, op: Op, now: float) -> Waiting:
        """Describe an operation under way for other ranks. `now` is the time in seconds."""
        transport = op.group.transport
        return Waiting(
            group=op.group.name,
            kind=self.recorder.kind(op),  # purpose of its group, such as "data"
            operation=op.name,  # such as "all_reduce"
            ranks=self.recorder.participants(op),
            number=op.number,  # ranks compare these: how far each has come
            peer=op.peer,
            age=now - op.start,  # seconds
            fabric=transport.fabric,
            interface=transport.interface,
        )

    def _nic_rates(self, now: float) -> dict[str, float]:
        """Return network interface -> bits/s, sent plus received, since the last check.

        The first check of each late step returns {}, since check() has reset _carried before.
        """
        carried = self.carried()  # interface -> bytes so far
        previous = self._carried
        self._carried = (now, carried)
        if previous is None:
            return {}
        previous_time, previous_carried = previous
        seconds = now - previous_time
        if seconds <= 0:
            return {}
        rates = {}
        for interface, count in carried.items():
            if interface in previous_carried:
                rates[interface] = (count - previous_carried[interface]) * 8 / seconds
        return rates

    def tell(self, state: State) -> None:
        """Store this rank's state in the job's key-value store, for the other ranks."""
        if self._store is None:
            self._store = self.connect()
        self._store.set(self._key(state.rank), state.dump())

    def _key(self, rank: int) -> str:
        return f"{self.prefix}/state/{rank}"

    def _stored_state(self, rank: int) -> State | None:
        """Return the state that a rank has stored; None if there is none."""
        if not self._store.check([self._key(rank)]):
            return None
        return State.load(self._store.get(self._key(rank)).decode())

    def _explain(self, state: State) -> None:
        """Print the cause of a late step, unless another rank does.

        1. This rank claims the right to print it, in the store's key PREFIX/said. If another rank has done so
           for this step, nothing is printed.
        2. It waits for some checks, so that other ranks can store new states. A rank that has stored none
           meanwhile is not alive.
        3. If the step is still late, it prints the cause. Otherwise it withdraws the claim.
        """
        said_key = f"{self.prefix}/said"
        late_step = state.step
        previous_claim = self._store.compare_set(said_key, "", _NO_LINE_YET).decode()
        _, said_step, line_count = previous_claim.split()
        if int(said_step) >= late_step - 1 or int(line_count) >= LINES:
            return
        claim = f"{state.rank} {late_step} {int(line_count) + 1}"
        if self._store.compare_set(said_key, previous_claim, claim).decode() != claim:
            return

        first_counts = self._stored_check_counts()  # a rank is alive if its count grows meanwhile
        median_s = self.recorder.median_s()
        for _ in range(_CHECKS):
            self.sleep(self.pause_s + min(_LONGEST_MEDIAN_S, median_s or 0.0) / _CHECKS)
            state = self.state()
            self.tell(state)
        if not state.waiting or state.step != late_step:
            # The job goes on. Another rank may report the next late step, so the claim is withdrawn.
            self._store.compare_set(said_key, claim, previous_claim)
            return

        def ask(rank: int) -> State | None:
            if rank == state.rank:
                return state
            other = self._stored_state(rank)
            is_alive = other is not None and other.check_count > first_counts.get(rank, 0)
            return other if is_alive else None

        cause = blame(state.rank, ask, self.node_of, self.rates)
        if not cause:
            return
        usual = "no step's time is known yet"
        if median_s is not None:
            usual = f"the median is {median_s:.2f} s"
        self.say(
            f"step {late_step} takes {self._so_far():.1f} s so far, {usual}: {cause} (seen by rank "
            f"{state.rank})"
        )
        self._print_dump_hint()

    def _stored_check_counts(self) -> dict[int, int]:
        """Return rank -> how often it has checked its step and stored its state, for ranks in its groups."""
        ranks = {rank for group in list(self.recorder.groups.values()) for rank in group.ranks}
        counts = {}
        for rank in sorted(ranks)[:_MOST_RANKS]:
            state = self._stored_state(rank)
            if state is not None:
                counts[rank] = state.check_count
        return counts

    def _print_dump_hint(self) -> None:
        """Print once where torch's flight recorder writes its dumps, if it writes any."""
        if self._has_said_dump_hint:
            return
        self._has_said_dump_hint = True
        hint = self.dump_hint()
        if hint:
            self.say(hint)

    def say_alone(self) -> None:
        """Print the operation that this rank waits in, if the job's store does not answer.

        Only if the step is late, once a step, and only on the lowest rank of the oldest operation.
        The rank that hosts the store is left out: it may be the rank that has stopped.
        """
        state = self.state()
        if not self._late() or not state.waiting or self._alone_at == state.step:
            return
        wait = state.waiting[0]
        candidates = {state.rank, *wait.ranks} - {self.host}
        if state.rank != min(candidates, default=-1):
            return
        self._alone_at = state.step
        kept_by = ""
        if self.host is not None:
            kept_by = f"; it is kept by rank {self.host} on {self.node_of(self.host)}"
        self.say(
            f"step {state.step} takes {self._so_far():.1f} s so far: {wait} is stuck, and the job's store "
            f"does not answer{kept_by} (seen by rank {state.rank})"
        )
