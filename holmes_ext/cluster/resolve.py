"""From what cluster.toml says and what the nodes report to one Site.

With cluster.toml, a node's cluster names the fabric and its kind, and the report must bear it out. Without
it, the fabrics are worked out from the NICs:

    InfiniBand   same subnet prefix, unless it is the default one, which says nothing: then holmes asks
    RoCE         same IP subnet, unless nodes have one each, as where RoCE is routed: then holmes asks; a
                 fabric is called after its kind, where there are several after its first node, too
    Ethernet     one network that reaches all (each node's interface towards the master)

Rail-wise subnets (NIC i of every node in subnet i) have the same nodes: they count as one fabric.

NCCL reads once in a process which HCAs it may use, and takes any of them for any group: so a node's RDMA
groups use one fabric, and where it is on several the others are left to sockets (Port.no_verbs).
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from holmes_ext.cluster.fabric import ETHERNET, Fabric
from holmes_ext.cluster.nic import DEFAULT_SUBNET_PREFIX, KINDS, Nic
from holmes_ext.cluster.node_report import NodeReport
from holmes_ext.cluster.site import REPORTS, Node, Port, Site, fabrics_of_spec
from holmes_ext.cluster.spec import ClusterSpec, NodeOverride, SiteSpec
from holmes_ext.cluster.sysfs.node import select
from holmes_ext.errors import HolmesError
from holmes_ext.units import format_rate
from holmes_ext.words import some_of

#: Bits/s where no Ethernet NIC of a node states its speed (virtual machines); only predictions depend on it.
UNKNOWN_ETHERNET_BPS = 10 * 10**9
#: Of a declared rate, what its NICs must state at least: a link's nominal rate is rounded (56 Gb/s for 54.5).
ENOUGH = 0.95
#: (kind, subnet prefix or IP subnet) -> node -> its NICs there.
_Members = dict[tuple[str, str], dict[str, list[Nic]]]


def part_of(spec: SiteSpec, reports: Iterable[NodeReport]) -> SiteSpec:
    """`spec` as far as the nodes go that reported; HolmesError for one that it does not know."""
    return spec.only({report.name for report in _match_names(tuple(reports), spec)})


def resolve_site(
    reports: Iterable[NodeReport],
    spec: SiteSpec | None,
    fallback: bool = False,
    counted: bool = True,
) -> Site:
    """The Site of the nodes that reported, in their order, of which `spec` may know more; HolmesError names
    the node and what contradicts. fallback: a promised fast NIC that is down is marked, its node left on
    Ethernet; counted: each node must start as many processes as `spec` says."""
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
    return Site(nodes, fabrics_of_spec(spec), spec.source, spec.wan)


def slower_than_declared(site: Site, reports: Iterable[NodeReport]) -> list[tuple[str, str]]:
    """(node, text) where the NICs in use of a `site` resolved from `reports` state less than it counts on."""
    result = []
    for node, report in zip(site.nodes, reports):
        for port in node.ports:
            nics = [
                nic for nic in report.nics if nic.up and nic.name in (port.hcas or [port.interface])
            ]
            stated = sum(nic.rate_bps for nic in nics)
            if nics and all(nic.rate_bps for nic in nics) and stated < ENOUGH * port.rate_bps:
                runs = (
                    f"{some_of(nic.name for nic in nics)} run{'s' * (len(nics) == 1)} at "
                    f"{format_rate(stated)}"
                )
                said = f"the rate of fabric {port.fabric!r} is {format_rate(port.rate_bps)} in {site.source}"
                result.append((node.name, f"{runs}, but {said}"))
    return result


def rate_of_one_nic(site: Site, report: NodeReport) -> list[str]:
    """Where cluster.toml gives a node with several fast NICs the rate of one of them."""
    result = []
    for port in site.node_by_name[report.name].ports:
        rates = [nic.rate_bps for nic in report.nics if nic.up and nic.name in port.hcas]
        if (
            len(rates) > 1
            and min(rates) <= port.rate_bps / ENOUGH
            and port.rate_bps * ENOUGH <= max(rates)
        ):
            result.append(
                f"its {len(rates)} fast NICs run at {format_rate(sum(rates))} together, but the "
                f"rate of fabric {port.fabric!r} is {format_rate(port.rate_bps)} in {site.source}, "
                f"that of one of them"
            )
    return result


def nccl_remarks(site: Site, reports: Iterable[NodeReport]) -> list[str]:
    """A line for each thing that NCCL does otherwise than the NICs of `site` suggest."""
    nodes_of: dict[str, list[str]] = {}
    for node, report in zip(site.nodes, reports):
        for port in node.ports:
            fabric = site.fabric_by_name[port.fabric]
            nics = [nic for nic in report.nics if nic.name in port.hcas and nic.kind == "roce"]
            if port.no_verbs:
                what = f"NCCL cannot use {some_of(port.hcas)} for fabric {port.fabric!r}: {port.no_verbs}"
                nodes_of.setdefault(f"{what}; its groups there go over sockets", []).append(
                    node.name
                )
            elif len({nic.roce_v2_index for nic in nics}) > 1:
                where = ", ".join(f"{nic.name} {nic.roce_v2_index}" for nic in nics)
                what = f"the RoCE v2 GIDs of its ports stand at different indices ({where})"
                nodes_of.setdefault(f"{what}: NCCL finds them by itself from 2.21 on", []).append(
                    node.name
                )
            if report.nccl.plugin and fabric.name != ETHERNET and not fabric.net:
                what = (
                    f'NCCL would load {report.nccl.plugin}, but "IB" is asked for on fabric '
                    f"{fabric.name!r}"
                )
                advice = (
                    'say net = "NAME" in cluster.toml (NCCL_DEBUG=INFO tells: Using network NAME), '
                    'or "auto"'
                )
                nodes_of.setdefault(f"{what}; to use the plugin, {advice}", []).append(node.name)
    return [
        f"node{'s' * (len(names) > 1)} {some_of(names)}: {text}" for text, names in nodes_of.items()
    ]


def apart_by_subnet(site: Site) -> list[str]:
    """A line where IP subnets alone told fabrics of RoCE apart (routed, they would be one)."""
    roce = [fabric.name for fabric in site.fabrics if fabric.kind == "roce"]
    if site.source != REPORTS or len(roce) < 2:
        return []
    return [
        f"RoCE NICs in different IP subnets count as separate fabrics ({some_of(roce)}), between which "
        f"groups go over Ethernet; where RoCE is routed, say which nodes belong together with "
        f"--holmes-cluster FILE"
    ]


def _match_names(reports: tuple[NodeReport, ...], spec: SiteSpec) -> tuple[NodeReport, ...]:
    """Under the names that cluster.toml uses: host names, or both cut at the first dot."""
    renamed = []
    for report in reports:
        name = spec.known_as(report.name)
        if not name:
            what = f"node {report.name!r} reported but is in no cluster"
            raise HolmesError(f"{spec.source}: {what}; add it to a cluster's nodes")
        renamed.append(replace(report, name=name))
    return tuple(renamed)


def _node_by_spec(report: NodeReport, spec: SiteSpec, fallback: bool, counted: bool) -> Node:
    cluster = spec.cluster_of(report.name)
    if counted and report.processes != cluster.processes:
        raise HolmesError(
            f"{spec.source}: key 'cluster.{cluster.name}.processes' is {cluster.processes}, "
            f"but node {report.name!r} started {report.processes}"
        )
    override = spec.overrides.get(report.name, NodeOverride())
    named = override.ethernet or spec.ethernet_interface
    ports = [_ethernet_port(report, spec.ethernet_rate_bps, named, spec.source)]
    if cluster.fabric != ETHERNET:
        ports.insert(0, _fast_port(report, cluster, override, spec, fallback))
    return Node(report.name, cluster.name, report.processes, tuple(ports))


def _ethernet_port(
    report: NodeReport, rate_bps: int = 0, named: str = "", source: str = ""
) -> Port:
    """By which the node reaches the master, or as cluster.toml names it; rate_bps 0: what it states."""
    name = named or report.ethernet
    nic = next((nic for nic in report.nics if name in (nic.device, *nic.netdevs)), None)
    trouble = ""
    if nic is None:
        have = ", ".join(sorted({nic.ifname for nic in report.nics if nic.ifname}))
        trouble = f"node {report.name!r} has no interface {name!r}; it has {have or 'none'}"
    elif not nic.up or not nic.addresses:
        state = "has no address; give it one" if nic.up else f"is {nic.state_text}; bring it up"
        trouble = f"interface {name!r} of node {report.name!r} {state}"
    if named and trouble:
        raise HolmesError(f"{source}: {trouble}")
    rate_bps = rate_bps or (nic.rate_bps if nic else 0) or UNKNOWN_ETHERNET_BPS
    return Port(ETHERNET, name, _address(nic) if nic else "", rate_bps=rate_bps)


def _address(nic: Nic) -> str:
    return nic.addresses[0].split("/")[0] if nic.addresses else ""


def _fast_port(
    report: NodeReport, cluster: ClusterSpec, override: NodeOverride, spec: SiteSpec, fallback: bool
) -> Port:
    include = override.include or cluster.include
    try:
        chosen = select(report.nics, include, override.exclude or cluster.exclude)
    except HolmesError as error:
        raise HolmesError(f"{spec.source}: node {report.name!r}: {error}") from None
    kind = [nic for nic in chosen if nic.kind == cluster.kind and not nic.skipped]
    usable = [nic for nic in kind if nic.up]
    down = [nic for nic in kind if not nic.up]
    states = ", ".join(f"{nic.name} is {nic.state_text}" for nic in down)
    if not usable and not (kind and fallback):
        have = ", ".join(f"{nic.name} ({nic.kind}, {nic.state})" for nic in report.nics) or "none"
        raise HolmesError(
            f"{spec.source}: node {report.name!r} of cluster {cluster.name!r} has no "
            f"{cluster.kind} NIC that is up ({states or f'its NICs: {have}'}); fix it, or set "
            "the cluster's kind or include to what it has"
        )
    port = _port(cluster.fabric, usable or kind, cluster.rate_bps)
    port = port if cluster.net else replace(port, no_verbs=report.nccl.no_verbs)
    if not down or usable and not include:
        return port
    if fallback:
        return replace(port, fault=states, usable=bool(usable))
    where = f"NIC {down[0].name} of node {report.name!r}"
    raise HolmesError(f"{spec.source}: {where} is named by include and is {down[0].state_text}")


def _port(fabric: str, nics: Sequence[Nic], rate_bps: int) -> Port:
    """One for all NICs of a node on a fabric: sockets bind to the first with an address, RDMA uses all."""
    bound = next((nic for nic in nics if nic.ifname and nic.addresses), None)
    hcas = tuple(nic.name for nic in nics if nic.fast)
    indices = {nic.roce_v2_index for nic in nics} if nics[0].kind == "roce" else {None}
    index = indices.pop() if len(indices) == 1 else None
    return Port(
        fabric,
        bound.ifname if bound else "",
        _address(bound) if bound else "",
        hcas,
        index,
        rate_bps,
    )


def _one_rdma_fabric(fast: Sequence[Port], nodes_on: Mapping[str, int]) -> list[Port]:
    """A node's fast ports, one of which NCCL uses: of those that it shares with other nodes the fastest."""
    chosen = max(
        fast, key=lambda port: (nodes_on[port.fabric] > 1, port.rate_bps, nodes_on[port.fabric])
    )
    why = f"NCCL takes any HCA of a node for any group, so one fabric of it is used, {chosen.fabric!r}"
    return [port if port is chosen else replace(port, no_verbs=why) for port in fast]


