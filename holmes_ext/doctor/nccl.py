"""What holmes would hand to NCCL on a node, and what the installed NCCL (2.18 to 2.30 read) makes of it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping
from dataclasses import replace

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from holmes_ext.cluster.fabric import ETHERNET
from holmes_ext.cluster.nccl import SHARED, NcclOfNode, file_settings, network_name, variables_of
from holmes_ext.cluster.node_report import NodeReport, nccl_remarks
from holmes_ext.cluster.resolve import resolve_site
from holmes_ext.cluster.site import Site
from holmes_ext.cluster.spec import SiteSpec
from holmes_ext.doctor.finding import Finding, note, problem
from holmes_ext.errors import HolmesError

#: Versions that cannot load a plugin of others again once their last communicator is closed ("Failed to
#: initialize any NET plugin"; run with 2.29.7), and the variable that keeps it loaded.
FORGETS_PLUGINS, KEEP_PLUGIN = SpecifierSet(">=2.29,<2.30"), "NCCL_NET_PLUGIN_REF_COUNT"
#: Versions that free twice what a plugin of version 10 or older was given, where it finds no device and
#: NCCL's own "IB" has none either (src/plugin/net.cc; run with 2.28.9).
FREES_TWICE = SpecifierSet(">=2.28,<2.29")
#: First and last version whose source was read.
READ = (Version("2.18"), Version("2.31.dev0"))


def installed_nccl() -> tuple[str, Version | None]:
    """(distribution, version) of the NCCL that pip's torch loads; ("", None): torch has its own, or none."""
    for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11"):
        try:
            return name, Version(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
    return "", None


def check_nccl(nccl_of_node: NcclOfNode, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Findings on NCCL's own files and plugins; NICs and variables have theirs elsewhere."""
    if nccl_of_node.forced_net:
        yield problem(
            nccl_of_node.forced_in,
            f"sets NCCL_NET={nccl_of_node.forced_net}",
            "NCCL reads the file itself and gives this network to every group; holmes ends a job "
            "one of whose groups is planned over another",
            "take the line out of the file",
        )
    for name, (value, file) in file_settings(environ).items():
        if name == SHARED and value != "0":
            yield problem(
                file,
                f"sets {name}={value}",
                "NCCL refuses every group that is split off for a network of"
                " its own (ncclInvalidUsage)",
                "take the line out of the file",
            )
        if name in ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX"):
            yield note(
                file,
                f"sets {name}={value}",
                "holmes keeps your setting",
                "take the line out of the file unless it is meant so",
            )
    if nccl_of_node.plugin:
        yield note(
            nccl_of_node.plugin,
            "NCCL would load this network plugin",
            'holmes asks for "IB" and "Socket" by name, which bypasses it',
            'to use it give its fabric a net = "NAME" in cluster.toml (NCCL_DEBUG=INFO tells: '
            'Using network NAME), or net = "auto"; a SHARP (CollNet) of the plugin is then used '
            "again, too",
        )
        version = installed_nccl()[1]
        if (
            version is not None
            and version in FORGETS_PLUGINS
            and environ.get(KEEP_PLUGIN, "0") == "0"
        ):
            yield problem(
                nccl_of_node.plugin,
                f"NCCL {version} cannot load it again once its last communicator is closed",
                "a job that ends its groups and makes new ones fails: Failed to initialize any NET "
                "plugin",
                f"export {KEEP_PLUGIN}=1",
            )
        if version is not None and version in FREES_TWICE:
            yield note(
                nccl_of_node.plugin,
                f'NCCL {version} ends where it and "IB" find no device',
                'free(): double free, in a job without holmes or with net = "auto"',
                "export NCCL_NET_PLUGIN=none on nodes without RDMA, or take another NCCL",
            )


def handed_over(node: NodeReport, spec: SiteSpec | None, environ: Mapping[str, str]) -> list[str]:
    """Lines: variables, the network of the groups on each fabric, and what the installed NCCL makes of it."""
    try:
        site = _site(node, spec)
    except HolmesError as error:
        return [f"not known: {error}"]
    here, in_files, lines = site.nodes[0], file_settings(environ), []
    for name, value in variables_of(here).items():
        yours = environ.get(name) or in_files.get(name, ("",))[0]
        lines += [f"{name}={yours or value}" + " (yours)" * bool(yours)] if yours or value else []
    for port in here.ports:
        fabric = site.fabric_by_name[port.fabric]
        if port.fabric != ETHERNET and (not port.hcas or port.no_verbs or not port.usable):
            continue
        name = network_name(fabric)
        who = f"network {name!r}" if name else "NCCL chooses"
        lines.append(f"groups on {fabric.name} ({fabric.kind}): {who}")
    lines.append("groups inside the node: NCCL chooses (NVLink, PCIe, shared memory)")
    lines += [line.partition(": ")[2] for line in nccl_remarks(site, [node])]
    roce = any(
        site.fabric_by_name[port.fabric].kind == "roce" and not port.no_verbs for port in here.ports
    )
    return [
        *lines,
        *_by_version(roce and not any(line.startswith("NCCL_IB_GID_INDEX=") for line in lines)),
    ]


def _by_version(unset_index: bool) -> Iterator[str]:
    """unset_index: a RoCE node where NCCL_IB_GID_INDEX stays unset."""
    name, version = installed_nccl()
    if version is None:
        yield "no NCCL package is installed here: torch has its own, or is built for the CPU"
        return
    if version < Version("2.17"):
        yield f"{name} {version} cannot be given a network by name: it chooses one for each group itself"
    elif not READ[0] <= version < READ[1]:
        yield (
            f"{name} {version} is outside the versions that were checked (2.18 to 2.30): "
            "networks are passed to it by name"
        )
    else:
        yield (
            f"{name} {version} takes each group's network by name (case-insensitive), and fails a group "
            "whose network it does not find"
        )
    if version >= Version("2.31.dev0"):
        yield (
            f"{name} {version} has settings for each collective and TLS on sockets: holmes leaves "
            "both to you"
        )
    if unset_index and version < Version("2.21"):
        yield (
            f"{name} {version} takes GID 0, RoCE v1, where NCCL_IB_GID_INDEX is unset (2.21 and newer "
            "find the index)"
        )


def _site(node: NodeReport, spec: SiteSpec | None) -> Site:
    if spec is None:
        return resolve_site([replace(node, processes=1)], None)
    cluster = spec.owner.get(spec.known_as(node.name))
    if cluster is None:
        raise HolmesError(f"{node.name} is in no cluster of {spec.source}")
    return resolve_site([replace(node, processes=cluster.processes)], spec)
