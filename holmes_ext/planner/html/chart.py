"""Widths, text sizes and colors of all charts.

A page has each chart twice: WIDE for a desk, NARROW for a phone of 390 CSS pixels. So its texts keep
their size on both. A color has a single meaning on a page: tests/planner/html/test_charts.py compares them.
"""

from __future__ import annotations

import textwrap

#: Widths of a chart in inches; a page shows 96 CSS pixels an inch.
WIDE, NARROW = 9.5, 3.6
#: Sizes of texts in points: the smallest, 8.5 points, takes 11.3 CSS pixels.
SMALL, MEDIUM = 8.5, 10.0
#: Color of texts and lines, and of the background; a page replaces them by its own (pictures.svg).
INK, PAPER = "#1f2328", "#fefefe"
#: Mean width of a letter as a share of the text size, with some reserve.
_LETTER_WIDTH = 0.6
_POINTS_PER_INCH = 72

#: Kind of span -> (color, label). Later kinds are drawn over earlier kinds.
KINDS = {
    "send": ("#f2b134", "send"),
    "receive": ("#fbe0a6", "waits to receive"),
    "reduce": ("#7f2a5c", "gradient reduction"),
    "collective": ("#8a5aa5", "other collectives"),
    "inside": ("#f2a900", "network inside a cluster"),
    "across": ("#d62728", "network between clusters"),
    "optimizer": ("#5b5b5b", "optimizer"),
    "forward": ("#6fa8dc", "forward"),
    "backward": ("#54a24b", "backward"),
    "weights": ("#1e6b45", "gradients of weights"),
}
#: Colors of the clusters in the launcher's order; they repeat if there are more clusters.
CLUSTER_COLORS = (
    "#9ecae1",
    "#fdc086",
    "#c7e9c0",
    "#cbc3e8",
    "#f7b6d2",
    "#ffe97f",
    "#b5bd61",
    "#d9c4ae",
)
#: Colors of the lines of joined jobs, in the order of their starts; they repeat.
JOB_COLORS = (
    "#4c78a8",
    "#e8a33d",
    "#54a24b",
    "#b07aa1",
    "#9c755f",
    "#72b7b2",
    "#d37295",
    "#7f7f7f",
)
#: Colors of computation and of waiting for other stages, where a step is divided by cause.
COMPUTE, WAITING = "#20808d", "#a9a9a9"
#: Color of the predicted and measured steps of a plan in the report of a run.
PLAN = "#c2571a"
#: Colors of the rounds of joined jobs: the whole round, and the part for which training waited.
ROUND, EXPOSED_ROUND = "#00a5a5", "#5e3c99"
#: Line styles, markers of a line's points: lines of forecasts differ by them, and not by color.
LINE_STYLES = (("-", "o"), ("--", "s"), ("-.", "^"), (":", "D"), ("-", "v"), ("--", "P"))


def is_narrow(width: float) -> bool:
    """Return whether a chart of `width` inches is narrow: made for a phone."""
    return width < (NARROW + WIDE) / 2


def fold(text: str, width: float, size: float = MEDIUM) -> str:
    """Return a text with line breaks, so that its lines fit a chart of `width` inches.

    Args:
        text: The text.
        width: Of the chart, in inches.
        size: Of the text, in points.
    """
    letters = int(width * _POINTS_PER_INCH / (_LETTER_WIDTH * size))
    return "\n".join(textwrap.wrap(text, letters, break_on_hyphens=False))


def legend_columns(labels: list[str], width: float) -> int:
    """Return the number of columns of a legend, so that it fits a chart of `width` inches."""
    handle = 4  # letters of a legend's color and its gaps
    longest = max((len(label) for label in labels), default=1) + handle
    letters = width * _POINTS_PER_INCH / (_LETTER_WIDTH * SMALL)
    return max(1, min(len(labels), int(letters / longest)))
