"""Reads the communicators that NCCL made in a job on emulated GPUs, and counts the bytes of each NIC.

The ranks write their communicators into the job's watch directory (csrc/nccl/communicators.cc).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from holmes_lab.network.shaping import LabNode

#: Network of a communicator whose ranks are all on the same node.
INSIDE = "inside a node"


@dataclass(frozen=True)
class Communicator:
    """A communicator of NCCL."""

    name: str
    #: The job's rank of each member; None for a member whose process wrote no record, so that its
    #: rank is unknown.
    ranks: tuple[int | None, ...]
    network: str  # as NCCL calls it: "Socket", "IB" or the name of a plugin's network
    group: str  # name of the process group that the program gave it


def read(directory: Path) -> list[Communicator]:
    """Return the communicators that the ranks of a job wrote into the files of `directory`.

    Each rank writes two kinds of records:

        a communicator is made    {"communicator": its name, "self": this process, "members": processes,
                                  "network": NCCL's transport between nodes, such as "Socket",
                                  "group": name of the process group, or ""}
        its group gets a name     {"communicator", "group"}

    A later name of a rank replaces its earlier name. Ranks may disagree, because a rank that never used a
    communicator may not know its name. So the name of a communicator is the last name that was written by the
    lowest rank with a name.

    Returns:
        The communicators, ordered by their lowest rank, and then as that rank made them. In `ranks`, a member
        is None if its process wrote no record, since its rank is then unknown.
    """
    records = _records_by_rank(directory)
    rank_of_process: dict[str, int] = {}
    for rank, records_of_rank in records.items():
        for record in records_of_rank:
            if _is_new_communicator(record):
                rank_of_process[record["self"]] = rank
    communicators: dict[str, Communicator] = {}
    for rank in sorted(records):
        last_group = {
            record["communicator"]: record["group"] for record in records[rank] if record["group"]
        }
        for record in records[rank]:
            name = record["communicator"]
            if not _is_new_communicator(record):
                continue
            if name in communicators and communicators[name].group:
                continue  # a lower rank knows the name of its group
            communicators[name] = Communicator(
                name,
                ranks=tuple(rank_of_process.get(member) for member in record["members"]),
                network=record["network"],
                group=last_group.get(name, ""),
            )
    return list(communicators.values())


def _is_new_communicator(record: dict[str, Any]) -> bool:
    """Return whether a record describes a new communicator, and not a new name of its process group."""
    return "members" in record


def _records_by_rank(directory: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the JSON records that each rank wrote into its file rank<N>.communicators.

    csrc/nccl/communicators.cc describes their keys.
    """
    records = {}
    for path in directory.glob("rank*.communicators"):
        rank = int(path.stem.removeprefix("rank"))
        records[rank] = [json.loads(line) for line in path.read_text().splitlines()]
    return records


def ranks_of(communicators: Iterable[Communicator]) -> dict[str, tuple[int | None, ...]]:
    """Return name of each communicator -> the job's rank of each member.

    The rank is None for a member whose process wrote no record, so that its rank is unknown.
    """
    return {communicator.name: communicator.ranks for communicator in communicators}


@dataclass(frozen=True)
class GroupNetwork:
    """Communicators with the same group name, size, number of nodes, network and NICs."""

    group: str
    ranks: tuple[tuple[int, ...], ...]  # of each communicator
    nodes: int  # number of nodes of each communicator
    network: str  # as NCCL calls it, or INSIDE
    nics: tuple[str, ...]  # names of the network's NICs on these nodes


@dataclass(frozen=True)
class NicBytes:
    """Bytes that a NIC moved while a job ran, including headers and TCP retransmissions."""

    node: str
    nic: str
    kind: str
    received: int
    sent: int


class _GroupKey(NamedTuple):
    """Properties that the communicators of a `GroupNetwork` share."""

    group: str
    members: int
    nodes: int
    network: str
    nics: tuple[str, ...]


def group_networks(
    communicators: Sequence[Communicator], nodes: Sequence[LabNode], node_of_rank: Sequence[int]
) -> list[GroupNetwork]:
    """Merge a job's communicators that are alike into one GroupNetwork each, for a report.

    They are alike if they have the same group name, size, number of nodes, network and NICs. For
    example, with 2 processes on each node, two communicators of the group "dp" with the ranks (0,
    2) and (1, 3), both over "IB", become one GroupNetwork with ranks ((0, 2), (1, 3)).

    A communicator with a single rank uses no network, and is left out. A rank may be None, if its
    process wrote no record. It counts in the size only, not in the ranks or in the number of nodes.

    Args:
        communicators: The communicators of the job.
        nodes: Nodes of the job, in the launcher's order.
        node_of_rank: Position of the node of each rank in `nodes`.
    """
    ranks_by_key: dict[_GroupKey, list[tuple[int, ...]]] = defaultdict(list)
    for communicator in communicators:
        members = len(communicator.ranks)
        if members <= 1:
            continue
        ranks = tuple(rank for rank in communicator.ranks if rank is not None)
        node_numbers = sorted({node_of_rank[rank] for rank in ranks})
        network = INSIDE
        nics: tuple[str, ...] = ()
        if len(node_numbers) > 1:
            network = communicator.network
            nics = _nics(network, [nodes[number] for number in node_numbers])
        key = _GroupKey(communicator.group, members, len(node_numbers), network, nics)
        ranks_by_key[key].append(ranks)
    return [
        GroupNetwork(key.group, tuple(ranks), key.nodes, key.network, key.nics)
        for key, ranks in ranks_by_key.items()
    ]


def _nics(network: str, nodes: Sequence[LabNode]) -> tuple[str, ...]:
    """Return the names of the nodes' NICs that belong to a network of NCCL: "Socket", "IB", a plugin's."""
    uses_rdma = network != "Socket"
    names = set()
    for node in nodes:
        for nic in node.nics:
            is_rdma = nic.kind != "ethernet"
            if is_rdma == uses_rdma:
                names.add(nic.name)
    return tuple(sorted(names))


def nic_bytes(
    before: Mapping[str, Mapping[str, tuple[int, int]]],
    after: Mapping[str, Mapping[str, tuple[int, int]]],
    nodes: Sequence[LabNode],
) -> list[NicBytes]:
    """Return the bytes that each NIC of the nodes moved between two readings of Lab.counters().

    Args:
        before: First reading: node -> NIC -> (received bytes, sent bytes).
        after: Second reading.
        nodes: Nodes of the job.
    """
    moved = []
    for node in nodes:
        for nic in node.nics:
            received_before, sent_before = before[node.name][nic.name]
            received_after, sent_after = after[node.name][nic.name]
            moved.append(
                NicBytes(
                    node=node.name,
                    nic=nic.name,
                    kind=nic.kind,
                    received=received_after - received_before,
                    sent=sent_after - sent_before,
                )
            )
    return moved
