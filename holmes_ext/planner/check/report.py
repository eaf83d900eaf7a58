"""Prints the report of --holmes-check: as text, or as JSON on standard output or into a file."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from holmes_ext.cli.show.table import Column, Screen
from holmes_ext.files import save
from holmes_ext.planner.check.findings import Findings, NetworkRate
from holmes_ext.planner.check.prediction import Prediction
from holmes_ext.units import format_rate, format_seconds
from holmes_ext.words import counted

#: Value of --holmes-check for JSON on standard output.
JSON = "json"
#: End of a value that is the name of a file for JSON.
JSON_SUFFIX = ".json"

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
    """Return the report as values for JSON."""
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
    screen.table(
        _NETWORK_COLUMNS,
        [(group.kind, str(group.groups), group.nccl, group.gloo) for group in findings.networks],
        "network of the process groups",
    )
    rates_title = f"rates, from {findings.site.source}"
    screen.table(_RATE_COLUMNS, [_rate_cells(rate) for rate in findings.rates], rates_title)
    _print_prediction(screen, prediction)
    for problem in findings.problems:
        screen.line(f"problem: {problem}", "red")
    found = counted(len(findings.problems), "problem")
    screen.line(f"check: {found}; the job ends before its first step", "bold")


def _rate_cells(rate: NetworkRate) -> tuple[str, str, str, str]:
    """Return the row of a network in the table of rates."""
    rate_text = format_rate(rate.rate_bps) if rate.rate_bps else "no limit"
    return rate.name, rate.kind, rate_text, format_seconds(rate.latency_s)


def _print_prediction(screen: Screen, prediction: Prediction) -> None:
    """Print the predicted steps and a faster layout, or the reason why there is no prediction."""
    for line in prediction.lines:
        screen.line(line, "dim")
    if prediction.missing:
        screen.line(f"no predicted step: {prediction.missing}", "yellow")
        return
    ratio = prediction.stock_s / prediction.step_s
    screen.line(
        f"predicted step: {prediction.step_s:.4g} s with holmes, {prediction.stock_s:.4g} s without "
        f"({ratio:.2f} times as long); worst measured error of the model: "
        f"{prediction.worst_error:.1%}",
        "bold",
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
