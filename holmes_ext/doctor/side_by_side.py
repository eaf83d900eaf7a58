"""Compares the nodes of a cluster: NICs, rates, MTUs, GID indices, and versions of packages.

`holmes doctor --json` prints the results for a node, a NodeCheck. compare() takes those of several nodes
and returns findings about their differences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from holmes_ext.cluster.fabric import ETHERNET
from holmes_ext.cluster.nic import KINDS, Nic
from holmes_ext.cluster.node_report import NodeReport
from holmes_ext.cluster.resolve import rate_of_one_nic, resolve_site, slower_than_declared
from holmes_ext.cluster.spec import SiteSpec
from holmes_ext.doctor.finding import Finding, note, problem
from holmes_ext.doctor.in_use import mark_unused
from holmes_ext.doctor.no_file import check_without_file
from holmes_ext.doctor.same_fabric import check_fabric
from holmes_ext.document import Table, load_json
from holmes_ext.errors import HolmesError
from holmes_ext.units import format_rate
from holmes_ext.words import grouped, some_of

VERSION = 1
_MOST_NAMED = 4  # nodes that a finding lists
_ADVICE = "write it with `holmes doctor --json`"


@dataclass(frozen=True)
class NodeCheck:
    """Results of `holmes doctor` on one node."""

    node: NodeReport  # with its NICs
    versions: dict[str, str]  # package -> version; it must be the same on all nodes
    settings: dict[str, str]  # environment variables that must be the same on all nodes
    findings: tuple[Finding, ...]
    nccl: tuple[str, ...] = ()  # lines about the settings that holmes would pass to NCCL

    def to_dict(self) -> dict[str, Any]:
        """Convert the results of a node's checks into the document for --json."""
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def from_table(cls, table: Table) -> NodeCheck:
        """Parse the results of a node's checks; raise HolmesError (with file and key) if they are bad."""
        try:
            table.version(VERSION)
            return table.into(cls)
        except HolmesError as error:
            raise HolmesError(f"{error}; {_ADVICE}") from None


def load_check(path: str | Path) -> NodeCheck:
    """Return the NodeCheck in a file that `holmes doctor --json` wrote; raise HolmesError if it is bad."""
    return NodeCheck.from_table(load_json(path, _ADVICE))


def compare(checks: Sequence[NodeCheck], spec: SiteSpec | None) -> list[Finding]:
    """Return findings about differences between nodes.

    Args:
        checks: Results of each node.
        spec: Content of cluster.toml. The nodes of each cluster are compared, with the NICs that the
            job uses. If it is None, nodes with the same kind of fast NIC are compared.
    """
    findings: list[Finding] = []
    marked = [_with_unused_nics_marked(check, spec) for check in checks]
    # Nodes of one cluster should have equal NICs, and all nodes equal versions and variables.
    for title, members in _comparable_nodes(marked, spec):
        for fact in _FACTS:
            values = {check.node.name: fact.value_of(check) for check in members}
            # fact.make is problem() or note().
            findings += _finding_if_different(
                fact.make, title, values, what=fact.what, why=fact.why, mend=fact.mend
            )
    for name in sorted({name for check in checks for name in check.versions}):
        values = {check.node.name: check.versions.get(name, "none") for check in checks}
        why = "ranks with different versions have different patches and messages: they hang at start-up"
        mend = f"install one version of {name} everywhere"
        findings += _finding_if_different(
            problem, "all nodes", values, what=f"version of {name}", why=why, mend=mend
        )

    # `settings` are environment variables.
    for name in sorted({name for check in checks for name in check.settings}):
        values = {check.node.name: check.settings.get(name, "unset") for check in checks}
        why = "groups hang when only some ranks set a NIC or network"
        mend = f"set {name} alike on all nodes, or nowhere"
        findings += _finding_if_different(note, "all nodes", values, what=name, why=why, mend=mend)
    if spec is not None:
        findings += _check_fabrics(marked, spec)
        findings += _check_spec(checks, spec)
    else:
        # One node may be a laptop. Results of several nodes are compared because a job is to run on them.
        is_job = len(checks) > 1
        findings += check_without_file([check.node for check in checks], is_job)
    return findings


