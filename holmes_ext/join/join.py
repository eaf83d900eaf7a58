"""Construction of the parts of a joined job, on all ranks at once.

join() makes the process groups of the job, assigns weight elements to ranks, opens the rank's port, and makes
the client of the coordinator, the rounds thread and the outer loop. All ranks run the same collectives in the
same order, and an error on one rank is raised on all of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from holmes_ext.join.address import JoinAddress, JoinPlace
from holmes_ext.join.admission import admit
from holmes_ext.join.coordinator.client import CoordinatorClient, new_incarnation
from holmes_ext.join.early_contact import EarlyContact
from holmes_ext.join.loop import OuterLoop, Record
from holmes_ext.join.peers.links import PeerLinks
from holmes_ext.join.peers.listening import OpenedPort, open_and_publish
from holmes_ext.join.peers.routes import RankIdentity, Routes
from holmes_ext.join.peers.take import Giver
from holmes_ext.join.rolling_loop import RollingLoop
from holmes_ext.join.rounds.coordinator_link import CoordinatorLink
from holmes_ext.join.rounds.rolling_runner import RollingRunner
from holmes_ext.join.rounds.round_runner import RoundRunner
from holmes_ext.join.settings import OuterSettings
from holmes_ext.join.shards.job_ranks import JobRanks, Replicas, gather_cut_matrices
from holmes_ext.join.shards.ownership import (
    Range,
    RankRange,
    any_range_is_divided,
    fragment_cuts,
    owners,
)
from holmes_ext.join.shards.state import OuterState
from holmes_ext.join.shards.weights import Part, Tensor, Weights, tensor_starts
from holmes_ext.options import Options
from holmes_ext.words import some_of

#: End of the error messages about the way in which a job's ranks divide its weights.
_SUPPORTED_SHARDING = (
    "a job can join if its weights are replicated or sharded over whole data-parallel groups"
)
#: Timeout of the job's control group. It hardly matters: rounds have their own deadlines, and the connections
#: of a rank that dies are closed.
_CONTROL = timedelta(days=1)


class Prepared(NamedTuple):
    """Prerequisites for joining: the job's ranks, its credentials, and the settings of the run."""

    job_ranks: JobRanks  # collectives over the ranks of the job
    place: JoinPlace  # address of the coordinator; credentials (certificate) and ports of the job
    settings: OuterSettings  # of the run


def prepare(
    address: JoinAddress,
    options: Options,
    environ: Mapping[str, str],
    early: EarlyContact | None = None,
) -> Prepared:
    """Get the certificate of this job and the settings of its run; collective over its ranks.

    Rank 0 contacts the coordinator (admission.admit()), and broadcasts both to the other ranks.

    Args:
        address: Name of the job, and address of the coordinator.
        options: Options of the job.
        environ: Environment variables.
        early: May have read the settings already.

    Returns:
        The settings, and the `place`: address of the coordinator, certificate and ports of the job.

    Raises:
        HolmesError: The coordinator was not reached or refuses the job, or --holmes-outer contradicts
            the settings of the run.
    """
    job_ranks = JobRanks(_gloo_group())
    admission = admit(address, options, environ, job_ranks, early)
    return Prepared(job_ranks, admission.place, admission.settings)


def weights_of(shards: Any) -> Weights:
    """Return the weights that a framework's patch has described, as a Weights object.

    Args:
        shards: The weights, a training.WeightShards.
    """
    tensors = [Tensor(*tensor) for tensor in shards.tensors]
    starts = tensor_starts(tensors)
    parts = [Part(starts[name] + first, values) for name, first, values in shards.parts]
    return Weights(shards.position, tensors, parts, shards.moved)


