"""The joined job of this process: what --holmes-join asks for, what a framework's patch tells, what a user is
told.

    job.py                  request(options)      what was asked for; nothing happens yet
    patches/*/joined.py     claim(owner, stack)          before the first step: whose weights, whose steps
                            stepped(tokens)       after each real step of the inner
                                                  optimizer: a round may begin or end
                            joined_state_dict()   with the framework's checkpoint
    job.py                  end()                 when the program ends

Where a framework has an optimizer inside its own, the outermost claims: what claims later is not listened to.
"""

from __future__ import annotations

import atexit
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from holmes_ext.errors import HolmesError
from holmes_ext.join.address import JoinAddress, parse_address, port_range
from holmes_ext.join.settings import OuterSettings, parse_outer
from holmes_ext.join.token import token_from, warning_of
from holmes_ext.options import Options
from holmes_ext.runtime.measure import telemetry
from holmes_ext.runtime.sockets import address_text, is_loopback
from holmes_ext.words import tell_user

if TYPE_CHECKING:
    from holmes_ext.join.loop import OuterLoop, Record


@dataclass(frozen=True)
class WeightShards:
    """The weights of one rank, as its framework has them.

    position: where in the model-parallel grid, such as "pipeline 0, tensor 1"; tensors: name, shape and type
    of all that the ranks of this position hold together, in the model's order; parts: name of a tensor, first
    element of it, and a flat view of those that this rank steps; moved: whether the framework has put other
    memory in the place of these.
    """

    position: str
    tensors: list[tuple[str, tuple[int, ...], str]]
    parts: list[tuple[str, int, Any]]
    moved: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class FrameworkAdapter:
    """What a patch knows of a job.

    weights: of this rank, HolmesError where they cannot be had; written: brings what the framework derives
    from them up to date, on all ranks in the same step; device: where they are; agreed: what else must be the
    same in all jobs (parallel sizes); refusal: why a job with these settings cannot join, None where it can.
    """

    name: str
    weights: Callable[[], WeightShards]
    device: Callable[[], Any]
    written: Callable[[], None] = lambda: None
    agreed: Mapping[str, Any] = field(default_factory=dict)
    refusal: Callable[[OuterSettings], str | None] = lambda settings: None


def refusal_of_copies(settings: OuterSettings, sizes: Mapping[str, int], tied: bool) -> str | None:
    """Why a job cannot join whose stages (weights that are tied) or tensor-parallel ranks have copies."""
    if tied and sizes["pipeline"] > 1 and settings.fragments > 1:
        return (
            "weights are tied over pipeline stages, whose copies must be updated together; "
            "give fragments=1"
        )
    if sizes["pipeline"] * sizes["tensor"] > 1 and settings.rounds_by_blocks:
        return (
            "copies of a weight on several stages or tensor-parallel ranks would be rounded differently; "
            "give compress=bf16"
        )
    return None


@dataclass
class _Job:
    """rank 0 tells. saved: outer state and its source, until the job begins; shared: the data are."""

    address: JoinAddress
    settings: OuterSettings
    token: str
    options: Options
    owner: object = None
    loop: OuterLoop | None = None
    saved: tuple[Any, str] | None = None
    shared: bool = False
    began: float = 0.0
    first_step: int = 0


_job: _Job | None = None


