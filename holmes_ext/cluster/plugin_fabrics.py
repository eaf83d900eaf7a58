"""Decides which fabrics use a network plugin of NCCL, and NCCL's name of the plugin's network.

    kind of NIC                  network that holmes requests from NCCL
    efa, slingshot, gvnic        that of the installed plugin
    opa                          that of the plugin where every node has one, else "IB" (verbs)
    plugin                       that of the installed plugin, whatever it is
    ib, roce, erdma              "IB"; the plugin's, if cluster.toml (`net`) or NCCL_NET names it

The plugin of each node is in its report. A node without a plugin for its NICs gets the reason
in Port.no_verbs, so that its groups use the next fastest network that all their members have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from holmes_ext.cluster.fabric import ETHERNET, Fabric, is_built_in, is_same_network
from holmes_ext.cluster.nccl import AUTO, NcclOfNode
from holmes_ext.cluster.net_plugin import may_carry
from holmes_ext.cluster.nic import KINDS, Nic
from holmes_ext.cluster.node_report import NodeReport
from holmes_ext.cluster.site import Node, Site
from holmes_ext.errors import HolmesError
from holmes_ext.words import grouped, some_of


class _Choice(NamedTuple):
    """NCCL network for the process groups on a fabric, and the fabric's nodes that cannot use it."""

    net: str  # see Fabric.net
    problems: dict[str, str]  # node -> reason why NCCL cannot use the network there


def nics_of_kind(nics: Iterable[Nic], kind: str, ethernet: str = "") -> list[Nic]:
    """Return the NICs of a node that are of a kind, for RDMA or for a network plugin.

    Args:
        nics: NICs of the node that jobs may use.
        kind: Kind of NIC.
        ethernet: Network device towards the master, "" for none. It matters for gVNIC only:
            machines with a plugin have a gVNIC device for each GPU or pair of GPUs, for the plugin, and
            another for everything else. The latter is left out unless the node has no other.
    """
    nics = [nic for nic in nics if not nic.skipped]
    matching = [nic for nic in nics if nic.kind == kind]
    if matching:
        return matching
    devices = [nic for nic in nics if nic.plugin_kind == kind]
    if kind == "gvnic":
        return [nic for nic in devices if nic.device != ethernet] or devices
    return devices


def declared_nics(nics: Iterable[Nic], kind: str, ethernet: str = "") -> list[Nic]:
    """Return the NICs of a node on the fast fabric of its cluster in cluster.toml.

    A plugin's own NICs may look like any other in /sys. So kind = "plugin" means the NICs that only a
    plugin can use if there are any, else the fast ones, else all.

    Args:
        nics: NICs of the node that jobs may use.
        kind: Kind of the cluster's NICs in cluster.toml.
        ethernet: Network device towards the master, see nics_of_kind().
    """
    nics = [nic for nic in nics if not nic.skipped]
    matching = nics_of_kind(nics, kind, ethernet)
    if matching or kind != "plugin":
        return matching
    return [nic for nic in nics if nic.fast] or nics


def plugin_kinds(reports: Iterable[NodeReport]) -> list[str]:
    """Return the kinds of NICs that the network plugins of some nodes use, as far as their names show.

    A plugin whose network's name is not known counts for every kind that may_carry() allows. The kind
    "plugin" is left out: it is not known which plugin uses such NICs.
    """
    networks = {report.nccl.network for report in reports if report.nccl.has_plugin}
    return [
        kind
        for kind, nic_kind in KINDS.items()
        if nic_kind.plugin
        and kind != "plugin"
        and any(may_carry(network, kind) for network in networks)
    ]


def kinds_to_write(nics: Iterable[Nic]) -> str:
    """Return advice on the key `kind` of cluster.toml for a node with these NICs, "" if there is none."""
    nics = list(nics)
    kinds = dict.fromkeys(
        nic.plugin_kind or nic.kind
        for nic in nics
        if not nic.skipped and (nic.plugin_kind or nic.fast)
    )
    if not kinds and any(nic.kind == "iwarp" for nic in nics):
        return ' (NCCL uses iWARP NICs by sockets only: write kind = "ethernet")'
    if not kinds:
        return ""
    return " (write " + " or ".join(f'kind = "{kind}"' for kind in kinds) + ")"


