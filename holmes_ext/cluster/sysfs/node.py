"""The NICs of a node, read from /sys or from a tree captured on another machine.

    class/infiniband ─> rdma.py ─┐
                                 ├─> read_nics ─> (Nic, ...) ─> select ─> the NICs a job may use
    class/net ───────> net.py ───┘        │
    addresses.py ─────────────────────────┘

Every port is listed once for each use: a RoCE port as "roce" and its net device as "ethernet" (whose `rdma`
names the port). IPoIB net devices belong to their InfiniBand port, as they reach no Ethernet. Ports that are
down, or set aside by the default rules (with the reason), are listed.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from holmes_ext.cluster.addresses import (
    Addresses,
    captured_addresses,
    interface_addresses,
    is_link_local_v6,
)
from holmes_ext.cluster.nic import KINDS, Nic
from holmes_ext.cluster.sysfs.net import (
    ETHERNET,
    NetDevice,
    physical_below,
    read_net_devices,
    reason_by_name,
    reason_to_skip,
)
from holmes_ext.cluster.sysfs.rdma import read_rdma_ports
from holmes_ext.cluster.sysfs.tree import Tree
from holmes_ext.errors import HolmesError


def read_nics(root: str | Path = "/sys", addresses: Addresses | None = None) -> tuple[Nic, ...]:
    """All NIC ports of the tree at `root`: InfiniBand, then RoCE, then Ethernet, each in natural order of
    names.

    addresses: net device -> ("10.0.0.1/16", ...). None: this node's own for /sys, else ip_addr.json of the
    captured tree. A captured tree without it has no addresses, except that GIDs of RoCE ports tell theirs,
    whose prefix length is unknown: they are given as /32 and /128, which claims the least (no other node is
    inside).

    Raises HolmesError naming the damaged file, or when /sys shows another network namespace than the
    process's.
    """
    tree = Tree(root)
    devices = read_net_devices(tree)
    if addresses is None:
        if tree.live:
            _check_namespace(tree)
        addresses = interface_addresses() if tree.live else captured_addresses(root)
    ports = [_with_addresses(p, addresses, devices) for p in read_rdma_ports(tree, devices)]
    hcas = {port.pci: port.device for port in ports if port.pci}
    ports = [replace(p, parent=hcas.get(p.parent, p.parent)) for p in ports]
    owners = {
        netdev: port for port in reversed(ports) if port.kind == "roce" for netdev in port.netdevs
    }
    ethernet = [
        _ethernet(d, devices, addresses, owners.get(d.name))
        for d in devices.values()
        if d.type == ETHERNET
    ]
    return tuple(
        sorted(
            [*ports, *ethernet], key=lambda nic: (list(KINDS).index(nic.kind), _natural(nic.name))
        )
    )


def _natural(name: str) -> list[tuple[bool, int, str]]:
    return [
        (part.isdigit(), int(part) if part.isdigit() else 0, part)
        for part in re.split("([0-9]+)", name)
    ]


def _check_namespace(tree: Tree) -> None:
    """/sys belongs to the network namespace of whoever mounted it; say so when that is not the process's."""
    here = {(name, index) for index, name in socket.if_nameindex()}
    missing = sorted(
        name
        for name, index in here
        if not tree.is_dir(f"class/net/{name}")
        or tree.number(f"class/net/{name}/ifindex") not in (index, None)
    )
    if missing:
        raise HolmesError(
            f"{tree.root}: shows the net devices of another network namespace than this "
            f"process's (not {', '.join(missing)}); mount it again inside: unshare --mount, "
            "mount -t sysfs sysfs /sys"
        )


def _with_addresses(port: Nic, addresses: Addresses | None, devices: dict[str, NetDevice]) -> Nic:
    """The port with the addresses of its net devices; those that carry some and are up come first."""
    known = addresses or {}
    netdevs = tuple(sorted(port.netdevs, key=lambda n: (not known.get(n), not devices[n].up)))
    port_addresses = tuple(a for n in netdevs for a in known.get(n, ()))
    if not port_addresses and port.kind == "roce" and (addresses is None or not netdevs):
        port_addresses = _gid_addresses(port)
    mtu = devices[netdevs[0]].mtu if netdevs else 0
    return replace(
        port,
        netdevs=netdevs,
        addresses=tuple(dict.fromkeys(port_addresses)),
        mtu=mtu,
        skipped=reason_by_name(port.device, *netdevs),
    )


