"""Chosen nodes in the formats of sbatch, of MPI hostfiles, and of Kubernetes.

#SBATCH --nodes=12 --constraint="[ib*8&roce*4]"     any nodes with these features

#SBATCH --nodes=8 --nodelist=a[0-7]                 exactly these nodes; a heterogeneous job
#SBATCH hetjob                                      has one component for each cluster
#SBATCH --nodes=4 --nodelist=b[0-3]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holmes_ext.cluster.sources.hostlist import folded

#: Node -> its features in Slurm.
Features = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class ChosenNodes:
    """Nodes of a cluster that were chosen for a job."""

    cluster: str
    nodes: tuple[str, ...]
    processes: int  # on each node
    all_nodes: tuple[str, ...]  # all nodes of the cluster


def sbatch_lines(parts: Sequence[ChosenNodes], features: Features | None = None) -> list[str]:
    """Return the sbatch options of one job on all chosen nodes.

    If each cluster has a feature of its own, the options ask for nodes with these features, and
    Slurm chooses among them. Otherwise the options name the nodes.

    Args:
        parts: The chosen nodes of each cluster, with the same number of processes per node.
        features: Node -> its features in Slurm. None: the options name the nodes.
    """
    processes = parts[0].processes
    node_count = sum(len(part.nodes) for part in parts)
    # For each cluster a feature that only its nodes have, "" without one.
    part_features = [_feature_of_cluster(part, features) for part in parts] if features else []
    if not part_features or not all(part_features):
        nodes = f"--nodelist={folded(node for part in parts for node in part.nodes)}"
    elif len(parts) == 1:
        nodes = f"--constraint={part_features[0]}"
    else:
        counts = [f"{feature}*{len(part.nodes)}" for feature, part in zip(part_features, parts)]
        nodes = f'--constraint="[{"&".join(counts)}]"'
    return [
        f"#SBATCH --nodes={node_count} --ntasks-per-node={processes} "
        f"--gpus-per-node={processes} {nodes}"
    ]


def hetjob_lines(parts: Sequence[ChosenNodes], features: Features | None = None) -> list[str]:
    """Return the sbatch options of a heterogeneous job with one component for each cluster.

    `srun --het-group=0-1` starts one step on all components. If only the nodes of a cluster have
    some feature, its component asks for nodes with this feature. Otherwise the component names the
    nodes.

    Args:
        parts: The chosen nodes of each cluster.
        features: Node -> its features in Slurm. None: all components name their nodes.
    """
    lines: list[str] = []
    for part in parts:
        if lines:
            lines.append("#SBATCH hetjob")
        lines += sbatch_lines([part], features)
    return lines


def _feature_of_cluster(part: ChosenNodes, features: Features | None) -> str:
    """Return a feature that all nodes of a cluster have and no other node, "" without one.

    Args:
        part: The chosen nodes of the cluster, and all its nodes.
        features: Node -> its features in Slurm.
    """
    features = features or {}
    members = set(part.all_nodes)
    for name in features.get(part.nodes[0], ()):
        nodes_with_feature = {node for node, names in features.items() if name in names}
        if nodes_with_feature == members:
            return name
    return ""


def hostfile(parts: Sequence[ChosenNodes]) -> str:
    """Return the chosen nodes as a hostfile of Open MPI and deepspeed."""
    lines = []
    for part in parts:
        lines += [f"{node} slots={part.processes}\n" for node in part.nodes]
    return "".join(lines)


def node_affinity(parts: Sequence[ChosenNodes]) -> dict[str, Any]:
    """Return the `affinity` of a Kubernetes pod that may run on the chosen nodes only."""
    names = [node for part in parts for node in part.nodes]
    is_chosen_node = {"key": "kubernetes.io/hostname", "operator": "In", "values": names}
    term = {"matchExpressions": [is_chosen_node]}
    return {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}
        }
    }
