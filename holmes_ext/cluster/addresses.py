"""IP addresses of net devices: of this node (getifaddrs), or of a captured tree (`ip -j addr`).

/sys shows none. Both give net device -> addresses with prefix length, "10.0.0.1/16"; link-local IPv6 ones
only where a device has no other.

What TCP carries over a long link: the kernel's limits of a stream's window against bandwidth x round trip.

A stream has at most its window under way in a round trip: rate <= window / round trip (RFC 7323). The window
is what is data of tcp_wmem's (sender) and tcp_rmem's (receiver) maximum; the rest is the kernel's own
bookkeeping. Measured in a lab (1 Gb/s, 80 ms, Linux 6.18): with a wmem of 4 MiB a stream carries 268 Mb/s, of
2 MiB 135; with an rmem of 4 MiB 327 Mb/s, of 2 MiB 164.
"""

from __future__ import annotations

import ctypes
import ipaddress
import json
import os
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holmes_ext.cluster.wan import Wan
from holmes_ext.document import read_text
from holmes_ext.errors import HolmesError
from holmes_ext.units import format_bytes, format_rate, format_seconds
from holmes_ext.words import why

#: Parts of tcp_wmem's and tcp_rmem's maximum that are data under way.
WMEM_SHARE, RMEM_SHARE = 0.64, 0.78
#: Most sockets that NCCL opens for a connection (its documentation: the product of the two variables).
MOST_SOCKETS = 64
#: Part of a link's rate that counts as all of it; the round trip (s) from which an idle window matters.
ENOUGH, LONG_S = 0.9, 5e-3


@dataclass(frozen=True)
class TcpLimits:
    """Of a network namespace. wmem, rmem: maxima in bytes; idle_restart: a window shrinks while its stream is
    idle; paced: BBR, which sends after a pause no faster than what was sent before it arrived."""

    wmem: int
    rmem: int
    idle_restart: bool
    paced: bool = False

    def stream_bps(self, trip_s: float) -> float:
        """What one stream carries at most, bits/s, between two hosts with these limits."""
        window = min(WMEM_SHARE * self.wmem, RMEM_SHARE * self.rmem)
        return 8 * window / trip_s if trip_s else float("inf")


