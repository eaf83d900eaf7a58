"""What one NIC port is: self-validating values that travel as JSON.

A node's NICs are a tuple of `Nic`. Three kinds exist, after what a collective library can do with them:

    ib        an InfiniBand port (verbs; sockets through its IPoIB net device, when it has one)
    roce      an RDMA port on Ethernet (verbs with a RoCE v2 GID; sockets through its net device)
    ethernet  a net device for sockets. The net device of a RoCE port appears a second time with this kind,
              and its `rdma` names the port ("mlx5_1:1"), so that later code may choose either use.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

from holmes_ext.errors import HolmesError


@dataclass(frozen=True)
class NicKind:
    """latency_s: seconds that one message waits on the wire and in the stack where cluster.toml says nothing;
    words: of features and labels that tell it (Slurm's sites name speeds as often as InfiniBand); layer: what
    /sys calls the link layer of its RDMA ports, "" without RDMA; color: in pictures."""

    latency_s: float
    words: tuple[str, ...]
    layer: str
    color: str

    @property
    def infiniband(self) -> bool:
        """Whether subnet managers tell its ports who they are: LIDs, and a prefix for each subnet."""
        return self.layer == "InfiniBand"


#: The fastest first.
KINDS: dict[str, NicKind] = {
    "ib": NicKind(
        2e-6, ("ib", "infiniband", "qdr", "fdr", "edr", "hdr", "hdr100", "ndr", "ndr200", "xdr", "quantum"),
        "InfiniBand", "#2a6f97",
    ),
    "roce": NicKind(4e-6, ("roce", "rocev2", "spectrum", "spectrumx"), "Ethernet", "#2a9d8f"),
    "ethernet": NicKind(30e-6, ("ethernet", "eth", "tcp"), "", "#d62728"),
}  # fmt: skip
GID_TYPES = ("ib", "roce_v1", "roce_v2")
DEFAULT_SUBNET_PREFIX = "fe80:0000:0000:0000"  # what a subnet manager uses unless it is configured
#: A device's name: printable ASCII without space and slash, as the kernel's are.
DEVICE_NAME = re.compile(r"[!-.0-~]{1,64}")
GID = re.compile("[0-9a-f]{4}(:[0-9a-f]{4}){7}")
_LENGTHS = {socket.AF_INET: 32, socket.AF_INET6: 128}
_SUBNET_PREFIX = re.compile("([0-9a-f]{4}(:[0-9a-f]{4}){3})?")
PCI_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


@dataclass(frozen=True)
class Gid:
    """One entry of a port's GID table.

    index: its place in the table (what NCCL_IB_GID_INDEX takes); value: eight groups of four hex digits;
    type: "ib", "roce_v1" or "roce_v2"; netdev: the net device it belongs to on a RoCE port, "" otherwise.
    """

    index: int
    value: str
    type: str
    netdev: str = ""

    def __post_init__(self) -> None:
        _check(self, "GID", _GID_RULES)

    @property
    def address(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
        """The IP address that the GID stands for; IPv4 when it is IPv4-mapped (::ffff:a.b.c.d)."""
        v6 = ipaddress.IPv6Address(self.value)
        return v6.ipv4_mapped or v6


@dataclass(frozen=True)
class Nic:
    kind: str  # "ib", "roce" or "ethernet" (see the module)
    device: str  # HCA name ("mlx5_0") for ib and roce, net device name ("eth0") for ethernet
    port: int = 0  # port number of the HCA, from 1; 0 for ethernet
    netdevs: tuple[str, ...] = ()  # net devices behind the port, the one to bind sockets on first
    state: str = "down"  # "up" (carries data now) or "down"
    state_text: str = ""  # what the kernel says: "ACTIVE", "INIT", "DOWN/Polling"; "up", "no carrier", ...
    rate_bps: int = 0  # of the link in bits/s, 0 when unknown (always 0 where there is no link)
    # what its PCIe link can carry, bits/s (speed x lanes after line coding), 0 when unknown
    max_rate_bps: int = 0
    addresses: tuple[str, ...] = ()  # of its net devices, with prefix length: "10.0.0.1/16"
    mtu: int = 0  # of the first net device in bytes, 0 when unknown
    subnet_prefix: str = ""  # ib: upper 64 bits of GID 0, "fe80:0000:0000:0000"
    gids: tuple[Gid, ...] = ()  # GID table without its empty entries
    lid: int = 0  # ib: local identifier of the port, 0 when there is none
    sm_lid: int = 0  # ib: that of its subnet manager
    numa: int = -1  # NUMA node, -1 when unknown
    pci: str = ""  # PCI address "0000:41:00.0"
    driver: str = ""  # of the kernel
    #: Of a virtual function: the device of its physical function (its PCI address where this network
    #: namespace does not show the device).
    parent: str = ""
    members: tuple[str, ...] = ()  # of a bond (or a bridge): the net devices under it
    rdma: str = ""  # ethernet: the RoCE port that owns this net device ("mlx5_1:1")
    skipped: str = ""  # the reason why it is set aside ("member of bond0", "management (USB/BMC)", ...)

    def __post_init__(self) -> None:
        what = f"NIC {self.device!a:.80}"
        _check(self, what, _NIC_RULES)
        if (self.kind == "ethernet") != (self.port == 0):
            wanted = "must be 0 for ethernet and 1 or more for ib and roce"
            raise HolmesError(f"{what}: key 'port' {wanted}, not {self.port}")
        if self.kind == "ethernet" and self.netdevs != (self.device,):
            raise HolmesError(
                f"{what}: key 'netdevs' of an ethernet NIC must be its own device, not {self.netdevs!a}")

    def to_dict(self) -> dict[str, Any]:
        """What is not as by default."""
        return {key: value for key, value in asdict(self).items() if value != _DEFAULTS.get(key)}

    @property
    def name(self) -> str:
        """How NCCL, include/exclude and messages call it: "mlx5_0:1", or "eth0" for ethernet."""
        return self.device if self.kind == "ethernet" else f"{self.device}:{self.port}"

    @property
    def ifname(self) -> str:
        """The net device to bind sockets on (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), "" when it has none."""
        return self.netdevs[0] if self.netdevs else ""

    @property
    def up(self) -> bool:
        return self.state == "up"

    @property
    def usable(self) -> bool:
        """Up and not set aside. (Sockets need an address besides.)"""
        return self.up and not self.skipped

    @property
    def fast(self) -> bool:
        """Whether it does RDMA."""
        return self.kind != "ethernet"

    @property
    def roce_v2_index(self) -> int | None:
        """Index of the RoCE v2 GID for NCCL_IB_GID_INDEX, None when there is none.

        Best first: IPv4-mapped on `ifname`, IPv4-mapped on another net device (a VLAN), a routable IPv6
        address, and a link-local one last, since it reaches no further than its own Ethernet segment.
        """

        def order(gid: Gid) -> tuple[bool, int, bool, int]:
            address = gid.address
            return address.is_link_local, address.version, gid.netdev not in ("", self.ifname), gid.index

        best = min((gid for gid in self.gids if gid.type == "roce_v2"), key=order, default=None)
        return None if best is None else best.index


_DEFAULTS = {item.name: item.default for item in fields(Nic)}


def _is_address(text: str) -> bool:
    address, slash, length = text.partition("/")
    version = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        socket.inet_pton(version, address.partition("%")[0])
    except (OSError, ValueError):
        return False
    return bool(slash) and length.isdecimal() and len(length) < 4 and int(length) <= _LENGTHS[version]


def _within(low: int, high: int) -> Callable[[int], bool]:
    return lambda value: low <= value <= high


def _all(good: Callable[[str], object]) -> Callable[[tuple[str, ...]], bool]:
    return lambda values: all(map(good, values))


#: key -> (whether a value of the key's type is good, what it must be)
Rules = dict[str, tuple[Callable[[Any], object], str]]
_LINE = (lambda text: len(text) <= 200 and (not text or text.isprintable()), "one short line of text")
_GID_RULES: Rules = {
    "index": (_within(0, 2**31 - 1), "a whole number from 0"),
    "value": (GID.fullmatch, "eight groups of four lower-case hex digits"),
    "type": (GID_TYPES.__contains__, " or ".join(map(repr, GID_TYPES))),
    "netdev": (lambda text: not text or DEVICE_NAME.fullmatch(text), "a device name or ''"),
}
_NIC_RULES: Rules = {
    "kind": (KINDS.__contains__, " or ".join(map(repr, KINDS))),
    "device": (DEVICE_NAME.fullmatch, "a device name"),
    "port": (_within(0, 255), "a port number (0 to 255)"),
    "state": (("up", "down").__contains__, "'up' or 'down'"),
    "addresses": (_all(_is_address), "a list of IP addresses with prefix length ('10.0.0.1/16')"),
    "subnet_prefix": (_SUBNET_PREFIX.fullmatch, "four groups of four lower-case hex digits or ''"),
    "numa": (_within(-1, 2**31 - 1), "a NUMA node or -1"),
    "pci": (lambda text: not text or PCI_ADDRESS.fullmatch(text), "a PCI address ('0000:41:00.0') or ''"),
    **dict.fromkeys(("netdevs", "members"), (_all(DEVICE_NAME.fullmatch), "a list of device names")),
    **dict.fromkeys(("rate_bps", "max_rate_bps", "mtu"), (_within(0, 2**63 - 1), "a whole number from 0")),
    **dict.fromkeys(("lid", "sm_lid"), (_within(0, 2**32 - 1), "a LID (0 to 2**32 - 1)")),
    **dict.fromkeys(("state_text", "driver", "parent", "rdma", "skipped"), _LINE),
}


def _check(value: Gid | Nic, what: str, rules: Rules) -> None:
    for key, (good, meaning) in rules.items():
        if not good(getattr(value, key)):
            raise HolmesError(f"{what}: key '{key}' must be {meaning}, not {getattr(value, key)!a:.80}")