def join(
    place: JoinPlace,
    settings: OuterSettings,
    weights: Callable[[], Weights],
    agreed: Mapping[str, Any],
    device: torch.device,
    on_round: Callable[[Record], None] = lambda record: None,
    written: Callable[[], None] = lambda: None,
    status: Callable[[], dict[str, Any]] = dict,
    job_ranks: JobRanks | None = None,
    early: EarlyContact | None = None,
) -> OuterLoop:
    """Make the outer loop of this rank, and all parts that it needs; collective over the ranks of the job.

    The loop has not begun: outer state of a checkpoint may be loaded before its begin(). This function makes
    a gloo group of all ranks, and groups with the default backend of ranks that hold the same weights.

    Args:
        place: Address of the coordinator; credentials and ports of the job.
        settings: The --holmes-outer settings.
        weights: Returns the weights of this rank.
        agreed: Other facts that must be equal in all jobs, such as parallel sizes.
        device: Device on which the default backend moves tensors.
        on_round: Called when the result of a round has been applied, with the record of the round.
        written: Called after an outer step has overwritten local weights.
        status: Returns telemetry for heartbeats: name -> value, such as `steps_per_second`.
        job_ranks: Collectives over the ranks of the job, from prepare(); None: make them here.
        early: May have opened the connection to the coordinator and the port of this rank already.

    Raises:
        HolmesError: The weights of the ranks do not fit each other, or a port is in use.
    """
    job = place.address.job
    # The ranks of a job use torch.distributed among themselves; other jobs are reached over sockets.
    job_ranks = job_ranks or JobRanks(_gloo_group())
    weights_here: Weights = job_ranks.run_on_all_ranks(weights)
    layouts = _gather_layouts(weights_here, settings, job_ranks)
    maps = _maps(job, layouts, settings, job_ranks)
    same = _ranks_with_same_weights(layouts, job_ranks.rank)
    _refuse_unsupported_shards(job, weights_here, layouts, same.ranks, job_ranks)
    ranges = maps[weights_here.position]
    state = OuterState(settings, weights_here, ranges, job_ranks.rank)
    _gather_what_is_cut(state, maps, layouts, job_ranks.rank, device)

    incarnation = early.incarnation if early is not None else new_incarnation()
    incarnation = job_ranks.broadcast_from_rank_0(incarnation)
    identity = RankIdentity(job, incarnation, job_ranks.rank)
    client = None
    if job_ranks.rank == 0:
        # Connects while the other parts are made. The client says hello only after begin() of the loop:
        # `constant_hello` and `rounds` are set below, and exist by then.
        client = CoordinatorClient(place, lambda: {**constant_hello, **rounds.hello()}, incarnation)
        client.connect_early(early.channel if early is not None else None)
    elif early is not None:
        early.close_channel()
    links: PeerLinks = job_ranks.run_on_all_ranks(lambda: _links(place, identity, state, early))
    addresses = job_ranks.all_gather(links.address)
    descriptions = job_ranks.all_gather(weights_here.named())
    agreed = {**_descriptions_by_position(layouts, descriptions), **agreed}
    constant_hello = _constant_hello(settings, agreed, maps, addresses)
    coordinator = CoordinatorLink(client, job_ranks, settings.timeout, place.credentials)
    is_rolling = settings.rounds == "async"
    runner_class = RollingRunner if is_rolling else RoundRunner
    rounds = runner_class(settings, state, ranges, job_ranks, links, coordinator, job)
    replicas = Replicas(ranges, same.ranks, same.group, device)
    arguments = settings, weights_here, state, rounds, replicas, on_round, written
    if is_rolling:
        loop: OuterLoop = RollingLoop(*arguments, boundary=JobRanks(_gloo_group()))
    else:
        loop = OuterLoop(*arguments)
    if client is not None:
        client.start_heartbeat(lambda: {"round": rounds.number, "step": loop.steps, **status()})
    return loop


