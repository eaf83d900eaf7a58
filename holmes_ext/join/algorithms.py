"""Outer algorithms: when pseudo-gradients are exchanged, and the outer step that applies their aggregate.

An algorithm is a class in this module, registered by its name in ALGORITHMS (setting `algorithm`; with
algorithm=auto, algorithm_for() chooses one by the inner optimizer). The
model's weights are divided into fragments; each round exchanges one fragment.

    anchor             a      fragment after its last outer step, equal in all jobs: float32, on the host
    local weights      x_j    fragment of job j after further inner steps
    pseudo-gradient    d_j = a - x_j               d: its aggregate over the jobs
    outer momentum     m      float32, on the host

    diloco    DiLoCo, arXiv 2311.08105, algorithm 1, lines 12 to 14, with Nesterov momentum as in
              torch.optim.SGD:
                  m <- mu m + d           a <- a - lr (d + mu m)
              Streaming DiLoCo, arXiv 2501.18512, algorithm 2: fragment by fragment; d is sent `delay` inner
              steps before it is applied. Then the local weights are combined with the new anchor:
                  x_j <- alpha x_j + (1 - alpha) a                         (mix=alpha)
              or, so that no inner step during the delay is lost,
                  x_j <- a + (x_j - x_j when d_j was captured)             (mix=keep)
    co2       CO2, arXiv 2401.16265, algorithm 1: d is applied one whole round later. It counts less the
              further the anchor has moved since it was sent: it is divided by gap >= 1, a penalty for its
              staleness. Momentum is clipped elementwise:
                  m <- clip(mu m + d / gap, -clip, clip)                   a <- a - lr m
    average   plain averaging, local SGD (arXiv 1805.09767):               a <- a - d
    muon      diloco, with the step of each matrix orthogonalized (Newton-Schulz: O) at its original length:
                  m <- mu m + d           a <- a - lr |d + mu m| O(d + mu m) / |O(d + mu m)|

All operations are elementwise, with two exceptions: scalars that are equal in all jobs, and whole matrices
(muon), gathered from the ranks that share them. So the way a job shards its weights does not change the
result, and all jobs get the same bits.
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
    """Part of the training loop (loop.OuterLoop) that an outer algorithm uses.

    The jobs exchange the model fragment by fragment. A period is the number of inner steps between the
    exchanges of two fragments. After each inner step, the loop calls `algorithm.after_step(loop)`. The
    algorithm then reads the two counters of the loop, and calls its methods if a pseudo-gradient must be
    sent, or a received aggregate must be applied.
    """

    in_period: int  # inner steps since the period began
    period: int  # length of a period: every / fragments inner steps

    def capture(self) -> int:
        """Compute and keep a pseudo-gradient: that of the next part (fragment) of the model.

        Returns:
            Index of the fragment.
        """

    def submit(self, fragment: int) -> None:
        """Begin to exchange the pseudo-gradient that capture() has computed for part `fragment`."""

    def finish_round(self, fragment: int) -> None:
        """Wait for the end of the exchange of part `fragment`, and apply the aggregated result."""

    def submitted(self) -> list[int]:
        """Return the parts of the model whose exchange is not finished yet, the oldest first."""

    def new_period(self) -> None:
        """Begin the next period: set the counter of inner steps since the last exchange to 0."""


@dataclass(frozen=True)
class DiLoCo:
    """Outer optimizer of DiLoCo: SGD with Nesterov momentum on the aggregated pseudo-gradients.

    step() updates the outer state, mixed() gives the new local weights, and after_step() decides
    when pseudo-gradients are sent and applied. Other outer algorithms are subclasses and override
    some of these methods.
    """

    lr: float
    momentum: float | None  # mu; None: determined by the jobs of each round (momentum_of)
    mix: str  # "keep", or the share of local weights (0 to 1) that a fragment keeps
    delay: int  # inner steps from sending a pseudo-gradient to applying the aggregate
    clip: float  # largest magnitude of an element of CO2's momentum; 0: no limit

    #: Defaults that differ from those of OuterSettings.
    defaults: ClassVar[Mapping[str, Any]] = {}
    #: With mix=keep, inner steps after sending stay in the local weights when the aggregate is applied.
    keeps_progress: ClassVar[bool] = True
    #: gap_of() needs the lengths of momentum and aggregate.
    needs_gap: ClassVar[bool] = False
    #: A fragment's aggregate must be applied before the next fragment's pseudo-gradient is sent.
    one_at_a_time: ClassVar[bool] = True
    #: step() must be given whole matrices.
    of_matrices: ClassVar[bool] = False

    @property
    def keeps_momentum(self) -> bool:
        """Return whether the outer optimizer keeps a momentum."""
        return self.momentum != 0

    def momentum_of(self, shares: Sequence[float]) -> float:
        """Return the outer momentum mu for a round whose jobs have these shares of the tokens.

        With momentum=auto it is 1 - sqrt(sum of the squared shares), rounded to one digit: 0 for one job,
        0.3 for two equal jobs, 0.5 for four. The reason:

        1. Adam divides by the root mean square of the gradient: mostly noise in a small batch. So
           the mean of K equal jobs moves sqrt(K) times less than one job with their joint batch would.
           For any shares the factor is 1 / sqrt(sum of the squared shares).
        2. In the long run, momentum makes outer steps 1 / (1 - mu) times longer.
        3. This mu makes both factors equal. Measurements: docs/benchmarks/joined.md.
        """
        if self.momentum is not None:  # the setting is a number, not auto
            return self.momentum
        total = math.fsum(shares)
        sum_of_squares = math.fsum((share / total) ** 2 for share in shares)
        return round(1 - math.sqrt(sum_of_squares), 1)

    def gap_of(self, momentum_square: float, gradient_square: float) -> float:
        """Return the number by which an aggregate is divided because it is stale; 1.0: it counts in full.

        The divisor is called "gap", as in CO2. It grows with the distance by which outer steps have moved
        the weights since the aggregate's pseudo-gradients were sent.

        Args:
            momentum_square: Squared length of the fragment's momentum, over all ranks.
            gradient_square: Squared length of the aggregate, over all ranks.
        """
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
        """Take an outer optimizer step: update anchor weights and outer momentum in place.

        Args:
            anchor: Weights after the last outer step: a flat float32 tensor.
            momentum: Tensor of the same length, float32 or bfloat16 (rounded after the step); None:
                no momentum.
            gradient: Aggregate of the jobs' pseudo-gradients, of the same length; overwritten.
            mu: Coefficient of the momentum, 0 to 1.
            gap: The aggregate is divided by this number, at least 1. It grows with the aggregate's
                staleness. Only CO2 uses it.
            matrices: Positions of the weight matrices in these tensors. Only an algorithm that steps
                whole matrices (`of_matrices`) uses it.
        """
        direction = gradient
        if momentum is not None:
            float32_momentum = momentum.float()  # the same object if it is float32
            direction = self._direction(float32_momentum, gradient, mu, gap)  # also updates it
            if float32_momentum is not momentum:
                momentum.copy_(float32_momentum)
        if self.of_matrices:
            matrices.orthogonalize(direction)
        self._move(anchor, direction)

    def _direction(
        self, momentum: torch.Tensor, gradient: torch.Tensor, mu: float, gap: float
    ) -> torch.Tensor:
        """Update the momentum in place; return the direction of the outer step (Nesterov momentum).

        The direction is gradient + mu * new momentum. It is not scaled by the learning rate;
        _move() applies that.

        Args:
            momentum: Outer momentum, float32.
            gradient: Aggregate of the jobs' pseudo-gradients; overwritten and returned.
            mu: Coefficient of the momentum.
            gap: Divisor of a stale aggregate. Only a subclass (CO2) uses it; DiLoCo ignores it.
        """
        momentum.mul_(mu).add_(gradient)
        return gradient.add_(momentum, alpha=mu)

    def _move(self, anchor: torch.Tensor, direction: torch.Tensor) -> None:
        anchor.sub_(direction, alpha=self.lr)

    def mixed(
        self, local: torch.Tensor, sent: torch.Tensor | None, anchor: torch.Tensor
    ) -> torch.Tensor:
        """Return a fragment's new local weights after an outer step, as the setting `mix` demands.

        mix=keep: new anchor plus the inner steps since the pseudo-gradient was captured. mix=A, a
        number from 0 to 1: A * local weights + (1 - A) * new anchor.

        Args:
            local: The fragment's current local weights.
            sent: With mix=keep, the local weights when the pseudo-gradient was captured. None: the
                inner steps since then are discarded, so the result is the anchor.
            anchor: The fragment's weights after the outer step.
        """
        if self.mix == "keep":
            if sent is None:
                return anchor
            return anchor + (local - sent)  # the inner steps since then are kept
        alpha = float(self.mix)  # share of the local weights
        if alpha == 0:
            return anchor
        return anchor.lerp(local, alpha)

    def after_step(self, loop: Schedule) -> None:
        """After an inner step, send a pseudo-gradient or apply an aggregate if it is time.

        The fragments (parts of the model) take turns: each period of `loop.period` inner steps exchanges one.
        The fragment's pseudo-gradient is sent `delay` inner steps before the end of the period. The
        aggregate is applied at the end.

        Args:
            loop: The training loop of this rank: it counts inner steps, captures and sends
                pseudo-gradients, and applies aggregates.
        """
        if loop.in_period == loop.period - self.delay:
            loop.submit(loop.capture())
        if loop.in_period >= loop.period:
            for fragment in loop.submitted():
                loop.finish_round(fragment)
            loop.new_period()


class Average(DiLoCo):
    """Plain averaging of the jobs' weights (local SGD): DiLoCo's outer step without momentum."""

    defaults = {"momentum": 0.0}


class Co2(DiLoCo):
    """CO2: the aggregate for a part of the model is applied one round later, when the part is sent again.

    The next pseudo-gradient already contains the inner steps taken since the last pseudo-gradient was
    sent. So these inner steps are not kept in the local weights: the local weights are set to the new
    anchor (the weights after the outer step).
    """

    defaults = {"lr": 0.5, "momentum": 0.0, "fragments": 1}
    keeps_progress = False
    needs_gap = True
    one_at_a_time = False

    def gap_of(self, momentum_square: float, gradient_square: float) -> float:
        """Return CO2's divisor of a stale aggregate: it is applied one round after it was sent.

            gap = 1 + (distance that the anchor has moved since sending) / (length of the aggregate)

        The anchor is the weights after the last outer step. Since sending, it has taken one outer step,
        -lr times the momentum. So the distance is lr times the momentum's length, and no copy of the
        older anchor is needed. The form (1 if nothing has moved) is that of Gap-Aware (Barkai et al.,
        arXiv 1909.10802, section 4).

        Args:
            momentum_square: Squared length of the fragment's momentum, over all ranks.
            gradient_square: Squared length of the aggregate, over all ranks.
        """
        if gradient_square <= 0:
            return 1.0
        return 1 + self.lr * math.sqrt(momentum_square / gradient_square)

    def _direction(
        self, momentum: torch.Tensor, gradient: torch.Tensor, mu: float, gap: float
    ) -> torch.Tensor:
        """Update the momentum in place, and return it: CO2 steps along the momentum itself.

        Args:
            momentum: Outer momentum, float32.
            gradient: Aggregate of the pseudo-gradients.
            mu: Coefficient of the momentum.
            gap: Divisor of the stale aggregate, at least 1.
        """
        momentum.mul_(mu).add_(gradient, alpha=1 / gap)
        if self.clip:
            momentum.clamp_(-self.clip, self.clip)
        return momentum

    def after_step(self, loop: Schedule) -> None:
        """At the end of a period, apply a fragment's last aggregate, and send its new pseudo-gradient."""
        if loop.in_period >= loop.period:
            fragment = loop.capture()
            loop.finish_round(fragment)  # of the pseudo-gradient that was submitted the last time
            loop.submit(fragment)  # only now, because the round reads the momentum
            loop.new_period()


