"""What every operation of torch.distributed cost, step by step: bytes, time, and what the program waited for.

    launch(), launched() -> the operation is under way      waited() -> the program stood still for it
    finish(op)           -> it is over                      step_done() -> what is over belongs to this step

patches/*/telemetry.py call these from torch's process groups and from the engines; runtime/watch/watchdog.py looks at
what is under way, telemetry_file.py writes what is over. One Recorder for each process, `recorder`, None while nobody
wants to know.

Times are time.monotonic() seconds of this node. An operation is over when the backend says so (gloo's collectives,
NCCL's events), or, for gloo's sends and receives, which do not tell, when the program's wait() returned.
"""

from __future__ import annotations

import statistics
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from holmes_ext.plan.sizes import Sizes
from holmes_ext.runtime import session
from holmes_ext.runtime.groups import kinds
from holmes_ext.runtime.groups.backend import backend_of

#: Who can end a step, the most trusted last: once a later one has, those before it are not listened to.
SOURCES = ("optimizer", "reducer", "engine", "program")
#: Steps whose duration the median is taken of.
_KEPT = 50


class GroupTraffic:
    """A process group as this rank sees it: members, transport, and how many operations it has started on it."""

    def __init__(self, process_group: Any):
        import torch.distributed as dist

        current = session.require()
        self.name = process_group.group_name
        self.ranks = tuple(dist.get_process_group_ranks(process_group))
        self.backend = backend_of(process_group)
        self.description = str(process_group.group_desc or "").replace("undefined", "")
        made = [r.transport for r in current.groups if r.ranks == self.ranks and r.backend == self.backend]
        self.transport = made[-1] if made else current.transport(self.ranks, self.backend)
        self.world_size = current.plan.world_size
        self.collectives = 0
        self.messages: dict[tuple[str, int], int] = {}  # ("send" or "receive", the other's rank) -> how many

    def kind(self, sizes: Sizes | None, peer: int | None, rank: int) -> str:
        """What it is for; a message between two ranks may belong to the pipeline whatever group carries it."""
        if peer is not None and len(self.ranks) > 2 and kinds.described(self.description) in ("", "world"):
            return kinds.kind_of_ranks((rank, peer), sizes, self.world_size) if sizes else "other"
        return kinds.kind_of(self.ranks, self.description, sizes, self.world_size)


@dataclass(slots=True, eq=False)
class Op:
    """One operation. payload, sent: bytes (kinds.sent_bytes); peer: of a send or receive; number: which of the group's
    collectives, or of its messages to or from the peer; end: 0 while it is under way."""

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
    events: Any = None  # NCCL: the work, kept until its duration is known
    waits: list[tuple[Any, Any]] = field(default_factory=list)  # NCCL: pairs of CUDA events around the stream's waits


