"""The network between clusters (cluster/wan.py) in a lab: addresses, devices and what the delay line is told.

    node a0 [eth0]--veth--[e0]  bridge "eth0"  10.77.0.0/24   wan0 --+
    node a1 [eth0]--veth--[e1]    (router 10.77.0.254)               |  lab/network/delay_line.py: uplinks,
    node b0 [eth0]--veth--[e2]  bridge "eth1"  10.77.1.0/24   wan1 --+  links between two clusters, latency

Clusters are numbered in the file's order. A file without uplinks and [[between]] has none of this.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from holmes_ext.cluster.spec import SiteSpec
from holmes_ext.cluster.wan import Between, Wan

ETHERNET_NET = 77
PREFIX = 24
#: Of every node where round trips are long and what is measured is the network: no window of TCP bounds a
#: stream, and none shrinks while a job computes. (Kernels start with 4 to 32 MiB and 1; `holmes doctor` says
#: what that costs.) Reno is what a namespace may always choose. BBR paces a message that follows a pause by
#: what it knows of the link from small ones before: 18 KiB then take 37 ms over a link of 20 ms and 100 Mb/s,
#: with Reno 22.
TUNED = {
    "net.ipv4.tcp_wmem": "4096 1048576 134217728",
    "net.ipv4.tcp_rmem": "4096 1048576 134217728",
    "net.ipv4.tcp_slow_start_after_idle": "0",
    "net.ipv4.tcp_congestion_control": "reno",
}


def address(cluster: int, index: int) -> str:
    """IPv4 address of the eth0 of node `index` (from 0) of cluster number `cluster`."""
    return f"10.{ETHERNET_NET}.{cluster}.{index + 1}"


def bridge(cluster: int) -> str:
    return f"eth{cluster}"


def route_lines(cluster: int) -> list[str]:
    """For `ip -batch` on a node: everything else is behind its cluster's router, which answers no ARP."""
    router = f"10.{ETHERNET_NET}.{cluster}.254"
    return [
        f"neighbor add {router} lladdr {_router_mac(cluster)} dev eth0 nud permanent",
        f"route add 10.{ETHERNET_NET}.0.0/16 via {router} dev eth0",
    ]


def tap_lines(clusters: int) -> list[str]:
    """For `ip -batch` in the switch once the delay line has made its TAPs."""
    return [
        f"link set dev {_tap(number)} master {bridge(number)} txqueuelen 10000 up"
        for number in range(clusters)
    ]


def delay_line(
    spec: SiteSpec, scale: float, nodes: Sequence[tuple[str, int | None, str]], wire: float
) -> dict[str, Any]:
    """What the keeper starts the delay line with. nodes: (address, cluster, MAC); wire: bits on the wire for
    each bit of TCP's data, which is what a rate counts."""
    wan, names = spec.wan.scaled(scale), [cluster.name for cluster in spec.clusters]
    clusters = [
        {
            "tap": _tap(number),
            "mac": _router_mac(number),
            "uplink_bps": wan.uplink_of.get(name, 0) * wire,
        }
        for number, name in enumerate(names)
    ]
    links = []
    for first, second in itertools.combinations(range(len(names)), 2):
        link = link_of(wan, names[first], names[second])
        links.append([first, second, link.rate_bps * wire, link.latency_s])
    return {
        "clusters": clusters,
        "links": links,
        "nodes": {where: [cluster, mac] for where, cluster, mac in nodes},
    }


def link_of(wan: Wan, first: str, second: str) -> Between:
    """What lies between two clusters besides their uplinks; rate 0: no limit."""
    return wan.pair_of.get((first, second)) or Between((first, second), 0, 0.0)


def _router_mac(cluster: int) -> str:
    return f"02:48:4d:ff:00:{cluster:02x}"


def _tap(cluster: int) -> str:
    return f"wan{cluster}"
