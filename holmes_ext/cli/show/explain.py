"""`holmes plan --explain`: each stage's layers, computing, communication, memory and idle time, for every way to partition.

The three partitions stand on the same order of nodes. Times are predictions (plan/cost/stage_costs.py), in seconds of one step.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any

from holmes_ext.cluster.site import Site
from holmes_ext.errors import HolmesError
from holmes_ext.plan.build import costs_of
from holmes_ext.plan.cost.model import Model
from holmes_ext.plan.cost.stage_costs import Estimate, StageCosts, predict
from holmes_ext.plan.plan import Plan
from holmes_ext.plan.profile import Profile
from holmes_ext.plan.search import partition as stages

COLORS = {"compute": "#4c78a8", "communication": "#d62728", "idle": "#d9d9d9"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `holmes plan` about the partition."""
    group = parser.add_argument_group("layers of each stage")
    group.add_argument("--model", metavar="FILE", help="the model as TOML (examples/models); its times replace the nominal ones")
    group.add_argument("--profile", metavar="FILE", help="what a job measured with --holmes-profile N; its times replace the model's")
    group.add_argument("--partition", choices=stages.METHODS, default="uniform", help="how layers go to stages (default: uniform)")
    group.add_argument("--alpha", type=float, default=1.0, metavar="X", help="of the partition by speed (default 1; the paper: 1 to 1.05)")
    group.add_argument("--overlap", choices=("on", "off"), default="on", help="gradients are reduced under the last backward, as --holmes-overlap auto does (default on)")
    group.add_argument("--explain", action="store_true", help="every stage's times and memory, for uniform, speed and balanced")
    group.add_argument("--picture", metavar="FILE", help="the same as a picture (.png, .svg, .pdf; needs matplotlib)")


def outcomes(site: Site, plan: Plan, model: Model | None, alpha: float = 1.0, overlap: bool = False, profile: Profile | None = None) -> tuple[StageCosts, dict[str, Estimate]]:
    """The costs under `plan`'s order of nodes, and the prediction for every method of plan/search/partition.py."""
    if plan.sizes is None:
        raise HolmesError("--explain needs the parallel sizes: give --sizes pipeline=N")
    costs = costs_of(site, plan.nodes, plan.sizes, model, overlap, profile)
    return costs, {method: predict(costs, stages.partition(method, costs, alpha)) for method in stages.METHODS}


def document(costs: StageCosts, found: Mapping[str, Estimate]) -> dict[str, Any]:
    """What --json prints: seconds and bytes, lists by stage; a limit of null means none."""
    limits = [None if limit == inf else limit for limit in costs.limit_bytes]
    return {
        "stages": list(costs.names),
        "micro_batches": costs.micro_batches,
        "overlap": costs.overlap,
        "memory_limit_bytes": limits,
        "partitions": {
            name: {
                "step_seconds": one.step_s,
                "layers": list(one.stage_layers),
                "compute_seconds": list(one.compute_s),
                "reduction_seconds": list(one.reduction_s),
                "exposed_reduction_seconds": list(one.exposed_s),
                "transfer_seconds": list(one.transfer_s),
                "idle_seconds": list(one.idle_s),
                "memory_bytes": list(one.memory_bytes),
                "fits": list(one.fits),
            }
            for name, one in found.items()
        },
    }


def show(costs: StageCosts, found: Mapping[str, Estimate]) -> None:
    """One table for each partition, then the steps."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False, emoji=False)
    for name, one in found.items():
        table = Table(title=escape(f"{name}: predicted step {one.step_s:.4g} s"), box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        for column in ("stage", "layers", "compute", "send", "reduce", "exposed", "idle", "memory"):
            table.add_column(column, justify="left" if column == "stage" else "right", no_wrap=True)
        for stage in range(costs.stages):
            name = costs.names[stage].removeprefix("stage ").replace("(cluster ", "").rstrip(")")
            send = one.transfer_s[stage] if stage < costs.stages - 1 else 0.0
            times = (one.compute_s[stage], send, one.reduction_s[stage], one.exposed_s[stage], one.idle_s[stage])
            cells = (name, str(one.stage_layers[stage]), *(f"{value:.3g}" for value in times), _memory(one, costs, stage))
            table.add_row(*map(escape, cells), style="" if one.fits[stage] else "red")
        console.print(table)
    uniform = found["uniform"].step_s
    for name, one in found.items():
        fits = "" if all(one.fits) else " - does not fit the memory"
        console.print(escape(f"{name:>8}: {one.step_s:.4g} s, {uniform / one.step_s:.3f} x uniform{fits}"))
    console.print("seconds; compute: all micro-batches, send: one activation to the next stage, exposed: of the reduction, after the last backward")


def _memory(one: Estimate, costs: StageCosts, stage: int) -> str:
    """ "41.2 of 80 GB", with a "!" when it does not fit."""
    used, limit = one.memory_bytes[stage], costs.limit_bytes[stage]
    unit, scale = ("GB", 1e9) if used >= 1e9 else ("MB", 1e6)
    return f"{used / scale:.3g}" + ("" if limit == inf else f" of {limit / scale:.3g}") + f" {unit}" + ("" if one.fits[stage] else " !")


def picture(costs: StageCosts, found: Mapping[str, Estimate], path: str | Path) -> None:
    """A panel for each partition: a bar for each stage, its length the step, cut into computing, exposed communication and idle."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise HolmesError("--picture needs matplotlib, which is missing; pip install 'holmes_ext[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    height = max(1.6, 0.3 * costs.stages + 0.9)
    figure, axes = plt.subplots(len(found), 1, figsize=(9, height * len(found) + 0.5), sharex=True, squeeze=False)
    for axis, (name, one) in zip(axes[:, 0], found.items()):
        left = [0.0] * costs.stages
        for kind, values in (("compute", one.compute_s), ("communication", one.exposed_s), ("idle", one.idle_s)):
            axis.barh(range(costs.stages), values, left=left, color=COLORS[kind], label=kind)
            left = [a + b for a, b in zip(left, values)]
        for stage, count in enumerate(one.stage_layers):
            axis.text(0, stage, f" {count} layers, {_memory(one, costs, stage)}", va="center", fontsize=7, color="white")
        axis.set_yticks(range(costs.stages), costs.names, fontsize=7)
        axis.invert_yaxis()
        axis.set_title(f"{name}: {one.step_s:.4g} s", loc="left", fontsize=10)
    axes[-1, 0].set_xlabel("predicted seconds of one step (a stage's idle time is spread over it)")
    axes[0, 0].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False, fontsize=8)
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error).split("(")[0]
        raise HolmesError(f"{path}: the picture cannot be written: {reason}; name a .png, .svg or .pdf") from None
    finally:
        plt.close(figure)
