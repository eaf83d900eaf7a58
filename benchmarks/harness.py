"""Provides the common parts of all benchmarks: options, and the table and the JSON file of results.

A result is called a row: a metric of a case. A case is a configuration that the benchmark measures.
The file (option --json) has this form:

    {"machine": ..., "versions": ..., "rows": [ROW, ...]}

    ROW: {"scene": name of the case, "metric", "value", "unit", "spread": [min, max],
          "emulated": whether the compute was emulated,
          "target": a bound such as ">= 1.6", "met": whether the value keeps the bound}
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from holmes_lab.cores import BOUND, BOUND_TEXT
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
# The benchmarks import these functions from here, so that only this module changes sys.path.
import weights_runs as weights_runs  # noqa: E402
from checkouts import checkouts_folder as checkouts_folder  # noqa: E402
from checkouts import find_checkout as find_checkout  # noqa: E402
from checkouts import why_missing as why_missing  # noqa: E402
from clusters import toml as toml  # noqa: E402

PACKAGES = ("holmes_ext", "torch", "deepspeed", "megatron-core")


@dataclass(frozen=True)
class Row:
    """Measured metric of one case, with its target."""

    case: str
    metric: str
    value: float
    unit: str
    spread: tuple[float, float]  # smallest and largest value
    emulated: bool  # whether the compute was emulated
    target: str = ""  # a bound such as ">= 1.6"
    met: bool | None = None  # whether the value keeps the bound; None if that cannot be said
    busy: float | None = None  # share of this machine's cores in use meanwhile; None: not measured

    @classmethod
    def of(
        cls,
        case: str,
        metric: str,
        value: float,
        unit: str,
        spread: tuple[float, float],
        emulated: bool,
        target: str = "",
        busy: float | None = None,
    ) -> Row:
        """Return a row of results, after comparing the value with its target.

        `met` of the row says whether the value keeps the target. It is None without a target, and
        if more than 80 % of this machine's cores were in use (BOUND): then the value may show the
        limit of the machine.

        Args:
            case: Name of the case.
            metric: Name of the metric.
            value: The value.
            unit: Unit of the value.
            spread: Smallest and largest value.
            emulated: Whether the compute was emulated.
            target: A bound such as ">= 1.6" or "<= 0.01"; "" if there is none.
            busy: Share of this machine's cores in use meanwhile, from 0 to 1; None: not measured.
        """
        met = None
        if target and (busy is None or busy <= BOUND):
            sign, limit = target.split()
            met = value >= float(limit) if sign == ">=" else value <= float(limit)
        return cls(case, metric, value, unit, spread, emulated, target, met, busy)

    @classmethod
    def median(
        cls,
        case: str,
        metric: str,
        values: list[float],
        unit: str,
        emulated: bool,
        target: str = "",
        busy: float | None = None,
    ) -> Row:
        """Return a row with the median of several runs, and with the smallest and largest value.

        Args:
            case: Name of the case.
            metric: Name of the metric.
            values: Value of each run.
            unit: Unit of the values.
            emulated: Whether the compute was emulated.
            target: A bound on the median, such as ">= 1.6"; "" if there is none.
            busy: Share of this machine's cores in use meanwhile, from 0 to 1; None: not measured.
        """
        spread = min(values), max(values)
        return cls.of(case, metric, statistics.median(values), unit, spread, emulated, target, busy)

    def to_dict(self) -> dict[str, Any]:
        """Return the row in the form of the results file."""
        fields_of_row = asdict(self)
        case = fields_of_row.pop("case")
        document = {"scene": case, **fields_of_row}  # "scene" is the file's key for the case
        if not self.target:
            del document["target"]
            del document["met"]
        if self.busy is None:
            del document["busy"]
        if self.machine_was_busy:
            document["note"] = BOUND_TEXT
        return document

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Row:
        """Return the row of an entry of a results file, as to_dict() has written it.

        Keys that are no fields, such as "note", are ignored.
        """
        document = {**document, "case": document["scene"]}  # "scene" is the file's key for the case
        values = {
            field.name: document[field.name] for field in fields(cls) if field.name in document
        }
        values["spread"] = tuple(document["spread"])  # JSON has a list
        return cls(**values)

    @property
    def machine_was_busy(self) -> bool:
        """Return whether the machine was so busy that the value may show the machine's limit.

        Such a value neither meets nor misses its target.
        """
        return self.busy is not None and self.busy > BOUND


def machine() -> dict[str, Any]:
    """Return a description of this machine for the results file."""
    cpu_lines = Path("/proc/cpuinfo").read_text().splitlines()
    memory_lines = Path("/proc/meminfo").read_text().splitlines()
    model = next(line.split(":")[1].strip() for line in cpu_lines if "model name" in line)
    kib = next(line.split()[1] for line in memory_lines if line.startswith("MemTotal"))
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gib": round(int(kib) / 2**20, 1),
        "kernel": platform.release(),
        "load_average": os.getloadavg(),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that are measured."""
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in PACKAGES},
    }


