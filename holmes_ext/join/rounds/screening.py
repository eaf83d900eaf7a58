"""Plausibility checks of the pseudo-gradients that a job received in a round.

A job that lies or is broken is reported to the coordinator. The coordinator leaves it out if the other jobs
report the same (coordinator/consensus.py). Pseudo-gradients are unusable if they

    are not finite              contain a NaN or an infinity
    are longer than claimed     their length exceeds the norm that the job reported when it was ready
    point in another direction  their typical cosine with the others' is less than a tenth of the usual cosine
                                (a flipped sign, noise). Only for aggregate=mean or flag: they are not robust
                                against single directions, and three jobs or more
    are repeated                their length equals, to the last digit, a length of an earlier round
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence

import torch

#: How much a codec's rounding may lengthen a pseudo-gradient.
_LONGER = 1.1
#: Length that is always accepted, for pseudo-gradients of zeros.
_LENGTH_TOLERANCE = 1e-12
#: Aggregates in which each job counts by its share, whatever its direction.
_BY_DIRECTION = ("mean", "flag")
#: Least agreement of a job with the others, as a share of the usual agreement.
_SHARE_OF_AGREEMENT = 0.1
#: Usual agreement (a cosine) below which directions are mostly noise, and are not compared.
_LEAST_AGREEMENT = 0.2
#: Jobs that are needed to find out which of them points in another direction.
_LEAST_JOBS = 3
#: Rounds of a fragment whose lengths are remembered.
_REMEMBERED = 32
#: Least divisor, far below every length.
_TINY = 1e-300


class Screening:
    """Checks by which this job finds unusable pseudo-gradients among those that it has received.

    It remembers the lengths of the pseudo-gradients of recent rounds, to find data that is sent
    again.

    Args:
        aggregate: How pseudo-gradients are aggregated. Directions are checked only for "mean" and
            "flag": there, a single job in a false direction has its full effect.
    """

    def __init__(self, aggregate: str):
        self._checks_directions = aggregate in _BY_DIRECTION
        self._squares: dict[int, deque[float]] = {}  # fragment -> squared lengths in recent rounds

    def faults(
        self,
        fragment: int,
        names: Sequence[str],
        gram: torch.Tensor,
        claimed: Mapping[str, float | None],
    ) -> dict[str, str]:
        """Return the jobs whose pseudo-gradients are unusable, with the reasons.

        Data is unusable if it is not finite, longer than reported, or exactly as long as in an
        earlier round. With some aggregates, a direction unlike that of the other jobs makes it
        unusable, too.

        Args:
            fragment: Index of the fragment, a part of the model.
            names: Jobs, in the order of `gram`.
            gram: Inner products of the pseudo-gradients over all elements, float64 [J, J].
            claimed: Job -> norm that it reported when it was ready; None: not finite.

        Returns:
            Job -> reason; empty: all are usable.
        """
        faults: dict[str, str] = {}
        squares = gram.diagonal().tolist()
        for name, square in zip(names, squares):
            if not math.isfinite(square):
                faults[name] = "what it sent is not finite"
                continue
            length = math.sqrt(square)
            # The codec's rounding may lengthen the pseudo-gradient a little (_LONGER).
            claimed_length = claimed.get(name) or 0.0
            if length > _LONGER * claimed_length + _LENGTH_TOLERANCE:
                faults[name] = (
                    f"what it sent has length {length:.3g}, it claimed {claimed_length:.3g}"
                )
        faults |= self._jobs_with_repeated_data(fragment, names, squares)
        if self._checks_directions:
            usable = [name for name in names if name not in faults]
            faults |= _misdirected_jobs(usable, names, gram)
        return faults

    def remember(self, fragment: int, gram: torch.Tensor) -> None:
        """Remember the lengths of the pseudo-gradients in a committed round.

        Args:
            fragment: Index of the fragment, a part of the model.
            gram: Inner products of the pseudo-gradients; the squared lengths are on its diagonal.
        """
        squares = gram.diagonal().tolist()
        self._squares.setdefault(fragment, deque(maxlen=_REMEMBERED * len(squares))).extend(squares)

    def _jobs_with_repeated_data(
        self, fragment: int, names: Sequence[str], squares: Sequence[float]
    ) -> dict[str, str]:
        """Return the jobs whose pseudo-gradient is exactly as long as a pseudo-gradient of an earlier round.

        Such a job has probably sent old data. But if this is true of at least half of the jobs, their
        training stands still, and no job is returned.

        Args:
            fragment: Index of the fragment, a part of the model.
            names: All jobs.
            squares: Squared norm of each job's pseudo-gradient, in the order of `names`.

        Returns:
            Job -> reason; empty: none.
        """
        known_squares = self._squares.get(fragment, ())
        repeated = [
            name for name, square in zip(names, squares) if square > 0 and square in known_squares
        ]
        if 2 * len(repeated) >= len(names):
            return {}
        return dict.fromkeys(repeated, "it sent again what was sent in an earlier round")


def _misdirected_jobs(
    usable: Sequence[str], names: Sequence[str], gram: torch.Tensor
) -> dict[str, str]:
    """Return the jobs whose pseudo-gradients point in another direction than the others'.

    A job's agreement is its median cosine with the others. The usual agreement is the median over the
    jobs. A job is misdirected if its agreement is below a tenth of the usual agreement. If the usual
    agreement is below 0.2 (noise), no job is misdirected.

    Args:
        usable: Jobs to compare.
        names: All jobs, in the order of `gram`.
        gram: Inner products of the pseudo-gradients, float64 [J, J].

    Returns:
        Misdirected job -> reason; empty: none.
    """
    if len(usable) < _LEAST_JOBS:
        return {}
    indices = [names.index(name) for name in usable]
    usable_gram = gram[indices][:, indices]
    lengths = usable_gram.diagonal().sqrt().clamp(min=_TINY)
    cosines = usable_gram / (lengths[:, None] * lengths)
    agreement: dict[str, float] = {}  # job -> median cosine with the others
    for row, name in enumerate(usable):
        cosines_with_others = [
            cosines[row, column].item() for column in range(len(usable)) if column != row
        ]
        agreement[name] = statistics.median_high(cosines_with_others)
    usual = statistics.median(agreement.values())
    if usual < _LEAST_AGREEMENT:  # directions are mostly noise
        return {}
    return {
        name: f"it points another way than the others (cosine {cosine:.2f}, theirs {usual:.2f})"
        for name, cosine in agreement.items()
        if cosine < _SHARE_OF_AGREEMENT * usual
    }
