"""Outer steps: what becomes of a fragment's anchor when the jobs' pseudo-gradients have been aggregated, and
when. Needs no torch of its own: an algorithm is a class here, and its name in ALGORITHMS.

    anchor     a      the fragment after its last outer step, alike in all jobs: float32, on the host
    local      x_j    the fragment of job j after further steps of its own inner optimizer
    pseudo-gradient   d_j = a - x_j               d: the aggregate over the jobs
    momentum   m      of the outer step: float32, on the host

    diloco    DiLoCo, arXiv 2311.08105, algorithm 1, lines 12 to 14; Nesterov's momentum as in
              torch.optim.SGD:
                  m <- mu m + d           a <- a - lr (d + mu m)
              Streaming DiLoCo, arXiv 2501.18512, algorithm 2: by fragments, d leaves `delay` steps before it
              is applied, and
                  x_j <- alpha x_j + (1 - alpha) a                         (mix=alpha)
              or, with nothing of the delay's local progress lost,
                  x_j <- a + (x_j - x_j as it was sent)                    (mix=keep)
    co2       CO2, arXiv 2401.16265, algorithm 1: d is a whole round old, so it counts less the further the
              anchor has moved since it was sent (gap >= 1), and no element of the momentum exceeds `clip`:
                  m <- clip(mu m + d / gap, -clip, clip)                   a <- a - lr m
    average   plain averaging, local SGD (arXiv 1805.09767):               a <- a - d
    muon      diloco, with the step of every matrix made orthogonal (Newton-Schulz) at the length it has:
                  m <- mu m + d           a <- a - lr |d + mu m| O(d + mu m) / |O(d + mu m)|

Every function is elementwise, but for scalars that all jobs have alike, and for matrices (muon), which ranks
that share them gather: shards do not change the result, and all jobs get the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from holmes_ext import extensions
from holmes_ext.join.orthogonal import Matrices

if TYPE_CHECKING:
    import torch


class Schedule(Protocol):
    """What an algorithm asks of the loop that it runs in (loop.OuterLoop)."""

    in_period: int
    period: int

    def capture(self) -> int:
        """Take the next fragment's pseudo-gradient; the fragment's number."""

    def submit(self, fragment: int) -> None:
        """Let go what was captured."""

    def settle(self, fragment: int) -> None:
        """Wait for the sum of what was submitted of this fragment, and apply it."""

    def submitted(self) -> list[int]:
        """Fragments that were submitted, the oldest first."""

    def new_period(self) -> None: ...


@dataclass(frozen=True)
class DiLoCo:
    """momentum: None for auto (momentum_of). clip: CO2's. mix: "keep", or the share of local weights (0 to 1)
    that a fragment keeps. delay: steps from sending to applying."""

    lr: float
    momentum: float | None
    mix: str
    delay: int
    clip: float

    #: What it takes otherwise than OuterSettings has it, where the user did not say.
    defaults: ClassVar[Mapping[str, Any]] = {}
    #: Whether steps that were made after sending stay when the sum is applied, with mix=keep.
    keeps_progress: ClassVar[bool] = True
    #: Whether the sum needs the products of pseudo-gradients and momentum (gap_of).
    needs_gap: ClassVar[bool] = False
    #: Whether a fragment's sum must be applied before the next fragment leaves.
    one_at_a_time: ClassVar[bool] = True
    #: Whether step() must be given whole matrices.
    of_matrices: ClassVar[bool] = False

    @property
    def keeps_momentum(self) -> bool:
        """Whether the outer step has a momentum at all."""
        return self.momentum != 0

    def momentum_of(self, shares: Sequence[float]) -> float:
        """mu of a round whose jobs have these shares of the tokens. momentum=auto: 1 - sqrt(sum of the
        squared shares), to one digit: 0 for one job, 0.3 for two, 0.5 for four.

        In the long run the anchor moves lr / (1 - mu) times d. Adam divides by the root of the mean squared
        gradient, and where noise is most of that, K jobs together move sqrt(K) less than one job of their
        joint batch: 1 / sqrt (sum of the squared shares), where shares differ. (docs/benchmarks/joined.md has
        what was measured.)
        """
        if self.momentum is not None:
            return self.momentum
        total = math.fsum(shares)
        return round(1 - math.sqrt(math.fsum((share / total) ** 2 for share in shares)), 1)

    def gap_of(self, momentum_square: float, gradient_square: float) -> float:
        """How much less the sum counts because it is old; 1: not at all. Both: sums of squares over the
        fragment, all ranks."""
        return 1.0

    def step(
        self,
        anchor: torch.Tensor,
        momentum: torch.Tensor | None,
        gradient: torch.Tensor,
        mu: float,
        gap: float = 1.0,
        matrices: Matrices = Matrices(),
    ) -> None:
        """The anchor's and momentum's next values, in place; `gradient` is overwritten. Flat tensors of one
        length; mu: momentum_of(); gap: gap_of(); matrices: of them, where the algorithm is `of_matrices`. A
        bfloat16 momentum is rounded after the step."""
        direction = gradient
        if momentum is not None:
            wide = momentum.float()  # itself, where it is float32
            direction = self._direction(wide, gradient, mu, gap)
            if wide is not momentum:
                momentum.copy_(wide)
        if self.of_matrices:
            matrices.orthogonalize(direction)
        self._move(anchor, direction)

    def _direction(
        self, momentum: torch.Tensor, gradient: torch.Tensor, mu: float, gap: float
    ) -> torch.Tensor:
        """Of the step, from the momentum's next value."""
        momentum.mul_(mu).add_(gradient)
        return gradient.add_(momentum, alpha=mu)

    def _move(self, anchor: torch.Tensor, direction: torch.Tensor) -> None:
        anchor.sub_(direction, alpha=self.lr)

    def mixed(
        self, local: torch.Tensor, sent: torch.Tensor | None, anchor: torch.Tensor
    ) -> torch.Tensor:
        """A fragment's next local weights. sent: `local` when its pseudo-gradient was taken, for mix=keep, or
        None."""
        if self.mix == "keep":
            return anchor if sent is None else anchor + (local - sent)
        alpha = float(self.mix)
        return anchor.lerp(local, alpha) if alpha else anchor

    def after_step(self, loop: Schedule) -> None:
        """After each step of the inner optimizer: `delay` steps from sending to applying."""
        if loop.in_period == loop.period - self.delay:
            loop.submit(loop.capture())
        if loop.in_period >= loop.period:
            for fragment in loop.submitted():
                loop.settle(fragment)
            loop.new_period()


