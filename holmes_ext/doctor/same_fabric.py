"""Compares the NICs of nodes that are to be on one fabric: their subnets, LIDs and vendors.

A cluster.toml may put nodes on one fabric whose NICs cannot reach each other. NCCL's network "IB"
addresses an InfiniBand port in its own subnet by the LID. A port in another subnet needs an InfiniBand
router (src/transport/net_ib/connect.cc: ncclIbRtrQp); without one, the connection fails with error 12.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations

from holmes_ext.cluster.nic import KINDS, Nic
from holmes_ext.doctor.finding import Finding, note, problem
from holmes_ext.doctor.nics import ip_subnets, vendor_of
from holmes_ext.words import grouped, some_of

#: Node -> its NICs of the fabric that are up.
NicsOfNodes = Mapping[str, Sequence[Nic]]
_MOST_NAMED = 4  # nodes that a finding lists
#: NCCL's default for NCCL_IB_ROUTABLE_FLID_GID_INDEX, the GID of a routed port.
_ROUTED_GID_INDEX = 1
_FLID_GROUP = 2  # group of four digits of a GID that holds the FLID (address behind a router)


def check_fabric(title: str, nics_of: NicsOfNodes) -> Iterator[Finding]:
    """Yield findings about nodes whose NICs are to be on one fabric.

    Args:
        title: The fabric, in words.
        nics_of: NICs of each node on the fabric.
    """
    infiniband = {
        node: [nic for nic in nics if KINDS[nic.kind].infiniband] for node, nics in nics_of.items()
    }
    yield from _check_infiniband_subnets(title, infiniband)
    yield from _check_subnet_managers(title, infiniband)
    yield from _check_lids(title, infiniband)
    yield from _check_roce_subnets(title, nics_of)
    yield from _check_vendors(title, nics_of)


def _describe_if_apart(subnets_of: Mapping[str, Collection[str]]) -> str:
    """Return the subnets of all nodes in words if two nodes are apart, else "".

    Two nodes are apart if each of them has a subnet that the other lacks. {1, 2} and {1} are not apart:
    with rails, NIC i of every node is in subnet i, and a node lacks a subnet if a NIC is down.

    Args:
        subnets_of: Node -> subnets of its NICs, or other names that nodes of one fabric share. Nodes
            without any are ignored.
    """
    nodes_of = grouped(
        (tuple(sorted(subnets)), node) for node, subnets in subnets_of.items() if subnets
    )
    pairs = combinations(map(set, nodes_of), 2)
    if all(first <= second or second <= first for first, second in pairs):
        return ""
    listed = [
        f"{some_of(subnets, _MOST_NAMED)}: {some_of(nodes, _MOST_NAMED)}"
        for subnets, nodes in nodes_of.items()
    ]
    return some_of(listed, _MOST_NAMED, "; ")


def _check_infiniband_subnets(title: str, nics_of: NicsOfNodes) -> Iterator[Finding]:
    """Yield a finding if the InfiniBand ports of the nodes are not in the same subnets."""
    listed = _describe_if_apart(
        {
            node: {nic.subnet_prefix for nic in nics if nic.subnet_prefix}
            for node, nics in nics_of.items()
        }
    )
    if not listed:
        return
    is_routed = all(_has_flid(nic) for nics in nics_of.values() for nic in nics)
    if is_routed:
        yield note(
            title,
            what=f"its InfiniBand ports are in several subnets: {listed}",
            why="the ports have addresses for an InfiniBand router (FLID); versions of NCCL without "
            "NCCL_IB_ROUTABLE_FLID_GID_INDEX do not use them, and fail with error 12",
            mend="nothing, if the router connects all of them and NCCL is recent",
        )
    else:
        yield problem(
            title,
            what=f"its InfiniBand ports are in several subnets: {listed}",
            why="a port reaches only those of its own subnet, unless there is an InfiniBand router: NCCL's "
            "connections fail with error 12 (NVIDIA/nccl#733)",
            mend="make each subnet a cluster of its own in cluster.toml, or `exclude` the ports of the other "
            "subnet",
        )


def _has_flid(nic: Nic) -> bool:
    """Return whether an InfiniBand port has an address for routers (FLID)."""
    groups = [gid.value.split(":") for gid in nic.gids if gid.index == _ROUTED_GID_INDEX]
    return bool(groups) and groups[0][_FLID_GROUP] != "0000"


def _check_subnet_managers(title: str, nics_of: NicsOfNodes) -> Iterator[Finding]:
    """Yield a finding if nodes have different subnet managers in one InfiniBand subnet.

    Each of two nodes must have a manager that the other lacks.
    """
    ports_in = grouped(
        (nic.subnet_prefix, (node, nic.sm_lid))
        for node, nics in nics_of.items()
        for nic in nics
        if nic.sm_lid
    )
    for prefix, ports in ports_in.items():
        managers_of = grouped(ports)
        # A subnet manager is named by the LID of its port.
        listed = _describe_if_apart(
            {node: {f"LID {lid}" for lid in lids} for node, lids in managers_of.items()}
        )
        if listed:
            yield note(
                title,
                what=f"its ports in subnet {prefix} have different subnet managers: {listed}",
                why="a subnet has one at a time: unless it has just changed, these are several fabrics with "
                "the same prefix",
                mend="look at `sminfo` on the nodes; make each fabric a cluster of its own in cluster.toml",
            )


def _check_lids(title: str, nics_of: NicsOfNodes) -> Iterator[Finding]:
    """Yield a finding if two nodes have the same LID on the same NIC in the same subnet."""
    nodes_of = grouped(
        ((nic.name, nic.subnet_prefix, nic.lid), node)
        for node, nics in nics_of.items()
        for nic in nics
        if nic.lid
    )
    for (name, prefix, lid), nodes in nodes_of.items():
        if len(nodes) > 1:
            yield problem(
                title,
                what=f"{name} has LID {lid} in subnet {prefix} on {some_of(nodes, _MOST_NAMED)}",
                why="a fabric has each LID once, so these ports are on several fabrics, or share one card as "
                "virtual functions, which NCCL cannot connect by their LIDs",
                mend="make each fabric a cluster of its own in cluster.toml",
            )
            return  # one example is enough


def _check_roce_subnets(title: str, nics_of: NicsOfNodes) -> Iterator[Finding]:
    """Yield a finding if the RoCE ports of the nodes are not in the same IP subnets."""
    listed = _describe_if_apart(
        {
            node: {subnet for nic in nics if nic.kind == "roce" for subnet in ip_subnets(nic)}
            for node, nics in nics_of.items()
        }
    )
    if not listed:
        return
    yield note(
        title,
        what=f"the RoCE ports of its nodes are in different IP subnets: {listed}",
        why="they reach each other only where the network routes RoCE between these subnets",
        mend="nothing, if it does (`ping -I ADDRESS` between the ports works); else make each subnet a "
        "cluster of its own in cluster.toml",
    )


def _check_vendors(title: str, nics_of: NicsOfNodes) -> Iterator[Finding]:
    """Yield a finding if the nodes have NICs of different vendors."""
    vendors_of = {
        node: " and ".join(sorted({vendor_of(nic) for nic in nics}))
        for node, nics in nics_of.items()
        if nics
    }
    nodes_of = grouped((vendors, node) for node, vendors in vendors_of.items())
    if len(nodes_of) <= 1:
        return
    listed = "; ".join(
        f"{vendors}: {some_of(nodes, _MOST_NAMED)}" for vendors, nodes in nodes_of.items()
    )
    yield note(
        title,
        what=f"the fast NICs of its nodes are of different vendors: {listed}",
        why="NCCL connects them as verbs devices, but rates, congestion control and GID tables differ",
        mend="measure with `holmes probe`; if they do not work together, make each vendor's nodes a "
        "cluster of its own in cluster.toml",
    )
