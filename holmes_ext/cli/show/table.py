"""Output of the commands: tables that fit the terminal, and lines that are never broken.

    screen = Screen()    # Screen(stderr=True) if standard output is for JSON
    columns = [Column("NIC"), Column("rate", right=True), Column("PCI", drop=1)]
    screen.table(columns, rows, title="NICs of a0")
    screen.line("note: no usable NIC", "yellow")

The width is that of the variable COLUMNS, or else of the terminal. A pipe or a file has no limit. A
table that is too wide is changed in two steps: words are wrapped in columns that allow it, then
columns are left out, the largest `drop` first. A line below the table names them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.table import Table as Grid
from rich.text import Text

#: Width of a pipe or a file: no table is as wide.
UNLIMITED = 100_000
#: Characters between two columns (rich adds them after the last column, too).
_GAP = 2


@dataclass(frozen=True)
class Column:
    """Column of a printed table: its title, and how it becomes narrower if the table is too wide."""

    name: str
    right: bool = False  # align right, for numbers
    wrap: int = 0  # smallest width after wrapping words, in characters; 0: never wrapped
    drop: int = 0  # the column with the largest value is left out first; 0: always shown


class _Width(NamedTuple):
    """Width of a column in characters."""

    least: int  # with words wrapped
    full: int  # without any wrapping


class Screen:
    """Standard output or standard error, with its width."""

    def __init__(self, stderr: bool = False):
        """Open standard output, or standard error if `stderr` is true."""
        stream = sys.stderr if stderr else sys.stdout
        has_width = stream.isatty() or os.environ.get("COLUMNS", "").isdecimal()
        self.console = Console(
            stderr=stderr, width=None if has_width else UNLIMITED, highlight=False, emoji=False
        )

    @property
    def width(self) -> int:
        """Width of a line in characters."""
        return self.console.width

    def line(self, text: object = "", style: str = "") -> None:
        """Print one line without markup and without a line break, whatever its length.

        Args:
            text: The line. A rich Text keeps its own styles.
            style: Style of rich, such as "yellow".
        """
        if not isinstance(text, Text):
            text = Text(_printable(str(text)), style)
        self.console.print(text, soft_wrap=True)

    def table(
        self,
        columns: Sequence[Column],
        rows: Sequence[Sequence[str]],
        title: str = "",
        styles: Sequence[str] = (),
    ) -> None:
        """Print a table. Columns whose cells are all empty are left out.

        Args:
            columns: All columns.
            rows: The rows, each with a text for every column. A cell may have several lines.
            title: Line above the table.
            styles: Style of rich for each row.
        """
        widths = []
        kept = []  # indices of the columns that are shown
        for index, column in enumerate(columns):
            cells = [row[index] for row in rows]
            widths.append(_width_of(column, cells))
            if any(cells) or not rows:
                kept.append(index)
        left_out: list[int] = []
        spare = self._spare(widths, kept)
        while spare < 0:
            last = max(kept, key=lambda index: (columns[index].drop, index))
            if not columns[last].drop:
                break
            kept.remove(last)
            left_out.append(last)
            spare = self._spare(widths, kept)
        final_widths = _final_widths(max(spare, 0), {index: widths[index] for index in kept})
        grid = Grid(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
        for index in kept:
            column = columns[index]
            justify: JustifyMethod = "right" if column.right else "left"
            grid.add_column(
                Text(column.name), justify=justify, width=final_widths[index], overflow="fold"
            )
        for row, style in zip(rows, styles or [""] * len(rows)):
            grid.add_row(*(Text(_printable(row[index])) for index in kept), style=style)
        if title:
            self.line(title, "italic")
        self._print_whole(grid, missing=max(-spare, 0))
        if left_out:
            names = ", ".join(columns[index].name for index in sorted(left_out))
            needed = sum(widths[index].full + _GAP for index in {*kept, *left_out})
            self.line(
                f"too narrow for: {names}; COLUMNS={needed}, a wider terminal or --json shows all",
                "dim",
            )

    def _spare(self, widths: Sequence[_Width], kept: Sequence[int]) -> int:
        """Return how many characters of a line a table leaves if all words are wrapped.

        The number is negative if the table is too wide.

        Args:
            widths: Width of each column.
            kept: Indices of the columns that are shown.
        """
        return self.width - sum(widths[index].least + _GAP for index in kept)

    def _print_whole(self, grid: Grid, missing: int) -> None:
        """Print a table without cutting it, even if it is wider than the screen.

        Its lines then extend beyond the screen; the terminal wraps them.

        Args:
            missing: Characters by which the table is wider than the screen, 0 or more.
        """
        width = self.width
        self.console.width = width + missing
        self.console.print(grid)
        self.console.width = width


def _printable(text: str) -> str:
    """Return a text with "?" in place of characters that control the terminal."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)


def _width_of(column: Column, cells: Sequence[str]) -> _Width:
    """Return the width of a column with its cells.

    Args:
        column: The column.
        cells: Texts of the column in all rows.
    """
    lines = [line for text in (column.name, *cells) for line in text.splitlines()]
    full = max((cell_len(line) for line in lines), default=0)
    if not column.wrap:
        return _Width(least=full, full=full)
    least = min(full, max(column.wrap, cell_len(column.name)))
    return _Width(least=least, full=full)


def _final_widths(spare: int, columns: dict[int, _Width]) -> dict[int, int]:
    """Return the final width of each column.

    Each column gets its least width, and an equal share of the spare characters. A column gets no
    more than it needs. Columns that need little come first, so that the others share the rest.

    Args:
        spare: Characters that the least widths leave.
        columns: Index of a column -> its width.
    """
    widths: dict[int, int] = {}
    remaining = spare
    for index, width in sorted(
        columns.items(), key=lambda item: (item[1].full - item[1].least, item[0])
    ):
        columns_left = len(columns) - len(widths)
        share = remaining // columns_left
        added = min(width.full - width.least, share)
        widths[index] = width.least + added
        remaining -= added
    return widths
