"""Checks whether a job without a cluster.toml would start on some nodes.

Without the file, the subnets of the fast NICs must show which nodes are on one fabric. If they do not, the
job ends at start-up (cluster/resolve.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from holmes_ext.cluster.nic import DEFAULT_SUBNET_PREFIX, KINDS
from holmes_ext.cluster.node_report import NodeReport
from holmes_ext.cluster.resolve import resolve_site
from holmes_ext.doctor.finding import Finding, note, problem
from holmes_ext.errors import HolmesError
from holmes_ext.words import some_of

_MEND = "describe the clusters in a cluster.toml: --cluster FILE here, --holmes-cluster FILE for the job"


def check_without_file(nodes: Sequence[NodeReport], is_job: bool) -> Iterator[Finding]:
    """Yield a finding if a job on these nodes needs a cluster.toml.

    Without the file, such a job stops with an error at start-up, because its NICs do not show which nodes
    are in the same cluster.

    Args:
        nodes: All nodes of the job.
        is_job: True for a job without the file: the finding is a problem. False if these are just nodes: it
            is a note, as their jobs may have a cluster.toml that this check was not given.
    """
    # The number of processes does not matter here, and is not known before a job starts them.
    reports = [replace(node, processes=1) for node in nodes]
    try:
        resolve_site(reports, None)
    except HolmesError as error:
        make = problem if is_job else note
        yield make(
            "no cluster.toml",
            what=str(error),
            why="a job without the file ends at start-up with this line",
            mend=_MEND,
        )


def check_prefix_of_job(node: NodeReport, node_count: int) -> Iterator[Finding]:
    """Yield a finding if a job without a cluster.toml ends because of the default InfiniBand prefix.

    Args:
        node: One node of the job. The others are taken to have the same prefix.
        node_count: Number of nodes of the job.
    """
    ports = [
        nic.name
        for nic in node.nics
        if KINDS[nic.kind].infiniband and nic.usable and nic.subnet_prefix == DEFAULT_SUBNET_PREFIX
    ]
    if ports and node_count > 1:
        yield problem(
            some_of(ports),
            what=f"the command starts {node_count} nodes without a cluster.toml, and the InfiniBand subnet "
            f"prefix is the default one ({DEFAULT_SUBNET_PREFIX}), which does not tell one fabric from two",
            why="the job ends at start-up",
            mend=_MEND,
        )
