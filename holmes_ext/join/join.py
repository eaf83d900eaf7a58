"""Making a joined job's parts, on all ranks at once: groups of the job, maps of who exchanges what, the
rank's port, the way to the coordinator."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from holmes_ext.join.address import JoinAddress, JoinPlace, incarnation_of, port_range
from holmes_ext.join.coordinator.client import CoordinatorClient
from holmes_ext.join.loop import OuterLoop, Record
from holmes_ext.join.peers.links import PeerLinks
from holmes_ext.join.peers.listening import open_port, told_address
from holmes_ext.join.peers.routes import RankIdentity, Routes
from holmes_ext.join.peers.take import Giver
from holmes_ext.join.rolling_loop import RollingLoop
from holmes_ext.join.rounds.coordinator_link import CoordinatorLink
from holmes_ext.join.rounds.rolling_runner import RollingRunner
from holmes_ext.join.rounds.round_runner import RoundRunner
from holmes_ext.join.settings import OuterSettings
from holmes_ext.join.shards.job_ranks import JobRanks, Replicas, gather_cut_matrices
from holmes_ext.join.shards.ownership import RankRange, any_cut, fragment_cuts, owners
from holmes_ext.join.shards.state import OuterState
from holmes_ext.join.shards.weights import Part, Tensor, Weights, row_of
from holmes_ext.join.sockets.handshake import Credentials
from holmes_ext.options import Options
from holmes_ext.words import some_of

PARALLEL = "a job can join if its weights are replicated or sharded over whole data-parallel groups"
#: Of the job's own control group: rounds have deadlines of their own, and a rank that dies closes its
#: connections.
_CONTROL = timedelta(days=1)


def place_of(address: JoinAddress, token: str, options: Options) -> JoinPlace:
    """HolmesError where files of the options cannot be used."""
    plain = options.value("join_plain") == "on"
    credentials = Credentials(
        token, plain, options.value("join_certificate"), options.value("join_ca")
    )
    return JoinPlace(
        address,
        credentials,
        port_range(options.value("join_ports"), options.value("join_address"), os.environ),
    )


def weights_of(shards: Any) -> Weights:
    """Of what a patch tells (training.WeightShards)."""
    tensors = [Tensor(*tensor) for tensor in shards.tensors]
    starts = row_of(tensors)
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
) -> OuterLoop:
    """An OuterLoop that has not begun: load outer state into it where there is some, then begin(). Collective
    over the job's ranks; what goes wrong on one of them is raised on all.

    agreed: what else must be the same in all jobs, in words (sizes); device: of the weights' fragments on
    their way; status: for heartbeats. Makes a gloo group of all ranks, and one with the default backend of
    each set of ranks that hold the same parts.
    """
    job = place.address.job
    many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    job_ranks = JobRanks(dist.new_group(backend="gloo", timeout=_CONTROL) if many else None)
    here: Weights = job_ranks.run_on_all_ranks(weights)
    whole = here.matrices if settings.outer_algorithm().of_matrices else []
    row = {
        "position": here.position,
        "digest": here.digest,
        "total": here.total,
        "holdings": here.holdings,
        "whole": [(matrix.start, matrix.stop) for matrix in whole],
    }
    everyone = job_ranks.all_gather(row)
    maps = _maps(job, everyone, settings, job_ranks)
    replicas, group = _replicas(everyone, job_ranks.rank)
    _refuse_odd_holdings(job, here, everyone, replicas, job_ranks)
    ranges_here = maps[here.position]
    state = OuterState(settings, here, ranges_here, job_ranks.rank)
    _gather_what_is_cut(state, maps, everyone, job_ranks.rank, device)
    secret = job_ranks.broadcast_from_rank_0(os.urandom(16).hex())
    identity = RankIdentity(job, incarnation_of(secret), job_ranks.rank, secret)
    links: PeerLinks = job_ranks.run_on_all_ranks(lambda: _links(place, identity, state))
    addresses = job_ranks.all_gather(links.address)
    names = job_ranks.all_gather(here.named())
    client = None
    if job_ranks.rank == 0:
        first = {entry["position"]: rank for rank, entry in reversed(list(enumerate(everyone)))}
        rows = {f"weights at {position}": names[rank] for position, rank in first.items()}
        fixed = {
            "agreed": {"outer": settings.agreed(), **rows, **agreed},
            "maps": {position: _flat(ranges) for position, ranges in maps.items()},
            "addresses": addresses,
            "min": settings.min,
            "timeout": settings.timeout,
        }
        client = CoordinatorClient(place, lambda: {**fixed, **rounds.hello()}, secret)
    coordinator = CoordinatorLink(client, job_ranks, settings.timeout)
    rolling = settings.rounds == "async"
    runner = RollingRunner if rolling else RoundRunner
    rounds = runner(settings, state, ranges_here, job_ranks, links, coordinator, job)
    gathered = Replicas(ranges_here, replicas, group, device)
    arguments = settings, here, state, rounds, gathered, on_round, written
    if rolling:
        boundary = JobRanks(dist.new_group(backend="gloo", timeout=_CONTROL) if many else None)
        loop: OuterLoop = RollingLoop(*arguments, boundary=boundary)
    else:
        loop = OuterLoop(*arguments)
    if client is not None:
        client.start_heartbeat(lambda: {"round": rounds.number, "step": loop.steps, **status()})
    return loop


def _links(place: JoinPlace, identity: RankIdentity, state: OuterState) -> PeerLinks:
    """HolmesError when this rank cannot listen."""
    listening = open_port(place, identity.rank)
    address = told_address(place, listening, identity)

    def open_routes(incoming: Callable[..., None]) -> Routes:
        return Routes(identity, place, listening, address, incoming)

    return PeerLinks(identity.job, open_routes, Giver(state).give)


def _maps(
    job: str, everyone: list[dict[str, Any]], settings: OuterSettings, job_ranks: JobRanks
) -> dict[str, list[RankRange]]:
    """By position, who exchanges what."""
    maps = {}
    for position in dict.fromkeys(row["position"] for row in everyone):
        there = {rank: row for rank, row in enumerate(everyone) if row["position"] == position}
        if len({row["digest"] for row in there.values()}) > 1:
            job_ranks.refuse(
                f"the ranks of job {job} at {position} hold weights of different names or shapes;"
                f" {PARALLEL}"
            )
        holdings = {rank: [(a, b) for a, b in row["holdings"]] for rank, row in there.items()}
        one = next(iter(there.values()))
        total, whole = one["total"], [(start, stop) for start, stop in one["whole"]]
        maps[position] = owners(
            total, fragment_cuts(total, settings.fragments, whole), holdings, whole
        )
    return maps


def _gather_what_is_cut(
    state: OuterState,
    maps: Mapping[str, list[RankRange]],
    everyone: list[dict[str, Any]],
    rank: int,
    device: torch.device,
) -> None:
    """Matrices of which several ranks exchange parts; all ranks make all groups, in one order."""
    for position, owned in maps.items():
        there = [other for other, row in enumerate(everyone) if row["position"] == position]
        if not any_cut(owned, [(start, stop) for start, stop in everyone[there[0]]["whole"]]):
            continue
        group = dist.new_group(there)
        if rank in there:
            holders = Replicas(owned, there, group, device)
            gather_cut_matrices(state.fragments, state.matrices, holders, state.weights.device)


def _refuse_odd_holdings(
    job: str,
    here: Weights,
    everyone: list[dict[str, Any]],
    replicas: list[int],
    job_ranks: JobRanks,
) -> None:
    if (rank := _shares_some(everyone)) is not None:
        some = f"rank {rank} of job {job} shares some of its weights, but not all, with others"
        job_ranks.refuse(f"{some}; {PARALLEL}")
    sums = job_ranks.all_gather(here.checksum() if len(replicas) > 1 else 0)
    if any(sums[rank] != sums[job_ranks.rank] for rank in replicas):
        who = f"ranks {some_of(replicas)} of job {job}"
        job_ranks.refuse(f"{who} should hold the same weights, but do not; {PARALLEL}")


def _flat(ranges: list[RankRange]) -> list[int]:
    return [number for span in ranges for number in (span.start, span.stop, span.rank)]


def _shares_some(everyone: list[dict[str, Any]]) -> int | None:
    """A rank that holds elements which a rank with other holdings has, too; None: there is none."""
    seen: set[str] = set()
    ranges: dict[str, list[tuple[int, int, int]]] = {}
    for rank, row in enumerate(everyone):
        if (key := json.dumps([row["position"], row["holdings"]])) not in seen:
            seen.add(key)
            ranges.setdefault(row["position"], []).extend(
                (start, stop, rank) for start, stop in row["holdings"]
            )
    for held in ranges.values():
        held.sort()
        for (_, stop, _), (start, _, rank) in pairwise(held):
            if start < stop:
                return rank
    return None


def _replicas(
    everyone: list[dict[str, Any]], rank: int
) -> tuple[list[int], dist.ProcessGroup | None]:
    """The ranks that hold the same, and their group; all ranks make all groups, in one order."""
    sets: dict[str, list[int]] = {}
    for other, row in enumerate(everyone):
        sets.setdefault(json.dumps([row["position"], row["holdings"]]), []).append(other)
    mine, group = [rank], None
    for ranks in sets.values():
        made = dist.new_group(ranks) if len(ranks) > 1 else None
        if rank in ranks:
            mine, group = ranks, made
    return mine, group