class Muon(DiLoCo):
    """DiLoCo that orthogonalizes the direction of the outer step (Nesterov momentum), as Muon does.

    Each weight matrix is orthogonalized by itself (orthogonal.py); other parameters step as in
    DiLoCo.
    """

    of_matrices = True


ALGORITHMS: dict[str, type[DiLoCo]] = {
    "diloco": DiLoCo,
    "co2": Co2,
    "average": Average,
    "muon": Muon,
}
ALGORITHMS |= extensions.objects("outer_algorithms")

#: Value of the setting `algorithm` that stands for algorithm_for(inner optimizer).
AUTO = "auto"
#: Algorithms that "auto" may stand for.
AUTO_CHOICES = ("muon", "diloco")
#: Attributes in which DeepSpeed, megatron-core and Accelerate keep the optimizers that theirs wraps.
_WRAPPED = ("optimizer", "basic_optimizer", "chained_optimizers", "optimizers")


def algorithm_for(optimizer: Any) -> str:
    """Return the name of the outer algorithm that algorithm=auto stands for.

    In all measurements (docs/benchmarks/joined.md), `muon` gave a lower loss than `diloco` if AdamW took the
    inner steps, and a higher loss if Muon did.

    Args:
        optimizer: The inner optimizer of the job, or a framework's wrapper around one or several of them.
            None: it is not known.
    """
    return "diloco" if _is_muon(optimizer) else "muon"


def _is_muon(optimizer: Any) -> bool:
    """Return whether the name of an optimizer's class contains "muon", or that of one that it wraps.

    Examples: torch.optim.Muon, DeepSpeed's MuonWithAuxAdam, megatron-core's TensorParallelMuon.
    """
    unvisited, visited = [optimizer], set()
    while unvisited:
        one = unvisited.pop()
        if id(one) in visited or isinstance(one, (str, type(None))):
            continue
        visited.add(id(one))
        if "muon" in type(one).__name__.lower():
            return True
        wrapped = [vars(one).get(name) for name in _WRAPPED] if hasattr(one, "__dict__") else []
        for value in wrapped:
            unvisited.extend(value if isinstance(value, (list, tuple)) else [value])
    return False
