"""Whose data can be used, by what this job has received: one that lies, or is broken, is named to the
coordinator, which leaves it out where the others find the same (coordinator/consensus.py).

    not finite               a NaN or infinity in it
    longer than claimed      its length is not the one for which the coordinator let it in
    points another way       aggregate=mean or flag (whose subspace may hold any one direction), three jobs or
                             more: it has less than a tenth of the others' agreement with each other (the
                             middle cosine); a flipped sign, noise
    sent again               its length is, to the last digit, what it,
                             or another job, sent in an earlier round
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence

import torch

#: Longer than claimed: what rounding by a codec may add.
_LONGER = 1.1
#: Aggregates in which one job of several counts for its share, whatever its direction.
_BY_DIRECTION = ("mean", "flag")
#: Of the others' agreement, what a job must have; and agreement below which nothing is said.
_SHARE_OF_AGREEMENT, _LEAST_AGREEMENT = 0.1, 0.2
#: Rounds of a fragment whose lengths are remembered.
_REMEMBERED = 32


class Screening:
    """Of one job. Data that point another way are left out where the aggregate is not robust itself."""

    def __init__(self, aggregate: str):
        self._by_direction = aggregate in _BY_DIRECTION
        self._squares: dict[int, deque[float]] = {}

    def faults(
        self,
        fragment: int,
        names: Sequence[str],
        gram: torch.Tensor,
        claimed: Mapping[str, float | None],
    ) -> dict[str, str]:
        """Of contributors, in the order of `gram` (float64 [J, J], over all elements); claimed: lengths."""
        faults: dict[str, str] = {}
        squares = gram.diagonal().tolist()
        for name, square in zip(names, squares):
            if not math.isfinite(square):
                faults[name] = "what it sent is not finite"
            elif math.sqrt(square) > _LONGER * (claimed.get(name) or 0.0) + 1e-12:
                faults[name] = (
                    f"what it sent has length {math.sqrt(square):.3g}, it claimed "
                    f"{claimed.get(name) or 0:.3g}"
                )
        faults |= self._repeated(fragment, names, squares)
        if self._by_direction:
            faults |= _astray([name for name in names if name not in faults], names, gram)
        return faults

    def remember(self, fragment: int, gram: torch.Tensor) -> None:
        """Of a round that is committed."""
        squares = gram.diagonal().tolist()
        self._squares.setdefault(fragment, deque(maxlen=_REMEMBERED * len(squares))).extend(squares)

    def _repeated(
        self, fragment: int, names: Sequence[str], squares: Sequence[float]
    ) -> dict[str, str]:
        """Where most do not (training stands still then)."""
        known = self._squares.get(fragment, ())
        again = [name for name, square in zip(names, squares) if square > 0 and square in known]
        if 2 * len(again) >= len(names):
            return {}
        return dict.fromkeys(again, "it sent again what was sent in an earlier round")


def _astray(usable: Sequence[str], names: Sequence[str], gram: torch.Tensor) -> dict[str, str]:
    if len(usable) < 3:
        return {}
    places = [names.index(name) for name in usable]
    some = gram[places][:, places]
    lengths = some.diagonal().sqrt().clamp(min=1e-300)
    cosines = some / (lengths[:, None] * lengths)
    agreement = {
        name: statistics.median_high(cosines[k, j].item() for j in range(len(usable)) if j != k)
        for k, name in enumerate(usable)
    }
    usual = statistics.median(agreement.values())
    if usual < _LEAST_AGREEMENT:
        return {}
    return {
        name: f"it points another way than the others (cosine {cosine:.2f}, theirs {usual:.2f})"
        for name, cosine in agreement.items()
        if cosine < _SHARE_OF_AGREEMENT * usual
    }
