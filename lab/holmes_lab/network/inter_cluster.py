"""Addresses, devices and delay line of the emulated network between clusters (wide-area links).

    node a0 [eth0]--veth--[e0]  bridge "eth0"  10.77.0.0/24   wan0 --+
    node a1 [eth0]--veth--[e1]    (router 10.77.0.254)               |  lab/network/delay_line.py: uplinks,
    node b0 [eth0]--veth--[e2]  bridge "eth1"  10.77.1.0/24   wan1 --+  links between two clusters, latency

The delay line is the process that delays frames between clusters and limits their rate. Clusters
are numbered in the order of cluster.toml, whose uplinks and links (cluster/wan.py) are emulated. A
file without them needs no delay line, and all nodes are then on one Ethernet.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from holmes_ext.cluster.spec import SiteSpec
from holmes_ext.cluster.wan import Between, Wan

ETHERNET_NET = 77
PREFIX = 24
#: Kernel settings of every node if round trips are long. With them, TCP windows do not limit a
#: stream, and do not shrink while a job computes. (Kernels start with 4 to 32 MiB and with slow
#: start after idle; `holmes doctor` shows the effect.) Any network namespace may choose Reno. BBR
#: would send a message after a pause at the rate that it measured on earlier small messages: 18 KiB
#: take 37 ms over a link of 20 ms and 100 Mb/s, with Reno 22 ms.
TUNED = {
    "net.ipv4.tcp_wmem": "4096 1048576 134217728",
    "net.ipv4.tcp_rmem": "4096 1048576 134217728",
    "net.ipv4.tcp_slow_start_after_idle": "0",
    "net.ipv4.tcp_congestion_control": "reno",
}


class NodeAddress(NamedTuple):
    """Addresses of a node's Ethernet NIC, and its cluster."""

    ip: str  # IPv4
    cluster: int | None  # number of the cluster; None if all clusters are on one Ethernet
    mac: str


def address(cluster: int, index: int) -> str:
    """Return the IPv4 address of a node's eth0.

    Args:
        cluster: Number of the cluster.
        index: Number of the node in the cluster, from 0.
    """
    return f"10.{ETHERNET_NET}.{cluster}.{index + 1}"


def bridge(cluster: int) -> str:
    """Return the name of a cluster's bridge."""
    return f"eth{cluster}"


def route_lines(cluster: int) -> list[str]:
    """Return the lines for `ip -batch` on a node that route to other clusters.

    The next hop is the router of the node's cluster. There is no such machine: its frames go to the delay
    line, the process that emulates the network between clusters. This process answers no ARP requests, so a
    line also sets the router's MAC address.

    Args:
        cluster: Number of the node's cluster.
    """
    router = f"10.{ETHERNET_NET}.{cluster}.254"
    return [
        f"neighbor add {router} lladdr {_router_mac(cluster)} dev eth0 nud permanent",
        f"route add 10.{ETHERNET_NET}.0.0/16 via {router} dev eth0",
    ]


def tap_lines(clusters: int) -> list[str]:
    """Return the lines for `ip -batch` that attach the delay line to the bridge of each cluster.

    The delay line, the process that delays frames between clusters, has a TAP device for each
    cluster.

    Args:
        clusters: Number of clusters.
    """
    return [
        f"link set dev {_tap(number)} master {bridge(number)} txqueuelen 10000 up"
        for number in range(clusters)
    ]


def delay_line(
    spec: SiteSpec,
    scale: float,
    nodes: Sequence[NodeAddress],
    wire_bits_per_data_bit: float,
) -> dict[str, Any]:
    """Return the arguments of the process that delays frames between clusters (delay_line.Router).

    It has a TAP device (a virtual NIC) on the bridge of each cluster, and acts there as the
    cluster's router: nodes send frames for other clusters to the MAC address of that router.

    Args:
        spec: The clusters and the network between them. Its rates count TCP data.
        scale: Factor of all rates.
        nodes: Addresses of all nodes.
        wire_bits_per_data_bit: Bits on the wire for each bit of TCP data, because of headers.

    Returns:
        {"clusters": ..., "links": ..., "nodes": ...}. A rate of 0 stands for no limit.
    """
    wan = spec.wan.scaled(scale)
    names = [cluster.name for cluster in spec.clusters]
    clusters = [
        {
            "tap": _tap(number),
            "mac": _router_mac(number),
            "uplink_bps": wan.uplink_of.get(name, 0) * wire_bits_per_data_bit,
        }
        for number, name in enumerate(names)
    ]
    links = []
    for first, second in itertools.combinations(range(len(names)), 2):
        link = link_of(wan, names[first], names[second])
        wire_bps = link.rate_bps * wire_bits_per_data_bit
        links.append([first, second, wire_bps, link.latency_s])
    return {
        "clusters": clusters,
        "links": links,
        "nodes": {node.ip: [node.cluster, node.mac] for node in nodes},
    }


def link_of(wan: Wan, first: str, second: str) -> Between:
    """Return the link between two clusters; if cluster.toml has none, a link without limit and latency."""
    unlimited = Between((first, second), rate_bps=0, latency_s=0.0)
    return wan.pair_of.get((first, second)) or unlimited


def _router_mac(cluster: int) -> str:
    return f"02:48:4d:ff:00:{cluster:02x}"


def _tap(cluster: int) -> str:
    return f"wan{cluster}"