def _with_unused_nics_marked(check: NodeCheck, spec: SiteSpec | None) -> NodeCheck:
    """Return a node's results, with a reason in `skipped` for NICs that cluster.toml leaves out."""
    nics = mark_unused(check.node.nics, check.node.name, spec)
    return replace(check, node=replace(check.node, nics=nics))


def _check_fabrics(checks: Sequence[NodeCheck], spec: SiteSpec) -> Iterator[Finding]:
    """Yield findings about nodes that are on one fabric in cluster.toml, and whose NICs are not.

    Args:
        checks: Results of each node.
        spec: Content of cluster.toml. Several clusters may share a fabric.
    """
    for fabric, clusters in grouped((cluster.fabric, cluster) for cluster in spec.clusters).items():
        if fabric == ETHERNET:
            continue
        nodes = {node for cluster in clusters for node in cluster.nodes}
        members = [check for check in checks if spec.known_as(check.node.name) in nodes]
        names = ", ".join(cluster.name for cluster in clusters)
        title = f"cluster {names}" if len(clusters) == 1 else f"clusters {names}"
        yield from check_fabric(title, {check.node.name: _fast_nics(check) for check in members})


def _comparable_nodes(
    checks: Sequence[NodeCheck], spec: SiteSpec | None
) -> list[tuple[str, list[NodeCheck]]]:
    """Group the nodes that should be equal; return each group with a title for findings.

    Args:
        checks: Results of each node.
        spec: Content of cluster.toml: the nodes of a cluster form a group. If it is None, the nodes
            with the same kind of fast NIC do.
    """
    groups = []
    if spec is not None:
        for cluster in spec.clusters:
            members = [check for check in checks if spec.known_as(check.node.name) in cluster.nodes]
            groups.append((f"cluster {cluster.name}", members))
        return groups
    for kind, nic_kind in KINDS.items():
        if nic_kind.layer:  # kinds that can do RDMA
            members = [
                check for check in checks if any(nic.kind == kind for nic in _fast_nics(check))
            ]
            groups.append((f"nodes with {kind}", members))
    return groups


def part_for(spec: SiteSpec, checks: Sequence[NodeCheck]) -> SiteSpec:
    """Return the part of cluster.toml about the nodes that were checked; all of it if it has none of them.

    Args:
        spec: Content of cluster.toml.
        checks: Results of each node.
    """
    names = [spec.known_as(check.node.name) for check in checks]
    checked_nodes = {name for name in names if name}
    return spec.only(checked_nodes) if checked_nodes else spec


def kind_of(node: str, spec: SiteSpec | None) -> str:
    """Return the kind of the fast NICs that cluster.toml gives a node; "" if it does not have the node.

    Args:
        node: Host name of the node.
        spec: Content of cluster.toml; None if there is none.
    """
    if spec is None:
        return ""
    cluster = spec.cluster_by_node.get(spec.known_as(node))
    return cluster.kind if cluster else ""


def _fast_nics(check: NodeCheck) -> list[Nic]:
    """Return the usable InfiniBand and RoCE NICs of a node."""
    return [nic for nic in check.node.nics if nic.fast and nic.usable]


class _Fact(NamedTuple):
    """Property of a node that should be the same on all nodes of a cluster."""

    what: str
    value_of: Callable[[NodeCheck], str]  # returns the value on a node, in words
    why: str  # effect of a difference
    mend: str  # advice for the user
    make: Callable[..., Finding] = note  # makes the finding


