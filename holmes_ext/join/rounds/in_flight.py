"""Objects that the training thread and the rounds thread (round_runner.py) of a rank pass to each other."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

import torch


@dataclass
class RoundResult:
    """Result of a round: verdict, shares of the jobs in the aggregate, and measurements.

    A round exchanges the pseudo-gradients of a part of the model. All ranks of a job have the same values,
    except for `bytes` and `seconds`.
    """

    #: "commit": take the outer step; "taken": `fragments` came from job `source`; "void": no change.
    verdict: str
    round: int  # last round that the run has seen
    why: str = ""  # reason of a void round
    source: str = ""  # job that gave weights, with the verdict "taken"
    fragments: list[int] = field(default_factory=list)  # fragments with new anchors
    members: dict[str, float] = field(default_factory=dict)  # job -> share of its pseudo-gradient
    #: Job whose pseudo-gradient did not count -> reason.
    left_out: dict[str, str] = field(default_factory=dict)
    period: int = 0  # inner steps until the next fragment, as rank 0 proposes; 0: no change
    bytes: int = 0  # sent by this rank
    seconds: float = 0.0  # from start to end, on this rank
    norm: float = 0.0  # of this job's pseudo-gradient
    #: Distance of this job's pseudo-gradient from the aggregate, divided by the aggregate's norm.
    drift: float | None = None


@dataclass
class InFlight:
    """Pseudo-gradient of a fragment from its computation until its aggregate is applied.

    A fragment is a part of the model; the pseudo-gradient is the change of its weights since the last
    outer step. The training thread computes and submits it. The rounds thread exchanges it with other
    jobs, and sets `ended`.
    """

    number: int  # of the round
    fragment: int
    gradient: torch.Tensor  # this rank's elements, float32 on the host
    anchor_version: int  # version of the anchor from which the local weights were subtracted
    tokens: float  # tokens that this rank has read for it
    step: int  # inner step at which it was captured
    #: Inner steps until the next fragment is exchanged, as this rank proposes; 0: no change.
    period: int = 0
    slack_s: float = 0.0  # seconds until the aggregate would be applied (rounds=async)
    versions: list[int] = field(default_factory=list)  # of all fragments at submission
    #: Result of the round, or the exception that ended it; set by the rounds thread.
    ended: Future[RoundResult] = field(default_factory=Future)