@dataclass(frozen=True)
class Shortfall:
    """A link of which TCP, as it is set, carries less than its rate. rate_bps: of one node, to cluster
    `other`; streams: sockets of a connection; carries_bps: all of them; buffer: bytes that TCP would need."""

    cluster: str
    other: str
    rate_bps: float
    trip_s: float
    streams: int
    stream_bps: float
    limits: TcpLimits

    @property
    def carries_bps(self) -> float:
        return self.streams * self.stream_bps

    @property
    def buffer(self) -> int:
        return 1 << int(self.rate_bps * self.trip_s / 8 / WMEM_SHARE / self.streams).bit_length()

    @property
    def what(self) -> str:
        several = self.streams > 1
        who = (
            f"{self.streams} sockets of {format_rate(self.stream_bps)} carry"
            if several
            else "one stream carries"
        )
        link = f"{format_rate(self.rate_bps)} from {self.cluster} to {self.other}"
        wmem, rmem = format_bytes(self.limits.wmem), format_bytes(self.limits.rmem)
        return (
            f"{who} {format_rate(self.carries_bps)} of the {link}: round trip "
            f"{format_seconds(self.trip_s)}, tcp_wmem {wmem}, tcp_rmem {rmem}"
        )

    @property
    def mend(self) -> str:
        sockets = -(-self.rate_bps // self.stream_bps)
        result = (
            f'on all nodes: sysctl -w net.ipv4.tcp_wmem="4096 65536 {self.buffer}"'
            f' net.ipv4.tcp_rmem="4096 131072 {self.buffer}"'
        )
        if 1 < sockets <= MOST_SOCKETS:
            threads = -(-int(sockets) // 8)
            per_thread = -(-int(sockets) // threads)
            result += (
                f"; or, for NCCL alone, NCCL_SOCKET_NTHREADS={threads} "
                f"NCCL_NSOCKS_PERTHREAD={per_thread}"
            )
        return result


def read_limits(root: str | Path = "/proc/sys/net/ipv4") -> TcpLimits:
    """Of the caller's network namespace. (BBR keeps its window while a stream is idle.)"""
    wmem, rmem, (restart,), (control,) = (
        Path(root, f"tcp_{name}").read_text().split()
        for name in ("wmem", "rmem", "slow_start_after_idle", "congestion_control")
    )
    bbr = control.startswith("bbr")
    return TcpLimits(int(wmem[2]), int(rmem[2]), restart != "0" and not bbr, bbr)


def sockets(environ: Mapping[str, str]) -> int:
    """NCCL's for a connection: NCCL_SOCKET_NTHREADS x NCCL_NSOCKS_PERTHREAD, 1 where unset; gloo has one."""
    values = [environ.get(name, "") for name in ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD")]
    threads, per_thread = (int(text) if text.isdecimal() and int(text) else 1 for text in values)
    return min(MOST_SOCKETS, threads * per_thread)


def shortfalls(
    wan: Wan,
    ethernet_bps: float,
    clusters: Mapping[str, int],
    here: str,
    limits: TcpLimits,
    streams: int = 1,
) -> Iterator[Shortfall]:
    """For a node of cluster `here`, to every other of `clusters` (name -> nodes), when all nodes send."""
    for other in clusters:
        hops = wan.hops(here, other)
        trip = 2 * sum(hop.latency_s for hop in hops)
        senders = max(1, min(clusters[here], clusters[other]))
        rate = min([ethernet_bps, *(hop.rate_bps / senders for hop in hops)])
        stream = limits.stream_bps(trip)
        if streams * stream < ENOUGH * rate:
            yield Shortfall(here, other, rate, trip, streams, stream, limits)


CAPTURED = "ip_addr.json"  # the output of `ip -j addr` at the root of a captured tree
#: Net device -> its addresses.
Addresses = dict[str, tuple[str, ...]]


class _IfAddrs(ctypes.Structure):
    pass


_IfAddrs._fields_ = [  # struct ifaddrs of getifaddrs(3)
    ("next", ctypes.POINTER(_IfAddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    *((name, ctypes.c_void_p) for name in ("address", "netmask", "destination", "data")),
]
#: Where sockaddr_in and sockaddr_in6 hold how many bytes.
_OFFSET = {int(socket.AF_INET): (4, 4), int(socket.AF_INET6): (8, 16)}


def interface_addresses() -> Addresses:
    """Of this network namespace, loopback included; HolmesError when the kernel does not answer."""
    return {name: _without_link_local(interfaces) for name, interfaces in _all_addresses().items()}


def _all_addresses() -> Addresses:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.freeifaddrs.argtypes = [ctypes.POINTER(_IfAddrs)]
    libc.freeifaddrs.restype = None
    first = ctypes.POINTER(_IfAddrs)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        raise HolmesError(
            f"cannot list this node's IP addresses: getifaddrs: {os.strerror(ctypes.get_errno())}"
        )
    by_device: dict[str, list[str]] = {}
    try:
        entry = first
        while entry:
            item = entry.contents
            addresses = by_device.setdefault(os.fsdecode(item.name), [])
            family = (
                struct.unpack("=H", ctypes.string_at(item.address, 2))[0] if item.address else -1
            )
            if family in _OFFSET:
                packed = _bytes(item.address, family)
                mask = _bytes(item.netmask, family) if item.netmask else b"\xff" * len(packed)
                prefix = int.from_bytes(mask, "big").bit_count()
                addresses.append(f"{ipaddress.ip_address(packed)}/{prefix}")
            entry = item.next
    finally:
        libc.freeifaddrs(first)
    return {name: tuple(dict.fromkeys(addresses)) for name, addresses in by_device.items()}


def _bytes(address: int, family: int) -> bytes:
    offset, size = _OFFSET[family]
    return ctypes.string_at(address + offset, size)


def is_link_local_v6(address: str) -> bool:
    parsed = ipaddress.ip_interface(address)
    return parsed.version == 6 and parsed.is_link_local


def _without_link_local(addresses: Iterable[str]) -> tuple[str, ...]:
    addresses = tuple(dict.fromkeys(addresses))
    return tuple(a for a in addresses if not is_link_local_v6(a)) or addresses


def captured_addresses(root: str | Path) -> Addresses | None:
    """From ip_addr.json (`ip -j addr`) at the root of a captured tree; None when it is not there. HolmesError
    names a file that `ip -j addr` did not print."""
    path = os.path.join(root, CAPTURED)
    if not os.path.lexists(path):
        return None
    if not os.path.isfile(path):
        raise HolmesError(f"{path}: is not a regular file")
    try:
        links = json.loads(read_text(path, "write it with `ip -j addr`"))
        if not isinstance(links, list):
            raise TypeError
        return {link["ifname"]: _captured(link["addr_info"]) for link in links if link != {}}
    except (ValueError, RecursionError) as error:
        raise HolmesError(
            f"{path}: is no JSON of addresses: {error}; write it with `ip -j addr`"
        ) from None
    except (KeyError, TypeError, AttributeError):
        wanted = "a list of objects with ifname and addr_info"
        raise HolmesError(f"{path}: is not what `ip -j addr` prints ({wanted})") from None


def _captured(addr_info: Iterable[dict[str, Any]]) -> tuple[str, ...]:
    # {}: what ip filtered out
    known = [info for info in addr_info if info and info["family"] in ("inet", "inet6")]
    return _without_link_local(
        ipaddress.ip_interface(f"{i['local']}/{i['prefixlen']}").with_prefixlen for i in known
    )


def egress_interface(host: str) -> str:
    """Name of the net device through which this node reaches `host` (a name or an address); nothing is sent.

    When `host` is this node itself, the device that carries that address. A loopback address ("localhost", or
    a host name that /etc/hosts maps to 127.0.1.1) says nothing about the network: then it is the device of
    the default route, else the first one with an address (link-local ones last), and "lo" only when there is
    nothing but loopback. Raises HolmesError when `host` is unknown or unreachable.
    """
    devices, problems = _all_addresses(), []
    try:
        targets = [
            (info[0], info[4]) for info in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        ]
    except (OSError, UnicodeError) as error:
        raise HolmesError(f"host {host!a:.200} is unknown to this node: {why(error)}") from None
    for family, target in targets:
        try:
            names = _carriers(*_local_address(family, target), devices)
        except OSError as error:
            problems.append(why(error))
            continue
        return names[0] if names else _any_interface(devices)
    raise HolmesError(
        f"this node has no route to {host}: {problems[0]}; "
        "check MASTER_ADDR and this node's addresses (ip route get)"
    )


def _local_address(family: int, target: Any) -> tuple[str, int]:
    """The source address the kernel would use towards `target`, and its scope (an interface index) or 0."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        name = probe.getsockname()
    return name[0].partition("%")[0], name[3] if family == socket.AF_INET6 else 0


def _carriers(local: str, scope: int, devices: Addresses) -> list[str]:
    """Devices other than loopback that carry the address `local`."""
    address = ipaddress.ip_address(local)
    if scope:
        return [socket.if_indextoname(scope)]
    return [
        name
        for name, interfaces in devices.items()
        if name != "lo" and any(ipaddress.ip_interface(a).ip == address for a in interfaces)
    ]


def _any_interface(devices: Addresses) -> str:
    # Addresses reserved for documentation (RFC 5737, RFC 3849): only the default route leads there.
    for family, target in (
        (socket.AF_INET, ("192.0.2.1", 9)),
        (socket.AF_INET6, ("2001:db8::1", 9)),
    ):
        try:
            names = _carriers(*_local_address(family, target), devices)
        except OSError:
            continue
        if names:
            return names[0]
    named = {
        name: interfaces for name, interfaces in devices.items() if name != "lo" and interfaces
    }
    local = {
        name
        for name, interfaces in named.items()
        if all(ipaddress.ip_interface(a).is_link_local for a in interfaces)
    }
    return next(iter([*(name for name in named if name not in local), *named]), "lo")
