"""Achieved against configured bandwidth of every kind of link, by plain TCP between two nodes (lab/network/stream.py).

On a fast link the acknowledgement's way back is much of the time of a message of 64 KiB: rows count (and must be within
10 %) from 128 KiB on. The two processes run under SCHED_RR where permitted, so that a busy machine is not what is measured.
"""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from holmes_ext.cluster.spec import SiteSpec
from holmes_ext.errors import HolmesError
from holmes_ext.units import format_rate

SIZES = (64 << 10, 128 << 10, 512 << 10, 4 << 20)
COUNTS_FROM = 128 << 10
TOLERANCE = 0.10
_STREAM = str(Path(__file__).with_name("stream.py"))


@dataclass(frozen=True)
class Row:
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


def measure(spec: SiteSpec, scale: float = 1.0) -> list[Row]:
    """Bring a lab up and measure one pair of nodes of each fabric and one across clusters on Ethernet."""
    from holmes_ext.lab.lab import Lab

    rows = []
    with Lab(spec, scale, realtime=True) as lab:
        pairs = _pairs(lab.nodes)
        if not pairs:
            raise HolmesError(f"{spec.source}: one node has no link to measure; name at least two")
        for link, (one, two) in pairs.items():
            nics = [next(nic for nic in node.nics if nic.fabric == link) for node in (one, two)]
            command = [sys.executable, "-I", "-S", _STREAM, nics[1].address, *map(str, SIZES)]
            configured = min(nic.rate_bps for nic in nics)
            result = lab.run(command, order=[one.name, two.name], processes=1, timeout=600)
            if result.returncode != 0:
                raise HolmesError(f"lab: measuring {link} failed: {' '.join(result.outputs[result.first_failed or 0].split())}")
            for size, achieved in zip(SIZES, json.loads(result.stdout[0])):
                ratio = achieved / configured
                rows.append(
                    Row(
                        link=link,
                        nodes=(one.name, two.name),
                        interface=(nics[0].name, nics[1].name),
                        message_bytes=size,
                        configured_bps=configured,
                        achieved_bps=achieved,
                        ratio=ratio,
                        within=abs(ratio - 1) <= TOLERANCE,
                        counts=size >= COUNTS_FROM,
                    )
                )
    return rows


def print_table(rows: list[Row], cluster: str, scale: float) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{cluster}, scale {scale:g}: achieved against configured bandwidth")
    for column in ("link", "nodes", "message", "configured", "achieved", "ratio", ""):
        table.add_column(column, justify="right" if column in ("message", "configured", "achieved", "ratio") else "left")
    for row in rows:
        verdict = "ok" if row.within else "off by more than 10 %" if row.counts else "small message"
        cells = [f"{row.message_bytes >> 10} KiB", format_rate(row.configured_bps), format_rate(row.achieved_bps)]
        table.add_row(row.link, "-".join(row.nodes), *cells, f"{row.ratio:.3f}", verdict)
    Console().print(table)


def _pairs(nodes) -> dict[str, tuple]:
    """fabric -> the two nodes to measure; on Ethernet the first two of different clusters if there are such."""
    pairs: dict[str, tuple] = {}
    for one, two in itertools.combinations(nodes, 2):
        for fabric in {nic.fabric for nic in one.nics[1:]} & {nic.fabric for nic in two.nics[1:]}:
            pairs.setdefault(fabric, (one, two))
    crossing = [pair for pair in itertools.combinations(nodes, 2) if pair[0].cluster != pair[1].cluster]
    if len(nodes) > 1:
        pairs["ethernet"] = crossing[0] if crossing else (nodes[0], nodes[1])
    return pairs
