"""The joined job of this process: what --holmes-join asks for, what a framework's patch tells, what a user is told.

    job.py                  request(options)      what was asked for; nothing happens yet
    patches/*/joined.py     claim(owner, stack)          before the first step: whose weights, whose steps
                            stepped(tokens)       after each real step of the inner optimizer: a round may begin or end
                            joined_state_dict()   with the framework's checkpoint
    job.py                  end()                 when the program ends

Where a framework has an optimizer inside its own, the outermost claims: what claims later is not listened to.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holmes_ext.errors import HolmesError
from holmes_ext.options import Options
from holmes_ext.runtime.measure import telemetry
from holmes_ext.runtime.outer.address import JoinAddress, parse_address, token_from
from holmes_ext.runtime.outer.settings import OuterSettings, parse_outer

if TYPE_CHECKING:
    from holmes_ext.runtime.outer.loop import OuterLoop, Record


@dataclass(frozen=True)
class WeightShards:
    """The weights of one rank, as its framework has them.

    position: where in the model-parallel grid, such as "pipeline 0, tensor 1"; tensors: name, shape and type of all
    that
    the ranks of this position hold together, in the model's order; parts: name of a tensor, first element of it, and
    a flat
    view of those that this rank steps; moved: whether the framework has put other memory in the place of these.
    """

    position: str
    tensors: list[tuple[str, tuple[int, ...], str]]
    parts: list[tuple[str, int, Any]]
    moved: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class FrameworkAdapter:
    """What a patch knows of a job.

    weights: of this rank, HolmesError where they cannot be had; written: brings what the framework derives from them up
    to date, on all ranks in the same step; device: where they are; agreed: what else must be the same in all jobs
    (parallel sizes); refusal: why a job with these settings cannot join, None where it can.
    """

    name: str
    weights: Callable[[], WeightShards]
    device: Callable[[], Any]
    written: Callable[[], None] = lambda: None
    agreed: Mapping[str, Any] = field(default_factory=dict)
    refusal: Callable[[OuterSettings], str | None] = lambda settings: None


@dataclass
class _Job:
    """rank 0 tells. saved: outer state of a checkpoint, and where it came from, until the job begins; shared: whether
    the data were shared out."""

    place: JoinAddress
    settings: OuterSettings
    token: str
    owner: object = None
    joined: OuterLoop | None = None
    saved: tuple[dict[str, Any], str] | None = None
    shared: bool = False
    began: float = 0.0
    first_step: int = 0


_job: _Job | None = None


def request(options: Options, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Read what the flags say; lines for the user. HolmesError when they cannot be followed."""
    global _job
    if not options.join:
        if options.outer:
            raise HolmesError(
                "--holmes-outer says how joined jobs update each other; give --holmes-join NAME@HOST:PORT too"
            )
        return []
    settings = parse_outer(options.outer)
    _job = _Job(parse_address(options.join), settings, token_from(environ))
    atexit.register(end)
    often = f"{settings.every} steps" if settings.every else f"{settings.seconds:g} s"
    return [f"job {_job.place.job} joins others at {_job.place.host}:{_job.place.port}: {settings.algorithm}, every"
            f" {often} in {settings.fragments} fragments, {settings.delay} steps under way, {settings.compress}; what"
            f" crosses is not encrypted"]  # fmt: skip


def asked() -> bool:
    """Whether this process's job is to join others."""
    return _job is not None


def owner() -> object:
    """Whose steps are the job's; None before the first one, and where nothing is to join."""
    return _job.owner if _job is not None else None


def part() -> tuple[int, int]:
    """(k, K): this job reads the k-th of K parts of the data; (0, 1): nobody said so."""
    return _job.settings.data_part if _job is not None else (0, 1)


def share() -> None:
    """A patch gives this job its part of the data."""
    if _job is not None:
        _job.shared = True


def reserve(owner: object) -> None:
    """A framework that has optimizers inside its own says so before they step."""
    if _job is not None and _job.owner is None:
        _job.owner = owner


def claim(owner: object, stack: Callable[[], FrameworkAdapter]) -> bool:
    """Before a step of `owner`: whether its steps are the job's. The first one joins; collective then."""
    reserve(owner)
    if _job is None or _job.owner is not owner:
        return False
    if _job.joined is None:
        _begin(_job, stack())
    return True


