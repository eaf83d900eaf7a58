"""Tables of the pages made from benchmarks/results/*.json: README's, those of docs/benchmarks/, all rows of
all files.

    <!-- generated: rows two_clusters.json; case=4.4; metric=step .* -->      a row of the table for each row
    <!-- generated: cells prediction.json; measured=measured step; ... -->     a row for each case

case and metric are regular expressions that match from the beginning to the end; what a metric's group
matches is shown behind the value. Without case and metric: what has a target or is a ratio. Of a file that
is not there yet `about` says so, and `rows` has none.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
Row = dict[str, Any]


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """In Markdown; bars in cells are escaped."""
    titles = list(head)
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |\n" for line in lines
    )


def load(file: str) -> list[Row]:
    return json.loads((RESULTS / file).read_text()).get("rows", [])


def spread(row: Row, digits: int, factor: float = 1) -> str:
    """ "1.68 (1.67-1.69)": with the least and the greatest."""
    value, low, high = (
        f"{factor * number:.{digits}f}" for number in (row["value"], *row["spread"])
    )
    between = " to " if "-" in low + high else "-"
    return low if low == high else f"{value} ({low}{between}{high})"


def shown(row: Row) -> str:
    """The value as its unit wants it: seconds to the millisecond (short ones in ms, us or ns), ratios to
    1/100, parts in percent."""
    unit, value = row["unit"], row["value"]
    if unit in ("s", "CPU s"):
        most = max(map(abs, (value, *row["spread"])))
        if 0 < most < 0.01:
            factor, short = (
                (1e3, "ms") if most >= 1e-3 else (1e6, "us") if most >= 1e-6 else (1e9, "ns")
            )
            return (
                f"{spread(row, 1 if most * factor >= 10 else 2, factor)} {unit.replace('s', short)}"
            )
        return f"{spread(row, 3 if abs(value) < 100 else 0)} {unit}"
    if unit == "x":
        return f"{spread(row, 2)} x"
    if unit == "%" or _part(unit):
        factor = 100 if _part(unit) else 1
        percent = factor * abs(value)
        return (
            f"{spread(row, 1 if percent > 1 or not value else 2 if percent > 0.1 else 3, factor)} %"
        )
    if unit == "nats" and abs(value) < 1e-3:
        return f"{value:.2g}"
    digits = 3 if unit == "nats" else 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{spread(row, 0 if float(value).is_integer() else digits)} {unit}".rstrip()


def _part(unit: str) -> bool:
    """Whether a value is a part of something, which is shown in percent."""
    return unit.startswith("of ") or unit == "fraction"


def target(row: Row) -> str:
    """ "at most 1 %: met"; empty where none is stated."""
    if "target" not in row:
        return ""
    sign, number = row["target"].split()
    limit = f"{number} %" if row["unit"] == "%" else number
    if _part(row["unit"]):
        limit = f"{100 * float(number):g} %"
    word = {"<=": "at most ", ">=": "at least ", "==": ""}[sign]
    if "note" in row:
        return f"{word}{limit}: {row['note']}, not counted"
    return f"{word}{limit}: {'met' if row.get('met') else '**not met**'}"


def _words(said: str) -> tuple[str, dict[str, str]]:
    """ "FILE; title=regex; ..." """
    file, *rest = (part.strip() for part in said.split(";"))
    return file, dict(part.split("=", 1) for part in rest)


def rows(said: str) -> str:
    """See the module."""
    file, given = _words(said)
    if not (RESULTS / file).exists():
        return ""
    case, metric = given.get("case", ".*"), given.get("metric")
    chosen = [
        row
        for row in load(file)
        if re.fullmatch(case, row["scene"])
        and (
            re.fullmatch(metric, row["metric"]) if metric else "target" in row or row["unit"] == "x"
        )
    ]
    assert chosen, f"no row: {said}"
    return table(
        ("case", "what", "value", "target"),
        ((row["scene"], row["metric"], shown(row), target(row)) for row in chosen),
    )


def cells(said: str) -> str:
    """See the module."""
    file, columns = _words(said)
    case = columns.pop("case", ".*")
    cases: dict[str, list[Row]] = {}
    for row in load(file):
        if re.fullmatch(case, row["scene"]):
            cases.setdefault(row["scene"], []).append(row)
    lines = [
        [name, *(_cell(found, metric) for metric in columns.values())]
        for name, found in cases.items()
    ]
    kept = [line for line in lines if any(line[1:])]
    assert kept, f"no row: {said}"
    return table(("case", *columns), kept)


def _cell(found: list[Row], metric: str) -> str:
    for row in found:
        if match := re.fullmatch(metric, row["metric"]):
            more = f" ({match[1]})" if match.groups() else ""
            return shown(row) + more + (f", {target(row)}" if "target" in row else "")
    return ""


def about(file: str) -> str:
    """Where a file's rows were measured."""
    if not (RESULTS / file).exists():
        return f"Not measured yet: benchmarks/results has no {file}.\n"
    document = json.loads((RESULTS / file).read_text())
    machine, versions = document["machine"], document["versions"]
    made = ", ".join(f"{name} {version}" for name, version in versions.items())
    load = " ".join(f"{value:.0f}" for value in machine["load_average"])
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']:.0f} GiB"
    return (
        f"`benchmarks/results/{file}`: {where}, load averages {load} when the last part was written; "
        f"{made}.\n"
    )


