"""What only shows when the nodes of a cluster stand side by side: NICs, rates, MTUs, GID indices and versions that differ.

A NodeCheck is what `holmes doctor --json` prints on one node; compare() takes those of several.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from holmes_ext.cluster.nic import Nic
from holmes_ext.cluster.node_report import NodeReport, short_name
from holmes_ext.cluster.resolve import resolve_site
from holmes_ext.cluster.spec import ClusterSpec, SiteSpec
from holmes_ext.doctor.finding import Finding, note, problem
from holmes_ext.errors import HolmesError

VERSION = 1


@dataclass(frozen=True)
class NodeCheck:
    """One node: its NICs, the versions of what must be alike ("torch" -> "2.13.0"), settings (variables), and its own findings."""

    node: NodeReport
    versions: dict[str, str]
    settings: dict[str, str]
    findings: tuple[Finding, ...]

    def to_dict(self) -> dict[str, Any]:
        findings = [finding.to_dict() for finding in self.findings]
        return {"version": VERSION, "node": self.node.to_dict(), "versions": self.versions, "settings": self.settings, "findings": findings}

    @classmethod
    def from_dict(cls, document: Any, where: str) -> NodeCheck:
        """HolmesError begins with `where` (a file or a rank) and names the key."""
        if not isinstance(document, dict) or document.get("version") != VERSION:
            raise HolmesError(f"{where}: not a check of one node (key 'version' must be {VERSION}); write it with `holmes doctor --json` there")
        for key, kind in (("node", dict), ("versions", dict), ("settings", dict), ("findings", list)):
            if not isinstance(document.get(key), kind):
                raise HolmesError(f"{where}: key {key!r} is missing or of another type; write it with `holmes doctor --json`")
        node = document["node"]
        for key, kind in (("name", str), ("identity", str), ("ethernet", str), ("nics", list)):
            if not isinstance(node.get(key), kind):
                raise HolmesError(f"{where}: key 'node.{key}' is missing or of another type; write it with `holmes doctor --json`")
        for key in ("versions", "settings"):
            for name, value in document[key].items():
                if not isinstance(value, str):
                    raise HolmesError(f"{where}: key '{key}.{name}' is {value!r:.80}, not a text")
        nics = tuple(Nic.from_dict(nic, f"{where}: node {node['name']}") for nic in node["nics"])
        findings = tuple(Finding.from_dict(finding, where) for finding in document["findings"])
        return cls(NodeReport(node["name"], node["identity"], node["ethernet"], nics, 1), document["versions"], document["settings"], findings)


def load_check(path: str | Path) -> NodeCheck:
    """The NodeCheck in a file that `holmes doctor --json > FILE` wrote; HolmesError names the file."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise HolmesError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise HolmesError(f"{path}: not JSON ({str(error)[:100]}); write it with `holmes doctor --json`") from None
    return NodeCheck.from_dict(document, str(path))


def compare(checks: Sequence[NodeCheck], spec: SiteSpec | None) -> list[Finding]:
    """Findings on what differs between nodes that share a cluster (with `spec`), or a kind of NIC (without)."""
    findings = []
    for title, members in _clusters(checks, spec):
        for what, fact, why, mend in _FACTS:
            findings += _differing(title, members, what, fact, why, mend)
    everywhere = sorted({name for check in checks for name in check.versions})
    for name in everywhere:
        why = "ranks with different versions have different patches and messages: they hang or stop at start-up"
        findings += _differing(
            "all nodes",
            checks,
            f"version of {name}",
            lambda c, name=name: c.versions.get(name, "none"),
            why,
            f"install one version of {name} everywhere",
            True,
        )
    for name in sorted({name for check in checks for name in check.settings}):
        why = "a setting that names a NIC or network on some ranks only makes groups hang"
        findings += _differing(
            "all nodes", checks, name, lambda c, name=name: c.settings.get(name, "unset"), why, f"set {name} alike on all nodes, or nowhere"
        )
    if spec is not None:
        findings += _check_spec(checks, spec)
    return findings


def _clusters(checks: Sequence[NodeCheck], spec: SiteSpec | None) -> list[tuple[str, list[NodeCheck]]]:
    if spec is None:
        kinds = {kind: [c for c in checks if any(nic.kind == kind and nic.usable for nic in c.node.nics)] for kind in ("ib", "roce")}
        return [(f"nodes with {kind}", members) for kind, members in kinds.items()]
    owner = _owners(spec)
    return [(f"cluster {cluster.name}", [c for c in checks if owner.get(short_name(c.node.name)) is cluster]) for cluster in spec.clusters]


