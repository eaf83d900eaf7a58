"""Pictures of the clusters with their links, and of a plan's step by the rate and latency between them."""

from __future__ import annotations

from itertools import combinations
from math import cos, inf, pi, sin
from typing import Any

from holmes_ext.cluster.fabric import ETHERNET
from holmes_ext.planner.html.pictures import CLUSTERS, PAPER, pyplot
from holmes_ext.planner.search.changed import with_ethernet, with_latency, with_site
from holmes_ext.planner.search.result import SearchResult
from holmes_ext.units import format_rate, format_seconds

#: The rates of the what-if picture: these times those of cluster.toml.
FACTORS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8, 16)
#: Its latencies one way, of all links between clusters; seconds.
LATENCIES = (30e-6, 1e-3, 5e-3, 20e-3, 80e-3, 200e-3)
_PLANNED, _STOCK = "#4c78a8", "#d62728"


def draw_clusters(result: SearchResult) -> Any:
    """The clusters on a circle; a line for each pair, the wider the faster, with its rate and latency."""
    plt, site = pyplot(), result.network.measured
    names, ethernet = site.clusters, site.fabric_by_name[ETHERNET]
    side = min(7.0, 4 + 0.5 * len(names))
    half, size = (0.6, 8) if len(names) <= 2 else (1.25, 8 if len(names) <= 4 else 6)
    figure, axis = plt.subplots(figsize=(side, side * half / 1.4), layout="constrained")
    place = {
        name: (-cos(2 * pi * i / len(names)), sin(2 * pi * i / len(names)))
        for i, name in enumerate(names)
    }
    paths = {pair: site.wan.hops(*pair) for pair in combinations(names, 2)}
    rates = {pair: min([hop.rate_bps for hop in hops] or [inf]) for pair, hops in paths.items()}
    fastest = max((rate for rate in rates.values() if rate < inf), default=1.0)
    for number, (pair, hops) in enumerate(paths.items()):
        ends = [place[name] for name in pair]
        width = 5 * min(1.0, rates[pair] / fastest) + 0.3
        axis.plot(*zip(*ends), color="#999999", lw=width, zorder=1, solid_capstyle="round")
        if hops:
            at = 0.38 + 0.24 * (number % 2)  # those that cross in the middle do not hide each other
            spot = [a + at * (b - a) for a, b in zip(*ends)]
            rate = format_rate(rates[pair], 3) if rates[pair] < inf else "no limit"
            text = f"{rate}\n{format_seconds(sum(hop.latency_s for hop in hops))}"
            axis.text(
                *spot,
                text,
                ha="center",
                va="center",
                fontsize=size,
                bbox={"boxstyle": "round", "fc": PAPER, "ec": "none", "pad": 0.1, "alpha": 0.8},
            )
    for index, name in enumerate(names):
        count = sum(node.cluster == name for node in site.nodes)
        uplink = site.wan.uplink_of.get(name)
        text = f"{name}\n{count} nodes" + (f"\nuplink {format_rate(uplink)}" if uplink else "")
        axis.scatter(*place[name], s=2600, color=CLUSTERS[index % len(CLUSTERS)], zorder=2)
        axis.text(
            *place[name], text, ha="center", va="center", fontsize=8, color="#111111", zorder=3
        )
    title = f"{site.processes} GPU{'s' * (site.processes > 1)} a node, {format_rate(ethernet.rate_bps)} a NIC"
    axis.set_title(
        title + ("" if site.wan else ": flat, only NICs limit it"), loc="left", fontsize=10
    )
    axis.set(xlim=(-1.4, 1.4), ylim=(-half, half), aspect="equal")
    axis.axis("off")
    return figure


def draw_what_if(result: SearchResult) -> Any:
    """Seconds of the best plan and of stock with its sizes, by rate and by latency between clusters (flat: of
    a node's Ethernet); simulated if the plan is."""
    plt, site, best = pyplot(), result.network.measured, result.best
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained", sharey=True)
    by_rate = [with_ethernet(result, best, factor) for factor in FACTORS]
    names = [f"{factor:g}" if factor >= 1 else f"1/{1 / factor:g}" for factor in FACTORS]
    now = format_rate(result.network.site.fabric_by_name[ETHERNET].rate_bps)
    rates = "the rates of cluster.toml" if site.wan else f"the Ethernet of a node, {now}"
    _curves(left, FACTORS, by_rate, f"times {rates}")
    left.axvline(1, color="#999999", linestyle=":")
    left.text(
        1, 0.98, " now", va="top", fontsize=8, color="#808080", transform=left.get_xaxis_transform()
    )
    left.set_xscale("log", base=2)
    left.set_xticks(FACTORS, names)
    by_latency = [with_site(result, best, with_latency(site, seconds)) for seconds in LATENCIES]
    _curves(right, LATENCIES, by_latency, "one way between clusters, all links")
    right.set_xscale("log")
    right.set_xticks(LATENCIES, [format_seconds(seconds) for seconds in LATENCIES], fontsize=8)
    every = [seconds for pair in (*by_rate, *by_latency) for seconds in pair]
    low, high = min(every), max(every)
    ticks = [
        tick
        for tick in plt.LogLocator(subs=(1, 2, 5)).tick_values(low, high)
        if low <= tick <= high
    ]
    if len(ticks) < 3:
        ticks = plt.MaxNLocator(4).tick_values(low, high)
    left.set_yscale("log")
    left.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    for axis in (left, right):
        axis.minorticks_off()
    how = "simulated" if best.simulated_s else "closed form"
    left.set_ylabel(f"predicted seconds of one step ({how})")
    left.set_title("What if the network between clusters were another?", loc="left", fontsize=10)
    left.legend(frameon=False)
    return figure


def _curves(axis: Any, x: tuple[float, ...], pairs: list[tuple[float, float]], label: str) -> None:
    planned, stock = zip(*pairs)
    axis.plot(x, stock, marker="o", color=_STOCK, label="stock, same sizes")
    axis.plot(x, planned, marker="o", color=_PLANNED, label="this plan")
    axis.set_xlabel(label)
