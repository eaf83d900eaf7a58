"""Finds the nodes whose fast NICs are on the same fabric by their subnets, without a cluster.toml."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import NamedTuple

from holmes_ext.cluster.nic import DEFAULT_SUBNET_PREFIX, KINDS, Nic
from holmes_ext.cluster.node_report import NodeReport
from holmes_ext.errors import HolmesError
from holmes_ext.words import some_of

#: Items that an error message lists.
_MOST_NAMED = 4
#: Prefix length of an IPv4 address without a subnet.
_HOST_PREFIX_LENGTH = 32


class Subnet(NamedTuple):
    """InfiniBand or IP subnet of fast NICs: all ports in the same subnet can reach each other."""

    kind: str  # of the NICs
    #: InfiniBand: subnet prefix. RoCE: IP subnet. NICs that only a network plugin of NCCL can use: IP
    #: subnet of the node's Ethernet interface, "" if it is unknown.
    prefix: str


#: Node name -> its NICs on one subnet or fabric.
NicsOfNodes = dict[str, list[Nic]]


def subnet_of(report: NodeReport, nic: Nic, kind: str) -> Subnet:
    """Return the subnet of a fast NIC.

    NICs without verbs, such as EFA, have no address that shows their network. For these, it is the
    subnet of the node's Ethernet interface: nodes in the same subnet are in the same data center.

    Args:
        report: Report of the node.
        nic: A NIC of the node.
        kind: Kind of the fast NIC. It differs from nic.kind for a network device that a network plugin
            uses: nic.kind is "ethernet", and `kind` is "gvnic", for example.

    Raises:
        HolmesError: a RoCE NIC has no IPv4 address with a subnet.
    """
    if KINDS[kind].infiniband:
        return Subnet(kind, nic.subnet_prefix)
    if not KINDS[kind].verbs:
        ethernet = [nic for nic in report.nics if nic.ifname and nic.ifname == report.ethernet]
        prefixes = [_ipv4_subnet(nic) for nic in ethernet]
        return Subnet(kind, next(filter(None, prefixes), ""))
    prefix = _ipv4_subnet(nic)
    if prefix:
        return Subnet(kind, prefix)
    name = "RoCE" if kind == "roce" else kind
    raise HolmesError(
        f"node {report.name!r}: {name} NIC {nic.name} has no IPv4 address with a subnet, so its fabric is "
        f"unknown; give it one, or name the clusters with --holmes-cluster FILE"
    )


def _ipv4_subnet(nic: Nic) -> str:
    """Return the first IPv4 subnet of a NIC, "10.0.0.0/16"; "" if it has none."""
    for address in nic.addresses:
        network = ipaddress.ip_interface(address).network
        is_ipv4 = isinstance(network, ipaddress.IPv4Network)
        if is_ipv4 and network.prefixlen < _HOST_PREFIX_LENGTH:
            return str(network)
    return ""


def check_subnets(by_subnet: Mapping[Subnet, NicsOfNodes]) -> None:
    """Check that the subnets of NICs show which nodes are on the same fabric (network).

    Args:
        by_subnet: Subnet -> node -> NICs of the node on the subnet.

    Raises:
        HolmesError: They do not show this, in one of these cases:
            - Several nodes have InfiniBand ports with the default subnet prefix, which separate fabrics
              have in common.
            - Several nodes share no RoCE subnet with any other node: RoCE may be routed between them.
            - NICs that only a network plugin can use, such as EFA, are in nodes whose Ethernet is in
              several IP subnets.
    """
    # Omni-Path has the same default prefix as InfiniBand.
    for kind, nic_kind in KINDS.items():
        if nic_kind.infiniband:
            subnet = Subnet(kind, DEFAULT_SUBNET_PREFIX)
            _check_default_prefix(by_subnet.get(subnet, {}), nic_kind.title or "InfiniBand")
    for kind, nic_kind in KINDS.items():
        nodes_in = {
            subnet.prefix: set(nodes) for subnet, nodes in by_subnet.items() if subnet.kind == kind
        }
        if nic_kind.plugin and not nic_kind.verbs:
            _check_plugin_kind(kind, nodes_in)
        elif not nic_kind.infiniband:
            # With routed RoCE, each port of one fabric has a subnet of its own.
            _check_routed_roce(nodes_in, title="RoCE" if kind == "roce" else kind)


def _check_plugin_kind(kind: str, nodes_in: Mapping[str, set[str]]) -> None:
    """Raise HolmesError unless all nodes with a kind of NIC have their Ethernet in one IP subnet.

    NICs such as EFA have no address that shows their network. Nodes whose Ethernet is in the same subnet are
    in the same data center, and on the same fabric. Nodes in several subnets may be on the same fabric or
    not.

    Args:
        kind: Kind of the NICs, such as "efa".
        nodes_in: IP subnet of the Ethernet interface, "" if unknown -> nodes with such NICs.
    """
    nodes = sorted(set().union(*nodes_in.values()))
    if len(nodes) <= 1 or (len(nodes_in) == 1 and "" not in nodes_in):
        return
    subnets = some_of([prefix or "unknown" for prefix in nodes_in], _MOST_NAMED)
    raise HolmesError(
        f"the {kind} NICs of nodes {some_of(nodes, _MOST_NAMED)} do not show which of the nodes are on one "
        f"network (IP subnets of their Ethernet: {subnets}); say which nodes belong together with "
        "--holmes-cluster FILE"
    )


def _check_default_prefix(nics_of_nodes: NicsOfNodes, title: str) -> None:
    """Raise HolmesError if several nodes have ports of one kind with the default subnet prefix.

    The prefix then does not show whether the nodes are on one fabric or on several. Two nodes with
    the same LID are on two fabrics, and the message says so: a fabric has each LID only once.

    Args:
        nics_of_nodes: Node -> its ports with the default prefix.
        title: Name of the kind, such as "InfiniBand".
    """
    if len(nics_of_nodes) <= 1:
        return
    node_of_lid: dict[int, str] = {}
    evidence = ""
    for name, nics in nics_of_nodes.items():
        for nic in nics:
            if not nic.lid:
                continue
            first = node_of_lid.setdefault(nic.lid, name)
            if first != name:
                evidence = (
                    f"; nodes {first!r} and {name!r} both have LID {nic.lid}, "
                    "so there are at least two"
                )
    raise HolmesError(
        f"the {title} ports of {len(nics_of_nodes)} nodes ({some_of(nics_of_nodes, _MOST_NAMED)}) all "
        f"have the default subnet prefix {DEFAULT_SUBNET_PREFIX}, which does not tell one fabric from "
        f"two{evidence}; say which nodes belong together with --holmes-cluster FILE"
    )


def _check_routed_roce(nodes_in: Mapping[str, set[str]], title: str) -> None:
    """Raise HolmesError if several nodes share no RoCE subnet with any other node.

    They may be on a fabric that routes RoCE from subnet to subnet, or on several fabrics.

    Args:
        nodes_in: IP subnet -> names of the nodes that have RoCE ports in it.
        title: Name of the kind: "RoCE", or another kind with IP addresses, such as "erdma".
    """
    nodes_with_neighbours: set[str] = set()
    for names in nodes_in.values():
        if len(names) > 1:
            nodes_with_neighbours |= names
    subnet_of_lone_node = {
        name: subnet for subnet, names in nodes_in.items() for name in names - nodes_with_neighbours
    }
    if len(subnet_of_lone_node) > 1:
        nodes = some_of(subnet_of_lone_node, _MOST_NAMED)
        subnets = some_of(subnet_of_lone_node.values(), _MOST_NAMED)
        raise HolmesError(
            f"the {title} ports of nodes {nodes} are each in an IP subnet of their "
            f"own ({subnets}), which does not tell routed {title}, one fabric, "
            "from several; say which nodes belong together with --holmes-cluster FILE"
        )