def parser(description: str) -> argparse.ArgumentParser:
    """Return an argument parser with the options that all benchmarks have."""
    arguments = argparse.ArgumentParser(description=description, allow_abbrev=False)
    arguments.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    arguments.add_argument("--cases", default="", metavar="NAME,...", help="only these cases")
    return arguments


def chosen_cases(wanted: str, cases: Iterable[str]) -> list[str]:
    """Return the names of the cases to measure: those of the option --cases, or all.

    Args:
        wanted: The value of --cases, with names separated by commas.
        cases: Names of all cases.

    Raises:
        SystemExit: A name is unknown. The status is 2.
    """
    known = list(cases)
    names = [name for name in wanted.split(",") if name]
    for name in names:
        if name not in known:
            tell(f"{Path(sys.argv[0]).name}: no case {name!r}; there are {', '.join(known)}")
            raise SystemExit(2)
    return names or known


def tell(message: str) -> None:
    """Print a line about the progress on stderr."""
    print(message, file=sys.stderr, flush=True)


def kept_rows(path: Path | None, names: Iterable[str] = ()) -> list[Row]:
    """Return the rows of an earlier results file that this run keeps.

    Rows of the cases that are measured anew are left out.

    Args:
        path: The results file. If it is None or does not exist, the list is empty.
        names: Cases that are measured anew.
    """
    if path is None or not path.exists():
        return []
    return [
        row
        for row in map(Row.from_dict, json.loads(path.read_text())["rows"])
        if row.case not in names
    ]


class Runs:
    """Results of single runs, written to a file after each run, so that an interrupted benchmark can go on.

    Args:
        path: The file; None keeps nothing.
        minutes: No run begins after this time from now; 0: no limit.
    """

    def __init__(self, path: Path | None, minutes: float = 0.0):
        self._path = path
        self._minutes = minutes
        self._begin = time.monotonic()
        self._results: dict[str, Any] = {}  # key of a run -> its result
        if path is not None and path.exists():
            self._results = json.loads(path.read_text())

    @classmethod
    def add_arguments(cls, arguments: argparse.ArgumentParser) -> None:
        """Add the options --runs and --minutes to a parser."""
        add = arguments.add_argument
        add(
            "--runs",
            type=Path,
            metavar="FILE",
            help="keep each run there when it has ended; those that it has are not made again",
        )
        add("--minutes", type=float, default=0.0, help="begin no run after so many (0: all)")

    def of(self, key: str, make: Callable[[], Any]) -> Any:
        """Return the result of a run of the benchmark; make the run only if there is no result yet.

        The file of this object (`path`) keeps results of earlier calls, also of an earlier process.

        Args:
            key: Name of the run; it identifies the result in the file.
            make: Function that makes the run, and returns a result that JSON can store.

        Returns:
            The result; None if there is none yet and the time limit (`minutes`) has passed.
        """
        if key in self._results:
            return self._results[key]
        elapsed_s = time.monotonic() - self._begin
        if self._minutes and elapsed_s > 60 * self._minutes:
            tell(f"left out, {self._minutes:g} minutes are over: {key}")
            return None
        result = make()
        self._results[key] = result
        tell(f"{key}: {result}")
        if self._path is not None:
            self._path.write_text(json.dumps(self._results, indent=1) + "\n")
        return result


def write(rows: list[Row], path: Path | None) -> None:
    """Write the results file with the rows that are known so far; nothing if `path` is None.

    A benchmark of several hours that is interrupted thus leaves its results.
    """
    if path is not None:
        document = {
            "machine": machine(),
            "versions": versions(),
            "rows": [row.to_dict() for row in rows],
        }
        # A temporary file is renamed, so that an interruption leaves no half-written results file.
        new = path.with_name(f"{path.name}.new")
        new.write_text(json.dumps(document, indent=1) + "\n")
        new.replace(path)


def _target_text(row: Row) -> str:
    """Return the cell of the table that says whether a row meets its target."""
    if row.machine_was_busy:
        return BOUND_TEXT
    if row.met is None:
        return ""
    return "yes" if row.met else "NO"


def finish(rows: list[Row], path: Path | None, title: str) -> int:
    """Print the table of results and write the file.

    Args:
        rows: The results.
        path: The results file; None writes none.
        title: Title of the printed table.

    Returns:
        The exit status: 1 if a target is not met, else 0.
    """
    table = Table(title=title)
    for column in ("case", "metric", "value", "spread", "unit", "emulated", "target", "met"):
        table.add_column(column, justify="right" if column in ("value", "spread") else "left")
    for row in rows:
        if row.metric.startswith("bytes "):
            continue  # in the file: too many for a screen
        spread = f"{row.spread[0]:.4g} - {row.spread[1]:.4g}"
        emulated = "yes" if row.emulated else ""
        table.add_row(
            row.case,
            row.metric,
            f"{row.value:.4g}",
            spread,
            row.unit,
            emulated,
            row.target,
            _target_text(row),
        )
    Console(width=max(150, Console().width)).print(table)
    write(rows, path)
    return 1 if any(row.met is False for row in rows) else 0
