"""Adds outer steps that only joined_losses.py can try, as further algorithms of --holmes-outer.

docs/benchmarks/joined.md has their results.

    adamw    AdamW of the pseudo-gradients (FedAdam, arXiv 2003.00295), bias-corrected and without decay.
             The settings lr and momentum are its learning rate and its first beta.
    warm     DiLoCo with a momentum that grows from 0 to its setting in the first rounds of a
             fragment. The setting clip is the number of these rounds: DiLoCo does not use it, and
             this file cannot add a setting to --holmes-outer.
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
            momentum: First moment of the fragment. It is updated in place.
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
        first_bias = 1 - mu ** self.rounds[address]
        second_bias = 1 - SECOND_BETA ** self.rounds[address]
        root = (square / second_bias).sqrt_().add_(EPSILON)
        # anchor - lr * (momentum / first_bias) / (sqrt(square / second_bias) + EPSILON)
        anchor.addcdiv_(momentum, root, value=-self.lr / first_bias)


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

        The momentum grows linearly from 0 to mu in the first rounds of a fragment. The number of
        these warm-up rounds is the setting `clip` (`self.clip`). Its name says something else: this
        experiment cannot add a setting, and DiLoCo does not use `clip`.

        Args:
            momentum: Momentum of the fragment. It is updated in place.
            gradient: Mean pseudo-gradient of the jobs.
            mu: Momentum after the warm-up.
            gap: Divisor for an outdated pseudo-gradient; 1: it counts in full.
            matrices: Weight matrices in the fragment. DiLoCo treats all weights alike.
        """
        address = anchor.data_ptr()  # identifies the fragment
        self.rounds[address] += 1
        # `clip` is used for the number of rounds here, not for clipping (see above).
        warm_up_rounds = max(1.0, self.clip)
        share = min(1.0, self.rounds[address] / warm_up_rounds)
        super().step(anchor, momentum, gradient, mu=mu * share, gap=gap, matrices=matrices)


ALGORITHMS |= {"adamw": OuterAdamW, "warm": Warm}
