"""Checks NCCL on a node: configuration files, plugins, version, and settings that holmes passes to it.

holmes gives each process group its network by name (net_name in the group's options), and selects
NICs by environment variables. This module finds contradictions to these settings.
"""

from __future__ import annotations

import importlib.metadata
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from holmes_ext.cluster.fabric import ETHERNET
from holmes_ext.cluster.nccl import (
    SHARED,
    FileSetting,
    NcclOfNode,
    file_settings,
    network_name,
    variables_of,
)
from holmes_ext.cluster.net_plugin import may_carry
from holmes_ext.cluster.nic import KINDS, Nic
from holmes_ext.cluster.node_report import NodeReport, nccl_remarks
from holmes_ext.cluster.resolve import resolve_site
from holmes_ext.cluster.site import Site
from holmes_ext.cluster.spec import SiteSpec
from holmes_ext.doctor.finding import Finding, note, problem
from holmes_ext.doctor.nccl_names import check_hca_names, check_socket_names
from holmes_ext.doctor.variables import check_gid_index
from holmes_ext.errors import HolmesError
from holmes_ext.words import grouped, some_of

#: Versions that cannot load a network plugin again after their last communicator was closed ("Failed to
#: initialize any NET plugin"; seen with 2.29.7).
FORGETS_PLUGINS = SpecifierSet(">=2.29,<2.30")
#: Variable that keeps the plugin loaded.
KEEP_PLUGIN = "NCCL_NET_PLUGIN_REF_COUNT"
#: Versions that free memory twice if a plugin of API version 10 or older finds no device and NCCL's "IB"
#: finds none either (src/plugin/net.cc; seen with 2.28.9).
FREES_TWICE = SpecifierSet(">=2.28,<2.29")
#: Kind of NIC -> how to get the network plugin of NCCL for it.
_PLUGIN_ADVICE = {
    "efa": "install aws-ofi-nccl (AWS's deep learning images have it in /opt/amazon/ofi-nccl), and add the "
    "folder of its libnccl-net*.so to LD_LIBRARY_PATH or its path to NCCL_NET_PLUGIN",
    "slingshot": "load the site's module of aws-ofi-nccl, or build it against HPE's libfabric (cxi), and "
    "add the folder of its libnccl-net*.so to LD_LIBRARY_PATH or its path to NCCL_NET_PLUGIN",
    "gvnic": "on A3 High and A3 Mega machines, install GPUDirect-TCPX or -TCPXO and add its lib64 folder to "
    "LD_LIBRARY_PATH; on other machines nothing is wrong",
}
_ANY_PLUGIN_ADVICE = (
    "install the plugin of the NIC's vendor, and add the folder of its libnccl-net*.so to LD_LIBRARY_PATH or "
    "its path to NCCL_NET_PLUGIN"
)
#: NICs that a finding names.
_MOST_NAMED = 4
#: Versions whose source was checked: from the first to before the second.
_FIRST_CHECKED = Version("2.18")
_FIRST_UNCHECKED = Version("2.31.dev0")
#: First version that lets a communicator choose its network by name.
_NAMES_NETWORKS = Version("2.17")
#: First version that finds the index of the RoCE v2 GID itself.
_FINDS_GID_INDEX = Version("2.21")


class InstalledNccl(NamedTuple):
    """NCCL package that the installed torch loads."""

    name: str  # of the package; "" if there is none
    version: Version | None


