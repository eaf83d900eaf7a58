"""Pictures: who sits where and over which NIC, one step of every rank or stage on one time axis, what a plan is worth.

    of a run     placement_figure(), timeline_figure()       `holmes demo`, `holmes report`
    of a plan    draw_search(): placement, timeline, clusters, what if Ethernet were faster (between.py);
                 draw_partitions()                                                                         `holmes plan`

matplotlib is imported when a picture is wanted: no command needs it otherwise.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

from holmes_ext.cluster.site import ETHERNET, Site
from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.pipeline import Estimate
from holmes_ext.plan.cost.stages import StageCosts
from holmes_ext.plan.search.ranking import simulated
from holmes_ext.plan.search.result import Outcome
from holmes_ext.plan.sizes import Sizes
from holmes_ext.report import between
from holmes_ext.units import format_bytes
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
}
FABRIC_COLORS = {"ib": "#2a6f97", "roce": "#2a9d8f", "ethernet": "#d62728"}
#: Of the clusters, in the launcher's order; again from the start beyond.
CLUSTERS = ("#4c78a8", "#e8a33d", "#72b7b2", "#b07aa1", "#9c755f", "#54a24b", "#bab0ac", "#d37295")

#: (what it is called, [(kind of KINDS, start, end)]), seconds from the step's begin.
Row = tuple[str, list[tuple[str, float, float]]]


def pyplot(what: str = "pictures need") -> Any:
    """matplotlib.pyplot without a screen; HolmesError when matplotlib is missing, which `what` it."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise HolmesError(f"{what} matplotlib, which is missing; pip install 'holmes_ext[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def png(figure: Any) -> bytes:
    """The figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    pyplot().close(figure)
    return buffer.getvalue()


def inline(image: bytes, alt: str) -> str:
    """An <img> element that carries the picture itself."""
    return f'<img alt="{alt}" src="data:image/png;base64,{base64.b64encode(image).decode()}">'


def _write(figure: Any, path: str | Path, advice: str) -> Path:
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise HolmesError(f"{path}: the picture cannot be written: {why(error).split('(')[0]}; {advice}") from None
    finally:
        pyplot().close(figure)
    return Path(path)


def _rows(axis: Any, names: Sequence[str]) -> None:
    """A row for each, the first on top."""
    axis.set_yticks(range(len(names)), names, fontsize=7)
    axis.invert_yaxis()


# Of a run


def placement_figure(panels: Sequence[tuple[str, Site, Sequence[str], bool]], sizes: Sizes) -> Any:
    """One panel for each (title, site, nodes in rank order, NIC for each group?). Nodes stand in their cluster's box
    with their ranks; lines are data-parallel groups (thick) and pipeline edges (thin), coloured by the kind of network
    that carries them. Without a NIC for each group all is on Ethernet, unless the site is one cluster."""
    plt = pyplot()
    figure, axes = plt.subplots(1, len(panels), figsize=(4.6 * len(panels), 3.6), squeeze=False)
    for axis, (title, site, nodes, chooses) in zip(axes[0], panels):
        axis.set_title(title, fontsize=10)
        _placement_panel(axis, site, nodes, chooses, sizes)
    handles = [plt.Line2D([], [], color=color, lw=3, label=kind) for kind, color in FABRIC_COLORS.items()]
    handles += [plt.Line2D([], [], color="black", lw=4, label="data-parallel group (gradients)")]
    handles += [plt.Line2D([], [], color="black", lw=1.2, ls="--", label="pipeline edge (activations)")]
    figure.legend(handles=handles, loc="lower center", ncols=5, frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    return figure


def _placement_panel(axis: Any, site: Site, nodes: Sequence[str], chooses: bool, sizes: Sizes) -> None:
    boxes = [(cluster, [node.name for node in site.nodes if node.cluster == cluster]) for cluster in site.clusters]
    if len(boxes) == 1:  # one cluster: two boxes all the same, so that the panels look alike
        ((name, members),) = boxes
        boxes = [(name, members[: (len(members) + 1) // 2]), (name, members[(len(members) + 1) // 2 :])]
    height, place = max(len(members) for _, members in boxes), {}
    for number, (cluster, members) in enumerate(boxes):
        kind = site.fabric_by_name[site.node_by_name[members[0]].fabrics[0]].kind
        axis.add_patch(_box(number * 3 - 0.95, -0.6, 1.9, height + 0.25, FABRIC_COLORS[kind], 0.08))
        axis.text(number * 3, height - 0.28, f"{cluster} ({kind})", ha="center", va="bottom", fontsize=9)
        place.update({name: (number * 3, height - 1 - row) for row, name in enumerate(members)})
    for pairs, width, style in _edges(nodes, sizes):
        kind = site.shared_fabric({name for pair in pairs for name in pair}).kind
        color = FABRIC_COLORS[kind if chooses or len(site.clusters) == 1 else ETHERNET]
        for left, right in pairs:
            bend = 0.35 if place[left][0] == place[right][0] else 0.0
            look = dict(arrowstyle="-", color=color, lw=width, ls=style, connectionstyle=f"arc3,rad={bend}")
            axis.annotate("", place[right], place[left], arrowprops=look)
    for name, (x, y) in place.items():
        rank = list(nodes).index(name)
        axis.add_patch(_box(x - 0.62, y - 0.26, 1.24, 0.52, "white", 1.0, "black"))
        axis.text(x, y, f"{name}: rank {rank}\nstage {sizes.stage(rank)}", ha="center", va="center", fontsize=8)
    axis.set_xlim(-1.3, 3 * len(boxes) - 1.7)
    axis.set_ylim(-0.8, height + 0.1)
    axis.axis("off")


def _box(x: float, y: float, width: float, height: float, color: str, alpha: float, edge: str = "none") -> Any:
    from matplotlib.patches import FancyBboxPatch

    order, style = 3 if edge != "none" else 0, "round,pad=0.02"
    return FancyBboxPatch((x, y), width, height, boxstyle=style, fc=color, ec=edge, alpha=alpha, zorder=order)


def _edges(nodes: Sequence[str], sizes: Sizes) -> list[tuple[list[tuple[str, str]], float, str]]:
    """(pairs of nodes of one group or edge, line width, line style); one rank for each node."""
    found = []
    for rank in range(len(nodes)):
        data, stages = (sizes.group(rank, axis) for axis in ("dp", "pp"))
        if data[0] == rank and len(data) > 1:
            found.append(([(nodes[a], nodes[b]) for a, b in zip(data, data[1:])], 4.0, "-"))
        if stages[0] == rank:
            found += [([(nodes[a], nodes[b])], 1.2, "--") for a, b in zip(stages, stages[1:])]
    return found


def load_traces(directory: Path) -> list[dict[str, Any]]:
    """The trace of every rank of one run (holmes_ext.lab.emulate.trace), in rank order."""
    return sorted((json.loads(path.read_text()) for path in directory.glob("rank*.json")), key=lambda one: one["rank"])


def last_step(traces: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Begin and end (monotonic seconds) of the "step" that the traces name, or else of the last step but one: from the
    end of one optimizer step to the next, over all ranks."""
    if "step" in traces[0]:
        begin, end = traces[0]["step"]
        return begin, end
    ends = [[event[2] for event in trace["events"] if event[0] == "optimizer"] for trace in traces]
    return max(end[-3] for end in ends), max(end[-2] for end in ends)


