"""Table of the network between the clusters, which `holmes plan` prints."""

from __future__ import annotations

from collections.abc import Sequence

from holmes_ext.cli.show.table import Column, Screen
from holmes_ext.cluster.fabric import ETHERNET
from holmes_ext.cluster.site import Site
from holmes_ext.units import format_rate, format_seconds

#: Title of the table.
WAN_TITLE = "between clusters, one way: rate that all traffic shares, and latency"


def show_wan(site: Site, notes: Sequence[str] = ()) -> None:
    """Print a table of the rate and latency from each cluster to each other cluster, and notes.

    The table has a row and a column for each cluster. There is no table if cluster.toml describes
    no network between the clusters.

    Args:
        site: The clusters and the network between them.
        notes: Lines to print below the table.
    """
    screen = Screen()
    if site.wan:
        screen.table(*wan_table(site), WAN_TITLE)
    for note in notes:
        screen.line(f"note: {note}", "yellow")


def wan_table(site: Site) -> tuple[list[Column], list[list[str]]]:
    """Return the columns and the rows of the table, with a row for each sending cluster.

    The column "uplink" has the rate of the cluster's uplink (all its traffic to other clusters
    shares it); "" if it has none. The other columns are the receiving clusters. Their cells have
    the rate and the latency of the path in this direction, such as "10 Gb/s 20 ms". All flows from
    the sending to the receiving cluster share this rate.
    """
    columns = [Column("cluster"), Column("uplink", right=True)]
    # On a narrow terminal, the cells of these columns are wrapped to 8 characters. If that is
    # not enough, columns are left out, the last cluster first (the largest `drop`).
    for number, name in enumerate(site.clusters, start=1):
        columns.append(Column(name, right=True, wrap=8, drop=number))
    return columns, [_row(site, source) for source in site.clusters]


def _row(site: Site, source: str) -> list[str]:
    """Return the cells of a cluster: its name, its uplink, and the link to each cluster.

    Args:
        site: The clusters and the network between them.
        source: Name of the cluster.
    """
    uplink = ""
    if source in site.wan.uplink_of:
        uplink = format_rate(site.wan.uplink_of[source])
    cells = [source, uplink]
    for target in site.clusters:
        cells.append("" if target == source else _link(site, source, target))
    return cells


def _link(site: Site, source: str, target: str) -> str:
    """Return the rate and latency from one cluster to another, such as "10 Gb/s 20 ms".

    Args:
        site: The clusters and the network between them.
        source: Name of the sending cluster.
        target: Name of the receiving cluster.

    Returns:
        "flat" stands for the rate of a link without a limit: as in a flat network, only the NICs
        limit it.
    """
    # Hops: uplinks and links between the clusters that limit the rate or add latency.
    hops = site.wan.hops(source, target)
    rate_bps = min((hop.rate_bps for hop in hops), default=float("inf"))
    # Without latencies of hops, messages take as long as between nodes of the same cluster.
    latency_s = sum(hop.latency_s for hop in hops) or site.fabric_by_name[ETHERNET].latency_s
    rate = "flat" if rate_bps == float("inf") else format_rate(rate_bps)
    return f"{rate} {format_seconds(latency_s)}"
