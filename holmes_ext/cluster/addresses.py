"""IP addresses of network devices, and the TCP rate that the kernel's settings allow on long links.

Addresses: /sys has none. They come from getifaddrs(3) on a running node, or from the output of
`ip -j addr` in a /sys tree that was captured on another machine. Both sources give the addresses of
each network device with the prefix length, such as "10.0.0.1/16". Link-local IPv6 addresses are
left out unless the device has no other address.

TCP: a stream has at most one window of data in flight per round trip, so (RFC 7323)

    rate of a stream <= window / round trip
    window            = min(WMEM_SHARE * maximum of tcp_wmem, RMEM_SHARE * maximum of tcp_rmem)

because a part of each socket buffer holds bookkeeping of the kernel. Both shares were measured on
an emulated link (1 Gb/s, 80 ms round trip, Linux 6.18): a stream reached 268 Mb/s with a tcp_wmem
of 4 MiB and 135 Mb/s with 2 MiB, and 327 Mb/s with a tcp_rmem of 4 MiB and 164 Mb/s with 2 MiB.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from holmes_ext.cluster.wan import Wan
from holmes_ext.document import parse_json_value, read_text
from holmes_ext.errors import HolmesError
from holmes_ext.units import format_bytes, format_rate, format_seconds
from holmes_ext.words import why

#: Share of the maximum of tcp_wmem (sender) that is data in flight.
WMEM_SHARE = 0.64
#: Share of the maximum of tcp_rmem (receiver) that is data in flight.
RMEM_SHARE = 0.78
#: Largest number of sockets that NCCL opens for a connection (its documentation: the product of
#: NCCL_SOCKET_NTHREADS and NCCL_NSOCKS_PERTHREAD).
MOST_SOCKETS = 64
#: Sockets that a helper thread of NCCL serves in the settings that holmes proposes.
SOCKETS_PER_THREAD = 8
#: A link is used well enough if TCP reaches this share of the link's rate.
WELL_USED_SHARE = 0.9
#: Round trip in seconds from which it matters that an idle stream loses its window.
LONG_S = 5e-3


@dataclass(frozen=True)
class TcpLimits:
    """TCP settings of a network namespace that limit the rate of a stream."""

    wmem: int  # maximum send buffer of a socket, bytes
    rmem: int  # maximum receive buffer of a socket, bytes
    idle_restart: bool  # the window of a stream shrinks while the stream is idle
    #: The congestion control is BBR: after a pause, it sends at the rate that it measured before
    #: the pause.
    paced: bool = False

    def stream_bps(self, trip_s: float) -> float:
        """Return the highest rate of one stream between two hosts with these limits, in bits/s.

        Args:
            trip_s: Round trip in seconds.
        """
        if not trip_s:
            return float("inf")
        window_bytes = min(WMEM_SHARE * self.wmem, RMEM_SHARE * self.rmem)
        return 8 * window_bytes / trip_s


@dataclass(frozen=True)
class Shortfall:
    """Link between two clusters that TCP cannot fill, because socket buffers are too small."""

    cluster: str  # cluster of the sender
    other: str  # cluster of the receiver
    rate_bps: float  # rate that the link offers to one node, in bits/s
    trip_s: float  # round trip
    streams: int  # sockets of one connection
    stream_bps: float  # rate that one socket reaches with the kernel's buffers, in bits/s
    limits: TcpLimits

    @property
    def carries_bps(self) -> float:
        """Rate that the sockets of one NCCL connection reach together over this link, in bits/s."""
        return self.streams * self.stream_bps

    @property
    def buffer(self) -> int:
        """Maximum socket buffer (tcp_wmem, tcp_rmem) in bytes that would let TCP fill the link.

        It is rounded up to a power of two.
        """
        in_flight_bytes = self.rate_bps * self.trip_s / 8
        # Less of the send buffer than of the receive buffer is data in flight, so it decides.
        needed_bytes = in_flight_bytes / WMEM_SHARE / self.streams
        return 1 << int(needed_bytes).bit_length()

    @property
    def what(self) -> str:
        """Description of the problem for the user.

        Example: "4 sockets of 1 Gb/s carry 4 Gb/s of the 10 Gb/s from a to b: round trip 40 ms,
        tcp_wmem 4 MiB, tcp_rmem 6 MiB".
        """
        if self.streams > 1:
            senders = f"{self.streams} sockets of {format_rate(self.stream_bps)} carry"
        else:
            senders = "one stream carries"
        link = f"{format_rate(self.rate_bps)} from {self.cluster} to {self.other}"
        wmem = format_bytes(self.limits.wmem)
        rmem = format_bytes(self.limits.rmem)
        return (
            f"{senders} {format_rate(self.carries_bps)} of the {link}: round trip "
            f"{format_seconds(self.trip_s)}, tcp_wmem {wmem}, tcp_rmem {rmem}"
        )

    @property
    def mend(self) -> str:
        """Advice for the user: larger socket buffers in the kernel, or more sockets a connection.

        Either lets the connection reach the link's rate (rate_bps). A single socket reaches only a
        part of it (stream_bps) with the present buffers. `buffer` is the size in bytes that would
        be large enough.
        """
        # Each of the two settings is three sizes: minimum, default, maximum.
        advice = (
            f'on all nodes: sysctl -w net.ipv4.tcp_wmem="4096 65536 {self.buffer}"'
            f' net.ipv4.tcp_rmem="4096 131072 {self.buffer}"'
        )
        # More sockets carry more, because each has its own window. NCCL opens at most MOST_SOCKETS
        # for a connection: (number of helper threads) x (sockets of each thread).
        sockets_needed = ceil(self.rate_bps / self.stream_bps)
        if 1 < sockets_needed <= MOST_SOCKETS:
            threads = ceil(sockets_needed / SOCKETS_PER_THREAD)
            per_thread = ceil(sockets_needed / threads)
            advice += (
                f"; or, for NCCL alone, NCCL_SOCKET_NTHREADS={threads} "
                f"NCCL_NSOCKS_PERTHREAD={per_thread}"
            )
        return advice


def read_limits(root: str | Path = "/proc/sys/net/ipv4") -> TcpLimits:
    """Return the TCP limits of this process's network namespace.

    Args:
        root: Folder with the kernel's IPv4 settings, one file for each.
    """

    def words_of(name: str) -> list[str]:
        return Path(root, name).read_text().split()

    # tcp_wmem and tcp_rmem hold three sizes: minimum, default, maximum.
    _, _, wmem_maximum = words_of("tcp_wmem")
    _, _, rmem_maximum = words_of("tcp_rmem")
    (slow_start_after_idle,) = words_of("tcp_slow_start_after_idle")
    (congestion_control,) = words_of("tcp_congestion_control")
    is_bbr = congestion_control.startswith("bbr")
    return TcpLimits(
        wmem=int(wmem_maximum),
        rmem=int(rmem_maximum),
        idle_restart=slow_start_after_idle != "0" and not is_bbr,  # BBR keeps the window
        paced=is_bbr,
    )


def sockets(environ: Mapping[str, str]) -> int:
    """Return the number of sockets that NCCL opens for one connection.

    The number is NCCL_SOCKET_NTHREADS * NCCL_NSOCKS_PERTHREAD, where an unset variable counts as 1.
    """
    count = 1
    for name in ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"):
        text = environ.get(name, "")
        if text.isdecimal() and int(text):
            count *= int(text)
    return min(MOST_SOCKETS, count)


def shortfalls(
    wan: Wan,
    ethernet_bps: float,
    clusters: Mapping[str, int],
    sender: str,
    limits: TcpLimits,
    streams: int = 1,
) -> Iterator[Shortfall]:
    """Yield the links from one cluster to others that TCP cannot fill while all nodes send.

    Args:
        wan: The network between the clusters.
        ethernet_bps: Ethernet rate of one node, in bits/s.
        clusters: Cluster name -> number of its nodes.
        sender: Name of the cluster that sends.
        limits: TCP limits of the nodes.
        streams: Sockets of one connection.
    """
    for other in clusters:
        hops = wan.hops(sender, other)
        round_trip_s = 2 * sum(hop.latency_s for hop in hops)
        # All nodes of the smaller cluster use the hops between the clusters at the same time.
        sharing_nodes = max(1, min(clusters[sender], clusters[other]))
        node_bps = min([ethernet_bps, *(hop.rate_bps / sharing_nodes for hop in hops)])
        stream_bps = limits.stream_bps(round_trip_s)
        if streams * stream_bps < WELL_USED_SHARE * node_bps:
            yield Shortfall(
                cluster=sender,
                other=other,
                rate_bps=node_bps,
                trip_s=round_trip_s,
                streams=streams,
                stream_bps=stream_bps,
                limits=limits,
            )


#: File with the output of `ip -j addr`, at the root of a captured tree.
CAPTURED = "ip_addr.json"
#: Network device -> its addresses with prefix length.
Addresses = dict[str, tuple[str, ...]]


class _IfAddrs(ctypes.Structure):
    """`struct ifaddrs` of getifaddrs(3), an entry of a linked list."""


_IfAddrs._fields_ = [
    ("next", ctypes.POINTER(_IfAddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
    ("netmask", ctypes.c_void_p),
    ("destination", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
]


class _AddressField(NamedTuple):
    """Position of the IP address inside a C socket address."""

    offset: int  # bytes
    size: int  # bytes


#: Address family -> the field of sockaddr_in or sockaddr_in6 that holds the IP address.
_ADDRESS_FIELDS = {
    int(socket.AF_INET): _AddressField(offset=4, size=4),
    int(socket.AF_INET6): _AddressField(offset=8, size=16),
}


def interface_addresses() -> Addresses:
    """Return the addresses of all network devices in this network namespace, loopback included.

    Raises:
        HolmesError: the kernel does not list the addresses.
    """
    return {
        device: _without_link_local(addresses) for device, addresses in _all_addresses().items()
    }


def _all_addresses() -> Addresses:
    """Return the addresses of all network devices, including link-local ones.

    Raises:
        HolmesError: getifaddrs(3) failed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.freeifaddrs.argtypes = [ctypes.POINTER(_IfAddrs)]
    libc.freeifaddrs.restype = None
    first = ctypes.POINTER(_IfAddrs)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        raise HolmesError(
            f"cannot list this node's IP addresses: getifaddrs: {os.strerror(ctypes.get_errno())}"
        )
    addresses: dict[str, list[str]] = {}
    try:
        entry = first
        while entry:
            item = entry.contents
            of_device = addresses.setdefault(os.fsdecode(item.name), [])
            address = _address_of(item)
            if address:
                of_device.append(address)
            entry = item.next
    finally:
        libc.freeifaddrs(first)
    # The kernel may list an address twice.
    return {device: tuple(dict.fromkeys(found)) for device, found in addresses.items()}