def stepped(tokens: float = 1.0) -> None:
    """A real step of the inner optimizer is done, on all ranks. tokens: that this rank has read for it, or samples."""
    if _job is not None and _job.joined is not None:
        _job.joined.after_step(tokens)


def joined_state_dict() -> dict[str, Any] | None:
    """The outer state of this rank, for a checkpoint of all ranks at the same step; None where there is none."""
    return _job.joined.state_dict() if _job is not None and _job.joined is not None else None


def load_joined_state_dict(saved: dict[str, Any], source: str = "outer state") -> None:
    """Go on from a checkpoint's outer state; before the first step.

    Args:
        saved: What joined_state_dict() gave.
        source: What errors call it.

    Raises:
        HolmesError: The job has begun already.
    """
    if _job is None:
        return
    if _job.joined is not None:
        raise HolmesError(
            f"{source}: outer state can be loaded before the first step only; restart the job to resume"
        )
    _job.saved = saved, source


def end(why: str = "training is over") -> None:
    """Leave the run."""
    global _job
    job, _job = _job, None
    atexit.unregister(end)
    if job is not None and job.joined is not None:
        job.joined.end(why)


def _begin(job: _Job, stack: FrameworkAdapter) -> None:
    from holmes_ext.runtime.outer.join import join, weights_of  # a job that is not joined must not load them

    def weights() -> Any:
        if why := stack.refusal(job.settings):
            raise HolmesError(f"--holmes-join: a job of {stack.name} cannot join: {why}")
        return weights_of(stack.weights())

    agreed = {"framework": stack.name, **stack.agreed}
    joined = join(
        job.place, job.token, job.settings, weights, agreed, stack.device(), _tell,
        stack.written, lambda: _status(job),
    )  # fmt: skip
    if job.saved is not None:
        joined.load_state_dict(*job.saved)
        job.saved = None
    job.began, job.first_step = time.monotonic(), joined.steps
    begun = joined.begin()
    job.joined = joined
    if not job.shared:
        k, parts = job.settings.data_part
        what = f"part={k}/{parts}: no sampler that is known was made" if parts > 1 else "no part=k/K is given"
        _say(joined, f"{what}; that jobs read different data is the script's part")
    _say(joined, f"job {job.place.job} is in the run: {begun}; {joined.state.host_bytes / 1e6:.1f} MB of outer state on"
                 f" each host's rank 0")  # fmt: skip


def _status(job: _Job) -> dict[str, Any]:
    seconds = max(time.monotonic() - job.began, 1e-9)
    links = job.joined.rounds.links if job.joined is not None else None
    sent = 8 * links.sent / seconds if links is not None else 0.0
    steps = job.joined.steps - job.first_step if job.joined is not None else 0
    return {"steps_per_second": steps / seconds, "bits_per_second": sent, "drift": _last.get("drift")}


_last: dict[str, Any] = {}


def _tell(record: Record) -> None:
    """Of each round: telemetry's line, and one for the user where something is other than usual."""
    outcome = record.outcome
    _last["drift"] = outcome.drift if outcome.drift is not None else _last.get("drift")
    telemetry.outer_round({
        "round": record.number, "fragment": record.fragment, "step": record.step, "exposed": record.exposed_s,
        "seconds": outcome.seconds, "bytes": outcome.bytes, "verdict": outcome.verdict, "why": outcome.why,
        "jobs": sorted(outcome.members), "left_out": outcome.left_out, "norm": outcome.norm, "drift": outcome.drift,
    })  # fmt: skip
    if _job is None or _job.joined is None:
        return
    for name, why in outcome.left_out.items():
        _say(_job.joined, f"round {record.number}: job {name} is left out: {why}")
    if outcome.verdict == "taken":
        _say(
            _job.joined,
            f"round {record.number}: fragments {outcome.fragments} taken from job {outcome.source}",
        )
    elif outcome.verdict == "void":
        _say(_job.joined, f"round {record.number} came to nothing: {outcome.why}; training goes on")


def _say(joined: OuterLoop, text: str) -> None:
    if joined.rounds.job_ranks.rank == 0:
        print(f"holmes: {text}", file=sys.stderr, flush=True)