def _owners(spec: SiteSpec) -> dict[str, ClusterSpec]:
    """Host name without its domain -> the cluster that lists it."""
    return {short_name(host): cluster for cluster in reversed(spec.clusters) for host in cluster.nodes}


def _fast(check: NodeCheck) -> list[Nic]:
    return [nic for nic in check.node.nics if nic.kind != "ethernet" and nic.usable]


#: what, its value on a node, why it matters, how to mend it; of the fast NICs.
_FACTS: tuple[tuple[str, Callable[[NodeCheck], str], str, str], ...] = (
    ("number of fast NICs that are up", lambda c: str(len(_fast(c))), "the cluster is as fast as the node with the fewest", "bring the missing NIC up, or exclude its twin on the others"),
    ("rate of the fast NICs", lambda c: "+".join(f"{nic.rate_bps / 1e9:g}" for nic in _fast(c)) + " Gb/s", "a ring is as fast as its slowest link", "check cable and switch port of the slow node"),
    ("MTU of the fast NICs", lambda c: "+".join(str(nic.mtu) for nic in _fast(c) if nic.mtu), "large messages to the smaller MTU are dropped: jobs hang after the first small ones", "ip link set DEVICE mtu BYTES, the same everywhere"),
    ("names of the fast NICs", lambda c: " ".join(nic.name for nic in _fast(c)), "holmes copes; an NCCL_IB_HCA of your own would fit some nodes only (NVIDIA/nccl#1277)", "leave NCCL_IB_HCA to holmes"),
    ("index of the RoCE v2 GID", lambda c: " ".join(str(nic.roce_v2_index) for nic in _fast(c) if nic.kind == "roce"), "holmes sets each node's own; an NCCL_IB_GID_INDEX of your own would fit some nodes only", "leave NCCL_IB_GID_INDEX to holmes"),
)  # fmt: skip


def _differing(
    title: str, members: Sequence[NodeCheck], what: str, fact: Callable[[NodeCheck], str], why: str, mend: str, serious: bool = False
) -> list[Finding]:
    values = {check.node.name: fact(check) for check in members}
    common = Counter(values.values()).most_common()
    if len(common) < 2:
        return []
    usual = common[0][0]
    others = [f"{node} {value or 'none'}" for node, value in values.items() if value != usual]
    listed = ", ".join(others[:4]) + (f", and {len(others) - 4} more" if len(others) > 4 else "")
    make = problem if serious or what.startswith("MTU") else note
    return [make(title, f"{what}: {usual or 'none'} on most, but {listed}", why, mend)]


def _check_spec(checks: Sequence[NodeCheck], spec: SiteSpec) -> list[Finding]:
    here = {short_name(check.node.name) for check in checks}
    absent = [node for cluster in spec.clusters for node in cluster.nodes if short_name(node) not in here]
    findings, owner = [], _owners(spec)
    if absent:
        listed = ", ".join(absent[:4]) + (f", and {len(absent) - 4} more" if len(absent) > 4 else "")
        findings.append(
            note(
                spec.source,
                f"{len(absent)} of its nodes were not looked at: {listed}",
                "what differs there does not show",
                "run `holmes doctor` there too, and give this one all their --json files",
            )
        )
    for check in checks:
        cluster = owner.get(short_name(check.node.name))
        if cluster is None and len(checks) == 1:  # a laptop, say
            findings.append(
                note(
                    check.node.name,
                    f"this machine is in no cluster of {spec.source}",
                    "its NICs say nothing about the job",
                    "run `holmes doctor` on the nodes too",
                )
            )
            continue
        try:
            processes = cluster.processes if cluster else 1
            resolve_site(
                [NodeReport(check.node.name, check.node.identity, check.node.ethernet, check.node.nics, processes)], _only(spec, check.node.name)
            )
        except HolmesError as error:
            findings.append(
                problem(check.node.name, str(error), "a job with this file ends at start-up with the same line", "mend the node or the file")
            )
    return findings


def _only(spec: SiteSpec, node: str) -> SiteSpec:
    """`spec` as far as one node goes, so that it is judged without the others."""
    clusters = tuple(
        replace(cluster, nodes=kept) for cluster in spec.clusters
        if (kept := tuple(name for name in cluster.nodes if short_name(name) == short_name(node)))
    )  # fmt: skip
    return replace(spec, clusters=clusters) if clusters else spec