def _address_of(item: Any) -> str:
    """Return the IP address of an entry of getifaddrs(3), or "" if the entry holds no IP address.

    Args:
        item: A `_IfAddrs`.
    """
    if not item.address:
        return ""
    # A C socket address begins with its family (sa_family), an integer of two bytes.
    (family,) = struct.unpack("=H", ctypes.string_at(item.address, 2))
    field = _ADDRESS_FIELDS.get(family)
    if field is None:
        return ""
    packed = ctypes.string_at(item.address + field.offset, field.size)
    netmask = b"\xff" * field.size  # without a netmask, the address is its own network
    if item.netmask:
        netmask = ctypes.string_at(item.netmask + field.offset, field.size)
    prefix_length = int.from_bytes(netmask, "big").bit_count()
    return f"{ipaddress.ip_address(packed)}/{prefix_length}"


def is_link_local_v6(address: str) -> bool:
    """Return whether an address is IPv6 and reaches no further than its own network segment."""
    parsed = ipaddress.ip_interface(address)
    return isinstance(parsed, ipaddress.IPv6Interface) and parsed.is_link_local


def _without_link_local(addresses: Iterable[str]) -> tuple[str, ...]:
    """Return the addresses without link-local IPv6 ones, unless there are no others."""
    unique = tuple(dict.fromkeys(addresses))
    return tuple(address for address in unique if not is_link_local_v6(address)) or unique


