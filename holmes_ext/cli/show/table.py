"""What commands print: tables that fit the screen, and lines that are never broken.

    screen = Screen()                                    Screen(stderr=True) where standard output is for JSON
    screen.table([Column("NIC"), Column("rate", right=True), Column("PCI", drop=1)], rows, title="NICs of a0")
    screen.line("note: no usable NIC", "yellow")

COLUMNS is the width where it is set, else the terminal's; a pipe or a file gets all. In a wider table words
are wrapped where columns allow it, then columns are left out, the greatest `drop` first, and named below.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.table import Table as Grid
from rich.text import Text

#: Of a pipe or a file: no table is that wide.
UNLIMITED = 100_000
_BETWEEN = 2  # characters after a column (rich pads the last one, too)


@dataclass(frozen=True)
class Column:
    """right: flush right, for numbers; wrap: characters that it gets at least, its words wrapped (0: never
    broken); drop: 0 where it must stay, else the greatest goes first."""

    name: str
    right: bool = False
    wrap: int = 0
    drop: int = 0


class Screen:
    """Standard output (or standard error), as wide as it is."""

    def __init__(self, stderr: bool = False):
        stream = sys.stderr if stderr else sys.stdout
        sized = stream.isatty() or os.environ.get("COLUMNS", "").isdecimal()
        self.console = Console(
            stderr=stderr, width=None if sized else UNLIMITED, highlight=False, emoji=False
        )

    @property
    def width(self) -> int:
        """Characters of a line."""
        return self.console.width

    def line(self, text: object = "", style: str = "") -> None:
        """One line as it is, whatever its length: no markup, no break. A rich Text keeps its own styles."""
        self.console.print(
            text if isinstance(text, Text) else Text(_shown(str(text)), style), soft_wrap=True
        )

    def table(
        self,
        columns: Sequence[Column],
        rows: Sequence[Sequence[str]],
        title: str = "",
        styles: Sequence[str] = (),
    ) -> None:
        """`rows` of plain text, a cell for each column, without the columns in which all cells are empty;
        styles: of each row. A cell may have lines of its own."""
        kept = [i for i in range(len(columns)) if not rows or any(row[i] for row in rows)]
        least, whole = zip(
            *(_characters(column, [row[i] for row in rows]) for i, column in enumerate(columns))
        )
        left_out: list[int] = []
        while (room := self.width - sum(least[i] + _BETWEEN for i in kept)) < 0:
            last = max(kept, key=lambda i: (columns[i].drop, i))
            if not columns[last].drop:
                break
            kept.remove(last)
            left_out.append(last)
        grid = Grid(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
        widths = _share_out(max(room, 0), {i: (least[i], whole[i]) for i in kept})
        for i in kept:
            justify: JustifyMethod = "right" if columns[i].right else "left"
            grid.add_column(
                Text(columns[i].name), justify=justify, width=widths[i], overflow="fold"
            )
        for row, style in zip(rows, styles or [""] * len(rows)):
            grid.add_row(*(Text(_shown(row[i])) for i in kept), style=style)
        if title:
            self.line(title, "italic")
        # what must stay is not cut
        width, self.console.width = self.width, max(self.width, self.width - room)
        self.console.print(grid)
        self.console.width = width
        if left_out:
            names = ", ".join(columns[i].name for i in sorted(left_out))
            wide = sum(whole[i] + _BETWEEN for i in {*kept, *left_out})
            self.line(
                f"too narrow for: {names}; COLUMNS={wide}, a wider terminal or --json shows all",
                "dim",
            )


def _shown(text: str) -> str:
    """Without what a terminal would obey, or cannot show: control characters that a file held become "?"."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def _characters(column: Column, cells: Sequence[str]) -> tuple[int, int]:
    """(what the column needs at least, what it would take)"""
    whole = max(
        cell_len(line) for cell in [column.name, *cells] for line in cell.splitlines() or [""]
    )
    return min(whole, max(column.wrap, cell_len(column.name))) if column.wrap else whole, whole


def _share_out(room: int, needs: dict[int, tuple[int, int]]) -> dict[int, int]:
    """What each column needs at least, and of `room` as much as it can use, in equal shares."""
    widths: dict[int, int] = {}
    for more, i in sorted((whole - least, i) for i, (least, whole) in needs.items()):
        share = min(more, room // (len(needs) - len(widths)))
        widths[i] = needs[i][0] + share
        room -= share
    return widths
