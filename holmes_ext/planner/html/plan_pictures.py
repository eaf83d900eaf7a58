"""Pictures of a plan: placement of its stages, timeline of a step, seconds by cause, partitions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil, inf
from pathlib import Path
from textwrap import shorten
from typing import Any

from holmes_ext.cluster.sources.hostlist import runs
from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.pipeline import Estimate
from holmes_ext.plan.cost.stages import StageCosts
from holmes_ext.planner.html.between import draw_clusters, draw_what_if
from holmes_ext.planner.html.chart import (
    CLUSTER_COLORS,
    COMPUTE,
    KINDS,
    MEDIUM,
    PAPER,
    SMALL,
    WAITING,
    WIDE,
    fold,
    is_narrow,
    legend_columns,
)
from holmes_ext.planner.html.cut import Row, cut_of
from holmes_ext.planner.html.pictures import MANY, legend, name_rows, pyplot, timeline, write
from holmes_ext.planner.search.result import Candidate, SearchResult
from holmes_ext.planner.search.simulated import simulated
from holmes_ext.planner.search.stock import CAUSES, baseline, plan_name
from holmes_ext.units import format_bytes
from holmes_ext.words import counted, why

#: Cause (stock.CAUSES) -> color, hatch. A network has a color; its reductions are hatched.
CAUSE_STYLES = {
    "compute": (COMPUTE, ""),
    "collectives": (KINDS["collective"][0], ""),
    "optimizer": (KINDS["optimizer"][0], ""),
    "bubble": (WAITING, ""),
    "send_inside": (KINDS["inside"][0], ""),
    "send_across": (KINDS["across"][0], ""),
    "reduce_inside": (KINDS["inside"][0], "///"),
    "reduce_across": (KINDS["across"][0], "///"),
}

#: Causes below this share of the longest step are not drawn.
SMALL_CAUSE = 1e-4
#: Most characters of a stage's node names, on a wide and on a narrow chart.
MAX_NAMES_WIDTH, MAX_NARROW_NAMES = 60, 38


def draw_search(result: SearchResult, folder: Path) -> list[Path]:
    """Write the pictures of PAINTED into a folder, and return their paths.

    Raises:
        HolmesError: The folder or a file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HolmesError(
            f"{folder}: the pictures cannot be written: {why(error)}; name another directory"
        ) from None
    return [
        write(paint(result), folder / f"{name}.png", "name another directory")
        for name, paint in painted(result).items()
    ]


def placement(result: SearchResult, width: float = WIDE) -> Any:
    """Return a figure with a bar for each stage: its ranks, in the colors of their clusters."""
    plt = pyplot()
    best = result.best
    network = result.network
    stage_ranks = network.world // best.shape.pipeline
    narrow = is_narrow(width)
    height = max(2.2, (0.75 if narrow else 0.4) * len(best.split) + 1.6)
    figure, axis = plt.subplots(figsize=(width, height), layout="constrained")
    in_legend = set()  # indices of clusters

    # A cluster has its color also in the picture of all clusters, some of which may be left out.
    all_clusters = (result.on_all or result).network.site.clusters
    for stage, contents in enumerate(best.placement.stages):
        # The stage's bar, with a part for each group of nodes of the same type.
        left = 0
        for node_type, rank_count in contents:
            name = network.cluster(node_type)
            index = all_clusters.index(name)
            label = None if index in in_legend else name
            color = CLUSTER_COLORS[index % len(CLUSTER_COLORS)]
            axis.barh(
                stage,
                rank_count,
                0.45 if narrow else 0.8,
                left=left,
                color=color,
                label=label,
                edgecolor=PAPER,
            )
            in_legend.add(index)
            left += rank_count
        # The texts of the stage: layers, memory and reduction beside the bar, node names on it.
        memory = format_bytes(best.memory_bytes[stage])
        layers = counted(best.split[stage], "layer")
        margin = 0.01 * stage_ranks
        if narrow:  # below the bar
            text = f"{layers}, {memory}, {best.reductions[stage]}"
            axis.text(0, stage + 0.28, text, va="top", fontsize=SMALL)
        else:  # behind the bar
            text = f"{layers}, {memory}, gradients: {best.reductions[stage]}"
            axis.text(left + margin, stage, text, va="center", fontsize=SMALL)
        nodes = _nodes_of(result, stage, MAX_NARROW_NAMES if narrow else MAX_NAMES_WIDTH)
        axis.text(margin, stage, nodes, va="center", fontsize=SMALL, color="#111111")
    axis.set_xlim(0, stage_ranks * (1.02 if narrow else 1.8))
    name_rows(axis, [f"stage {stage}" for stage in range(len(best.split))])
    axis.set_ylim(len(best.split) - (0.25 if narrow else 0.5), -0.5)
    ticks = plt.MaxNLocator(4 if narrow else "auto", integer=True).tick_values(0, stage_ranks)
    axis.set_xticks([tick for tick in ticks if tick <= stage_ranks])
    axis.set_xlabel("GPUs of the stage")
    title = f"{result.describe(best)}: predicted step {best.step_s:.4g} s"
    axis.set_title(fold(title, width - 0.8), loc="left", fontsize=MEDIUM)
    legend(figure, axis.get_legend_handles_labels()[0], width)
    return figure


