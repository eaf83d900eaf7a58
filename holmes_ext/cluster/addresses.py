"""IP addresses of net devices: of this node (getifaddrs), or of a captured tree (`ip -j addr`).

/sys shows none. Both give net device -> addresses with prefix length, "10.0.0.1/16"; link-local IPv6 ones
only where a device has no other.
"""

from __future__ import annotations

import ctypes
import ipaddress
import json
import os
import socket
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from holmes_ext.document import read_text
from holmes_ext.errors import HolmesError
from holmes_ext.words import why

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
            f"cannot list this node's IP addresses: getifaddrs: {os.strerror(ctypes.get_errno())}")
    by_device: dict[str, list[str]] = {}
    try:
        entry = first
        while entry:
            item = entry.contents
            addresses = by_device.setdefault(os.fsdecode(item.name), [])
            family = struct.unpack("=H", ctypes.string_at(item.address, 2))[0] if item.address else -1
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
        raise HolmesError(f"{path}: is no JSON of addresses: {error}; write it with `ip -j addr`") from None
    except (KeyError, TypeError, AttributeError):
        wanted = "a list of objects with ifname and addr_info"
        raise HolmesError(f"{path}: is not what `ip -j addr` prints ({wanted})") from None


def _captured(addr_info: Iterable[dict[str, Any]]) -> tuple[str, ...]:
    # {}: what ip filtered out
    known = [info for info in addr_info if info and info["family"] in ("inet", "inet6")]
    return _without_link_local(ipaddress.ip_interface(f"{i['local']}/{i['prefixlen']}").with_prefixlen
                               for i in known)


def egress_interface(host: str) -> str:
    """Name of the net device through which this node reaches `host` (a name or an address); nothing is sent.

    When `host` is this node itself, the device that carries that address. A loopback address ("localhost", or
    a host name that /etc/hosts maps to 127.0.1.1) says nothing about the network: then it is the device of
    the default route, else the first one with an address (link-local ones last), and "lo" only when there is
    nothing but loopback. Raises HolmesError when `host` is unknown or unreachable.
    """
    devices, problems = _all_addresses(), []
    try:
        targets = [(info[0], info[4]) for info in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)]
    except (OSError, UnicodeError) as error:
        raise HolmesError(f"host {host!a:.200} is unknown to this node: {why(error)}") from None
    for family, target in targets:
        try:
            names = _carriers(*_local_address(family, target), devices)
        except OSError as error:
            problems.append(why(error))
            continue
        return names[0] if names else _any_interface(devices)
    raise HolmesError(f"this node has no route to {host}: {problems[0]}; "
                      "check MASTER_ADDR and this node's addresses (ip route get)")


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
    return [name for name, interfaces in devices.items()
            if name != "lo" and any(ipaddress.ip_interface(a).ip == address for a in interfaces)]


def _any_interface(devices: Addresses) -> str:
    # Addresses reserved for documentation (RFC 5737, RFC 3849): only the default route leads there.
    for family, target in ((socket.AF_INET, ("192.0.2.1", 9)), (socket.AF_INET6, ("2001:db8::1", 9))):
        try:
            names = _carriers(*_local_address(family, target), devices)
        except OSError:
            continue
        if names:
            return names[0]
    named = {name: interfaces for name, interfaces in devices.items() if name != "lo" and interfaces}
    local = {name for name, interfaces in named.items()
             if all(ipaddress.ip_interface(a).is_link_local for a in interfaces)}
    return next(iter([*(name for name in named if name not in local), *named]), "lo")
