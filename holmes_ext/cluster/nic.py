"""Description of a NIC port, with checks of its values. Nodes exchange it as JSON.

A node's NICs are a tuple of `Nic`. The kinds differ in the transports that a collective library can
use:

    ib        an InfiniBand port (verbs; sockets through its IPoIB network device, if there is any)
    roce      an RDMA port on Ethernet (verbs with a RoCE v2 GID; sockets through its network device)
    erdma     Elastic RDMA of Alibaba Cloud (verbs, as for RoCE)
    opa       Omni-Path (a network plugin of NCCL where one is installed, else verbs)
    efa       Elastic Fabric Adapter of AWS (a network plugin of NCCL)
    plugin    any other NIC that only a network plugin of NCCL can use
    ethernet  a network device for sockets. The network device of a RoCE port is listed a second
              time with this kind, and its `rdma` names the port ("mlx5_1:1"), so that either use
              can be chosen
    iwarp     RDMA over TCP. NCCL cannot connect over it, so jobs use its network device

Two kinds are network devices that a network plugin of NCCL uses, too: HPE Slingshot ("slingshot")
and Google's gVNIC ("gvnic"). Such a device is listed once, as "ethernet", because sockets can use it
without the plugin; its `plugin_kind` is the other kind.

Extensions may add other kinds.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import asdict, dataclass, fields
from fnmatch import fnmatchcase
from typing import Annotated, Any

from holmes_ext import extensions
from holmes_ext.checks import Each, InRange, Matches, OneOf, Satisfies, check_fields
from holmes_ext.errors import HolmesError


@dataclass(frozen=True)
class NicKind:
    """Kind of NIC, such as InfiniBand."""

    #: Latency of one message on the wire and in the network stack, seconds, unless cluster.toml
    #: gives it.
    latency_s: float
    #: Words in a scheduler's features and labels that mean this kind. Slurm sites often name
    #: speeds.
    words: tuple[str, ...]
    layer: str  # link layer of the RDMA ports in /sys; "" without RDMA
    color: str  # in pictures
    #: Kernel driver of the ports, or a pattern of drivers, if another kind has the same link layer.
    driver: str = ""
    #: Pattern of the kernel drivers of network devices that a network plugin of NCCL uses as NICs of
    #: this kind. They have no RDMA port in /sys.
    netdev_driver: str = ""
    #: Pattern of the names of such network devices where the driver is not known, as in containers.
    netdev_name: str = ""
    #: True if NCCL's built-in network "IB" can use the NICs (verbs).
    verbs: bool = True
    #: True if NCCL uses the NICs through a network plugin where one is installed.
    plugin: bool = False
    title: str = ""  # name in messages, if it is not the kind's own

    @property
    def usable(self) -> bool:
        """True if NCCL can use NICs of this kind in another way than by sockets."""
        return self.verbs or self.plugin

    @property
    def infiniband(self) -> bool:
        """True if a subnet manager assigns a LID to each port and a prefix to each subnet."""
        return self.layer == "InfiniBand"


#: Kinds of NICs by name; those of extensions come after those of holmes. The order matters in three places:
#: if the patterns of several kinds match a NIC's driver (or a network device), the first kind is taken
#: (sysfs/rdma.py, Nic.plugin_kind); if programs such as ibstat list several kinds on a node,
#: `holmes discover` takes the first; and NICs are listed in this order. Plans do not use the order: they
#: compare rates, then latencies (Fabric.preference).
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
    "erdma": NicKind(
        8e-6, ("erdma",), "Ethernet", "#577590", driver="erdma", title="eRDMA (Alibaba Cloud)"
    ),
    "opa": NicKind(
        2e-6,
        ("opa", "omnipath"),
        "InfiniBand",
        "#6a4c93",
        driver="hfi[12]",
        plugin=True,
        title="Omni-Path",
    ),
    "slingshot": NicKind(
        3e-6,
        ("slingshot", "cassini"),
        "",
        "#bc6c25",
        netdev_driver="*cxi*",
        netdev_name="hsn[0-9]*",
        verbs=False,
        plugin=True,
        title="Slingshot (HPE)",
    ),
    "efa": NicKind(
        15e-6,
        ("efa",),
        "Unspecified",
        "#f4a261",
        driver="efa",
        verbs=False,
        plugin=True,
        title="EFA (AWS)",
    ),
    "gvnic": NicKind(
        20e-6,
        ("gvnic", "tcpx", "tcpxo", "fastrak"),
        "",
        "#8ab17d",
        netdev_driver="gve",
        verbs=False,
        plugin=True,
        title="gVNIC (Google Cloud)",
    ),
    **extensions.objects("nic_kinds"),
    "plugin": NicKind(
        10e-6, (), "", "#9d4edd", verbs=False, plugin=True, title="network plugin of NCCL"
    ),
    "iwarp": NicKind(30e-6, (), "", "#adb5bd", verbs=False, title="iWARP"),
    "ethernet": NicKind(30e-6, ("ethernet", "eth", "tcp"), "", "#d62728", verbs=False),
}
#: Kinds that cluster.toml may name.
CLUSTER_KINDS = tuple(name for name, kind in KINDS.items() if kind.usable or name == "ethernet")
GID_TYPES = ("ib", "roce_v1", "roce_v2")
#: InfiniBand subnet prefix that a subnet manager uses unless it is configured.
DEFAULT_SUBNET_PREFIX = "fe80:0000:0000:0000"
#: Device name: printable ASCII without space and slash.
DEVICE_NAME = re.compile(r"[!-.0-~]{1,64}")
GID = re.compile("[0-9a-f]{4}(:[0-9a-f]{4}){7}")
#: Address family -> bits of an address.
_ADDRESS_BITS = {socket.AF_INET: 32, socket.AF_INET6: 128}
#: Characters of a text in a NIC's fields, such as the name of a driver.
_LONGEST_LINE = 200
_SUBNET_PREFIX = re.compile("[0-9a-f]{4}(:[0-9a-f]{4}){3}")
PCI_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def _is_address(text: str) -> bool:
    """Return whether a text is an IP address with prefix length, such as "10.0.0.1/16"."""
    address, slash, prefix_length = text.partition("/")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    without_scope = address.partition("%")[0]  # "fe80::1%eth0" has the device after "%"
    try:
        socket.inet_pton(family, without_scope)
    except (OSError, ValueError):
        return False
    if not slash or not re.fullmatch("[0-9]{1,3}", prefix_length):
        return False
    return int(prefix_length) <= _ADDRESS_BITS[family]


def _is_line(text: str) -> bool:
    """Return whether a text is empty or one short line."""
    return len(text) <= _LONGEST_LINE and (not text or text.isprintable())


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
    """Entry of the GID table of an RDMA port."""

    #: Position in the table: the value for NCCL_IB_GID_INDEX.
    index: Annotated[int, InRange(0, 2**31 - 1)]
    #: Eight groups of four hex digits.
    value: Annotated[str, Matches(GID, "eight groups of four lower-case hex digits")]
    type: Annotated[str, OneOf(GID_TYPES)]
    #: Network device of the entry on a RoCE port, otherwise "".
    netdev: Annotated[str, Matches(DEVICE_NAME, "a device name", may_be_empty=True)] = ""

    def __post_init__(self) -> None:
        check_fields(self, "GID")

    @property
    def address(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
        """IP address that the GID stands for: IPv4 if it is IPv4-mapped (::ffff:a.b.c.d)."""
        ipv6 = ipaddress.IPv6Address(self.value)
        return ipv6.ipv4_mapped or ipv6


@dataclass(frozen=True)
class Nic:
    """Port of a NIC, as RDMA or as sockets use it.

    A RoCE port is listed twice: with kind "roce" for RDMA, and its network device with kind "ethernet".

    Raises:
        HolmesError: a field has a value that is not allowed.
    """

    #: "ib", "roce", "ethernet" or another key of KINDS; see the module.
    kind: Annotated[str, OneOf(KINDS)]
    #: HCA ("mlx5_0") for RDMA kinds, network device ("eth0") for ethernet.
    device: Annotated[str, _DEVICE]
    #: Port number of the HCA, from 1; 0 for ethernet.
    port: Annotated[int, InRange(0, 255, "a port number")] = 0
    #: Network devices of the port. The first is the one to bind sockets to.
    netdevs: _DeviceNames = ()
    #: "up" if the port can transfer data now.
    state: Annotated[str, OneOf(("up", "down"))] = "down"
    #: State in the kernel's words: "ACTIVE", "INIT", "DOWN/Polling"; "up", "no carrier", ...
    state_text: _Line = ""
    #: Rate of the link in bits/s; 0 if unknown or without a link.
    rate_bps: _Count = 0
    #: Rate of the PCIe link in bits/s (speed x lanes after line coding), 0 if unknown.
    max_rate_bps: _Count = 0
    #: IP addresses of the network devices with prefix length: "10.0.0.1/16".
    addresses: _Addresses = ()
    #: MTU of the first network device in bytes, 0 if unknown.
    mtu: _Count = 0
    #: InfiniBand: upper 64 bits of GID 0, "fe80:0000:0000:0000".
    subnet_prefix: _SubnetPrefix = ""
    #: GID table without empty entries.
    gids: tuple[Gid, ...] = ()
    #: InfiniBand: local identifier of the port, 0 if there is none.
    lid: _LocalIdentifier = 0
    #: InfiniBand: local identifier of the subnet manager's port.
    sm_lid: _LocalIdentifier = 0
    #: NUMA node, -1 if unknown.
    numa: Annotated[int, InRange(-1, 2**31 - 1)] = -1
    pci: _PciAddress = ""
    #: Kernel driver.
    driver: _Line = ""
    #: Virtual function: the device of its physical function, or the PCI address of the physical
    #: function if this network namespace does not have the device.
    parent: _Line = ""
    #: Bond or bridge: the network devices below it.
    members: _DeviceNames = ()
    #: Ethernet: the RoCE port that has this network device ("mlx5_1:1").
    rdma: _Line = ""
    #: Reason why jobs do not use the NIC ("member of bond0", "management (USB/BMC)", ...), "" if
    #: they do.
    skipped: _Line = ""

    def __post_init__(self) -> None:
        nic = f"NIC {self.device!a:.80}"
        check_fields(self, nic)
        if (self.kind == "ethernet") != (self.port == 0):
            wanted = "must be 0 for ethernet and 1 or more for other kinds"
            raise HolmesError(f"{nic}: key 'port' {wanted}, not {self.port}")
        if self.kind == "ethernet" and self.netdevs != (self.device,):
            raise HolmesError(
                f"{nic}: key 'netdevs' of an ethernet NIC must be its own device, not {self.netdevs!a}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields whose values differ from their defaults."""
        return {key: value for key, value in asdict(self).items() if value != _DEFAULTS.get(key)}

    @property
    def name(self) -> str:
        """Name of the port for NCCL, messages and the keys include and exclude: "mlx5_0:1" or "eth0"."""
        return self.device if self.kind == "ethernet" else f"{self.device}:{self.port}"

    @property
    def ifname(self) -> str:
        """Network device for GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, "" if there is none."""
        return self.netdevs[0] if self.netdevs else ""

    @property
    def address(self) -> str:
        """First IP address without its prefix length, "" if there is none."""
        return self.addresses[0].split("/")[0] if self.addresses else ""

    @property
    def up(self) -> bool:
        """True if the port can transfer data now."""
        return self.state == "up"

    @property
    def usable(self) -> bool:
        """True if the port is up and jobs may use it. Sockets also need an address."""
        return self.up and not self.skipped

    @property
    def fast(self) -> bool:
        """True if NCCL can use the port by RDMA: with verbs, or with a network plugin."""
        return KINDS[self.kind].usable

    @property
    def plugin_kind(self) -> str:
        """Kind of NIC that this network device is for a network plugin of NCCL, such as "slingshot".

        It is "" for NICs that are not such a device. The driver shows the kind. In a container, the
        device may be a macvlan or veth in front of the NIC, whose driver is hidden. Then the name
        decides ("hsn0").
        """
        if self.kind != "ethernet":
            return ""
        has_driver = self.driver not in ("", "macvlan", "veth")
        for name, kind in KINDS.items():
            pattern = kind.netdev_driver if has_driver else kind.netdev_name
            if pattern and fnmatchcase(self.driver if has_driver else self.device, pattern):
                return name
        return ""

    @property
    def gid_index(self) -> int | None:
        """Index of the GID for NCCL_IB_GID_INDEX, None if NCCL needs none or the port has none.

        NCCL chooses a GID by its RoCE version, and the GIDs of eRDMA have none. The right GID of an eRDMA
        port is the GID that stands for the port's IPv4 address.
        """
        if self.kind == "roce":
            return self.roce_v2_index
        if self.kind == "erdma":
            are_ipv4 = {
                gid.index: isinstance(gid.address, ipaddress.IPv4Address) for gid in self.gids
            }
            indices = [index for index, is_ipv4 in are_ipv4.items() if is_ipv4]
            return indices[0] if indices else None
        return None

    @property
    def roce_v2_index(self) -> int | None:
        """Index of the best RoCE v2 GID for NCCL_IB_GID_INDEX, None if there is none.

        The order of preference: an IPv4-mapped GID on the network device `ifname`, an IPv4-mapped
        GID on another network device (a VLAN), a routable IPv6 address, and last a link-local address, which
        reaches no further than its own Ethernet segment.
        """

        def rank(gid: Gid) -> tuple[bool, int, bool, int]:
            # min() takes the GID with the smallest tuple. False is smaller than True, and IP version
            # 4 than 6.
            address = gid.address
            on_other_device = gid.netdev not in ("", self.ifname)
            return address.is_link_local, address.version, on_other_device, gid.index

        candidates = [gid for gid in self.gids if gid.type == "roce_v2"]
        if not candidates:
            return None
        return min(candidates, key=rank).index


_DEFAULTS = {item.name: item.default for item in fields(Nic)}
