"""Measurement of the lab's emulated links: achieved and configured rates of TCP between two nodes.

network/stream.py runs on the nodes. Between clusters, it also measures the round trip and the rate
of several pairs of nodes at once. The time of a message includes that of its acknowledgement: a
large part of the time of a small message on a fast link. So only messages of COUNTS_FROM bytes or
more must reach the configured rate within TOLERANCE. All processes run under SCHED_RR if the system
permits it, so that a busy machine does not change the result.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holmes_ext.cluster.spec import SiteSpec
from holmes_ext.errors import HolmesError
from holmes_lab.compare import lab_for_measurements
from holmes_lab.lab import Lab
from holmes_lab.network import inter_cluster
from holmes_lab.network.shaping import LabNode

#: Sizes of the messages in bytes.
SIZES = (64 << 10, 128 << 10, 512 << 10, 4 << 20)
#: Smallest message in bytes that must reach the configured rate.
COUNTS_FROM = 128 << 10
#: Largest relative difference between the achieved and the configured rate.
TOLERANCE = 0.10
#: Largest difference between the round trip and the configured one: relative, and in seconds.
_TRIP_TOLERANCE = 0.05
_LEAST_TRIP_ERROR_S = 1e-3
#: Largest number of pairs of nodes that send at once.
MOST_PAIRS = 4
#: Messages between clusters that would take longer (seconds) are left out.
LONGEST_S = 1.0
_STREAM = str(Path(__file__).with_name("network") / "stream.py")


@dataclass(frozen=True)
class LinkRow:
    """Measured rate of one link with one message size."""

    link: str  # name of the network
    nodes: tuple[str, str]  # sender and receiver
    interface: tuple[str, str]  # NIC of each node
    message_bytes: int
    configured_bps: int  # of TCP data, as the other rates
    achieved_bps: float
    ratio: float  # achieved / configured
    within: bool  # whether the ratio is within TOLERANCE
    #: Whether the link fails if `within` is false. The rate of a small message is only shown,
    #: because the time of its acknowledgement is a large part of its time.
    counts: bool


@dataclass(frozen=True)
class BetweenClustersRow:
    """Measured value of the link between two clusters."""

    clusters: tuple[str, str]
    #: "round trip" (seconds), "512 KiB" (bits/s of a message) or "4 pairs at once" (bits/s of all
    #: pairs).
    what: str
    configured: float  # the value that cluster.toml leads to
    achieved: float  # the measured value
    within: bool  # whether the values differ by no more than the tolerance


def measure(spec: SiteSpec, scale: float = 1.0) -> tuple[list[LinkRow], list[BetweenClustersRow]]:
    """Start a lab and measure its links.

    One pair of nodes is measured for each fast network and for Ethernet. If all clusters share one
    Ethernet, the nodes of its pair are in different clusters. If the file describes the network
    between clusters, every pair of clusters is measured, too.

    Args:
        spec: Content of a cluster.toml.
        scale: Factor of all rates.

    Returns:
        The rows of the networks, and the rows of the links between clusters.

    Raises:
        HolmesError: there is only one node, or a measurement failed.
    """
    with lab_for_measurements(spec, scale) as lab:
        pairs = _pairs_to_measure(lab.nodes)
        if len(lab.nodes) <= 1:
            raise HolmesError(f"{spec.source}: one node has no link to measure; name at least two")
        links = []
        for link, (first, second) in pairs.items():
            links += _measure_link(lab, link, first, second)
        between_clusters = []
        if spec.wan:
            for first_number, second_number in itertools.combinations(range(len(spec.clusters)), 2):
                between_clusters += measure_between(lab, first_number, second_number)
        return links, between_clusters


def measure_between(lab: Lab, first: int, second: int) -> list[BetweenClustersRow]:
    """Measure round trip and TCP rates between two clusters, and compare them with cluster.toml.

    Args:
        lab: The emulated clusters.
        first: Number of the sending cluster, from 0.
        second: Number of the receiving cluster.

    Returns:
        The rows, by their `what`:
            "round trip"         seconds
            "128 KiB", ...       bits/s of single messages of this size between two nodes
            "1 pair"             bits/s of a stream without pauses between two nodes
            "4 pairs at once"    sum of several such streams, up to MOST_PAIRS; missing if a
                                 cluster has only one node
    """
    spec = lab.spec
    sides = [
        [node for node in lab.nodes if node.ethernet_segment == number]
        for number in (first, second)
    ]
    names = (spec.clusters[first].name, spec.clusters[second].name)
    wan = spec.wan.scaled(lab.scale)
    link = inter_cluster.link_of(wan, *names)
    nic_bps = sides[0][0].nics[0].rate_bps
    # Limits that all pairs of nodes share; 0 is no limit.
    limits = [link.rate_bps, wan.uplink_of.get(names[0], 0), wan.uplink_of.get(names[1], 0)]
    shared_bps = [rate_bps for rate_bps in limits if rate_bps]
    single_pair_bps = min([nic_bps, *shared_bps])
    sizes = [
        size for size in SIZES if size >= COUNTS_FROM and size * 8 / single_pair_bps < LONGEST_S
    ]
    if not sizes:
        sizes = [COUNTS_FROM]
    (single,) = flood(lab, sides, count=1, sizes=sizes)

    trip_s = 2 * link.latency_s
    measured_trip_s = single["round_trip"]
    tolerance_s = max(_LEAST_TRIP_ERROR_S, _TRIP_TOLERANCE * trip_s)
    is_within = abs(measured_trip_s - trip_s) <= tolerance_s
    rows = [BetweenClustersRow(names, "round trip", trip_s, measured_trip_s, is_within)]
    for size, seconds in zip(sizes, single["seconds"]):
        transfer_s = max(seconds - measured_trip_s, 1e-9)
        rows.append(_rate_row(names, f"{size >> 10} KiB", single_pair_bps, size * 8 / transfer_s))
    rows.append(_rate_row(names, "1 pair", single_pair_bps, single["flood"]))
    count = min(MOST_PAIRS, len(sides[0]), len(sides[1]))
    if count > 1:
        senders = flood(lab, sides, count=count, sizes=sizes)
        achieved_bps = sum(sender["flood"] for sender in senders)
        configured_bps = min([count * nic_bps, *shared_bps])
        rows.append(_rate_row(names, f"{count} pairs at once", configured_bps, achieved_bps))
    return rows


def _rate_row(
    clusters: tuple[str, str], what: str, configured_bps: float, achieved_bps: float
) -> BetweenClustersRow:
    """Return the row of a rate in bits/s that was measured between two clusters.

    Args:
        clusters: Names of the sending and the receiving cluster.
        what: Name of the measurement, such as "512 KiB" or "4 pairs at once".
        configured_bps: Rate that cluster.toml leads to, in bits/s.
        achieved_bps: Measured rate, in bits/s.
    """
    is_within = abs(achieved_bps / configured_bps - 1) <= TOLERANCE
    return BetweenClustersRow(clusters, what, configured_bps, achieved_bps, is_within)


def flood(
    lab: Lab, sides: Sequence[Sequence[LabNode]], count: int, sizes: Sequence[int]
) -> list[dict[str, Any]]:
    """Measure the TCP rates of several nodes of a cluster that send to another cluster at once.

    Each sends to a receiver of its own, without a pause, for some seconds. With a single pair, the
    round trip and single messages are then measured, too.

    Args:
        lab: The emulated clusters.
        sides: Nodes of the sending cluster, and nodes of the receiving cluster.
        count: Number of pairs: the first `count` nodes of both clusters.
        sizes: Sizes in bytes of the single messages; not used if `count` is above 1.

    Returns:
        For each sender, "flood": rate in bits/s. With a single pair and sizes also "round_trip":
        median in seconds, and "seconds": mean time until a message is acknowledged, for each size.
    """
    senders, receivers = (list(side[:count]) for side in sides)
    return _run_stream_program(
        lab,
        link=f"{senders[0].cluster} to {receivers[0].cluster}",
        mode="flood",
        senders=senders,
        receivers=receivers,
        addresses=[node.address for node in receivers],  # of eth0
        sizes=sizes,
    )


def _run_stream_program(
    lab: Lab,
    link: str,
    mode: str,
    senders: Sequence[LabNode],
    receivers: Sequence[LabNode],
    addresses: Sequence[str],
    sizes: Sequence[int],
) -> list[dict[str, Any]]:
    """Measure TCP between pairs of nodes by running network/stream.py on all of these nodes.

    Args:
        lab: The running lab.
        link: Name of the link, for the error message.
        mode: "flood": all senders send at once without a pause, and a single pair then sends
            messages. "messages": a single pair sends messages only.
        senders: The sending nodes.
        receivers: The receiving nodes, one for each sender.
        addresses: IP addresses of the receiving nodes on the network to measure.
        sizes: Sizes of the messages in bytes.

    Returns:
        The values of each sender. "flood": rate of the data sent without a pause, in bits/s.
        "round_trip": median in seconds; "seconds": [mean of a message with its acknowledgement, for
        each size]. Keys of values that were not measured are missing.

    Raises:
        HolmesError: the program failed.
    """
    # -I -S: the program needs only the standard library, and so starts sooner.
    command = [sys.executable, "-I", "-S", _STREAM, mode, ",".join(addresses), *map(str, sizes)]
    order = [node.name for node in (*senders, *receivers)]
    result = lab.run(command, order=order, processes=1, timeout=600)
    if result.returncode != 0:
        output = " ".join(result.outputs[result.first_failed or 0].split())
        raise HolmesError(f"lab: measuring {link} failed: {output}")
    return [json.loads(result.stdout[rank]) for rank in range(len(senders))]


def _measure_link(lab: Lab, link: str, first: LabNode, second: LabNode) -> list[LinkRow]:
    """Measure the rate of messages of all sizes between two nodes on a network.

    The rate is the bits of a message, divided by the seconds until its acknowledgement has arrived.
    A small message spends much of this time waiting for the acknowledgement, so a link fails only
    by messages of COUNTS_FROM bytes or more (LinkRow.counts).

    Args:
        lab: The running lab.
        link: Name of the network.
        first: The sending node.
        second: The receiving node.

    Returns:
        A row for each size.
    """
    sender_nic = next(nic for nic in first.nics if nic.fabric == link)
    receiver_nic = next(nic for nic in second.nics if nic.fabric == link)
    (measured,) = _run_stream_program(  # the values of the only sender
        lab,
        link,
        mode="messages",
        senders=[first],
        receivers=[second],
        addresses=[receiver_nic.address],
        sizes=SIZES,
    )
    configured_bps = min(sender_nic.rate_bps, receiver_nic.rate_bps)
    rows = []
    for size, seconds in zip(SIZES, measured["seconds"]):  # mean seconds of each size
        achieved_bps = size * 8 / seconds
        ratio = achieved_bps / configured_bps
        rows.append(
            LinkRow(
                link,
                nodes=(first.name, second.name),
                interface=(sender_nic.name, receiver_nic.name),
                message_bytes=size,
                configured_bps=configured_bps,
                achieved_bps=achieved_bps,
                ratio=ratio,
                within=abs(ratio - 1) <= TOLERANCE,
                counts=size >= COUNTS_FROM,  # whether a wrong rate makes the link fail
            )
        )
    return rows


def _pairs_to_measure(nodes: Sequence[LabNode]) -> dict[str, tuple[LabNode, LabNode]]:
    """Choose two nodes for each network, to measure the network between them.

    Returns:
        Name of the network -> (sender, receiver). A network without a suitable pair is missing.

            fast network    the first two nodes that have a NIC in it
            "ethernet"      If all clusters share one Ethernet: the first two nodes of different
                            clusters, or of the only cluster. If each cluster has an Ethernet of its
                            own: the first two nodes of the same cluster.
    """
    pairs: dict[str, tuple[LabNode, LabNode]] = {}
    for first, second in itertools.combinations(nodes, 2):
        fabrics = {nic.fabric for nic in first.fast_nics}
        for fabric in fabrics.intersection(nic.fabric for nic in second.fast_nics):
            pairs.setdefault(fabric, (first, second))
    ethernet_pair = _ethernet_pair(nodes)
    if ethernet_pair is not None:
        pairs["ethernet"] = ethernet_pair
    return pairs


def _ethernet_pair(nodes: Sequence[LabNode]) -> tuple[LabNode, LabNode] | None:
    """Choose two nodes, to measure Ethernet between them; None if no pair is suitable.

    If all clusters share one Ethernet, they are the first two nodes of different clusters, or the
    first two nodes if there is one cluster.

    If each cluster has an Ethernet of its own, they are the first two nodes of the same cluster.
    The links between the Ethernets have other rates, and are measured separately.
    """
    pairs = list(itertools.combinations(nodes, 2))
    each_cluster_has_ethernet = nodes[0].ethernet_segment is not None
    if each_cluster_has_ethernet:
        suitable = [(first, second) for first, second in pairs if first.cluster == second.cluster]
    else:
        suitable = [(first, second) for first, second in pairs if first.cluster != second.cluster]
        suitable = suitable or pairs
    return suitable[0] if suitable else None
