"""Pictures of a run: who sits where and over which NIC, one step of every rank; what all pictures share.

svg() makes a picture a part of a page (page.py). matplotlib is imported when one is wanted: no command needs
it otherwise.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holmes_ext.cluster import nic
from holmes_ext.cluster.fabric import ETHERNET
from holmes_ext.cluster.site import Site
from holmes_ext.errors import HolmesError
from holmes_ext.plan.sizes import Sizes
from holmes_ext.words import why

#: What a rank or stage does: colour, label; what stands later is drawn over what stands before.
KINDS = {
    "send": ("#f2b134", "send"),
    "receive": ("#fbe0a6", "waits to receive"),
    "reduce": ("#d62728", "gradient reduction"),
    "collective": ("#b07aa1", "other collectives"),
    "inside": ("#f2b134", "network inside a cluster"),
    "across": ("#d62728", "network between clusters"),
    "optimizer": ("#7f7f7f", "optimizer"),
    "forward": ("#4c78a8", "forward"),
    "backward": ("#54a24b", "backward"),
    "weights": ("#b7d7a8", "gradients of weights"),
}
FABRIC_COLORS = {name: kind.color for name, kind in nic.KINDS.items()}
#: Of the clusters, in the launcher's order; again from the start beyond.
CLUSTERS = ("#4c78a8", "#e8a33d", "#72b7b2", "#b07aa1", "#9c755f", "#54a24b", "#bab0ac", "#d37295")

#: Of texts and lines, and behind them; a page puts its own there (svg).
INK, PAPER = "#1f2328", "#fefefe"
#: Spans of a row above which they are drawn as shares of the time, in so many pieces of so many moments.
MANY, PIECES, MOMENTS = 250, 300, 100

#: (what it is called, [(kind of KINDS, start, end)]), seconds from the step's begin.
Row = tuple[str, list[tuple[str, float, float]]]


def pyplot(what: str = "pictures need") -> Any:
    """matplotlib.pyplot without a screen; HolmesError when matplotlib is missing, which `what` it."""
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
    return plt


def svg(figure: Any) -> str:
    """The figure as an <svg> element whose texts stay texts, in the page's own colours (INK, PAPER)."""
    buffer = io.StringIO()
    with pyplot().rc_context({"svg.fonttype": "none", "svg.hashsalt": "holmes"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    pyplot().close(figure)
    text = buffer.getvalue()
    text = re.sub(
        r"<metadata>.*?</metadata>|<!--.*?-->", "", text[text.index("<svg") :], flags=re.DOTALL
    )
    text = re.sub(r'<g id="[^"]*">', "<g>", text)  # the same names in every figure
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "sans-serif", text)
    return _smaller(text.replace(INK, "currentColor").replace(PAPER, "var(--paper)").rstrip())


def _smaller(text: str) -> str:
    """One digit behind the point in tags, short rectangles, neighbours of one look as one path."""
    text = re.sub(r"<[^>]+>", lambda tag: re.sub(r"(\.\d)\d+", r"\1", tag[0]), text)
    text = re.sub(
        r'd="M (\S+) (\S+) \nL \1 (\S+) \nL (\S+) \3 \nL \4 \2 \nz\n"',
        r'd="M\1 \2V\3H\4V\2z"',
        text,
    )
    alike = r'<path d="[^"]*" (clip-path="[^"]*" style="[^"]*")/>(?:\s*<path d="[^"]*" \1/>)+'

    def joined(paths: re.Match[str]) -> str:
        places = "".join(re.findall(r'd="([^"]*)"', paths[0]))
        return f'<path d="{places}" {paths[1]}/>'

    return re.sub(r"\n\s*", "\n", re.sub(alike, joined, text))


def svg_file(figure: Any) -> str:
    """The figure as a file of its own, light or dark as the reader is."""
    dark = "@media(prefers-color-scheme:dark){svg{color:#e6e6e6;--paper:#16181d}}"
    style = f"<style>svg{{color:{INK};--paper:#fff}}{dark}</style>"
    return re.sub(r"(<svg[^>]*>)", lambda tag: tag[1] + style, svg(figure), count=1) + "\n"


def write(figure: Any, path: str | Path, advice: str) -> Path:
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise HolmesError(
            f"{path}: the picture cannot be written: {why(error).split('(')[0]}; {advice}"
        ) from None
    finally:
        pyplot().close(figure)
    return Path(path)


def name_rows(axis: Any, names: Sequence[str]) -> None:
    axis.set_yticks(range(len(names)), names, fontsize=7)
    axis.invert_yaxis()


def placement_figure(panels: Sequence[tuple[str, Site, Sequence[str], bool]], sizes: Sizes) -> Any:
    """A panel for each (title, site, nodes in rank order, NIC for each group?). Nodes stand in their
    cluster's box with their ranks; lines are data-parallel groups (thick) and stage links (thin), in the
    colour of their network: all Ethernet without a NIC for each group."""
    plt = pyplot()
    figure, axes = plt.subplots(1, len(panels), figsize=(3.8 * len(panels), 3.6), squeeze=False)
    for axis, (title, site, nodes, chooses) in zip(axes[0], panels):
        axis.set_title(title, fontsize=10)
        _placement_panel(axis, site, nodes, chooses, sizes)
    handles = [
        plt.Line2D([], [], color=color, lw=3, label=kind) for kind, color in FABRIC_COLORS.items()
    ]
    handles += [plt.Line2D([], [], color=INK, lw=4, label="data-parallel group (gradients)")]
    handles += [plt.Line2D([], [], color=INK, lw=1.2, ls="--", label="stage link (activations)")]
    figure.legend(handles=handles, loc="lower left", ncols=5, frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    return figure


def _placement_panel(
    axis: Any, site: Site, nodes: Sequence[str], chooses: bool, sizes: Sizes
) -> None:
    boxes = [
        (cluster, [node.name for node in site.nodes if node.cluster == cluster])
        for cluster in site.clusters
    ]
    if len(boxes) == 1:  # one cluster: two boxes all the same, so that the panels look alike
        ((name, members),) = boxes
        boxes = [
            (name, members[: (len(members) + 1) // 2]),
            (name, members[(len(members) + 1) // 2 :]),
        ]
    height, place = max(len(members) for _, members in boxes), {}
    for number, (cluster, members) in enumerate(boxes):
        kind = site.fabric_by_name[site.node_by_name[members[0]].fabrics[0]].kind
        axis.add_patch(_box(number * 3 - 0.95, -0.6, 1.9, height + 0.25, FABRIC_COLORS[kind], 0.08))
        axis.text(
            number * 3, height - 0.28, f"{cluster} ({kind})", ha="center", va="bottom", fontsize=9
        )
        place.update({name: (number * 3, height - 1 - row) for row, name in enumerate(members)})
    for pairs, width, style in _stage_links(nodes, sizes):
        kind = site.shared_fabric({name for pair in pairs for name in pair}).kind
        color = FABRIC_COLORS[kind if chooses or len(site.clusters) == 1 else ETHERNET]
        for left, right in pairs:
            bend = 0.35 if place[left][0] == place[right][0] else 0.0
            look = dict(
                arrowstyle="-", color=color, lw=width, ls=style, connectionstyle=f"arc3,rad={bend}"
            )
            axis.annotate("", place[right], place[left], arrowprops=look)
    for name, (x, y) in place.items():
        rank = list(nodes).index(name)
        axis.add_patch(_box(x - 0.62, y - 0.26, 1.24, 0.52, PAPER, 1.0, INK))
        axis.text(
            x,
            y,
            f"{name}: rank {rank}\nstage {sizes.stage(rank)}",
            ha="center",
            va="center",
            fontsize=8,
        )
    axis.set_xlim(-1.3, 3 * len(boxes) - 1.7)
    axis.set_ylim(-0.8, height + 0.1)
    axis.axis("off")


def _box(
    x: float,
    y: float,
    width: float,
    height: float,
    color: str,
    alpha: float,
    stage_link: str = "none",
) -> Any:
    from matplotlib.patches import FancyBboxPatch

    order, style = 3 if stage_link != "none" else 0, "round,pad=0.02"
    return FancyBboxPatch(
        (x, y), width, height, boxstyle=style, fc=color, ec=stage_link, alpha=alpha, zorder=order
    )


def _stage_links(
    nodes: Sequence[str], sizes: Sizes
) -> list[tuple[list[tuple[str, str]], float, str]]:
    """(pairs of nodes of one group or stage link, line width, line style); one rank for each node."""
    result = []
    for rank in range(len(nodes)):
        data, stages = (sizes.group(rank, axis) for axis in ("dp", "pp"))
        if data[0] == rank and len(data) > 1:
            result.append(([(nodes[a], nodes[b]) for a, b in zip(data, data[1:])], 4.0, "-"))
        if stages[0] == rank:
            result += [([(nodes[a], nodes[b])], 1.2, "--") for a, b in zip(stages, stages[1:])]
    return result


def load_traces(directory: Path) -> list[dict[str, Any]]:
    """The trace of every rank of one run (holmes_lab.emulate.trace), in rank order."""
    return sorted(
        (json.loads(path.read_text()) for path in directory.glob("rank*.json")),
        key=lambda trace: trace["rank"],
    )


def last_step(traces: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Begin and end (monotonic seconds) of the traces' "step", or from one optimizer step to the next."""
    if "step" in traces[0]:
        begin, end = traces[0]["step"]
        return begin, end
    ends = [[event[2] for event in trace["events"] if event[0] == "optimizer"] for trace in traces]
    return max(end[-3] for end in ends), max(end[-2] for end in ends)


def timeline_figure(
    runs: Mapping[str, Sequence[Mapping[str, Any]]],
    label: str = "seconds of one step (wall clock of the lab)",
) -> Any:
    """A panel for each run (name -> traces): a row for each rank, one step, the same seconds."""
    panels = {}
    for name, traces in runs.items():
        begin, end = last_step(traces)
        rows = []
        for trace in traces:
            within = (event for event in trace["events"] if event[2] > begin and event[1] < end)
            spans = [
                (kind, max(start, begin) - begin, min(stop, end) - begin)
                for kind, start, stop, _ in within
            ]
            rows.append((f"rank of {trace['node']}", spans))
        panels[f"{name}: {end - begin:.3f} s"] = rows, end - begin
    return timeline(panels, label)


def timeline(panels: Mapping[str, tuple[list[Row], float]], label: str) -> Any:
    """A panel for each title: (rows, seconds). Rows of more than MANY spans show shares of the time."""
    plt = pyplot()
    height = 0.32 * max(len(rows) for rows, _ in panels.values()) + 0.9
    figure, axes = plt.subplots(
        len(panels),
        1,
        figsize=(11, height * len(panels) + 0.4),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    used, longest = set[str](), max(seconds for _, seconds in panels.values())
    for axis, (title, (rows, seconds)) in zip(axes[:, 0], panels.items()):
        for number, (_, spans) in enumerate(rows):
            used |= {kind for kind, _, _ in spans}
            if len(spans) > MANY:
                _draw_shares(axis, number, spans, seconds)
                continue
            for kind, (color, _) in KINDS.items():
                if bars := [(start, end - start) for what, start, end in spans if what == kind]:
                    axis.broken_barh(bars, (number - 0.4, 0.8), color=color, lw=0)
        axis.axvline(seconds, color=INK, lw=1)
        axis.set(xlim=(0, 1.03 * longest), ylim=(-0.6, len(rows) - 0.4))
        name_rows(axis, [name for name, _ in rows])
        axis.set_title(title, loc="left", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel(label)
    handles = [
        plt.Rectangle((0, 0), 1, 1, color=c, label=text)
        for kind, (c, text) in KINDS.items()
        if kind in used
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=6, frameon=False, fontsize=8)
    return figure


def _draw_shares(
    axis: Any, row: int, spans: Sequence[tuple[str, float, float]], seconds: float
) -> None:
    """For spans too short to be seen: of each piece of the time which share went into what."""
    import numpy as np
    from matplotlib.colors import to_rgba

    shown = np.zeros(
        PIECES * MOMENTS, dtype=int
    )  # of each moment the kind that would be drawn on top
    per_second = len(shown) / seconds
    for number, kind in enumerate(KINDS, start=1):
        for _, start, end in (span for span in spans if span[0] == kind):
            shown[round(start * per_second) : round(end * per_second)] = number
    shares = np.sort(shown.reshape(PIECES, MOMENTS), axis=1).T  # a column for each piece
    colors = np.array([to_rgba("none"), *(to_rgba(color) for color, _ in KINDS.values())])
    axis.imshow(
        colors[shares],
        extent=(0, seconds, row - 0.4, row + 0.4),
        aspect="auto",
        origin="lower",
        interpolation="nearest",
    )
