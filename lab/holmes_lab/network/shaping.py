"""Addresses, NICs and traffic shaping of emulated nodes, as input of `ip` and `tc`.

    node a0 [eth0]--veth--[e0]  bridge "eth" in the switch namespace   10.77.0.0/16, every node
            [ib0 ]--veth--[f0]  bridge "fab0" (fabric "a")             10.100.0.0/16, the fabric's nodes
            [ib1 ]--veth--[f0r1]  the same, for a second rail

Both ends of each veth are shaped with tbf: the node's egress, and the egress of the switch port (the node's
ingress). If cluster.toml describes the network between clusters, each cluster has an Ethernet of its own
(network/inter_cluster.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from holmes_ext.cluster.fabric import ETHERNET
from holmes_ext.cluster.spec import SiteSpec
from holmes_ext.errors import HolmesError
from holmes_lab.network import inter_cluster

MAX_NODES = 128
MTU = 1500
#: Milliseconds that a packet may wait in tbf. With less, several senders to one receiver lose
#: packets.
TBF_LATENCY_MS = 20
_FRAME_BYTES = MTU + 14  # with the Ethernet header
_PAYLOAD_BYTES = MTU - 52  # without the headers of IPv4 and of TCP with timestamps
WIRE_BITS_PER_DATA_BIT = _FRAME_BYTES / _PAYLOAD_BYTES  # for TCP data, because of headers
_LARGEST_SCALE = 1e6  # above every useful factor; infinity is rejected, too
#: Numbers of handles of queues. A handle has 16 bits and must not be 0; 65521 is the largest prime
#: below 2**16.
_HANDLES = 65_521
LOGIN = "login"  # name of the host from which jobs are submitted
_NAMES = {"ethernet": "eth"}
#: Kernel settings of a node with several NICs in one subnet: each NIC answers ARP for its own
#: address only.
RAILS_SYSCTL = {
    "net.ipv4.conf.all.arp_ignore": "1",
    "net.ipv4.conf.all.arp_announce": "2",
    "net.ipv4.conf.all.rp_filter": "0",
    "net.ipv4.conf.default.rp_filter": "0",
}


@dataclass(frozen=True)
class LabNic:
    """Emulated NIC."""

    name: str
    kind: str  # "ethernet", or a kind of fast NIC such as "ib" or "roce"
    fabric: str  # name of its network
    address: str  # IPv4
    mac: str
    rate_bps: int  # shaped rate, each way
    nominal_bps: int  # rate in cluster.toml, and in the emulated sysfs
    port: str  # other end of the veth, in the switch namespace
    bridge: str  # bridge of that end
    number: int = 0  # number of its fabric among the fast ones; 0 for Ethernet
    hca: str = "mlx5_0"  # RDMA device
    prefix: int = 16  # prefix length of the address
    rail: int = 0  # number of the NIC among the fast NICs of its node


@dataclass(frozen=True)
class LabNode:
    """Emulated node."""

    name: str
    cluster: str
    index: int  # number of the node, from 0
    processes: int
    nics: tuple[LabNic, ...]  # eth0, then the fast NICs of the cluster, if it has any
    #: Number of the node's cluster if each cluster is an Ethernet segment of its own (the file
    #: describes the network between clusters); None: all clusters are on one Ethernet.
    ethernet_segment: int | None = None

    @property
    def fast_nics(self) -> tuple[LabNic, ...]:
        """The NICs without eth0: one for each rail of the cluster's fast network."""
        return self.nics[1:]

    @property
    def address(self) -> str:
        """IPv4 address of eth0."""
        return self.nics[0].address

    def nic(self, name: str) -> LabNic:
        """Return the NIC with a name, or raise HolmesError if the node has no such NIC."""
        for nic in self.nics:
            if nic.name == name:
                return nic
        raise HolmesError(
            f"node {self.name}: no NIC {name!r}; it has {', '.join(nic.name for nic in self.nics)}"
        )