def _site_from_reports(reports: tuple[NodeReport, ...]) -> Site:
    by_fabric: _Members = {}
    for report in reports:
        for nic in select(report.nics):
            if nic.fast and nic.usable:
                by_fabric.setdefault(_fabric_key(report, nic), {}).setdefault(
                    report.name, []
                ).append(nic)
    _ask_about_default_prefix(by_fabric.get(("ib", DEFAULT_SUBNET_PREFIX), {}))
    _ask_about_routed_roce(
        {subnet: set(members) for (kind, subnet), members in by_fabric.items() if kind == "roce"}
    )
    fabrics, ports = _merge_rails(by_fabric)
    nodes_on = Counter(port.fabric for fast_ports in ports.values() for port in fast_ports)
    nodes, rates = [], []
    for report in reports:
        ethernet = _ethernet_port(report)
        rates.append(ethernet.rate_bps)
        fast = sorted(ports.get(report.name, []), key=lambda port: -port.rate_bps)
        if report.nccl.no_verbs:
            fast = [replace(port, no_verbs=report.nccl.no_verbs) for port in fast]
        elif len(fast) > 1:
            fast = _one_rdma_fabric(fast, nodes_on)
        cluster = "+".join(port.fabric for port in fast) or ETHERNET
        nodes.append(Node(report.name, cluster, report.processes, (*fast, ethernet)))
    common = Fabric(ETHERNET, "ethernet", min(rates), KINDS["ethernet"].latency_s)
    return Site(tuple(nodes), (common, *fabrics))


