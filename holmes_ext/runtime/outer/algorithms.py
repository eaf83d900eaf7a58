"""Outer steps: what becomes of a fragment's anchor when the jobs' pseudo-gradients have been aggregated.

    anchor     a      the fragment as it was after its last outer step, the same in every job: float32, on the host
    local      x_j    the fragment of job j after further steps of its own inner optimizer
    pseudo-gradient   d_j = a - x_j               d: the aggregate over the jobs
    momentum   m      of the outer step: float32, on the host

    diloco    DiLoCo, arXiv 2311.08105, algorithm 1, lines 12 to 14; Nesterov's momentum as in torch.optim.SGD:
                  m <- mu m + d           a <- a - lr (d + mu m)
              Streaming DiLoCo, arXiv 2501.18512, algorithm 2: by fragments, d leaves `delay` steps before it is
              applied, and
                  x_j <- alpha x_j + (1 - alpha) a                         (mix=alpha)
              or, with nothing of the delay's local progress lost,
                  x_j <- a + (x_j - x_j as it was sent)                    (mix=keep)
    co2       CO2, arXiv 2401.16265, algorithm 1: d is a whole round old, so it counts less the further the anchor has
    moved since
              it was sent (gap >= 1), and no element of the momentum exceeds `clip`:
                  m <- clip(mu m + d / gap, -clip, clip)                   a <- a - lr m
              mu of both: momentum_of()
    average   plain averaging, local SGD (arXiv 1805.09767):               a <- a - d

Every function is elementwise, but for scalars that all jobs have alike: shards do not change the result, and all jobs
get the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from holmes_ext.runtime.outer.settings import OuterSettings


def outer_step(
    settings: OuterSettings,
    anchor: torch.Tensor,
    momentum: torch.Tensor | None,
    gradient: torch.Tensor,
    mu: float,
    gap: float = 1.0,
) -> None:
    """The anchor's and the momentum's next values, in place; `gradient` is overwritten. Flat tensors of one length;
    mu: momentum_of(); gap: co2's alone.

    momentum may have fewer bits than the anchor (bfloat16): then it is rounded after the step has been taken with all
    of them.
    """
    if momentum is None:
        anchor.sub_(gradient, alpha=settings.lr)
        return
    wide = momentum.float() if momentum.dtype != torch.float32 else momentum
    if settings.algorithm == "co2":
        wide.mul_(mu).add_(gradient, alpha=1 / gap)
        if settings.clip:
            wide.clamp_(-settings.clip, settings.clip)
        anchor.sub_(wide, alpha=settings.lr)
    else:
        wide.mul_(mu).add_(gradient)
        anchor.sub_(gradient.add_(wide, alpha=mu), alpha=settings.lr)
    if wide is not momentum:
        momentum.copy_(wide)


def keeps_momentum(settings: OuterSettings) -> bool:
    """Whether the outer step has a momentum at all."""
    return settings.momentum != 0


def momentum_of(settings: OuterSettings, shares: Sequence[float]) -> float:
    """mu of a round whose jobs have these shares of the tokens. momentum=auto: 1 - sqrt(sum of the squared shares), to
    one digit: 0 for one job, 0.3 for two, 0.5 for four.

    In the long run the anchor moves lr / (1 - mu) times d. Adam divides by the root of the mean squared gradient, and
    where noise is most of that, K jobs together move sqrt(K) less than one job of their joint batch: 1 / sqrt(sum of
    the squared shares), where shares differ. (docs/benchmarks/joined.md has what was measured.)
    """
    if settings.momentum is not None:
        return settings.momentum
    total = math.fsum(shares)
    return round(1 - math.sqrt(math.fsum((share / total) ** 2 for share in shares)), 1)


def staleness_gap(settings: OuterSettings, momentum_square: float, gradient_square: float) -> float:
    """CO2's penalty: 1 + how far the anchor has moved since the pseudo-gradient was begun, in lengths of the
    pseudo-gradient.

    The anchor's last move was lr m, so no copy of an older anchor is needed. Both arguments: sums of squares over the
    whole fragment, all ranks of a job. The form (a gap of 1 where nothing moved) is Gap-Aware's (Barkai et al., arXiv
    1909.10802, section 4).
    """
    if gradient_square <= 0:
        return 1.0
    return 1 + settings.lr * math.sqrt(momentum_square / gradient_square)


def mixed(
    settings: OuterSettings, local: torch.Tensor, sent: torch.Tensor | None, anchor: torch.Tensor
) -> torch.Tensor:
    """A fragment's next local weights. sent: what `local` was when its pseudo-gradient was taken, for mix=keep; None:
    nothing since then counts."""
    if settings.mix == "keep":
        return anchor if sent is None else anchor + (local - sent)
    alpha = float(settings.mix)
    return torch.lerp(anchor, local, alpha) if alpha else anchor