def _nodes_of(result: SearchResult, stage: int, letters: int) -> str:
    """Return the names of a stage's nodes, shortened to at most `letters` letters."""
    placement = result.best.placement
    names = result.network.nodes(placement)
    ranks = [placement.rank(position, stage) for position in range(placement.stage_ranks)]
    listed = " ".join(runs(names[placement.node_of(rank)] for rank in ranks))
    return shorten(listed, letters, placeholder=" ...")


def step(result: SearchResult, width: float = WIDE) -> Any:
    """Return a figure with the timeline of a simulated step, with a row for each stage.

    The first panel shows the best plan, the second the same job without holmes ("stock").
    """
    stock = baseline(result)
    panels = {}  # title -> (rows, seconds of the step)
    for name, job, candidate in (
        (plan_name(result), result, result.best),
        (stock.name, stock.request, stock.plan),
    ):
        rows, step_s = _timeline_rows(job, candidate)
        panels[f"{name}: {step_s:.4g} s"] = rows, step_s
    shape = result.best.shape
    chunks = f", {shape.virtual} chunks a stage" if shape.virtual > 1 else ""
    label = (
        f"seconds; {counted(shape.micro_batches, 'micro-batch')}{chunks}; empty: waiting for others"
    )
    drawn = []  # rows without the part that timeline() leaves out
    for rows, _ in panels.values():
        cut = cut_of(rows, shape.virtual)
        drawn += cut.rows(rows) if cut else rows
    if any(len(spans) > MANY for _, spans in drawn):
        label += "; heights: shares of the time"
    return timeline(panels, label, width, chunks=shape.virtual)


def _timeline_rows(result: SearchResult, candidate: Candidate) -> tuple[list[Row], float]:
    """Return a chart's rows, with a row for each pipeline stage, and the step time in seconds.

    A row shows the activities of the stage's first group of equal ranks over time. Communication is
    colored by network: inside a cluster, or between clusters.
    """
    simulated_step = simulated(result, candidate)
    rows: dict[int, Row] = {}  # stage -> row
    for line in simulated_step.ranks:
        if line.stage in rows:  # other ranks of the stage
            continue
        shown = []
        for span in line.spans:
            if span.kind == "idle":
                continue
            kind = span.kind
            if kind not in KINDS or kind in ("send", "reduce"):
                kind = "across" if span.across else "inside"
            shown.append((kind, span.start, span.end))
        rows[line.stage] = (f"stage {line.stage}", shown)
    return [rows[stage] for stage in sorted(rows)], simulated_step.step_s