def captured_addresses(root: str | Path) -> Addresses | None:
    """Return the addresses in ip_addr.json at the root of a captured /sys tree.

    Returns:
        The addresses of each network device, or None if the tree has no such file.

    Raises:
        HolmesError: the file is not the output of `ip -j addr`.
    """
    path = os.path.join(root, CAPTURED)
    if not os.path.lexists(path):
        return None
    if not os.path.isfile(path):
        raise HolmesError(f"{path}: is not a regular file")
    advice = "write it with `ip -j addr`"
    links = parse_json_value(read_text(path, advice), path, advice)
    try:
        if not isinstance(links, list):
            raise TypeError
        # `ip` prints an empty object for a device that its options filtered out.
        return {
            link["ifname"]: _addresses_listed_in(link["addr_info"]) for link in links if link != {}
        }
    except ValueError as error:
        raise HolmesError(f"{path}: an address is not valid: {error}; {advice}") from None
    except (KeyError, TypeError, AttributeError):
        wanted = "a list of objects with ifname and addr_info"
        raise HolmesError(f"{path}: is not what `ip -j addr` prints ({wanted})") from None


def _addresses_listed_in(addr_info: Iterable[dict[str, Any]]) -> tuple[str, ...]:
    """Return the IP addresses in the `addr_info` of a device, as `ip -j addr` prints it."""
    addresses = []
    for info in addr_info:
        # `ip` prints an empty object for an address that its options filtered out.
        if info and info["family"] in ("inet", "inet6"):
            address = ipaddress.ip_interface(f"{info['local']}/{info['prefixlen']}")
            addresses.append(address.with_prefixlen)
    return _without_link_local(addresses)