#: README's table: what a row is called, its file and case.
_STOCK, _BOUND = "holmes : stock", "holmes : all-RDMA"
MEASURED = (
    ("DeepSpeed, 4+4 nodes, pipeline 2", "two_clusters.json", "4+4"),
    (
        "DeepSpeed, 4+4, RoCE much slower (where the paper has 1.38)",
        "two_clusters.json",
        "4+4 slow RoCE",
    ),
    ("DeepSpeed, 2+4 nodes, pipeline 3", "two_clusters.json", "2+4 pipeline 3"),
    (
        "DeepSpeed, three clusters of 2, 2 and 4 nodes, pipeline 4",
        "two_clusters.json",
        "three clusters",
    ),
    ("megatron-core, 4+4 nodes, pipeline 2", "megatron_two_clusters.json", "4+4"),
    (
        "Megatron-DeepSpeed's pretrain_gpt.py, 4+4 nodes, three times slower",
        "megatron_deepspeed.json",
        "4+4 three times slower",
    ),
    ("Hugging Face's Trainer (DistributedDataParallel), 4+4 nodes", "stacks.json", "trainer"),
    ("FSDP2, 4+4 nodes, `--holmes-fsdp hybrid`", "stacks.json", "fsdp2"),
)


def _ratio(found: list[Row], case: str, metric: str) -> str:
    metrics = metric, metric.replace("holmes", "hybrid")
    chosen = [row for row in found if row["scene"] == case and row["metric"] in metrics]
    return spread(chosen[0], 2) if chosen else ""


def _loss(found: list[Row], case: str) -> str:
    """The largest difference of any step's loss to stock's."""
    names = re.compile(r"((holmes|hybrid): )?largest loss difference")
    values = [
        row["value"] for row in found if row["scene"] == case and names.fullmatch(row["metric"])
    ]
    return f"{max(values):.2g}" if values else ""


def measured() -> str:
    """README's table."""

    def value(file: str, case: str, metric: str) -> float:
        return next(
            row["value"] for row in load(file) if row["scene"] == case and row["metric"] == metric
        )

    lines = [
        (
            what,
            _ratio(load(file), case, _STOCK),
            _ratio(load(file), case, _BOUND),
            _loss(load(file), case),
        )
        for what, file, case in MEASURED
    ]
    control = value("two_clusters.json", "control: one cluster", "what holmes adds to a step")
    error, worst = (
        value("prediction.json", "31 lab cases", what) for what in ("median error", "worst error")
    )
    lines.append(
        ("one cluster, where nothing can be gained", f"step {100 * control:+.1f} %", "", "")
    )
    lines.append(
        (
            "`holmes plan` against measured steps, 31 cases",
            f"median error {100 * error:.1f} %",
            f"worst {100 * worst:.1f} %",
            "",
        )
    )
    return table(
        ("2 cores, torch 2.13.0, gloo, compute emulated", _STOCK, _BOUND, "loss differs by"), lines
    )


def placed() -> str:
    """README's sentences on stages placed over link matrices: the step of what `holmes plan` finds beside
    that of the best placement by DT-FM's objective, which is not the step; and that objective, beside DT-FM's
    own search."""

    def steps(metric: str) -> dict[str, float]:
        return {
            row["scene"]: row["value"] for row in load("placement.json") if row["metric"] == metric
        }

    def values(metric: str) -> list[float]:
        return [row["value"] for row in load("placement.json") if row["metric"].startswith(metric)]

    ours, theirs = values("DT-FM's objective: ours"), values("DT-FM's objective: DT-FM")
    parts = [one / other for one, other in zip(ours, theirs)]
    gaps = values("holmes plan: optimality gap")
    plan, by_objective = (
        steps("holmes plan: simulated step"),
        steps("simulated step of ours by DT-FM's objective"),
    )
    saved = [plan[case] / step for case, step in by_objective.items()]
    return (
        textwrap.fill(
            f"Where clusters have links of their own, {len(saved)} cases of DT-FM (arXiv "
            f"2206.01288, 64 GPUs): a "
            f"step of what `holmes plan` finds takes {min(saved):.2f} to {max(saved):.2f} of that "
            f"of the best "
            f"placement by DT-FM's objective (simulated, {model_error()}),"
            f" by which ours costs {min(parts):.2f} to {max(parts):.2f} of its own search's. "
            f"Optimality gaps: "
            f"no plan is more than {max(gaps):.0%} faster, within that model."
            f" [More](docs/benchmarks/placement.md).",
            119,
        )
        + "\n"
    )


def results() -> str:
    """The page of the site that has every row with a target or a ratio of every file in
    benchmarks/results."""
    parts = [
        "# All results\n\nMade from benchmarks/results when the site was built. Each row: the value, "
        "its least and greatest, and the target where one was stated. [How each number is "
        "made](numbers.md).\n"
    ]
    for file in sorted(RESULTS.glob("*.json")):
        if any("target" in row or row["unit"] == "x" for row in load(file.name)):
            parts.append(f"## {file.name}\n\n{about(file.name)}\n{rows(file.name)}")
    return "\n".join(parts)


def worst_error() -> tuple[str, float]:
    """(FILE: case, part of the measured step) of the worst prediction that the results have."""
    found = [
        (row["value"], f"{file.name}: {row['scene']}")
        for file in sorted(RESULTS.glob("*.json"))
        for row in load(file.name)
        if row["metric"].startswith("worst error")
    ]
    value, case = max(found)
    return case, value


def model_error() -> str:
    """What simulated steps and optimality gaps have to be taken with."""
    return f"at worst {worst_error()[1]:.1%} off"


def model_error_file() -> str:
    """holmes_ext/planner/search/model_error.json."""
    case, value = worst_error()
    return json.dumps({"worst_error": value, "case": case}, indent=1) + "\n"
