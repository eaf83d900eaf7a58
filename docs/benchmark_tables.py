"""Makes the tables of docs/benchmarks/ and docs/numbers.md that join several results.

docs/generate.py puts them into marked blocks, as those of docs/tables.py:

    <!-- generated: speed -->                       step times against stock, over several files
    <!-- generated: variants peers.json; sent=sent in a step, (.*) -->     a line for each variant
    <!-- generated: ranges adapt.json; metric=.*; TITLE=CASES -->          smallest, median, largest
    <!-- generated: errors -->                      errors of all predicted steps, by file
    <!-- generated: sources two_clusters.json -->   how the files were made
    <!-- generated: programs -->                    programs, their results and their pages
"""

from __future__ import annotations

import ast
import json
import re
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from tables import (
    RESULTS,
    Row,
    load,
    parse_arguments,
    shown,
    spread,
    step_error_values,
    table,
    worst_error,
)

PROGRAMS = RESULTS.parent
PAGES = Path(__file__).resolve().parent / "benchmarks"
#: How a results file was made -> the files. docs/numbers.md explains the labels.
HOW_MADE = {
    "emulated": (
        "crossing found_plans joined matrix megatron_deepspeed megatron_deepspeed_tied "
        "megatron_two_clusters partition peers prediction prediction_links preflight recovery "
        "reduction stacks stage_links telemetry two_clusters"
    ),
    "simulated and emulated": "adapt planners schedules",
    "network emulated": "compressed_activations compression links weights",
    "emulated GPUs": "gpu gpu_steps",
    "one process": "joined_losses joined_losses_few joined_losses_muon joined_muon",
    "simulated": "placement published search search_nodes",
    "CPU program": "command_lines experts stages_speed start",
    "one physical GPU": "gpu_h100 gpu_h200",
}


class Job(NamedTuple):
    """A line of the table "Speed against stock"."""

    name: str
    file: str
    case: str
    variant: str = "holmes"  # name of the variant with holmes in the results


#: Jobs of which a whole step was measured twice: with holmes, and without it.
JOBS = (
    Job("DeepSpeed, pipeline 2, 4+4 nodes", "two_clusters.json", "4+4"),
    Job("DeepSpeed, 4+4, three times slower", "two_clusters.json", "4+4 three times slower"),
    Job("DeepSpeed, 4+4, RoCE much slower", "two_clusters.json", "4+4 slow RoCE"),
    Job("DeepSpeed, pipeline 3, 2+4 nodes", "two_clusters.json", "2+4 pipeline 3"),
    Job("DeepSpeed, pipeline 4, 2+2+4 nodes", "two_clusters.json", "three clusters"),
    Job("megatron-core, pipeline 2, 4+4", "megatron_two_clusters.json", "4+4"),
    Job("Megatron-DeepSpeed's pretrain_gpt.py, 4+4", "megatron_deepspeed.json", "4+4"),
    Job(
        "pretrain_gpt.py, 4+4, three times slower",
        "megatron_deepspeed.json",
        "4+4 three times slower",
    ),
    Job("Hugging Face's Trainer (DDP), 4+4", "stacks.json", "trainer"),
    Job("Lightning (DDP), 4+4", "stacks.json", "lightning"),
    Job("FSDP2, `--holmes-fsdp hybrid`, 4+4", "stacks.json", "fsdp2", variant="hybrid"),
    Job("HSDP of two replicas, 4+4", "stacks.json", "hsdp"),
)


def speed() -> str:
    """Return a table with the step of stock, and the ratios and losses of holmes, for each of JOBS."""
    lines = []
    for job in JOBS:
        row_of = {row["metric"]: row for row in load(job.file) if row["scene"] == job.case}
        # In HSDP, stock is the launcher's order of the ranks.
        ratio = row_of.get(f"{job.variant} : stock") or row_of["holmes : the launcher's order"]
        bound = row_of.get(f"{job.variant} : all-RDMA")
        loss = row_of.get(f"{job.variant}: largest loss difference")
        loss = loss or row_of["largest loss difference"]
        note = f" ({ratio['note']})" if "note" in ratio else ""
        lines.append(
            (
                job.name,
                spread(row_of["step stock"], digits=2),
                spread(ratio, digits=2) + note,
                spread(bound, digits=2) if bound else "",
                f"{loss['value']:.2g}",
            )
        )
    head = ("job", "step of stock, s", "holmes : stock", "holmes : all-RDMA", "loss differs by")
    return table(head, lines)


def variants(arguments: str) -> str:
    """Return a Markdown table with a line for each variant, and a column for each metric.

    Args:
        arguments: "FILE; case=REGEX; TITLE=REGEX; ...". Each REGEX matches a metric of all variants,
            and its group the name of the variant: "tokens/s, (.*)".
    """
    file, columns = parse_arguments(arguments)
    case = columns.pop("case", ".*")
    values: dict[str, dict[str, str]] = {}  # variant -> title of a column -> value
    for row in load(file):
        if not re.fullmatch(case, row["scene"]):
            continue
        for title, metric in columns.items():
            if match := re.fullmatch(metric, row["metric"]):
                values.setdefault(match[1], {})[title] = shown(row)
    assert values, f"no row: {arguments}"
    lines = ([name, *(cells.get(title, "") for title in columns)] for name, cells in values.items())
    return table(("variant", *columns), lines)


