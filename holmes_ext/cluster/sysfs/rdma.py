"""class/infiniband: the InfiniBand and RoCE ports of a tree.

Layout: drivers/infiniband/core/sysfs.c of Linux and Documentation/ABI/stable/sysfs-class-infiniband.

    class/infiniband/mlx5_0/node_type              "1: CA"
                           /device/                the PCI function: numa_node, physfn, net/ENS1F0
                           /ports/1/link_layer     "InfiniBand" or "Ethernet" (RoCE)
                                   /rate           "200 Gb/sec (4X HDR)"
                                   /state          "4: ACTIVE"      /phys_state  "5: LinkUp"
                                   /lid  /sm_lid   "0x1c"
                                   /gids/3         eight groups; zeros where the entry is empty
                                   /gid_attrs/types/3   "RoCE v2";  EINVAL where the entry is empty
                                   /gid_attrs/ndevs/3   "ens1f0"
"""

from __future__ import annotations

import re

from holmes_ext.cluster.nic import GID, KINDS, Gid, Nic
from holmes_ext.cluster.sysfs.net import (
    ETHERNET,
    INFINIBAND,
    Function,
    NetDevice,
    read_function,
    top_device,
)
from holmes_ext.cluster.sysfs.tree import Tree

_STATE = re.compile(r"([0-5]): (NOP|DOWN|INIT|ARMED|ACTIVE|ACTIVE_DEFER)")
_PHYS_STATE = re.compile(r"[0-9]+: ?(.{0,40})")
_RATE = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?) Gb/sec \(.{1,40}\)")
#: By what /sys calls it, and whether the port is InfiniBand's.
_GID_TYPES = {
    ("IB/RoCE v1", True): "ib",
    ("IB/RoCE v1", False): "roce_v1",
    ("RoCE v2", False): "roce_v2",
}
#: By what /sys calls their link layer.
_KINDS = {kind.layer: name for name, kind in KINDS.items() if kind.layer and not kind.driver}
#: Kinds that only the driver tells from another one.
_KINDS_BY_DRIVER = {kind.driver: name for name, kind in KINDS.items() if kind.driver}
_EMPTY_GID = "0000:0000:0000:0000:0000:0000:0000:0000"


def read_rdma_ports(tree: Tree, devices: dict[str, NetDevice]) -> tuple[Nic, ...]:
    """The InfiniBand and RoCE ports of a tree, without addresses, `parent` still a PCI address.

    Raises HolmesError naming the damaged file.

    iWARP ("4: RNIC") and vendor fabrics (link layer "Unspecified", "Unknown") are left out: the IB transport
    of the collective libraries does not run on them; their net devices count as Ethernet.
    """
    nics = []
    for hca in tree.names("class/infiniband"):
        path = f"class/infiniband/{hca}"
        tree.resolve(path)
        node_type = tree.text(f"{path}/node_type") or "1: CA"
        ports = tree.names(f"{path}/ports")
        for port in sorted(ports, key=lambda p: (len(p), p)):
            if not re.fullmatch("[0-9]{1,3}", port, re.ASCII) or int(port) > 255:
                raise tree.error(f"{path}/ports", f"{port!a:.80} is no port number")
            layer = tree.needed_text(f"{path}/ports/{port}/link_layer")
            if layer not in (*_KINDS, "Unspecified", "Unknown"):
                raise tree.error(
                    f"{path}/ports/{port}/link_layer", f"{layer!a:.80} is not {' or '.join(_KINDS)}"
                )
            if layer in _KINDS and node_type.startswith("1:") and int(port) > 0:
                nics.append(_read_port(tree, hca, int(port), len(ports), _KINDS[layer], devices))
    return tuple(nics)