def _constant_hello(
    settings: OuterSettings,
    agreed: Mapping[str, Any],
    maps: Mapping[str, list[RankRange]],
    addresses: list[str],
) -> dict[str, Any]:
    """Return the keys of the job's hello (reports.Hello) that never change.

    Args:
        settings: The --holmes-outer settings.
        agreed: Facts that must be equal in all jobs, besides the settings.
        maps: Position -> ranges of elements, each with the rank that exchanges it.
        addresses: HOST:PORT of each rank; "": the rank cannot be called.
    """
    return {
        "agreed": {"outer": settings.agreed(), **agreed},
        "maps": {position: _flat(owned) for position, owned in maps.items()},
        "addresses": addresses,
        "min": settings.min,
        "timeout": settings.timeout,
    }


def _descriptions_by_position(
    layouts: list[_Layout], descriptions: Sequence[Any]
) -> dict[str, Any]:
    """Return "weights at POSITION" -> description of the tensors there, for the comparison of jobs.

    All ranks at a position have the same tensors, so the description of the first rank is used.

    Args:
        layouts: Weights that each rank holds, in rank order.
        descriptions: Result of Weights.named() on each rank.
    """
    by_position: dict[str, Any] = {}
    for layout, description in zip(layouts, descriptions):
        by_position.setdefault(f"weights at {layout.position}", description)
    return by_position


def _gloo_group() -> dist.ProcessGroup | None:
    """Return a new gloo group of all ranks of this job; None if the job is a single process."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    return dist.new_group(backend="gloo", timeout=_CONTROL)


class _Layout(NamedTuple):
    """Weights that a rank of the job holds; elements are numbered in the model's order."""

    position: str  # in the model-parallel grid
    digest: str  # of names, shapes and dtypes of all tensors at this position
    total: int  # number of elements at this position
    holdings: list[Range]  # ranges of elements that this rank holds: all, or its shard
    #: Ranges of elements that should not be divided among ranks: the matrices, if the outer algorithm
    #: steps whole matrices (Muon).
    indivisible: list[Range]

    @property
    def holdings_key(self) -> str:
        """Return a text that is equal for ranks that hold the same weights."""
        return json.dumps([self.position, self.holdings])


def _gather_layouts(
    weights: Weights, settings: OuterSettings, job_ranks: JobRanks
) -> list[_Layout]:
    """Return the layout of the weights on each rank of the job, in rank order; collective.

    A layout names the rank's position in the model-parallel grid, the ranges of elements that the
    rank holds, the ranges (matrices) that should not be divided among ranks, and a digest of the
    tensors' names, shapes and dtypes. The digest must be equal on all ranks at a position.

    Args:
        weights: Weights of this rank.
        settings: The --holmes-outer settings.
        job_ranks: Collectives over the ranks of the job.
    """
    # Only Muon steps whole matrices; other algorithms are elementwise, so every range may be
    # divided.
    matrices = weights.matrices if settings.outer_algorithm().of_matrices else []
    layout = _Layout(
        position=weights.position,
        digest=weights.digest,
        total=weights.total,
        holdings=weights.holdings,
        indivisible=[(matrix.start, matrix.stop) for matrix in matrices],
    )
    layouts = []
    # The layouts go through JSON, and so have lists instead of tuples.
    for position, digest, total, holdings, indivisible in job_ranks.all_gather(list(layout)):
        layouts.append(
            _Layout(position, digest, total, _as_ranges(holdings), _as_ranges(indivisible))
        )
    return layouts


def _as_ranges(pairs: list[list[int]]) -> list[Range]:
    return [(start, stop) for start, stop in pairs]


