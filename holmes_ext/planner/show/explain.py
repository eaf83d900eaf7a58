"""Command `holmes plan --explain`: layers, times and memory of each stage, for every partition method.

A partition method (plan/partition.py) splits the layers into pipeline stages. All partitions use
the same order of nodes. Times are predictions (plan/cost/stages.py), in seconds of a step.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from math import inf
from typing import Any

from holmes_ext.cli.show.table import Column, Screen
from holmes_ext.plan.cost.pipeline import Estimate
from holmes_ext.plan.cost.stages import StageCosts, predict
from holmes_ext.plan.partition import METHODS, partition
from holmes_ext.planner.html.plan_pictures import memory_text

COLUMNS = (
    Column("stage"),
    Column("layers", right=True),
    Column("compute", right=True),
    Column("send", right=True, drop=2),
    Column("reduce", right=True, drop=1),
    Column("exposed", right=True),
    Column("idle", right=True),
    Column("memory", right=True),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --explain and --picture."""
    add = parser.add_argument_group("times and memory of each stage").add_argument
    add(
        "--explain",
        action="store_true",
        help="every stage's times and memory, for each --partition",
    )
    add(
        "--picture",
        metavar="FILE",
        help="the same as a picture (.png, .svg, .pdf; needs matplotlib)",
    )


def outcomes(costs: StageCosts, alpha: float) -> dict[str, Estimate]:
    """Return the predicted step of every partition method: name of the method -> Estimate.

    A method divides the layers among the pipeline stages (plan/partition.py). An Estimate has the times
    and memory of each stage, and the time of the step.

    Args:
        costs: Times and memory of the layers on each stage.
        alpha: Factor of the method "speed" (--alpha). It multiplies each stage's share of the layers
            before the share is rounded down to whole layers.
    """
    return {method: predict(costs, partition(method, costs, alpha)) for method in METHODS}


def document(costs: StageCosts, estimates: Mapping[str, Estimate]) -> dict[str, Any]:
    """Return the estimates for --json: seconds and bytes, lists by stage; a limit of null means no limit."""
    return {
        "stages": list(costs.names),
        "micro_batches": costs.micro_batches,
        "overlap": costs.overlap,
        "memory_limit_bytes": [None if limit == inf else limit for limit in costs.limit_bytes],
        "partitions": {
            name: {
                "step_seconds": estimate.step_s,
                "layers": list(estimate.stage_layers),
                "compute_seconds": list(estimate.compute_s),
                "reduction_seconds": list(estimate.reduction_s),
                "exposed_reduction_seconds": list(estimate.exposed_s),
                "transfer_seconds": list(estimate.transfer_s),
                "idle_seconds": list(estimate.idle_s),
                "memory_bytes": list(estimate.memory_bytes),
                "fits": list(estimate.fits),
            }
            for name, estimate in estimates.items()
        },
    }


def show(costs: StageCosts, estimates: Mapping[str, Estimate]) -> None:
    """Print a table of the stages for each partition method, then the steps of all methods.

    Args:
        costs: Times and memory of the stages.
        estimates: Partition method -> predicted step.
    """
    screen = Screen()
    for name, estimate in estimates.items():
        styles = ["" if fits else "red" for fits in estimate.fits]
        title = f"{name}: predicted step {estimate.step_s:.4g} s"
        screen.table(COLUMNS, _rows(costs, estimate), title, styles)
    for name, estimate in estimates.items():
        ratio = estimates["uniform"].step_s / estimate.step_s
        misfit = "" if all(estimate.fits) else " - does not fit the memory"
        screen.line(f"{name:>8}: {estimate.step_s:.4g} s, {ratio:.3f} x uniform{misfit}")
    screen.line(
        "seconds; compute: all micro-batches, send: one activation to the next stage, exposed: of "
        "the reduction, after the last backward; compute, exposed and idle add up to the step"
    )


def _rows(costs: StageCosts, estimate: Estimate) -> list[tuple[str, ...]]:
    """Return a row for each stage, in the order of COLUMNS."""
    rows = []
    transfers_s = (*estimate.transfer_s, 0.0)  # the last stage sends no activation
    for stage, place in enumerate(costs.places):  # place: names of the stage's clusters
        seconds = (
            estimate.compute_s[stage],
            transfers_s[stage],
            estimate.reduction_s[stage],
            estimate.exposed_s[stage],
            estimate.idle_s[stage],
        )
        rows.append(
            (
                f"{stage} {place}",
                str(estimate.stage_layers[stage]),
                *(f"{value:.3g}" for value in seconds),
                memory_text(estimate, costs, stage),
            )
        )
    return rows