def with_plugins(site: Site, reports: Sequence[NodeReport]) -> Site:
    """Return a site in which each fabric that goes over a plugin names the plugin's network.

    The name is the fabric's `net`; "" means a network of NCCL itself. A node that lacks the plugin of a
    fabric gets the reason in `no_verbs` of its port on that fabric.

    Args:
        site: Site that was resolved from the reports.
        reports: Reports in the order of the site's nodes.

    Raises:
        HolmesError: the nodes of a fabric have plugins with different networks.
    """
    fabrics = []
    problems: dict[tuple[str, str], str] = {}  # (node, fabric) -> reason
    for fabric in site.fabrics:
        settings = {
            node.name: report.nccl
            for node, report in zip(site.nodes, reports)
            if any(port.fabric == fabric.name for port in node.ports)
        }
        if fabric.name == ETHERNET:
            # With a fast fabric, the plugin is for its NICs. Ethernet then goes over NCCL's "Socket".
            net = ""
            if len(site.fabrics) == 1:
                net = _requested_net(settings)
            fabrics.append(replace(fabric, net=net))
            continue
        choice = _choose(fabric, settings)
        fabrics.append(replace(fabric, net=choice.net))
        for node, reason in choice.problems.items():
            problems[node, fabric.name] = reason
    nodes = tuple(_with_problems(node, problems) for node in site.nodes)
    return replace(site, nodes=nodes, fabrics=tuple(fabrics))


def _with_problems(node: Node, problems: dict[tuple[str, str], str]) -> Node:
    ports = tuple(
        replace(port, no_verbs=problems.get((node.name, port.fabric), port.no_verbs))
        for port in node.ports
    )
    return replace(node, ports=ports)


def _requested_net(settings: dict[str, NcclOfNode]) -> str:
    """Return the network of a plugin that the user's NCCL_NET requests on all nodes, "" for none.

    Args:
        settings: Node -> its NCCL settings.
    """
    for nccl in settings.values():
        if not nccl.requested_net or is_built_in(nccl.requested_net) or not nccl.has_plugin:
            return ""
        if nccl.request_name and not is_same_network(nccl.request_name, nccl.requested_net):
            return ""
    # Some plugins get their network's name when they start (nccl-rdma-sharp-plugins), so the name is not
    # known here (request_name is ""). NCCL looks for a requested name before that, and would not find
    # it. With AUTO no name is requested, and NCCL then prefers the plugin.
    names = {nccl.request_name or AUTO for nccl in settings.values()}
    return names.pop() if len(names) == 1 else ""


def _choose(fabric: Fabric, settings: dict[str, NcclOfNode]) -> _Choice:
    """Return the network of a fast fabric's groups, and the nodes that do not have it.

    The name of the network is:

        that of the plugin    if NICs of this kind use an installed plugin, or if the user chooses it
        AUTO                  the same, but the plugin's file does not show the name: NCCL chooses
        ""                    NCCL's own network, "IB" or "Socket"

    Args:
        fabric: The fabric. Its `net` is the user's choice in cluster.toml, "" if there is none.
        settings: Node on the fabric -> its NCCL settings.

    Raises:
        HolmesError: the nodes have plugins with different networks.
    """
    kind = KINDS[fabric.kind]
    if fabric.net and is_built_in(fabric.net):  # cluster.toml chooses "IB" or "Socket"
        return _Choice(fabric.net, {})
    net = fabric.net or _requested_net(settings)
    if not net and not kind.plugin:  # neither the user nor the kind of NIC wants a plugin
        return _Choice("", {})
    reasons = {node: _why_no_plugin(nccl, net, fabric.kind) for node, nccl in settings.items()}
    problems = {node: reason for node, reason in reasons.items() if reason}
    # NCCL's own "IB" can use these NICs, too, and the user did not choose a plugin.
    if kind.verbs and problems and not fabric.net:
        return _Choice("", {})
    # No node has a plugin, and cluster.toml leaves the choice to NCCL: it takes its own "IB".
    if kind.verbs and fabric.net == AUTO and len(problems) == len(settings):
        return _Choice(AUTO, {})
    nodes_of_network = grouped(
        (nccl.request_name, node) for node, nccl in settings.items() if node not in problems
    )
    networks = [network for network in nodes_of_network if network]
    if len(networks) > 1:
        listed = "; ".join(f"{name!r} on {some_of(nodes_of_network[name])}" for name in networks)
        raise HolmesError(
            f"the nodes of fabric {fabric.name!r} have NCCL plugins with different networks ({listed}), "
            "which cannot connect to each other; install the same version of the plugin on all of them"
        )
    if net == AUTO:
        return _Choice(AUTO, problems)
    # If no plugin shows its network's name, the user's name counts. Without one, NCCL chooses.
    if not networks:
        return _Choice(net or AUTO, problems)
    return _Choice(networks[0], problems)