def _links(
    place: JoinPlace, identity: RankIdentity, state: OuterState, early: EarlyContact | None
) -> PeerLinks:
    """Return the connections of this rank to other jobs; raise HolmesError if it cannot listen.

    Args:
        place: Coordinator, credentials and ports of this job.
        identity: This rank.
        state: Outer state; other jobs may take weights from it.
        early: May have opened the port of this rank already.
    """

    def open_now() -> OpenedPort:
        return open_and_publish(place, identity)

    # The address is the HOST:PORT that this rank publishes to other jobs; "" if it cannot be called.
    listening, address = early.port(open_now) if early is not None else open_now()

    # Routes accepts connections as soon as it exists, and PeerLinks handles them. So PeerLinks calls this
    # when it is ready itself, with its handler of incoming connections.
    def open_routes(incoming: Callable[..., None]) -> Routes:
        return Routes(identity, place, listening, address, incoming)

    # Connections that are no exchange come from jobs that take this job's weights.
    answer_takers = Giver(state).give
    return PeerLinks(identity.job, open_routes, serve=answer_takers)


def _maps(
    job: str, layouts: list[_Layout], settings: OuterSettings, job_ranks: JobRanks
) -> dict[str, list[RankRange]]:
    """Divide the model's elements among this job's ranks, for the exchange with other jobs.

    Ranks at the same position of the model-parallel grid hold the same part of the model. Elements
    that several of them hold (replicas) are divided among the holders. Elements that a single rank
    holds (a ZeRO or FSDP shard) are exchanged by that rank.

    Args:
        job: Name of this job, for error messages.
        layouts: Weights that each rank holds, in rank order.
        settings: The --holmes-outer settings.
        job_ranks: Raises the error on all ranks (refuse()): HolmesError on rank 0, where it is printed,
            and RemoteError on the others. All ranks have the same layouts, so all of them raise it.

    Returns:
        Position -> ranges of elements, each with the rank that exchanges it.

    Raises:
        HolmesError: Ranks at the same position hold different tensors, or no rank holds some element.
    """
    maps = {}
    for position in dict.fromkeys(layout.position for layout in layouts):
        layout_of = {  # rank at this position -> its layout
            rank: layout for rank, layout in enumerate(layouts) if layout.position == position
        }
        # Equal digests: the ranks' tensors have the same names, shapes and dtypes.
        if len({layout.digest for layout in layout_of.values()}) > 1:
            job_ranks.refuse(
                f"the ranks of job {job} at {position} hold weights of different names or shapes;"
                f" {_SUPPORTED_SHARDING}"
            )
        holdings = {rank: layout.holdings for rank, layout in layout_of.items()}
        first = next(iter(layout_of.values()))  # total and matrices are equal on all these ranks
        # Neither borders of fragments nor borders between ranks cut these ranges, if that can be
        # avoided.
        cuts = fragment_cuts(first.total, settings.fragments, first.indivisible)
        maps[position] = owners(first.total, cuts, holdings, first.indivisible)
    return maps


def _gather_what_is_cut(
    state: OuterState,
    maps: Mapping[str, list[RankRange]],
    layouts: list[_Layout],
    rank: int,
    device: torch.device,
) -> None:
    """Let outer steps of Muon gather matrices divided among ranks (ZeRO, FSDP); collective.

    Muon steps whole matrices. So after this call, an outer step first gathers such a matrix from
    the ranks at the same position of the model-parallel grid. The call itself only makes the
    process groups: all ranks make those of all positions, in the same order, as torch requires.

    Args:
        state: Outer state of this rank; its fragments get collective outer steps.
        maps: Position -> elements that each rank exchanges with other jobs.
        layouts: Weights that each rank holds, in rank order.
        rank: This rank.
        device: Device on which the default backend moves tensors (the GPU with NCCL). The matrices
            are computed on the device of the weights; that may differ (weights offloaded to the CPU).
    """
    for position, owned in maps.items():
        ranks = [other for other, layout in enumerate(layouts) if layout.position == position]
        first_layout = layouts[ranks[0]]
        matrices = first_layout.indivisible  # of the model, so equal on all ranks at this position
        if not any_range_is_divided(owned, matrices):
            continue
        group = dist.new_group(ranks)
        if rank in ranks:
            # Gathers the fragment from all ranks at this position: together they hold all its elements.
            holders = Replicas(owned, ranks, group, device)
            gather_cut_matrices(state.fragments, state.matrices, holders, state.weights.device)


