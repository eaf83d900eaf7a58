"""What every operation of torch.distributed cost, step by step: bytes, time, and what the program waited for.

    launch(), launched() -> the operation is under way      waited() -> the program stood still for it
    finish(op)           -> it is over                      step_done() -> what is over belongs to this step

patches/*/telemetry.py call these from torch's process groups and from the engines; runtime/watch/watchdog.py
looks at what is under way, telemetry_file.py writes what is over. One Recorder for each process, `recorder`,
None while nobody wants to know.

Times are time.monotonic() seconds of this node. An operation is over when the backend says so (gloo's
collectives), for gloo's sends and receives, which do not tell, when the program's wait() returned, and over
NCCL when the GPU has come by (on_device.py): `waited` is then how long the compute stream stood still.
"""

from __future__ import annotations

import statistics
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from holmes_ext.runtime.groups.callbacks import before_exit
from holmes_ext.runtime.measure.on_device import DeviceClock, OnDevice
from holmes_ext.runtime.measure.operations import GroupTraffic, Op, sent_bytes

if TYPE_CHECKING:
    from holmes_ext.plan.sizes import Sizes

#: Who can end a step, the most trusted last: once a later one has, those before it are not listened to.
SOURCES = ("optimizer", "reducer", "engine", "program")
#: Kind of the span in which DistributedDataParallel's last bucket is launched: its backward pass ends there.
LAST_BUCKET = "last bucket"
#: Steps whose duration the median is taken of.
_KEPT = 50


