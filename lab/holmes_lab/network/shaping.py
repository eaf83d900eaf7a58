"""A SiteSpec as addresses, links and shaping: what `ip -batch` and `tc -batch` are told.

    node a0 [eth0]--veth--[e0]  bridge "eth" in the switch namespace   10.77.0.0/16, every node
            [ib0 ]--veth--[f0]  bridge "fab0" (fabric "a")             10.100.0.0/16, the fabric's nodes
            [ib1 ]--veth--[f0r1]  the same, for a second rail

Both ends of each veth are shaped with tbf: the node's egress and the switch port's egress (what the
node receives). Where the file describes the network between clusters, each has an Ethernet of its
own (lab/network/crossing.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from holmes_ext.cluster.fabric import ETHERNET
from holmes_ext.cluster.spec import SiteSpec
from holmes_ext.errors import HolmesError
from holmes_lab.network import crossing

MAX_NODES = 128
MTU = 1500
TBF_LATENCY_MS = 20  # with less, several senders to one receiver lose packets
_FRAME_BYTES, _PAYLOAD_BYTES = MTU + 14, MTU - 52  # Ethernet; IPv4 and TCP with timestamps
WIRE = _FRAME_BYTES / _PAYLOAD_BYTES
LOGIN = "login"  # name of the host from which jobs are submitted
_NAMES = {"ethernet": "eth"}
#: Of a node's network where several NICs are in one subnet: each answers for its own address only.
RAILS_SYSCTL = {
    "net.ipv4.conf.all.arp_ignore": "1",
    "net.ipv4.conf.all.arp_announce": "2",
    "net.ipv4.conf.all.rp_filter": "0",
    "net.ipv4.conf.default.rp_filter": "0",
}


@dataclass(frozen=True)
class LabNic:
    """One emulated NIC.

    rate_bps: bits/s each way as shaped; nominal_bps: as cluster.toml says, which is what its sysfs
    shows; port: its other end in the switch namespace; number: of its fabric among the fast ones
    (0: Ethernet); hca: RDMA device; rail: its number among the fast NICs of its node.
    """

    name: str
    kind: str
    fabric: str
    address: str
    mac: str
    rate_bps: int
    nominal_bps: int
    port: str
    bridge: str
    number: int = 0
    hca: str = "mlx5_0"
    prefix: int = 16
    rail: int = 0


@dataclass(frozen=True)
class LabNode:
    """A node of the lab. index: from 0; nics: eth0 first, then its cluster's fast NICs, if it has any."""

    name: str
    cluster: str
    index: int
    processes: int
    nics: tuple[LabNic, ...]
    site: int | None = None  # number of its cluster where each has an Ethernet of its own

    @property
    def address(self) -> str:
        return self.nics[0].address

    def nic(self, name: str) -> LabNic:
        for nic in self.nics:
            if nic.name == name:
                return nic
        raise HolmesError(
            f"node {self.name}: no NIC {name!r}; it has {', '.join(nic.name for nic in self.nics)}"
        )


def lay_out(spec: SiteSpec, scale: float) -> tuple[LabNode, ...]:
    """The nodes in the file's order, every rate multiplied by `scale`. HolmesError for too many nodes."""
    if len(spec.owner) > MAX_NODES:
        raise HolmesError(
            f"{spec.source}: {len(spec.owner)} nodes; the lab emulates at most {MAX_NODES} on one machine"
        )
    if not 0 < scale < 1e6:
        raise HolmesError(f"--scale: {scale} is not a factor above 0, such as 0.1")
    fabrics = list(
        dict.fromkeys(cluster.fabric for cluster in spec.clusters if cluster.fabric != ETHERNET)
    )
    nodes: list[LabNode] = []
    for site, cluster in enumerate(spec.clusters):
        for place, name in enumerate(cluster.nodes):
            index = len(nodes)
            nics = [_eth0(spec, index, scale, site, place)]
            if cluster.fabric != ETHERNET:
                number = fabrics.index(cluster.fabric)
                rate = cluster.rate_bps // cluster.rails
                nics += [
                    _nic(index, cluster.kind, cluster.fabric, number, rate, scale, rail)
                    for rail in range(cluster.rails)
                ]
            nodes.append(
                LabNode(
                    name,
                    cluster.name,
                    index,
                    cluster.processes,
                    tuple(nics),
                    site if spec.wan else None,
                )
            )
    return tuple(nodes)


def login_node(spec: SiteSpec, nodes: Sequence[LabNode], scale: float) -> LabNode:
    """A host on the nodes' Ethernet alone, where jobs are submitted. HolmesError for a node of its name."""
    if LOGIN in {node.name for node in nodes}:
        raise HolmesError(
            f"{spec.source}: node {LOGIN!r} has the name of the host from which the lab's "
            "launchers start jobs; rename it"
        )
    # where each cluster has an Ethernet of its own, beside the nodes of the first one
    nic = _eth0(spec, len(nodes), scale, 0, len(spec.clusters[0].nodes))
    return LabNode(LOGIN, "", len(nodes), 1, (nic,), 0 if spec.wan else None)


def _eth0(spec: SiteSpec, index: int, scale: float, cluster: int, place: int) -> LabNic:
    """Of the host `index`, which is number `place` of its cluster."""
    nic = _nic(index, "ethernet", ETHERNET, 0, spec.ethernet_rate_bps, scale)
    return (
        replace(
            nic,
            address=crossing.address(cluster, place),
            bridge=crossing.bridge(cluster),
            prefix=crossing.PREFIX,
        )
        if spec.wan
        else nic
    )