def _refuse_unsupported_shards(
    job: str,
    weights: Weights,
    layouts: list[_Layout],
    replicas: list[int],
    job_ranks: JobRanks,
) -> None:
    """Raise HolmesError if shards overlap partly, or replicas hold different weights; collective.

    JobRanks.refuse() raises the error: HolmesError on rank 0, where it is printed, RemoteError on
    other ranks. All ranks check the same layouts; only ranks that should be equal compare their
    checksums.

    Args:
        job: Name of this job.
        weights: Weights of this rank.
        layouts: Weights that each rank holds, in rank order.
        replicas: Ranks that should hold the same weights as this rank, with this rank.
        job_ranks: Collectives over the ranks of the job.
    """
    rank = _rank_with_partial_overlap(layouts)
    if rank is not None:
        problem = f"rank {rank} of job {job} shares some of its weights, but not all, with others"
        job_ranks.refuse(f"{problem}; {_SUPPORTED_SHARDING}")
    # A rank without replicas has nothing to compare, but all ranks take part in the all-gather.
    checksums = job_ranks.all_gather(weights.checksum() if len(replicas) > 1 else 0)
    if any(checksums[rank] != checksums[job_ranks.rank] for rank in replicas):
        ranks = f"ranks {some_of(replicas)} of job {job}"
        job_ranks.refuse(f"{ranks} should hold the same weights, but do not; {_SUPPORTED_SHARDING}")


def _flat(ranges: list[RankRange]) -> list[int]:
    """Return [start, stop, rank, start, stop, rank, ...]: the form of ranges in a job's `hello`."""
    numbers = []
    for span in ranges:
        numbers += [span.start, span.stop, span.rank]
    return numbers


def _rank_with_partial_overlap(layouts: list[_Layout]) -> int | None:
    """Return a rank that holds some, but not all, elements of another rank; None if there is none.

    Ranks at different positions of the model-parallel grid hold different weights, so only ranks at the same
    position are compared.

    Args:
        layouts: Weights that each rank of the job holds, in rank order.
    """
    seen: set[str] = set()  # positions with holdings
    # Position -> ranges of ranks with different holdings.
    ranges_at: dict[str, list[RankRange]] = {}
    for rank, layout in enumerate(layouts):
        if layout.holdings_key in seen:
            continue  # a replica: an earlier rank holds exactly the same elements
        seen.add(layout.holdings_key)
        ranges = [RankRange(start, stop, rank) for start, stop in layout.holdings]
        ranges_at.setdefault(layout.position, []).extend(ranges)
    for ranges in ranges_at.values():
        # In the order of their starts, if any two ranges overlap, then some two neighbours do.
        ranges.sort(key=lambda span: (span.start, span.stop, span.rank))
        for before, after in pairwise(ranges):
            if after.start < before.stop:
                return after.rank
    return None


class _SameWeights(NamedTuple):
    """Ranks of this job that hold the same weights as this rank, and their process group."""

    ranks: list[int]  # with this rank, sorted
    group: dist.ProcessGroup | None  # None: there is no other rank


def _ranks_with_same_weights(layouts: list[_Layout], rank: int) -> _SameWeights:
    """Return the ranks that hold the same weights as `rank`, with a new process group; collective.

    All ranks of the job must call it: torch requires that they create all groups, in the same
    order.

    Args:
        layouts: Weights that each rank holds, in rank order.
        rank: This rank.
    """
    ranks_by_key: dict[str, list[int]] = {}
    for other, layout in enumerate(layouts):
        ranks_by_key.setdefault(layout.holdings_key, []).append(other)
    result = _SameWeights([rank], None)
    for ranks in ranks_by_key.values():
        group = dist.new_group(ranks) if len(ranks) > 1 else None
        if rank in ranks:
            result = _SameWeights(ranks, group)
    return result
