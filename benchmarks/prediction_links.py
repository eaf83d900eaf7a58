"""Compares predicted with measured steps on clusters with latencies, unequal links and shared uplinks.

    python benchmarks/prediction_links.py --json FILE [--cases NAME,...] [--store FILE] [--predict]
                                          [--within S] [--runs N]

Links between the clusters have 2 to 80 ms. Everything else is as in prediction.py, with the same
calibration runs: nothing is fitted to these cases. They have a store of their own, because CPU seconds
belong to a machine. Each cluster file is probed once in its lab, and the predictions use the measured
links.

TCP of the nodes is tuned for long links (lab/holmes_lab/network/inter_cluster.py). Otherwise a
connection that was idle begins with a small window again, and a message of 18 KiB takes 37 ms over
a link of 20 ms.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import replace
from math import inf
from pathlib import Path

import prediction
from harness import Row, finish, parser, tell
from prediction import CALIBRATION, Case, Measured

STORE = Path(__file__).parent / "results" / "prediction_links_measured.json"


def _cases() -> tuple[Case, ...]:
    """Return the training jobs to predict and measure, on clusters with slow or unequal links.

    On each of four networks, DeepSpeed and megatron-core run with holmes, and a plain data-parallel
    loop runs with a flat ring and with a hierarchical all-reduce.
    """
    off, on = ("--holmes-overlap", "off"), ("--holmes-overlap", "on")
    cases = []
    labels = {
        "links_uplinks_2ms": "uplinks 2 ms",
        "links_two_20ms": "20 ms",
        "links_two_80ms": "80 ms",
    }
    for file, label in labels.items():
        plain = Case("", "plain", file, "stock", stages=1, hidden=192, micro_batches=2, flops=8e8)
        whole = ("--no-overlap", "--bucket-mb", "100")
        cases += [
            Case(f"{label} deepspeed holmes", "deepspeed", file, "holmes", flags=off),
            Case(f"{label} megatron holmes", "megatron", file, "holmes", flags=off),
            replace(plain, name=f"{label} plain flat ring", flags=("--no-overlap",)),
            replace(
                plain,
                name=f"{label} plain hierarchical",
                way="holmes",
                hierarchical=True,
                flags=whole,
            ),
        ]
    file, label = "three_links_6", "4 : 4 : 1, 20 ms"
    cases += [
        Case(f"{label} deepspeed holmes", "deepspeed", file, "holmes", stages=3, flags=off),
        Case(
            f"{label} deepspeed holmes overlap",
            "deepspeed",
            file,
            "holmes",
            stages=3,
            overlap="on",
            flags=on,
        ),
        Case(f"{label} megatron holmes", "megatron", file, "holmes", stages=3, flags=off),
        replace(plain, file=file, name=f"{label} plain flat ring", flags=("--no-overlap",)),
        replace(
            plain,
            file=file,
            name=f"{label} plain hierarchical",
            way="holmes",
            hierarchical=True,
            flags=whole,
        ),
    ]
    return tuple(cases)


CASES = _cases()


def main() -> int:
    """Measure the chosen cases, print the table of results, and write the results file."""
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument(
        "--store", type=Path, default=STORE, metavar="FILE", help="what was measured"
    )
    arguments.add_argument(
        "--predict", action="store_true", help="measure nothing: cases that are in the store"
    )
    arguments.add_argument("--runs", type=int, default=1, metavar="N", help="of each case")
    arguments.add_argument(
        "--within", type=float, default=inf, metavar="S", help="begin nothing after S seconds"
    )
    args = arguments.parse_args()
    measured = Measured.load(args.store)
    wanted = [name for name in args.cases.split(",") if name]
    cases = [case for case in CASES if not wanted or any(name in case.name for name in wanted)]
    if not args.predict:
        until = time.monotonic() + args.within
        engines = {case.engine for case in cases}
        first = [case for case in CALIBRATION if case.engine in engines]
        prediction.measure_missing(first, measured, args.store, until)
        prediction.measure_missing(cases, measured, args.store, until, args.runs)
    missing = {case.engine for case in CALIBRATION if not measured.knows(case)}
    cases = [case for case in cases if measured.knows(case) and case.engine not in missing]
    if not cases:
        tell("prediction_links.py: none of these cases was measured yet")
        return 2
    rows = prediction.lab_rows(cases, measured)
    errors = [abs(row.value) for row in rows if row.metric == "error"]
    for metric, value, target in (
        ("median", statistics.median(errors), "<= 0.03"),
        ("worst", max(errors), "<= 0.1"),
    ):
        rows.append(
            Row.of(
                f"{len(errors)} cases with links",
                f"{metric} error",
                value,
                unit="of the measured",
                spread=(min(errors), max(errors)),
                emulated=True,
                target=target,
            )
        )
    return finish(rows, args.json, "Predicted against measured steps: links between clusters")


if __name__ == "__main__":
    sys.exit(main())
