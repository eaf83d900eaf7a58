"""Achieved against configured bandwidth of every kind of link, by plain TCP between two nodes
(lab/network/stream.py); between clusters also the round trip, and what several pairs of nodes get at once.

On a fast link the acknowledgement's way back is much of the time of a message of 64 KiB: rows count (and must
be within 10 %) from 128 KiB on. Both processes run under SCHED_RR where permitted: a busy machine is not what
is measured.
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
from holmes_lab.compare import tuned
from holmes_lab.lab import Lab
from holmes_lab.network import crossing
from holmes_lab.network.shaping import LabNode

SIZES = (64 << 10, 128 << 10, 512 << 10, 4 << 20)
COUNTS_FROM = 128 << 10
TOLERANCE = 0.10
MOST_PAIRS = 4
LONGEST_S = 1.0  # messages between clusters that take longer tell nothing new
_STREAM = str(Path(__file__).with_name("network") / "stream.py")


@dataclass(frozen=True)
class LinkRow:
    """One link and message size. Rates in bits/s of application data; ratio: achieved / configured."""

    link: str
    nodes: tuple[str, str]
    interface: tuple[str, str]
    message_bytes: int
    configured_bps: int
    achieved_bps: float
    ratio: float
    within: bool
    counts: bool


@dataclass(frozen=True)
class CrossingRow:
    """Between two clusters. what: "round trip" (seconds), "512 KiB" (a message, one pair of nodes) or "4
    pairs at once" (bits/s of application data, all of them together)."""

    clusters: tuple[str, str]
    what: str
    configured: float
    achieved: float
    within: bool


def measure(spec: SiteSpec, scale: float = 1.0) -> tuple[list[LinkRow], list[CrossingRow]]:
    """Bring a lab up and measure one pair of nodes of each fabric and one on Ethernet, across clusters on a
    flat network; and, where the file says what lies between the clusters, every pair of them."""
    with tuned(spec, scale) as lab:
        pairs = _pairs(lab.nodes)
        if len(lab.nodes) < 2:
            raise HolmesError(f"{spec.source}: one node has no link to measure; name at least two")
        links = [row for link, pair in pairs.items() for row in _measure_link(lab, link, *pair)]
        crossings = itertools.combinations(range(len(spec.clusters)), 2) if spec.wan else []
        return links, [
            row for first, second in crossings for row in measure_crossing(lab, first, second)
        ]


def measure_crossing(lab: Lab, first: int, second: int) -> list[CrossingRow]:
    """Of two clusters by number: round trip, messages, and up to MOST_PAIRS pairs of nodes at once."""
    spec = lab.spec
    sides = [[node for node in lab.nodes if node.site == number] for number in (first, second)]
    names = spec.clusters[first].name, spec.clusters[second].name
    wan = spec.wan.scaled(lab.scale)
    link, nic = crossing.link_of(wan, *names), sides[0][0].nics[0].rate_bps
    shared = [
        rate for rate in (link.rate_bps, *(wan.uplink_of.get(name, 0) for name in names)) if rate
    ]
    alone = min([nic, *shared])
    sizes = [size for size in SIZES if size >= COUNTS_FROM and size * 8 / alone < LONGEST_S] or [
        COUNTS_FROM
    ]
    (single,) = flood(lab, sides, 1, sizes)
    trip = 2 * link.latency_s
    error = abs(single["round_trip"] - trip)
    rows = [
        CrossingRow(
            names, "round trip", trip, single["round_trip"], error <= max(1e-3, 0.05 * trip)
        )
    ]

    def rate(what: str, configured: float, achieved: float) -> None:
        rows.append(
            CrossingRow(
                names, what, configured, achieved, abs(achieved / configured - 1) <= TOLERANCE
            )
        )

    for size, seconds in zip(sizes, single["seconds"]):
        rate(f"{size >> 10} KiB", alone, size * 8 / max(seconds - single["round_trip"], 1e-9))
    rate("1 pair", alone, single["flood"])
    if (count := min(MOST_PAIRS, *map(len, sides))) > 1:
        together = sum(sender["flood"] for sender in flood(lab, sides, count, sizes))
        rate(f"{count} pairs at once", min([count * nic, *shared]), together)
    return rows


def flood(
    lab: Lab, sides: Sequence[Sequence[LabNode]], count: int, sizes: Sequence[int]
) -> list[dict[str, Any]]:
    """What each of `count` senders measured."""
    near, far = (list(side[:count]) for side in sides)
    link = f"{near[0].cluster} to {far[0].cluster}"
    return _streams(lab, link, "flood", near, far, [node.address for node in far], sizes)


def _streams(
    lab: Lab,
    link: str,
    what: str,
    near: Sequence[LabNode],
    far: Sequence[LabNode],
    addresses: Sequence[str],
    sizes: Sequence[int],
) -> list[dict[str, Any]]:
    """What stream.py prints on the nodes `near`; addresses: of those that are `far`."""
    command = [sys.executable, "-I", "-S", _STREAM, what, ",".join(addresses), *map(str, sizes)]
    result = lab.run(command, order=[node.name for node in (*near, *far)], processes=1, timeout=600)
    if result.returncode != 0:
        output = " ".join(result.outputs[result.first_failed or 0].split())
        raise HolmesError(f"lab: measuring {link} failed: {output}")
    return [json.loads(result.stdout[rank]) for rank in range(len(near))]


def _measure_link(lab: Lab, link: str, first: LabNode, second: LabNode) -> list[LinkRow]:
    near, far = (next(nic for nic in node.nics if nic.fabric == link) for node in (first, second))
    (measured,) = _streams(lab, link, "messages", [first], [second], [far.address], SIZES)
    names, interfaces = (first.name, second.name), (near.name, far.name)
    configured = min(near.rate_bps, far.rate_bps)
    rows = []
    for size, seconds in zip(SIZES, measured["seconds"]):
        achieved = size * 8 / seconds
        ratio, counts = achieved / configured, size >= COUNTS_FROM
        within = abs(ratio - 1) <= TOLERANCE
        rows.append(
            LinkRow(link, names, interfaces, size, configured, achieved, ratio, within, counts)
        )
    return rows


def _pairs(nodes: Sequence[LabNode]) -> dict[str, tuple[LabNode, LabNode]]:
    """fabric -> the two nodes to measure; on Ethernet the first two of different clusters, or of one cluster
    where each has an Ethernet of its own, if there are such."""
    pairs: dict[str, tuple[LabNode, LabNode]] = {}
    for first, second in itertools.combinations(nodes, 2):
        for fabric in {nic.fabric for nic in first.nics[1:]} & {
            nic.fabric for nic in second.nics[1:]
        }:
            pairs.setdefault(fabric, (first, second))
    apart = nodes[0].site is not None
    best = [
        pair
        for pair in itertools.combinations(nodes, 2)
        if (pair[0].cluster == pair[1].cluster) == apart
    ]
    if best or len(nodes) > 1 and not apart:
        pairs["ethernet"] = best[0] if best else (nodes[0], nodes[1])
    return pairs