class Recorder:
    """Operations under way and those finished since the last step; called from any thread. on_step: what is
    called of every step with (step, begin, end, tokens, operations, spans, reduction); none of them: for the
    watchdog only."""

    def __init__(
        self,
        rank: int,
        sizes: Sizes | None,
        on_step: Callable[..., None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.rank, self.sizes, self.clock = rank, sizes, clock
        self.on_step = [on_step] if on_step is not None else []
        self.on_round: Callable[[dict[str, Any]], None] | None = (
            None  # told of rounds with other jobs
        )
        self.device = OnDevice(self, DeviceClock(clock))
        self.groups: dict[int, GroupTraffic] = {}
        self.open: dict[int, Op] = {}  # by id(op)
        self.by_work: dict[int, Op] = {}  # by id(work)
        self.coalescing: dict[int, list[Op]] = {}  # by id(process group)
        self.done: list[Op] = []
        self.behind: list[Op] = []  # under way when the last step ended
        # kind, begin, end: seconds, or marks where spans are the GPU's
        self.spans: list[tuple[str, Any, Any]] = []
        self.spans_on_device, self.device_index = False, 0
        # of the GPU's memory by the last micro-batch's forward pass, where spans are the GPU's
        self.kept_bytes = 0
        self.reduction: dict[str, Any] | None = None
        self.step = 0
        # the step's: where the last one ended; where the program entered it
        self.began = self.entered = self.clock()
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
        return bool(self.on_step)

    # Operations

    def group(self, process_group: Any) -> GroupTraffic:
        key = id(process_group)
        traffic = self.groups.get(key)
        if traffic is None:
            traffic = self.groups[key] = GroupTraffic(process_group)
            self._removed.append(weakref.ref(process_group, lambda _: self._group_gone(key)))
        return traffic

    def _group_gone(self, key: int) -> None:
        for op in self.groups.pop(key).on_device:
            self.finish(op)

    def kind(self, op: Op) -> str:
        """What the operation's group is for, one of KINDS."""
        return op.group.kind(self.sizes, op.peer, self.rank)

    def ends(self, op: Op) -> tuple[int, ...]:
        """The ranks that take part."""
        return (
            op.group.ranks
            if op.peer is None or op.peer < 0
            else tuple(sorted((self.rank, op.peer)))
        )

    def launch(self, process_group: Any, name: str, payload: int, to: int | None) -> Op | None:
        """It is about to be started. to: the other's rank in the group (send, receive). None: a CUDA graph
        takes it, and it is not seen when that runs."""
        group, peer = self.group(process_group), None
        if group.is_on_device and self.device.captures():
            return None
        if to is None:
            number = group.collectives
            group.collectives = number + 1
        else:
            peer = group.ranks[to] if to >= 0 else -1
            number = group.messages.get((name, peer), 0)
            group.messages[name, peer] = number + 1
        sent = sent_bytes(name, payload, len(group.ranks), group.backend) if self.keeps else 0
        op = Op(group, name, payload, sent, peer, number, self.clock())
        op.background = threading.get_ident() != self._main
        if group.is_on_device:
            self.device.launch(op)
        self.open[id(op)] = op
        return op

    def launched(self, op: Op, work: Any, process_group: Any, is_synchronous: bool = False) -> None:
        """Record that an operation was started.

        Args:
            work: The Work that torch returned; None for a synchronous operation of nccl-legacy.
            is_synchronous: Whether the program called the operation without async_op=True.
        """
        op.is_synchronous = is_synchronous
        block = self.coalescing.get(id(process_group))
        if (
            block is not None
        ):  # the program coalesces operations: block_ended() records them together
            block.append(op)
            return
        if is_synchronous and op.group.is_nccl2:
            # The wait() of this Work returns at once, although the program's stream waits. As with
            # nccl-legacy, which returns no Work, the operation is timed on the stream instead.
            work = None
        if work is not None:
            self._find_by_work(op, work)
        if op.group.is_on_device:
            self.device.launched(op)
        elif work is None:
            self.finish(op)
        elif self.keeps and op.peer is None:
            self._finish_with_future(op, work)

    def _find_by_work(self, op: Op, work: Any) -> None:
        """Let wait() find the operation of a Work. The Work is not kept alive."""
        key = id(work)
        self.by_work[key] = op
        op.work = weakref.ref(work, lambda _: self._dropped(key, op))

    def _finish_with_future(self, op: Op, work: Any) -> None:
        """Let a thread of gloo record the end of an operation, by the future of its Work."""
        self._untold.add(op)
        try:
            work.get_future().add_done_callback(before_exit(lambda _: self._told(op)))
        except RuntimeError:  # gloo's reduce-scatter has no future: wait() records its end
            self._untold.discard(op)

    def block_ended(self, process_group: Any, work: Any) -> None:
        """A block of operations was started, all at once: the last one stands for them."""
        if ops := self.coalescing.pop(id(process_group), []):
            ops[-1].block = ops[:-1]
            is_synchronous = all(op.is_synchronous for op in ops)
            self.launched(ops[-1], work, process_group, is_synchronous)

    def _told(self, op: Op) -> None:
        self.finish(op)
        self._untold.discard(op)

    def failed(self, op: Op) -> None:
        self.open.pop(id(op), None)

    def finish(self, op: Op) -> None:
        """It is over, now."""
        self.end(op, self.clock())

    def end(self, op: Op, end: float) -> None:
        """It was over at `end`, and its block with it."""
        # the backend's thread and the program's may both see it: the second waits until it is noted
        with self._ending:
            for member in (*op.block, op):
                if not member.end:
                    member.end = end
                    if self.open.pop(id(member), None) is not None and self.keeps:
                        self.done.append(member)

    def wait(self, op: Op, wait: Callable[[], Any]) -> Any:
        """The program waits for the operation: wait()."""
        if op.group.is_on_device:
            return self.device.wait(op, wait)
        start = self.clock()
        result = wait()
        if not op.background and threading.get_ident() == self._main:
            op.waited += self.clock() - start
        self.finish(op)
        return result

    def settle(self, seconds: float) -> None:
        """Return when the backend's threads have told the end of every operation that they tell of, and what
        the last step left under way is over, or after so long."""
        limit = time.monotonic() + seconds
        while (self._untold or any(not op.end for op in self.behind)) and time.monotonic() < limit:
            self.poll()
            time.sleep(0.002)

    def _dropped(self, key: int, op: Op) -> None:
        """Nobody holds the work any more: it was waited for, or never will be."""
        if self.by_work.get(key) is op:
            del self.by_work[key]
        if not op.group.is_on_device:
            self.finish(op)

    def on_gpu(self, on: bool) -> None:
        """From now on spans are the GPU's, of this thread's device."""
        self.spans_on_device = on
        if on:
            import torch

            self.device_index = torch.cuda.current_device()

    def span_mark(self) -> tuple[Any, int]:
        """(now, bytes of the GPU's memory in use), on the GPU where spans are the GPU's."""
        if not self.spans_on_device or self.device.captures():
            return self.clock(), 0
        import torch

        return self.device.mark(), torch.cuda.memory_allocated()

    # Steps

    def step_begins(self, exactly: bool = True) -> None:
        """The program enters a step, exactly here; or where the last one ended, unless much lies between."""
        self.entered, self.armed = self.clock(), True
        # who says where it begins will say where it ends
        self._source = max(self._source, SOURCES.index("engine"))
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
        self.poll()
        self.device.step_done()
        if self.on_step:
            done, self.done = self.done, []
            spans, self.spans = self.device.timed(self.spans)
            for told in self.on_step:
                told(self.step, self.began, now, tokens, done, spans, self.reduction)
            self.behind = list(self.open.values())
        self.reduction = None
        self.step += 1
        self.began = self.entered = now
        self.armed = source != "engine"

    def poll(self) -> None:
        """End what the GPU is done with."""
        for group in list(self.groups.values()):
            self.device.poll(group)

    def in_flight(self) -> list[Op]:
        """Begun and not over, the oldest first; over NCCL what the GPU is at, not the host."""
        self.poll()
        ops = (op for op in list(self.open.values()) if self.device.is_at(op))
        return sorted(ops, key=lambda op: op.start)

    def not_begun(self) -> list[Op]:
        """What was launched over NCCL and the GPU has not come to."""
        return [op for op in list(self.open.values()) if not self.device.has_begun(op)]


#: This process's recorder; the patches look here, so None costs one look.
recorder: Recorder | None = None


def set_recorder(new: Recorder | None) -> None:
    global recorder
    recorder = new


@contextmanager
def span(kind: str) -> Iterator[None]:
    """Around something of the program's own: "forward", "backward", "optimizer"."""
    active = recorder
    if active is None or not active.keeps:
        yield
        return
    begun, before = active.span_mark()
    yield
    ended, after = active.span_mark()
    active.spans.append((kind, begun, ended))
    if kind == "forward":
        active.kept_bytes = after - before


def learn_sizes(sizes: Sizes | None) -> None:
    """The framework's own parallel sizes, where the plan was made without."""
    if recorder is not None:
        recorder.sizes = recorder.sizes or sizes


def reduction_done(times: Any, on_host: bool) -> None:
    """GradientReducer.finish's own figures. on_host: its times are the reduction's, not only launches'."""
    if recorder is not None:
        recorder.reduction = {"bytes": times.bytes, "early": times.early, "buckets": times.buckets}
        if on_host:
            recorder.reduction |= {"seconds": times.seconds, "exposed": times.exposed_s}
        recorder.step_done("reducer")


def outer_round(figures: dict[str, Any]) -> None:
    """Of a round with other jobs (join)."""
    if recorder is not None and recorder.on_round is not None:
        recorder.on_round({"outer": figures})


def step_done(tokens: int = 0) -> None:
    """For training loops that no framework runs: the step is over. Nothing happens without telemetry.

    Args:
        tokens: Trained by all ranks together in this step; 0: not known.
    """
    if recorder is not None:
        recorder.step_done("program", tokens)
