"""--holmes-profile N: what each layer, transfer and reduction of the running job takes, for `holmes plan --profile`.

    warm-up (2 steps) | N measured steps | reduction and transfers by themselves | profile.json, by rank 0

A recorder is framework-neutral: patches/ tell it where a step, a pass or a send begins and ends, and which modules are which layers.
A pass is cut at the layers, so that their times add up to it:

    forward     a layer begins where its module is called, and ends where the next one begins or the pass ends
    backward    a layer ends where its input's gradient is ready, and begins where the layer behind it ended or the pass began

so what stands between modules counts for its neighbour, recomputation for the layers that are recomputed. On a GPU the borders are
CUDA events, read when the step has ended: nothing waits for them. Of all micro-batches the median counts, of a stage's ranks the slowest
(runtime/measure/profile_file.py).
Sends and receives include waiting for the other; that is why edges and reductions are timed once more, alone, after the last step.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

WARM_UP = 2
#: What the reduction is tried with at most, in bytes.
_LARGEST_PROBE = 64 << 20
#: "before" the first block, the block's number, "after" the last.
Label = str | int


class Recorder:
    """The times of one rank. clock() -> a mark; seconds(a, b) between two marks, once the step has ended."""

    def __init__(self, steps: int, clock: Callable[[], Any] = time.perf_counter, seconds: Callable[[Any, Any], float] = lambda a, b: b - a):
        self.steps, self.clock, self.seconds = steps, clock, seconds
        self.done = 0  # steps, warm-up included
        self.totals: dict[str, list[float]] = {}  # kind -> seconds of each measured step
        self.passes: dict[str, dict[Label, list[float]]] = {"forward": {}, "backward": {}}  # seconds of each micro-batch
        self._open: tuple[str, list] | None = None
        self._spans: list[tuple[str, list]] = []
        self._handles: list[Any] = []
        self._step: list[Any] = []

    @property
    def finished(self) -> bool:
        return self.done >= WARM_UP + self.steps

    @contextmanager
    def step(self) -> Iterator[None]:
        """One training step."""
        self._spans, begin = [], self.clock()
        yield
        self._close(begin, self.clock())

    @contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """A part of the step: "forward", "backward" (cut at the layers), "send", "receive", "reduce", "tied", "optimizer". Nested ones count outside."""
        if self._open is not None:
            yield
            return
        self._open = (kind, [(None, self.clock())])
        try:
            yield
        finally:
            self._open[1].append((None, self.clock()))
            self._spans.append(self._open)
            self._open = None

    def watch(self, modules: Sequence[tuple[Label, Any]]) -> None:
        """Cut passes at these modules, from now on."""
        for label, module in modules:
            self._handles.append(module.register_forward_pre_hook(functools.partial(self._enter, label), with_kwargs=True))

    def release(self) -> None:
        """The modules are again as they were."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _enter(self, label: Label, module: Any, args: tuple, kwargs: dict) -> None:
        self._mark("forward", label)
        entering = next((value for value in (*args, *kwargs.values()) if getattr(value, "requires_grad", False)), None)
        if entering is None and args and isinstance(args[0], (tuple, list)):
            entering = next((value for value in args[0] if getattr(value, "requires_grad", False)), None)
        if entering is not None:
            entering.register_hook(lambda _: self._mark("backward", label))

    def _mark(self, kind: str, label: Label) -> None:
        if self._open is not None and self._open[0] == kind:
            self._open[1].append((label, self.clock()))

    def _close(self, begin: Any, end: Any) -> None:
        """The step has ended: read its marks, unless it was one of the warm-up."""
        self.done += 1
        spans, self._spans = self._spans, []
        if self.done <= WARM_UP:
            self.seconds(begin, end)
            return
        sums: dict[str, float] = {}
        total = self.seconds(begin, end)  # waits, on a GPU, for the last mark
        for kind, marks in spans:
            sums[kind] = sums.get(kind, 0.0) + self.seconds(marks[0][1], marks[-1][1])
            if kind in self.passes:
                for label, seconds in self._cut(kind, marks).items():
                    self.passes[kind].setdefault(label, []).append(seconds)
        for kind, seconds in {**sums, "step": total, "idle": max(0.0, total - sum(sums.values()))}.items():
            self.totals.setdefault(kind, []).append(seconds)

    def _cut(self, kind: str, marks: list) -> dict[Label, float]:
        """Seconds of each layer in one pass, from the marks in it."""
        found: dict[Label, float] = {}
        labels = [label for label, _ in marks[1:-1]]
        if not labels:
            return {}
        if kind == "forward":  # a mark is where its layer begins; what comes before the first is the first's
            owners = [labels[0], *labels]
        else:  # a mark is where its layer ends; what comes after the last is of the layer in front, whose input has no gradient
            first = next(iter(self.passes["forward"]), labels[-1])
            owners = [*labels, first if first not in labels else labels[-1]]
        for owner, (_, a), (_, b) in zip(owners, marks, marks[1:]):
            found[owner] = found.get(owner, 0.0) + self.seconds(a, b)
        return found

    def report(self) -> dict[str, Any]:
        """Medians, for JSON: layers as [label, seconds] pairs."""
        return {
            "totals": {kind: statistics.median(values + [0.0] * (self.steps - len(values))) for kind, values in self.totals.items()},
            **{kind: [[label, statistics.median(values)] for label, values in found.items()] for kind, found in self.passes.items()},
        }


def recorder(steps: int) -> Recorder:
    """One whose marks are CUDA events where there is a GPU."""
    import torch

    if not torch.cuda.is_available() or not hasattr(torch.version, "cuda") or torch.version.cuda is None:
        return Recorder(steps)

    def clock() -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(a: Any, b: Any) -> float:
        b.synchronize()
        return a.elapsed_time(b) / 1e3

    return Recorder(steps, clock, seconds)


def probe_reduction(group: Any, size_bytes: int, device: Any) -> tuple[float, float]:
    """(seconds of a byte, seconds of latency) of an all-reduce in `group`; zeros where it has one rank."""
    import torch
    import torch.distributed as dist

    if size_bytes <= 0 or dist.get_world_size(group) < 2:
        return 0.0, 0.0
    large = max(4096, min(size_bytes, _LARGEST_PROBE)) // 4
    found = []
    for count in (large, large // 4):
        tensor = torch.zeros(count, device=device)
        times = []
        for _ in range(4):
            begin = _now(device)
            dist.all_reduce(tensor, group=group)
            times.append(_now(device) - begin)
        found.append((count * 4, statistics.median(times[1:])))  # the first one brings the ranks together
    (big, long), (small, short) = found
    per_byte = max(0.0, (long - short) / (big - small))
    return per_byte, max(0.0, long - per_byte * big)


def probe_edges(stage: int, stages: int, size_bytes: int, device: Any, send: Callable, receive: Callable) -> float:
    """Seconds of an activation to the next stage, one way (0 on the last). send(tensor, stage), receive(tensor, stage) wait until done."""
    import torch

    tensor, result = torch.zeros(max(1, size_bytes // 4), device=device), 0.0
    for edge in range(stages - 1):
        times = []
        for _ in range(6):
            begin = _now(device)
            if stage == edge:
                send(tensor, edge + 1)
                receive(tensor, edge + 1)
            elif stage == edge + 1:
                receive(tensor, edge)
                send(tensor, edge)
            times.append(_now(device) - begin)
        if stage == edge:
            result = statistics.median(times[1:]) / 2
    return result


def _now(device: Any) -> float:
    if getattr(device, "type", "cpu") == "cuda":
        import torch

        torch.cuda.synchronize(device)
    return time.perf_counter()
