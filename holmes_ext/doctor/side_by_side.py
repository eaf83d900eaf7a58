"""What shows when a cluster's nodes stand side by side: NICs, rates, MTUs, GID indices, versions.

A NodeCheck is what `holmes doctor --json` prints on one node; compare() takes those of several.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from holmes_ext.cluster.nic import KINDS, Nic
from holmes_ext.cluster.node_report import NodeReport
from holmes_ext.cluster.resolve import rate_of_one_nic, resolve_site, slower_than_declared
from holmes_ext.cluster.spec import SiteSpec
from holmes_ext.doctor.finding import Finding, note, problem
from holmes_ext.document import Table, load_json
from holmes_ext.errors import HolmesError
from holmes_ext.units import format_rate
from holmes_ext.words import some_of

VERSION = 1
_ADVICE = "write it with `holmes doctor --json`"


@dataclass(frozen=True)
class NodeCheck:
    """One node: its NICs, versions that must be alike ("torch" -> "2.13.0"), variables, its findings, and
    lines on what NCCL would be given."""

    node: NodeReport
    versions: dict[str, str]
    settings: dict[str, str]
    findings: tuple[Finding, ...]
    nccl: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def from_table(cls, table: Table) -> NodeCheck:
        """HolmesError names the table's source and key."""
        try:
            table.version(VERSION)
            return table.into(cls)
        except HolmesError as error:
            raise HolmesError(f"{error}; {_ADVICE}") from None


def load_check(path: str | Path) -> NodeCheck:
    """The NodeCheck in a file that `holmes doctor --json > FILE` wrote; HolmesError names the file."""
    return NodeCheck.from_table(load_json(path, _ADVICE))


def compare(checks: Sequence[NodeCheck], spec: SiteSpec | None) -> list[Finding]:
    """Findings on what differs between nodes of a cluster (with `spec`), or with a kind of NIC (without)."""
    findings: list[Finding] = []
    for title, members in _clusters(checks, spec):
        for what, fact, why, mend in _FACTS:
            make = problem if what.startswith("MTU") else note
            findings += _differing(
                make, title, {check.node.name: fact(check) for check in members}, what, why, mend
            )
    for name in sorted({name for check in checks for name in check.versions}):
        values = {check.node.name: check.versions.get(name, "none") for check in checks}
        why = "ranks with different versions have different patches and messages: they hang at start-up"
        mend = f"install one version of {name} everywhere"
        findings += _differing(problem, "all nodes", values, f"version of {name}", why, mend)
    for name in sorted({name for check in checks for name in check.settings}):
        values = {check.node.name: check.settings.get(name, "unset") for check in checks}
        why = "groups hang when only some ranks set a NIC or network"
        mend = f"set {name} alike on all nodes, or nowhere"
        findings += _differing(note, "all nodes", values, name, why, mend)
    return findings if spec is None else [*findings, *_check_spec(checks, spec)]


def _clusters(
    checks: Sequence[NodeCheck], spec: SiteSpec | None
) -> list[tuple[str, list[NodeCheck]]]:
    if spec is None:
        return [
            (
                f"nodes with {kind}",
                [check for check in checks if any(nic.kind == kind for nic in _fast(check))],
            )
            for kind, about in KINDS.items()
            if about.layer
        ]
    return [
        (
            f"cluster {cluster.name}",
            [c for c in checks if spec.known_as(c.node.name) in cluster.nodes],
        )
        for cluster in spec.clusters
    ]


def part_for(spec: SiteSpec, checks: Sequence[NodeCheck]) -> SiteSpec:
    """`spec` as far as the nodes go that were looked at; all of it where it knows none of them."""
    known = set(filter(None, (spec.known_as(check.node.name) for check in checks)))
    return spec.only(known) if known else spec


def kind_of(node: str, spec: SiteSpec | None) -> str:
    """Of the fast NICs that cluster.toml gives the node; "" where it says nothing of it."""
    cluster = spec.owner.get(spec.known_as(node)) if spec else None
    return cluster.kind if cluster else ""