def _fabric_key(report: NodeReport, nic: Nic) -> tuple[str, str]:
    if KINDS[nic.kind].infiniband:
        return nic.kind, nic.subnet_prefix
    networks = [ipaddress.ip_interface(a).network for a in nic.addresses]
    networks = [network for network in networks if network.version == 4 and network.prefixlen < 32]
    if not networks:
        raise HolmesError(
            f"node {report.name!r}: RoCE NIC {nic.name} has no IPv4 address with a subnet, so its fabric is "
            f"unknown; give it one, or name the clusters with --holmes-cluster FILE"
        )
    return nic.kind, str(networks[0])


def _ask_about_default_prefix(members: dict[str, list[Nic]]) -> None:
    """HolmesError where several nodes have InfiniBand ports with the default prefix."""
    if len(members) < 2:
        return
    owner: dict[int, str] = {}
    evidence = ""
    for name, lid in [(name, nic.lid) for name, nics in members.items() for nic in nics if nic.lid]:
        if owner.setdefault(lid, name) != name:
            evidence = f"; nodes {owner[lid]!r} and {name!r} both have LID {lid}, so there are at least two"
    raise HolmesError(
        f"the InfiniBand ports of {len(members)} nodes ({some_of(members, 4)}) all have the "
        f"default subnet prefix {DEFAULT_SUBNET_PREFIX}, which does not tell one fabric from "
        f"two{evidence}; say which nodes belong together with --holmes-cluster FILE"
    )


