"""Checks whether TCP can use the full rate of links between clusters, as kernel and NCCL are set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from holmes_ext.cluster.addresses import LONG_S, TcpLimits, shortfalls, sockets
from holmes_ext.cluster.spec import SiteSpec
from holmes_ext.doctor.finding import Finding, note, problem
from holmes_ext.units import format_seconds


def check_tcp(
    spec: SiteSpec, node: str, limits: TcpLimits, environ: Mapping[str, str]
) -> Iterator[Finding]:
    """Yield findings about TCP settings that limit the rate between clusters.

    Args:
        spec: Content of cluster.toml.
        node: Name of this machine. If it is no node of the file (a login node), one node of each cluster is
            checked instead.
        limits: TCP settings of the kernel.
        environ: Environment variables, for the number of NCCL's TCP connections.
    """
    wan = spec.wan.measured(spec.pairs)
    node_counts = {cluster.name: len(cluster.nodes) for cluster in spec.clusters}
    home = spec.cluster_by_node.get(spec.known_as(node))
    checked_clusters = [home.name] if home else list(node_counts)
    streams = sockets(environ)
    for cluster in checked_clusters:
        for short in shortfalls(wan, spec.ethernet_rate_bps, node_counts, cluster, limits, streams):
            yield problem(
                "TCP",
                what=short.what,
                why="a stream has one window under way in a round trip; the link is idle in between",
                mend=short.mend,
            )
    links = [link for link in wan.between if set(checked_clusters) & set(link.clusters)]
    longest_trip_s = max((2 * link.latency_s for link in links), default=0.0)
    if longest_trip_s < LONG_S:
        return
    if limits.paced:
        yield note(
            "TCP",
            what=f"congestion control is BBR, with round trips of up to {format_seconds(longest_trip_s)}",
            why="after a pause BBR sends at the low rate it measured on earlier small messages: 18 KiB "
            "took 37 ms over a link of 20 ms and 100 Mb/s, with Reno 22 ms",
            mend="where links lose no packets, on all nodes: sysctl -w "
            "net.ipv4.tcp_congestion_control=cubic net.ipv4.tcp_slow_start_after_idle=0",
        )
    if limits.idle_restart:
        yield note(
            "TCP",
            what="tcp_slow_start_after_idle is 1, with round trips of up to "
            f"{format_seconds(longest_trip_s)}",
            why="after a pause (a step's computing) every stream starts with a small window and needs "
            "round trips to open it",
            mend="on all nodes: sysctl -w net.ipv4.tcp_slow_start_after_idle=0",
        )