class _LocalAddress(NamedTuple):
    """Source address that the kernel chooses for a destination."""

    address: str
    interface_index: int  # of a link-local IPv6 address, otherwise 0


def egress_interface(host: str) -> str:
    """Return the network device through which this node reaches a host. No packet is sent.

    If the host is this node itself, the device is that with the host's address. A loopback
    address (such as "localhost", or a host name that /etc/hosts maps to 127.0.1.1) says nothing
    about the network. Then the device is that of the default route, or else the first device with
    an address, where devices with link-local addresses come last. "lo" is returned only if the node
    has nothing but loopback.

    Args:
        host: Host name or IP address.

    Raises:
        HolmesError: the host is unknown, or there is no route to it.
    """
    devices = _all_addresses()
    try:
        targets = socket.getaddrinfo(host, _DISCARD_PORT, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as error:
        raise HolmesError(f"host {host!a:.200} is unknown to this node: {why(error)}") from None
    problems = []
    for family, _, _, _, target in targets:  # addresses of the host, the preferred one first
        try:
            names = _devices_with(_local_address(family, target), devices)
        except OSError as error:
            problems.append(why(error))
            continue
        return names[0] if names else _default_interface(devices)
    raise HolmesError(
        f"this node has no route to {host}: {problems[0]}; "
        "check MASTER_ADDR and this node's addresses (ip route get)"
    )


#: UDP port of the destinations that are looked up; nothing is sent there (RFC 863).
_DISCARD_PORT = 9


def _local_address(family: int, target: Any) -> _LocalAddress:
    """Return the source address that the kernel would use towards a destination.

    Args:
        family: Address family of the destination.
        target: The destination, as socket.connect takes it.

    Raises:
        OSError: there is no route.
    """
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # of a UDP socket: chooses the route, sends nothing
        name = probe.getsockname()
    address = name[0].partition("%")[0]
    if family != socket.AF_INET6:
        return _LocalAddress(address, interface_index=0)
    _, _, _, interface_index = name
    return _LocalAddress(address, interface_index)


def _devices_with(local: _LocalAddress, devices: Addresses) -> list[str]:
    """Return the network devices, except loopback, that have the address `local`.

    Args:
        local: A source address that the kernel has chosen.
        devices: Network device -> its addresses.
    """
    if local.interface_index:
        return [socket.if_indextoname(local.interface_index)]
    address = ipaddress.ip_address(local.address)
    return [
        device
        for device, interfaces in devices.items()
        if device != "lo"
        and any(ipaddress.ip_interface(interface).ip == address for interface in interfaces)
    ]


def _default_interface(devices: Addresses) -> str:
    """Return the device of the default route, or else the best device that has an address.

    Devices whose addresses are all link-local come last, and "lo" only if there is no other.
    """
    # Addresses reserved for documentation (RFC 5737, RFC 3849): only the default route leads there.
    for family, target in (
        (socket.AF_INET, ("192.0.2.1", _DISCARD_PORT)),
        (socket.AF_INET6, ("2001:db8::1", _DISCARD_PORT)),
    ):
        try:
            names = _devices_with(_local_address(family, target), devices)
        except OSError:
            continue
        if names:
            return names[0]
    with_address = [device for device, addresses in devices.items() if device != "lo" and addresses]
    for device in with_address:
        if not all(ipaddress.ip_interface(address).is_link_local for address in devices[device]):
            return device
    return with_address[0] if with_address else "lo"