def lay_out(spec: SiteSpec, scale: float) -> tuple[LabNode, ...]:
    """Return the emulated nodes of a cluster.toml, in the order of the file.

    Args:
        spec: Content of the file.
        scale: Factor of all rates.

    Raises:
        HolmesError: there are more than MAX_NODES nodes, or the factor is not above 0, or is too
            large to be meant (_LARGEST_SCALE).
    """
    node_count = len(spec.cluster_by_node)
    if node_count > MAX_NODES:
        raise HolmesError(
            f"{spec.source}: {node_count} nodes; the lab emulates at most {MAX_NODES} on one machine"
        )
    if not 0 < scale < _LARGEST_SCALE:
        raise HolmesError(f"--scale: {scale} is not a factor above 0, such as 0.1")
    # The fast networks in the order of the file. Their numbers make addresses and bridges unique.
    fast_fabrics = list(
        dict.fromkeys(cluster.fabric for cluster in spec.clusters if cluster.fabric != ETHERNET)
    )
    nodes: list[LabNode] = []
    for cluster_number, cluster in enumerate(spec.clusters):
        for index_in_cluster, name in enumerate(cluster.nodes):
            index = len(nodes)
            nics = [_eth0(spec, index, scale, cluster_number, index_in_cluster)]
            if cluster.fabric != ETHERNET:
                # A node has `rails` fast NICs. They share the rate of the file.
                nics += [
                    _nic(
                        index,
                        cluster.kind,
                        cluster.fabric,
                        nominal_bps=cluster.rate_bps // cluster.rails,
                        scale=scale,
                        fabric_number=fast_fabrics.index(cluster.fabric),
                        rail=rail,
                    )
                    for rail in range(cluster.rails)
                ]
            nodes.append(
                LabNode(
                    name,
                    cluster=cluster.name,
                    index=index,
                    processes=cluster.processes,
                    nics=tuple(nics),
                    ethernet_segment=cluster_number if spec.wan else None,
                )
            )
    return tuple(nodes)


def login_node(spec: SiteSpec, nodes: Sequence[LabNode], scale: float) -> LabNode:
    """Return the host from which jobs are submitted. It is on Ethernet only.

    If each cluster has an Ethernet of its own, the host is on that of the first cluster.

    Args:
        spec: Content of the cluster.toml.
        nodes: The emulated nodes.
        scale: Factor of all rates.

    Raises:
        HolmesError: a node has the name of the host.
    """
    if LOGIN in {node.name for node in nodes}:
        raise HolmesError(
            f"{spec.source}: node {LOGIN!r} has the name of the host from which the lab's "
            "launchers start jobs; rename it"
        )
    index = len(nodes)  # behind all nodes
    first_cluster_size = len(spec.clusters[0].nodes)
    nic = _eth0(spec, index, scale, cluster_number=0, index_in_cluster=first_cluster_size)
    return LabNode(
        name=LOGIN,
        cluster="",  # it belongs to no cluster
        index=index,
        processes=1,
        nics=(nic,),
        ethernet_segment=0 if spec.wan else None,  # number of the first cluster
    )


def _eth0(
    spec: SiteSpec, index: int, scale: float, cluster_number: int, index_in_cluster: int
) -> LabNic:
    """Return the Ethernet NIC of a node.

    If the file describes the network between clusters, each cluster has an Ethernet of its own, so
    the address and the bridge depend on the cluster. Otherwise all nodes are on one Ethernet.

    Args:
        spec: Content of the cluster.toml.
        index: Number of the node.
        scale: Factor of all rates.
        cluster_number: Number of the node's cluster, from 0.
        index_in_cluster: Number of the node in its cluster, from 0.
    """
    nic = _nic(index, "ethernet", ETHERNET, spec.ethernet_rate_bps, scale)
    if not spec.wan:
        return nic
    return replace(
        nic,
        address=inter_cluster.address(cluster_number, index_in_cluster),
        bridge=inter_cluster.bridge(cluster_number),
        prefix=inter_cluster.PREFIX,
    )


def _nic(
    index: int,
    kind: str,
    fabric: str,
    nominal_bps: int,
    scale: float,
    *,
    fabric_number: int = 0,
    rail: int = 0,
) -> LabNic:
    """Return a NIC of an emulated node: an end of a veth, with the other end at the switch.

    The IPv4 address is 10.NETWORK.RAIL.HOST, and the MAC address ends with the same three bytes.
    NETWORK is 77 for Ethernet, and 100 and up for fast networks.

    Args:
        index: Number of the node, from 0.
        kind: Kind of NIC: "ethernet", "ib", "roce", ...
        fabric: Name of the NIC's network.
        nominal_bps: Rate in cluster.toml, in bits/s.
        scale: Factor of the rate.
        fabric_number: Number of the network among the fast ones, from 0; 0 for Ethernet.
        rail: Number of the NIC among the fast NICs of the node; 0 for Ethernet.
    """
    host = index + 1  # last byte of the addresses; MAX_NODES keeps it below 256
    if fabric == ETHERNET:
        net = inter_cluster.ETHERNET_NET
        switch_port = f"e{index}"
        bridge = "eth"
    else:
        net = 100 + fabric_number
        switch_port = f"f{index}" if rail == 0 else f"f{index}r{rail}"
        bridge = f"fab{fabric_number}"
    return LabNic(
        name=f"{_NAMES.get(kind, kind)}{rail}",
        kind=kind,
        fabric=fabric,
        address=f"10.{net}.{rail}.{host}",
        # 02: locally administered. 48:4d ("HM") marks the MAC addresses of this lab.
        mac=f"02:48:4d:{net:02x}:{rail:02x}:{host:02x}",
        rate_bps=max(1, round(nominal_bps * scale)),
        nominal_bps=nominal_bps,
        port=switch_port,
        bridge=bridge,
        number=fabric_number,
        hca=f"mlx5_{rail}",
        rail=rail,
    )