def _why_no_plugin(nccl: NcclOfNode, net: str, kind: str) -> str:
    """Return the reason why NCCL cannot use a fabric through the network plugin of a node, "" if it can.

    The reasons: there is no plugin, its network is not the wanted network, or it does not use NICs of
    this kind. A plugin counts as suitable if its file does not show the name of its network.

    Args:
        nccl: NCCL settings of the node.
        net: NCCL's name of the wanted network; AUTO or "" for any network of the plugin.
        kind: Name of the kind of the fabric's NICs.
    """
    if not nccl.has_plugin:
        return nccl.plugin_problem or "no network plugin of NCCL is installed"
    if not nccl.network:  # the plugin's file does not show the name of its network
        return ""
    if is_built_in(nccl.network):  # the plugin of `holmes lab`: it stands for any plugin
        return ""
    provides = f"{nccl.plugin} provides the network {nccl.network!r}"
    if net in ("", AUTO):
        if may_carry(nccl.network, kind):
            return ""
        return f"{provides}, which does not use NICs of kind {kind}"
    # request_name is "" if the plugin may change the name in its file when it starts.
    if not nccl.request_name or is_same_network(nccl.request_name, net):
        return ""
    return f"{provides}, not {net!r}"


def plugins_of(site: Site, fabrics: Iterable[str]) -> list[str]:
    """Return lines of the preflight: for each fabric with a plugin, how many of its nodes have the plugin.

    Args:
        site: Site that with_plugins() has returned. A node lacks the plugin if its port on the fabric
            has a reason in `no_verbs`.
        fabrics: Names of the fabrics of planned groups.
    """
    lines = []
    for name in dict.fromkeys(fabrics):
        net = site.fabric_by_name[name].net
        if not net or net == AUTO or is_built_in(net):
            continue
        ports = [port for node in site.nodes for port in node.ports if port.fabric == name]
        with_plugin = [port for port in ports if not port.no_verbs]
        lines.append(
            f"preflight: {name}: the plugin of NCCL's network {net!r} was found on {len(with_plugin)} of its "
            f"{len(ports)} nodes"
        )
    return lines


def without_plugin(site: Site) -> list[str]:
    """Return one line for each reason why nodes of the site lack the plugin of one of their fabrics.

    with_plugins() has written the reason into `no_verbs` of the node's port on the fabric.
    """
    nodes_of_reason: dict[str, list[str]] = {}
    for node in site.nodes:
        for port in node.ports:
            net = site.fabric_by_name[port.fabric].net
            if port.no_verbs and net and not is_built_in(net):
                reason = f"NCCL cannot use {port.name} for fabric {port.fabric!r}: {port.no_verbs}"
                nodes_of_reason.setdefault(reason, []).append(node.name)
    return [f"{_nodes(names)}: {reason}" for reason, names in nodes_of_reason.items()]


def _nodes(names: Sequence[str]) -> str:
    return f"{'nodes' if len(names) > 1 else 'node'} {some_of(names)}"
