"""What one NIC port is: plain, self-validating values that travel as JSON.

A node's NICs are a tuple of `Nic`. Three kinds exist, after what a collective library can do with them:

    ib        an InfiniBand port (verbs; sockets through its IPoIB net device, when it has one)
    roce      an RDMA port on Ethernet (verbs with a RoCE v2 GID; sockets through its net device)
    ethernet  a net device for sockets. The net device of a RoCE port appears a second time with this kind,
              and its `rdma` names the port ("mlx5_1:1"), so that later code may choose either use.
"""

import ipaddress
import re
from dataclasses import dataclass, fields, replace

from holmes_ext.errors import HolmesError

KINDS = ("ib", "roce", "ethernet")
GID_TYPES = ("ib", "roce_v1", "roce_v2")
DEFAULT_SUBNET_PREFIX = "fe80:0000:0000:0000"  # what a subnet manager uses unless it is configured

_GROUP = "[0-9a-f]{4}"
_GID = re.compile(rf"{_GROUP}(:{_GROUP}){{7}}")
_PREFIX = re.compile(rf"({_GROUP}(:{_GROUP}){{3}})?")
_PCI = re.compile(r"([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])?")
_NAME = re.compile(r"[!-.0-~]{1,64}")  # printable ASCII without space and slash, as the kernel's names are


def _is_int(low: int, high: int):
    return lambda v: type(v) is int and low <= v <= high


def _is_text(pattern: re.Pattern):
    return lambda v: isinstance(v, str) and pattern.fullmatch(v) is not None


def _is_name(v) -> bool:
    return isinstance(v, str) and _NAME.fullmatch(v) is not None


def _is_line(v) -> bool:
    return isinstance(v, str) and len(v) <= 200 and (v == "" or v.isprintable())


def _is_address(v) -> bool:
    if not isinstance(v, str) or "/" not in v:
        return False
    try:
        ipaddress.ip_interface(v)
    except ValueError:
        return False
    return True


def _all(check):
    return lambda v: isinstance(v, tuple) and all(check(item) for item in v)


def _check(value, rules: dict, what: str) -> None:
    for key, (good, meaning) in rules.items():
        if not good(getattr(value, key)):
            raise HolmesError(f"{what}: key '{key}' must be {meaning}, not {getattr(value, key)!a:.80}")


def _from_dict(cls, d, where: str, convert: dict):
    """`cls` from a plain dict; keys that have defaults may be left out, no others may be added."""
    if not isinstance(d, dict):
        raise HolmesError(f"{where}: a {cls.__name__} must be a table of keys, not {d!a:.80}")
    known = {f.name: f for f in fields(cls)}
    for key in d:
        if key not in known:
            raise HolmesError(f"{where}: unknown key {key!a:.80} in a {cls.__name__}")
    for key in cls.REQUIRED:
        if key not in d:
            raise HolmesError(f"{where}: key '{key}' is missing in a {cls.__name__}")
    values = {key: convert[key](value, f"{where}: key '{key}'") if key in convert else value
              for key, value in d.items()}
    try:
        return cls(**values)
    except HolmesError as error:
        raise HolmesError(f"{where}: {error}") from None


def _to_tuple(value, where: str) -> tuple:
    if not isinstance(value, (list, tuple)):
        raise HolmesError(f"{where} must be a list, not {value!a:.80}")
    return tuple(value)


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

    REQUIRED = ("index", "value", "type")

    def __post_init__(self):
        _check(self, _GID_RULES, "GID")

    @property
    def address(self) -> "ipaddress.IPv4Address | ipaddress.IPv6Address":
        """The IP address that the GID stands for; IPv4 when it is IPv4-mapped (::ffff:a.b.c.d)."""
        v6 = ipaddress.IPv6Address(self.value)
        return v6.ipv4_mapped or v6

    def to_dict(self) -> dict:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_dict(cls, d, where: str = "GID") -> "Gid":
        """Raises HolmesError that begins with `where` and names the key."""
        return _from_dict(cls, d, where, {})