#: Largest packet of a veth in bytes (64 KiB, the largest IP packet).
_LARGEST_PACKET = 65_536
# With the numbers here and in _SLOW_LINKS, messages of 128 KiB and more get the configured rate within 10 %
# (`holmes lab measure` checks this). : On links above 700 Mb/s: seconds that a packet takes at the rate.
# Larger packets are fewer, and : need less CPU time.
_PACKET_S = 150e-6
#: Seconds that a burst lasts at the rate, at least. tbf sends again when a timer fires, which may
#: be a millisecond late; a smaller burst would then leave the link idle.
_BURST_S = 1e-3
_LEAST_FAST_BURST = 70_000  # bytes; above the largest packet with its headers on the wire
#: Rate within a burst / rate. Above 1, so that the link can catch up after a late timer.
_PEAK_FACTOR = 1.06
_PEAK_BURST_MARGIN = 2_000  # bytes above a packet; a packet longer than the burst would be cut


@dataclass(frozen=True)
class Shaping:
    """Parameters of the kernel's token bucket filter (tbf) and of a veth that limit a NIC to a rate.

    After a pause, tbf sends up to `burst` bytes at once, faster than the rate. A message after a
    pause should get the rate, too, so there are two kinds of links:

        up to 700 Mb/s    `burst` is small, at most 15 % of a message of 128 KiB. tbf cuts packets
                          above `burst`, which costs CPU time, so packets are small as well.
        faster links      `burst` is large, because the timers by which tbf sends fire late. A
                          second bucket with a slightly larger rate (`peak_bps`) spreads the burst
                          over time.
    """

    rate_bps: int  # on the wire, with headers
    burst: int  # bytes that tbf sends at once after a pause
    gso_max_size: int  # largest packet of the veth, bytes
    peak_bps: int = 0  # rate within a burst, on the wire; 0: the burst is not limited
    peak_burst: int = 0  # bytes of a packet that may be sent at once within a burst


class _SlowLink(NamedTuple):
    """Settings of the kernel's token bucket filter (tbf) for links up to `largest_rate_bps`.

    shaping() takes the first row of _SLOW_LINKS with a sufficient largest rate. The burst has room
    for the largest packet with its headers and for one more frame. It is so small that the rate
    within a burst needs no limit (peakrate of tbf).
    """

    largest_rate_bps: int  # of TCP data
    burst: int  # bytes that tbf sends at once after a pause
    largest_packet: int  # bytes; as many as the burst permits, since each packet costs CPU time


_SLOW_LINKS = (
    # A burst is one packet of the MTU, so that even a message of 32 KiB gets the rate.
    _SlowLink(30_000_000, burst=3_700, largest_packet=2_000),
    # A burst is 8 % of a message of 128 KiB, and with the next line 15 %.
    _SlowLink(300_000_000, burst=10_000, largest_packet=8_000),
    _SlowLink(700_000_000, burst=20_000, largest_packet=16_000),
)


def shaping(rate_bps: int) -> Shaping:
    """Return the parameters that give the data of a TCP stream, without headers, a rate.

    The kernel's token bucket filter (tbf) limits the rate. Up to 700 Mb/s, small bursts
    (_SLOW_LINKS) keep it exact. Faster links need bursts of a millisecond, because timers fire
    late, and a limit of the rate within the burst (peak_bps).

    Args:
        rate_bps: Rate of the data in bits/s.
    """
    wire_bps = round(rate_bps * WIRE_BITS_PER_DATA_BIT)
    for slow in _SLOW_LINKS:
        if rate_bps <= slow.largest_rate_bps:
            return Shaping(wire_bps, burst=slow.burst, gso_max_size=slow.largest_packet)
    packet_bytes = min(_LARGEST_PACKET, round(rate_bps * _PACKET_S / 8))
    packet_bytes_on_wire = round(packet_bytes * WIRE_BITS_PER_DATA_BIT)
    return Shaping(
        wire_bps,
        burst=max(_LEAST_FAST_BURST, round(rate_bps * _BURST_S / 8)),
        gso_max_size=packet_bytes,
        # Above the rate, so that the link can catch up after a late timer.
        peak_bps=round(wire_bps * _PEAK_FACTOR),
        # Above a packet, because tbf would spend CPU time on cutting longer packets into frames.
        peak_burst=packet_bytes_on_wire + _PEAK_BURST_MARGIN,
    )


