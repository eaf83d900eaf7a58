"""Makes tables of README.md and docs/ from the results of the benchmarks (benchmarks/results/).

docs/generate.py replaces marked blocks of a page by such tables:

    <!-- generated: rows two_clusters.json; case=4.4; metric=step .* -->      a line for each result
    <!-- generated: cells prediction.json; measured=measured step; ... -->     a line for each case,
                                                            with a column for each TITLE=metric

case and metric are regular expressions for the whole name. If that of a metric has a group, the
text that the group matches is shown after the value. Without a metric, `rows` shows the results
that have a target or are ratios. If the file does not exist yet, `rows` is empty.
docs/benchmark_tables.py has more blocks.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
#: Metrics that are the error of one predicted step.
_STEP_ERROR = re.compile(
    r"error|error of the prediction, .*|prediction error (uniform|speed|balanced)"
    r"|.*, predicted against measured"
)
#: Characters of a target above which it is rounded: some are copied from another result.
_LONGEST_TARGET = 8
Row = dict[str, Any]


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown.

    Args:
        head: Titles of the columns.
        rows: Cells of each line. Bars in them are escaped.
    """
    titles = list(head)
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |\n" for line in lines
    )


def load(file: str) -> list[Row]:
    """Return the rows of a results file: mappings with "scene" (the case), "metric", "value"..."""
    return json.loads((RESULTS / file).read_text()).get("rows", [])


def spread(row: Row, digits: int, factor: float = 1) -> str:
    """Return a value with its smallest and largest measurement, such as "1.68 (1.67-1.69)".

    Args:
        row: The result.
        digits: Digits after the decimal point.
        factor: Factor of all numbers, to change the unit.
    """
    value, low, high = (
        f"{factor * number:.{digits}f}" for number in (row["value"], *row["spread"])
    )
    between = " to " if "-" in low + high else "-"
    return low if low == high else f"{value} ({low}{between}{high})"


def shown(row: Row) -> str:
    """Return a value with its unit and its spread, as a table shows it: "1.38 x (1.35-1.40)".

    Digits after the decimal point, by unit:

    - "s", "CPU s": 3, or 0 from 100 s on. Below 0.01 s: in ms, us or ns with 1 or 2.
    - "x", a ratio such as a speed-up: 2.
    - "%", and fractions such as "of a step", which are shown in percent: 1 to 3.
    - "nats", a loss or a difference of losses: 3. Below 0.001: two significant digits.
    - all others: 0 to 2, fewer for larger values.
    """
    unit, value = row["unit"], row["value"]
    if unit in ("s", "CPU s"):
        return _shown_seconds(row)
    if unit == "x":
        return f"{spread(row, 2)} x"
    if unit == "%" or _is_fraction(unit):
        factor = 100 if _is_fraction(unit) else 1
        percent = factor * abs(value)
        if percent > 1 or not value:
            digits = 1
        elif percent > 0.1:
            digits = 2
        else:
            digits = 3
        return f"{spread(row, digits, factor)} %"
    if unit == "nats" and abs(value) < 1e-3:
        return f"{value:.2g}"
    if float(value).is_integer():
        digits = 0
    elif unit == "nats":
        digits = 3
    elif abs(value) < 10:
        digits = 2
    elif abs(value) < 100:
        digits = 1
    else:
        digits = 0
    return f"{spread(row, digits)} {unit}".rstrip()


def _shown_seconds(row: Row) -> str:
    """Return a number of seconds ("s") or of seconds of CPU ("CPU s") as shown() returns it."""
    unit, value = row["unit"], row["value"]
    largest = max(map(abs, (value, *row["spread"])))
    if largest == 0 or largest >= 0.01:
        return f"{spread(row, 3 if abs(value) < 100 else 0)} {unit}"
    if largest >= 1e-3:
        factor, short_unit = 1e3, "ms"
    elif largest >= 1e-6:
        factor, short_unit = 1e6, "us"
    else:
        factor, short_unit = 1e9, "ns"
    digits = 1 if largest * factor >= 10 else 2
    return f"{spread(row, digits, factor)} {unit.replace('s', short_unit)}"


def _is_fraction(unit: str) -> bool:
    """Return whether values of a unit ("of a step", "fraction") are shown in percent."""
    return unit.startswith("of ") or unit == "fraction"


def target(row: Row) -> str:
    """Return the target of a benchmark result and whether it is met, such as "at most 1 %: met".

    Return "" if the result has no target. If it has a note (such as "the cores were busy"), the
    target is neither met nor missed, and the returned text ends with the note.

    Args:
        row: One result in a file of benchmarks/results/.
    """
    if "target" not in row:
        return ""
    sign, number = row["target"].split()
    if len(number) > _LONGEST_TARGET:
        number = f"{float(number):.4g}"
    limit = f"{number} %" if row["unit"] == "%" else number
    if _is_fraction(row["unit"]):
        limit = f"{100 * float(number):g} %"
    word = {"<=": "at most ", ">=": "at least ", "==": ""}[sign]
    if "note" in row:
        return f"{word}{limit}: {row['note']}, not counted"
    return f"{word}{limit}: {'met' if row.get('met') else '**not met**'}"


