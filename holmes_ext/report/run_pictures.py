"""Pictures of a lab comparison: who sits where and over which NIC, and one step of every rank on one time axis."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holmes_ext.cluster.site import ETHERNET, Site
from holmes_ext.errors import HolmesError
from holmes_ext.plan.sizes import Sizes

COLORS = {
    "forward": "#4c78a8",
    "backward": "#54a24b",
    "send": "#f2b134",
    "receive": "#fbe0a6",
    "reduce": "#d62728",
    "collective": "#b07aa1",
    "optimizer": "#7f7f7f",
}
LABELS = {"receive": "waits to receive", "reduce": "gradient reduction", "collective": "other collectives"}
FABRIC_COLORS = {"ib": "#2a6f97", "roce": "#2a9d8f", "ethernet": "#d62728"}


def pyplot() -> Any:
    """matplotlib.pyplot without a screen; HolmesError when matplotlib is missing."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise HolmesError("pictures need matplotlib, which is missing; pip install 'holmes_ext[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def placement_figure(panels: Sequence[tuple[str, Site, Sequence[str], bool]], sizes: Sizes) -> Any:
    """One panel for each (title, site, nodes in rank order, NIC for each group?).

    Nodes stand in their cluster's box with their ranks; lines are data-parallel groups (thick) and pipeline edges (thin),
    coloured by the kind of network that carries them. Without a NIC for each group all is on Ethernet, unless the site is one cluster.
    """
    plt = pyplot()
    figure, axes = plt.subplots(1, len(panels), figsize=(4.6 * len(panels), 3.6), squeeze=False)
    for axis, (title, site, nodes, chooses) in zip(axes[0], panels):
        _placement_panel(axis, title, site, nodes, chooses, sizes)
    handles = [plt.Line2D([], [], color=color, lw=3, label=kind) for kind, color in FABRIC_COLORS.items()]
    handles += [plt.Line2D([], [], color="black", lw=4, label="data-parallel group (gradients)")]
    handles += [plt.Line2D([], [], color="black", lw=1.2, ls="--", label="pipeline edge (activations)")]
    figure.legend(handles=handles, loc="lower center", ncols=5, frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    return figure


def _placement_panel(axis: Any, title: str, site: Site, nodes: Sequence[str], chooses: bool, sizes: Sizes) -> None:
    columns = {cluster: [node.name for node in site.nodes if node.cluster == cluster] for cluster in site.clusters}
    if len(columns) == 1:  # one cluster: two columns all the same, so that the panels look alike
        (name, members), = columns.items()
        columns = {name: members[: (len(members) + 1) // 2], f"{name} ": members[(len(members) + 1) // 2 :]}
    place = {}
    for column, (cluster, members) in enumerate(columns.items()):
        kind = site.fabric_by_name[site.node_by_name[members[0]].fabrics[0]].kind
        height = max(map(len, columns.values()))
        axis.add_patch(_box(column * 3 - 0.95, -0.6, 1.9, height + 0.25, FABRIC_COLORS[kind], 0.08))
        axis.text(column * 3, height - 0.28, f"{cluster.strip()} ({kind})", ha="center", va="bottom", fontsize=9)
        for row, name in enumerate(members):
            place[name] = (column * 3, height - 1 - row)
    for group, width, style in _edges(nodes, sizes):
        for left, right in group:
            kind = site.shared_fabric((left, right) if len(group) < 2 else {n for pair in group for n in pair}).kind
            kind = kind if chooses or len(site.clusters) == 1 else ETHERNET
            (x0, y0), (x1, y1) = place[left], place[right]
            bend = 0.35 if x0 == x1 else 0.0
            axis.annotate("", (x1, y1), (x0, y0), arrowprops=dict(
                arrowstyle="-", color=FABRIC_COLORS[kind], lw=width, ls=style, connectionstyle=f"arc3,rad={bend}"))  # fmt: skip
    for name, (x, y) in place.items():
        rank = list(nodes).index(name)
        axis.add_patch(_box(x - 0.62, y - 0.26, 1.24, 0.52, "white", 1.0, "black"))
        axis.text(x, y, f"{name}: rank {rank}\nstage {sizes.stage(rank)}", ha="center", va="center", fontsize=8)
    axis.set_title(title, fontsize=10)
    axis.set_xlim(-1.3, 3 * len(columns) - 1.7)
    axis.set_ylim(-0.8, max(map(len, columns.values())) + 0.1)
    axis.axis("off")


def _box(x: float, y: float, width: float, height: float, color: str, alpha: float, edge: str = "none") -> Any:
    from matplotlib.patches import FancyBboxPatch

    return FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0.02", fc=color, ec=edge, alpha=alpha, zorder=3 if edge != "none" else 0)


def _edges(nodes: Sequence[str], sizes: Sizes) -> list[tuple[list[tuple[str, str]], float, str]]:
    """(pairs of one group, line width, line style); one rank for each node."""
    edges = []
    for rank in range(len(nodes)):
        data = sizes.group(rank, "dp")
        if data[0] == rank and len(data) > 1:
            edges.append(([(nodes[a], nodes[b]) for a, b in zip(data, data[1:])], 4.0, "-"))
        stages = sizes.group(rank, "pp")
        if stages[0] == rank:
            edges += [([(nodes[a], nodes[b])], 1.2, "--") for a, b in zip(stages, stages[1:])]
    return edges


def load_traces(directory: Path) -> list[dict[str, Any]]:
    """The trace of every rank of one run (holmes_ext.lab.emulate.trace), in rank order."""
    return sorted((json.loads(path.read_text()) for path in directory.glob("rank*.json")), key=lambda trace: trace["rank"])


def last_step(traces: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Begin and end (monotonic seconds) of the "step" that the traces name, or else of the last step but one: from the end of one
    optimizer step to the next, over all ranks."""
    if "step" in traces[0]:
        return traces[0]["step"]
    ends = [[event[2] for event in trace["events"] if event[0] == "optimizer"] for trace in traces]
    return max(end[-3] for end in ends), max(end[-2] for end in ends)


def timeline_figure(runs: Mapping[str, Sequence[Mapping[str, Any]]], label: str = "seconds of one step (wall clock of the lab)") -> Any:
    """One panel for each run (name -> traces): a row for each rank, one step, the same seconds on every panel."""
    plt = pyplot()
    rows = max(len(traces) for traces in runs.values())
    figure, axes = plt.subplots(len(runs), 1, figsize=(11, (0.32 * rows + 0.9) * len(runs)), sharex=True, squeeze=False)
    for axis, (name, traces) in zip(axes[:, 0], runs.items()):
        begin, end = last_step(traces)
        for row, trace in enumerate(traces):
            for kind, start, stop, _ in sorted(trace["events"], key=lambda event: event[0] in ("forward", "backward")):
                if stop > begin and start < end:
                    left = max(start, begin)
                    axis.broken_barh([(left - begin, min(stop, end) - left)], (row - 0.4, 0.8), color=COLORS[kind], lw=0)
        axis.axvline(end - begin, color="black", lw=1)
        axis.set_yticks(range(len(traces)), [f"rank of {trace['node']}" for trace in traces], fontsize=8)
        axis.invert_yaxis()
        axis.set_title(f"{name}: {end - begin:.3f} s", loc="left", fontsize=10)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    axes[-1, 0].set_xlabel(label)
    handles = [plt.Rectangle((0, 0), 1, 1, color=color, label=LABELS.get(kind, kind)) for kind, color in COLORS.items()]
    figure.legend(handles=handles, loc="lower center", ncols=7, frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    return figure


def png(figure: Any) -> bytes:
    """The figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    pyplot().close(figure)
    return buffer.getvalue()


def inline(image: bytes, alt: str) -> str:
    """An <img> element that carries the picture itself."""
    return f'<img alt="{alt}" src="data:image/png;base64,{base64.b64encode(image).decode()}">'
