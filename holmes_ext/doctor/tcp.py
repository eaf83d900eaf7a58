"""Whether TCP, by kernel and NCCL's variables, carries what the links between clusters could."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from holmes_ext.cluster.addresses import LONG_S, TcpLimits, shortfalls, sockets
from holmes_ext.cluster.spec import SiteSpec
from holmes_ext.doctor.finding import Finding, note, problem
from holmes_ext.units import format_seconds


def check_tcp(
    spec: SiteSpec, node: str, limits: TcpLimits, environ: Mapping[str, str]
) -> Iterator[Finding]:
    """On `node`, or on a node of each cluster where it is none of the file's (a login node)."""
    wan = spec.wan.measured(spec.pairs)
    count = {cluster.name: len(cluster.nodes) for cluster in spec.clusters}
    home = spec.owner.get(spec.known_as(node))
    here = [home.name] if home else list(count)
    for cluster in here:
        for short in shortfalls(
            wan, spec.ethernet_rate_bps, count, cluster, limits, sockets(environ)
        ):
            yield problem(
                "TCP",
                short.what,
                "a stream has one window under way in a round trip; the link is idle in between",
                short.mend,
            )
    trips = [2 * link.latency_s for link in wan.between if set(here) & set(link.clusters)]
    if max(trips, default=0.0) < LONG_S:
        return
    if limits.paced:
        yield note(
            "TCP",
            f"congestion control is BBR, with round trips of up to {format_seconds(max(trips))}",
            "after a pause BBR sends at the low rate it measured on earlier small messages: 18 KiB "
            "took 37 ms over a link of 20 ms and 100 Mb/s, with Reno 22 ms",
            "where links lose no packets, on all nodes: sysctl -w "
            "net.ipv4.tcp_congestion_control=cubic net.ipv4.tcp_slow_start_after_idle=0",
        )
    if limits.idle_restart:
        yield note(
            "TCP",
            f"tcp_slow_start_after_idle is 1, with round trips of up to {format_seconds(max(trips))}",
            "after a pause (a step's computing) every stream starts with a small window and needs "
            "round trips to open it",
            "on all nodes: sysctl -w net.ipv4.tcp_slow_start_after_idle=0",
        )
