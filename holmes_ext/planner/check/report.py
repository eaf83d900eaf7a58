"""Prints the report of --holmes-check: as text, or as JSON on standard output or into a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from holmes_ext.cli.show.table import Column, Screen
from holmes_ext.cluster.site import REPORTS
from holmes_ext.files import save
from holmes_ext.planner.check.findings import Findings, NetworkRate
from holmes_ext.planner.check.prediction import Prediction
from holmes_ext.units import format_rate, format_seconds
from holmes_ext.words import counted

#: Value of --holmes-check for JSON on standard output.
JSON = "json"
#: End of a value that is the name of a file for JSON.
JSON_SUFFIX = ".json"

#: Step times that differ by less than this factor are shown as equal.
_EQUAL_STEPS = 1.01

_PLACE_COLUMNS = (
    Column("ranks"),
    Column("nodes", wrap=12),
    Column("cluster"),
    Column("stages"),
    Column("layers"),
)
_NETWORK_COLUMNS = (
    Column("groups"),
    Column("number", right=True),
    Column("with NCCL"),
    Column("with gloo"),
)
_RATE_COLUMNS = (
    Column("network"),
    Column("NICs"),
    Column("rate", right=True),
    Column("latency", right=True),
)


def show(value: str, findings: Findings, prediction: Prediction) -> None:
    """Print the report, or write it into a file.

    Args:
        value: Value of --holmes-check: "on", "json" or the name of a file that ends in ".json".
        findings: Facts about the job.
        prediction: Predicted steps of the job.

    Raises:
        HolmesError: the file cannot be written.
    """
    if value == JSON:
        print(json.dumps(document(findings, prediction)), flush=True)
    elif value.endswith(JSON_SUFFIX):
        save(value, json.dumps(document(findings, prediction)) + "\n", "the check")
    else:
        _print_text(Screen(), findings, prediction)


def document(findings: Findings, prediction: Prediction) -> dict[str, Any]:
    """Return the report of --holmes-check as a dictionary that can be written as JSON."""
    return {
        "status": findings.status,
        "problems": list(findings.problems),
        "sizes": None if findings.sizes is None else asdict(findings.sizes),
        "placement": [placed._asdict() for placed in findings.placed],
        "groups": [group._asdict() for group in findings.networks],
        "networks": [rate._asdict() for rate in findings.rates],
        "prediction": asdict(prediction),
    }


def _print_text(screen: Screen, findings: Findings, prediction: Prediction) -> None:
    """Print placement, networks, rates and prediction as tables, and the problems in red."""
    screen.table(_PLACE_COLUMNS, findings.placed, "who runs where")
    if findings.networks:
        screen.table(
            _NETWORK_COLUMNS,
            [
                (group.kind, str(group.groups), group.nccl, group.gloo)
                for group in findings.networks
            ],
            "network of the process groups",
        )
    else:
        screen.line("network of the process groups: none, because the job has one process")
    rates_title = f"rates, from {findings.site.source}"
    screen.table(_RATE_COLUMNS, [_rate_cells(rate) for rate in findings.rates], rates_title)
    clusters = findings.site.clusters
    if findings.site.source == REPORTS and len(clusters) > 1:
        screen.line(
            "no cluster.toml: the network between clusters counts as fast as the NICs; if it is slower, "
            "describe it in a cluster.toml and add --holmes-cluster FILE",
            "yellow",
        )
    _print_prediction(screen, prediction, clusters)
    for problem in findings.problems:
        screen.line(f"problem: {problem}", "red")
    found = counted(len(findings.problems), "problem")
    screen.line(f"check: {found}; the job ends before its first step", "bold")


def _rate_cells(rate: NetworkRate) -> tuple[str, str, str, str]:
    """Return the texts for the row of a network, or of a link between clusters, in the table of rates."""
    rate_text = format_rate(rate.rate_bps) if rate.rate_bps else "no limit"
    return rate.name, rate.kind, rate_text, format_seconds(rate.latency_s)


def _print_prediction(screen: Screen, prediction: Prediction, clusters: Sequence[str]) -> None:
    """Print the predicted step times and faster settings, or why there is no prediction."""
    for line in prediction.lines:
        screen.line(line, "dim")
    if prediction.missing:
        screen.line(f"no predicted step: {prediction.missing}", "yellow")
        return
    screen.line(_answer(prediction), "bold")
    if len(clusters) == 1:
        screen.line(
            f"all nodes are in one cluster ({clusters[0]}), so no group crosses a slower network"
        )
    better = prediction.better
    if better is None:
        screen.line("no faster layout was found (`holmes plan -- COMMAND` searches longer)")
        return
    screen.line(
        f"faster: {better.sizes}, layers {better.layers}: {better.step_s:.4g} s "
        f"(`holmes plan -- COMMAND` searches longer)"
    )
    for change in better.changes:
        screen.line(f"  {change}")


def _answer(prediction: Prediction) -> str:
    """Say how long a step is predicted to take with holmes and without it, and whether holmes helps."""
    step = f"{prediction.step_s:.4g} s"
    stock = f"{prediction.stock_s:.4g} s"
    ratio = prediction.stock_s / prediction.step_s
    error = f"worst measured error of the model: {prediction.worst_error:.1%}"
    if 1 / _EQUAL_STEPS < ratio < _EQUAL_STEPS:
        return (
            f"predicted step: {step} with and without holmes, which does not help this job; {error}"
        )
    text = (
        f"predicted step: {step} with holmes, {stock} without ({ratio:.2f} times as long); {error}"
    )
    if ratio < 1:
        text += "; holmes slows this job down: start it without holmes"
    elif ratio - 1 < prediction.worst_error:
        text += ", more than the gain"
    return text
