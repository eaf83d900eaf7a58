"""Making a joined job's parts, on all ranks at once: groups inside, maps of who exchanges what, the rank's port, the
way to the meeting point."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from holmes_ext.errors import HolmesError
from holmes_ext.runtime.outer.cross.links import PeerLinks
from holmes_ext.runtime.outer.cross.take import give
from holmes_ext.runtime.outer.elements import fragment_cuts, owners
from holmes_ext.runtime.outer.inside import Inside, Replicas
from holmes_ext.runtime.outer.joined import Joined, Record
from holmes_ext.runtime.outer.meeting.client import MeetingPoint
from holmes_ext.runtime.outer.rounds import Rounds
from holmes_ext.runtime.outer.settings import OuterSettings
from holmes_ext.runtime.outer.state import OuterState
from holmes_ext.runtime.outer.weights import Weights

#: Where `holmes join serve` listens when nothing else is said.
PORT = 29600


@dataclass(frozen=True)
class Place:
    """NAME@HOST:PORT: this job's name in the run, and where the meeting point is."""

    job: str
    host: str
    port: int


def parse_place(text: str) -> Place:
    """HolmesError when it is not NAME@HOST or NAME@HOST:PORT."""
    job, at, where = text.partition("@")
    host, colon, port = where.rpartition(":") if ":" in where else (where, "", str(PORT))
    if (
        not at
        or not host
        or not job
        or not all(c.isalnum() or c in "-_." for c in job)
        or not port.isdecimal()
        or not 0 < int(port) < 65536
    ):
        raise HolmesError(f"--holmes-join: {text!r} is not NAME@HOST:PORT, such as east@10.0.0.1:{PORT}")
    return Place(job, host, int(port))


def token_from(environ: Mapping[str, str]) -> str:
    """HOLMES_JOIN_TOKEN, or the content of the file that HOLMES_JOIN_TOKEN_FILE names; HolmesError when there is
    neither."""
    if token := environ.get("HOLMES_JOIN_TOKEN", "").strip():
        return token
    if path := environ.get("HOLMES_JOIN_TOKEN_FILE"):
        try:
            with open(path, encoding="utf-8") as file:
                return file.read().strip()
        except OSError as error:
            raise HolmesError(f"HOLMES_JOIN_TOKEN_FILE: {path} cannot be read ({error.strerror})") from None
    raise HolmesError(
        "a joined job needs the run's token: set HOLMES_JOIN_TOKEN to the one that `holmes join serve` was"
        " given or printed"
    )


def own_host(host: str, port: int) -> str:
    """This node's address on the way to the meeting point. Nothing is sent."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise HolmesError(
            f"--holmes-join: there is no way to {host} ({error.strerror or error}); is the name right?"
        ) from None


def join(
    place: Place,
    token: str,
    settings: OuterSettings,
    weights: Weights,
    agreed: Mapping[str, Any],
    device: torch.device,
    told: Callable[[Record], None] = lambda record: None,
    written: Callable[[], None] = lambda: None,
    status: Callable[[], dict[str, Any]] = dict,
) -> Joined:
    """A Joined that has not begun: load outer state into it where there is some, then begin(). Collective over the
    job's ranks.

    agreed: what else must be the same in all jobs, in words (sizes); device: of the weights' fragments on their way;
    status: for pulses. Makes a gloo group of all ranks, and where weights.replicas has several ranks a group of each
    such set, with the default backend.
    """
    many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    patience = timedelta(seconds=4 * settings.timeout + 300)
    inside = Inside(dist.new_group(backend="gloo", timeout=patience) if many else None)
    row = {"position": weights.position, "digest": weights.digest, "total": weights.total}
    everyone = inside.from_all({**row, "holdings": weights.holdings, "replicas": list(weights.replicas)})
    maps = {}
    for position in dict.fromkeys(one["position"] for one in everyone):
        there = {rank: one for rank, one in enumerate(everyone) if one["position"] == position}
        holdings = {rank: [(a, b) for a, b in one["holdings"]] for rank, one in there.items()}
        total = next(iter(there.values()))["total"]
        maps[position] = owners(total, fragment_cuts(total, settings.fragments), holdings)
    owned = maps[weights.position]
    group = _replica_group(everyone, inside.rank) if many else None
    state = OuterState(settings, weights, owned, inside.rank)
    host = own_host(place.host, place.port)
    port = int(os.environ.get("HOLMES_JOIN_PORT", "0"))
    identity = inside.from_first(os.urandom(8).hex())
    links = PeerLinks(
        place.job,
        identity,
        inside.rank,
        token,
        host,
        port and port + int(os.environ.get("LOCAL_RANK", "0")),
        serve=lambda line, purpose: give(state, line),
    )
    addresses = inside.from_all(links.address)
    point = None
    if inside.rank == 0:
        tensors = {one["position"]: one["digest"] for one in everyone}
        fixed = {
            "agreed": {"outer": settings.agreed(), "tensors": tensors, **agreed},
            "maps": {position: [[one.start, one.stop, one.rank] for one in owned] for position, owned in maps.items()},
            "addresses": addresses,
            "min": settings.min,
            "timeout": settings.timeout,
        }
        point = MeetingPoint(place.job, place.host, place.port, token, lambda: {**fixed, **rounds.hello()}, identity)
    rounds = Rounds(settings, state, owned, inside, links, point, place.job, token)
    joined = Joined(
        settings, weights, state, rounds, Replicas(weights, owned, inside.rank, group, device), told, written
    )
    if point is not None:
        point.pulse(lambda: {"round": rounds.number, "step": joined.steps, **status()})
    return joined


def _replica_group(everyone: list[dict[str, Any]], rank: int) -> dist.ProcessGroup | None:
    """The group of this rank's replicas; all ranks make all groups, in the same order."""
    mine = None
    for ranks in sorted({tuple(one["replicas"]) for one in everyone if len(one["replicas"]) > 1}):
        group = dist.new_group(list(ranks))
        if rank in ranks:
            mine = group
    return mine
