"""Says who holds the job up, while it is held up: one line that names group, rank and NIC.

    every rank's thread looks at the clock some times a second, and does nothing else
    the step takes over K times the median (and a floor): the rank puts what it waits for into the job's
    store; one that is stuck follows the chain:

        rank 0 waits for 2 in the data group -> rank 2 waits for 3 in its pipeline -> rank 3 waits for nobody:
        rank 3 it is

The store is not touched, and no connection made, before a step is late. What is under way comes from
telemetry's Recorder, which counts the operations of every group: who has started fewer than the one that is
waited for has not arrived.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from holmes_ext.runtime.measure.telemetry import Op, Recorder
from holmes_ext.runtime.start.store import ENDED_S
from holmes_ext.units import format_rate
from holmes_ext.words import some_of, tell_user

#: Longest operation under way, at least: so old must the oldest one be for a late step to count as stuck (or
#: the median).
STUCK_S = 1.0
#: Floors that a step may take while the median is not known: the first ones compile, tune and make
#: communicators.
FIRST_FLOORS = 12
#: Operations that a rank tells of, the oldest first; lines in one job at most.
_TOLD, LINES = 8, 20


@dataclass(frozen=True)
class Waiting:
    """One operation under way. number: which of the group's (or of messages with `peer`); age: seconds."""

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

    def __str__(self) -> str:
        over = f"{self.fabric} over {self.interface}" if self.interface else self.fabric
        return f"the {self.kind} group of ranks {some_of(self.ranks)} ({self.operation} on {over})"


@dataclass(frozen=True)
class State:
    """Of a rank whose step is late. started: operations by group; messages: "send GROUP PEER" -> count; nics:
    interface -> bits/s, both ways; look: grows while the rank is alive."""

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
        waiting = tuple(
            Waiting(**{**entry, "ranks": tuple(entry["ranks"])})
            for entry in document.pop("waiting")
        )
        return cls(**document, waiting=waiting)


#: State of a rank, None when it does not answer.
Ask = Callable[[int], State | None]


def blame(rank: int, ask: Ask, node_of: Callable[[int], str], rates: Mapping[str, int]) -> str:
    """Who holds `rank` up, in words, following who waits for whom; "": nobody. rates: of each fabric."""
    path: list[int] = []
    seen_in: Waiting | None = None
    while True:
        state, who = ask(rank), f"rank {rank} on {node_of(rank)}"
        if state is None:
            return (
                f"{seen_in} waits for {who}, which does not answer: stopped, dead, or cut off from the "
                f"job's store"
            )
        if not state.waiting:
            idle = f"{seen_in} waits for {who}, which is in no operation: it computes, loads data or writes"
            return idle if seen_in else ""
        path.append(rank)
        following = next(filter(None, (_late_one(rank, wait, ask) for wait in state.waiting)), None)
        if following is None:
            return _slow(rank, state.waiting[0], ask, node_of, rates)
        rank, seen_in = following
        if rank in path:
            circle = ", ".join(map(str, path[path.index(rank) :]))
            where = f"{seen_in} waits for rank {rank} on {node_of(rank)}"
            return f"ranks {circle} wait for each other in a circle: {where}"


def _late_one(rank: int, wait: Waiting, ask: Ask) -> tuple[int, Waiting] | None:
    """Who has not come to the operation that `rank` waits in; one that does not answer before others."""
    states = {other: ask(other) for other in wait.awaited if other != rank}
    late = [
        other
        for other, state in states.items()
        if state is None or not state.has_reached(wait, rank)
    ]
    late.sort(key=lambda other: states[other] is not None)
    return (late[0], wait) if late else None


