"""Says who holds the job up, while it is held up: one line that names group, rank and NIC.

    every rank's thread looks at the clock     the step takes over K times the median (and a floor): the rank puts what it waits
    some times a second, nothing else          for into the job's store; the first one whose operation is stuck too follows the chain:

        rank 0 waits for 2 in the data group -> rank 2 waits for 3 in its pipeline -> rank 3 waits for nobody: rank 3 it is

The store is not touched, and no connection made, before a step is late. What is under way comes from runtime/measure/telemetry.py, whose recorder
counts the operations of every group: who has started fewer than the one that is waited for has not arrived.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from holmes_ext.runtime.measure.telemetry import Op, Recorder
from holmes_ext.units import format_rate
from holmes_ext.words import some_of

#: Longest operation under way, at least: so old must the oldest one be for a late step to count as stuck (or the median step).
STUCK_S = 1.0
#: Operations that a rank tells of, the oldest first; lines in one job at most.
_TOLD, LINES = 8, 20


@dataclass(frozen=True)
class Waiting:
    """One operation under way. number: which one of the group it is (of the messages to or from `peer`); age in seconds."""

    group: str
    kind: str
    operation: str
    ranks: tuple[int, ...]
    number: int
    peer: int | None
    age: float
    fabric: str
    interface: str

    @property
    def awaited(self) -> tuple[int, ...]:
        return self.ranks if self.peer is None else (self.peer,)


@dataclass(frozen=True)
class State:
    """What a rank tells of itself when its step is late. started: operations by group; messages: "send GROUP PEER" -> how many;
    nics: interface -> bits/s that it carries now, both ways; look: grows while the rank is alive."""

    rank: int
    node: str
    step: int
    look: int
    waiting: tuple[Waiting, ...] = ()
    started: Mapping[str, int] = field(default_factory=dict)
    messages: Mapping[str, int] = field(default_factory=dict)
    nics: Mapping[str, float] = field(default_factory=dict)

    def has_reached(self, wait: Waiting, rank: int) -> bool:
        """Whether this rank has come to the operation that `rank` waits in."""
        if wait.peer is None:
            return self.started.get(wait.group, 0) > wait.number
        other = "receive" if wait.operation == "send" else "send"
        return self.messages.get(f"{other} {wait.group} {rank}", 0) > wait.number

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> State:
        document = json.loads(text)
        waiting = tuple(Waiting(**{**entry, "ranks": tuple(entry["ranks"])}) for entry in document.pop("waiting"))
        return cls(**document, waiting=waiting)


#: State of a rank, None when it does not answer.
Ask = Callable[[int], "State | None"]


def blame(rank: int, ask: Ask, node_of: Callable[[int], str], rates: Mapping[str, int]) -> str:
    """Who holds `rank` up, in words; follows who waits for whom. rates: bits/s of each fabric. "" when `rank` waits for nobody."""
    path: list[int] = []
    seen_in: Waiting | None = None
    while True:
        state = ask(rank)
        who = f"rank {rank} on {node_of(rank)}"
        if state is None:
            return f"{_group(seen_in)} waits for {who}, which does not answer: stopped, dead, or cut off from the job's store"
        if not state.waiting:
            if seen_in is None:
                return ""
            return f"{_group(seen_in)} waits for {who}, which is in no operation: it computes, loads data or writes"
        path.append(rank)
        following = None
        for wait in state.waiting:
            late = [other for other in wait.awaited if other != rank and not _arrived(ask(other), wait, rank)]
            if late:
                silent = [other for other in late if ask(other) is None]
                following = (silent or late)[0], wait
                break
        if following is None:
            return _slow(rank, state.waiting[0], ask, node_of, rates)
        rank, seen_in = following
        if rank in path:
            circle = ", ".join(map(str, path[path.index(rank) :]))
            return f"ranks {circle} wait for each other in a circle: {_group(seen_in)} waits for rank {rank} on {node_of(rank)}"


def _arrived(state: State | None, wait: Waiting, rank: int) -> bool:
    return state is not None and state.has_reached(wait, rank)


def _group(wait: Waiting) -> str:
    over = f"{wait.fabric} over {wait.interface}" if wait.interface else wait.fabric
    return f"the {wait.kind} group of ranks {some_of(wait.ranks)} ({wait.operation} on {over})"


def _slow(rank: int, wait: Waiting, ask: Ask, node_of: Callable[[int], str], rates: Mapping[str, int]) -> str:
    """Everybody is there and still it takes long: the network, with what each member's NIC carries."""
    seen = {}
    for member in dict.fromkeys((rank, *wait.awaited)):
        state = ask(member)
        mine = next((one for one in state.waiting if one.group == wait.group), wait) if state else wait
        if state and mine.interface in state.nics:
            seen[member] = (state.nics[mine.interface], f"rank {member} on {node_of(member)} moves {format_rate(round(state.nics[mine.interface]))} over {mine.interface}")
    slowest = [text for _, text in sorted(seen.values())[:4]]
    rate = f" of {format_rate(rates[wait.fabric])}" if wait.fabric in rates else ""
    return f"{_group(wait)}: all have arrived, the network is slow{': ' if slowest else ''}{', '.join(slowest)}{rate}"


