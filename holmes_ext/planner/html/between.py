"""Pictures of the network between clusters: its links, and a plan's step at other rates and latencies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import cos, inf, pi, sin
from typing import Any

from holmes_ext.cluster.fabric import ETHERNET
from holmes_ext.cluster.site import Site
from holmes_ext.planner.html.pictures import CLUSTER_COLORS, PAPER, pyplot
from holmes_ext.planner.search.changed import StepTimes, with_ethernet, with_latency, with_site
from holmes_ext.planner.search.result import SearchResult
from holmes_ext.units import format_rate, format_seconds
from holmes_ext.words import counted

#: Factors on the rates of cluster.toml in the what-if picture.
FACTORS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8, 16)
#: Latencies in the what-if picture: one way, of all links between clusters, in seconds.
LATENCIES = (30e-6, 1e-3, 5e-3, 20e-3, 80e-3, 200e-3)
_PLANNED, _STOCK = "#4c78a8", "#d62728"
#: Fewest ticks of a logarithmic axis; with fewer, linear ticks are used.
_MIN_TICKS = 3
#: Most clusters on a flat figure: two are side by side, more are all around the circle.
_MOST_FLAT = 2
#: Most clusters with large texts.
_MOST_LARGE = 4
#: Half of the drawing's width. The circle has radius 1; the rest is space for the clusters' boxes.
_HALF_WIDTH = 1.4


def draw_clusters(result: SearchResult) -> Any:
    """Return a figure with the clusters on a circle, and a line with rate and latency for each pair.

    Faster links have wider lines.
    """
    plt = pyplot()
    site = result.network.measured
    names = site.clusters
    half_height = 0.6 if len(names) <= _MOST_FLAT else 1.25  # in the units of _HALF_WIDTH
    width = min(7.0, 4 + 0.5 * len(names))  # of the figure, in inches
    height = width * half_height / _HALF_WIDTH
    figure, axis = plt.subplots(figsize=(width, height), layout="constrained")
    position = {}  # cluster -> (x, y)
    for index, name in enumerate(names):
        angle = 2 * pi * index / len(names)
        position[name] = (-cos(angle), sin(angle))
    _draw_links(axis, site, position)
    for index, name in enumerate(names):
        count = sum(node.cluster == name for node in site.nodes)
        uplink = site.wan.uplink_of.get(name)
        text = f"{name}\n{counted(count, 'node')}" + (
            f"\nuplink {format_rate(uplink)}" if uplink else ""
        )
        x, y = position[name]
        axis.scatter(x, y, s=2600, color=CLUSTER_COLORS[index % len(CLUSTER_COLORS)], zorder=2)
        axis.text(x, y, text, ha="center", va="center", fontsize=8, color="#111111", zorder=3)
    nic_rate = format_rate(site.fabric_by_name[ETHERNET].rate_bps)
    counts = sorted({node.processes for node in site.nodes})  # GPUs of a node
    plural = "s" * (counts[-1] > 1)
    title = f"{' or '.join(map(str, counts))} GPU{plural} a node, {nic_rate} a NIC"
    if not site.wan:
        title += ": flat, only NICs limit it"
    axis.set_title(title, loc="left", fontsize=10)
    axis.set(xlim=(-_HALF_WIDTH, _HALF_WIDTH), ylim=(-half_height, half_height), aspect="equal")
    axis.axis("off")
    return figure


def _draw_links(axis: Any, site: Site, position: Mapping[str, tuple[float, float]]) -> None:
    """Draw a line for each pair of clusters, with the rate and the latency of its path.

    Args:
        axis: Axes to draw on.
        site: Clusters and the links between them.
        position: Cluster -> (x, y).
    """
    font_size = 8 if len(position) <= _MOST_LARGE else 6
    # Links and uplinks on the path between two clusters; the slowest one sets the rate.
    paths = {pair: site.wan.hops(*pair) for pair in combinations(position, 2)}
    rates_bps = {pair: min([hop.rate_bps for hop in hops] or [inf]) for pair, hops in paths.items()}
    fastest_bps = max((rate for rate in rates_bps.values() if rate < inf), default=1.0)
    for number, (pair, hops) in enumerate(paths.items()):
        (x1, y1), (x2, y2) = (position[name] for name in pair)
        width = 5 * min(1.0, rates_bps[pair] / fastest_bps) + 0.3
        axis.plot((x1, x2), (y1, y2), color="#999999", lw=width, zorder=1, solid_capstyle="round")
        if not hops:
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
            fontsize=font_size,
            bbox={"boxstyle": "round", "fc": PAPER, "ec": "none", "pad": 0.1, "alpha": 0.8},
        )


def draw_what_if(result: SearchResult) -> Any:
    """Return a figure with the step time by the rate (left) and by the latency (right) between clusters.

    It shows the best plan and the job without holmes ("stock") at equal sizes, simulated if the
    plan is. If the site does not describe links between clusters (a WAN), the rate of a node's
    Ethernet changes.
    """
    plt = pyplot()
    site = result.network.measured
    best = result.best
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained", sharey=True)
    # Step times of the plan and of stock, for each factor on the rates and for each latency.
    by_rate = [with_ethernet(result, best, factor) for factor in FACTORS]
    by_latency = [with_site(result, best, with_latency(site, seconds)) for seconds in LATENCIES]

    nic_rate = format_rate(result.network.site.fabric_by_name[ETHERNET].rate_bps)
    rates = "the rates of cluster.toml" if site.wan else f"the Ethernet of a node, {nic_rate}"
    _curves(left, FACTORS, by_rate, f"times {rates}")
    left.axvline(1, color="#999999", linestyle=":")
    left.text(
        1, 0.98, " now", va="top", fontsize=8, color="#808080", transform=left.get_xaxis_transform()
    )
    left.set_xscale("log", base=2)
    left.set_xticks(
        FACTORS, [f"{factor:g}" if factor >= 1 else f"1/{1 / factor:g}" for factor in FACTORS]
    )
    _curves(right, LATENCIES, by_latency, "one way between clusters, all links")
    right.set_xscale("log")
    right.set_xticks(LATENCIES, [format_seconds(seconds) for seconds in LATENCIES], fontsize=8)
    all_seconds = [seconds for times in (*by_rate, *by_latency) for seconds in times]
    ticks = _ticks(plt, min(all_seconds), max(all_seconds))
    left.set_yscale("log")
    left.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    for axis in (left, right):
        axis.minorticks_off()
    origin = "simulated" if best.simulated_s else "closed form"
    left.set_ylabel(f"predicted seconds of one step ({origin})")
    left.set_title("What if the network between clusters were another?", loc="left", fontsize=10)
    left.legend(frameon=False)
    return figure


def _ticks(plt: Any, low: float, high: float) -> Sequence[float]:
    """Return ticks of a logarithmic axis from `low` to `high`."""
    candidates: Sequence[float] = plt.LogLocator(subs=(1, 2, 5)).tick_values(low, high)
    ticks = [tick for tick in candidates if low <= tick <= high]
    if len(ticks) >= _MIN_TICKS:
        return ticks
    linear_ticks: Sequence[float] = plt.MaxNLocator(4).tick_values(low, high)
    return linear_ticks


def _curves(axis: Any, x: Sequence[float], steps: Sequence[StepTimes], label: str) -> None:
    """Draw the step times of the plan and of the job without holmes over `x`."""
    planned = [times.step_s for times in steps]
    stock = [times.stock_s for times in steps]
    axis.plot(x, stock, marker="o", color=_STOCK, label="stock, same sizes")
    axis.plot(x, planned, marker="o", color=_PLANNED, label="this plan")
    axis.set_xlabel(label)
