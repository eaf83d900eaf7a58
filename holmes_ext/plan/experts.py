"""Which experts tokens go to, as a router's log counts them; and the file with each expert's place.

{"version": 1, "rows": "rank", "counts": [[812, 5, ...], ...]}     tokens of rank r that go to expert e
{"version": 1, "rows": "expert", "counts": [[0, 31, ...], ...]}    tokens that go to expert
                                                                   i and to expert j
{"version": 1, "rows": "rank", "layers": {"2": [[...], ...]}}      for each MoE layer of
                                                                   its own (counted from 1)
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holmes_ext.document import Table, digest_of, load_json, save
from holmes_ext.errors import HolmesError

RANK, EXPERT = "rank", "expert"
#: Number of "all layers alike".
EVERY = 0
_ADVICE = (
    'give the token counts of the router: {"version": 1, "rows": "rank", "counts": [[...], ...]}'
)
_MADE_BY = "`holmes plan --experts TRAFFIC --experts-output FILE` writes one"


@dataclass(frozen=True)
class Counts:
    """rows: RANK or EXPERT, what a row is of; table: [ranks or experts, experts] tokens."""

    rows: str
    table: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        width = len(self.table[0]) if self.table else 0
        if not width or any(len(row) != width for row in self.table):
            raise HolmesError("its rows differ in length; each needs one number per expert")
        bad = next(
            (
                (i, j)
                for i, row in enumerate(self.table)
                for j, n in enumerate(row)
                if not (math.isfinite(n) and n >= 0)
            ),
            None,
        )
        if bad is not None:
            raise HolmesError(
                f"row {bad[0]}, expert {bad[1]}: tokens must be 0 or more, and finite"
            )
        if self.rows == EXPERT and len(self.table) != width:
            problem = f"it is not square: {len(self.table)} rows of {width} experts"
            raise HolmesError(f'{problem}; give "rows": "rank" where a row is a rank')

    @property
    def experts(self) -> int:
        return len(self.table[0])

    def folded(self, ranks: int) -> tuple[tuple[float, ...], ...]:
        """[ranks, experts]: rows of all expert-parallel groups added up by their place in the group."""
        if len(self.table) % ranks:
            raise HolmesError(
                f"its {len(self.table)} rows are not a multiple of the {ranks} expert-parallel ranks"
            )
        return tuple(tuple(map(sum, zip(*self.table[rank::ranks]))) for rank in range(ranks))


def load_traffic(path: str | Path) -> dict[int, Counts]:
    """Layer -> its counts, EVERY where all are alike; HolmesError names the file and the key."""
    top = load_json(path, _ADVICE)
    top.version(1)
    rows = top.take("rows", str)
    if rows not in (RANK, EXPERT):
        raise HolmesError(f"{top.at('rows')}: {rows!r} is neither {RANK!r} nor {EXPERT!r}")
    layers = _layers(top, "counts")
    result = {}
    for number, (where, table) in layers.items():
        try:
            result[number] = Counts(rows, _numbers(table))
        except HolmesError as error:
            raise HolmesError(f"{where}: {error}") from None
    return result


def _layers(top: Table, alone: str) -> dict[int, tuple[str, Any]]:
    """Number -> (where it stands, what stands there): key `alone` for all layers, or table "layers"."""
    if alone in top.values:
        result = {EVERY: (top.at(alone), top.take(alone, list))}
    else:
        table = top.table("layers")
        wrong = next((key for key in table.values if not key.isdecimal() or not int(key)), None)
        if wrong is not None or not table.values:
            problem = f"{wrong!r} is not a layer number, 1 or more" if wrong else "names no layer"
            raise HolmesError(
                f"{top.at('layers')}: {problem}; give {alone!r} for all layers, or layers by number"
            )
        result = {int(key): (table.at(key), table.take(key, list)) for key in table.values}
    top.done()
    return result


def _numbers(table: list[Any]) -> tuple[tuple[float, ...], ...]:
    if not all(
        isinstance(row, list) and all(type(n) in (int, float) for n in row) for row in table
    ):
        raise HolmesError("is not a list of rows of numbers")
    return tuple(tuple(map(float, row)) for row in table)


@dataclass(frozen=True)
class ExpertOrder:
    """layers: number (EVERY: all) -> the expert in each slot; slots [i n, (i + 1) n) are those of rank i."""

    ranks: int
    layers: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number, order in self.layers.items():
            if sorted(order) != list(range(len(order))) or len(order) % self.ranks:
                raise HolmesError(
                    f"layer {number}: must list each expert once, as many on each of {self.ranks} ranks"
                )

    @property
    def digest(self) -> str:
        """sha256 (hex) of what it says."""
        return digest_of([self.ranks, sorted(self.layers.items())])

    def of(self, layer: int) -> tuple[int, ...] | None:
        return self.layers.get(layer, self.layers.get(EVERY))

    def save(self, path: str | Path) -> None:
        orders: dict[str, Any] = {str(number): order for number, order in self.layers.items()}
        content = {"order": orders[str(EVERY)]} if EVERY in self.layers else {"layers": orders}
        save(
            path,
            json.dumps({"version": 1, "ranks": self.ranks, **content}) + "\n",
            "the experts' order",
        )


def load_order(path: str | Path) -> ExpertOrder:
    """What save() wrote; HolmesError names the file and the key."""
    top = load_json(path, _MADE_BY)
    top.version(1)
    ranks = top.take("ranks", int)
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
