"""Pictures of a run: placement of ranks, timeline of a step; and helpers of all pictures.

A span is an activity of a rank in an interval of time, such as a forward pass or a wait for a message.
svg() makes a figure part of a page (page.py). matplotlib is imported only when a picture is drawn.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from holmes_ext.cluster import nic
from holmes_ext.cluster.fabric import ETHERNET
from holmes_ext.cluster.site import Site
from holmes_ext.document import load_json
from holmes_ext.errors import HolmesError
from holmes_ext.files import save, write_whole
from holmes_ext.plan.sizes import Sizes
from holmes_ext.planner.html.chart import (
    INK,
    KINDS,
    MEDIUM,
    NARROW,
    PAPER,
    SMALL,
    WIDE,
    fold,
    is_narrow,
    legend_columns,
)
from holmes_ext.planner.html.cut import END_MICRO_BATCHES, Cut, Row, cut_of
from holmes_ext.planner.html.page import picture
from holmes_ext.planner.html.short_svg import shortened
from holmes_ext.words import why

FABRIC_COLORS = {name: kind.color for name, kind in nic.KINDS.items()}
#: Most spans of a row that are drawn individually; more are drawn as shares of the time. A row then
#: has PIECES pieces, and each piece MOMENTS samples.
MANY, PIECES, MOMENTS = 250, 300, 100
#: Horizontal distance of cluster boxes.
_BOX_DISTANCE = 3


def pyplot(what: str = "pictures need") -> Any:
    """Return matplotlib.pyplot for figures without a screen.

    Args:
        what: Subject and verb of the error message, such as "--html needs".

    Raises:
        HolmesError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise HolmesError(
            f"{what} matplotlib, which is missing; pip install 'holmes_ext[plot]'"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    for name in ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"):
        plt.rcParams[name] = INK
    plt.rcParams["xtick.labelsize"] = plt.rcParams["ytick.labelsize"] = SMALL
    return plt


def chart(paint: Callable[[float], Any], alt: str) -> str:
    """Return a chart as a part of a page, in two widths: the page shows the width that fits the screen.

    Args:
        paint: Returns the figure for a width in inches.
        alt: Text for screen readers.
    """
    wide = picture(svg(paint(WIDE), name="wide"), alt)
    narrow = picture(svg(paint(NARROW), name="narrow"), alt)
    return f"<div class=wide>{wide}</div><div class=narrow>{narrow}</div>"


def svg(figure: Any, name: str = "") -> str:
    """Return a figure as an <svg> element with real text, in the colors of the page around it.

    Ids in the SVG differ by `name`: a browser takes the first element of an id, even in a hidden SVG.
    """
    buffer = io.StringIO()
    with pyplot().rc_context({"svg.fonttype": "none", "svg.hashsalt": f"holmes {name}"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    pyplot().close(figure)
    text = buffer.getvalue()
    text = re.sub(
        r"<metadata>.*?</metadata>|<!--.*?-->", "", text[text.index("<svg") :], flags=re.DOTALL
    )
    text = re.sub(r'<g id="[^"]*">', "<g>", text)  # the same names in every figure
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "sans-serif", text)
    # INK and PAPER stand for the colors of the page.
    return shortened(text.replace(INK, "currentColor").replace(PAPER, "var(--paper)").rstrip())


def svg_file(figure: Any) -> str:
    """Return a figure as an SVG file that follows the reader's light or dark mode."""
    dark = "@media(prefers-color-scheme:dark){svg{color:#e6e6e6;--paper:#16181d}}"
    style = f"<style>svg{{color:{INK};--paper:#fff}}{dark}</style>"
    return re.sub(r"(<svg[^>]*>)", lambda tag: tag[1] + style, svg(figure), count=1) + "\n"


def save_in_two_widths(file: Path, paint: Callable[[float], Any]) -> None:
    """Write a chart as a wide SVG file, and as a narrow one for phones with the suffix .narrow.svg.

    Args:
        file: The wide file.
        paint: Returns the figure for a width in inches.

    Raises:
        HolmesError: A file cannot be written.
    """
    for path, width in ((file, WIDE), (file.with_suffix(".narrow.svg"), NARROW)):
        save(path, svg_file(paint(width)), "the picture")


def write(figure: Any, path: str | Path, advice: str) -> Path:
    """Write a figure to a file in the format of its suffix, and close the figure.

    Args:
        figure: The figure.
        path: The file.
        advice: What the user can do if writing fails, for the error message.

    Raises:
        HolmesError: The file cannot be written.
    """
    picture = io.BytesIO()
    try:
        figure.savefig(picture, format=Path(path).suffix[1:] or None, dpi=130)
        write_whole(path, picture.getvalue())
    except (OSError, ValueError) as error:
        # matplotlib lists the formats that it supports in brackets. That would hide the advice.
        raise HolmesError(
            f"{path}: the picture cannot be written: {why(error).split('(')[0]}; {advice}"
        ) from None
    finally:
        pyplot().close(figure)
    return Path(path)


def name_rows(axis: Any, names: Sequence[str]) -> None:
    """Label the rows of a chart, the first at the top."""
    axis.set_yticks(range(len(names)), names, fontsize=SMALL)
    axis.invert_yaxis()


def placement_figure(
    panels: Sequence[tuple[str, Site, Sequence[str], bool]], sizes: Sizes, width: float = WIDE
) -> Any:
    """Return a figure of placements, with a panel for each.

    Nodes are in the boxes of their clusters, with their ranks. Lines are data parallel groups
    (thick) and stage links (thin, dashed), in the color of their network.

    Args:
        panels: (title, site, nodes in rank order, True if each group communicates over its fastest
            common network or False if all use Ethernet).
        sizes: Parallel sizes.
        width: Of the figure, in inches.
    """
    plt = pyplot()
    columns = 1 if is_narrow(width) else len(panels)
    rows = ceil(len(panels) / columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(width, 3.0 * rows + 0.9), squeeze=False, layout="constrained"
    )
    used = {ETHERNET}  # kinds of networks in the picture
    for axis, (title, site, nodes, groups_use_best_nic) in zip(axes.flat, panels):
        axis.set_title(title, fontsize=MEDIUM)
        _placement_panel(axis, site, nodes, groups_use_best_nic, sizes)
        used |= {site.fabric_by_name[name].kind for node in site.nodes for name in node.fabrics}
    handles = [
        plt.Line2D([], [], color=color, lw=3, label=kind)
        for kind, color in FABRIC_COLORS.items()
        if kind in used
    ]
    handles += [plt.Line2D([], [], color=INK, lw=4, label="data-parallel group (gradients)")]
    handles += [plt.Line2D([], [], color=INK, lw=1.2, ls="--", label="stage link (activations)")]
    legend(figure, handles, width)
    return figure


def legend(figure: Any, handles: Sequence[Any], width: float) -> None:
    """Add a legend below a figure of `width` inches."""
    columns = legend_columns([handle.get_label() for handle in handles], width)
    figure.legend(
        handles=handles, loc="outside lower left", ncols=columns, frameon=False, fontsize=SMALL
    )


def _placement_panel(
    axis: Any, site: Site, nodes: Sequence[str], groups_use_best_nic: bool, sizes: Sizes
) -> None:
    """Draw clusters, nodes and process groups on the axes of a placement figure.

    Args:
        axis: Axes to draw on.
        site: Clusters, nodes and networks.
        nodes: Names of the nodes in rank order; the figure assumes a single rank on each node.
        groups_use_best_nic: Whether each group uses the fastest network that its nodes share, as with
            holmes. Otherwise all use Ethernet, unless the site has a single cluster.
        sizes: Parallel sizes.
    """
    boxes = _cluster_boxes(site)
    height = max(len(members) for _, members in boxes)
    position = {}  # node -> (x, y)
    for number, (cluster, members) in enumerate(boxes):
        x = number * _BOX_DISTANCE
        first_fabric = site.node_by_name[members[0]].fabrics[0]
        kind = site.fabric_by_name[first_fabric].kind
        background = FABRIC_COLORS[kind]
        axis.add_patch(
            _box(x - 0.95, -0.6, width=1.9, height=height + 0.25, color=background, alpha=0.08)
        )
        axis.text(x, height - 0.28, f"{cluster} ({kind})", ha="center", va="bottom", fontsize=SMALL)
        for row, name in enumerate(members):
            position[name] = (x, height - 1 - row)
    uses_best_nic = groups_use_best_nic or len(site.clusters) == 1
    for pairs, width, style in _group_lines(nodes, sizes):
        # The fastest network that all nodes of the group share.
        kind = site.shared_fabric({name for pair in pairs for name in pair}).kind
        color = FABRIC_COLORS[kind if uses_best_nic else ETHERNET]
        for first, second in pairs:
            same_column = position[first][0] == position[second][0]
            bend = 0.35 if same_column else 0.0  # around the boxes between them
            arrow = dict(
                arrowstyle="-", color=color, lw=width, ls=style, connectionstyle=f"arc3,rad={bend}"
            )
            axis.annotate("", position[second], position[first], arrowprops=arrow)
    for name, (x, y) in position.items():
        rank = list(nodes).index(name)
        axis.add_patch(
            _box(x - 0.8, y - 0.3, width=1.6, height=0.6, color=PAPER, alpha=1.0, outline=INK)
        )
        text = f"{name}: rank {rank}\nstage {sizes.stage(rank)}"
        axis.text(x, y, text, ha="center", va="center", fontsize=SMALL, zorder=4)
    axis.set_xlim(-1.3, _BOX_DISTANCE * len(boxes) - 1.7)
    axis.set_ylim(-0.8, height + 0.1)
    axis.axis("off")


def _cluster_boxes(site: Site) -> list[tuple[str, list[str]]]:
    """Return (cluster, names of its nodes) for each box.

    A single cluster is divided into two boxes side by side. Otherwise all nodes would stand in a
    column, and lines between them would hide each other.
    """
    boxes = []
    for cluster in site.clusters:
        boxes.append((cluster, [node.name for node in site.nodes if node.cluster == cluster]))
    if len(boxes) > 1:
        return boxes
    ((cluster, members),) = boxes
    half = (len(members) + 1) // 2
    return [(cluster, members[:half]), (cluster, members[half:])]


def _box(
    x: float,
    y: float,
    width: float,
    height: float,
    color: str,
    alpha: float,
    outline: str = "none",
) -> Any:
    """Return a rounded box with its lower left corner at (x, y); a box with an outline is drawn in front."""
    from matplotlib.patches import FancyBboxPatch

    return FancyBboxPatch(
        (x, y),
        width,
        height,
        boxstyle="round,pad=0.02",
        fc=color,
        ec=outline,
        alpha=alpha,
        zorder=0 if outline == "none" else 3,
    )


class _GroupLines(NamedTuple):
    """Lines between nodes that show a data parallel group, or a stage link, in a figure."""

    pairs: list[tuple[str, str]]  # nodes to connect
    width: float  # in points
    style: str  # of matplotlib: "-" solid, "--" dashed


def _group_lines(nodes: Sequence[str], sizes: Sizes) -> list[_GroupLines]:
    """Return the lines of data parallel groups and stage links, for a single rank on each node.

    A data parallel group is a thick line through all its nodes; a stage link is a thin, dashed
    line between two nodes.
    """
    result = []
    for rank in range(len(nodes)):
        data = sizes.group(rank, "dp")
        stages = sizes.group(rank, "pp")
        # Each group is drawn once, for its first rank.
        if data[0] == rank and len(data) > 1:
            pairs = [(nodes[a], nodes[b]) for a, b in zip(data, data[1:])]
            result.append(_GroupLines(pairs, width=4.0, style="-"))
        if stages[0] == rank:
            for a, b in zip(stages, stages[1:]):
                result.append(_GroupLines([(nodes[a], nodes[b])], width=1.2, style="--"))
    return result


def load_traces(directory: Path) -> list[dict[str, Any]]:
    """Return the traces of all ranks of a run in the lab (holmes_lab.emulate.trace), in rank order."""
    traces = [
        load_json(path, "give the folder of a run in the lab").values
        for path in directory.glob("rank*.json")
    ]
    return sorted(traces, key=lambda trace: trace["rank"])


def last_step(traces: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Return start and end of the last whole step in monotonic seconds.

    Traces without a "step" are divided by the ends of the optimizer. The last of these may be of a
    step that is not complete, so the step between the two before it is returned.

    Args:
        traces: Trace of each rank; its events are (kind, start, end, ...).
    """
    if "step" in traces[0]:
        begin, end = traces[0]["step"]
        return begin, end
    ends = [[end for kind, _, end, _ in trace["events"] if kind == "optimizer"] for trace in traces]
    return max(rank_ends[-3] for rank_ends in ends), max(rank_ends[-2] for rank_ends in ends)


def timeline_figure(
    runs: Mapping[str, Sequence[Mapping[str, Any]]],
    label: str = "seconds of one step (wall clock of the lab)",
    width: float = WIDE,
) -> Any:
    """Return a figure of a step, with a panel for each run and a row for each rank.

    Args:
        runs: Name of the run -> traces of its ranks.
        label: Label of the time axis.
        width: Of the figure, in inches.
    """
    panels = {}
    for name, traces in runs.items():
        begin, end = last_step(traces)
        rows = []
        for trace in traces:
            # Events that overlap the step, cut off at its start and end.
            spans = [
                (kind, max(start, begin) - begin, min(stop, end) - begin)
                for kind, start, stop, _ in trace["events"]
                if stop > begin and start < end
            ]
            rows.append((trace["node"], spans))
        panels[f"{name}: {end - begin:.3f} s"] = rows, end - begin
    return timeline(panels, label, width=width)


def timeline(
    panels: Mapping[str, tuple[list[Row], float]],
    label: str,
    width: float = WIDE,
    chunks: int = 1,
) -> Any:
    """Return a figure of timelines; rows of more than MANY spans show shares of the time.

    If a step has more than MANY_MICRO_BATCHES micro-batches, its middle is not drawn: only the first
    END_MICRO_BATCHES micro-batches are, and as many at its end (cut.py).

    Args:
        panels: Title of the panel -> (rows, seconds of the step).
        label: Label of the time axis.
        width: Of the figure, in inches.
        chunks: Chunks of layers on each stage (interleaved schedule). A micro-batch passes each of
            them once forward and once backward.
    """
    plt = pyplot()
    height = 0.32 * max(len(rows) for rows, _ in panels.values()) + 1.0
    figure, axes = plt.subplots(
        len(panels),
        1,
        figsize=(width, height * len(panels) + 0.9),
        squeeze=False,
        layout="constrained",
    )
    used = set[str]()  # kinds of span that occur
    drawn = [_Drawn.of(title, *panel, chunks) for title, panel in panels.items()]
    longest = max(panel.seconds for panel in drawn)
    for axis, (title, rows, seconds, cut) in zip(axes[:, 0], drawn):
        for number, (_, spans) in enumerate(rows):
            used |= {kind for kind, _, _ in spans}
            if len(spans) > MANY:
                _draw_shares(axis, number, spans, seconds)
            else:
                _draw_bars(axis, number, spans)
        axis.axvline(seconds, color=INK, lw=1)
        axis.set(xlim=(0, 1.03 * longest), ylim=(-0.6, len(rows) - 0.4))
        name_rows(axis, [name for name, _ in rows])
        axis.set_title(fold(title, width - 0.8), loc="left", fontsize=MEDIUM)
        axis.spines[["top", "right"]].set_visible(False)
        if cut:
            cut.mark(axis, seconds + cut.seconds)
    axes[-1, 0].set_xlabel(fold(label, width - 0.8))
    legend(
        figure,
        [
            plt.Rectangle((0, 0), 1, 1, color=color, label=text)
            for kind, (color, text) in KINDS.items()
            if kind in used
        ],
        width,
    )
    return figure


class _Drawn(NamedTuple):
    """Panel of a timeline as it is drawn, perhaps without the middle of the step."""

    title: str
    rows: list[Row]
    seconds: float  # on the axis
    cut: Cut | None  # the part that is left out

    @classmethod
    def of(cls, title: str, rows: list[Row], seconds: float, chunks: int) -> _Drawn:
        """Create a panel; cut out the middle of a step with more than MANY_MICRO_BATCHES.

        A note about the cut is added to the title.
        """
        cut = cut_of(rows, chunks)
        if cut is None:
            return cls(title, rows, seconds, cut)
        title += f" (first and last {END_MICRO_BATCHES} micro-batches, without {cut})"
        return cls(title, cut.rows(rows), seconds - cut.seconds, cut)


def _draw_bars(axis: Any, row: int, spans: Sequence[tuple[str, float, float]]) -> None:
    """Draw each span of a row, in the order of KINDS: later kinds cover earlier kinds."""
    for kind, (color, _) in KINDS.items():
        bars = [(start, end - start) for name, start, end in spans if name == kind]
        if bars:
            axis.broken_barh(bars, (row - 0.4, 0.8), color=color, lw=0)


def _draw_shares(
    axis: Any, row: int, spans: Sequence[tuple[str, float, float]], seconds: float
) -> None:
    """Draw a row of very many short spans as stacked shares of the kinds of span, over the time.

    The time is divided into PIECES, and each piece into MOMENTS samples.

    Args:
        axis, row: Axes to draw on, and number of the row.
        spans, seconds: (kind, start, end) of each span, and duration of the step.
    """
    import numpy as np
    from matplotlib.colors import to_rgba

    # For each sample the number of the kind that is drawn on top, 0 for none.
    samples = np.zeros(PIECES * MOMENTS, dtype=int)
    samples_per_s = len(samples) / seconds
    for number, kind in enumerate(KINDS, start=1):
        for name, start, end in spans:
            if name == kind:
                samples[round(start * samples_per_s) : round(end * samples_per_s)] = number
    # A column for each piece; sorted, the samples of a kind are next to each other.
    shares = np.sort(samples.reshape(PIECES, MOMENTS), axis=1).T
    colors = np.array([to_rgba("none"), *(to_rgba(color) for color, _ in KINDS.values())])
    axis.imshow(
        colors[shares],
        extent=(0, seconds, row - 0.4, row + 0.4),
        aspect="auto",
        origin="lower",
        interpolation="nearest",
    )
