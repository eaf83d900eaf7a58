"""Predicts steps that benchmarks/two_clusters.py and megatron_two_clusters.py have measured earlier.

Nothing is measured here. A simulated step contains the CPU time of DeepSpeed's or megatron-core's
own code. It is fitted to the runs on a single cluster ("all-RDMA") of those results. These runs are
not predicted. Network rates are those of the cluster files: `holmes probe` has not measured them.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import Row

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Recorded:
    """Measured step of an earlier results file, and the simulation that predicts it.

    The simulation is that of a case of prediction.py with another `way` and `overlap`.
    """

    case: str  # name of a Case of prediction.py; `way` and `overlap` replace its values
    way: str
    overlap: str
    file: str  # results file
    recorded_case: str  # name of the case in the file
    metric: str  # name of the metric in the file


def _recorded() -> tuple[Recorded, ...]:
    """Return the measured steps.

    A step is one case under one of these ways: "stock" (without holmes), "holmes" with or without
    overlap of the gradient reductions, or "rdma" (without holmes, all nodes in one fast cluster).

    With overlap, holmes overlaps only the reductions that a rank would wait for. The simulation
    overlaps all of them, and takes equally long.
    """
    results = []
    # Name in prediction.py -> name in the results of two_clusters.py.
    for case, recorded in (
        ("4+4", "4+4"),
        ("4+4 slow RoCE", "4+4 slow RoCE"),
        ("2+4", "2+4 pipeline 3"),
        ("three clusters", "three clusters"),
    ):
        for way, overlap, metric in (
            ("stock", "off", "stock"),
            ("holmes", "on", "holmes"),
            ("holmes", "off", "holmes, overlap off"),
            ("rdma", "off", "all-RDMA"),
        ):
            results.append(
                Recorded(
                    case=f"deepspeed {case} holmes",
                    way=way,
                    overlap=overlap,
                    file="two_clusters.json",
                    recorded_case=recorded,
                    metric=f"step {metric}",
                )
            )
    for way, overlap, metric in (
        ("stock", "off", "stock"),
        ("holmes", "on", "holmes"),
        ("rdma", "off", "all-RDMA"),
    ):
        results.append(
            Recorded(
                case="megatron 4+4 holmes",
                way=way,
                overlap=overlap,
                file="megatron_two_clusters.json",
                recorded_case="4+4",
                metric=f"step {metric}",
            )
        )
    return tuple(results)


RECORDED = _recorded()


def step_rows(
    case: str, measured_s: float, spread: tuple[float, float], predicted_s: float
) -> list[Row]:
    """Return the rows of a measured and a predicted step.

    Args:
        case: Name of the case in the results.
        measured_s: Median of the measured steps, in seconds.
        spread: Shortest and longest measured step, in seconds.
        predicted_s: Predicted step, in seconds.
    """
    return [
        Row.of(case, "measured step", measured_s, unit="s", spread=spread, emulated=True),
        Row.median(case, "predicted step", [predicted_s], unit="s", emulated=True),
    ]


def recorded_rows(prediction: Any) -> list[Row]:
    """Predict steps that earlier benchmarks have measured, and return rows with the errors.

    The measured steps (RECORDED) are in the results files of two_clusters.py and
    megatron_two_clusters.py.

    Args:
        prediction: The module prediction.py, with the cases and the simulation. It is an argument
            because it imports this module.
    """
    from dataclasses import replace

    from holmes_ext.plan.cost.links import Links

    cases = {case.name: case for case in prediction.CASES}
    cases_of_engine: dict[str, list[tuple]] = {}
    for recorded in RECORDED:
        values = {
            (row["scene"], row["metric"]): row
            for row in json.loads((RESULTS / recorded.file).read_text())["rows"]
        }
        if row := values.get((recorded.recorded_case, recorded.metric)):  # was measured
            name = (
                f"recorded: {cases[recorded.case].engine} {recorded.recorded_case} "
                f"{recorded.metric.removeprefix('step ')}"
            )
            case = replace(
                cases[recorded.case], way=recorded.way, overlap=recorded.overlap, name=name
            )
            cases_of_engine.setdefault(case.engine, []).append((case, row))
    rows, errors = [], []
    for engine_cases in cases_of_engine.values():
        # The calibration: pairs (case on a single fast cluster, seconds of its measured step).
        fast = [(case, row["value"]) for case, row in engine_cases if case.way == "rdma"]
        if not fast:
            continue
        fast_cases, fast_seconds = zip(*fast)
        overhead = prediction.overheads(fast_cases, fast_seconds)
        for case, row in engine_cases:
            if case.way == "rdma":
                continue
            predicted = prediction.predict(case, Links(), overhead)
            errors.append(abs(predicted / row["value"] - 1))
            rows += step_rows(case.name, row["value"], tuple(row["spread"]), predicted)
            rows.append(
                Row.of(
                    case.name,
                    "error",
                    predicted / row["value"] - 1,
                    unit="of the measured",
                    spread=(errors[-1], errors[-1]),
                    emulated=True,
                )
            )
    if not errors:
        return []
    spread = (min(errors), max(errors))
    name = f"{len(errors)} recorded cases"
    return [
        *rows,
        Row.of(
            name,
            "median error",
            statistics.median(errors),
            unit="of the measured",
            spread=spread,
            emulated=True,
            target="<= 0.03",
        ),
        Row.of(
            name,
            "worst error",
            max(errors),
            unit="of the measured",
            spread=spread,
            emulated=True,
            target="<= 0.1",
        ),
    ]
