"""Provides what all benchmarks share: their options, and the table and the JSON file of their results.

A result is called a row: one metric of one case, which is a configuration that the benchmark measures. The
file, which the option --json names, has this form:

    {"machine": ..., "versions": ..., "rows": [ROW, ...]}

    ROW: {"scene", "metric", "value", "unit", "spread": [min, max],
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
from checkouts import checkouts_folder as checkouts_folder  # noqa: E402
from checkouts import find_checkout as find_checkout  # noqa: E402
from checkouts import why_missing as why_missing  # noqa: E402
from clusters import toml as toml  # noqa: E402

PACKAGES = ("holmes_ext", "torch", "deepspeed", "megatron-core")


@dataclass(frozen=True)
class Row:
    """One figure.

    target: what the project set itself, as text (">= 1.6"); met: whether the value reaches it, None where
    that cannot be said; busy: share of this machine's cores that was used while it was timed, None where
    nobody measured it.
    """

    case: str
    metric: str
    value: float
    unit: str
    spread: tuple[float, float]
    emulated: bool
    target: str = ""
    met: bool | None = None
    busy: float | None = None

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
        """With `met` worked out from a target such as ">= 1.6" or "<= 0.01", unless the cores had no time
        left."""
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
        """The median of several runs' values, with the least and the greatest."""
        spread = min(values), max(values)
        return cls.of(case, metric, statistics.median(values), unit, spread, emulated, target, busy)

    def to_dict(self) -> dict[str, Any]:
        without = {
            *(() if self.target else ("target", "met")),
            *(("busy",) if self.busy is None else ()),
        }
        document = {key: value for key, value in asdict(self).items() if key not in without}
        document = {"scene": document.pop("case"), **document}  # the file's key for the case
        return {**document, "note": BOUND_TEXT} if self.bound else document

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Row:
        document = {**document, "case": document["scene"]}  # the file's key for the case
        known = {
            field.name: document[field.name] for field in fields(cls) if field.name in document
        }
        return cls(**{**known, "spread": tuple(document["spread"])})

    @property
    def bound(self) -> bool:
        """Whether it says more of this machine than of what was timed."""
        return self.busy is not None and self.busy > BOUND


def machine() -> dict[str, Any]:
    """Where the figures come from."""
    cpus, memory = (
        Path(f"/proc/{name}").read_text().splitlines() for name in ("cpuinfo", "meminfo")
    )
    model = next(line.split(":")[1].strip() for line in cpus if "model name" in line)
    kib = next(line.split()[1] for line in memory if line.startswith("MemTotal"))
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gib": round(int(kib) / 2**20, 1),
        "kernel": platform.release(),
        "load_average": os.getloadavg(),
    }


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in PACKAGES},
    }


def parser(description: str) -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(description=description, allow_abbrev=False)
    arguments.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    arguments.add_argument("--cases", default="", metavar="NAME,...", help="only these cases")
    return arguments


def chosen(wanted: str, cases: Iterable[str]) -> list[str]:
    """The cases of --cases, all where none is given; status 2 after one line for one that is not there."""
    known, names = list(cases), [name for name in wanted.split(",") if name]
    for name in names:
        if name not in known:
            tell(f"{Path(sys.argv[0]).name}: no case {name!r}; there are {', '.join(known)}")
            raise SystemExit(2)
    return names or known


def tell(message: str) -> None:
    """Progress, on stderr."""
    print(message, file=sys.stderr, flush=True)


def kept(path: Path | None, names: Iterable[str] = ()) -> list[Row]:
    """Rows that the file has, but of these cases."""
    if path is None or not path.exists():
        return []
    return [
        row
        for row in map(Row.from_dict, json.loads(path.read_text())["rows"])
        if row.case not in names
    ]


class Runs:
    """What single runs gave, in a file as they end: a benchmark that was cut short goes on where it was.

    path: None keeps nothing; minutes: from now on, after which no run is begun (0: no end)."""

    def __init__(self, path: Path | None, minutes: float = 0.0):
        self._path, self._minutes, self._begin = path, minutes, time.monotonic()
        self._of: dict[str, Any] = (
            json.loads(path.read_text()) if path is not None and path.exists() else {}
        )

    @classmethod
    def add_arguments(cls, arguments: argparse.ArgumentParser) -> None:
        add = arguments.add_argument
        add(
            "--runs",
            type=Path,
            metavar="FILE",
            help="keep each run there when it has ended; those that it has are not made again",
        )
        add("--minutes", type=float, default=0.0, help="begin no run after so many (0: all)")

    def of(self, key: str, make: Callable[[], Any]) -> Any:
        """What make() returned (JSON), now or when the file was written; None: no time is left."""
        if key not in self._of:
            if self._minutes and time.monotonic() - self._begin > 60 * self._minutes:
                tell(f"left out, {self._minutes:g} minutes are over: {key}")
                return None
            self._of[key] = make()
            tell(f"{key}: {self._of[key]}")
            if self._path is not None:
                self._path.write_text(json.dumps(self._of, indent=1) + "\n")
        return self._of[key]


def write(rows: list[Row], path: Path | None) -> None:
    """The file, as far as the rows are known: a run of hours that is cut short has left what it had."""
    if path is not None:
        document = {
            "machine": machine(),
            "versions": versions(),
            "rows": [row.to_dict() for row in rows],
        }
        new = path.with_name(f"{path.name}.new")
        new.write_text(json.dumps(document, indent=1) + "\n")
        new.replace(path)


def finish(rows: list[Row], path: Path | None, title: str) -> int:
    """Print the table, write the file; 1 when a target is not met."""
    table = Table(title=title)
    for column in ("case", "metric", "value", "spread", "unit", "emulated", "target", "met"):
        table.add_column(column, justify="right" if column in ("value", "spread") else "left")
    for row in rows:
        if row.metric.startswith("bytes "):
            continue  # in the file: too many for a screen
        met = BOUND_TEXT if row.bound else "" if row.met is None else "yes" if row.met else "NO"
        spread = f"{row.spread[0]:.4g} - {row.spread[1]:.4g}"
        emulated = "yes" if row.emulated else ""
        table.add_row(
            row.case, row.metric, f"{row.value:.4g}", spread, row.unit, emulated, row.target, met
        )
    Console(width=max(150, Console().width)).print(table)
    write(rows, path)
    return 1 if any(row.met is False for row in rows) else 0
