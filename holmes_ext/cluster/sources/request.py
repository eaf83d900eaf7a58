"""Chosen nodes as lines of sbatch, an MPI hostfile, a node affinity of Kubernetes.

#SBATCH --nodes=12 --constraint="[ib*8&roce*4]"         any nodes with these features will do
#SBATCH --nodes=8 --nodelist=a[0-7]                     or these very nodes; a heterogeneous
                                                        job has a component for
#SBATCH hetjob                                          each cluster
#SBATCH --nodes=4 --nodelist=b[0-3]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holmes_ext.cluster.sources.hostlist import folded

#: Node -> its features, as Slurm has them.
Features = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class ChosenNodes:
    """Nodes of one cluster, `processes` on each; all_nodes: every one that the cluster has."""

    cluster: str
    nodes: tuple[str, ...]
    processes: int
    all_nodes: tuple[str, ...]


def sbatch_lines(parts: Sequence[ChosenNodes], features: Features | None = None) -> list[str]:
    """Of one job on all of them; features: where Slurm was asked, so that it may choose the nodes."""
    per_node = f" --ntasks-per-node={parts[0].processes} --gpus-per-node={parts[0].processes}"
    count = sum(len(part.nodes) for part in parts)
    constraints = [_feature(part, features) for part in parts] if features else []
    if constraints and all(constraints):
        wanted = "&".join(
            f"{feature}*{len(part.nodes)}" for feature, part in zip(constraints, parts)
        )
        where = f'--constraint="[{wanted}]"' if len(parts) > 1 else f"--constraint={constraints[0]}"
    else:
        where = f"--nodelist={folded(node for part in parts for node in part.nodes)}"
    return [f"#SBATCH --nodes={count}{per_node} {where}"]


def hetjob_lines(parts: Sequence[ChosenNodes], features: Features | None = None) -> list[str]:
    """Of a heterogeneous job: a component for each cluster (srun --het-group=0-1 starts one step on all)."""
    lines: list[str] = []
    for part in parts:
        lines += ["#SBATCH hetjob"] * bool(lines) + sbatch_lines([part], features)
    return lines


def _feature(part: ChosenNodes, features: Features | None) -> str:
    """One that all nodes of the cluster have and no other node has; "" where there is none."""
    features = features or {}
    members = set(part.all_nodes)
    for name in features.get(part.nodes[0], ()):
        if {node for node, feature in features.items() if name in feature} == members:
            return name
    return ""


def hostfile(parts: Sequence[ChosenNodes]) -> str:
    """Open MPI's and deepspeed's."""
    return "".join(f"{node} slots={part.processes}\n" for part in parts for node in part.nodes)


def node_affinity(parts: Sequence[ChosenNodes]) -> dict[str, Any]:
    """`affinity` of a pod that may run on these nodes alone."""
    names = [node for part in parts for node in part.nodes]
    term = {
        "matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": names}]
    }
    return {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}
        }
    }
