"""The network between the clusters of a SiteSpec, as addresses, devices and what the delay line is told.

    node a0 [eth0]--veth--[e0]  bridge "eth0"  10.77.0.0/24   wan0 --+
    node a1 [eth0]--veth--[e1]    (router 10.77.0.254)               |  lab/network/delay_line.py: uplinks,
    node b0 [eth0]--veth--[e2]  bridge "eth1"  10.77.1.0/24   wan1 --+  links between two clusters, latency
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holmes_ext.cluster.spec import SiteSpec

TEMP = None

ETHERNET_NET = 77
PREFIX = 24
_ROUTER = 254


@dataclass(frozen=True)
class Link:
    """Between two clusters, each way: bits/s that all share (0: unlimited), seconds one way."""

    rate_bps: int
    latency_s: float


@dataclass(frozen=True)
class Wan:
    """uplinks: of each cluster in the file's order, bits/s each way (0: unlimited); links: by pairs of cluster numbers,
    the lower first, every pair."""

    clusters: tuple[str, ...]
    uplinks: tuple[int, ...]
    links: Mapping[tuple[int, int], Link]

    def link(self, one: int, two: int) -> Link:
        return self.links[min(one, two), max(one, two)]

    def bottleneck(self, one: int, two: int) -> int:
        """Bits/s that all nodes of cluster `one` together get to `two`; 0: unlimited."""
        rates = (self.uplinks[one], self.uplinks[two], self.link(one, two).rate_bps)
        return min((rate for rate in rates if rate), default=0)

    def round_trip(self, one: int, two: int) -> float:
        """Seconds."""
        return 2 * self.link(one, two).latency_s


def of_spec(spec: SiteSpec, scale: float) -> Wan | None:
    """What the file says of uplinks and [[between]], every rate multiplied by `scale`; None where it says nothing."""
    return TEMP


def address(cluster: int, index: int) -> str:
    """IPv4 address of the eth0 of node `index` (from 0) of cluster number `cluster`."""
    return f"10.{ETHERNET_NET}.{cluster}.{index + 1}"


def router_address(cluster: int) -> str:
    return f"10.{ETHERNET_NET}.{cluster}.{_ROUTER}"


def router_mac(cluster: int) -> str:
    return f"02:48:4d:ff:00:{cluster:02x}"


def bridge(cluster: int) -> str:
    return f"eth{cluster}"


def tap(cluster: int) -> str:
    return f"wan{cluster}"


def route_lines(cluster: int) -> list[str]:
    """For `ip -batch` on a node: everything else is behind its cluster's router, which answers no ARP."""
    router = router_address(cluster)
    return [f"neighbor add {router} lladdr {router_mac(cluster)} dev eth0 nud permanent",
            f"route add 10.{ETHERNET_NET}.0.0/16 via {router} dev eth0"]


def tap_lines(wan: Wan) -> list[str]:
    """For `ip -batch` in the switch once the delay line has made its TAPs."""
    return [f"link set dev {tap(number)} master {bridge(number)} txqueuelen 10000 up"
            for number in range(len(wan.clusters))]


def delay_line(wan: Wan, nodes: Sequence[tuple[str, int, str]], wire: float) -> dict[str, Any]:
    """What the keeper starts the delay line with. nodes: (address, cluster, MAC); wire: bits on the wire for each bit
    of TCP's data, which is what a rate counts."""
    clusters = [{"tap": tap(number), "mac": router_mac(number), "uplink_bps": rate * wire}
                for number, rate in enumerate(wan.uplinks)]
    links = [[one, two, link.rate_bps * wire, link.latency_s] for (one, two), link in wan.links.items()]
    return {"clusters": clusters, "links": links, "nodes": {where: [cluster, mac] for where, cluster, mac in nodes}}