def seconds(by_plan: Mapping[str, Mapping[str, float]], width: float = WIDE) -> Any:
    """Return a figure with a bar for each plan, as long as its step, divided by cause.

    Args:
        by_plan: Name of the plan -> cause -> seconds.
        width: Of the figure, in inches.
    """
    plt = pyplot()
    longest_s = max(sum(causes.values()) for causes in by_plan.values())
    drawn = {}  # cause -> label, without causes that are small in every plan
    for cause, label in CAUSES.items():
        largest_s = max(causes[cause] for causes in by_plan.values())
        if largest_s > SMALL_CAUSE * longest_s:
            drawn[cause] = label

    legend_rows = ceil(len(drawn) / legend_columns(list(drawn.values()), width))
    size = (width, 0.45 * len(by_plan) + 0.2 * legend_rows + 1.0)
    figure, axis = plt.subplots(figsize=size, layout="constrained")
    left = [0.0] * len(by_plan)  # start of the next part of each bar
    for cause, label in drawn.items():
        values = [causes[cause] for causes in by_plan.values()]
        color, hatch = CAUSE_STYLES[cause]
        axis.barh(
            range(len(by_plan)),
            values,
            left=left,
            color=color,
            label=label,
            hatch=hatch,
            edgecolor=PAPER,
            lw=0,
        )
        left = [start + value for start, value in zip(left, values)]

    names = list(by_plan)
    if is_narrow(width):
        names = [fold(name, 1.0, SMALL) for name in names]
    name_rows(axis, names)
    axis.set_xlabel("seconds of one step")
    axis.spines[["top", "right"]].set_visible(False)
    legend(figure, axis.get_legend_handles_labels()[0], width)
    return figure


#: Name of a file of --pictures -> function that draws it.
PAINTED: dict[str, Callable[..., Any]] = {
    "placement": placement,
    "timeline": step,
    "clusters": draw_clusters,
    "ethernet": draw_what_if,
}


def painted(result: SearchResult) -> dict[str, Callable[..., Any]]:
    """Return the pictures of PAINTED: name of the picture -> function that draws it.

    A picture of the network between clusters is left out if there is only one cluster: "clusters" for
    a site of one, "ethernet" for a plan on one.
    """
    pictures = dict(PAINTED)
    if len((result.on_all or result).network.site.clusters) == 1:
        del pictures["clusters"]
    if len(result.network.site.clusters) == 1:
        del pictures["ethernet"]
    return pictures


def of_limit(used: float, limit: float) -> str:
    """Return used bytes and their limit as text, "41.2 GB of 80 GB"; "41.2 GB" without a limit."""
    if limit == inf:
        return format_bytes(used)
    return f"{format_bytes(used)} of {format_bytes(limit)}"


def memory_text(estimate: Estimate, costs: StageCosts, stage: int) -> str:
    """Return a stage's memory as text, "41.2 GB of 80 GB", with a "!" if it does not fit."""
    used = of_limit(estimate.memory_bytes[stage], costs.limit_bytes[stage])
    return used + ("" if estimate.fits[stage] else " !")


def draw_partitions(costs: StageCosts, estimates: Mapping[str, Estimate], path: str) -> None:
    """Write a figure with a panel for each partition method and a bar for each stage.

    A bar is as long as the step: computation, communication and idle time.

    Args:
        costs: Times and memory of the stages.
        estimates: Partition method -> predicted step.
        path: File to write.
    """
    plt = pyplot("--picture needs")
    panel_height = max(1.6, 0.3 * costs.stages + 0.9)
    size = (9, panel_height * len(estimates) + 0.5)
    figure, axes = plt.subplots(len(estimates), 1, figsize=size, sharex=True, squeeze=False)
    for axis, (name, estimate) in zip(axes[:, 0], estimates.items()):
        parts = (
            ("compute", COMPUTE, estimate.compute_s),
            ("communication", KINDS["across"][0], estimate.exposed_s),
            ("idle", WAITING, estimate.idle_s),
        )
        left = [0.0] * costs.stages
        for label, color, values in parts:
            axis.barh(range(costs.stages), values, left=left, color=color, label=label)
            left = [start + value for start, value in zip(left, values)]
        for stage, layers in enumerate(estimate.stage_layers):
            text = f" {counted(layers, 'layer')}, {memory_text(estimate, costs, stage)}"
            axis.text(0, stage, text, va="center", fontsize=SMALL, color="white")
        name_rows(axis, costs.names)
        axis.set_title(f"{name}: {estimate.step_s:.4g} s", loc="left", fontsize=MEDIUM)
    axes[-1, 0].set_xlabel("predicted seconds of one step (a stage's idle time is spread over it)")
    axes[0, 0].legend(
        loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False, fontsize=SMALL
    )
    figure.tight_layout()
    write(figure, path, "name a .png, .svg or .pdf")
