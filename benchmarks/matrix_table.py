"""Writes the tables of docs/versions*.md from the results of benchmarks/matrix.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness import Row as Figure
from matrix_rows import CASES, ROWS, Row

ROOT = Path(__file__).resolve().parents[1]
#: Rows of the short table in docs/versions.md: common combinations, and the oldest and newest versions that
#: are supported.
FEW = (
    "NVIDIA's 25.04 container",
    "NVIDIA's 25.10 container",
    "pip install today",
    "torch 2.6.0",
    "torch 2.15.0",
    "deepspeed 0.16.9",
    "megatron-core 0.12.3",
    "megatron-core 0.20.0",
)
#: Page -> its tables: the rows of a kind, or those of FEW.
PAGES = {
    ROOT / "docs" / "versions.md": ("few",),
    ROOT / "docs" / "versions_tested.md": ("pair", "torch", "deepspeed", "megatron"),
}
#: Name of a row in the results -> its title on a page.
TITLES = {
    "oldest supported": "oldest versions that were run",
    "megatron-core 0.20.0": "megatron-core main (commit d98e8a64, unreleased, calls itself 0.20.0)",
}
COLUMNS = (
    "versions",
    "features on",
    "off",
    "tests passed",
    "failed",
    "in the lab, holmes : stock",
    "loss difference",
    "on NCCL",
    "date",
)


def table(kind: str, figures: list[Figure], about: dict[str, Any]) -> str:
    """Return a table in Markdown, with a line for each row of matrix_rows.py that has results.

    Such a row is a combination of versions that was tested, such as torch 2.6.0. Columns without any
    entry are left out. The date of a line is that of its oldest result.

    Args:
        kind: The table: "pair", "torch", "deepspeed" or "megatron" (see matrix_rows.py). Or "few":
            the rows in FEW, without their packages.
        figures: All results. Each is a single value: its `case` is the name of a row, its `metric`
            is the name of the value, such as "tests passed".
        about: Name of a row -> {"parts": part of the tests -> date on which it ran}. For example
            {"torch 2.6.0": {"parts": {"check": "2026-01-02", "lab": "2026-01-03"}}}; the parts are
            "check", "tests", "lab" and "nccl".
    """
    # Name of a row -> metric -> result.
    of_row: dict[str, dict[str, Figure]] = {}
    for figure in figures:
        of_row.setdefault(figure.case, {})[figure.metric] = figure
    lines = [COLUMNS]
    for row in ROWS.values():
        is_in_table = row.name in FEW if kind == "few" else row.kind == kind
        if not is_in_table or row.name not in of_row:
            continue
        dates = about.get(row.name, {}).get("parts", {}).values()
        name = _title(row.name) if kind == "few" else _name(row)
        lines.append((name, *_cells(of_row[row.name]), min(dates, default="-")))
    if len(lines) == 1:
        return "None has been made yet."
    columns = [column for column in zip(*lines) if set(column[1:]) != {"-"}]
    head, *rest = (f"| {' | '.join(cells)} |" for cells in zip(*columns))
    return "\n".join((head, "| --- " * len(columns) + "|", *rest))


def _name(row: Row) -> str:
    """Return the first cell of a row: its name, and for a pair also the versions that are combined.

    A pair is a combination of versions of two packages that are tested together, such as a torch
    with a DeepSpeed. All other rows have a name that says enough.
    """
    if row.kind != "pair":
        return _title(row.name)
    python = f"Python {row.python}, " if row.python and row.python not in row.name else ""
    packages = ", ".join(package.replace("==", " ") for package in (row.torch, *row.packages))
    return f"{_title(row.name)}: {python}{packages}"


def _title(name: str) -> str:
    """Return the title of a row in docs/versions.md and docs/versions_tested.md.

    It is the row's name, except for the few rows in TITLES, whose names would tell a reader too little.
    """
    return TITLES.get(name, name)


def _cells(figures: dict[str, Figure]) -> list[str]:
    """Return the cells of one line of the table, without its name and date.

    Args:
        figures: Metric -> result, of one combination of versions.
    """

    def number(metric: str) -> str:
        """Return the value of a metric as text, or "-" if it was not measured."""
        return f"{figures[metric].value:g}" if metric in figures else "-"

    ratios = []
    for case in CASES:
        ratio = figures.get(f"{case}, holmes : stock")
        if ratio is not None:
            remark = " (cores busy)" if ratio.machine_was_busy else ""
            ratios.append(f"{case} {ratio.value:.2f} x{remark}")
    differences = [
        figure.value
        for metric, figure in figures.items()
        if metric.endswith("largest loss difference")
    ]
    return [
        number("features on"),
        number("features off"),
        number("tests passed"),
        number("tests failed"),
        ", ".join(ratios) or "-",
        f"{max(differences):.1g}" if differences else "-",
        number("tests passed on NCCL"),
    ]


def disabled_features(about: dict[str, Any]) -> str:
    """Return a Markdown list of the reasons why features are off, each with its versions and features.

    Args:
        about: Combination of versions -> {"off": feature -> reason}.
    """
    of_reason: dict[str, tuple[list[str], list[str]]] = {}
    for name in ROWS:
        for feature, reason in about.get(name, {}).get("off", {}).items():
            features, rows = of_reason.setdefault(reason, ([], []))
            features += [feature] if feature not in features else []
            rows += [_title(name)] if _title(name) not in rows else []
    lines = [
        f"- {', '.join(rows)}: {', '.join(features)}: {reason}"
        for reason, (features, rows) in of_reason.items()
    ]
    return "\n".join(lines) or "Nothing."


def write_pages(figures: list[Figure], about: dict[str, Any]) -> None:
    """Write the tables of tested versions into docs/versions.md and docs/versions_tested.md.

    A table goes between the markers <!-- matrix KIND --> and <!-- /matrix -->. KIND is the argument
    of table(), such as "torch". A list of the features that are off follows <!-- matrix off -->.

    Args:
        figures: All results.
        about: Combination of versions -> {"parts": part of the tests -> date, "off": feature that
            is off -> reason}.
    """
    for path, tables in PAGES.items():
        page = path.read_text()
        texts = {kind: table(kind, figures, about) for kind in tables}
        if "<!-- matrix off -->" in page:
            texts["off"] = disabled_features(about)
        for kind, text in texts.items():
            begin, end = f"<!-- matrix {kind} -->\n", "<!-- /matrix -->"
            assert begin in page, (path, kind)
            start = page.index(begin) + len(begin)
            page = page[:start] + text + "\n" + page[page.index(end, start) :]
        path.write_text(page)
