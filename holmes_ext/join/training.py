"""State of the joined job in this process, and the functions that framework patches call.

Joined jobs train one model together over a WAN: each job takes inner steps by itself, and now and then the
jobs exchange pseudo-gradients and take an outer step (DiLoCo, arXiv 2311.08105).

    caller              function                    effect
    start of holmes     request(options)            checks the flags; nothing is joined yet
    framework's patch   claim(owner, adapter)       before each inner step; the first call joins the run
                        stepped(tokens)             after each inner step: a round may begin or end
                        joined_state_dict()         outer state for the framework's checkpoint
    end of the program  end()                       leaves the run

The job's owner is the optimizer or engine with the steps that count as the job's inner steps: the first
object that calls claim() or reserve(). Later calls by other objects have no effect. If an optimizer contains
another (DeepSpeed's contains torch's), the containing one calls first. reserve() makes an object the owner
before its first step.
"""

from __future__ import annotations

import atexit
import gc
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from holmes_ext.errors import HolmesError
from holmes_ext.extensions import load
from holmes_ext.join.address import JoinAddress, parse_address, port_range
from holmes_ext.join.settings import OuterSettings, parse_outer
from holmes_ext.join.sockets.certificates import MISSING
from holmes_ext.options import Options
from holmes_ext.runtime.measure import telemetry
from holmes_ext.runtime.sockets import address_text
from holmes_ext.words import counted, tell_user

if TYPE_CHECKING:
    from holmes_ext.join.early_contact import EarlyContact
    from holmes_ext.join.loop import OuterLoop, Record


#: New objects after which Python looks for cyclic garbage, until the first step. (Its default is 700.)
_OBJECTS_AT_START = 50_000
#: Least duration of training in a division, in seconds.
_SHORTEST_S = 1e-9


@dataclass(frozen=True)
class WeightShards:
    """Weights of a rank, as described by the patch of a framework (torch, DeepSpeed, megatron-core).

    The fields are names and shapes of whole tensors, and views of the elements this rank updates.
    """

    #: Position in the model-parallel grid, such as "pipeline 0, tensor 1".
    position: str
    #: Name, shape and dtype of all tensors that the ranks at this position hold together, in model order.
    tensors: list[tuple[str, tuple[int, ...], str]]
    #: Name of a tensor, and a flat view of consecutive elements of it that this rank's inner optimizer steps,
    #: after the index of the first of them.
    parts: list[tuple[str, int, Any]]
    #: Returns whether the framework has put the weights in other memory since this object was made.
    moved: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class FrameworkAdapter:
    """Functions of a framework's patch by which the outer training reads and writes the weights."""

    #: Name of the framework, the same in all jobs.
    name: str
    #: Returns the weights of this rank; raises HolmesError if they cannot be described.
    weights: Callable[[], WeightShards]
    #: Returns the torch.device of the weights.
    device: Callable[[], Any]
    #: Optimizer of the inner steps, or the framework's wrapper around it.
    optimizer: Any
    #: Updates the framework's copies of the weights (such as bf16 weights) after an outer step has changed
    #: the weights. Called on all ranks in the same step.
    written: Callable[[], None] = lambda: None
    #: Facts that must be equal in all jobs, such as parallel sizes.
    agreed: Mapping[str, Any] = field(default_factory=dict)
    #: Returns why the job cannot join with these settings, or None if it can.
    refusal: Callable[[OuterSettings], str | None] = lambda settings: None


def refusal_of_copies(settings: OuterSettings, sizes: Mapping[str, int], tied: bool) -> str | None:
    """Return why copies of a weight on several ranks would become different; None: they stay equal.

    Several pipeline stages or tensor-parallel ranks may hold copies of a weight (tied embeddings,
    layer norms). Outer steps must change all copies equally; some settings do not.

    Args:
        settings: The --holmes-outer settings.
        sizes: Number of pipeline stages ("pipeline") and tensor-parallel ranks ("tensor").
        tied: Whether a weight is shared by several layers.

    Returns:
        The reason; None if all copies stay equal.
    """
    if tied and sizes["pipeline"] > 1 and settings.fragments > 1:
        return (
            "weights are tied over pipeline stages, whose copies must be updated together; "
            "give fragments=1"
        )
    # A codec with a scale for each block of elements rounds a copy by its neighbours in the flat weights,
    # and these differ between stages and tensor-parallel ranks.
    if sizes["pipeline"] * sizes["tensor"] > 1 and settings.quantizes_blocks:
        return (
            "copies of a weight on several stages or tensor-parallel ranks would be rounded differently; "
            "give compress=bf16"
        )
    return None


