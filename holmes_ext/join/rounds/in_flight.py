"""What the training thread and the thread of the rounds (round_runner.py) hand each other."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

import torch


@dataclass
class RoundResult:
    """How a round ended, the same on all ranks of the job. verdict: "commit", "taken" (`fragments` from job
    `source`) or "void".

    round: the last that the run has seen. period: rank 0's. bytes: that this rank sent; seconds: from start
    to end; drift: length of the difference between this job's pseudo-gradient and the aggregate, in lengths
    of the aggregate.
    """

    verdict: str
    round: int
    why: str = ""
    source: str = ""
    fragments: list[int] = field(default_factory=list)
    members: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    period: int = 0
    bytes: int = 0
    seconds: float = 0.0
    norm: float = 0.0
    drift: float | None = None


@dataclass
class InFlight:
    """A fragment's pseudo-gradient on its way: from the step at which it was captured to the step at which
    its sum is applied.

    gradient: of this rank's elements. base: the version of the anchor that it was taken from. tokens: what
    this rank has read for it. period: steps until the next fragment that this rank would take (0: fixed).
    versions: of all fragments when it was submitted. ended: how its round did, or what it raised, told by the
    thread of the rounds.
    """

    number: int
    fragment: int
    gradient: torch.Tensor
    base: int
    tokens: float
    step: int
    period: int = 0
    slack_s: float = 0.0
    versions: list[int] = field(default_factory=list)
    ended: Future[RoundResult] = field(default_factory=Future)
