"""Report of a node about itself to the other nodes of a job, and remarks about reports."""

from __future__ import annotations

import os
import shlex
import socket
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holmes_ext.cluster.addresses import egress_interface, interface_addresses
from holmes_ext.cluster.fabric import ETHERNET
from holmes_ext.cluster.nccl import NcclOfNode, network_name
from holmes_ext.cluster.net_plugin import may_carry, nccl_of_node
from holmes_ext.cluster.nic import KINDS, Nic
from holmes_ext.cluster.sysfs.node import read_nics
from holmes_ext.document import Table
from holmes_ext.words import some_of

if TYPE_CHECKING:
    from holmes_ext.cluster.fabric import Fabric
    from holmes_ext.cluster.site import Node, Port, Site


@dataclass(frozen=True)
class NodeReport:
    """Name, NICs and NCCL settings of one node."""

    name: str  # host name
    identity: str  # differs between any two nodes, even if they have the same name
    ethernet: str  # network device towards the master
    nics: tuple[Nic, ...]
    processes: int = 0  # number of the job's processes on the node, 0 if unknown
    nccl: NcclOfNode = NcclOfNode()

    def to_dict(self) -> dict[str, Any]:
        """Return the report as values that JSON can hold.

        NIC fields with default values are left out: rank 0 reads the reports of thousands of nodes.
        """
        return {**asdict(self), "nics": [nic.to_dict() for nic in self.nics]}

    @classmethod
    def from_dict(cls, document: dict[str, Any], processes: int) -> NodeReport:
        """Return the report that `to_dict()` has converted to a dict.

        Args:
            document: The report as values that JSON can hold.
            processes: Number of the job's processes on the node.

        Raises:
            HolmesError: a key is missing, unknown, or has a value that is not allowed.
        """
        report = Table(document, f"node {document.get('name')}").into(cls)
        return replace(report, processes=processes)


def node_name(environ: Mapping[str, str]) -> str:
    """Return the name of this node: HOLMES_NODE, or else the host name."""
    return environ.get("HOLMES_NODE") or socket.gethostname()


def sysfs_root(environ: Mapping[str, str]) -> str:
    """Return the root of the /sys tree that describes the NICs.

    The default is /sys. HOLMES_SYSFS names another tree: that of emulated NICs (`holmes lab`
    provides it, to try holmes on a single machine), or a tree that was captured on another machine.
    """
    return environ.get("HOLMES_SYSFS") or "/sys"


def lab_scale(environ: Mapping[str, str]) -> float:
    """Return the part of its rate that an emulated NIC carries, such as 0.01; 1 for real NICs.

    `holmes lab` emulates clusters on one machine, with slower links. Its option --scale sets the
    factor.
    """
    return float(environ.get("HOLMES_LAB_SCALE") or 1)


def lab_remark(environ: Mapping[str, str]) -> str:
    """Return a remark that the NICs are emulated, and how slow they are; "" if the NICs are real.

    `holmes lab` emulates clusters on one machine. Commands that run in it and show NICs print the
    remark.
    """
    if not environ.get("HOLMES_LAB_NODE"):
        return ""
    remark = "NICs are emulated (holmes lab)"
    scale = lab_scale(environ)
    if scale != 1:
        remark += f"; they carry {scale:g} x the rates that they announce (--scale)"
    return remark


def node_identity() -> str:
    """Return a text that differs between any two nodes, even if they have the same name.

    The boot id and the network namespace together differ between hosts, pods, and nodes that
    `holmes lab` emulates on one machine.
    """
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    network_namespace = os.stat("/proc/self/ns/net").st_ino
    return f"{boot_id}/{network_namespace}"


def report_node(environ: Mapping[str, str], master_addr: str) -> NodeReport:
    """Return the report of this node.

    Args:
        environ: Environment of the job. HOLMES_SYSFS names a tree to read NICs from instead of
            /sys.
        master_addr: Host name or IP address of the job's master.

    Raises:
        HolmesError: the NICs or addresses cannot be read, or there is no route to the master.
    """
    nics = read_nics(sysfs_root(environ), interface_addresses())
    return NodeReport(
        name=node_name(environ),
        identity=node_identity(),
        ethernet=egress_interface(master_addr),
        nics=nics,
        nccl=nccl_of_node(environ, nics),
    )