def _gid_addresses(port: Nic, netdev: str = "") -> tuple[str, ...]:
    """Addresses that the GIDs (of one net device) of a RoCE port stand for, with full prefix length."""
    addresses = (gid.address for gid in port.gids if netdev in ("", gid.netdev))
    return tuple(dict.fromkeys(f"{a}/{a.max_prefixlen}" for a in addresses if not a.is_link_local))


def _ethernet(
    device: NetDevice, devices: dict[str, NetDevice], addresses: Addresses | None, owner: Nic | None
) -> Nic:
    if addresses is not None:
        device_addresses = tuple(addresses.get(device.name, ()))
    else:
        device_addresses = _gid_addresses(owner, device.name) if owner else ()
    has_address = (
        None if addresses is None else any(not is_link_local_v6(a) for a in device_addresses)
    )
    lowers = device.lowers if device.what in ("bond", "team", "bridge") else ()
    functions = {d.pci: d.name for d in devices.values() if d.pci and not d.representor}
    numas = {d.numa for d in physical_below(device, devices)}
    return Nic(
        kind="ethernet",
        device=device.name,
        netdevs=(device.name,),
        state="up" if device.up else "down",
        state_text=device.state_text,
        rate_bps=device.speed_bps,
        max_rate_bps=device.max_rate_bps,
        addresses=device_addresses,
        mtu=device.mtu,
        numa=numas.pop() if len(numas) == 1 else -1,
        pci=device.pci,
        driver=device.driver,
        parent=functions.get(device.parent, device.parent),
        members=lowers,
        rdma=owner.name if owner else "",
        skipped=reason_to_skip(device, devices, has_address),
    )


def select(
    nics: Iterable[Nic], include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> tuple[Nic, ...]:
    """The NICs that a job may use, in the order given; ports that are down stay (as down).

    Patterns (fnmatch, case matters) match the device ("mlx5_0"), the port ("mlx5_0:1") or a net device behind
    it ("ens1f0"). Without `include` all NICs are taken that the default rules left in use; with it only those
    matched. A name written out in `include` overrules the default rules; a pattern with wildcards does not
    ("en*" is not meant to bring back the members of a bond). `exclude` takes away afterwards; by the name of
    a RoCE port it takes away that port's net devices too: what is kept off a network is kept off it in both
    ways.

    Raises HolmesError naming a pattern that matches nothing, or only NICs that are set aside.
    """
    nics = tuple(nics)
    for option, patterns in (("include", include), ("exclude", exclude)):
        for pattern in patterns:
            if not any(_matches(nic, pattern, option) for nic in nics):
                listed = ", ".join(nic.name for nic in nics) or "none"
                raise HolmesError(
                    f"{option} pattern {pattern!a:.80} matches no NIC of this node; there are: {listed}"
                )
    chosen = [nic for nic in nics if not nic.skipped]
    if include:
        chosen = [nic for pattern in include for nic in _included(nics, pattern)]
        chosen = [replace(nic, skipped="") for nic in nics if nic in chosen]
    return tuple(
        nic for nic in chosen if not any(_matches(nic, pattern, "exclude") for pattern in exclude)
    )


def _matches(nic: Nic, pattern: str, option: str) -> bool:
    names = {nic.device, nic.name, *nic.netdevs}
    if option == "exclude" and nic.rdma:
        names |= {nic.rdma, nic.rdma.rpartition(":")[0]}
    return any(fnmatchcase(name, pattern) for name in names)


def _included(nics: Sequence[Nic], pattern: str) -> list[Nic]:
    matched = [nic for nic in nics if _matches(nic, pattern, "include")]
    if not any(c in pattern for c in "*?["):
        return matched
    kept = [nic for nic in matched if not nic.skipped]
    if not kept:
        why = ", ".join(f"{nic.name} ({nic.skipped})" for nic in matched)
        raise HolmesError(
            f"include pattern {pattern!a:.80} matches only NICs that are set aside: {why}; "
            "to use one, write its name without wildcards"
        )
    return kept
