"""The network between the clusters, as `holmes plan` shows it: a row and a column for each cluster."""

from __future__ import annotations

from collections.abc import Sequence

from holmes_ext.cli.show.table import Column, Screen
from holmes_ext.cluster.fabric import ETHERNET
from holmes_ext.cluster.site import Site
from holmes_ext.units import format_rate, format_seconds


def show_wan(site: Site, notes: Sequence[str] = ()) -> None:
    """Nothing but `notes` where the network is flat."""
    screen = Screen()
    if site.wan:
        names = site.clusters
        uplinks = [
            format_rate(site.wan.uplink_of[name]) if name in site.wan.uplink_of else ""
            for name in names
        ]
        rows = [
            (
                source,
                uplink,
                *("" if source == target else _cell(site, source, target) for target in names),
            )
            for source, uplink in zip(names, uplinks)
        ]
        columns = [Column("cluster"), Column("uplink", right=True)]
        columns += [
            Column(name, right=True, wrap=8, drop=place) for place, name in enumerate(names, 1)
        ]
        screen.table(columns, rows, "between clusters, one way: what all traffic shares, latency")
    for note in notes:
        screen.line(f"note: {note}", "yellow")


def _cell(site: Site, source: str, target: str) -> str:
    hops = site.wan.hops(source, target)
    rate = min((hop.rate_bps for hop in hops), default=float("inf"))
    seconds = sum(hop.latency_s for hop in hops) or site.fabric_by_name[ETHERNET].latency_s
    return f"{format_rate(rate) if rate < float('inf') else 'flat'} {format_seconds(seconds)}"