def nccl_remarks(site: Site, reports: Iterable[NodeReport]) -> list[str]:
    """Return one sentence for each way in which NCCL does not use the site's NICs as expected.

    Args:
        site: Site that was resolved from the reports.
        reports: Reports in the order of the site's nodes.
    """
    nodes_of_remark: dict[str, list[str]] = defaultdict(list)
    # Nodes with the same remark share a sentence.
    for node, report in zip(site.nodes, reports):
        remarks = [_remark_on_missing_plugin(node, report)]
        # A node with Ethernet alone. On others, a plugin is for the fast fabrics, which
        # _nccl_remarks_of_port() checks.
        if len(node.ports) == 1:
            remarks.append(_remark_on_plugin(site.fabric_by_name[ETHERNET], report))
        for port in node.ports:
            remarks += _nccl_remarks_of_port(port, site.fabric_by_name[port.fabric], report)
        for remark in filter(None, remarks):
            nodes_of_remark[remark].append(node.name)
    sentences = []
    for remark, names in nodes_of_remark.items():
        subject = "nodes" if len(names) > 1 else "node"
        sentences.append(f"{subject} {some_of(names)}: {remark}")
    return sentences


def _remark_on_missing_plugin(node: Node, report: NodeReport) -> str:
    """Return a sentence about NICs of a node that need a network plugin of NCCL, "" if it has the plugin.

    The node lacks it if it has no plugin, or a plugin for other NICs, or if NCCL cannot load it.

    Args:
        node: The node.
        report: Report of the node.
    """
    used = {name for port in node.ports for name in port.hcas}
    names = []
    titles = []
    for nic in report.nics:
        kind = nic.plugin_kind or nic.kind
        # All machines of Google Cloud have gVNIC, and few have a plugin for it.
        needs_plugin = KINDS[kind].plugin and not KINDS[kind].verbs and kind != "gvnic"
        if not needs_plugin or not nic.usable or nic.name in used:
            continue
        if report.nccl.has_plugin and may_carry(report.nccl.network, kind):
            continue
        names.append(nic.name)
        titles.append(KINDS[kind].title)
    if not names:
        return ""
    problem = report.nccl.plugin_problem or "none is installed"
    if report.nccl.has_plugin:
        problem = f"{report.nccl.plugin} is for the network {report.nccl.network!r}"
    nics = f"{some_of(names)} ({some_of(dict.fromkeys(titles))})"
    return (
        f"NCCL needs a network plugin for {nics}, and {problem}; groups of the node go over its other "
        "networks"
    )


def _remark_on_plugin(fabric: Fabric, report: NodeReport) -> str:
    """Return a sentence about an installed network plugin that a fabric's groups bypass, or "".

    Args:
        fabric: The fabric. Its `net` names NCCL's network if a plugin provides it.
        report: Report of a node on the fabric.
    """
    if not report.nccl.plugin or fabric.net:
        return ""
    network = report.nccl.request_name
    built_in = network_name(fabric)
    named = f" (network {network!r})" if network else ""
    if fabric.name == ETHERNET:
        advice = 'give its NICs a cluster with kind = "plugin" in cluster.toml'
        if network:
            advice = f"export NCCL_NET={shlex.quote(network)} on all nodes, or {advice}"
    else:
        advice = f'write net = "{network or "NAME"}" in cluster.toml'
        if not network:
            advice += ' (NCCL_DEBUG=INFO prints "Using network NAME"), or "auto"'
    return (
        f'NCCL would load {report.nccl.plugin}{named}, but "{built_in}" is requested on fabric '
        f"{fabric.name!r}; to use the plugin, {advice}"
    )


def _nccl_remarks_of_port(port: Port, fabric: Fabric, report: NodeReport) -> list[str]:
    """Return one sentence for each way in which NCCL does not use a node's port as expected.

    Args:
        port: The node's connection to a fabric, over one or several NICs.
        fabric: The fabric. Its `net` names the NCCL plugin that the user wants there, "" for none.
        report: Report of the node.
    """
    remarks = []
    # GIDs matter only if NCCL uses the HCAs of the port (verbs).
    roce_nics = [nic for nic in report.nics if nic.name in port.hcas and nic.kind == "roce"]
    if port.no_verbs:
        remarks.append(
            f"NCCL cannot use {some_of(port.hcas)} for fabric {port.fabric!r}: {port.no_verbs}; "
            "its groups there go over sockets"
        )
    elif len({nic.roce_v2_index for nic in roce_nics}) > 1:
        indices = ", ".join(f"{nic.name} {nic.roce_v2_index}" for nic in roce_nics)
        remarks.append(
            f"the RoCE v2 GIDs of its ports stand at different indices ({indices}): "
            "NCCL finds them by itself from 2.21 on"
        )
    # NCCL loads a network plugin that it finds installed (nccl.plugin). On a fast fabric, holmes
    # makes its groups use NCCL's built-in network "IB" instead, unless cluster.toml names a plugin.
    if fabric.name != ETHERNET:
        remarks.append(_remark_on_plugin(fabric, report))
    return remarks