@dataclass
class _Job:
    """Settings and state of this process as part of a job that exchanges weights with other jobs.

    A process has at most one, the global `_job`. request() makes it if --holmes-join is given.
    """

    address: JoinAddress
    settings: OuterSettings  # as given; at the first step replaced by those of the run
    options: Options
    environ: Mapping[str, str]
    owner: object = None  # optimizer or engine whose steps are the inner steps
    loop: OuterLoop | None = None  # None before the first step
    saved: tuple[Any, str] | None = None  # outer state to load at the first step, and its source
    is_data_divided: bool = False  # a patch makes this job read only its part of the data set
    began: float = 0.0  # time.monotonic() at the first step
    first_step: int = 0  # number of the first inner step, after a checkpoint more than 0
    #: Thresholds of Python's garbage collector before the start; None: they are in effect.
    gc_thresholds: tuple[int, int, int] | None = None
    #: Contact with the coordinator before the first step; None: there was none, or the job has joined.
    early: EarlyContact | None = None


_job: _Job | None = None


def request(options: Options, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Check the --holmes-join flags, and let this job join other jobs at its first step.

    Until then, Python's garbage collector runs less often, so that the job starts sooner. A job that was
    started before contacts the coordinator in the background (early_contact.py).

    Args:
        options: Options of the job.
        environ: Environment variables; they name the folder for certificates.

    Returns:
        Lines to print at start. Empty without --holmes-join.

    Raises:
        HolmesError: The flags are invalid, or a package is missing.
    """
    global _job
    if not options.value("join"):
        if options.value("outer"):
            raise HolmesError(
                "--holmes-outer says how joined jobs update each other; give --holmes-join "
                "NAME@HOST:PORT too"
            )
        return []
    settings = parse_outer(options.value("outer"))
    address = parse_address(options.value("join"))
    # Only to report invalid values at once; the ports are opened at the first step.
    port_range(options.value("join_ports"), options.value("join_address"), environ)
    _check_certificate_options(options)
    if _job is not None:  # made by an earlier call; replaced below
        _restore_garbage_collection(_job)
    _job = _Job(address, settings, options, environ)
    _reduce_garbage_collection(_job)
    # A job that joins no others must not load this module.
    begin_early_contact = load("holmes_ext.join.early_contact:begin_early_contact")
    _job.early = begin_early_contact(address, options, environ)
    atexit.register(end)
    coordinator = address_text(address.host, address.port)
    return [f"job {address.job} joins others at {coordinator}; encrypted between jobs (TLS 1.3)"]


def _reduce_garbage_collection(job: _Job) -> None:
    """Let Python look for cyclic garbage less often until the first step.

    Imports and the construction of the model make hundreds of thousands of objects that stay. To scan
    them again and again takes a third of the time of these imports, and delays the start of a restarted
    job.
    """
    objects, *older = gc.get_threshold()
    if 0 < objects < _OBJECTS_AT_START:  # 0: the program has switched the collector off
        job.gc_thresholds = gc.get_threshold()
        gc.set_threshold(_OBJECTS_AT_START, *older)


def _restore_garbage_collection(job: _Job) -> None:
    """Restore Python's threshold for garbage collection, unless the program has changed it meanwhile."""
    if job.gc_thresholds is not None and gc.get_threshold()[0] == _OBJECTS_AT_START:
        gc.set_threshold(*job.gc_thresholds)
    job.gc_thresholds = None


def _check_certificate_options(options: Options) -> None:
    """Raise HolmesError if the options about certificates do not fit, or need a missing package."""
    certificate = options.value("join_certificate")
    if bool(certificate) != bool(options.value("join_ca")):
        raise HolmesError("--holmes-join-certificate and --holmes-join-ca: give both, or none")
    if certificate and options.value("join_invitation"):
        raise HolmesError(
            "--holmes-join-invitation is for the run's own CA; with --holmes-join-certificate leave it out"
        )
    if not certificate and find_spec("cryptography") is None:
        raise HolmesError(f"--holmes-join: {MISSING}")


def is_requested() -> bool:
    """Return whether the job of this process joins others (--holmes-join)."""
    return _job is not None


def owner() -> object:
    """Return the optimizer or engine whose steps are the job's inner steps.

    None if no object has called reserve() or claim() yet, and without --holmes-join.
    """
    return _job.owner if _job is not None else None


def data_part() -> tuple[int, int]:
    """Return (k, K): this job reads the k-th of K parts of the data set (--holmes-outer part=k/K).

    (0, 1) without --holmes-join, and by default.
    """
    return _job.settings.data_part if _job is not None else (0, 1)


def mark_data_divided() -> None:
    """Record that a patch makes this job read only its part of the data set."""
    if _job is not None:
        _job.is_data_divided = True


def reserve(owner: object) -> None:
    """Make `owner` the job's owner, unless the job has an owner already.

    The steps of the owner are the job's inner steps. A framework with an optimizer that contains other
    optimizers calls this before those take a step.
    """
    if _job is not None and _job.owner is None:
        _job.owner = owner


def claim(owner: object, adapter: Callable[[], FrameworkAdapter]) -> bool:
    """Return whether `owner` is the job's owner: then its steps count as the job's inner steps.

    An optimizer or engine calls this before each of its steps. The first object of the process that does
    so, or that was reserved before, is the job's owner. Before the first step of the owner, this call joins
    the other jobs; that is collective over the ranks.

    Args:
        owner: The optimizer or engine that is about to step.
        adapter: Returns the access to its weights; called once, to join the other jobs.

    Returns:
        False if another object is the owner, or if this job trains alone (without --holmes-join).
    """
    reserve(owner)  # without effect if the job has an owner
    if _job is None or _job.owner is not owner:
        return False
    has_joined = _job.loop is not None
    if not has_joined:
        _begin(_job, adapter())
    return True


def stepped(tokens: float = 1.0) -> None:
    """Report an inner step that changed the weights; call this on all ranks.

    Args:
        tokens: Tokens or samples that this rank has read for the step.
    """
    if _job is not None and _job.loop is not None:
        _job.loop.after_step(tokens)


def joined_state_dict() -> dict[str, Any] | None:
    """Return the outer state of this rank for a checkpoint; None if the job has not joined.

    All ranks must save the state of the same step.
    """
    if _job is None or _job.loop is None:
        return None
    return _job.loop.state_dict()


def load_joined_state_dict(saved: dict[str, Any], source: str = "outer state") -> None:
    """Load the outer state of a checkpoint; only before the first step.

    Args:
        saved: Result of joined_state_dict().
        source: Name of the checkpoint in error messages.

    Raises:
        HolmesError: The job has begun already.
    """
    if _job is None:
        return
    if _job.loop is not None:  # the first step has joined the other jobs
        raise HolmesError(
            f"{source}: outer state can be loaded before the first step only; restart the job to resume"
        )
    _job.saved = saved, source


def end(why: str = "training is over") -> None:
    """Leave the run; the other jobs go on.

    Args:
        why: Reason for the coordinator's log.
    """
    global _job
    job = _job
    _job = None
    atexit.unregister(end)
    if job is not None:
        _restore_garbage_collection(job)  # has an effect only if the job ends before its first step
    if job is not None and job.loop is not None:
        job.loop.end(why)


def _begin(job: _Job, adapter: FrameworkAdapter) -> None:
    """Connect to the other jobs before the first step, and take the current weights; collective.

    If a checkpoint with outer state was loaded, the job continues from that. At the end, rank 0 prints the
    settings of the run, and the source of the weights.

    Args:
        job: The job of this process. Its `loop` is set after it has joined: this object takes the outer
            steps.
        adapter: Access to the weights of the training framework. Its facts (`agreed`), such as parallel
            sizes, must be equal in all jobs: the coordinator refuses the job otherwise.

    Raises:
        HolmesError: The job cannot join.
    """
    # Imported here, because a job that joins no others must not load these modules.
    from holmes_ext.join.join import join, prepare, weights_of

    def weights() -> Any:
        """Return this rank's weights; raise HolmesError if the framework's settings rule out joining."""
        reason = adapter.refusal(job.settings)
        if reason:
            raise HolmesError(f"--holmes-join: a job of {adapter.name} cannot join: {reason}")
        shards = adapter.weights()  # names, shapes and views, from the framework's patch
        return weights_of(shards)

    prepared = prepare(job.address, job.options, job.environ, job.early)
    job.settings = prepared.settings.for_optimizer(adapter.optimizer)
    loop = join(
        prepared.place,
        job.settings,
        weights,
        agreed={"framework": adapter.name, **adapter.agreed},
        device=adapter.device(),
        on_round=_report,
        written=adapter.written,
        status=lambda: _telemetry_of(job),
        job_ranks=prepared.job_ranks,
        early=job.early,
    )
    job.early = None
    if job.saved is not None:
        saved, source = job.saved
        loop.load_state_dict(saved, source)
        job.saved = None
    job.began = time.monotonic()
    job.first_step = loop.steps
    origin_of_weights = loop.begin()
    job.loop = loop
    _restore_garbage_collection(job)
    if not job.is_data_divided:  # no patch makes this job read only its part of the data set
        reason = _why_data_is_undivided(job.settings)
        _say(loop, f"{reason}; the script must make jobs read different data")
    _say(loop, f"settings of the run: {_describe(job.settings)}")
    _say(
        loop,
        f"job {job.address.job} is in the run: {origin_of_weights}; "
        f"{loop.state.host_bytes / 1e6:.1f} MB of outer state on each host's rank 0",
    )


def _why_data_is_undivided(settings: OuterSettings) -> str:
    k, parts = settings.data_part
    if parts > 1:
        return f"part={k}/{parts}: no sampler that is known was made"
    return "no part=k/K is given"


def _describe(settings: OuterSettings) -> str:
    """Return the main settings of the outer training as a phrase.

    Example: "diloco, every 32 steps in 4 fragments, each hidden behind 5 steps, bf16".
    """
    interval = counted(settings.every, "step") if settings.every else f"{settings.seconds:g} s"
    return (
        f"{settings.algorithm}, every {interval} in {counted(settings.fragments, 'fragment')}, each hidden "
        f"behind {counted(settings.delay, 'step')}, {settings.compress}"
    )


def _telemetry_of(job: _Job) -> dict[str, Any]:
    """Return the telemetry of a heartbeat: steps/s, bits/s sent, and drift.

    The drift is the relative distance of the last pseudo-gradient from the aggregate. A value that
    is unknown or not finite is left out.
    """
    seconds = max(time.monotonic() - job.began, _SHORTEST_S)  # since the first step
    steps = 0
    sent_bytes = 0
    if job.loop is not None:
        steps = job.loop.steps - job.first_step
        sent_bytes = job.loop.rounds.links.sent
    telemetry_values = {
        "steps_per_second": steps / seconds,
        "bits_per_second": 8 * sent_bytes / seconds,
        "drift": _last.get("drift"),
    }
    return {
        name: value
        for name, value in telemetry_values.items()
        if value is not None and math.isfinite(value)
    }


#: Latest values for telemetry that come from rounds.
_last: dict[str, Any] = {}


def _report(record: Record) -> None:
    """Record a finished round in the job's telemetry, and print a line if it did not go as usual.

    Unusual: a job's pseudo-gradient did not count, weights were taken from another job, or nothing
    changed.
    """
    outcome = record.outcome
    if outcome.drift is not None:
        _last["drift"] = outcome.drift
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


def _say(loop: OuterLoop, text: str) -> None:
    """Print a line for the user on rank 0."""
    if loop.rounds.job_ranks.rank == 0:
        tell_user(text)