def _slow(
    rank: int, wait: Waiting, ask: Ask, node_of: Callable[[int], str], rates: Mapping[str, int]
) -> str:
    """Everybody is there and still it takes long: the network, with what each member's NIC carries."""
    seen = []
    for member in dict.fromkeys((rank, *wait.awaited)):
        state = ask(member)
        waits = state.waiting if state else ()
        its_wait = next((other for other in waits if other.group == wait.group), wait)
        if state and (carries := state.nics.get(its_wait.interface)) is not None:
            moves = f"moves {format_rate(round(carries))} over {its_wait.interface}"
            seen.append((carries, f"rank {member} on {node_of(member)} {moves}"))
    slowest = ", ".join(text for _, text in sorted(seen)[:4])
    rate = f" of {format_rate(rates[wait.fabric])}" if wait.fabric in rates else ""
    return f"{wait}: all have arrived, the network is slow{': ' if slowest else ''}{slowest}{rate}"


@dataclass(eq=False)
class Watchdog:
    """A step is late after max(factor x the median step, floor_s) seconds; one of the first, before there is
    a median, after FIRST_FLOORS x floor_s."""

    recorder: Recorder
    factor: float
    floor_s: float
    connect: Callable[[], Any]  # a client of the store of its own, made when first needed
    prefix: str  # of its keys
    node_of: Callable[[int], str]
    rates: Mapping[str, int]  # bits/s of each fabric
    carried: Callable[[], Mapping[str, int]]  # interface -> bytes moved so far
    host: int | None = None  # the rank whose process is the store's server
    say: Callable[[str], None] = tell_user
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    dump_hint: Callable[[], str] = lambda: (
        ""
    )  # says where torch's flight recorder writes; "" if nowhere

    def __post_init__(self) -> None:
        self.pause_s = min(2.0, max(0.25, self.floor_s / 8))
        self._store: Any = None
        self._looks, self._alone_at = 0, -1
        self._has_said_dump_hint = False
        self._carried: tuple[float, Mapping[str, int]] | None = None
        self._ended = threading.Event()

    def start(self) -> None:
        self._ended.clear()
        self._thread = threading.Thread(target=self._run, name="holmes watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Returns when the thread has ended: in the store while the interpreter ends it would abort (134)."""
        self._ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(ENDED_S)

    def _run(self) -> None:
        while not self._ended.wait(self.pause_s):
            try:
                self.look()
            except Exception:  # noqa: BLE001 - the store does not answer, or went before the job
                self._store = None
                self.say_alone()

    def look(self) -> None:
        """One look at the clock; of a late step tell the others, and say who is behind if nobody has."""
        if not self._late():
            self._carried = None
            return
        state = self.state()
        self.tell(state)
        median = self.recorder.median_s()
        stuck = max(STUCK_S, self._limit_s() if median is None else median)
        if self.recorder.armed and state.waiting and state.waiting[0].age >= stuck:
            self._explain(state)

    def _late(self) -> bool:
        return self._so_far() >= self._limit_s()

    def _limit_s(self) -> float:
        """What a step may take until it is late."""
        median = self.recorder.median_s()
        return (
            FIRST_FLOORS * self.floor_s
            if median is None
            else max(self.factor * median, self.floor_s)
        )

    def _so_far(self) -> float:
        return self.clock() - self.recorder.entered

    def state(self) -> State:
        """This rank's, now."""
        recorder, now = self.recorder, self.clock()
        for op in list(recorder.open.values()):
            work = op.work() if op.work is not None else None
            is_on_host = not op.group.is_on_device
            if work is not None and op.peer is None and is_on_host and work.is_completed():
                recorder.finish(op)
        ops, groups = recorder.in_flight(), list(recorder.groups.values())
        self._looks += 1
        started = {group.name: group.collectives for group in groups}
        messages = {
            (group.name, way, peer): count
            for group in groups
            for (way, peer), count in list(group.messages.items())
        }
        for op in recorder.not_begun():  # launched by the host, which is ahead
            if op.peer is None:
                started[op.group.name] -= 1
            else:
                messages[op.group.name, op.name, op.peer] -= 1
        return State(
            rank=recorder.rank,
            node=self.node_of(recorder.rank),
            step=recorder.step,
            look=self._looks,
            waiting=tuple(self._waiting(op, now) for op in ops[:_TOLD]),
            started=started,
            messages={
                f"{way} {name} {peer}": count for (name, way, peer), count in messages.items()
            },
            nics=self._rates(now),
        )

    def _waiting(self, op: Op, now: float) -> Waiting:
        name, kind, transport = op.group.name, self.recorder.kind(op), op.group.transport
        age, ranks = now - op.start, self.recorder.ends(op)
        return Waiting(
            name,
            kind,
            op.name,
            ranks,
            op.number,
            op.peer,
            age,
            transport.fabric,
            transport.interface,
        )

    def _rates(self, now: float) -> dict[str, float]:
        """Bits/s of each interface since the last look."""
        carried, before = self.carried(), self._carried
        self._carried = (now, carried)
        if before is None or now <= before[0]:
            return {}
        seconds, known = now - before[0], before[1]
        return {
            name: (carried[name] - known[name]) * 8 / seconds for name in carried if name in known
        }

    # The job's store

    def tell(self, state: State) -> None:
        if self._store is None:
            self._store = self.connect()
        self._store.set(self._key(state.rank), state.dump())

    def _key(self, rank: int) -> str:
        return f"{self.prefix}/state/{rank}"

    def _get(self, rank: int) -> State | None:
        return (
            State.load(self._store.get(self._key(rank)).decode())
            if self._store.check([self._key(rank)])
            else None
        )

    def _explain(self, state: State) -> None:
        """Say the line unless another rank has; who is alive gets time to tell of itself twice."""
        key, late = f"{self.prefix}/said", state.step
        last = self._store.compare_set(key, "", "none -2 0").decode()
        _, step, lines = last.split()
        if int(step) >= late - 1 or int(lines) >= LINES:
            return
        mine = f"{state.rank} {late} {int(lines) + 1}"
        if self._store.compare_set(key, last, mine).decode() != mine:
            return
        ranks = sorted(
            {rank for group in list(self.recorder.groups.values()) for rank in group.ranks}
        )[:1024]
        looks = {rank: known.look for rank in ranks if (known := self._get(rank)) is not None}
        median = self.recorder.median_s()
        for _ in range(4):  # ranks are late up to a step after each other
            self.sleep(self.pause_s + min(10.0, median or 0.0) / 4)
            state = self.state()
            self.tell(state)
        if (
            not state.waiting or state.step != late
        ):  # it went on meanwhile; the next step may be as late
            self._store.compare_set(key, mine, last)
            return

        def ask(rank: int) -> State | None:
            """Who has not told of itself since the first look is not alive."""
            known = state if rank == state.rank else self._get(rank)
            return (
                known
                if known is not None and (known is state or known.look > looks.get(rank, 0))
                else None
            )

        if cause := blame(state.rank, ask, self.node_of, self.rates):
            usual = (
                "no step's time is known yet" if median is None else f"the median is {median:.2f} s"
            )
            self.say(
                f"step {late} takes {self._so_far():.1f} s so far, {usual}: {cause} (seen by rank "
                f"{state.rank})"
            )
            self._say_dump_hint()

    def _say_dump_hint(self) -> None:
        """Print once where torch's flight recorder writes its dumps, if it writes any."""
        if self._has_said_dump_hint:
            return
        self._has_said_dump_hint = True
        hint = self.dump_hint()
        if hint:
            self.say(hint)

    def say_alone(self) -> None:
        """The store is silent: the lowest rank of those that are waited for, but its host, says what it
        sees."""
        state = self.state()
        if not self._late() or not state.waiting or self._alone_at == state.step:
            return
        wait = state.waiting[0]
        if state.rank == min({state.rank, *wait.ranks} - {self.host}, default=-1):
            self._alone_at = state.step
            kept = (
                f"; it is kept by rank {self.host} on {self.node_of(self.host)}"
                if self.host is not None
                else ""
            )
            stuck = f"{wait} is stuck, and the job's store does not answer{kept} (seen by rank {state.rank})"
            self.say(f"step {state.step} takes {self._so_far():.1f} s so far: {stuck}")