def _fast(check: NodeCheck) -> list[Nic]:
    return [nic for nic in check.node.nics if nic.fast and nic.usable]


#: what, its value on a node, why it matters, how to mend it; of the fast NICs.
_FACTS: tuple[tuple[str, Callable[[NodeCheck], str], str, str], ...] = (
    (
        "number of fast NICs that are up",
        lambda check: str(len(_fast(check))),
        "the cluster is as fast as the node with the fewest",
        "bring the missing NIC up, or exclude its twin on the others",
    ),
    (
        "rate of the fast NICs",
        lambda check: " + ".join(format_rate(nic.rate_bps) for nic in _fast(check)),
        "a ring is as fast as its slowest link",
        "check cable and switch port of the slow node",
    ),
    (
        "MTU of the fast NICs",
        lambda check: "+".join(str(nic.mtu) for nic in _fast(check) if nic.mtu),
        "large messages to the smaller MTU are dropped: jobs hang after the first small ones",
        "ip link set DEVICE mtu BYTES, the same everywhere",
    ),
    (
        "names of the fast NICs",
        lambda check: " ".join(nic.name for nic in _fast(check)),
        "holmes handles this; an NCCL_IB_HCA of your own would fit only some nodes (NVIDIA/nccl#1277)",
        "leave NCCL_IB_HCA to holmes",
    ),
    (
        "index of the RoCE v2 GID",
        lambda check: " ".join(
            str(nic.roce_v2_index) for nic in _fast(check) if nic.kind == "roce"
        ),
        "holmes sets each node's own; an NCCL_IB_GID_INDEX of your own would fit some nodes only",
        "leave NCCL_IB_GID_INDEX to holmes",
    ),
)


def _differing(
    make: Callable[[str, str, str, str], Finding],
    title: str,
    values: dict[str, str],
    what: str,
    why: str,
    mend: str,
) -> Iterator[Finding]:
    """A finding where not all nodes (name -> value) have the same."""
    common = Counter(values.values()).most_common()
    if len(common) > 1:
        usual = common[0][0]
        others = [f"{node} {value or 'none'}" for node, value in values.items() if value != usual]
        yield make(title, f"{what}: {usual or 'none'} on most, but {some_of(others, 4)}", why, mend)


def _check_spec(checks: Sequence[NodeCheck], spec: SiteSpec) -> Iterator[Finding]:
    here = {spec.known_as(check.node.name) for check in checks}
    if absent := [node for node in spec.owner if node not in here]:
        yield note(
            spec.source,
            f"{len(absent)} of its nodes were not looked at: {some_of(absent, 4)}",
            "differences on those nodes are not detected",
            "run `holmes doctor` there too, and give this one all their --json files",
        )
    for check in checks:
        cluster = spec.owner.get(spec.known_as(check.node.name))
        if cluster is None and len(checks) == 1:  # a laptop, say
            yield note(
                check.node.name,
                f"this machine is in no cluster of {spec.source}",
                "its NICs say nothing about the job",
                "run `holmes doctor` on the nodes too",
            )
            continue
        node = replace(check.node, processes=cluster.processes if cluster else 1)
        try:
            site = resolve_site([node], spec)
        except HolmesError as error:
            yield problem(
                node.name,
                str(error),
                "a job with this file ends at start-up with the same line",
                "fix the node or the file",
            )
            continue
        for _, text in slower_than_declared(site, [node]):
            yield problem(
                node.name,
                text,
                "the plan counts on the file's rate: groups on this NIC take longer",
                "check cable, switch port and PCIe slot, or write the lower rate into the file",
            )
        for text in rate_of_one_nic(site, node):
            yield note(
                node.name,
                text,
                "a rate is of a whole node: plans count on less than there is",
                "write the sum of the node's fast NICs as the cluster's rate, or exclude those not "
                "for training",
            )
