"""What a launcher decides: order of the nodes, processes of each, every rank's environment."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holmes_ext.cluster.spec import SiteSpec
from holmes_ext.errors import HolmesError
from holmes_lab.emulate import accelerator
from holmes_lab.network.shaping import LabNode


@dataclass(frozen=True)
class Program:
    """A process of the lab that is no rank: a daemon, or a launcher with the job that it starts. env: all of
    it."""

    host: str
    argv: Sequence[str]
    env: Mapping[str, str]


def interleave(spec: SiteSpec) -> tuple[str, ...]:
    """Nodes of the clusters in turn (a0, b0, a1, b1, ...): the order of a scheduler that knows nothing of
    clusters."""
    rounds = itertools.zip_longest(*(cluster.nodes for cluster in spec.clusters))
    return tuple(node for turn in rounds for node in turn if node is not None)


def check_order(nodes: Sequence[LabNode]) -> None:
    """HolmesError when the launcher has no node, or one twice."""
    for node in nodes:
        if nodes.count(node) > 1:
            raise HolmesError(f"--order: node {node.name!r} is named twice")
    if not nodes:
        raise HolmesError("--order: name at least one node")


def processes_for_each(nodes: Sequence[LabNode], processes: int | None, source: str) -> int:
    """`processes`, or what the file says; HolmesError when it says different numbers for these nodes."""
    counts = {node.processes: node.name for node in nodes} if processes is None else {processes: ""}
    if len(counts) > 1:
        (low, few), (high, many) = min(counts.items()), max(counts.items())
        raise HolmesError(
            f"{source}: node {few!r} has {low} processes and node {many!r} has {high};"
            " make them equal or give --processes"
        )
    count = next(iter(counts))
    if count < 1:
        raise HolmesError(f"--processes: {count} is not 1 or more")
    return count


def common_environment(
    env: Mapping[str, str], configuration: Mapping[str, Any] | None
) -> tuple[dict[str, str], bool]:
    """What all ranks share: this process's variables and `env`; and whether an emulated accelerator is in
    it."""
    common = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **os.environ, **env}
    if configuration is not None:
        common[accelerator.VARIABLE] = accelerator.dump(configuration)
    emulated = accelerator.VARIABLE in common
    if emulated:
        accelerator.add_to_environment(common)
    return common, emulated


def asks_for_holmes(command: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether a job is to run with holmes: by its flag, also in `sh -c "torchrun ... --holmes"`, by its
    variable, or by a command or module of holmes."""
    words = " ".join(command).split()
    named = {"--holmes", "holmes", "holmes_ext", "holmes_ext.cli.main"}.intersection(words)
    return (
        bool(named)
        or env.get("HOLMES") == "1"
        or any(word.endswith("/bin/holmes") for word in words)
    )


def rank_environment(nodes: Sequence[LabNode], rank: int, count: int, port: int) -> dict[str, str]:
    """torchrun's variables (torch/distributed/run.py), and LOCAL_SIZE for DeepSpeed; `count`: ranks of each
    node."""
    position, local = divmod(rank, count)
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": local,
        "WORLD_SIZE": len(nodes) * count,
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
