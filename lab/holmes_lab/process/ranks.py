"""Decisions at the start of a lab's job: node order, processes per node, environment of ranks."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holmes_ext import _pth
from holmes_ext.cluster.spec import SiteSpec
from holmes_ext.errors import HolmesError
from holmes_lab.emulate import accelerator
from holmes_lab.network.shaping import LabNode


@dataclass(frozen=True)
class Program:
    """Process of the lab that is not a rank: a daemon, or a launcher that starts a job."""

    host: str
    argv: Sequence[str]
    env: Mapping[str, str]  # the whole environment


def interleave(spec: SiteSpec) -> tuple[str, ...]:
    """Return the nodes of the clusters in turn: a0, b0, a1, b1, ...

    A scheduler that does not consider clusters may list nodes in such an order.
    """
    interleaved: list[str] = []
    for nodes in itertools.zip_longest(*(cluster.nodes for cluster in spec.clusters)):
        interleaved += [node for node in nodes if node is not None]
    return tuple(interleaved)


def order_of_options(
    spec: SiteSpec, *, is_interleaved: bool, listed: str | None
) -> Sequence[str] | None:
    """Return the nodes of a job in the order that options of `holmes lab run` choose.

    Args:
        spec: The clusters.
        is_interleaved: Whether --interleave is given: the clusters take turns.
        listed: Value of --order: names of nodes, separated by commas; "" or None if it is not given.

    Returns:
        None without both options: all nodes, in the order of cluster.toml.
    """
    if is_interleaved:
        return interleave(spec)
    return listed.split(",") if listed else None


def check_order(nodes: Sequence[LabNode]) -> None:
    """Raise HolmesError if the job has no node, or a node twice."""
    for node in nodes:
        if nodes.count(node) > 1:
            raise HolmesError(f"--order: node {node.name!r} is named twice")
    if not nodes:
        raise HolmesError("--order: name at least one node")


def processes_of_nodes(nodes: Sequence[LabNode], processes: int | None) -> list[int]:
    """Return the number of processes of each node, in the order of the nodes.

    Args:
        nodes: The nodes of the job.
        processes: Value of --processes, for all nodes; None for the numbers in cluster.toml (they may differ
            between clusters).

    Raises:
        HolmesError: The number is not 1 or more.
    """
    if processes is None:
        return [node.processes for node in nodes]
    if processes < 1:
        raise HolmesError(f"--processes: {processes} is not 1 or more")
    return [processes] * len(nodes)


def nodes_of_ranks(counts: Sequence[int]) -> list[int]:
    """Return the position of the node of each rank, given the number of processes of each node."""
    return [position for position, count in enumerate(counts) for _ in range(count)]


def common_environment(
    env: Mapping[str, str], configuration: Mapping[str, Any] | None
) -> tuple[dict[str, str], bool]:
    """Return the environment that all ranks share, and whether it has an emulated accelerator.

    The emulated accelerator slows layers down to the speed of a given GPU. Its settings are in the variable
    HOLMES_LAB_ACCELERATOR. The environment of this process may have it already.

    Args:
        env: Variables in addition to those of this process.
        configuration: Settings of the emulated accelerator. None: those of the variable, if it is
            set.
    """
    # One OpenMP thread for each rank, as torchrun sets it: the ranks share this machine's cores.
    # Unbuffered, so that each line of output is shown at once.
    common = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **os.environ, **env}
    if configuration is not None:
        common[accelerator.VARIABLE] = accelerator.dump(configuration)
    emulated = accelerator.VARIABLE in common
    if emulated:
        # Each Python of the job then installs the accelerator when it starts.
        accelerator.add_to_environment(common)
    return common, emulated


def asks_for_holmes(command: Sequence[str], env: Mapping[str, str]) -> bool:
    """Return whether a job runs with holmes.

    It does with a flag of holmes, also in `sh -c "torchrun ... --holmes"`, with the variable
    HOLMES, and as a command or module of holmes.
    """
    if env.get("HOLMES") == "1":
        return True
    words = " ".join(command).split()
    names = {"holmes", "holmes_ext", "holmes_ext.cli.main"}
    return any(
        word in names or word.endswith("/bin/holmes") or _pth.is_flag(word) for word in words
    )


def rank_environment(
    nodes: Sequence[LabNode], counts: Sequence[int], rank: int, port: int
) -> dict[str, str]:
    """Return the environment variables of a rank.

    They are those of torchrun (torch/distributed/run.py), and LOCAL_SIZE for DeepSpeed.

    Args:
        nodes: The nodes of the job in order.
        counts: Number of ranks on each node.
        rank: The rank.
        port: Value of MASTER_PORT.
    """
    position = nodes_of_ranks(counts)[rank]
    count = counts[position]
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": rank - sum(counts[:position]),
        "WORLD_SIZE": sum(counts),
        "LOCAL_WORLD_SIZE": count,
        "LOCAL_SIZE": count,
        "GROUP_RANK": position,
        "GROUP_WORLD_SIZE": len(nodes),
        "NODE_RANK": position,
        "MASTER_PORT": port,
    }
    return {
        "MASTER_ADDR": nodes[0].address,
        **{name: str(number) for name, number in numbers.items()},
    }