_FACTS = (
    _Fact(
        what="number of fast NICs that are up",
        value_of=lambda check: str(len(_fast_nics(check))),
        why="the cluster is as fast as the node with the fewest",
        mend="bring the missing NIC up, or exclude its twin on the others",
    ),
    _Fact(
        what="rate of the fast NICs",
        value_of=lambda check: " + ".join(format_rate(nic.rate_bps) for nic in _fast_nics(check)),
        why="a ring is as fast as its slowest link",
        mend="check cable and switch port of the slow node",
    ),
    _Fact(
        what="MTU of the fast NICs",
        # Each MTU once: a node with fewer NICs is another fact.
        value_of=lambda check: " and ".join(
            sorted({str(nic.mtu) for nic in _fast_nics(check) if nic.mtu})
        ),
        why="large messages to the smaller MTU are dropped: jobs hang after the first small ones",
        mend="ip link set DEVICE mtu BYTES, the same everywhere",
        make=problem,
    ),
    _Fact(
        what="network of NCCL's plugin",
        value_of=lambda check: check.node.nccl.network if check.node.nccl.has_plugin else "",
        why="groups with a node that lacks the plugin go over Ethernet, and two networks cannot connect",
        mend="install the same plugin on all nodes (libnccl-net*.so on LD_LIBRARY_PATH, NCCL_NET_PLUGIN)",
    ),
    _Fact(
        what="names of the fast NICs",
        value_of=lambda check: " ".join(nic.name for nic in _fast_nics(check)),
        why="holmes handles this; an NCCL_IB_HCA of your own would fit only some nodes (NVIDIA/nccl#1277)",
        mend="leave NCCL_IB_HCA to holmes",
    ),
    _Fact(
        what="index of the RoCE v2 GID",
        value_of=lambda check: " ".join(
            str(nic.roce_v2_index) for nic in _fast_nics(check) if nic.kind == "roce"
        ),
        why="holmes sets each node's own; an NCCL_IB_GID_INDEX of your own would fit some nodes only",
        mend="leave NCCL_IB_GID_INDEX to holmes",
    ),
)


def _finding_if_different(
    make: Callable[..., Finding],
    title: str,
    values: dict[str, str],
    what: str,
    why: str,
    mend: str,
) -> Iterator[Finding]:
    """Compare a property of several nodes, and yield a finding if it differs.

    Args:
        make: Makes the finding: problem or note.
        title: The nodes, in words.
        values: Node -> its value.
        what: The property, in words.
        why: Effect of a difference.
        mend: Advice for the user.
    """
    counts = Counter(values.values()).most_common()
    if len(counts) <= 1:
        return
    most_common_value, _ = counts[0]
    exceptions = [
        f"{node} {value or 'none'}" for node, value in values.items() if value != most_common_value
    ]
    yield make(
        title,
        what=f"{what}: {most_common_value or 'none'} on most, but {some_of(exceptions, _MOST_NAMED)}",
        why=why,
        mend=mend,
    )


def _check_spec(checks: Sequence[NodeCheck], spec: SiteSpec) -> Iterator[Finding]:
    """Yield findings about differences between nodes and their description in cluster.toml.

    Findings are about nodes of the file that were not checked, checked nodes that are not in the file,
    reports that contradict the file, and rates that differ from those in the file.

    Args:
        checks: Results of each node.
        spec: Content of cluster.toml.
    """
    checked_nodes = {spec.known_as(check.node.name) for check in checks}
    absent = [node for node in spec.cluster_by_node if node not in checked_nodes]
    if absent:
        yield note(
            spec.source,
            what=f"{len(absent)} of its nodes {'was' if len(absent) == 1 else 'were'} not looked at: "
            f"{some_of(absent, _MOST_NAMED)}",
            why="differences on those nodes are not detected",
            mend="run `holmes doctor` there too, and give this one all their --json files",
        )
    for check in checks:
        cluster = spec.cluster_by_node.get(spec.known_as(check.node.name))
        if cluster is None and len(checks) == 1:  # a laptop, say
            yield note(
                check.node.name,
                what=f"this machine is in no cluster of {spec.source}",
                why="its NICs say nothing about the job",
                mend="run `holmes doctor` on the nodes too",
            )
            continue
        # No job has started processes, so the number of processes in the file cannot be checked. The
        # node is given that number.
        processes = cluster.processes if cluster else 1
        node = replace(check.node, processes=processes)
        try:
            site = resolve_site([node], spec)
        except HolmesError as error:
            yield problem(
                node.name,
                what=str(error),
                why="a job with this file ends at start-up with the same line",
                mend="fix the node or the file",
            )
            continue
        for _, text in slower_than_declared(site, [node]):
            yield problem(
                node.name,
                what=text,
                why="the plan counts on the file's rate: groups on this NIC take longer",
                mend="check cable, switch port and PCIe slot, or write the lower rate into the file",
            )
        # The file may give the rate of one NIC, where it needs that of all fast NICs of a node.
        for text in rate_of_one_nic(site, node):
            yield note(
                node.name,
                what=text,
                why="a rate is of a whole node: plans count on less than there is",
                mend="write the sum of the node's fast NICs as the cluster's rate, or exclude those not "
                "for training",
            )
