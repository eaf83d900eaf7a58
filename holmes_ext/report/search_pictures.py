"""Pictures of a search's winner: who computes what, one step of every stage, and the step against Ethernet's bandwidth."""

from __future__ import annotations

from pathlib import Path

from holmes_ext.cluster.site import ETHERNET
from holmes_ext.errors import HolmesError
from holmes_ext.plan.search.breakdown import on_ethernet
from holmes_ext.plan.search.ranking import simulated
from holmes_ext.plan.search.result import Outcome
from holmes_ext.units import format_bytes, format_rate

COLORS = {
    "forward": ("#4c78a8", "forward"),
    "backward": ("#72b7b2", "backward"),
    "inside": ("#e8a33d", "network inside a cluster"),
    "across": ("#d62728", "network between clusters"),
    "optimizer": ("#9c755f", "optimizer"),
}
#: Of the clusters, in the launcher's order; again from the start beyond.
CLUSTERS = ("#4c78a8", "#e8a33d", "#72b7b2", "#b07aa1", "#9c755f", "#54a24b", "#bab0ac", "#d37295")
#: Ethernet of the what-if curve: these times the rate of cluster.toml.
FACTORS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8, 16)


def draw(outcome: Outcome, folder: Path) -> list[Path]:
    """Write the pictures into `folder`; their paths. HolmesError when that cannot be done."""
    from matplotlib import pyplot as plt

    made = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, paint in (("placement", _placement), ("timeline", _timeline), ("ethernet", _ethernet)):
            figure = paint(plt, outcome)
            figure.savefig(folder / f"{name}.png", dpi=130)
            plt.close(figure)
            made.append(folder / f"{name}.png")
    except OSError as error:
        raise HolmesError(f"{folder}: the pictures cannot be written: {error.strerror}; name another directory") from None
    finally:
        plt.close("all")
    return made


def _placement(plt, outcome: Outcome):
    """A bar for each stage, as long as its ranks, in the colours of the clusters that hold them."""
    best, ground = outcome.best, outcome.ground
    names = ground.site.clusters
    stages = len(best.split)
    figure, axis = plt.subplots(figsize=(9, max(2.2, 0.28 * stages + 1.4)), layout="constrained")
    shown: set[int] = set()
    for stage, content in enumerate(best.arrangement.contents):
        left = 0
        for index, ranks in content:
            color = CLUSTERS[index % len(CLUSTERS)]
            axis.barh(stage, ranks, left=left, color=color, edgecolor="white", label=None if index in shown else names[index])
            shown.add(index)
            left += ranks
        memory = f"{format_bytes(best.memory_bytes[stage])}"
        axis.text(left * 1.01, stage, f"{best.split[stage]} layers, {memory}, gradients: {best.reductions[stage]}", va="center", fontsize=7)
    axis.set_xlim(0, max(sum(ranks for _, ranks in content) for content in best.arrangement.contents) * 1.5)
    axis.set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)], fontsize=7)
    axis.invert_yaxis()
    axis.xaxis.set_major_locator(plt.MaxNLocator(integer=True))
    axis.set_xlabel("GPUs of the stage")
    axis.set_title(f"{best.arrangement.describe(ground)}: predicted step {best.best_s:.4g} s", loc="left", fontsize=10)
    figure.legend(loc="outside lower center", ncols=8, frameon=False, fontsize=8)
    return figure


def rows(outcome: Outcome) -> list[list[tuple[str, float, float]]]:
    """For each stage (what, start, end) of the simulated step of its first ranks."""
    first: dict[int, list] = {}
    for line in simulated(outcome, outcome.best).ranks:
        first.setdefault(line.stage, [(_what(span), span.start, span.end) for span in line.spans if span.kind != "idle"])
    return [first[stage] for stage in sorted(first)]


def _what(span) -> str:
    return span.kind if span.kind in COLORS else "across" if span.across else "inside"


def _timeline(plt, outcome: Outcome):
    found = rows(outcome)
    best = outcome.best
    figure, axis = plt.subplots(figsize=(11, max(2.2, 0.3 * len(found) + 1.4)), layout="constrained")
    for kind, (color, text) in COLORS.items():
        bars = [[(start, end - start) for name, start, end in own if name == kind] for own in found]
        for stage, own in enumerate(bars):
            axis.broken_barh(own, (stage - 0.4, 0.8), facecolors=color, edgecolor="white", linewidth=0.2 if len(own) < 100 else 0)
        if any(bars):
            axis.barh(0, 0, color=color, label=text)
    axis.set_yticks(range(len(found)), [f"stage {stage}" for stage in range(len(found))], fontsize=7)
    axis.invert_yaxis()
    axis.set_xlim(left=0)
    axis.set_xlabel("seconds")
    chunks = f", {best.shape.virtual} chunks a stage" if best.shape.virtual > 1 else ""
    axis.set_title(f"one step, {best.shape.micro_batches} micro-batches{chunks}; white: waiting for others", loc="left", fontsize=10)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    return figure


def curve(outcome: Outcome) -> list[tuple[float, float, float]]:
    """(bits/s of Ethernet, seconds of the winner, seconds of stock with its sizes)."""
    rate = outcome.ground.site.fabric_by_name[ETHERNET].rate_bps
    return [(rate * factor, *on_ethernet(outcome, outcome.best, rate * factor)) for factor in FACTORS]


def _ethernet(plt, outcome: Outcome):
    points = curve(outcome)
    rates = [rate / 1e9 for rate, _, _ in points]
    now = outcome.ground.site.fabric_by_name[ETHERNET].rate_bps
    figure, axis = plt.subplots(figsize=(8, 4.2), layout="constrained")
    axis.plot(rates, [stock for _, _, stock in points], marker="o", color="#d62728", label="stock, same sizes")
    axis.plot(rates, [planned for _, planned, _ in points], marker="o", color="#4c78a8", label="this plan")
    axis.axvline(now / 1e9, color="#999999", linestyle=":")
    axis.text(now / 1e9, axis.get_ylim()[1], f" {format_rate(now)} now", va="top", fontsize=8, color="#666666")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(rates, [f"{rate:.3g}" for rate in rates])
    axis.minorticks_off()
    low, high = min(min(a, b) for _, a, b in points), max(max(a, b) for _, a, b in points)
    digits = 2 if high > 1.5 * low else 4
    ticks = [float(f"{low * (high / low) ** (index / 4):.{digits}g}") for index in range(5)]
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_xlabel("Ethernet of a node, Gb/s")
    axis.set_ylabel("predicted seconds of one step")
    axis.set_title("What if Ethernet were slower or faster?", loc="left", fontsize=10)
    axis.legend(frameon=False)
    return figure