def installed_nccl() -> InstalledNccl:
    """Return the NCCL package that torch loads; an empty result if torch contains NCCL, or has none."""
    for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11"):
        try:
            return InstalledNccl(name, Version(importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return InstalledNccl("", None)


def check_nccl(
    nccl_of_node: NcclOfNode,
    environ: Mapping[str, str],
    nics: Sequence[Nic] = (),
    unused: Collection[str] = (),
) -> Iterator[Finding]:
    """Yield findings about the configuration files and network plugins of NCCL on a node.

    Args:
        nccl_of_node: NCCL's settings and libraries on the node.
        environ: Environment variables of the node.
        nics: The NICs of the node.
        unused: Names of the NICs that cluster.toml leaves out.
    """
    # NICs of a captured /sys belong to another machine, whose plugins are not known here. In
    # `holmes lab`, HOLMES_SYSFS names emulated NICs of this machine instead.
    is_captured = bool(environ.get("HOLMES_SYSFS")) and not environ.get("HOLMES_LAB_NODE")
    yield from _check_plugin_nics(nccl_of_node, nics, is_captured)
    yield from _check_iwarp(nics)
    if nccl_of_node.forced_net:
        yield problem(
            nccl_of_node.forced_in,
            what=f"sets NCCL_NET={nccl_of_node.forced_net}",
            why="NCCL reads the file itself and gives this network to every group; holmes ends a job "
            "one of whose groups is planned over another",
            mend="take the line out of the file",
        )
    for name, (value, file) in file_settings(environ).items():
        # SHARED is NCCL_COMM_SPLIT_SHARE_RESOURCES: a group that is split off shares its parent's network,
        # so NCCL refuses a group for which holmes names another network.
        if name == SHARED and value != "0":
            yield problem(
                file,
                what=f"sets {name}={value}",
                why="NCCL refuses every group that is split off for a network of"
                " its own (ncclInvalidUsage)",
                mend="take the line out of the file",
            )
        yield from _check_line_of_file(
            name, FileSetting(value, file), () if is_captured else nics, unused
        )
    if nccl_of_node.plugin:
        yield _note_on_plugin(nccl_of_node, nics)
        _, version = installed_nccl()
        # FORGETS_PLUGINS, FREES_TWICE: versions of NCCL with a bug in how they handle plugins. The first
        # bug does not occur if KEEP_PLUGIN (NCCL_NET_PLUGIN_REF_COUNT) keeps the plugin loaded.
        is_kept = environ.get(KEEP_PLUGIN, "0") != "0"
        if version is not None and version in FORGETS_PLUGINS and not is_kept:
            yield problem(
                nccl_of_node.plugin,
                what=f"NCCL {version} cannot load it again once its last communicator is closed",
                why="a job that ends its groups and makes new ones fails: Failed to initialize any NET "
                "plugin",
                mend=f"export {KEEP_PLUGIN}=1",
            )
        if version is not None and version in FREES_TWICE:
            yield note(
                nccl_of_node.plugin,
                what=f'NCCL {version} ends where it and "IB" find no device',
                why='free(): double free, in a job without holmes or with net = "auto"',
                mend="export NCCL_NET_PLUGIN=none on nodes without RDMA, or take another NCCL",
            )


#: Variables that select NICs. holmes sets them unless the user has.
_NIC_SELECTORS = ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX")


def _check_line_of_file(
    name: str, setting: FileSetting, nics: Sequence[Nic], unused: Collection[str]
) -> Iterator[Finding]:
    """Yield findings about one line of a configuration file of NCCL.

    Args:
        name: The variable that the line sets, as NCCL reads it: with blanks, if there are any before "=".
        setting: Its value, and the file.
        nics: The NICs of the node, () if they are not known.
        unused: Names of the NICs that cluster.toml leaves out.
    """
    value, file = setting
    meant = name.strip().removeprefix("export").strip()
    if meant != name and meant.startswith("NCCL_"):
        yield problem(
            file,
            what=f"line {name}={value!r:.80} sets a variable called {name!r:.40}",
            why="NCCL takes all that stands before the = for the name, so the line has no effect",
            mend=f"write {meant}={value.strip()}",
        )
    elif name.startswith("NCCL_") and value != value.strip():
        yield problem(
            file,
            what=f"the value of {name} is {value!r:.80}, with a blank or the end of a Windows line",
            why="NCCL takes the whole rest of the line for the value",
            mend=f"write {name}={value.strip()}",
        )
    elif name in _NIC_SELECTORS:
        problems = list(_problems_of_value(name, value, nics, unused)) if nics else []
        for finding in problems:
            remedy = "take the line out of the file: holmes sets the variable on each node"
            yield replace(finding, about=file, what=f"sets {name}: {finding.what}", mend=remedy)
        if not problems:
            yield note(
                file,
                what=f"sets {name}={value}",
                why="holmes keeps your setting",
                mend="take the line out of the file unless it is meant so",
            )
    elif name == "NCCL_IB_DISABLE" and value not in ("", "0"):
        verbs_nics = [nic.name for nic in nics if nic.fast and nic.usable and KINDS[nic.kind].verbs]
        if verbs_nics:
            yield problem(
                file,
                what=f"sets {name}={value}, though {some_of(verbs_nics, _MOST_NAMED)} can be used",
                why="every NCCL group goes over TCP sockets",
                mend="take the line out of the file",
            )


def _problems_of_value(
    name: str, value: str, nics: Sequence[Nic], unused: Collection[str]
) -> Iterator[Finding]:
    """Return the problems with the value of a variable that selects NICs.

    They are those that `holmes doctor` reports about the same value in the environment.

    Args:
        name: The variable, of _NIC_SELECTORS.
        value: Its value.
        nics: The NICs of the node.
        unused: Names of the NICs that cluster.toml leaves out.
    """
    if name == "NCCL_SOCKET_IFNAME":
        found = check_socket_names(value, nics)
    elif name == "NCCL_IB_HCA":
        found = check_hca_names(value, [nic for nic in nics if nic.fast], unused)
    else:
        found = check_gid_index(value, [nic for nic in nics if nic.kind == "roce" and nic.usable])
    return (finding for finding in found if finding.level == "problem")


def _note_on_plugin(nccl_of_node: NcclOfNode, nics: Sequence[Nic]) -> Finding:
    """Describe the network plugin that NCCL would load on a node, as a note.

    The note names the groups that use the plugin; if there are none, it says how to make groups use it.

    Args:
        nccl_of_node: NCCL's settings and libraries on the node.
        nics: The NICs of the node.
    """
    # `network` is the name in the plugin's file. A plugin may change that name when it starts; then
    # groups cannot request it, and `request_name` is "".
    network = nccl_of_node.request_name
    named = f" (network {network!r})" if network else ""
    what = f"NCCL would load this network plugin{named}"
    kinds = [nic.plugin_kind or nic.kind for nic in nics if nic.usable]
    users = [
        kind
        for kind in dict.fromkeys(kinds)
        if KINDS[kind].plugin and may_carry(nccl_of_node.network, kind)
    ]
    if users:
        return note(
            nccl_of_node.plugin,
            what=what,
            why=f"groups on a fabric of kind {' or '.join(users)} request this network by name, all others "
            '"IB" or "Socket"',
            mend="nothing to do; the plugin must be the same on all nodes of the fabric",
        )
    name = network or "NAME"
    find_name = "" if network else " (NCCL_DEBUG=INFO prints: Using network NAME)"
    return note(
        nccl_of_node.plugin,
        what=what,
        why='holmes requests "IB" and "Socket" by name, which bypasses it',
        mend=f'to use it, write net = "{name}"{find_name} into the cluster of its NICs in cluster.toml, with '
        f'kind = "plugin" if they are neither ib nor roce, or export NCCL_NET={shlex.quote(name)} on all '
        "nodes; a SHARP (CollNet) of the plugin is then used again, too",
    )


def _check_plugin_nics(
    nccl_of_node: NcclOfNode, nics: Sequence[Nic], is_captured: bool
) -> Iterator[Finding]:
    """Yield a finding for each kind of NIC that needs a network plugin of NCCL, if the node lacks it.

    Args:
        nccl_of_node: NCCL's settings and libraries on the node.
        nics: The NICs of the node.
        is_captured: Whether the NICs are those of another machine, from a captured /sys.
    """
    nics_of_kind = grouped((nic.plugin_kind or nic.kind, nic) for nic in nics if nic.usable)
    has_verbs = any(KINDS[kind].verbs for kind in nics_of_kind)
    for kind, group in nics_of_kind.items():
        # Only NICs that NCCL uses by a plugin alone are checked: `verbs` are NICs of its own network "IB".
        if KINDS[kind].verbs or not KINDS[kind].plugin:
            continue
        # Machines of Google Cloud with RoCE have gVNIC for all but training.
        if kind == "gvnic" and has_verbs:
            continue
        reason = nccl_of_node.plugin_problem or "no network plugin of NCCL is installed"
        if nccl_of_node.has_plugin:
            if may_carry(nccl_of_node.network, kind):
                continue
            reason = (
                f"{nccl_of_node.plugin} provides {nccl_of_node.network!r}, which does not use them"
            )
        advice = _PLUGIN_ADVICE.get(kind, _ANY_PLUGIN_ADVICE)
        if is_captured:
            advice = f"run `holmes doctor` on the node itself; if it says the same there, {advice}"
        # The NICs of every virtual machine of Google Cloud are gVNIC; few machines have the plugin.
        make = note if kind == "gvnic" or is_captured else problem
        yield make(
            some_of(nic.name for nic in group),
            what=f"{KINDS[kind].title}: NCCL needs a network plugin for these NICs, and {reason}",
            why="NCCL groups of this node go over its other networks: TCP sockets where it has no InfiniBand "
            "or RoCE",
            mend=advice,
        )


def _check_iwarp(nics: Sequence[Nic]) -> Iterator[Finding]:
    """Yield a note about iWARP ports, which NCCL finds and cannot use."""
    names = [nic.name for nic in nics if nic.kind == "iwarp"]
    if not names:
        return
    devices = ",".join(name.partition(":")[0] for name in names)
    yield note(
        some_of(names),
        what='iWARP: NCCL lists these ports as devices of its "IB" network and cannot connect over them',
        why="NCCL connects queue pairs itself (ibv_modify_qp), and iWARP needs librdmacm for that; holmes "
        "requests sockets for these NICs",
        mend=f"nothing to do under holmes; for a job without it: export NCCL_IB_HCA=^{devices}, or switch "
        "the NIC to RoCE v2 if it can (irdma: devlink's enable_roce, or the module option roce_ena=1)",
    )


def handed_over(node: NodeReport, spec: SiteSpec | None, environ: Mapping[str, str]) -> list[str]:
    """Describe the settings that holmes would hand over to NCCL on a node, as lines for the user.

    The lines are NCCL's environment variables (NCCL_SOCKET_IFNAME="=eth0"), and the network of the
    process groups on each fabric. Further lines describe the effect of these settings in the installed
    version of NCCL.

    Args:
        node: The node and its NICs.
        spec: Content of cluster.toml; None if there is none.
        environ: Environment variables. They take precedence over holmes.
    """
    try:
        site = _site_of_one_node(node, spec)
    except HolmesError as error:
        return [f"not known: {error}"]
    site_node = site.nodes[0]
    in_files = file_settings(environ)  # variable -> its value in NCCL's configuration files
    no_setting = FileSetting("", "")
    lines = []

    # A value that the user has set counts, in the environment or in one of these files.
    for name, value in variables_of(site_node).items():
        users_value = environ.get(name) or in_files.get(name, no_setting).value
        if users_value:
            lines.append(f"{name}={_quoted(users_value)} (yours)")
        elif value:
            lines.append(f"{name}={_quoted(value)}")
    for port in site_node.ports:
        fabric = site.fabric_by_name[port.fabric]
        if port.fabric != ETHERNET and (not port.hcas or port.no_verbs or not port.usable):
            continue  # NCCL cannot use the NICs of this fabric, so its groups go over Ethernet
        network = network_name(fabric)  # NCCL's network, such as "IB" or "Socket"; "" for any
        choice = f"network {network!r}" if network else "NCCL chooses"
        lines.append(f"groups on {fabric.name} ({fabric.kind}): {choice}")
    lines.append("groups inside the node: NCCL chooses (NVLink, PCIe, shared memory)")

    # A remark begins with "node NAME: ". That is not needed for a single node.
    lines += [line.partition(": ")[2] for line in nccl_remarks(site, [node])]
    has_roce = any(
        site.fabric_by_name[port.fabric].kind == "roce" and not port.no_verbs
        for port in site_node.ports
    )
    is_gid_index_set = any(line.startswith("NCCL_IB_GID_INDEX=") for line in lines)

    # Without a GID index, NCCL must find that of each RoCE port. Only newer versions do.
    lines += _lines_on_version(needs_gid_index=has_roce and not is_gid_index_set)
    return lines


def _quoted(value: str) -> str:
    """Format the value of an NCCL variable for messages, in quotes if it starts with "=".

    NCCL takes the names after "=" as whole names, not as prefixes. Without quotes, "NCCL_IB_HCA==mlx5_0"
    would look like a misprint.
    """
    return f'"{value}"' if value.startswith("=") else value


def _lines_on_version(needs_gid_index: bool) -> Iterator[str]:
    """Yield lines about how the installed NCCL handles the settings of holmes.

    Args:
        needs_gid_index: Whether the node has RoCE NICs and NCCL_IB_GID_INDEX is not set.
    """
    name, version = installed_nccl()
    if version is None:
        yield "no NCCL package is installed here: torch has its own, or is built for the CPU"
        return
    if version < _NAMES_NETWORKS:
        yield f"{name} {version} cannot be given a network by name: it chooses one for each group itself"
    elif not _FIRST_CHECKED <= version < _FIRST_UNCHECKED:
        yield (
            f"{name} {version} is outside the versions that were checked (2.18 to 2.30): "
            "networks are passed to it by name"
        )
    else:
        yield (
            f"{name} {version} takes each group's network by name (case-insensitive), and fails a group "
            "whose network it does not find"
        )
    if version >= _FIRST_UNCHECKED:
        yield (
            f"{name} {version} has settings for each collective and TLS on sockets: holmes leaves "
            "both to you"
        )
    if needs_gid_index and version < _FINDS_GID_INDEX:
        yield (
            f"{name} {version} takes GID 0, RoCE v1, where NCCL_IB_GID_INDEX is unset (2.21 and newer "
            "find the index)"
        )


def _site_of_one_node(node: NodeReport, spec: SiteSpec | None) -> Site:
    """Return the site that consists of one node.

    Args:
        node: Report of the node.
        spec: Content of cluster.toml; None if there is none.

    Raises:
        HolmesError: cluster.toml does not have the node, or contradicts its report.
    """
    if spec is None:
        # The number of processes is unknown without a cluster.toml. The networks of the node do not
        # depend on it, so 1 is assumed.
        return resolve_site([replace(node, processes=1)], None)
    cluster = spec.cluster_by_node.get(spec.known_as(node.name))
    if cluster is None:
        raise HolmesError(f"{node.name} is in no cluster of {spec.source}")
    return resolve_site([replace(node, processes=cluster.processes)], spec)
