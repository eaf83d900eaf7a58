"""The communicators of a job, as NCCL made them (csrc/nccl/communicators.cc): who is in each, on which
network, and which NIC of which node carried how many bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holmes_lab.network.shaping import LabNode

#: In place of a network for a group whose ranks are on one node.
INSIDE = "inside a node"


@dataclass(frozen=True)
class Communicator:
    """ranks: of the job, in the order of the communicator (None: a process that has told nothing); network:
    NCCL's name, "Socket" or "IB"; group: the name that its maker gave it."""

    name: str
    ranks: tuple[int | None, ...]
    network: str
    group: str


def read(directory: Path) -> list[Communicator]:
    """Return the communicators that the ranks of a job wrote into the files of `directory`.

    Ranks may disagree on a communicator's name, because a rank that never used it may not know the name. The
    first rank that has a name decides.

    Returns:
        One `Communicator` for each of NCCL's, in the order in which the lowest of its ranks made them.
    """
    records = _records_by_rank(directory)
    rank_of_process = {
        record["self"]: rank
        for rank, of_rank in records.items()
        for record in of_rank
        if "members" in record
    }
    found: dict[str, Communicator] = {}
    for rank in sorted(records):
        last_name = {
            record["communicator"]: record["group"] for record in records[rank] if record["group"]
        }
        for record in records[rank]:
            name = record["communicator"]
            if "members" not in record:  # this line has only a new name for a communicator
                continue
            if name in found and found[name].group:
                continue
            ranks = tuple(rank_of_process.get(member) for member in record["members"])
            found[name] = Communicator(
                name, ranks, record["network"], group=last_name.get(name, "")
            )
    return list(found.values())


def _records_by_rank(directory: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the lines of JSON that each rank wrote (csrc/nccl/communicators.cc says what they contain)."""
    records = {}
    for path in directory.glob("rank*.communicators"):
        rank = int(path.stem.removeprefix("rank"))
        records[rank] = [json.loads(line) for line in path.read_text().splitlines()]
    return records


def ranks_of(communicators: Iterable[Communicator]) -> dict[str, tuple[int | None, ...]]:
    return {communicator.name: communicator.ranks for communicator in communicators}


@dataclass(frozen=True)
class GroupNetwork:
    """Communicators that are alike. ranks: of each of them; nodes: over how many nodes each goes; network:
    NCCL's name, or INSIDE; nics: what that network is on these nodes, by the lab's file."""

    group: str
    ranks: tuple[tuple[int, ...], ...]
    nodes: int
    network: str
    nics: tuple[str, ...]


@dataclass(frozen=True)
class NicBytes:
    """What one NIC moved while the job ran. Bytes, headers and what TCP sent again included."""

    node: str
    nic: str
    kind: str
    received: int
    sent: int


def group_networks(
    communicators: Sequence[Communicator], nodes: Sequence[LabNode], processes: int
) -> list[GroupNetwork]:
    """nodes: in the launcher's order; processes: on each node. A communicator of one rank uses no network,
    and is left out."""
    alike: dict[tuple[str, int, int, str, tuple[str, ...]], list[tuple[int, ...]]] = {}
    for communicator in communicators:
        ranks = tuple(rank for rank in communicator.ranks if rank is not None)
        if len(communicator.ranks) < 2:
            continue
        places = sorted({rank // processes for rank in ranks})
        network = communicator.network if len(places) > 1 else INSIDE
        nics = _nics(network, [nodes[place] for place in places]) if len(places) > 1 else ()
        key = (communicator.group, len(communicator.ranks), len(places), network, nics)
        alike.setdefault(key, []).append(ranks)
    return [
        GroupNetwork(group, tuple(ranks), count, network, nics)
        for (group, _, count, network, nics), ranks in alike.items()
    ]


def _nics(network: str, nodes: Sequence[LabNode]) -> tuple[str, ...]:
    """Interfaces that NCCL's network means on these nodes."""
    fast = network == "IB"
    return tuple(
        sorted(
            {nic.name for node in nodes for nic in node.nics if (nic.kind != "ethernet") == fast}
        )
    )


def nic_bytes(
    before: Mapping[str, Mapping[str, tuple[int, int]]],
    after: Mapping[str, Mapping[str, tuple[int, int]]],
    nodes: Sequence[LabNode],
) -> list[NicBytes]:
    """before, after: Lab.counters()."""
    return [
        NicBytes(
            node.name,
            nic.name,
            nic.kind,
            *(after[node.name][nic.name][i] - before[node.name][nic.name][i] for i in (0, 1)),
        )
        for node in nodes
        for nic in node.nics
    ]
