"""Reads README's table "your job": the jobs that holmes promises to run, and what each of them adds."""

from __future__ import annotations

import re

from integration_tests.jobs import ROOT

HEADING = "| your job | add |"
LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")


def rows() -> tuple[str, ...]:
    """Return the first cell of each row of the table, without links and code marks."""
    _, table = (ROOT / "README.md").read_text().split(HEADING + "\n", maxsplit=1)
    lines = table.split("\n\n", maxsplit=1)[0].splitlines()
    cells = [line.split("|")[1] for line in lines[1:]]  # lines[0] separates the heading
    return tuple(LINK.sub(r"\1", cell).replace("`", "").strip() for cell in cells)


def parts(row: str) -> tuple[str, ...]:
    """Return the kinds of jobs that a row names: "DDP, torch's pipelining" has two."""
    return tuple(row.rpartition(": ")[2].split(", "))


def row_of(part: str) -> str:
    """Return the row that names this kind of job.

    Raises:
        LookupError: README does not promise it, or promises it twice.
    """
    found = [row for row in rows() if part in parts(row)]
    if len(found) != 1:
        raise LookupError(f"README's table names {part!r} in {len(found)} rows")
    return found[0]