def _nic(
    index: int, kind: str, fabric: str, number: int, nominal_bps: int, scale: float, rail: int = 0
) -> LabNic:
    ethernet = fabric == ETHERNET
    net = 77 if ethernet else 100 + number
    high, low = rail, index + 1  # at most 128 nodes
    address, mac = f"10.{net}.{high}.{low}", f"02:48:4d:{net:02x}:{high:02x}:{low:02x}"
    port = f"e{index}" if ethernet else f"f{index}" + f"r{rail}" * (rail > 0)
    bridge, rate_bps = "eth" if ethernet else f"fab{number}", max(1, round(nominal_bps * scale))
    return LabNic(
        f"{_NAMES.get(kind, kind)}{rail}",
        kind,
        fabric,
        address,
        mac,
        rate_bps,
        nominal_bps,
        port,
        bridge,
        number,
        f"mlx5_{rail}",
        rail=rail,
    )


@dataclass(frozen=True)
class Shaping:
    """What tbf and the veth are told. Bytes; bits/s on the wire; peak_bps and peak_burst 0: no peak rate.

    tbf lets `burst` bytes pass at once after a pause. Up to 700 Mb/s a small burst with small
    packets keeps that below 10 % of 128 KiB. Faster links need a large burst, to make up for timers
    that fire late; there a peak rate of 1.06 x paces it, packet by packet: at 2 Gb/s a message of
    128 KiB after a pause is carried at the rate, without at 2 x it.
    """

    rate_bps: int
    burst: int
    gso_max_size: int
    peak_bps: int = 0
    peak_burst: int = 0


def shaping(rate_bps: int) -> Shaping:
    """The shaping with which a TCP stream's data, without headers, gets `rate_bps` bits/s."""
    wire_bps = round(rate_bps * WIRE)
    if (
        rate_bps <= 30_000_000
    ):  # so slow that every packet may stand alone, and a message of 32 KiB counts
        return Shaping(wire_bps, 3_700, 2_000)
    if rate_bps <= 300_000_000:
        return Shaping(wire_bps, 10_000, 8_000)
    if rate_bps <= 700_000_000:
        return Shaping(wire_bps, 20_000, 16_000)
    packet = min(
        65_536, round(rate_bps * 150e-6 / 8)
    )  # fewer packets for each second cost less CPU
    peak_burst = round(packet * WIRE) + 2_000  # tbf cuts packets above it into frames: costly
    return Shaping(
        wire_bps,
        max(70_000, round(rate_bps * 1e-3 / 8)),
        packet,
        round(wire_bps * 1.06),
        peak_burst,
    )


def shape_commands(device: str, rate_bps: int) -> tuple[str, str]:
    """One line for `ip -batch` and one for `tc -batch` that shape `device`'s egress to `rate_bps` bits/s.

    Another burst is another handle, so another queue: a packet of the old one that is longer than
    the new burst would stand at its head for ever, and all traffic behind it (net/sched/sch_tbf.c,
    tbf_dequeue). TCP sends again what the old queue held.
    """
    s = shaping(rate_bps)
    peak = f" peakrate {s.peak_bps}bit minburst {s.peak_burst}" if s.peak_bps else ""
    return (
        f"link set dev {device} gso_max_size {s.gso_max_size}",
        f"qdisc replace dev {device} root handle {s.burst % 65_521 + 1:x}: tbf rate {s.rate_bps}bit "
        f"burst {s.burst} latency {TBF_LATENCY_MS}ms{peak}",
    )


def switch_batches(nodes: Sequence[LabNode], inner_pid: dict[str, int]) -> tuple[str, str]:
    """(ip, tc) batches for the switch: bridges, veths into the nodes (by pids as the switch sees them)."""
    ip, tc = ["link set dev lo up"], []
    for bridge in dict.fromkeys(nic.bridge for node in nodes for nic in node.nics):
        ip.append(
            f"link add name {bridge} type bridge stp_state 0 forward_delay 0 mcast_snooping 0"
        )
        ip.append(f"link set dev {bridge} up")
    for node in nodes:
        for nic in node.nics:
            limit, shape = shape_commands(nic.port, nic.rate_bps)
            peer = f"peer name {nic.name} address {nic.mac} mtu {MTU} netns {inner_pid[node.name]}"
            ip += [
                f"link add name {nic.port} mtu {MTU} type veth {peer}",
                f"link set dev {nic.port} master {nic.bridge} up",
                limit,
            ]
            tc.append(shape)
    return "\n".join(ip) + "\n", "\n".join(tc) + "\n"


def node_batches(node: LabNode) -> tuple[str, str]:
    """(ip, tc) batches for one node: addresses, links up, egress shaped."""
    ip, tc = ["link set dev lo up"], []
    for nic in node.nics:
        limit, shape = shape_commands(nic.name, nic.rate_bps)
        ip += [
            f"address add {nic.address}/{nic.prefix} dev {nic.name}",
            f"link set dev {nic.name} up",
            limit,
        ]
        tc.append(shape)
    if node.site is not None:
        ip += crossing.route_lines(node.site)
    return "\n".join(ip) + "\n", "\n".join(tc) + "\n"


def hosts_file(nodes: Iterable[LabNode]) -> str:
    """/etc/hosts: every node's name is its eth0, so that what resolves a host name uses Ethernet."""
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
    return "\n".join(lines + [f"{node.address} {node.name}" for node in nodes]) + "\n"
