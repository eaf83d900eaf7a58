"""Pictures of a plan: where its stages are, one step of it and of stock, where the seconds go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from pathlib import Path
from textwrap import shorten
from typing import Any

from holmes_ext.cluster.sources.hostlist import runs
from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.pipeline import Estimate
from holmes_ext.plan.cost.stages import StageCosts
from holmes_ext.planner.html.between import draw_clusters, draw_what_if
from holmes_ext.planner.html.pictures import (
    CLUSTERS,
    KINDS,
    MANY,
    PAPER,
    Row,
    name_rows,
    pyplot,
    timeline,
    write,
)
from holmes_ext.planner.search.result import Candidate, SearchResult
from holmes_ext.planner.search.simulated import simulated
from holmes_ext.planner.search.stock import CAUSES, stock_like
from holmes_ext.units import format_bytes
from holmes_ext.words import why

#: Of stock.CAUSES.
CAUSE_COLORS = dict(
    zip(
        CAUSES,
        ("#4c78a8", "#72b7b2", "#7f7f7f", "#bab0ac", "#f2b134", "#e45756", "#b07aa1", "#d62728"),
    )
)


def draw_search(result: SearchResult, folder: Path) -> list[Path]:
    """Write the pictures of PAINTED; their paths. HolmesError: it cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HolmesError(
            f"{folder}: the pictures cannot be written: {why(error)}; name another directory"
        ) from None
    return [
        write(paint(result), folder / f"{name}.png", "name another directory")
        for name, paint in PAINTED.items()
    ]


def placement(result: SearchResult) -> Any:
    """A bar for each stage, as long as its ranks, in its clusters' colours, with its nodes' names."""
    plt, best, network, shown = pyplot(), result.best, result.network, set()
    most = network.world // best.shape.pipeline
    size = (9, max(2.2, 0.4 * len(best.split) + 1.4))
    figure, axis = plt.subplots(figsize=size, layout="constrained")
    for stage, content in enumerate(best.placement.stages):
        left = 0
        for kind, ranks in content:
            name = network.cluster(kind)
            index = network.site.clusters.index(name)
            label = None if index in shown else name
            axis.barh(
                stage,
                ranks,
                left=left,
                color=CLUSTERS[index % len(CLUSTERS)],
                edgecolor=PAPER,
                label=label,
            )
            shown.add(index)
            left += ranks
        memory = f"{best.split[stage]} layers, {format_bytes(best.memory_bytes[stage])}"
        axis.text(
            left + 0.01 * most,
            stage,
            f"{memory}, gradients: {best.reductions[stage]}",
            va="center",
            fontsize=8,
        )
        axis.text(
            0.01 * most, stage, _nodes_of(result, stage), va="center", fontsize=8, color="#111111"
        )
    axis.set_xlim(0, most * 1.6)
    name_rows(axis, [f"stage {stage}" for stage in range(len(best.split))])
    axis.set_xticks(
        [tick for tick in plt.MaxNLocator(integer=True).tick_values(0, most) if tick <= most]
    )
    axis.set_xlabel("GPUs of the stage")
    what = f"{result.describe(best)}: predicted step {best.step_s:.4g} s"
    axis.set_title(what, loc="left", fontsize=10)
    figure.legend(loc="outside lower left", ncols=8, frameon=False, fontsize=8)
    return figure