@dataclass(frozen=True)
class Nic:
    """One port of a NIC.

    kind           "ib", "roce" or "ethernet" (see the module)
    device         HCA name ("mlx5_0") for ib and roce, net device name ("eth0") for ethernet
    port           port number of the HCA, from 1; 0 for ethernet
    netdevs        net devices behind the port, the one to bind sockets on first
    state          "up" (carries data now) or "down"
    state_text     what the kernel says: "ACTIVE", "INIT", "DOWN/Polling"; "up", "no carrier", ...
    rate_bps       rate of the link in bits/s, 0 when unknown (always 0 where there is no link)
    max_rate_bps   what the PCIe link under it can carry, bits/s (speed x lanes after line coding), 0 when unknown
    addresses      of its net devices, with prefix length: "10.0.0.1/16"
    mtu            of the first net device in bytes, 0 when unknown
    subnet_prefix  ib: upper 64 bits of GID 0, "fe80:0000:0000:0000"; "" otherwise
    gids           GID table without its empty entries
    lid, sm_lid    ib: local identifier of the port and of its subnet manager, 0 when there is none
    numa           NUMA node, -1 when unknown
    pci            PCI address "0000:41:00.0", "" when it has none
    driver         kernel driver, "" when unknown
    parent         of a virtual function: the device of its physical function (its PCI address where this
                   network namespace does not show the device); "" otherwise
    members        of a bond (or a bridge): the net devices under it
    rdma           ethernet: the RoCE port that owns this net device ("mlx5_1:1"), "" otherwise
    skipped        "" or the reason why it is set aside ("member of bond0", "management (USB/BMC)", ...)
    """

    kind: str
    device: str
    port: int = 0
    netdevs: "tuple[str, ...]" = ()
    state: str = "down"
    state_text: str = ""
    rate_bps: int = 0
    max_rate_bps: int = 0
    addresses: "tuple[str, ...]" = ()
    mtu: int = 0
    subnet_prefix: str = ""
    gids: "tuple[Gid, ...]" = ()
    lid: int = 0
    sm_lid: int = 0
    numa: int = -1
    pci: str = ""
    driver: str = ""
    parent: str = ""
    members: "tuple[str, ...]" = ()
    rdma: str = ""
    skipped: str = ""

    REQUIRED = ("kind", "device")

    def __post_init__(self):
        what = f"NIC {self.device!a:.80}"
        _check(self, _NIC_RULES, what)
        if (self.kind == "ethernet") != (self.port == 0):
            raise HolmesError(f"{what}: key 'port' must be 0 for ethernet and 1 or more for ib and roce, "
                              f"not {self.port}")
        if self.kind == "ethernet" and self.netdevs != (self.device,):
            raise HolmesError(f"{what}: key 'netdevs' of an ethernet NIC must be its own device, not {self.netdevs!a}")

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
    def roce_v2_index(self) -> "int | None":
        """Index of the RoCE v2 GID for NCCL_IB_GID_INDEX, None when there is none.

        Best first: IPv4-mapped on `ifname`, IPv4-mapped on another net device (a VLAN), a routable IPv6
        address, and a link-local one last, since it reaches no further than its own Ethernet segment.
        """
        def order(gid: Gid):
            address = gid.address
            return (address.is_link_local, address.version, gid.netdev not in ("", self.ifname), gid.index)

        best = min((g for g in self.gids if g.type == "roce_v2"), key=order, default=None)
        return None if best is None else best.index

    def set_aside(self, reason: str) -> "Nic":
        """The same NIC with `skipped` = reason ("" takes it back into use)."""
        return replace(self, skipped=reason)

    def to_dict(self) -> dict:
        """Plain JSON values; `from_dict` gives an equal Nic back."""
        d = {f.name: getattr(self, f.name) for f in fields(self)}
        d = {key: list(value) if isinstance(value, tuple) else value for key, value in d.items()}
        d["gids"] = [gid.to_dict() for gid in self.gids]
        return d

    @classmethod
    def from_dict(cls, d, where: str = "NIC") -> "Nic":
        """Raises HolmesError that begins with `where` and names the key."""
        def to_gids(value, at):
            return tuple(Gid.from_dict(g, f"{at}[{i}]") for i, g in enumerate(_to_tuple(value, at)))

        return _from_dict(cls, d, where, {"netdevs": _to_tuple, "addresses": _to_tuple,
                                          "members": _to_tuple, "gids": to_gids})


_COUNT = (_is_int(0, 2**63 - 1), "a whole number from 0")
_LINE = (_is_line, "one short line of text")
_NAMES = (_all(_is_name), "a list of device names")
_LID = (_is_int(0, 2**32 - 1), "a LID (0 to 2**32 - 1)")

_GID_RULES = {
    "index": (_is_int(0, 2**31 - 1), "a whole number from 0"),
    "value": (_is_text(_GID), "eight groups of four lower-case hex digits"),
    "type": (lambda v: v in GID_TYPES, " or ".join(map(repr, GID_TYPES))),
    "netdev": (lambda v: v == "" or _is_name(v), "a device name or ''"),
}

_NIC_RULES = {
    "kind": (lambda v: v in KINDS, " or ".join(map(repr, KINDS))),
    "device": (_is_name, "a device name"),
    "port": (_is_int(0, 255), "a port number (0 to 255)"),
    "netdevs": _NAMES,
    "state": (lambda v: v in ("up", "down"), "'up' or 'down'"),
    "state_text": _LINE,
    "rate_bps": _COUNT,
    "max_rate_bps": _COUNT,
    "addresses": (_all(_is_address), "a list of IP addresses with prefix length ('10.0.0.1/16')"),
    "mtu": _COUNT,
    "subnet_prefix": (_is_text(_PREFIX), "four groups of four lower-case hex digits or ''"),
    "gids": (_all(lambda g: isinstance(g, Gid)), "a list of GIDs"),
    "lid": _LID,
    "sm_lid": _LID,
    "numa": (_is_int(-1, 2**31 - 1), "a NUMA node or -1"),
    "pci": (_is_text(_PCI), "a PCI address ('0000:41:00.0') or ''"),
    "driver": _LINE,
    "parent": _LINE,
    "members": _NAMES,
    "rdma": _LINE,
    "skipped": _LINE,
}
