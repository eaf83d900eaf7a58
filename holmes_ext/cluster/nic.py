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
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any

from holmes_ext import extensions
from holmes_ext.checks import Each, InRange, Matches, OneOf, Satisfies, check_fields
from holmes_ext.errors import HolmesError


@dataclass(frozen=True)
class NicKind:
    """Kind of NIC, such as InfiniBand."""

    #: Seconds that one message waits on the wire and in the stack, unless cluster.toml gives it.
    latency_s: float
    #: Words in the features and labels of schedulers that mean this kind. Slurm's sites often name speeds.
    words: tuple[str, ...]
    layer: str  # what /sys calls the link layer of its RDMA ports; "" without RDMA
    color: str  # in pictures
    #: Kernel driver of its ports, if their link layer is that of another kind.
    driver: str = ""

    @property
    def infiniband(self) -> bool:
        """Whether subnet managers tell its ports who they are: LIDs, and a prefix for each subnet."""
        return self.layer == "InfiniBand"


#: The fastest first.
KINDS: dict[str, NicKind] = {
    "ib": NicKind(
        2e-6,
        (
            "ib",
            "infiniband",
            "qdr",
            "fdr",
            "edr",
            "hdr",
            "hdr100",
            "ndr",
            "ndr200",
            "xdr",
            "quantum",
        ),
        "InfiniBand",
        "#2a6f97",
    ),
    "roce": NicKind(4e-6, ("roce", "rocev2", "spectrum", "spectrumx"), "Ethernet", "#2a9d8f"),
    **extensions.objects("nic_kinds"),
    "ethernet": NicKind(30e-6, ("ethernet", "eth", "tcp"), "", "#d62728"),
}
GID_TYPES = ("ib", "roce_v1", "roce_v2")
DEFAULT_SUBNET_PREFIX = "fe80:0000:0000:0000"  # what a subnet manager uses unless it is configured
#: A device's name: printable ASCII without space and slash, as the kernel's are.
DEVICE_NAME = re.compile(r"[!-.0-~]{1,64}")
GID = re.compile("[0-9a-f]{4}(:[0-9a-f]{4}){7}")
_LENGTHS = {socket.AF_INET: 32, socket.AF_INET6: 128}
_SUBNET_PREFIX = re.compile("[0-9a-f]{4}(:[0-9a-f]{4}){3}")
PCI_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def _is_address(text: str) -> bool:
    address, slash, length = text.partition("/")
    version = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        socket.inet_pton(version, address.partition("%")[0])
    except (OSError, ValueError):
        return False
    return (
        bool(slash) and length.isdecimal() and len(length) < 4 and int(length) <= _LENGTHS[version]
    )


def _is_line(text: str) -> bool:
    return len(text) <= 200 and (not text or text.isprintable())


_Line = Annotated[str, Satisfies(_is_line, "one short line of text")]
_DEVICE = Matches(DEVICE_NAME, "a device name")
_DeviceNames = Annotated[tuple[str, ...], Each(_DEVICE, "a list of device names")]
_Addresses = Annotated[
    tuple[str, ...],
    Each(
        Satisfies(_is_address, "an IP address"),
        "a list of IP addresses with prefix length ('10.0.0.1/16')",
    ),
]
_PciAddress = Annotated[
    str, Matches(PCI_ADDRESS, "a PCI address ('0000:41:00.0')", may_be_empty=True)
]
_SubnetPrefix = Annotated[
    str, Matches(_SUBNET_PREFIX, "four groups of four lower-case hex digits", may_be_empty=True)
]
_Count = Annotated[int, InRange(0, 2**63 - 1)]
_LocalIdentifier = Annotated[int, InRange(0, 2**32 - 1, "a LID")]