def request(options: Options, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Read what the flags say; lines for the user. HolmesError when they cannot be followed."""
    global _job
    if not options.value("join"):
        if options.value("outer"):
            raise HolmesError(
                "--holmes-outer says how joined jobs update each other; give --holmes-join "
                "NAME@HOST:PORT too"
            )
        return []
    settings, address, token = (
        parse_outer(options.value("outer")),
        parse_address(options.value("join")),
        token_from(environ),
    )
    port_range(options.value("join_ports"), options.value("join_address"), environ)
    privacy = _privacy(options, address)
    _job = _Job(address, settings, token, options)
    atexit.register(end)
    often = f"{settings.every} steps" if settings.every else f"{settings.seconds:g} s"
    where = address_text(address.host, address.port)
    how = f"every {often} in {settings.fragments} fragments, each hidden behind {settings.delay} steps"
    line = (
        f"job {address.job} joins others at {where}: {settings.algorithm}, {how}, {settings.compress}; "
        f"{privacy}"
    )
    return [line, *filter(None, [warning_of(token)])]


def _privacy(options: Options, address: JoinAddress) -> str:
    """What others on the way can read. HolmesError where it cannot be as the options say."""
    if options.value("join_plain") == "on":
        return (
            "NOT encrypted (--holmes-join-plain): anyone on the path can read the weights; changes are "
            "detected"
        )
    if bool(options.value("join_certificate")) != bool(options.value("join_ca")):
        raise HolmesError("--holmes-join-certificate and --holmes-join-ca: give both, or none")
    made_here = not options.value("join_certificate") and not is_loopback(address.host)
    if made_here and find_spec("cryptography") is None:
        raise HolmesError(
            "--holmes-join: jobs encrypt what they send to other hosts, and `cryptography` is not installed: "
            "pip install 'holmes_ext[join]' (or --holmes-join-plain on: nothing is encrypted)"
        )
    return "encrypted between hosts (TLS 1.3)"


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


def claim(owner: object, adapter: Callable[[], FrameworkAdapter]) -> bool:
    """Before a step of `owner`: whether its steps are the job's. The first one joins; collective then."""
    reserve(owner)
    if _job is None or _job.owner is not owner:
        return False
    if _job.loop is None:
        _begin(_job, adapter())
    return True


def stepped(tokens: float = 1.0) -> None:
    """After a real step of the inner optimizer, on all ranks. tokens: that this rank read, or samples."""
    if _job is not None and _job.loop is not None:
        _job.loop.after_step(tokens)


def joined_state_dict() -> dict[str, Any] | None:
    """The outer state of this rank, for a checkpoint of all at one step; None: there is none."""
    return _job.loop.state_dict() if _job is not None and _job.loop is not None else None


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
    if _job.loop is not None:
        raise HolmesError(
            f"{source}: outer state can be loaded before the first step only; restart the job to resume"
        )
    _job.saved = saved, source


def end(why: str = "training is over") -> None:
    """Leave the run."""
    global _job
    job, _job = _job, None
    atexit.unregister(end)
    if job is not None and job.loop is not None:
        job.loop.end(why)


def _begin(job: _Job, adapter: FrameworkAdapter) -> None:
    from holmes_ext.join.join import (
        join,
        place_of,
        weights_of,
    )  # a job that is not joined must not load them

    def weights() -> Any:
        if why := adapter.refusal(job.settings):
            raise HolmesError(f"--holmes-join: a job of {adapter.name} cannot join: {why}")
        return weights_of(adapter.weights())

    place = place_of(job.address, job.token, job.options)
    agreed = {"framework": adapter.name, **adapter.agreed}
    loop = join(
        place,
        job.settings,
        weights,
        agreed,
        adapter.device(),
        _report,
        adapter.written,
        lambda: _status(job),
    )
    if job.saved is not None:
        loop.load_state_dict(*job.saved)
        job.saved = None
    job.began, job.first_step = time.monotonic(), loop.steps
    begun = loop.begin()
    job.loop = loop
    if not job.shared:
        k, parts = job.settings.data_part
        what = (
            f"part={k}/{parts}: no sampler that is known was made"
            if parts > 1
            else "no part=k/K is given"
        )
        _say(loop, f"{what}; the script must make jobs read different data")
    _say(
        loop,
        f"job {job.address.job} is in the run: {begun}; {loop.state.host_bytes / 1e6:.1f} MB of outer "
        f"state on each host's rank 0",
    )


def _status(job: _Job) -> dict[str, Any]:
    """For heartbeats: what is known of these."""
    seconds = max(time.monotonic() - job.began, 1e-9)
    links = job.loop.rounds.links if job.loop is not None else None
    sent = 8 * links.sent / seconds if links is not None else 0.0
    steps = job.loop.steps - job.first_step if job.loop is not None else 0
    status = {
        "steps_per_second": steps / seconds,
        "bits_per_second": sent,
        "drift": _last.get("drift"),
    }
    return {
        name: value for name, value in status.items() if value is not None and math.isfinite(value)
    }


_last: dict[str, Any] = {}


def _report(record: Record) -> None:
    """Of each round: telemetry's line, and one for the user where something is other than usual."""
    outcome = record.outcome
    _last["drift"] = outcome.drift if outcome.drift is not None else _last.get("drift")
    telemetry.outer_round(
        {
            "round": record.number,
            "fragment": record.fragment,
            "step": record.step,
            "exposed": record.exposed_s,
            "seconds": outcome.seconds,
            "bytes": outcome.bytes,
            "verdict": outcome.verdict,
            "why": outcome.why,
            "jobs": sorted(outcome.members),
            "left_out": outcome.left_out,
            "norm": outcome.norm,
            "drift": outcome.drift,
        }
    )
    if _job is None or _job.loop is None:
        return
    for name, why in outcome.left_out.items():
        _say(_job.loop, f"round {record.number}: job {name} is left out: {why}")
    if outcome.verdict == "taken":
        _say(
            _job.loop,
            f"round {record.number}: fragments {outcome.fragments} taken from job {outcome.source}",
        )
    elif outcome.verdict == "void":
        _say(_job.loop, f"round {record.number} came to nothing: {outcome.why}; training goes on")


def _say(joined: OuterLoop, text: str) -> None:
    if joined.rounds.job_ranks.rank == 0:
        tell_user(text)
