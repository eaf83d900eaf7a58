"""What a search of plans found: candidates, the certificate, and what was left out."""

from __future__ import annotations

from dataclasses import dataclass, field

from holmes_ext.plan.cost.model import Model
from holmes_ext.plan.cost.pricing import Pricing
from holmes_ext.plan.search.arrangement import Arrangement, Ground
from holmes_ext.plan.search.bounds import Stages
from holmes_ext.plan.search.space import REDUCTIONS, Limits, Shape

#: Steps that differ by less than this fraction are equal.
EQUAL = 1e-9


@dataclass(frozen=True)
class Candidate:
    """One plan. step_s: predicted; bound_s: no partition of it is faster; memory_bytes and limit_bytes: by stage; reductions: how each stage's
    data-parallel groups reduce. least_s: no 1F1B step of any partition takes less. simulated_s: of plan/simulate/step.py, 0 when it was not simulated."""

    shape: Shape
    arrangement: Arrangement
    split: tuple[int, ...]
    step_s: float
    bound_s: float
    memory_bytes: tuple[float, ...]
    limit_bytes: tuple[float, ...]
    reductions: tuple[str, ...]
    tokens_per_s: float
    flops_per_gpu: float
    least_s: float = 0.0
    simulated_s: float = 0.0

    @property
    def peak_bytes(self) -> float:
        return max(self.memory_bytes)

    @property
    def best_s(self) -> float:
        """The simulated step where there is one."""
        return self.simulated_s or self.step_s


@dataclass(frozen=True)
class Certificate:
    """No plan of the space takes less than bound_s; step_s is the winner's."""

    step_s: float
    bound_s: float

    @property
    def gap(self) -> float:
        """The fraction of the step that a better plan could save at most."""
        return max(0.0, 1 - self.bound_s / self.step_s)

    @property
    def proven(self) -> bool:
        return self.gap <= 10 * EQUAL

    def __str__(self) -> str:
        if self.proven:
            return "proven best within the model"
        return f"within {self.gap:.1%} of the best within the model (no plan takes less than {self.bound_s:.4g} s)"


@dataclass
class Outcome:
    """candidates: the fastest first. unseen: shapes that were not expanded, with their bounds. misfits: arrangements that no memory holds. left_s: the least bound of what
    was not worked out. certificate: of the closed form; simulated: of simulated steps, None before plan/search/ranking.py's rank."""

    ground: Ground
    model: Model
    global_batch: int
    limits: Limits
    overlap: bool
    candidates: list[Candidate] = field(default_factory=list)
    unseen: list[tuple[float, Shape]] = field(default_factory=list)
    certificate: Certificate | None = None
    simulated: Certificate | None = None
    shapes: int = 0
    pruned: int = 0
    misfits: int = 0
    seconds: float = 0.0
    interrupted: bool = False
    left_s: float = 0.0

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    def stages(self, candidate: Candidate, ground: Ground | None = None) -> Stages:
        """The candidate's numbers again, on another ground if given."""
        ground = ground or self.ground
        reductions = self.limits.allowed.get("reduction", REDUCTIONS)
        pricing = Pricing(ground, self.model, candidate.shape, reductions, self.limits.memory_bytes)
        return Stages(pricing, candidate.arrangement, self.overlap)