class Watchdog:
    """The thread, and what it needs.

    factor, floor_s: a step is late after max(factor x the median step, floor_s) seconds. connect(): a store client of its own, made
    when first needed; prefix of its keys. counters(): interface -> bytes moved so far. host: the rank whose process is the store's server.
    """

    def __init__(
        self,
        recorder: Recorder,
        factor: float,
        floor_s: float,
        connect: Callable[[], Any],
        prefix: str,
        node_of: Callable[[int], str],
        rates: Mapping[str, int],
        counters: Callable[[], Mapping[str, int]],
        host: int | None = None,
        say: Callable[[str], None] = lambda line: print(f"holmes: {line}", file=sys.stderr, flush=True),
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.recorder, self.factor, self.floor_s, self.connect, self.prefix = recorder, factor, floor_s, connect, prefix
        self.node_of, self.rates, self.counters, self.say, self.clock, self.sleep = node_of, rates, counters, say, clock, sleep
        self.pause_s = min(2.0, max(0.25, floor_s / 8))
        self._store: Any = None
        self.host = host
        self._looks, self._alone_at = 0, -1
        self._carried: tuple[float, Mapping[str, int]] | None = None
        self._ended = threading.Event()

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="holmes watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; returns when it has ended, or after a second (it may be waiting for the store)."""
        self._ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)

    def _run(self) -> None:
        while not self._ended.wait(self.pause_s):
            try:
                self.look()
            except Exception:  # noqa: BLE001 - a store that does not answer, or the job ends and it went first
                self._store = None
                self._say_alone()

    def _say_alone(self) -> None:
        """The store does not answer: the lowest rank of what is waited for, but the store's host, says what it sees itself."""
        limit, state = self.late_after_s(), self.state()
        if limit is None or self.clock() - self.recorder.entered < limit or not state.waiting or self._alone_at == state.step:
            return
        wait = state.waiting[0]
        if state.rank == min((rank for rank in {state.rank, *wait.ranks} if rank != self.host), default=-1):
            self._alone_at = state.step
            seconds, where = self.clock() - self.recorder.entered, f"; it is kept by rank {self.host} on {self.node_of(self.host)}" if self.host is not None else ""
            self.say(f"step {state.step} takes {seconds:.1f} s so far: {_group(wait)} is stuck, and the job's store does not answer{where} (seen by rank {state.rank})")

    def late_after_s(self) -> float | None:
        """Seconds after which the step counts as late; None while there is no median."""
        median = self.recorder.median_s()
        return None if median is None else max(self.factor * median, self.floor_s)

    def look(self) -> None:
        """One look at the clock; when the step is late, tell the others, and say who is behind if nobody has."""
        limit = self.late_after_s()
        if limit is None or self.clock() - self.recorder.entered < limit:
            self._carried = None
            return
        state = self.state()
        self._tell(state)
        stuck = max(STUCK_S, self.recorder.median_s() or 0.0)
        if self.recorder.armed and state.waiting and state.waiting[0].age >= stuck:
            self._report(state)

    def state(self) -> State:
        """This rank's, now."""
        recorder, now = self.recorder, self.clock()
        recorder.poll_nccl()
        for op in list(recorder.open.values()):
            work = op.work() if op.work is not None else None
            if work is not None and op.peer is None and work.is_completed():
                recorder.finish(op)
        ops = sorted(recorder.open.values(), key=lambda op: op.start)[:_TOLD]
        groups = list(recorder.groups.values())
        messages = {f"{name} {group.name} {peer}": count for group in groups
                    for name, counts in (("send", group.sends), ("receive", group.receives)) for peer, count in list(counts.items())}  # fmt: skip
        self._looks += 1
        return State(
            rank=recorder.rank,
            node=self.node_of(recorder.rank),
            step=recorder.step,
            look=self._looks,
            waiting=tuple(self._waiting(op, now) for op in ops),
            started={group.name: group.count for group in groups},
            messages=messages,
            nics=self._rates(now),
        )

    def _waiting(self, op: Op, now: float) -> Waiting:
        group, kind = op.group, op.group.kind(self.recorder.sizes, op.peer, self.recorder.rank)
        ranks = group.ranks if op.peer is None else tuple(sorted((self.recorder.rank, op.peer)))
        return Waiting(group.name, kind, op.name, ranks, op.number, op.peer, now - op.start, group.transport.fabric, group.transport.interface)

    def _rates(self, now: float) -> dict[str, float]:
        """Bits/s of each interface since the last look."""
        carried, before = self.counters(), self._carried
        self._carried = (now, carried)
        if before is None or now <= before[0]:
            return {}
        return {name: (carried[name] - before[1][name]) * 8 / (now - before[0]) for name in carried if name in before[1]}

    def _key(self, rank: int) -> str:
        return f"{self.prefix}/state/{rank}"

    def _tell(self, state: State) -> None:
        if self._store is None:
            self._store = self.connect()
        self._store.set(self._key(state.rank), state.dump())

    def _report(self, state: State) -> None:
        """Say the line, unless another rank has for this step; everybody who is alive gets time to tell of itself twice."""
        key = f"{self.prefix}/said"
        last = self._store.compare_set(key, "", "none -1 0").decode()
        _, step, lines = last.split()
        if int(step) >= state.step - 1 or int(lines) >= LINES:
            return
        mine = f"{state.rank} {state.step} {int(lines) + 1}"
        if self._store.compare_set(key, last, mine).decode() != mine:
            return
        late, first = state.step, self._looks_of_all()
        for _ in range(4):  # ranks are late up to a step after each other
            self.sleep(self.pause_s + min(10.0, self.recorder.median_s() or 0.0) / 4)
            state = self.state()
            self._tell(state)
        if not state.waiting or state.step != late:  # it went on meanwhile; the next step may be as late
            self._store.compare_set(key, mine, last)
            return
        cause = blame(state.rank, lambda rank: self._ask(rank, first, state), self.node_of, self.rates)
        if cause:
            seconds, median = self.clock() - self.recorder.entered, self.recorder.median_s() or 0.0
            self.say(f"step {state.step} takes {seconds:.1f} s so far, the median is {median:.2f} s: {cause} (seen by rank {state.rank})")

    def _looks_of_all(self) -> dict[int, int]:
        """Rank -> how often it has told of itself so far: who does not go on from there is not alive."""
        ranks = sorted({rank for group in list(self.recorder.groups.values()) for rank in group.ranks})[:1024]
        return {rank: state.look for rank in ranks if (state := self._get(rank)) is not None}

    def _get(self, rank: int) -> State | None:
        return State.load(self._store.get(self._key(rank)).decode()) if self._store.check([self._key(rank)]) else None

    def _ask(self, rank: int, first: Mapping[int, int], mine: State) -> State | None:
        if rank == mine.rank:
            return mine
        state = self._get(rank)
        return state if state is not None and state.look > first.get(rank, 0) else None
