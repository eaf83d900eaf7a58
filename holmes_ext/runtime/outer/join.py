"""Making a joined job's parts, on all ranks at once: groups inside, maps of who exchanges what, the rank's port, the
way to the coordinator."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from holmes_ext.errors import HolmesError
from holmes_ext.runtime.outer.address import JoinAddress
from holmes_ext.runtime.outer.coordinator.client import CoordinatorClient
from holmes_ext.runtime.outer.job_ranks import JobRanks, Replicas
from holmes_ext.runtime.outer.loop import OuterLoop, Record
from holmes_ext.runtime.outer.ownership import fragment_cuts, owners
from holmes_ext.runtime.outer.peers.links import PeerLinks
from holmes_ext.runtime.outer.peers.take import give
from holmes_ext.runtime.outer.round_runner import RoundRunner
from holmes_ext.runtime.outer.settings import OuterSettings
from holmes_ext.runtime.outer.state import OuterState
from holmes_ext.runtime.outer.weights import Part, Tensor, Weights, row_of
from holmes_ext.words import some_of

PARALLEL = "jobs can join whose weights are replicated, or sharded, over whole data-parallel groups"


def own_host(host: str, port: int) -> str:
    """This node's address on the way to the coordinator. Nothing is sent."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise HolmesError(
            f"--holmes-join: there is no way to {host} ({error.strerror or error}); is the name right?"
        ) from None


def weights_of(held: Any) -> Weights:
    """Of what a patch tells (training.WeightShards)."""
    tensors = [Tensor(*one) for one in held.tensors]
    starts = row_of(tensors)
    parts = [Part(starts[name] + first, values) for name, first, values in held.parts]
    return Weights(held.position, tensors, parts, held.moved)


def join(
    place: JoinAddress,
    token: str,
    settings: OuterSettings,
    weights: Callable[[], Weights],
    agreed: Mapping[str, Any],
    device: torch.device,
    told: Callable[[Record], None] = lambda record: None,
    written: Callable[[], None] = lambda: None,
    status: Callable[[], dict[str, Any]] = dict,
) -> OuterLoop:
    """An OuterLoop that has not begun: load outer state into it where there is some, then begin(). Collective over the
    job's ranks; what goes wrong on one of them is raised on all.

    agreed: what else must be the same in all jobs, in words (sizes); device: of the weights' fragments on their way;
    status: for heartbeats. Makes a gloo group of all ranks, and one with the default backend of each set of ranks that
    hold the same parts.
    """
    many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    patience = timedelta(seconds=4 * settings.timeout + 300)
    job_ranks = JobRanks(dist.new_group(backend="gloo", timeout=patience) if many else None)
    here: Weights = job_ranks.together(weights)
    row = {"position": here.position, "digest": here.digest, "total": here.total, "holdings": here.holdings}
    everyone = job_ranks.from_all(row)
    maps = {}
    for position in dict.fromkeys(one["position"] for one in everyone):
        there = {rank: one for rank, one in enumerate(everyone) if one["position"] == position}
        if len({one["digest"] for one in there.values()}) > 1:
            job_ranks.refuse(f"the ranks of job {place.job} at {position} hold weights of different names or shapes;"
                          f" {PARALLEL}")  # fmt: skip
        holdings = {rank: [(a, b) for a, b in one["holdings"]] for rank, one in there.items()}
        total = next(iter(there.values()))["total"]
        maps[position] = owners(total, fragment_cuts(total, settings.fragments), holdings)
    owned = maps[here.position]
    replicas, group = _replicas(everyone, job_ranks.rank)
    if (rank := _shares_some(everyone)) is not None:
        some = f"rank {rank} of job {place.job} shares some of its weights, but not all, with others"
        job_ranks.refuse(f"{some}; {PARALLEL}")
    sums = job_ranks.from_all(here.checksum() if len(replicas) > 1 else 0)
    if any(sums[rank] != sums[job_ranks.rank] for rank in replicas):
        who = f"ranks {some_of(replicas)} of job {place.job}"
        job_ranks.refuse(f"{who} should hold the same weights, but do not; {PARALLEL}")
    state = OuterState(settings, here, owned, job_ranks.rank)
    identity = job_ranks.from_first(os.urandom(8).hex())
    port = int(os.environ.get("HOLMES_JOIN_PORT", "0"))

    def listen() -> PeerLinks:
        at = port and port + int(os.environ.get("LOCAL_RANK", "0"))
        host = own_host(place.host, place.port)
        return PeerLinks(
            place.job, identity, job_ranks.rank, token, host, at, serve=lambda line, _: give(state, line)
        )

    links = job_ranks.together(listen)
    addresses = job_ranks.from_all(links.address)
    names = job_ranks.from_all(here.named())
    point = None
    if job_ranks.rank == 0:
        first = {one["position"]: rank for rank, one in reversed(list(enumerate(everyone)))}
        rows = {f"weights at {position}": names[rank] for position, rank in first.items()}
        fixed = {
            "agreed": {"outer": settings.agreed(), **rows, **agreed},
            "maps": {
                position: [[one.start, one.stop, one.rank] for one in owned]
                for position, owned in maps.items()
            },
            "addresses": addresses,
            "min": settings.min,
            "timeout": settings.timeout,
        }
        point = CoordinatorClient(
            place.job, place.host, place.port, token, lambda: {**fixed, **rounds.hello()}, identity
        )
    rounds = RoundRunner(settings, state, owned, job_ranks, links, point, place.job, token)
    joined = OuterLoop(settings, here, state, rounds, Replicas(owned, replicas, group, device), told, written)
    if point is not None:
        point.heartbeat(lambda: {"round": rounds.number, "step": joined.steps, **status()})
    return joined


def _shares_some(everyone: list[dict[str, Any]]) -> int | None:
    """A rank that holds elements which a rank with other holdings has, too; None: there is none."""
    seen: set[str] = set()
    ranges: dict[str, list[tuple[int, int, int]]] = {}
    for rank, one in enumerate(everyone):
        if (key := json.dumps([one["position"], one["holdings"]])) not in seen:
            seen.add(key)
            ranges.setdefault(one["position"], []).extend(
                (start, stop, rank) for start, stop in one["holdings"]
            )
    for found in ranges.values():
        found.sort()
        for (_, stop, _), (start, _, rank) in pairwise(found):
            if start < stop:
                return rank
    return None


def _replicas(everyone: list[dict[str, Any]], rank: int) -> tuple[list[int], dist.ProcessGroup | None]:
    """The ranks that hold what this one holds, and their group; all ranks make all groups, in the same order."""
    sets: dict[str, list[int]] = {}
    for one, its in enumerate(everyone):
        sets.setdefault(json.dumps([its["position"], its["holdings"]]), []).append(one)
    mine, group = [rank], None
    for ranks in sets.values():
        made = dist.new_group(ranks) if len(ranks) > 1 else None
        if rank in ranks:
            mine, group = ranks, made
    return mine, group