class Recorder:
    """Operations under way and those finished since the last step. Called from any thread.

    on_step(step, begin, end, tokens, operations, spans, reduction): told of every finished step; None where only the
    watchdog looks. clock: seconds.
    """

    def __init__(
        self, rank: int, sizes: Sizes | None, on_step: Callable[..., None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):  # fmt: skip
        self.rank, self.sizes, self.on_step, self.clock = rank, sizes, on_step, clock
        self.on_round: Callable[[dict[str, Any]], None] | None = None  # told of rounds with other jobs
        self.groups: dict[int, GroupTraffic] = {}
        self.open: dict[int, Op] = {}  # by id(op)
        self.by_work: dict[int, Op] = {}  # by id(work)
        self.coalescing: dict[int, list[Op]] = {}  # by id(process group)
        self.done: list[Op] = []
        self.spans: list[tuple[str, float, float]] = []
        self.reduction: dict[str, Any] | None = None
        self.step = 0
        self.began = self.entered = self.clock()  # the step's: where the last one ended; where the program entered it
        self.armed = False  # whether the program is inside a step, as far as anybody said
        self.durations: deque[float] = deque(maxlen=_KEPT)
        self._untold: set[Op] = set()  # whose end a thread of the backend has yet to tell
        self._ending = threading.RLock()
        self._source = 0
        self._main = threading.main_thread().ident
        self._removed: list[Any] = []

    @property
    def keeps(self) -> bool:
        """Whether anybody wants what is over."""
        return self.on_step is not None

    # Operations

    def group(self, process_group: Any) -> GroupTraffic:
        key = id(process_group)
        found = self.groups.get(key)
        if found is None:
            found = self.groups[key] = GroupTraffic(process_group)
            self._removed.append(weakref.ref(process_group, lambda _: self.groups.pop(key, None)))
        return found

    def kind(self, op: Op) -> str:
        """What the operation's group is for, one of kinds.KINDS."""
        return op.group.kind(self.sizes, op.peer, self.rank)

    def ends(self, op: Op) -> tuple[int, ...]:
        """The ranks that take part."""
        return op.group.ranks if op.peer is None or op.peer < 0 else tuple(sorted((self.rank, op.peer)))

    def launch(self, process_group: Any, name: str, payload: int, to: int | None) -> Op:
        """An operation is about to be started. to: the other's rank in the group (send, receive)."""
        group, peer = self.group(process_group), None
        if to is None:
            number = group.collectives
            group.collectives = number + 1
        else:
            peer = group.ranks[to] if to >= 0 else -1
            number = group.messages.get((name, peer), 0)
            group.messages[name, peer] = number + 1
        sent = kinds.sent_bytes(name, payload, len(group.ranks), group.backend) if self.keeps else 0
        op = Op(group, name, payload, sent, peer, number, self.clock())
        op.background = threading.get_ident() != self._main
        self.open[id(op)] = op
        return op

    def launched(self, op: Op, work: Any, process_group: Any) -> None:
        """It was started: `work` is what the backend gave (None inside a coalescing block)."""
        if work is None:
            waiting = self.coalescing.get(id(process_group))
            if waiting is not None:
                waiting.append(op)
            else:
                self.finish(op)
            return
        key = id(work)
        self.by_work[key] = op
        op.work = weakref.ref(work, lambda _: self._dropped(key, op))
        if op.group.backend == "nccl":
            op.events = work  # torch drops it at once, long before the GPU is done
        elif self.keeps and op.peer is None:
            try:
                self._untold.add(op)
                work.get_future().add_done_callback(lambda _: self._told(op))
            except RuntimeError:  # gloo's reduce-scatter has none: it ends when it was waited for
                self._untold.discard(op)

    def _told(self, op: Op) -> None:
        self.finish(op)
        self._untold.discard(op)

    def failed(self, op: Op) -> None:
        self.open.pop(id(op), None)

    def finish(self, op: Op) -> None:
        """It is over, now."""
        with self._ending:  # the backend's thread and the program's may both see it: the second waits until it is noted
            if not op.end:
                op.end = self.clock()
                if self.open.pop(id(op), None) is not None and self.keeps:
                    self.done.append(op)

    def waited(self, op: Op, start: float) -> None:
        """The program's wait for the operation, from `start` on, is over."""
        if not op.background and threading.get_ident() == self._main:
            op.waited += self.clock() - start
        if op.group.backend != "nccl":
            self.finish(op)

    def settle(self, seconds: float) -> None:
        """Return when the backend's threads have told the end of every operation that they tell of, or after so
        long."""
        limit = time.monotonic() + seconds
        while self._untold and time.monotonic() < limit:
            time.sleep(0.002)

    def _dropped(self, key: int, op: Op) -> None:
        """Nobody holds the work any more: it was waited for, or never will be."""
        if self.by_work.get(key) is op:
            del self.by_work[key]
        if op.events is None:
            self.finish(op)

    # Steps

    def step_begins(self, exactly: bool = True) -> None:
        """The program enters a step. exactly: it begins here; else where the last one ended, unless much (saving,
        evaluating) lies between."""
        self.entered, self.armed = self.clock(), True
        self._source = max(self._source, SOURCES.index("engine"))  # who says where it begins will say where it ends
        if exactly or self.entered - self.began > (self.median_s() or 0.0):
            self.began = self.entered

    def median_s(self) -> float | None:
        """Of the last steps, None before three are done (the first one does not count)."""
        known = list(self.durations)
        return statistics.median(known) if len(known) >= 3 else None

    def step_done(self, source: str, tokens: int = 0) -> None:
        """A step is over. tokens: that all ranks together trained in it, 0 where nobody knows."""
        place = SOURCES.index(source)
        if place < self._source:
            return
        self._source = place
        now = self.clock()
        if self.step:
            self.durations.append(now - self.began)
        self.poll_nccl()
        if self.on_step is not None:
            (done, self.done), (spans, self.spans) = (self.done, []), (self.spans, [])
            self.on_step(self.step, self.began, now, tokens, done, spans, self.reduction)
        self.reduction = None
        self.step += 1
        self.began = self.entered = now
        self.armed = source != "engine"

    def poll_nccl(self) -> None:
        """NCCL's operations that have ended by now: their durations, and how long the compute stream stood still."""
        for op in list(self.open.values()):
            work = op.events
            if work is None or not work.is_completed() or any(not after.query() for _, after in op.waits):
                continue
            if self.open.pop(id(op), None) is None:  # the watchdog's thread looks too
                continue
            try:
                seconds = work._get_duration() / 1e3 if self.keeps else 0.0
            except RuntimeError:  # without TORCH_NCCL_ENABLE_TIMING: when it was seen to be over
                seconds = self.clock() - op.start
            op.end = op.start + seconds
            op.waited = sum(before.elapsed_time(after) for before, after in op.waits) / 1e3
            op.events, op.waits = None, []
            if self.keeps:
                self.done.append(op)


#: This process's recorder; the patches look here, so None costs one look.
recorder: Recorder | None = None


def set_recorder(new: Recorder | None) -> None:
    global recorder
    recorder = new


@contextmanager
def span(kind: str) -> Iterator[None]:
    """Around something of the program's own: "forward", "backward", "optimizer"."""
    begun = recorder.clock() if recorder is not None else 0.0
    yield
    if recorder is not None and recorder.keeps:
        recorder.spans.append((kind, begun, recorder.clock()))


def learn_sizes(sizes: Sizes | None) -> None:
    """The framework's own parallel sizes, where the plan was made without."""
    if recorder is not None:
        recorder.sizes = recorder.sizes or sizes


def reduction_done(times: Any) -> None:
    """From GradientReducer.finish: its own figures, which know of two-level reductions' threads."""
    if recorder is not None:
        recorder.reduction = {
            "bytes": times.bytes, "seconds": times.seconds, "exposed": times.exposed_s, "early": times.early,
            "buckets": times.buckets,
        }  # fmt: skip
        recorder.step_done("reducer")


def outer_round(told: dict[str, Any]) -> None:
    """Of a round with other jobs (runtime/outer)."""
    if recorder is not None and recorder.on_round is not None:
        recorder.on_round({"outer": told})


def step_done(tokens: int = 0) -> None:
    """For training loops that no framework runs: the step is over. tokens: trained by all ranks together. Nothing
    without telemetry."""
    if recorder is not None:
        recorder.step_done("program", tokens)


def union_s(intervals: Sequence[tuple[float, float]]) -> float:
    """Seconds covered by at least one of the (start, end)."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total
