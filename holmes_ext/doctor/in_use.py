"""Checks the NICs that a job would use, and not those that cluster.toml leaves to others.

A node often has NICs that are not for training: a front end, storage, a second fabric. cluster.toml
leaves them out by `include`, `exclude` and the `kind` of the node's cluster. They may have another
MTU or be down, and are not judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from holmes_ext.cluster.nic import Nic
from holmes_ext.cluster.spec import NodeOverride, SiteSpec
from holmes_ext.cluster.sysfs.node import select
from holmes_ext.doctor.finding import Finding, merged
from holmes_ext.doctor.nics import DEFAULT_PREFIX, check_hcas, check_nics, rdma_limits, read_boards
from holmes_ext.errors import HolmesError


def check_used_nics(
    root: str | Path, nics: Sequence[Nic], is_live: bool, is_in_cluster: bool
) -> list[Finding]:
    """Return findings about the NICs of a node that the job uses.

    NICs with the same fault share a finding that names them all.

    Args:
        root: Folder of /sys, or of a captured copy.
        nics: All NICs of the node, with a reason in `skipped` for those that the job does not use.
        is_live: Whether the node is the running machine, and not a captured /sys.
        is_in_cluster: Whether cluster.toml has the node.
    """
    findings = [*check_nics(nics, read_boards(root, nics)), *check_hcas(root, nics)]
    if is_in_cluster:  # the file says which nodes belong together, instead of the subnet prefix
        findings = [finding for finding in findings if finding.what != DEFAULT_PREFIX]
    if is_live:
        findings += rdma_limits(nics)  # needs of RDMA on this machine, such as locked memory
    return merged(findings)


def mark_unused(nics: Sequence[Nic], node: str, spec: SiteSpec | None) -> tuple[Nic, ...]:
    """Return all NICs of a node, with a reason in `skipped` for those that the job does not use.

    A RoCE port is in the list twice: with kind "roce", and its net device with kind "ethernet". If
    `exclude` names the port, only the entry of kind "roce" gets a reason. The job may still reach the
    other nodes over the net device.

    Args:
        nics: All NICs of the node.
        node: Host name of the node.
        spec: Content of cluster.toml; None if there is none.
    """
    cluster = spec.cluster_by_node.get(spec.known_as(node)) if spec is not None else None
    if spec is None or cluster is None:
        return tuple(nics)
    override = spec.overrides.get(spec.known_as(node), NodeOverride())
    include = override.include or cluster.include
    exclude = override.exclude or cluster.exclude
    try:
        chosen = {nic.name: nic for nic in select(nics, include, exclude)}
    except HolmesError:  # a pattern matches no NIC: compare() reports it
        return tuple(nics)
    has_kind = any(nic.kind == cluster.kind for nic in nics)
    marked = []
    for nic in nics:
        reason = ""
        if nic.fast and nic.kind != cluster.kind and has_kind:
            reason = f"cluster {cluster.name} is of kind {cluster.kind} in {spec.source}"
        elif nic.name not in chosen and _may_be_left_out(nic, include):
            reason = f"left out by {spec.source}"
        if reason:
            marked.append(replace(nic, skipped=nic.skipped or reason))
        else:
            marked.append(chosen.get(nic.name, nic))
    return tuple(marked)


def _may_be_left_out(nic: Nic, include: Sequence[str]) -> bool:
    """Return whether `include` and `exclude` of cluster.toml may leave out a NIC.

    Both keys choose among the fast NICs. An Ethernet NIC may be the NIC by which a node reaches all
    others, even if `include` does not list it or `exclude` does.

    Args:
        nic: The NIC.
        include: Patterns of `include`.
    """
    if nic.fast:
        return True
    if include:  # it lists fast NICs, so Ethernet that is not in the list is not left out thereby
        return False
    # Sockets use a net device with an address, and that of a RoCE port.
    may_reach_nodes = bool(nic.addresses or nic.rdma)
    return not may_reach_nodes
