"""IP addresses of net devices: of this node (getifaddrs), or of a captured tree (`ip -j addr`).

/sys does not show IP addresses. Both sources give the same form: net device -> addresses with prefix length,
"10.0.0.1/16". Link-local IPv6 addresses are left out, except where a device has no other: nodes are not
addressed by them.
"""

import ctypes
import ipaddress
import json
import os
import socket
import struct

from holmes_ext.errors import HolmesError

CAPTURED = "ip_addr.json"  # the output of `ip -j addr` at the root of a captured tree
_LARGEST = 1 << 24  # bytes of a captured file


class _IfAddrs(ctypes.Structure):
    pass


_IfAddrs._fields_ = [  # struct ifaddrs of getifaddrs(3)
    ("next", ctypes.POINTER(_IfAddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
    ("netmask", ctypes.c_void_p),
    ("destination", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
]
_OFFSET = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}  # where sockaddr_in and _in6 hold how many bytes


def interface_addresses() -> "dict[str, tuple[str, ...]]":
    """Every net device of the current network namespace with its addresses, loopback included.

    A device without an address has an empty tuple. Raises HolmesError when the kernel does not answer.
    """
    return {name: _without_link_local(found) for name, found in _all_addresses().items()}


def _all_addresses() -> "dict[str, tuple[str, ...]]":
    libc = ctypes.CDLL(None, use_errno=True)
    libc.freeifaddrs.argtypes = [ctypes.POINTER(_IfAddrs)]
    libc.freeifaddrs.restype = None
    first = ctypes.POINTER(_IfAddrs)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        raise HolmesError(f"cannot list this node's IP addresses: getifaddrs: {os.strerror(ctypes.get_errno())}")
    found = {}
    try:
        entry = first
        while entry:
            item = entry.contents
            addresses = found.setdefault(os.fsdecode(item.name), [])
            family = _family(item.address)
            if family in _OFFSET:
                packed = _bytes(item.address, family)
                mask = _bytes(item.netmask, family) if item.netmask else b"\xff" * len(packed)
                prefix = int.from_bytes(mask, "big").bit_count()
                addresses.append(f"{ipaddress.ip_address(packed)}/{prefix}")
            entry = item.next
    finally:
        libc.freeifaddrs(first)
    return {name: tuple(dict.fromkeys(addresses)) for name, addresses in found.items()}


def _family(address) -> int:
    return struct.unpack("=H", ctypes.string_at(address, 2))[0] if address else -1


def _bytes(address, family: int) -> bytes:
    offset, size = _OFFSET[family]
    return ctypes.string_at(address + offset, size)


def is_link_local_v6(address: str) -> bool:
    parsed = ipaddress.ip_interface(address)
    return parsed.version == 6 and parsed.is_link_local


def _without_link_local(addresses) -> "tuple[str, ...]":
    kept = tuple(a for a in addresses if not is_link_local_v6(a))
    return kept or tuple(addresses)


def captured_addresses(root) -> "dict[str, tuple[str, ...]] | None":
    """Addresses that lie as ip_addr.json (`ip -j addr`) at the root of a captured tree; None when it is not there.

    Raises HolmesError naming the file when it is not what `ip -j addr` prints.
    """
    path = os.path.join(root, CAPTURED)
    try:
        if not os.path.isfile(path):
            if os.path.lexists(path):
                raise HolmesError(f"{path}: is not a regular file")
            return None
        with open(path, "rb") as file:
            data = file.read(_LARGEST + 1)
    except (OSError, ValueError) as error:
        raise HolmesError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > _LARGEST:
        raise HolmesError(f"{path}: is longer than {_LARGEST} bytes")
    try:
        links = json.loads(data)
        if not isinstance(links, list):
            raise TypeError
        return {link["ifname"]: _captured(link["addr_info"]) for link in links if link != {}}
    except (ValueError, RecursionError) as error:
        raise HolmesError(f"{path}: is no JSON of addresses: {error}; write it with `ip -j addr`") from None
    except (KeyError, TypeError, AttributeError):
        raise HolmesError(f"{path}: is not what `ip -j addr` prints (a list of objects with ifname and addr_info)"
                          ) from None


def _captured(addr_info) -> "tuple[str, ...]":
    addresses = []
    for info in addr_info:
        if info and info["family"] in ("inet", "inet6"):  # ip -j prints {} for what it filtered out
            interface = ipaddress.ip_interface(f"{info['local']}/{info['prefixlen']}")
            addresses.append(str(interface.with_prefixlen))
    return _without_link_local(tuple(dict.fromkeys(addresses)))


def egress_interface(host: str) -> str:
    """Name of the net device through which this node reaches `host` (a name or an address); nothing is sent.

    When `host` is this node itself, the device that carries that address. A loopback address ("localhost",
    or a host name that /etc/hosts maps to 127.0.1.1) says nothing about the network: then it is the device of
    the default route, else the first one with an address (link-local ones last), and "lo" only when there is
    nothing but loopback.
    Raises HolmesError when `host` is unknown or unreachable.
    """
    devices = _all_addresses()
    problem = None
    for family, target in _targets(host):
        try:
            local, scope = _local_address(family, target)
        except OSError as error:
            problem = problem or error
            continue
        names = _carriers(local, scope, devices)
        if names:
            return names[0]
        return _any_interface(devices)
    raise HolmesError(f"this node has no route to {host}: {problem.strerror or problem}; "
                      "check MASTER_ADDR and this node's addresses (ip route get)")


def _targets(host: str):
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as error:
        raise HolmesError(f"host {host!a:.200} is unknown to this node: {getattr(error, 'strerror', None) or error}"
                          ) from None
    return [(family, target) for family, _, _, _, target in found]


def _local_address(family: int, target) -> "tuple[str, int]":
    """The source address the kernel would use towards `target`, and its scope (an interface index) or 0."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        name = probe.getsockname()
    return name[0].partition("%")[0], name[3] if family == socket.AF_INET6 else 0


def _carriers(local: str, scope: int, devices) -> "list[str]":
    """Devices other than loopback that carry the address `local`."""
    address = ipaddress.ip_address(local)
    if scope:
        return [socket.if_indextoname(scope)]
    return [name for name, found in devices.items()
            if name != "lo" and any(ipaddress.ip_interface(a).ip == address for a in found)]


def _any_interface(devices) -> str:
    # Addresses reserved for documentation (RFC 5737, RFC 3849): only the default route leads there.
    for family, target in ((socket.AF_INET, ("192.0.2.1", 9)), (socket.AF_INET6, ("2001:db8::1", 9))):
        try:
            names = _carriers(*_local_address(family, target), devices)
        except OSError:
            continue
        if names:
            return names[0]
    with_address = [name for name, found in devices.items() if name != "lo" and found]
    routable = [name for name in with_address if not all(ipaddress.ip_interface(a).is_link_local for a in devices[name])]
    return next(iter(routable + with_address), "lo")
