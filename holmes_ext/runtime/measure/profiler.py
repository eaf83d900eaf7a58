"""Measures the time of each layer, transfer and reduction: --holmes-profile N, for `holmes plan --profile`.

    warm-up (2 steps) | N measured steps | reductions and transfers alone | rank 0 writes profile.json

A Profiler knows no framework. patches/*/profile.py call it when a step, a pass or a send begins and ends, and
pass it the module of each layer. Forward and backward passes are divided among the layers by cuts: times when
a layer begins or ends. So the layers' times add up to the time of the pass:

    forward     A layer begins when its module is called. It ends when the next layer begins, or with the
                pass.
    backward    A layer ends when the gradient of its input is ready. It begins when the layer behind it has
                ended, or with the pass.

So code between two modules counts for a neighbouring layer, and recomputation for the layers that are
recomputed. On a GPU the cuts are CUDA events. They are read after the step, so nothing waits for them. The
median over all micro-batches counts, and the slowest rank of a stage (profile_file.py). Sends and
receives include waiting for the other stage. Therefore probe.py measures stage links and reductions once
more, alone, after the last step.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

WARM_UP = 2  # steps that are not measured
_MS_PER_S = 1e3  # CUDA events return milliseconds
#: Label of a layer: "before" for layers before the first transformer block, the number of a block, or
#: "after" for layers after the last block.
Label = str | int


class _Cut(NamedTuple):
    """A time stamp within a forward or backward pass: a layer begins (forward) or ends (backward)."""

    label: Label | None  # None: begin or end of the whole span
    time: Any  # as the Profiler's clock() returned it


@dataclass
class _Span:
    """A measured part of a training step, such as a forward pass, with its time stamps in order."""

    kind: str  # see Profiler.span()
    cuts: list[_Cut]  # begin, layers, end


def _difference(begin: float, end: float) -> float:
    """Return the seconds between two times of a host clock."""
    return end - begin


class Profiler:
    """Stopwatch for the training steps of a rank: layers, transfers and reductions."""

    def __init__(
        self,
        steps: int,
        clock: Callable[[], Any] = time.perf_counter,
        seconds: Callable[[Any, Any], float] = _difference,
    ):
        """Create a profiler of training steps.

        Args:
            steps: Steps to measure, after WARM_UP steps.
            clock: Returns the current time, as a number or e.g. as a CUDA event.
            seconds: Returns the seconds between two results of clock(). It is called after a step.
        """
        self.steps = steps
        self.clock = clock
        self.seconds = seconds
        self.done = 0  # steps so far, including the WARM_UP steps
        #: Part of a step -> its seconds in each measured step. The parts are the kinds of span(), and "step"
        #: (the whole step) and "idle" (outside of all spans).
        self.totals: dict[str, list[float]] = {}
        #: "forward" or "backward" -> layer -> its seconds in the pass of each measured micro-batch.
        self.passes: dict[str, dict[Label, list[float]]] = {"forward": {}, "backward": {}}
        self._open: _Span | None = None  # the span that is measured now
        self._spans: list[_Span] = []  # the spans of the current step that have ended
        self._hooks: list[Any] = []  # torch's handles

    @property
    def finished(self) -> bool:
        """True if the warm-up and all steps to measure are over."""
        return self.done >= WARM_UP + self.steps

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure the block of a `with` statement as a training step."""
        self._spans = []
        begin = self.clock()
        yield
        self._close_step(begin, self.clock())

    @contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """Measure the block of a `with` statement as a part of the training step.

        Args:
            kind: Name of the part: "forward", "backward", "send", "receive", "reduce", "optimizer"
                or "tied" (the sum of gradients of weights that two stages share). Hooks divide
                "forward" and "backward" further, at each layer. A span inside another span is not
                measured by itself: its time is a part of the outer span's.
        """
        if self._open is not None:
            yield
            return
        current = _Span(kind, cuts=[_Cut(None, self.clock())])  # hooks of layers add further cuts
        self._open = current
        try:
            yield
        finally:
            current.cuts.append(_Cut(None, self.clock()))
            self._spans.append(current)
            self._open = None

    def watch(self, modules: Sequence[tuple[Label, Any]]) -> None:
        """Measure these modules, layers of the model, in all forward and backward passes from now on.

        A forward pre-hook on each module records when its forward pass begins. It also puts a hook
        on the module's input that records when the module's backward pass ends.

        Args:
            modules: (label of the layer, its module). A label is the number of a transformer block, or
                "before" or "after" for layers before the first block or after the last block.
        """
        for label, module in modules:
            on_forward = functools.partial(self._on_forward, label)
            self._hooks.append(module.register_forward_pre_hook(on_forward, with_kwargs=True))

    def release(self) -> None:
        """Remove the hooks of torch modules that watch() has added."""
        while self._hooks:
            self._hooks.pop().remove()

    def _on_forward(
        self, label: Label, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Record that a layer's forward pass begins; let a hook record when its backward pass ends.

        This is a forward pre-hook of the layer's module. A layer's backward pass ends when the
        gradient of its input is ready. So a hook is registered on a tensor: the first input that
        requires a gradient.

        Args:
            label: The layer, see watch().
            module, args, kwargs: The module and its inputs, as torch passes them.
        """
        # _cut() stores the current time and the label in the pass that is being measured.
        self._cut("forward", label)
        # Some frameworks pass all inputs as a single tuple.
        first_arguments = args[0] if args and isinstance(args[0], (tuple, list)) else ()
        for value in (*args, *kwargs.values(), *first_arguments):
            if getattr(value, "requires_grad", False):
                value.register_hook(lambda _: self._cut("backward", label))
                return

    def _cut(self, kind: str, label: Label) -> None:
        """Record the current time as the begin or end of a layer, if a pass of this kind is running."""
        if self._open is not None and self._open.kind == kind:
            self._open.cuts.append(_Cut(label, self.clock()))

    def _close_step(self, begin: Any, end: Any) -> None:
        """Add the times of a training step that has ended, unless it was a step of the warm-up.

        Args:
            begin, end: Begin and end of the step, as clock() returns them.
        """
        self.done += 1
        spans = self._spans
        self._spans = []
        step_s = self.seconds(begin, end)  # on a GPU, this waits for the end
        if self.done <= WARM_UP:
            return
        sums: dict[str, float] = defaultdict(float)  # kind of a part of the step -> seconds
        for span in spans:
            sums[span.kind] += self.seconds(span.cuts[0].time, span.cuts[-1].time)
            if span.kind in self.passes:  # a forward or backward pass: it is cut at the layers
                layers = self.passes[span.kind]
                for label, seconds in self._seconds_of_layers(span).items():
                    layers.setdefault(label, []).append(seconds)
        idle_s = max(0.0, step_s - sum(sums.values()))
        for kind, seconds in {**sums, "step": step_s, "idle": idle_s}.items():
            self.totals.setdefault(kind, []).append(seconds)

    def _seconds_of_layers(self, span: _Span) -> dict[Label, float]:
        """Return the seconds of each layer in a single forward or backward pass.

        The time stamps of a pass divide it into intervals. Each interval belongs to a layer.

        Args:
            span: The pass. Its cuts are time stamps. The first and the last cut are its begin and end, and
                have no label. Each other cut is the begin (forward) or the end (backward) of a layer.

        Returns:
            Label of a layer -> seconds; empty if no layer has a time stamp in the pass.
        """
        labels = [cut.label for cut in span.cuts if cut.label is not None]
        if not labels:
            return {}
        if span.kind == "forward":
            # A layer's interval follows its time stamp. The time before the first layer counts for it, too.
            layer_of_interval = [labels[0], *labels]
        else:
            # A layer's interval precedes its time stamp. One interval is left, between the last
            # time stamp and the end of the pass. In it the stage's first layer computes, since its
            # backward pass comes last. If that layer has a time stamp, the interval is added to its
            # time. It may have none: the input of an embedding needs no gradient.
            lowest_stamped_layer = labels[-1]
            layers_of_stage = list(self.passes["forward"])  # in the order of the forward pass
            last_interval = lowest_stamped_layer  # the layer of the last interval
            if layers_of_stage and layers_of_stage[0] not in labels:
                last_interval = layers_of_stage[0]
            layer_of_interval = [*labels, last_interval]
        seconds_of: dict[Label, float] = defaultdict(float)
        for layer, begin, end in zip(layer_of_interval, span.cuts, span.cuts[1:]):
            seconds_of[layer] += self.seconds(begin.time, end.time)
        return dict(seconds_of)

    def medians(self) -> dict[str, Any]:
        """Return the medians of all measurements, for JSON.

        Returns:
            "totals": kind of a part -> median seconds in a step; a step without the part counts as 0.
            "forward" and "backward": a list [layer, median seconds] for each layer.
        """
        totals = {}
        for kind, values in self.totals.items():  # values of the steps that had this part
            absent_steps = self.steps - len(values)
            totals[kind] = statistics.median(values + [0.0] * absent_steps)
        medians: dict[str, Any] = {"totals": totals}
        for kind, layers in self.passes.items():
            medians[kind] = [[label, statistics.median(values)] for label, values in layers.items()]
        return medians


def profiler(steps: int) -> Profiler:
    """Return a profiler for `steps` steps; it uses CUDA events if there is a GPU."""
    import torch

    if not torch.cuda.is_available() or torch.version.cuda is None:
        return Profiler(steps)

    def clock() -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(begin: Any, end: Any) -> float:
        end.synchronize()
        return begin.elapsed_time(end) / _MS_PER_S

    return Profiler(steps, clock, seconds)