def parse_arguments(arguments: str) -> tuple[str, dict[str, str]]:
    """Return the file name, and name -> regular expression, of "FILE; NAME=REGEX; ..."."""
    file, *assignments = (text.strip() for text in arguments.split(";"))
    return file, dict(text.split("=", 1) for text in assignments)


def rows(arguments: str) -> str:
    """Return a Markdown table with a line for each chosen benchmark result of a file.

    Args:
        arguments: "FILE; case=REGEX; metric=REGEX", both optional. FILE is in benchmarks/results/.
            Without a metric, the results that have a target or are ratios are chosen.

    Returns:
        The table; "" if the file does not exist.
    """
    file, patterns = parse_arguments(arguments)
    if not (RESULTS / file).exists():
        return ""
    case, metric = patterns.get("case", ".*"), patterns.get("metric")
    chosen = [
        row
        for row in load(file)
        if re.fullmatch(case, row["scene"])
        and (
            re.fullmatch(metric, row["metric"]) if metric else "target" in row or row["unit"] == "x"
        )
    ]
    assert chosen, f"no row: {arguments}"
    return table(
        ("case", "what", "value", "target"),
        ((row["scene"], row["metric"], shown(row), target(row)) for row in chosen),
    )


def cells(arguments: str) -> str:
    """Return a Markdown table with a line for each case of a file, and a column for each metric.

    A case is what a benchmark measured, such as "4+4" nodes ("scene" in the results).

    Args:
        arguments: "FILE; TITLE=REGEX; ...". FILE is in benchmarks/results/. Each TITLE is the title
            of a column, which shows the metric that REGEX matches. The title "case" makes no
            column: its REGEX chooses the cases. By default, all cases are shown.
    """
    file, columns = parse_arguments(arguments)  # columns: title -> regular expression of a metric
    case = columns.pop("case", ".*")
    cases: dict[str, list[Row]] = {}
    for row in load(file):
        if re.fullmatch(case, row["scene"]):
            cases.setdefault(row["scene"], []).append(row)
    lines = []
    for name, rows_of_case in cases.items():
        cells_of_case = [_cell(rows_of_case, metric) for metric in columns.values()]
        if any(cells_of_case):
            lines.append([name, *cells_of_case])
    assert lines, f"no row: {arguments}"
    return table(("case", *columns), lines)


def _cell(rows_of_case: list[Row], metric: str) -> str:
    """Return the value of the first row whose metric matches, with its target; "" if there is none.

    Args:
        rows_of_case: All results of a case.
        metric: Regular expression. The text that its group matches is shown after the value.
    """
    for row in rows_of_case:
        if match := re.fullmatch(metric, row["metric"]):
            matched_group = f" ({match[1]})" if match.groups() else ""
            target_text = f", {target(row)}" if "target" in row else ""
            return shown(row) + matched_group + target_text
    return ""


def about(file: str) -> str:
    """Return a sentence with the machine and the versions with which a results file was made."""
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


#: Lines of README's table: name of the line, results file, case.
_STOCK, _BOUND = "holmes : stock", "holmes : all-RDMA"
MEASURED = (
    ("pipeline: DeepSpeed, 4+4 nodes, 2 stages", "two_clusters.json", "4+4"),
    ("data-parallel: Hugging Face's Trainer (DDP), 4+4 nodes", "stacks.json", "trainer"),
)


def _ratio(rows_of_file: list[Row], case: str, metric: str) -> str:
    """Return a ratio of step times with its spread, or "" if it was not measured.

    In the case of FSDP2, the variant of holmes is named "hybrid".
    """
    metrics = metric, metric.replace("holmes", "hybrid")
    chosen = [row for row in rows_of_file if row["scene"] == case and row["metric"] in metrics]
    return spread(chosen[0], 2) if chosen else ""


def _loss(rows_of_file: list[Row], case: str) -> str:
    """Return the largest difference of losses with and without holmes; "" if not measured."""
    names = re.compile(r"((holmes|hybrid): )?largest loss difference")
    values = [
        row["value"]
        for row in rows_of_file
        if row["scene"] == case and names.fullmatch(row["metric"])
    ]
    return f"{max(values):.2g}" if values else ""


