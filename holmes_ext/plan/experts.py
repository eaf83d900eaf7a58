"""Files about a model's experts (mixture of experts): tokens that a router sent to each, and their ranks.

The first file has the token counts of a router's log, in any of these forms:

    {"version": 1, "rows": "rank", "counts": [[812, 5, ...], ...]}
        Row r, column e: tokens of rank r that go to expert e.
    {"version": 1, "rows": "expert", "counts": [[0, 31, ...], ...]}
        Row i, column j: tokens that go to both experts i and j. Experts that share many tokens are best
        placed on the same rank or node.
    {"version": 1, "rows": "rank", "layers": {"2": [[...], ...]}}
        A table for each MoE layer (counted from 1).

The second file has the order of the experts on the ranks (ExpertOrder).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holmes_ext.document import Table, digest_of, load_json
from holmes_ext.errors import HolmesError
from holmes_ext.files import save

RANK, EXPERT = "rank", "expert"
#: Layer number that stands for all layers.
ALL_LAYERS = 0
_ADVICE = (
    'give the token counts of the router: {"version": 1, "rows": "rank", "counts": [[...], ...]}'
)
#: Advice at the end of error messages.
_MADE_BY = "`holmes plan --experts TRAFFIC --experts-output FILE` writes one"


@dataclass(frozen=True)
class Counts:
    """Table of the tokens that go to each expert."""

    rows: str  # RANK or EXPERT: the meaning of a row
    #: [ranks or experts, experts] tokens.
    table: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        """Raise HolmesError if the table of token counts has a bad shape or a bad number.

        All rows need a number for each expert. If the rows stand for experts too,
        the table must be square. Numbers must be 0 or more, and finite.
        """
        width = len(self.table[0]) if self.table else 0
        if not width or any(len(row) != width for row in self.table):
            raise HolmesError("its rows differ in length; each needs one number per expert")
        for row_number, row in enumerate(self.table):
            for expert, tokens in enumerate(row):
                if not (math.isfinite(tokens) and tokens >= 0):
                    raise HolmesError(
                        f"row {row_number}, expert {expert}: tokens must be 0 or more, and finite"
                    )
        if self.rows == EXPERT and len(self.table) != width:
            problem = f"it is not square: {len(self.table)} rows of {width} experts"
            raise HolmesError(f'{problem}; give "rows": "rank" where a row is a rank')

    @property
    def experts(self) -> int:
        """Return the number of experts, which is the number of columns of the table."""
        return len(self.table[0])

    def folded(self, ranks: int) -> tuple[tuple[float, ...], ...]:
        """Return the tokens of all expert-parallel groups added up, as a table [ranks, experts].

        Args:
            ranks: Number of ranks of an expert-parallel group. Row r of the result is the sum of the rows
                r, r + ranks, r + 2 ranks, ... of this table.

        Raises:
            HolmesError: The number of rows is not a multiple of `ranks`.
        """
        if len(self.table) % ranks:
            raise HolmesError(
                f"its {len(self.table)} rows are not a multiple of the {ranks} expert-parallel ranks"
            )
        groups_rows = [
            self.table[rank::ranks] for rank in range(ranks)
        ]  # rows of each rank in its group
        return tuple(tuple(map(sum, zip(*rows))) for rows in groups_rows)


def load_traffic(path: str | Path) -> dict[int, Counts]:
    """Read the token counts of a router.

    Returns:
        Number of the layer -> its counts; ALL_LAYERS if one table stands for all layers.

    Raises:
        HolmesError: The file cannot be read, or a key has a bad value.
    """
    top = load_json(path, _ADVICE)
    top.version(1)
    rows = top.take("rows", str)
    if rows not in (RANK, EXPERT):
        raise HolmesError(f"{top.at('rows')}: {rows!r} is neither {RANK!r} nor {EXPERT!r}")
    layers = _layers(top, "counts")
    result = {}
    for number, (where, table) in layers.items():  # where: name of the table, for messages
        try:
            result[number] = Counts(rows, _numbers(table))
        except HolmesError as error:
            raise HolmesError(f"{where}: {error}") from None
    return result


def _layers(top: Table, alone: str) -> dict[int, tuple[str, Any]]:
    """Return the lists of a JSON file by layer; a single list may stand for all layers.

    For alone="counts", {"counts": [1, 2]} has a list for all layers, and {"layers": {"3": [1, 2]}} has
    a list for layer 3. The results are {ALL_LAYERS: (name, [1, 2])} and {3: (name, [1, 2])}.

    Args:
        top: Content of the file.
        alone: Key of the list for all layers.

    Returns:
        Number of the layer, or ALL_LAYERS -> (name of the list in error messages, list).

    Raises:
        HolmesError: A layer number is bad, or the file names no layer.
    """
    if alone in top.values:
        result = {ALL_LAYERS: (top.at(alone), top.take(alone, list))}
    else:
        table = top.table("layers")
        way_out = f"give {alone!r} for all layers, or layers by number"
        if not table.values:
            raise HolmesError(f"{top.at('layers')}: names no layer; {way_out}")
        for key in table.values:
            if not key.isdecimal() or int(key) == 0:
                problem = f"{key!r} is not a layer number, 1 or more" if key else "names no layer"
                raise HolmesError(f"{top.at('layers')}: {problem}; {way_out}")
        result = {int(key): (table.at(key), table.take(key, list)) for key in table.values}
    top.done()
    return result


def _numbers(table: list[Any]) -> tuple[tuple[float, ...], ...]:
    """Convert a table from JSON into floats; raise HolmesError if it is not a list of rows of numbers."""
    for row in table:
        if not isinstance(row, list) or any(type(number) not in (int, float) for number in row):
            raise HolmesError("is not a list of rows of numbers")
    return tuple(tuple(map(float, row)) for row in table)


@dataclass(frozen=True)
class ExpertOrder:
    """Experts that each rank of an expert-parallel group holds, by layer."""

    ranks: int
    #: Number of the layer (ALL_LAYERS: all) -> experts in the order of the ranks, equally many on each.
    layers: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the order of the experts in every layer.

        Raises:
            HolmesError: A layer lists an expert twice or not at all, or the experts cannot be divided
                equally among the ranks.
        """
        for number, order in self.layers.items():
            if sorted(order) != list(range(len(order))) or len(order) % self.ranks:
                raise HolmesError(
                    f"layer {number}: must list each expert once, as many on each of {self.ranks} ranks"
                )

    @property
    def digest(self) -> str:
        """Return a SHA-256 digest (hex) of the order of the experts, for comparison between ranks."""
        return digest_of([self.ranks, sorted(self.layers.items())])

    def of(self, layer: int) -> tuple[int, ...] | None:
        """Return the experts of an MoE layer in the order of the ranks; None: the layer is not listed."""
        return self.layers.get(layer, self.layers.get(ALL_LAYERS))

    def save(self, path: str | Path) -> None:
        """Write the order of the experts to a file, completely or not at all."""
        content: dict[str, Any] = {"version": 1, "ranks": self.ranks}
        if ALL_LAYERS in self.layers:
            content["order"] = self.layers[ALL_LAYERS]
        else:
            content["layers"] = {str(number): order for number, order in self.layers.items()}
        save(path, json.dumps(content) + "\n", "the experts' order")


def load_order(path: str | Path) -> ExpertOrder:
    """Read a file that ExpertOrder.save() wrote.

    Raises:
        HolmesError: The file cannot be read, or a key has a bad value.
    """
    top = load_json(path, _MADE_BY)
    top.version(1)
    ranks = top.take("ranks", int)

    # Number of the layer -> its experts in the order of the ranks. ALL_LAYERS (0) is the key if the file
    # has a single order for all layers. The names that _layers() also returns are not needed here.
    orders: dict[int, Sequence[Any]] = {
        number: order for number, (_, order) in _layers(top, "order").items()
    }
    if ranks < 1 or not all(type(expert) is int for order in orders.values() for expert in order):
        raise HolmesError(
            f"{top.source}: key 'ranks' must be 1 or more, experts whole numbers; {_MADE_BY}"
        )
    try:
        return ExpertOrder(ranks, {number: tuple(order) for number, order in orders.items()})
    except HolmesError as error:
        raise HolmesError(f"{top.source}: {error}; {_MADE_BY}") from None