@dataclass(frozen=True)
class Gid:
    """One entry of a port's GID table.

    index: its place in the table (what NCCL_IB_GID_INDEX takes); value: eight groups of four hex digits;
    type: "ib", "roce_v1" or "roce_v2"; netdev: the net device it belongs to on a RoCE port, "" otherwise.
    """

    index: Annotated[int, InRange(0, 2**31 - 1)]
    value: Annotated[str, Matches(GID, "eight groups of four lower-case hex digits")]
    type: Annotated[str, OneOf(GID_TYPES)]
    netdev: Annotated[str, Matches(DEVICE_NAME, "a device name", may_be_empty=True)] = ""

    def __post_init__(self) -> None:
        check_fields(self, "GID")

    @property
    def address(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
        """The IP address that the GID stands for; IPv4 when it is IPv4-mapped (::ffff:a.b.c.d)."""
        v6 = ipaddress.IPv6Address(self.value)
        return v6.ipv4_mapped or v6


@dataclass(frozen=True)
class Nic:
    kind: Annotated[str, OneOf(KINDS)]  # "ib", "roce" or "ethernet" (see the module)
    # HCA name ("mlx5_0") for ib and roce, net device name ("eth0") for ethernet
    device: Annotated[str, _DEVICE]
    # port number of the HCA, from 1; 0 for ethernet
    port: Annotated[int, InRange(0, 255, "a port number")] = 0
    netdevs: _DeviceNames = ()  # net devices behind the port, the one to bind sockets on first
    state: Annotated[str, OneOf(("up", "down"))] = "down"  # "up": carries data now
    state_text: _Line = (
        ""  # what the kernel says: "ACTIVE", "INIT", "DOWN/Polling"; "up", "no carrier", ...
    )
    rate_bps: _Count = 0  # of the link in bits/s, 0 when unknown (always 0 where there is no link)
    # what its PCIe link can carry, bits/s (speed x lanes after line coding), 0 when unknown
    max_rate_bps: _Count = 0
    addresses: _Addresses = ()  # of its net devices, with prefix length: "10.0.0.1/16"
    mtu: _Count = 0  # of the first net device in bytes, 0 when unknown
    subnet_prefix: _SubnetPrefix = ""  # ib: upper 64 bits of GID 0, "fe80:0000:0000:0000"
    gids: tuple[Gid, ...] = ()  # GID table without its empty entries
    lid: _LocalIdentifier = 0  # ib: local identifier of the port, 0 when there is none
    sm_lid: _LocalIdentifier = 0  # ib: that of its subnet manager
    numa: Annotated[int, InRange(-1, 2**31 - 1)] = -1  # NUMA node, -1 when unknown
    pci: _PciAddress = ""
    driver: _Line = ""  # of the kernel
    #: Of a virtual function: the device of its physical function (its PCI address where this network
    #: namespace does not show the device).
    parent: _Line = ""
    members: _DeviceNames = ()  # of a bond (or a bridge): the net devices under it
    rdma: _Line = ""  # ethernet: the RoCE port that owns this net device ("mlx5_1:1")
    skipped: _Line = (
        ""  # the reason why it is set aside ("member of bond0", "management (USB/BMC)", ...)
    )

    def __post_init__(self) -> None:
        what = f"NIC {self.device!a:.80}"
        check_fields(self, what)
        if (self.kind == "ethernet") != (self.port == 0):
            wanted = "must be 0 for ethernet and 1 or more for ib and roce"
            raise HolmesError(f"{what}: key 'port' {wanted}, not {self.port}")
        if self.kind == "ethernet" and self.netdevs != (self.device,):
            raise HolmesError(
                f"{what}: key 'netdevs' of an ethernet NIC must be its own device, not {self.netdevs!a}"
            )

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
            return (
                address.is_link_local,
                address.version,
                gid.netdev not in ("", self.ifname),
                gid.index,
            )

        best = min((gid for gid in self.gids if gid.type == "roce_v2"), key=order, default=None)
        return None if best is None else best.index


_DEFAULTS = {item.name: item.default for item in fields(Nic)}
