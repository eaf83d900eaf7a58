"""Cut through a long timeline: only its first and last micro-batches are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from holmes_ext.planner.html.chart import INK, PAPER

#: Most micro-batches of a step that are all drawn; of more, the number that is drawn at each end.
MANY_MICRO_BATCHES, END_MICRO_BATCHES = 60, 10
#: Width of the gap in the drawn time, as a share of it.
_GAP_SHARE = 0.03

#: Row of a timeline: (name, [(kind of KINDS, start, end)]), in seconds from the step's start.
Row = tuple[str, list[tuple[str, float, float]]]


class Cut(NamedTuple):
    """Part of a step that is not drawn, in seconds from the step's start.

    A short gap is drawn in its place, and everything later is moved to the left:

        time of the step      0 ...... start ............... end ...... step's end
        as it is drawn        0 ...... start [gap] ...... step's end
    """

    start: float
    end: float
    gap: float  # width of the gap, in seconds of the axis

    def __str__(self) -> str:
        return f"{self.start:.3g} to {self.end:.3g} s"

    @property
    def seconds(self) -> float:
        """Seconds by which the drawn timeline is shorter than the step."""
        return self.end - self.start - self.gap

    def rows(self, rows: Sequence[Row]) -> list[Row]:
        """Return the timeline's spans without those in the cut; the later ones are moved to the left."""
        result = []
        for name, spans in rows:
            drawn = []
            for kind, start, end in spans:
                if start < self.start:
                    drawn.append((kind, start, min(end, self.start)))
                if end > self.end:
                    drawn.append((kind, max(start, self.end) - self.seconds, end - self.seconds))
            result.append((name, drawn))
        return result

    def mark(self, axis: Any, seconds: float) -> None:
        """Draw the gap on an axis, and label where the step begins and ends.

        Args:
            axis: Axes of the timeline.
            seconds: Duration of the whole step, with the part that is not drawn.
        """
        drawn_end = seconds - self.seconds  # position on the axis of the step's end
        axis.axvspan(self.start, self.start + self.gap, color=PAPER, zorder=3)
        for x in (self.start, self.start + self.gap):
            axis.axvline(x, color=INK, lw=1, ls=":", zorder=4)
        ticks = {0.0: "0", drawn_end: f"{seconds:.4g}"}
        axis.set_xticks(list(ticks), list(ticks.values()))


def cut_of(rows: Sequence[Row], chunks: int) -> Cut | None:
    """Return the part of a step to leave out of a timeline, or None to draw the whole step.

    The part is the middle of the step. It begins when all rows have ended the forward passes of the
    first END_MICRO_BATCHES micro-batches. It ends when the first row begins the backward passes of as
    many micro-batches at the end. The whole step is drawn if a row has MANY_MICRO_BATCHES micro-batches
    or fewer, or if the part would end before it begins.

    Args:
        rows: Rows of the timeline.
        chunks: Chunks of layers on each stage (interleaved schedule). A micro-batch passes each of
            them once forward and once backward.
    """
    starts = []  # for each row: end of the last forward pass that is drawn before the cut
    ends = []  # for each row: start of the first backward pass that is drawn after the cut
    passes_at_end = END_MICRO_BATCHES * chunks
    for _, spans in rows:
        forward_ends = sorted(end for kind, _, end in spans if kind == "forward")
        backward_starts = sorted(start for kind, start, _ in spans if kind == "backward")
        if min(len(forward_ends), len(backward_starts)) <= MANY_MICRO_BATCHES * chunks:
            return None
        starts.append(forward_ends[passes_at_end - 1])
        ends.append(backward_starts[-passes_at_end])
    if not starts or max(starts) >= min(ends):
        return None
    start = max(starts)
    end = min(ends)
    step_end = max(span_end for _, spans in rows for _, _, span_end in spans)
    drawn_s = start + (step_end - end)  # before and after the cut
    return Cut(start, end, gap=_GAP_SHARE * drawn_s)