def timeline_figure(
    runs: Mapping[str, Sequence[Mapping[str, Any]]], label: str = "seconds of one step (wall clock of the lab)"
) -> Any:
    """One panel for each run (name -> traces): a row for each rank, one step, the same seconds on every panel."""
    panels = {}
    for name, traces in runs.items():
        begin, end = last_step(traces)
        rows = []
        for trace in traces:
            within = (event for event in trace["events"] if event[2] > begin and event[1] < end)
            spans = [(kind, max(start, begin) - begin, min(stop, end) - begin) for kind, start, stop, _ in within]
            rows.append((f"rank of {trace['node']}", spans))
        panels[f"{name}: {end - begin:.3f} s"] = rows, end - begin
    return _timeline(panels, label)


def _timeline(panels: Mapping[str, tuple[list[Row], float]], label: str) -> Any:
    """One panel for each title: (rows, seconds of the step)."""
    plt = pyplot()
    height = 0.32 * max(len(rows) for rows, _ in panels.values()) + 0.9
    figure, axes = plt.subplots(len(panels), 1, figsize=(11, height * len(panels)), sharex=True, squeeze=False)
    used: set[str] = set()
    for axis, (title, (rows, seconds)) in zip(axes[:, 0], panels.items()):
        for number, (_, spans) in enumerate(rows):
            for kind, (color, _) in KINDS.items():
                if bars := [(start, end - start) for what, start, end in spans if what == kind]:
                    axis.broken_barh(bars, (number - 0.4, 0.8), color=color, lw=0)
                    used.add(kind)
        axis.axvline(seconds, color="black", lw=1)
        _rows(axis, [name for name, _ in rows])
        axis.set_title(title, loc="left", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel(label)
    handles = [plt.Rectangle((0, 0), 1, 1, color=c, label=text) for kind, (c, text) in KINDS.items() if kind in used]
    figure.legend(handles=handles, loc="lower center", ncols=7, frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    return figure


# Of a plan


def draw_search(outcome: Outcome, folder: Path) -> list[Path]:
    """Write placement.png, timeline.png, clusters.png and ethernet.png of the best plan; their paths. HolmesError: it
    cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HolmesError(f"{folder}: the pictures cannot be written: {why(error)}; name another directory") from None
    def clusters(outcome: Outcome) -> Any:
        return between.draw_clusters(pyplot(), outcome.ground.links.site(outcome.ground.site), CLUSTERS)

    def what_if(outcome: Outcome) -> Any:
        return between.draw_what_if(pyplot(), outcome)

    figures = (("placement", _stage_bars), ("timeline", _step), ("clusters", clusters), ("ethernet", what_if))
    return [_write(paint(outcome), folder / f"{name}.png", "name another directory") for name, paint in figures]


def _stage_bars(outcome: Outcome) -> Any:
    """A bar for each stage, as long as its ranks, in the colours of the clusters that hold them."""
    plt, best, ground, shown = pyplot(), outcome.best, outcome.ground, set()
    size = (9, max(2.2, 0.28 * len(best.split) + 1.4))
    figure, axis = plt.subplots(figsize=size, layout="constrained")
    for stage, content in enumerate(best.arrangement.contents):
        left = 0
        for index, ranks in content:
            label = None if index in shown else ground.site.clusters[index]
            axis.barh(stage, ranks, left=left, color=CLUSTERS[index % len(CLUSTERS)], edgecolor="white", label=label)
            shown.add(index)
            left += ranks
        memory = f"{best.split[stage]} layers, {format_bytes(best.memory_bytes[stage])}"
        axis.text(left * 1.01, stage, f"{memory}, gradients: {best.reductions[stage]}", va="center", fontsize=7)
    axis.set_xlim(0, ground.world // best.shape.pipeline * 1.5)
    _rows(axis, [f"stage {stage}" for stage in range(len(best.split))])
    axis.xaxis.set_major_locator(plt.MaxNLocator(integer=True))
    axis.set_xlabel("GPUs of the stage")
    what = f"{best.arrangement.describe(ground)}: predicted step {best.step_s:.4g} s"
    axis.set_title(what, loc="left", fontsize=10)
    figure.legend(loc="outside lower center", ncols=8, frameon=False, fontsize=8)
    return figure


def _step(outcome: Outcome) -> Any:
    """The simulated step of each stage's first ranks."""
    shape, step = outcome.best.shape, simulated(outcome, outcome.best)
    rows: dict[int, Row] = {}
    for line in step.ranks:
        own = [span for span in line.spans if span.kind != "idle"]
        kinds = [span.kind if span.kind in KINDS and span.kind not in ("send", "reduce") else "" for span in own]
        spans = [(kind or ("across" if s.across else "inside"), s.start, s.end) for kind, s in zip(kinds, own)]
        rows.setdefault(line.stage, (f"stage {line.stage}", spans))
    chunks = f", {shape.virtual} chunks a stage" if shape.virtual > 1 else ""
    title = f"one step, {shape.micro_batches} micro-batches{chunks}; white: waiting for others"
    return _timeline({title: ([rows[stage] for stage in sorted(rows)], step.step_s)}, "seconds")


def memory_text(one: Estimate, costs: StageCosts, stage: int) -> str:
    """ "41.2 GB of 80 GB", with a "!" when it does not fit."""
    limit = costs.limit_bytes[stage]
    of = "" if limit == inf else f" of {format_bytes(limit)}"
    return f"{format_bytes(one.memory_bytes[stage])}{of}" + ("" if one.fits[stage] else " !")


def draw_partitions(costs: StageCosts, found: Mapping[str, Estimate], path: str) -> None:
    """A panel for each partition: a bar for each stage, as long as the step, cut into computing, communication, idle.
    """
    plt, height = pyplot("--picture needs"), max(1.6, 0.3 * costs.stages + 0.9)
    figure, axes = plt.subplots(len(found), 1, figsize=(9, height * len(found) + 0.5), sharex=True, squeeze=False)
    for axis, (name, one) in zip(axes[:, 0], found.items()):
        left = [0.0] * costs.stages
        parts = ("compute", "#4c78a8"), ("communication", "#d62728"), ("idle", "#d9d9d9")
        for (kind, color), values in zip(parts, (one.compute_s, one.exposed_s, one.idle_s)):
            axis.barh(range(costs.stages), values, left=left, color=color, label=kind)
            left = [a + b for a, b in zip(left, values)]
        for stage, count in enumerate(one.stage_layers):
            text = f" {count} layers, {memory_text(one, costs, stage)}"
            axis.text(0, stage, text, va="center", fontsize=7, color="white")
        _rows(axis, costs.names)
        axis.set_title(f"{name}: {one.step_s:.4g} s", loc="left", fontsize=10)
    axes[-1, 0].set_xlabel("predicted seconds of one step (a stage's idle time is spread over it)")
    axes[0, 0].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False, fontsize=8)
    figure.tight_layout()
    _write(figure, path, "name a .png, .svg or .pdf")
