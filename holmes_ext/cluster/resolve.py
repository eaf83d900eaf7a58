"""From what cluster.toml says and what the nodes report to one Site.

With cluster.toml, a node's cluster names the fabric and its kind, and the report must bear it out. Without it, the
fabrics are worked out from the NICs:

    InfiniBand   same subnet prefix, unless it is the default one, which says nothing: then holmes asks
    RoCE         same IP subnet
    Ethernet     one network that reaches all (each node's interface towards the master)

Rail-wise subnets (NIC i of every node in subnet i) give fabrics with the same nodes: they count as one fabric.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import replace

from holmes_ext.cluster.nic import DEFAULT_SUBNET_PREFIX, Nic
from holmes_ext.cluster.node_report import NodeReport, short_name
from holmes_ext.cluster.site import ETHERNET, Fabric, Node, Port, Site, fabrics_of_spec
from holmes_ext.cluster.spec import DEFAULT_LATENCY, ClusterSpec, NodeOverride, SiteSpec
from holmes_ext.cluster.sysfs.node import select
from holmes_ext.errors import HolmesError

#: Bits/s where no Ethernet NIC of a node states its speed (virtual machines); only predictions depend on it.
UNKNOWN_ETHERNET_BPS = 10 * 10**9


def resolve_site(reports: Iterable[NodeReport], spec: SiteSpec | None, fallback: bool = False) -> Site:
    """The Site of the nodes that reported, in their order; HolmesError names the node and what contradicts.

    fallback: a fast NIC that cluster.toml promises and that is down is marked as such, and the node left on Ethernet.
    """
    reports = tuple(reports)
    _check_names(reports)
    if spec is None:
        return _site_from_reports(reports)
    reports = _match_names(reports, spec)
    nodes = tuple(_node_by_spec(report, spec, fallback) for report in reports)
    return Site(nodes, fabrics_of_spec(spec), spec.source)


def _check_names(reports: tuple[NodeReport, ...]) -> None:
    seen: dict[str, NodeReport] = {}
    for report in reports:
        if report.name in seen:
            raise HolmesError(f"two nodes call themselves {report.name!r}; give each its own HOLMES_NODE or host name")
        seen[report.name] = report


def _match_names(reports: tuple[NodeReport, ...], spec: SiteSpec) -> tuple[NodeReport, ...]:
    """The reports under the names that cluster.toml uses: the host name itself, or both cut at the first dot."""
    listed = {name: name for cluster in spec.clusters for name in cluster.nodes}
    short = {short_name(name): name for name in listed}
    renamed = []
    for report in reports:
        name = listed.get(report.name) or short.get(short_name(report.name))
        if name is None:
            raise HolmesError(f"{spec.source}: node {report.name!r} reported but is in no cluster; add it to a cluster's nodes")
        renamed.append(replace(report, name=name))
    absent = sorted(set(listed) - {report.name for report in renamed})
    if absent:
        raise HolmesError(
            f"{spec.source}: node {absent[0]!r} of cluster {spec.cluster_of(absent[0]).name!r} did not report"
            f" ({len(renamed)} of {len(listed)} nodes did); start the job there too, or take it out of the file"
        )
    return tuple(renamed)


def _node_by_spec(report: NodeReport, spec: SiteSpec, fallback: bool) -> Node:
    cluster = spec.cluster_of(report.name)
    if report.processes != cluster.processes:
        raise HolmesError(
            f"{spec.source}: key 'cluster.{cluster.name}.processes' is {cluster.processes}, but node {report.name!r}"
            f" started {report.processes}"
        )
    override = spec.overrides.get(report.name, NodeOverride())
    ethernet = _ethernet_port(report, override.ethernet or spec.ethernet_interface, spec)
    if cluster.fabric == ETHERNET:
        return Node(report.name, cluster.name, report.processes, (ethernet,))
    fast = _fast_port(report, cluster, override, spec, fallback)
    return Node(report.name, cluster.name, report.processes, (fast, ethernet))


def _ethernet_port(report: NodeReport, named: str, spec: SiteSpec | None) -> Port:
    name = named or report.ethernet
    nic = next((nic for nic in report.nics if name in (nic.device, *nic.netdevs)), None)
    if nic is None and named:
        have = ", ".join(sorted({nic.ifname for nic in report.nics if nic.ifname}))
        raise HolmesError(f"{spec.source}: node {report.name!r} has no interface {named!r}; it has {have or 'none'}")
    if named and not nic.up:
        raise HolmesError(f"{spec.source}: interface {named!r} of node {report.name!r} is {nic.state_text}; bring it up")
    if named and not nic.addresses:
        raise HolmesError(f"{spec.source}: interface {named!r} of node {report.name!r} has no address; give it one")
    rate = spec.ethernet_rate_bps if spec else (nic.rate_bps if nic else 0) or UNKNOWN_ETHERNET_BPS
    return Port(ETHERNET, name, _address(nic) if nic else "", rate_bps=rate)


def _address(nic: Nic) -> str:
    return nic.addresses[0].split("/")[0] if nic.addresses else ""


def _fast_port(report: NodeReport, cluster: ClusterSpec, override: NodeOverride, spec: SiteSpec, fallback: bool) -> Port:
    include, exclude = override.include or cluster.include, override.exclude or cluster.exclude
    try:
        chosen = select(report.nics, include, exclude)
    except HolmesError as error:
        raise HolmesError(f"{spec.source}: node {report.name!r}: {error}") from None
    kind = [nic for nic in chosen if nic.kind == cluster.kind and not nic.skipped]
    usable = [nic for nic in kind if nic.up]
    states = ", ".join(f"{nic.name} is {nic.state_text}" for nic in kind if not nic.up)
    if kind and not usable and fallback:
        return replace(_port(cluster.fabric, kind, cluster.rate_bps), fault=states, usable=False)
    if not usable:
        raise HolmesError(
            f"{spec.source}: node {report.name!r} of cluster {cluster.name!r} has no {cluster.kind} NIC that is up"
            f" ({states or f'its NICs: {_names(report.nics)}'}); mend it, or let the cluster's kind or include say what it has"
        )
    named_down = [nic for nic in kind if include and not nic.up]
    if named_down and fallback:
        return replace(_port(cluster.fabric, usable, cluster.rate_bps), fault=states)
    if named_down:
        nic = named_down[0]
        raise HolmesError(f"{spec.source}: NIC {nic.name} of node {report.name!r} is named by include and is {nic.state_text}")
    return _port(cluster.fabric, usable, cluster.rate_bps)


def _names(nics: Iterable[Nic]) -> str:
    return ", ".join(f"{nic.name} ({nic.kind}, {nic.state})" for nic in nics) or "none"


def _port(fabric: str, nics: list[Nic], rate_bps: int) -> Port:
    """One port for all NICs of a node on a fabric: sockets bind to the first that has an address, RDMA uses them all."""
    bound = next((nic for nic in nics if nic.ifname and nic.addresses), None)
    hcas = tuple(nic.name for nic in nics if nic.kind != "ethernet")
    index = nics[0].roce_v2_index if nics[0].kind == "roce" else None
    return Port(fabric, bound.ifname if bound else "", _address(bound) if bound else "", hcas, index, rate_bps)


def _site_from_reports(reports: tuple[NodeReport, ...]) -> Site:
    by_fabric: dict[tuple[str, str], dict[str, list[Nic]]] = {}
    for report in reports:
        for nic in select(report.nics):
            if nic.kind != "ethernet" and nic.up and not nic.skipped:
                by_fabric.setdefault(_fabric_key(report, nic), {}).setdefault(report.name, []).append(nic)
    _ask_about_default_prefix(by_fabric)
    fabrics, ports = _merge_rails(by_fabric)
    nodes, rates = [], []
    for report in reports:
        ethernet = _ethernet_port(report, "", None)
        rates.append(ethernet.rate_bps)
        fast = sorted(ports.get(report.name, []), key=lambda port: -port.rate_bps)
        cluster = "+".join(port.fabric for port in fast) or ETHERNET
        nodes.append(Node(report.name, cluster, report.processes, (*fast, ethernet)))
    common = Fabric(ETHERNET, "ethernet", min(rates), DEFAULT_LATENCY["ethernet"])
    return Site(tuple(nodes), (common, *fabrics))


def _fabric_key(report: NodeReport, nic: Nic) -> tuple[str, str]:
    if nic.kind == "ib":
        return "ib", nic.subnet_prefix
    networks = [ipaddress.ip_interface(a).network for a in nic.addresses]
    networks = [network for network in networks if network.version == 4 and network.prefixlen < 32]
    if not networks:
        raise HolmesError(
            f"node {report.name!r}: RoCE NIC {nic.name} has no IPv4 address with a subnet, so its fabric is unknown;"
            " give it one, or name the clusters with --holmes-cluster FILE"
        )
    return "roce", str(networks[0])


def _ask_about_default_prefix(by_fabric: dict) -> None:
    members = by_fabric.get(("ib", DEFAULT_SUBNET_PREFIX), {})
    if len(members) > 1:
        lids: dict[int, str] = {}
        for name, nics in members.items():
            for nic in nics:
                other = lids.setdefault(nic.lid, name)
                if nic.lid and other != name:
                    evidence = f"; nodes {other!r} and {name!r} both have LID {nic.lid}, so there are at least two"
                    raise _default_prefix_error(members, evidence)
        raise _default_prefix_error(members, "")


def _default_prefix_error(members: dict, evidence: str) -> HolmesError:
    names = ", ".join(list(members)[:4]) + (", ..." if len(members) > 4 else "")
    return HolmesError(
        f"the InfiniBand ports of {len(members)} nodes ({names}) all have the default subnet prefix {DEFAULT_SUBNET_PREFIX},"
        f" which does not tell one fabric from two{evidence}; say which nodes belong together with --holmes-cluster FILE"
    )


def _merge_rails(by_fabric: dict) -> tuple[list[Fabric], dict[str, list[Port]]]:
    """Fabrics of one kind with the same nodes become one; returns the fabrics and each node's ports."""
    merged: dict[tuple[str, frozenset[str]], dict[str, list[Nic]]] = {}
    for (kind, _), members in by_fabric.items():
        nics = merged.setdefault((kind, frozenset(members)), {})
        for name, more in members.items():
            nics.setdefault(name, []).extend(more)
    fabrics, ports, counts = [], {}, {}
    for (kind, _), members in merged.items():
        counts[kind] = counts.get(kind, -1) + 1
        name = f"{kind}{counts[kind]}"
        rate = min(sum(nic.rate_bps for nic in nics) for nics in members.values())
        fabrics.append(Fabric(name, kind, rate, DEFAULT_LATENCY[kind]))
        for node, nics in members.items():
            ports.setdefault(node, []).append(_port(name, nics, sum(nic.rate_bps for nic in nics)))
    return fabrics, ports
