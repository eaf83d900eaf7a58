"""--holmes-profile N: what each layer, transfer and reduction takes, for `holmes plan --profile`.

    warm-up (2 steps) | N measured steps | reduction and transfers by themselves | profile.json, by rank 0

A Profiler is framework-neutral: patches/*/profile.py tell it where a step, a pass or a send begins and ends,
and which modules are which layers. A pass is cut at the layers, so that their times add up to it:

    forward     a layer begins where its module is called, and ends where the next one begins or the pass ends
    backward    a layer ends where its input's gradient is ready,
                and begins where the one behind it ended or the pass

so what stands between modules counts for its neighbour, recomputation for the layers that are recomputed. On
a GPU the borders are CUDA events, read when the step has ended: nothing waits for them. Of all micro-batches
the median counts, of a stage's ranks the slowest (profile_file.py). Sends and receives include waiting for
the other; that is why stage links and reductions are timed once more, alone, after the last step (probe.py).
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

WARM_UP = 2
#: "before" the first block, the block's number, "after" the last.
Label = str | int


class Profiler:
    """The times of one rank. clock() -> a mark; seconds(a, b) between two marks, once the step has ended."""

    def __init__(
        self,
        steps: int,
        clock: Callable[[], Any] = time.perf_counter,
        seconds: Callable[[Any, Any], float] = lambda a, b: b - a,
    ):
        self.steps, self.clock, self.seconds = steps, clock, seconds
        self.done = 0  # steps, warm-up included
        self.totals: dict[str, list[float]] = {}  # kind -> seconds of each measured step
        # of each micro-batch
        self.passes: dict[str, dict[Label, list[float]]] = {"forward": {}, "backward": {}}
        self._open: tuple[str, list] | None = None
        self._spans: list[tuple[str, list]] = []
        self._handles: list[Any] = []

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
        """A part of the step: "forward", "backward" (cut at the layers), "send", "receive", "reduce", "tied",
        "optimizer". Nested ones count outside."""
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
            enter = functools.partial(self._enter, label)
            self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))

    def release(self) -> None:
        """The modules are again as they were."""
        while self._handles:
            self._handles.pop().remove()

    def _enter(self, label: Label, module: Any, args: tuple, kwargs: dict) -> None:
        self._mark("forward", label)
        inside = args[0] if args and isinstance(args[0], (tuple, list)) else ()
        for value in (*args, *kwargs.values(), *inside):
            if getattr(value, "requires_grad", False):
                value.register_hook(lambda _: self._mark("backward", label))
                return

    def _mark(self, kind: str, label: Label) -> None:
        if self._open is not None and self._open[0] == kind:
            self._open[1].append((label, self.clock()))

    def _close(self, begin: Any, end: Any) -> None:
        """The step has ended: read its marks, unless it was one of the warm-up."""
        self.done += 1
        spans, self._spans = self._spans, []
        total = self.seconds(begin, end)  # waits, on a GPU, for the last mark
        if self.done <= WARM_UP:
            return
        sums: dict[str, float] = {}
        for kind, marks in spans:
            sums[kind] = sums.get(kind, 0.0) + self.seconds(marks[0][1], marks[-1][1])
            if kind in self.passes:
                for label, seconds in self._cut(kind, marks).items():
                    self.passes[kind].setdefault(label, []).append(seconds)
        for kind, seconds in {
            **sums,
            "step": total,
            "idle": max(0.0, total - sum(sums.values())),
        }.items():
            self.totals.setdefault(kind, []).append(seconds)

    def _cut(self, kind: str, marks: list) -> dict[Label, float]:
        """Seconds of each layer in one pass, from the marks in it."""
        by_layer: dict[Label, float] = {}
        labels = [label for label, _ in marks[1:-1]]
        if not labels:
            return {}
        if (
            kind == "forward"
        ):  # a mark is where its layer begins; what comes before the first is the first's
            owners = [labels[0], *labels]
        else:
            # a mark is where its layer ends; what comes after the last is of the layer in front, which has
            # no gradient
            first = next(iter(self.passes["forward"]), labels[-1])
            owners = [*labels, first if first not in labels else labels[-1]]
        for owner, (_, a), (_, b) in zip(owners, marks, marks[1:]):
            by_layer[owner] = by_layer.get(owner, 0.0) + self.seconds(a, b)
        return by_layer

    def medians(self) -> dict[str, Any]:
        """For JSON: layers as [label, seconds] pairs."""
        padded = {
            kind: values + [0.0] * (self.steps - len(values))
            for kind, values in self.totals.items()
        }
        return {
            "totals": {kind: statistics.median(values) for kind, values in padded.items()},
            **{
                kind: [[label, statistics.median(values)] for label, values in by_layer.items()]
                for kind, by_layer in self.passes.items()
            },
        }


def profiler(steps: int) -> Profiler:
    """One whose marks are CUDA events where there is a GPU."""
    import torch

    if not torch.cuda.is_available() or torch.version.cuda is None:
        return Profiler(steps)

    def clock() -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(a: Any, b: Any) -> float:
        b.synchronize()
        return a.elapsed_time(b) / 1e3

    return Profiler(steps, clock, seconds)