def ranges(arguments: str) -> str:
    """Return a Markdown table with the smallest, the median and the largest value of groups of cases.

    Args:
        arguments: "FILE; metric=REGEX; TITLE=REGEX; ...". Each REGEX after a TITLE chooses the cases
            of a group. Rows whose target is not counted (the cores were busy) are included.
    """
    file, groups = parse_arguments(arguments)
    metric = groups.pop("metric")
    lines = []
    for title, case in groups.items():
        chosen = [
            row
            for row in load(file)
            if re.fullmatch(metric, row["metric"]) and re.fullmatch(case, row["scene"])
        ]
        assert chosen, f"no row: {title} of {arguments}"
        values = [row["value"] for row in chosen]
        summary = (min(values), statistics.median(values), max(values))
        limit = chosen[0].get("target", "").replace("<=", "at most").replace(">=", "at least")
        lines.append((title, len(values), *(f"{value:.2f}" for value in summary), limit))
    return table(("cases", "number", "smallest", "median", "largest", "target of each"), lines)


def errors() -> str:
    """Return a table with the errors of all predicted steps: a line for each results file."""
    lines = []
    every_error = []
    for file in sorted(RESULTS.glob("*.json")):
        found = step_error_values(file.name)
        if not found:
            continue
        every_error += found
        lines.append(_error_line(f"`{file.name}`", found))
    assert max(every_error) == worst_error()[1]
    return table(
        ("results", "steps", "median error", "worst error"),
        [*lines, _error_line("**all**", every_error)],
    )


def _error_line(title: str, found: list[float]) -> tuple[str, ...]:
    median, worst = statistics.median(found), max(found)
    return title, str(len(found)), f"{100 * median:.1f} %", f"{100 * worst:.1f} %"


def sources(arguments: str) -> str:
    """Return a table that says how results files were made: label, processor and versions.

    Args:
        arguments: Names of files in benchmarks/results/, separated by spaces.
    """
    lines = []
    for file in arguments.split():
        document = json.loads((RESULTS / file).read_text())
        machine = _machine(document["machine"])
        versions = document.get("versions", document["machine"])
        software = ", ".join(
            f"{name} {versions[name]}"
            for name in ("torch", "deepspeed", "megatron-core", "nccl")
            if versions.get(name)
        )
        lines.append((f"`{file}`", how_made(file), machine, software))
    return table(("benchmarks/results/", "made", "machine", "software"), lines)


def _machine(machine: dict[str, Any]) -> str:
    if "gpus" in machine:
        return ", ".join(machine["gpus"])
    return f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']:.0f} GiB"


def how_made(file: str) -> str:
    """Return the label that says how a results file was made, such as "emulated".

    Raises:
        KeyError: HOW_MADE lacks the file.
    """
    stem = file.removesuffix(".json")
    for label, stems in HOW_MADE.items():
        if stem in stems.split():
            return label
    raise KeyError(f"{file}: HOW_MADE in docs/benchmark_tables.py says how it was made")


def programs() -> str:
    """Return a table of the programs in benchmarks/ that have results, and the pages that show them."""
    files_of_program: dict[str, list[str]] = {}
    for file in sorted(RESULTS.glob("*.json")):
        if isinstance(rows := _rows(file), list) and rows:
            files_of_program.setdefault(_program_of(file.stem), []).append(file.name)
    lines = []
    for program, files in files_of_program.items():
        module = ast.parse((PROGRAMS / f"{program}.py").read_text())
        first_line = (ast.get_docstring(module) or "").partition("\n")[0]
        made = " ".join(dict.fromkeys(how_made(file) for file in files))
        lines.append((f"`{program}.py`", first_line, made, _page_of(files)))
    return table(("program", "what it does", "made", "page"), lines)


def _rows(file: Path) -> list[Row] | None:
    document = json.loads(file.read_text())
    return document.get("rows") if isinstance(document, dict) else None


def _program_of(stem: str) -> str:
    """Return the name of the program that writes a results file: the longest that begins its name."""
    found = [path.stem for path in PROGRAMS.glob("*.py") if stem.startswith(path.stem)]
    return max(found, key=len)


def _page_of(files: list[str]) -> str:
    """Return Markdown links to the benchmark pages that show results from at least one of `files`."""
    links = []
    for page in sorted(PAGES.glob("*.md")):
        text = page.read_text()
        if any(re.search(rf"<!-- generated: sources [^>]*\b{file}\b", text) for file in files):
            links.append(f"[{page.stem}](benchmarks/{page.name})")
    return ", ".join(links) or "[versions](versions.md)"
