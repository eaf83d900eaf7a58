"""Outer steps that joined_losses.py can try beside holmes's own: --holmes-outer knows them in that file
alone. (docs/benchmarks/joined.md says what has been measured of them.)

    adamw    AdamW of the pseudo-gradients (FedAdam, arXiv 2003.00295), bias-corrected, no decay;
             momentum is its first beta:     a <- a - lr m^ / (sqrt(v^) + EPSILON)
    muon     Nesterov's step of each matrix made orthogonal (Muon's Newton-Schulz), with the step's own
             length; everything else as diloco. Needs fragments=1
    warm     diloco, whose momentum grows from 0 over the first `clip` rounds of a fragment
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from holmes_ext.runtime.outer.algorithms import ALGORITHMS, DiLoCo

EPSILON, SECOND_BETA = 1e-3, 0.95


@dataclass(frozen=True)
class OuterAdamW(DiLoCo):
    """squares, rounds: of each fragment, by where its anchor lies."""

    squares: dict[int, torch.Tensor] = field(default_factory=dict)
    rounds: Counter[int] = field(default_factory=Counter)

    def step(self, anchor: torch.Tensor, momentum: torch.Tensor | None, gradient: torch.Tensor, mu: float,
             gap: float = 1.0) -> None:
        assert momentum is not None, "adamw needs a momentum"
        which = anchor.data_ptr()
        self.rounds[which] += 1
        square = self.squares.setdefault(which, torch.zeros_like(anchor))
        square.mul_(SECOND_BETA).addcmul_(gradient, gradient, value=1 - SECOND_BETA)
        momentum.lerp_(gradient, 1 - mu)
        root = (square / (1 - SECOND_BETA ** self.rounds[which])).sqrt_().add_(EPSILON)
        anchor.addcdiv_(momentum, root, value=-self.lr / (1 - mu ** self.rounds[which]))


@dataclass(frozen=True)
class OuterMuon(DiLoCo):
    #: Of the model's parameters, in their order.
    shapes: ClassVar[list[torch.Size]] = []

    def step(self, anchor: torch.Tensor, momentum: torch.Tensor | None, gradient: torch.Tensor, mu: float,
             gap: float = 1.0) -> None:
        assert momentum is not None, "muon needs a momentum"
        momentum.mul_(mu).add_(gradient)
        gradient.add_(momentum, alpha=mu)
        parts = gradient.split([math.prod(shape) for shape in self.shapes])
        for part, shape in list(zip(parts, self.shapes))[2:]:  # after both embeddings
            if len(shape) == 2:
                square = orthogonal(part.view(shape)).flatten()
                part.copy_(square * (part.norm() / square.norm().clamp_min(1e-12)))
        anchor.sub_(gradient, alpha=self.lr)


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """About the nearest matrix with orthogonal rows or columns: Newton-Schulz in five steps."""
    x = matrix / matrix.norm().clamp_min(1e-12)
    x = x.T if len(x) > len(x.T) else x
    for _ in range(5):
        product = x @ x.T
        x = 3.4445 * x + (-4.7750 * product + 2.0315 * product @ product) @ x
    return x.T if len(matrix) > len(matrix.T) else x


@dataclass(frozen=True)
class Warm(DiLoCo):
    rounds: Counter[int] = field(default_factory=Counter)

    def step(self, anchor: torch.Tensor, momentum: torch.Tensor | None, gradient: torch.Tensor, mu: float,
             gap: float = 1.0) -> None:
        self.rounds[anchor.data_ptr()] += 1
        share = min(1.0, self.rounds[anchor.data_ptr()] / max(1.0, self.clip))
        super().step(anchor, momentum, gradient, mu * share, gap)


ALGORITHMS |= {"adamw": OuterAdamW, "muon": OuterMuon, "warm": Warm}