def _nodes_of(result: SearchResult, stage: int) -> str:
    placement = result.best.placement
    names = result.network.nodes(placement)
    ranks = [placement.rank(position, stage) for position in range(placement.stage_ranks)]
    listed = " ".join(runs(names[rank // placement.processes] for rank in ranks))
    return shorten(listed, 70, placeholder=" ...")


def step(result: SearchResult) -> Any:
    """The simulated step of each stage's first ranks: of this plan, and of stock with its sizes."""
    panels, stock = {}, stock_like(result, result.best)
    for name, (whose, candidate) in (("this plan", (result, result.best)), ("stock", stock)):
        rows, seconds = _rows_of(whose, candidate)
        panels[f"{name}: {seconds:.4g} s"] = rows, seconds
    shape = result.best.shape
    chunks = f", {shape.virtual} chunks a stage" if shape.virtual > 1 else ""
    label = f"seconds; {shape.micro_batches} micro-batches{chunks}; empty: waiting for others"
    many = any(len(spans) > MANY for rows, _ in panels.values() for _, spans in rows)
    return timeline(panels, label + "; heights: shares of the time" * many)


def _rows_of(result: SearchResult, candidate: Candidate) -> tuple[list[Row], float]:
    step = simulated(result, candidate)
    rows: dict[int, Row] = {}
    for line in step.ranks:
        spans = [span for span in line.spans if span.kind != "idle"]
        kinds = [
            span.kind if span.kind in KINDS and span.kind not in ("send", "reduce") else ""
            for span in spans
        ]
        shown = [
            (kind or ("across" if s.across else "inside"), s.start, s.end)
            for kind, s in zip(kinds, spans)
        ]
        rows.setdefault(line.stage, (f"stage {line.stage}", shown))
    return [rows[stage] for stage in sorted(rows)], step.step_s


def seconds(by_plan: Mapping[str, Mapping[str, float]]) -> Any:
    """A bar for each name -> seconds by cause, as long as its step."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(9, 0.45 * len(by_plan) + 1.5), layout="constrained")
    left, least = (
        dict.fromkeys(by_plan, 0.0),
        1e-4 * max(sum(causes.values()) for causes in by_plan.values()),
    )
    for cause, text in CAUSES.items():
        if max(causes[cause] for causes in by_plan.values()) > least:
            values = [causes[cause] for causes in by_plan.values()]
            axis.barh(
                range(len(by_plan)),
                values,
                left=list(left.values()),
                color=CAUSE_COLORS[cause],
                label=text,
            )
            left = {name: left[name] + causes[cause] for name, causes in by_plan.items()}
    name_rows(axis, list(by_plan))
    axis.set_xlabel("seconds of one step")
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower left", ncols=3, frameon=False, fontsize=8)
    return figure


#: File of --pictures -> its picture.
PAINTED: dict[str, Callable[[SearchResult], Any]] = {
    "placement": placement,
    "timeline": step,
    "clusters": draw_clusters,
    "ethernet": draw_what_if,
}


def of_limit(used: float, limit: float) -> str:
    """ "41.2 GB of 80 GB", bytes; "41.2 GB" without a limit."""
    return format_bytes(used) + ("" if limit == inf else f" of {format_bytes(limit)}")


def memory_text(estimate: Estimate, costs: StageCosts, stage: int) -> str:
    """ "41.2 GB of 80 GB", with a "!" when it does not fit."""
    used = of_limit(estimate.memory_bytes[stage], costs.limit_bytes[stage])
    return used + ("" if estimate.fits[stage] else " !")


def draw_partitions(costs: StageCosts, estimates: Mapping[str, Estimate], path: str) -> None:
    """Of each partition a bar for each stage, as long as the step: computing, communication, idle."""
    plt, height = pyplot("--picture needs"), max(1.6, 0.3 * costs.stages + 0.9)
    figure, axes = plt.subplots(
        len(estimates), 1, figsize=(9, height * len(estimates) + 0.5), sharex=True, squeeze=False
    )
    for axis, (name, estimate) in zip(axes[:, 0], estimates.items()):
        left = [0.0] * costs.stages
        parts = ("compute", "#4c78a8"), ("communication", "#d62728"), ("idle", "#d9d9d9")
        for (kind, color), values in zip(
            parts, (estimate.compute_s, estimate.exposed_s, estimate.idle_s)
        ):
            axis.barh(range(costs.stages), values, left=left, color=color, label=kind)
            left = [a + b for a, b in zip(left, values)]
        for stage, count in enumerate(estimate.stage_layers):
            text = f" {count} layers, {memory_text(estimate, costs, stage)}"
            axis.text(0, stage, text, va="center", fontsize=7, color="white")
        name_rows(axis, costs.names)
        axis.set_title(f"{name}: {estimate.step_s:.4g} s", loc="left", fontsize=10)
    axes[-1, 0].set_xlabel("predicted seconds of one step (a stage's idle time is spread over it)")
    axes[0, 0].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False, fontsize=8)
    figure.tight_layout()
    write(figure, path, "name a .png, .svg or .pdf")