class Average(DiLoCo):
    defaults = {"momentum": 0.0}


class Co2(DiLoCo):
    """A fragment's sum is applied when the fragment is sent the next time: one whole `every` old. What was
    trained meanwhile was trained on the weights that were sent, and is sent itself: the local weights follow
    the anchor."""

    defaults = {"lr": 0.5, "momentum": 0.0, "fragments": 1}
    keeps_progress = False
    needs_gap = True
    one_at_a_time = False

    def gap_of(self, momentum_square: float, gradient_square: float) -> float:
        """CO2's penalty: 1 + how far the anchor has moved since the pseudo-gradient was begun, in lengths of
        the pseudo-gradient.

        The anchor's last move was lr m, so no copy of an older anchor is needed. The form (a gap of 1 where
        nothing moved) is Gap-Aware's (Barkai et al., arXiv 1909.10802, section 4).
        """
        if gradient_square <= 0:
            return 1.0
        return 1 + self.lr * math.sqrt(momentum_square / gradient_square)

    def _direction(
        self, momentum: torch.Tensor, gradient: torch.Tensor, mu: float, gap: float
    ) -> torch.Tensor:
        momentum.mul_(mu).add_(gradient, alpha=1 / gap)
        if self.clip:
            momentum.clamp_(-self.clip, self.clip)
        return momentum

    def after_step(self, loop: Schedule) -> None:
        if loop.in_period >= loop.period:
            fragment = loop.capture()
            loop.settle(fragment)  # what was submitted of it the last time
            loop.submit(fragment)  # only now: the round reads the momentum
            loop.new_period()


class Muon(DiLoCo):
    """DiLoCo whose direction is made orthogonal, matrix by matrix (orthogonal.py)."""

    of_matrices = True


ALGORITHMS: dict[str, type[DiLoCo]] = {
    "diloco": DiLoCo,
    "co2": Co2,
    "average": Average,
    "muon": Muon,
}
ALGORITHMS |= extensions.objects("outer_algorithms")