def _ask_about_routed_roce(nodes_in: Mapping[str, set[str]]) -> None:
    """HolmesError where several nodes share none of their subnets: routed RoCE has one for each port."""
    shared = {name for names in nodes_in.values() if len(names) > 1 for name in names}
    alone = {name: subnet for subnet, names in nodes_in.items() for name in names - shared}
    if len(alone) > 1:
        raise HolmesError(
            f"the RoCE ports of nodes {some_of(alone, 4)} are each in an IP subnet of their "
            f"own ({some_of(alone.values(), 4)}), which does not tell routed RoCE, one fabric, "
            "from several; say which nodes belong together with --holmes-cluster FILE"
        )


def _merge_rails(by_fabric: _Members) -> tuple[list[Fabric], dict[str, list[Port]]]:
    """Fabrics of one kind with the same nodes become one; returns the fabrics and each node's ports."""
    merged: dict[tuple[str, frozenset[str]], dict[str, list[Nic]]] = {}
    for (kind, _), members in by_fabric.items():
        of_node = merged.setdefault((kind, frozenset(members)), {})
        for name, nics in members.items():
            of_node.setdefault(name, []).extend(nics)
    fabrics: list[Fabric] = []
    ports: dict[str, list[Port]] = {}
    for (kind, _), of_node in merged.items():
        several = sum(other == kind for other, _ in merged) > 1
        # no net device's name, which "ib0" would be
        name = f"{kind}-{next(iter(of_node))}" if several else kind
        rates = {node: sum(nic.rate_bps for nic in nics) for node, nics in of_node.items()}
        fabrics.append(Fabric(name, kind, min(rates.values()), KINDS[kind].latency_s))
        for node, nics in of_node.items():
            ports.setdefault(node, []).append(_port(name, nics, rates[node]))
    return fabrics, ports
