"""Pictures of the network between clusters: its links, and a plan's step at other rates and latencies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import cos, inf, log10, pi, sin
from textwrap import wrap
from typing import Any

from holmes_ext.cluster.fabric import ETHERNET
from holmes_ext.cluster.site import Site
from holmes_ext.planner.html.chart import (
    CLUSTER_COLORS,
    INK,
    MEDIUM,
    PAPER,
    SMALL,
    WAITING,
    WIDE,
    fold,
    is_narrow,
)
from holmes_ext.planner.html.pictures import legend, pyplot
from holmes_ext.planner.search.changed import StepTimes, with_ethernet, with_latency, with_site
from holmes_ext.planner.search.result import SearchResult
from holmes_ext.planner.search.stock import baseline, plan_name
from holmes_ext.units import format_rate, format_seconds
from holmes_ext.words import counted

#: Factors on the rates of cluster.toml in the what-if picture.
FACTORS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8, 16)
#: Latencies in the what-if picture: one way, of all links between clusters, in seconds.
LATENCIES = (30e-6, 1e-3, 5e-3, 20e-3, 80e-3, 200e-3)
#: Fewest ticks of a logarithmic axis; with fewer, linear ticks are used.
_MIN_TICKS = 3
#: Distance of the data from the limits of the axis of seconds: as a share of the axis, at least so
#: many decades (a factor of 1.12).
_MARGIN_SHARE, _MARGIN_DECADES = 0.05, 0.05
#: Most clusters on a flat figure: two are side by side, more are all around the circle.
_MOST_FLAT = 2
#: Most clusters with the rates at their links; with more, the rates would cover each other.
_MOST_LABELLED = 4
#: Most letters of a line of text in a cluster's circle.
_CIRCLE_LETTERS = 12
#: Half of the drawing's width. The circle has radius 1; the rest is space for the clusters' boxes.
_HALF_WIDTH = 1.4


def draw_clusters(result: SearchResult, width: float = WIDE) -> Any:
    """Return a figure with the clusters on a circle, and a line with rate and latency for each pair.

    Faster links have wider lines. If the plan leaves out nodes, all clusters are shown, and the
    number of nodes that it uses.
    """
    plt = pyplot()
    site = (result.on_all or result).network.measured
    used = {node.name for node in result.network.site.nodes}
    names = site.clusters
    half_height = 0.6 if len(names) <= _MOST_FLAT else 1.25  # in the units of _HALF_WIDTH
    width = min(width, 4 + 0.5 * len(names))  # of the figure, in inches
    height = width * half_height / _HALF_WIDTH
    figure, axis = plt.subplots(figsize=(width, height), layout="constrained")
    position = {}  # cluster -> (x, y)
    for index, name in enumerate(names):
        angle = 2 * pi * index / len(names)
        position[name] = (-cos(angle), sin(angle))
    _draw_links(axis, site, position)
    for index, name in enumerate(names):
        nodes = [node.name for node in site.nodes if node.cluster == name]
        used_count = len(used.intersection(nodes))
        text = _cluster_text(site, name, len(nodes), used_count)
        color = CLUSTER_COLORS[index % len(CLUSTER_COLORS)] if used_count else WAITING
        x, y = position[name]
        axis.scatter(x, y, s=2600, color=color, zorder=2)
        axis.text(x, y, text, ha="center", va="center", fontsize=SMALL, color="#111111", zorder=3)
    nic_rate = format_rate(site.fabric_by_name[ETHERNET].rate_bps)
    counts = sorted({node.processes for node in site.nodes})  # GPUs of a node
    plural = "s" * (counts[-1] > 1)
    title = f"{' or '.join(map(str, counts))} GPU{plural} a node, {nic_rate} a NIC"
    if not site.wan:
        title += ": flat, only NICs limit it"
    axis.set_title(fold(title, width), loc="left", fontsize=MEDIUM)
    axis.set(xlim=(-_HALF_WIDTH, _HALF_WIDTH), ylim=(-half_height, half_height), aspect="equal")
    axis.axis("off")
    return figure


def _cluster_text(site: Site, name: str, node_count: int, used_count: int) -> str:
    """Return the text at a cluster: its name, its nodes, and the rate of its uplink if it has any.

    Args:
        site: Clusters and the links between them.
        name: Name of the cluster.
        node_count: Number of its nodes.
        used_count: Number of those that the plan uses.
    """
    nodes = counted(node_count, "node")
    lines = wrap(name, _CIRCLE_LETTERS)
    if not used_count:
        lines += [nodes, "left out"]
    elif used_count < node_count:
        lines.append(f"{used_count} of {nodes}")
    else:
        lines.append(nodes)
    uplink_bps = site.wan.uplink_of.get(name)
    if uplink_bps:
        lines += ["uplink", format_rate(uplink_bps)]
    return "\n".join(lines)


def _draw_links(axis: Any, site: Site, position: Mapping[str, tuple[float, float]]) -> None:
    """Draw a line for each pair of clusters, with the rate and the latency of its path.

    Args:
        axis: Axes to draw on.
        site: Clusters and the links between them.
        position: Cluster -> (x, y).
    """
    # Links and uplinks on the path between two clusters; the slowest sets the rate.
    paths = {pair: site.wan.hops(*pair) for pair in combinations(position, 2)}
    rates_bps = {}
    for pair, hops in paths.items():
        rates_bps[pair] = min((hop.rate_bps for hop in hops), default=inf)
    fastest_bps = max((rate for rate in rates_bps.values() if rate < inf), default=1.0)

    for number, (pair, hops) in enumerate(paths.items()):
        (x1, y1), (x2, y2) = (position[name] for name in pair)
        width = 5 * min(1.0, rates_bps[pair] / fastest_bps) + 0.3
        axis.plot((x1, x2), (y1, y2), color="#999999", lw=width, zorder=1, solid_capstyle="round")
        if not hops or len(position) > _MOST_LABELLED:
            continue
        # Texts of links that cross in the middle must not cover each other.
        share = 0.38 + 0.24 * (number % 2)
        rate = format_rate(rates_bps[pair], 3) if rates_bps[pair] < inf else "no limit"
        latency = format_seconds(sum(hop.latency_s for hop in hops))
        axis.text(
            x1 + share * (x2 - x1),
            y1 + share * (y2 - y1),
            f"{rate}\n{latency}",
            ha="center",
            va="center",
            fontsize=SMALL,
            bbox={"boxstyle": "round", "fc": PAPER, "ec": "none", "pad": 0.1, "alpha": 0.8},
        )


def draw_what_if(result: SearchResult, width: float = WIDE) -> Any:
    """Return a figure of the step time over the network between clusters, in two panels.

    The first panel varies the rate between the clusters, the second the latency. If the site does not
    describe links between clusters (a WAN), the first panel varies the rate of a node's Ethernet. Each
    panel has a curve for the best plan and another for the same job without holmes (baseline() of
    stock.py). The step times are simulated if the best plan's is; else they come from the closed form,
    a formula.
    """
    plt = pyplot()
    site = result.network.measured  # with measured rates where there are any
    best = result.best
    rows, columns = (2, 1) if is_narrow(width) else (1, 2)
    figure, (by_rate_axis, by_latency_axis) = plt.subplots(
        rows, columns, figsize=(width, 3.6 * rows), layout="constrained", sharey=True
    )
    by_rate, by_latency = result.remember("what if", best, lambda: _what_if(result))
    names = (plan_name(result), baseline(result).name)

    # The first panel: step time over the factor of the rates; a dotted line marks the present rates.
    nic_rate = format_rate(result.network.site.fabric_by_name[ETHERNET].rate_bps)
    rates = "the rates of cluster.toml" if site.wan else f"the Ethernet of a node, {nic_rate}"
    _curves(by_rate_axis, FACTORS, by_rate, names)
    by_rate_axis.set_xlabel(f"times {rates}")
    by_rate_axis.axvline(1, color=INK, lw=0.8, linestyle=":")
    by_rate_axis.text(
        1, 0.98, " now", va="top", fontsize=SMALL, transform=by_rate_axis.get_xaxis_transform()
    )
    by_rate_axis.set_xscale("log", base=2)
    factors = [f"{factor:g}" if factor >= 1 else f"1/{1 / factor:g}" for factor in FACTORS]
    by_rate_axis.set_xticks(FACTORS, factors)

    # The second panel: step time over the latency.
    _curves(by_latency_axis, LATENCIES, by_latency, names)
    by_latency_axis.set_xlabel("one way between clusters, all links")
    by_latency_axis.set_xscale("log")

    # Two lines a label: the neighbours 80 ms and 200 ms do not touch on a narrow chart.
    labels = [format_seconds(seconds).replace(" ", "\n") for seconds in LATENCIES]
    by_latency_axis.set_xticks(LATENCIES, labels)

    # Both panels have the same logarithmic scale of seconds.
    all_seconds = [seconds for times in (*by_rate, *by_latency) for seconds in times]
    low, high = _limits(all_seconds)
    ticks = _ticks(plt, low, high)
    origin = "simulated" if best.simulated_s else "closed form"
    by_rate_axis.set_yscale("log")
    for axis in (by_rate_axis, by_latency_axis):
        axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_ylim(low, high)
        axis.minorticks_off()
        axis.set_ylabel(fold(f"predicted seconds of one step ({origin})", 2.6))
    handles = by_rate_axis.get_legend_handles_labels()[0]
    legend(figure, handles, width)
    return figure


def _what_if(result: SearchResult) -> tuple[list[StepTimes], list[StepTimes]]:
    """Return the step times on changed networks between the clusters, with and without holmes.

    Returns:
        Two lists: step times for each of FACTORS on the rates between the clusters, and for each of
        LATENCIES between them.
    """
    best = result.best
    site = result.network.measured
    by_rate = [with_ethernet(result, best, factor) for factor in FACTORS]
    by_latency = [with_site(result, best, with_latency(site, seconds)) for seconds in LATENCIES]
    return by_rate, by_latency


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """Return the limits of a logarithmic axis, a little wider than the values."""
    low, high = min(values), max(values)
    factor = 10 ** max(_MARGIN_DECADES, _MARGIN_SHARE * log10(high / low))
    return low / factor, high * factor


def _ticks(plt: Any, low: float, high: float) -> Sequence[float]:
    """Return ticks of a logarithmic axis from `low` to `high`."""
    candidates: Sequence[float] = plt.LogLocator(subs=(1, 2, 5)).tick_values(low, high)
    ticks = [tick for tick in candidates if low <= tick <= high]
    if len(ticks) >= _MIN_TICKS:
        return ticks
    # Linear ticks may lie outside the limits, and 0 has no place on a logarithmic axis.
    linear_ticks: Sequence[float] = plt.MaxNLocator(4).tick_values(low, high)
    return [tick for tick in linear_ticks if max(low, 0.0) < tick <= high]


def _curves(
    axis: Any, x: Sequence[float], steps: Sequence[StepTimes], names: tuple[str, str]
) -> None:
    """Draw the step times of the plan, and of the job without holmes, as two curves.

    Args:
        axis: Axes to draw on.
        x: Factors of the rate, or latencies.
        steps: Step times with and without holmes, for each x.
        names: Names of the plan and of the job without holmes.
    """
    plan, stock = names
    axis.plot(x, [times.stock_s for times in steps], "s--", color=INK, mfc=PAPER, label=stock)
    axis.plot(x, [times.step_s for times in steps], "o-", color=INK, label=plan)
