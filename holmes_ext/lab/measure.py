"""Achieved against configured bandwidth of every kind of link, by plain TCP between two nodes (lab/network/stream.py).

On a fast link the acknowledgement's way back is much of the time of a message of 64 KiB: rows count (and must be within
10 %) from 128 KiB on. Both processes run under SCHED_RR where permitted: a busy machine is not what is measured.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from holmes_ext.cluster.spec import SiteSpec
from holmes_ext.errors import HolmesError
from holmes_ext.lab.lab import Lab
from holmes_ext.lab.network.shaping import LabNode

SIZES = (64 << 10, 128 << 10, 512 << 10, 4 << 20)
COUNTS_FROM = 128 << 10
TOLERANCE = 0.10
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


def measure(spec: SiteSpec, scale: float = 1.0) -> list[LinkRow]:
    """Bring a lab up and measure one pair of nodes of each fabric and one across clusters on Ethernet."""
    with Lab(spec, scale, realtime=True) as lab:
        pairs = _pairs(lab.nodes)
        if not pairs:
            raise HolmesError(f"{spec.source}: one node has no link to measure; name at least two")
        return [row for link, pair in pairs.items() for row in _measure_link(lab, link, *pair)]


def _measure_link(lab: Lab, link: str, one: LabNode, two: LabNode) -> list[LinkRow]:
    near, far = (next(nic for nic in node.nics if nic.fabric == link) for node in (one, two))
    command = [sys.executable, "-I", "-S", _STREAM, far.address, *map(str, SIZES)]
    result = lab.run(command, order=[one.name, two.name], processes=1, timeout=600)
    if result.returncode != 0:
        said = " ".join(result.outputs[result.first_failed or 0].split())
        raise HolmesError(f"lab: measuring {link} failed: {said}")
    names, interfaces, configured = (one.name, two.name), (near.name, far.name), min(near.rate_bps, far.rate_bps)
    rows = []
    for size, achieved in zip(SIZES, json.loads(result.stdout[0])):
        ratio, counts = achieved / configured, size >= COUNTS_FROM
        within = abs(ratio - 1) <= TOLERANCE
        rows.append(LinkRow(link, names, interfaces, size, configured, achieved, ratio, within, counts))
    return rows


def _pairs(nodes: Sequence[LabNode]) -> dict[str, tuple[LabNode, LabNode]]:
    """fabric -> the two nodes to measure; on Ethernet the first two of different clusters if there are such."""
    pairs: dict[str, tuple[LabNode, LabNode]] = {}
    for one, two in itertools.combinations(nodes, 2):
        for fabric in {nic.fabric for nic in one.nics[1:]} & {nic.fabric for nic in two.nics[1:]}:
            pairs.setdefault(fabric, (one, two))
    crossing = [pair for pair in itertools.combinations(nodes, 2) if pair[0].cluster != pair[1].cluster]
    if len(nodes) > 1:
        pairs["ethernet"] = crossing[0] if crossing else (nodes[0], nodes[1])
    return pairs