def _read_port(
    tree: Tree, hca: str, port: int, n_ports: int, kind: str, devices: dict[str, NetDevice]
) -> Nic:
    top = f"class/infiniband/{hca}"
    path, physical = f"{top}/ports/{port}", "device" in tree.names(top)  # soft-RoCE has none
    function = read_function(tree, top) if physical else Function()
    kind = _KINDS_BY_DRIVER.get(function.driver, kind)
    state, phys_state = _states(tree, path)
    gids = _gids(tree, path, kind)
    netdevs, members = _netdevs(
        tree, f"{top}/device" if physical else "", port, n_ports, kind, gids, devices
    )
    return Nic(
        **vars(function),
        kind=kind,
        device=hca,
        port=port,
        netdevs=netdevs,
        state="up" if state == "ACTIVE" else "down",
        state_text=state if phys_state in ("", "LinkUp") else f"{state}/{phys_state}",
        # A port without link still shows a number (its slowest lane); it is no rate of anything.
        rate_bps=_rate(tree, f"{path}/rate") if phys_state == "LinkUp" or state == "ACTIVE" else 0,
        mtu=devices[netdevs[0]].mtu if netdevs else 0,
        subnet_prefix=next(
            (gid.value[:19] for gid in gids if gid.index == 0 and KINDS[kind].infiniband), ""
        ),
        gids=gids,
        lid=_lid(tree, f"{path}/lid", kind),
        sm_lid=_lid(tree, f"{path}/sm_lid", kind),
        members=members,
    )


def _states(tree: Tree, path: str) -> tuple[str, str]:
    text = tree.needed_text(f"{path}/state")
    match = _STATE.fullmatch(text)
    if not match:
        raise tree.error(f"{path}/state", f"{text!a:.80} is no port state such as '4: ACTIVE'")
    phys = tree.text(f"{path}/phys_state") or "0:"
    phys_match = _PHYS_STATE.fullmatch(phys)
    if not phys_match:
        raise tree.error(f"{path}/phys_state", f"{phys!a:.80} is no state such as '5: LinkUp'")
    return match[2], phys_match[1]


def _rate(tree: Tree, path: str) -> int:
    text = tree.needed_text(path)
    match = _RATE.fullmatch(text)
    if not match:
        raise tree.error(path, f"{text!a:.80} is no rate such as '200 Gb/sec (4X HDR)'")
    return round(float(match[1]) * 1e9)


def _lid(tree: Tree, path: str, kind: str) -> int:
    return tree.number(path, "0x[0-9a-f]{1,8}") or 0 if KINDS[kind].infiniband else 0


def _gids(tree: Tree, path: str, kind: str) -> tuple[Gid, ...]:
    gids, infiniband = [], KINDS[kind].infiniband
    for index in sorted(tree.names(f"{path}/gids"), key=lambda i: (len(i), i)):
        if not re.fullmatch("[0-9]{1,6}", index, re.ASCII):
            raise tree.error(f"{path}/gids", f"{index!a:.80} is no GID index")
        value = tree.text(f"{path}/gids/{index}")
        if value is None or value == _EMPTY_GID:
            continue
        if not GID.fullmatch(value):
            raise tree.error(f"{path}/gids/{index}", f"{value!a:.80} is no GID")
        # Kernels before 4.5 have no gid_attrs: all their GIDs are of the one type there was.
        text = tree.text(f"{path}/gid_attrs/types/{index}") or "IB/RoCE v1"
        if (text, infiniband) not in _GID_TYPES:
            raise tree.error(
                f"{path}/gid_attrs/types/{index}",
                f"{text!a:.80} is no GID type of a port of kind {kind}",
            )
        netdev = tree.device_name(f"{path}/gid_attrs/ndevs/{index}") if not infiniband else ""
        gids.append(Gid(int(index), value, _GID_TYPES[text, infiniband], netdev))
    return tuple(gids)


def _netdevs(
    tree: Tree,
    device: str,
    port: int,
    n_ports: int,
    kind: str,
    gids: tuple[Gid, ...],
    devices: dict[str, NetDevice],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Net devices behind a port (those of its PCI function, then those its GIDs belong to), and bond members.

    A device that a bond has taken in gives way to the bond: sockets bind to that one. Only devices of the
    tree's own network namespace count.
    """
    wanted = INFINIBAND if KINDS[kind].infiniband else ETHERNET
    of_function = [
        n
        for n in (tree.names(f"{device}/net") if device else ())
        if n in devices
        and not devices[n].representor
        and (n_ports == 1 or devices[n].port_index == port - 1)
    ]
    behind = [*of_function, *(gid.netdev for gid in gids)]
    names = dict.fromkeys(top_device(n, devices) for n in behind if n in devices)
    netdevs = tuple(n for n in names if devices[n].type == wanted)
    members = tuple(
        m for n in netdevs if devices[n].what in ("bond", "team") for m in devices[n].lowers
    )
    return netdevs, members