def shape_commands(device: str, rate_bps: int) -> tuple[str, str]:
    """Return a line for `ip -batch` and a line for `tc -batch` that limit the rate of a device.

        ip    limits the size of the packets that the kernel gives to the device (gso_max_size).
              tbf would cut packets above its burst size, which costs CPU time.
        tc    limits the device's rate of sending, by a token bucket filter (tbf).

    The device may have a limit already. If the burst size changes, its queue is replaced by an
    empty one, and TCP sends the lost packets again. A packet that is longer than the new burst
    would otherwise stay at the head of the queue for ever (net/sched/sch_tbf.c, tbf_dequeue).

    Args:
        device: Name of the network device.
        rate_bps: Rate of TCP data in bits/s. The limit of the device counts headers, too.
    """
    shape = shaping(rate_bps)
    peak = ""
    if shape.peak_bps:  # 0: no limit of the rate within a burst
        peak = f" peakrate {shape.peak_bps}bit minburst {shape.peak_burst}"
    # `tc qdisc replace` keeps the queue if its handle stays the same, and else creates a new one.
    # So each burst size gets a handle of its own.
    handle = shape.burst % _HANDLES + 1
    return (
        f"link set dev {device} gso_max_size {shape.gso_max_size}",
        f"qdisc replace dev {device} root handle {handle:x}: tbf rate {shape.rate_bps}bit "
        f"burst {shape.burst} latency {TBF_LATENCY_MS}ms{peak}",
    )


def switch_batches(nodes: Sequence[LabNode], inner_pid: dict[str, int]) -> tuple[str, str]:
    """Return the input of `ip -batch` and of `tc -batch` in the switch namespace.

    It creates the bridges, the veths into the nodes, and the shaping of the switch ports.

    Args:
        nodes: The emulated nodes.
        inner_pid: Name of a node -> PID, in the PID namespace of the lab, of the process that keeps the
            node's namespaces alive.
    """
    ip = ["link set dev lo up"]
    tc: list[str] = []
    for bridge in dict.fromkeys(nic.bridge for node in nodes for nic in node.nics):
        ip.append(
            f"link add name {bridge} type bridge stp_state 0 forward_delay 0 mcast_snooping 0"
        )
        ip.append(f"link set dev {bridge} up")
    for node in nodes:
        for nic in node.nics:
            # shape_commands() returns a line for ip, which limits the size of the packets that the
            # device gets, and a line for tc, which limits its rate.
            packet_size, rate = shape_commands(nic.port, nic.rate_bps)
            peer = f"peer name {nic.name} address {nic.mac} mtu {MTU} netns {inner_pid[node.name]}"
            ip += [
                f"link add name {nic.port} mtu {MTU} type veth {peer}",
                f"link set dev {nic.port} master {nic.bridge} up",
                packet_size,
            ]
            tc.append(rate)
    return "\n".join(ip) + "\n", "\n".join(tc) + "\n"


def node_batches(node: LabNode) -> tuple[str, str]:
    """Return the input of `ip -batch` and of `tc -batch` in the namespace of a node.

    It sets the addresses, brings the NICs up, and shapes their egress.
    """
    ip = ["link set dev lo up"]
    tc: list[str] = []
    for nic in node.nics:
        # shape_commands() returns a line for ip, which limits the size of the packets that the
        # device gets, and a line for tc, which limits its rate.
        packet_size, rate = shape_commands(nic.name, nic.rate_bps)
        ip += [
            f"address add {nic.address}/{nic.prefix} dev {nic.name}",
            f"link set dev {nic.name} up",
            packet_size,
        ]
        tc.append(rate)
    if node.ethernet_segment is not None:
        ip += inter_cluster.route_lines(node.ethernet_segment)
    return "\n".join(ip) + "\n", "\n".join(tc) + "\n"


def hosts_file(nodes: Iterable[LabNode]) -> str:
    """Return the text of /etc/hosts with each node's name and the address of its eth0."""
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
    return "\n".join(lines + [f"{node.address} {node.name}" for node in nodes]) + "\n"
