"""Layers of stages for tests of plans."""

from __future__ import annotations

import random
from collections.abc import Iterator


def some_splits(
    pick: random.Random, layers: int, stages: int, drawn: int
) -> Iterator[tuple[int, ...]]:
    """Yield the even split of layers into stages, and then `drawn` random splits."""
    yield tuple(layers // stages + (stage < layers % stages) for stage in range(stages))
    for _ in range(drawn):
        borders = sorted(pick.sample(range(1, layers), stages - 1))
        yield tuple(high - low for low, high in zip((0, *borders), (*borders, layers)))