def measured() -> str:
    """Return the table of README.md: speed and losses with holmes in each framework.

    Each line of MEASURED has the ratio of step times "holmes : stock" (_STOCK: the same job without
    holmes), and "holmes : all-RDMA" (_BOUND: the same job where all nodes share one fast network).
    A line follows with what holmes costs in a single cluster.
    """

    def value(file: str, case: str, metric: str) -> float:
        """Return the value of one metric of one case in a results file."""
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
    # One cluster has no slow links to avoid, so holmes can only cost time there.
    control = value("two_clusters.json", "control: one cluster", "what holmes adds to a step")
    lines.append(("nothing to gain: one uniform cluster", f"step {100 * control:+.1f} %", "", ""))
    return table(("emulated, gloo, torch 2.13.0", _STOCK, _BOUND, "loss differs by"), lines)


def placed() -> str:
    """Return the sentences of docs/plan_search.md about placements of pipeline stages (placement.json).

    DT-FM (arXiv 2206.01288) places ranks so that its own objective, a cost of communication and
    not the step time, is smallest. The sentences have three ranges over all cases:

    - simulated step of the plan by `holmes plan` : that of the best placement by DT-FM's objective
      which holmes has found;
    - cost of that placement by DT-FM's objective : cost of the one that DT-FM's own search finds;
    - optimality gap: by what share another plan could at most be faster.
    """

    def steps(metric: str) -> dict[str, float]:
        """Return case -> value of a metric."""
        return {
            row["scene"]: row["value"] for row in load("placement.json") if row["metric"] == metric
        }

    def values(metric: str) -> list[float]:
        """Return the values of all metrics with this beginning, in the order of the cases."""
        return [row["value"] for row in load("placement.json") if row["metric"].startswith(metric)]

    costs = values("DT-FM's objective: ours")
    dtfm_costs = values("DT-FM's objective: DT-FM")
    cost_ratios = [cost / dtfm_cost for cost, dtfm_cost in zip(costs, dtfm_costs)]
    gaps = values("holmes plan: optimality gap")
    plan, by_objective = (
        steps("holmes plan: simulated step"),
        steps("simulated step of ours by DT-FM's objective"),
    )
    step_ratios = [plan[case] / step for case, step in by_objective.items()]
    return (
        textwrap.fill(
            f"Where clusters have links of their own, {len(step_ratios)} cases of DT-FM (arXiv "
            f"2206.01288, 64 GPUs): a "
            f"step of what `holmes plan` finds takes "
            f"{min(step_ratios):.2f} to {max(step_ratios):.2f} of that "
            f"of the best "
            f"placement by DT-FM's objective (simulated, {model_error()}),"
            f" by which ours costs {min(cost_ratios):.2f} to {max(cost_ratios):.2f}"
            f" of its own search's. "
            f"Optimality gaps: "
            f"no plan is more than {max(gaps):.0%} faster, within that model.",
            119,
        )
        + "\n"
    )


def results() -> str:
    """Return the page "All results": every result with a target, and every ratio, of every file."""
    sections = [
        "# All results\n\nMade from benchmarks/results when the site was built. Each row: the value, "
        "its least and greatest, and the target where one was stated. [How each number is "
        "made](numbers.md).\n"
    ]
    for file in sorted(RESULTS.glob("*.json")):
        if any("target" in row or row["unit"] == "x" for row in load(file.name)):
            sections.append(f"## {file.name}\n\n{about(file.name)}\n{rows(file.name)}")
    return "\n".join(sections)


def step_error_values(file: str) -> list[float]:
    """Return the relative errors, without their signs, of all predicted steps in a results file.

    Left out: predictions that by design lack a part of the step ("numbers alone"), those of models
    that a job measures itself (partition.json's "by profile", adapt.json), and published.json,
    whose runs were measured elsewhere.
    """
    if file == "published.json":
        return []
    document = json.loads((RESULTS / file).read_text())
    rows_of_file = document.get("rows", []) if isinstance(document, dict) else []
    values = [abs(row["value"]) for row in rows_of_file if _STEP_ERROR.fullmatch(row["metric"])]
    # planners.json has simulated and measured steps instead of errors.
    value_of = {(row["scene"], row["metric"]): row["value"] for row in rows_of_file}
    for (case, metric), measured_s in value_of.items():
        planner, found, _ = metric.partition(": measured step in the lab")
        if found:
            simulated_s = value_of[case, f"{planner}: step"]
            values.append(abs(simulated_s / measured_s - 1))
    return values


def worst_error() -> tuple[str, float]:
    """Return the worst prediction of all results: "FILE: CASE" and its relative error."""
    errors = [
        (row["value"], f"{file.name}: {row['scene']}")
        for file in sorted(RESULTS.glob("*.json"))
        for row in load(file.name)
        if row["metric"].startswith("worst error")
    ]
    value, case = max(errors)
    return case, value


def model_error() -> str:
    """Return the worst error of simulated steps in words, for sentences with such a step."""
    return f"at worst {worst_error()[1]:.1%} off"


def model_error_file() -> str:
    """Return the content of model_error.json, the error that holmes prints with simulated steps."""
    case, value = worst_error()
    return json.dumps({"worst_error": value, "case": case}, indent=1) + "\n"
