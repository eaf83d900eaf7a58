"""Adds outer steps that only joined_losses.py can try, as further algorithms of --holmes-outer.

docs/benchmarks/joined.md has their results.

    adamw    AdamW of the pseudo-gradients (FedAdam, arXiv 2003.00295), bias-corrected and without decay.
             The momentum is its first beta:     a <- a - lr m^ / (sqrt(v^) + EPSILON)
    warm     DiLoCo with a momentum that grows from 0 during the first `clip` rounds of a fragment
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch

from holmes_ext.join.algorithms import ALGORITHMS, DiLoCo
from holmes_ext.join.orthogonal import Matrices

EPSILON, SECOND_BETA = 1e-3, 0.95


@dataclass(frozen=True)
class OuterAdamW(DiLoCo):
    """AdamW of the pseudo-gradients, as an outer step."""

    # Keys are the addresses of the fragments' anchor weights.
    squares: dict[int, torch.Tensor] = field(default_factory=dict)  # mean squares of the gradients
    rounds: Counter[int] = field(default_factory=Counter)

    def step(
        self,
        anchor: torch.Tensor,
        momentum: torch.Tensor | None,
        gradient: torch.Tensor,
        mu: float,
        gap: float = 1.0,
        matrices: Matrices = Matrices(),
    ) -> None:
        """Update the anchor weights (those after the last outer step) of a fragment in place.

        Args:
            momentum: First moment of the fragment, which is updated in place.
            gradient: Mean pseudo-gradient of the jobs.
            mu: First beta of AdamW.
            gap, matrices: Not used.
        """
        assert momentum is not None, "adamw needs a momentum"
        address = anchor.data_ptr()  # identifies the fragment
        self.rounds[address] += 1
        square = self.squares.setdefault(address, torch.zeros_like(anchor))
        square.mul_(SECOND_BETA).addcmul_(gradient, gradient, value=1 - SECOND_BETA)
        momentum.lerp_(gradient, 1 - mu)
        # Both moments begin at 0, and are corrected for that bias.
        root = (square / (1 - SECOND_BETA ** self.rounds[address])).sqrt_().add_(EPSILON)
        anchor.addcdiv_(momentum, root, value=-self.lr / (1 - mu ** self.rounds[address]))


@dataclass(frozen=True)
class Warm(DiLoCo):
    """DiLoCo with a momentum that grows during the first rounds."""

    rounds: Counter[int] = field(default_factory=Counter)

    def step(
        self,
        anchor: torch.Tensor,
        momentum: torch.Tensor | None,
        gradient: torch.Tensor,
        mu: float,
        gap: float = 1.0,
        matrices: Matrices = Matrices(),
    ) -> None:
        """Update the anchor weights (those after the last outer step) of a fragment in place.

        The arguments are those of DiLoCo.step(). The momentum grows linearly from 0 to mu. The
        number of rounds that this takes is the setting `clip`: DiLoCo has no other use for it, and
        an algorithm of this file cannot add a setting to --holmes-outer.
        """
        address = anchor.data_ptr()  # identifies the fragment
        self.rounds[address] += 1
        warm_up_rounds = max(1.0, self.clip)
        share = min(1.0, self.rounds[address] / warm_up_rounds)
        super().step(anchor, momentum, gradient, mu=mu * share, gap=gap, matrices=matrices)


ALGORITHMS |= {"adamw": OuterAdamW, "warm": Warm}
