"""Combines cluster.toml and the reports of the nodes into one `Site`.

With cluster.toml, a node's cluster names the fabric and the kind of NIC, and the report must agree.
Without cluster.toml, the fabrics follow from the NICs:

    InfiniBand   ports with the same subnet prefix are on one fabric. The default prefix says
                 nothing: if several nodes have it, HolmesError requests a cluster.toml
    RoCE         ports in the same IP subnet are on one fabric. If several nodes have a subnet of
                 their own, as with routed RoCE, HolmesError requests a cluster.toml
    plugins      NICs that only a network plugin of NCCL can use (EFA, Slingshot, ...) are on one
                 fabric if the nodes' Ethernet addresses are in one IP subnet. If they are not,
                 HolmesError requests a cluster.toml. Without a plugin, the NICs are left out
    Ethernet     one network reaches all nodes, over each node's interface towards the master

A fabric is named after its kind, and after its first node too if there are several of the kind.
With rail-optimized networks, NIC i of every node is in subnet i: such subnets have the same nodes
and count as one fabric.

NCCL reads once per process which HCAs it may use, and then uses any of them for any group. So the
RDMA groups of a node use one fabric; on its other fabrics the node has a reason in Port.no_verbs
and uses sockets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from holmes_ext.cluster.fabric import ETHERNET, Fabric
from holmes_ext.cluster.nic import KINDS, Nic
from holmes_ext.cluster.node_report import NodeReport
from holmes_ext.cluster.plugin_fabrics import (
    declared_nics,
    kinds_to_write,
    nics_of_kind,
    plugin_kinds,
    with_plugins,
)
from holmes_ext.cluster.site import REPORTS, Node, Port, Site, fabrics_of_spec
from holmes_ext.cluster.spec import ClusterSpec, NodeOverride, SiteSpec
from holmes_ext.cluster.subnets import NicsOfNodes, Subnet, check_subnets, subnet_of
from holmes_ext.cluster.sysfs.node import select
from holmes_ext.errors import HolmesError
from holmes_ext.units import format_rate
from holmes_ext.words import some_of

#: Ethernet rate in bits/s, for predictions, of a node whose NICs state no speed (virtual machines).
UNKNOWN_ETHERNET_BPS = 10 * 10**9
#: A rate counts as equal to a rate that is 5 % larger: nominal rates are rounded (56 for 54.5 Gb/s).
EQUAL_RATE_SHARE = 0.95


class SlowNode(NamedTuple):
    """Node whose NICs are slower than cluster.toml declares."""

    node: str
    text: str  # the rates, for the user


def part_of(spec: SiteSpec, reports: Iterable[NodeReport]) -> SiteSpec:
    """Return the part of a cluster.toml that describes the nodes that reported.

    Args:
        spec: Content of the cluster.toml.
        reports: Reports of the nodes.

    Raises:
        HolmesError: a node is in no cluster.
    """
    renamed = _match_names(tuple(reports), spec)
    return spec.only({report.name for report in renamed})


def resolve_site(
    reports: Iterable[NodeReport],
    spec: SiteSpec | None,
    fallback: bool = False,
    counted: bool = True,
) -> Site:
    """Return the site (nodes and fabrics of a job) of the nodes that reported, in the reports' order.

    `fallback` and `counted` matter only with a cluster.toml, which a report may contradict.

    Args:
        reports: Reports of all nodes.
        spec: Content of cluster.toml, which may describe more nodes; None without a file.
        fallback: Accept a node whose fast NICs are down. The reason is then in `fault` of the node's
            port on the fast fabric, and the node uses Ethernet.
        counted: Require that each node has started as many processes as cluster.toml says.

    Raises:
        HolmesError: two nodes have the same name, or a report contradicts cluster.toml.
    """
    reports = tuple(reports)
    names: set[str] = set()
    for report in reports:
        if report.name in names:
            raise HolmesError(
                f"two nodes call themselves {report.name!r}; give each its own HOLMES_NODE or host name"
            )
        names.add(report.name)
    if spec is None:
        return _site_from_reports(reports)
    nodes = tuple(
        _node_by_spec(report, spec, fallback, counted) for report in _match_names(reports, spec)
    )
    spec = spec.only({node.name for node in nodes})
    site = Site(nodes, fabrics_of_spec(spec), source=spec.source, wan=spec.wan)
    return with_plugins(site, reports)


def slower_than_declared(site: Site, reports: Iterable[NodeReport]) -> list[SlowNode]:
    """Return the nodes whose NICs state a lower rate than the site declares.

    Args:
        site: Site that was resolved from the reports.
        reports: Reports in the order of the site's nodes.
    """
    slow_nodes = []
    for node, report in zip(site.nodes, reports):
        for port in node.ports:
            names = port.hcas or (port.interface,)
            nics = [nic for nic in report.nics if nic.up and nic.name in names]
            # The rate of a NIC may be unknown. EFA states 100 Gb/s on Linux before 6.10.
            if not nics or not port.verbs or not all(nic.rate_bps for nic in nics):
                continue
            stated_bps = sum(nic.rate_bps for nic in nics)
            if stated_bps >= EQUAL_RATE_SHARE * port.rate_bps:
                continue
            verb = "runs" if len(nics) == 1 else "run"
            text = (
                f"{some_of(nic.name for nic in nics)} {verb} at {format_rate(stated_bps)}, but the rate "
                f"of fabric {port.fabric!r} is {format_rate(port.rate_bps)} in {site.source}"
            )
            slow_nodes.append(SlowNode(node.name, text))
    return slow_nodes


def rate_of_one_nic(site: Site, report: NodeReport) -> list[str]:
    """Return warnings about fabrics whose rate in cluster.toml is that of a single NIC of a node.

    It must be the rate of all fast NICs of a node together. The result has a sentence for each such
    fabric. `report` describes the NICs of the node.
    """
    sentences = []
    for port in site.node_by_name[report.name].ports:
        rates = [nic.rate_bps for nic in report.nics if nic.up and nic.name in port.hcas]
        if len(rates) <= 1:
            continue
        # Is the given rate that of a single NIC (slowest to fastest, 5 % for rounding)?
        highest_bps = port.rate_bps / EQUAL_RATE_SHARE
        lowest_bps = port.rate_bps * EQUAL_RATE_SHARE
        if min(rates) <= highest_bps and max(rates) >= lowest_bps:
            sentences.append(
                f"its {len(rates)} fast NICs run at {format_rate(sum(rates))} together, but the "
                f"rate of fabric {port.fabric!r} is {format_rate(port.rate_bps)} in {site.source}, "
                f"that of one of them"
            )
    return sentences


def apart_by_subnet(site: Site) -> list[str]:
    """Return a list with one warning if only IP subnets tell several RoCE fabrics apart, else [].

    If RoCE is routed between the subnets, these fabrics are really one. The nodes' reports cannot show
    that, so the user has to say it in a cluster file.
    """
    roce = [fabric.name for fabric in site.fabrics if fabric.kind == "roce"]
    if site.source != REPORTS or len(roce) <= 1:
        return []
    return [
        f"RoCE NICs in different IP subnets count as separate fabrics ({some_of(roce)}), between which "
        f"groups go over Ethernet; where RoCE is routed, say which nodes belong together with "
        f"--holmes-cluster FILE"
    ]


def _match_names(reports: tuple[NodeReport, ...], spec: SiteSpec) -> tuple[NodeReport, ...]:
    """Return the reports with the node names of cluster.toml.

    A host name and a name in the file match if they are equal, or equal up to the first dot.

    Args:
        reports: Reports of the nodes, with their host names.
        spec: Content of cluster.toml.

    Raises:
        HolmesError: a node is in no cluster.
    """
    renamed = []
    for report in reports:
        name = spec.known_as(report.name)
        if not name:
            raise HolmesError(
                f"{spec.source}: node {report.name!r} reported but is in no cluster; "
                "add it to a cluster's nodes"
            )
        renamed.append(replace(report, name=name))
    return tuple(renamed)


def _node_by_spec(report: NodeReport, spec: SiteSpec, fallback: bool, counted: bool) -> Node:
    """Return a node as cluster.toml declares it, with the NICs of its report.

    Args:
        report: The node's report, with a node name of cluster.toml.
        spec: Content of cluster.toml.
        fallback: Accept a node whose fast NICs are down.
        counted: Require that the node has started as many processes as cluster.toml says.

    Raises:
        HolmesError: the report contradicts cluster.toml.
    """
    cluster = spec.cluster_of(report.name)
    if counted and report.processes != cluster.processes:
        raise HolmesError(
            f"{spec.source}: key 'cluster.{cluster.name}.processes' is {cluster.processes}, "
            f"but node {report.name!r} started {report.processes}"
        )
    override = spec.overrides.get(report.name, NodeOverride())
    interface = override.ethernet or spec.ethernet_interface
    ports = [_ethernet_port(report, spec.ethernet_rate_bps, interface, spec.source)]
    if cluster.fabric != ETHERNET:
        ports.insert(0, _fast_port(report, cluster, override, spec, fallback))
    return Node(report.name, cluster.name, report.processes, tuple(ports))


def _ethernet_port(
    report: NodeReport, rate_bps: int = 0, interface: str = "", source: str = ""
) -> Port:
    """Return the port of a node on the network that reaches every node.

    Args:
        report: The node's report.
        rate_bps: Declared rate in bits/s; 0 for the rate that the NIC states.
        interface: Network device that cluster.toml names; "" for the device that reaches the master.
        source: Path of cluster.toml.

    Raises:
        HolmesError: `interface` does not exist, is down, or has no address.
    """
    name = interface or report.ethernet
    matching = [nic for nic in report.nics if name in (nic.device, *nic.netdevs)]
    nic = matching[0] if matching else None
    if interface:
        problem = _interface_problem(report, interface, nic)
        if problem:
            raise HolmesError(f"{source}: {problem}")
    stated_bps = nic.rate_bps if nic is not None else 0
    return Port(
        ETHERNET,
        interface=name,
        address=nic.address if nic is not None else "",
        rate_bps=rate_bps or stated_bps or UNKNOWN_ETHERNET_BPS,
    )


def _interface_problem(report: NodeReport, interface: str, nic: Nic | None) -> str:
    """Return the reason why a node cannot use an interface, "" if it can.

    Args:
        report: The node's report.
        interface: Name of the network device.
        nic: The NIC with the interface, None if the node has no such NIC.
    """
    if nic is None:
        names = {nic.ifname for nic in report.nics if nic.ifname}
        listed = ", ".join(sorted(names)) or "none"
        return f"node {report.name!r} has no interface {interface!r}; it has {listed}"
    subject = f"interface {interface!r} of node {report.name!r}"
    if not nic.up:
        return f"{subject} is {nic.state_text}; bring it up"
    if not nic.addresses:
        return f"{subject} has no address; give it one"
    return ""


def _fast_port(
    report: NodeReport, cluster: ClusterSpec, override: NodeOverride, spec: SiteSpec, fallback: bool
) -> Port:
    """Return the port of a node on the fast fabric (InfiniBand, RoCE, ...) of its cluster.

    Args:
        report: The node's report.
        cluster: The node's cluster in cluster.toml.
        override: The node's own settings in cluster.toml.
        spec: Content of cluster.toml.
        fallback: If NICs are down, return a port with the reason in `fault`, instead of an error.

    Raises:
        HolmesError: the node has no NIC of the cluster's kind. Without fallback, also if none of
            them is up, or if a NIC that `include` names is down.
    """
    include = override.include or cluster.include
    exclude = override.exclude or cluster.exclude
    try:
        selected = select(report.nics, include, exclude)
    except HolmesError as error:
        raise HolmesError(f"{spec.source}: node {report.name!r}: {error}") from None
    # `include` may choose any NIC. Otherwise the network device for Ethernet is kept out of the fast
    # fabric where it is of the same kind as the fast NICs (gVNIC).
    ethernet = "" if include else report.ethernet
    nics = declared_nics(selected, cluster.kind, ethernet)
    nics_up = [nic for nic in nics if nic.up]
    nics_down = [nic for nic in nics if not nic.up]
    states = ", ".join(f"{nic.name} is {nic.state_text}" for nic in nics_down)
    may_fall_back = fallback and bool(nics)
    if not nics_up and not may_fall_back:
        evidence = states  # of the NICs of the cluster's kind, which are down
        advice = ""
        if not nics:
            listed = ", ".join(f"{nic.name} ({nic.kind}, {nic.state})" for nic in report.nics)
            evidence = f"its NICs: {listed or 'none'}"
            advice = kinds_to_write(report.nics)
        raise HolmesError(
            f"{spec.source}: node {report.name!r} of cluster {cluster.name!r} has no "
            f"{cluster.kind} NIC that is up ({evidence}); fix it, or set "
            f"the cluster's kind or include to what it has{advice}"
        )
    port = Port.of_nics(cluster.fabric, nics_up or nics, cluster.rate_bps, cluster.kind)
    # report.nccl.no_verbs: reason why NCCL's network "IB" has no device on the node. With a plugin
    # (`net` in cluster.toml), it does not matter.
    if port.verbs and not cluster.net:
        port = replace(port, no_verbs=report.nccl.no_verbs)
    if not nics_down:
        return port
    if nics_up and not include:  # the file names no NIC that must be up
        return port
    if fallback:
        return replace(port, fault=states, usable=bool(nics_up))
    nic = nics_down[0]
    raise HolmesError(
        f"{spec.source}: NIC {nic.name} of node {report.name!r} is named by include "
        f"and is {nic.state_text}"
    )


def _one_rdma_fabric(ports: Sequence[Port], nodes_on: Mapping[str, int]) -> list[Port]:
    """Return the fast ports of a node, all but one of them marked as not usable for NCCL.

    The port to use is the fastest of those whose fabric also has other nodes.

    Args:
        ports: Fast ports of a node, each on another fabric.
        nodes_on: Fabric -> number of its nodes.
    """

    def preference(port: Port) -> tuple[bool, int, int]:
        nodes = nodes_on[port.fabric]
        return nodes > 1, port.rate_bps, nodes

    chosen = max(ports, key=preference)
    reason = f"NCCL takes any HCA of a node for any group, so one fabric of it is used, {chosen.fabric!r}"
    return [port if port is chosen else replace(port, no_verbs=reason) for port in ports]


def _site_from_reports(reports: tuple[NodeReport, ...]) -> Site:
    """Return the site of the nodes that reported, without a cluster.toml.

    Nodes whose fast NICs are in the same InfiniBand or IP subnet are on the same fabric.

    Raises:
        HolmesError: subnets do not show which nodes are on the same fabric.
    """
    by_subnet: dict[Subnet, NicsOfNodes] = {}
    # Without a plugin, NICs that only a plugin can use are left out.
    with_plugin = plugin_kinds(reports)
    kinds = [name for name, kind in KINDS.items() if kind.verbs or name in with_plugin]
    for report in reports:
        nics = [nic for nic in select(report.nics) if nic.usable]
        for kind in kinds:
            for nic in nics_of_kind(nics, kind, report.ethernet):
                nics_of_nodes = by_subnet.setdefault(subnet_of(report, nic, kind), {})
                nics_of_nodes.setdefault(report.name, []).append(nic)
    check_subnets(by_subnet)  # HolmesError if subnets do not tell the fabrics apart
    # Nodes with several NICs often have a subnet for each NIC (rails). Together they are a fabric.
    fast_fabrics = _merge_rails(by_subnet)
    # Fabric -> number of its nodes.
    nodes_on = Counter(port.fabric for ports in fast_fabrics.ports.values() for port in ports)
    nodes = []
    ethernet_rates = []
    for report in reports:
        ports = sorted(fast_fabrics.ports.get(report.name, []), key=lambda port: -port.rate_bps)
        rdma_ports = [port for port in ports if port.verbs]
        if report.nccl.no_verbs:  # NCCL here uses no RDMA at all: nothing to choose among ports
            rdma_ports = [replace(port, no_verbs=report.nccl.no_verbs) for port in rdma_ports]
        elif len(rdma_ports) > 1:
            # NCCL takes any RDMA NIC of a node for any group, whatever its fabric. Two nodes of a group
            # could then use NICs on different fabrics. So only one fabric of the node is left to NCCL.
            rdma_ports = _one_rdma_fabric(rdma_ports, nodes_on)
        by_fabric = {port.fabric: port for port in rdma_ports}
        ports = [by_fabric.get(port.fabric, port) for port in ports]
        ethernet = _ethernet_port(report)
        ethernet_rates.append(ethernet.rate_bps)
        # Nodes with the same fast fabrics form a cluster.
        cluster = "+".join(port.fabric for port in ports) or ETHERNET
        nodes.append(Node(report.name, cluster, report.processes, (*ports, ethernet)))
    common = Fabric(ETHERNET, "ethernet", min(ethernet_rates), KINDS["ethernet"].latency_s)
    return with_plugins(Site.of_reports(nodes, (common, *fast_fabrics.fabrics)), reports)


@dataclass
class _FastFabrics:
    """Fabrics of a site other than Ethernet ("fast"), and the ports of the nodes on them."""

    fabrics: list[Fabric] = field(default_factory=list)
    ports: dict[str, list[Port]] = field(default_factory=dict)  # node -> its ports


def _merge_rails(by_subnet: Mapping[Subnet, NicsOfNodes]) -> _FastFabrics:
    """Return the fast fabrics of a site, and for each node its ports on them.

    Subnets of one kind (InfiniBand or RoCE) with the same nodes form one fabric (its rails). The rate
    of a fabric is that of its slowest node.

    Args:
        by_subnet: Subnet -> node -> NICs of the node on the subnet.
    """
    # (kind, names of the nodes) -> node -> its NICs
    merged: dict[tuple[str, frozenset[str]], NicsOfNodes] = {}
    for subnet, nics_of_nodes in by_subnet.items():
        nics_on_fabric = merged.setdefault((subnet.kind, frozenset(nics_of_nodes)), {})
        for node, nics in nics_of_nodes.items():
            nics_on_fabric.setdefault(node, []).extend(nics)
    fabrics_of_kind = Counter(kind for kind, _ in merged)
    result = _FastFabrics()
    for (kind, _), nics_on_fabric in merged.items():
        name = kind
        if fabrics_of_kind[kind] > 1:
            # With "-", because "ib0" could be a network device.
            first_node = next(iter(nics_on_fabric))
            name = f"{kind}-{first_node}"
        # NICs of virtual machines may state no rate. Predictions need a rate, so a low rate is assumed.
        rates = {
            node: sum(nic.rate_bps for nic in nics) or UNKNOWN_ETHERNET_BPS
            for node, nics in nics_on_fabric.items()
        }
        result.fabrics.append(Fabric(name, kind, min(rates.values()), KINDS[kind].latency_s))
        for node, nics in nics_on_fabric.items():
            result.ports.setdefault(node, []).append(Port.of_nics(name, nics, rates[node], kind))
    return result
