"""Common form of all planners' plans, and the nearest plan that a grid of ranks can run.

    Stage(blocks=9, replicas=((("ib", "ib"), ("ib", "ib")), ...))   a stage: its transformer blocks, and for
                                                                    each data-parallel replica the clusters
                                                                    of its GPUs

A grid of ranks (plan/sizes.py) has one tensor-parallel and one data-parallel size for all stages, and
uses whole nodes. `gridded` finds the nearest plan of this kind: with the same stages if their number
divides the ranks, with the tensor-parallel size of most GPUs, and with each GPU in the cluster that the
planner chose, as far as nodes stay whole. It records its changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from holmes_ext.cluster.site import Site
from holmes_ext.errors import HolmesError
from holmes_ext.plan.sizes import Sizes, divisors
from holmes_ext.words import grouped


@dataclass(frozen=True)
class Stage:
    """Pipeline stage of a plan."""

    blocks: int  # transformer blocks; 0 if the stage has only the embedding or the output layer
    replicas: tuple[
        tuple[str, ...], ...
    ]  # for each data-parallel replica, the clusters of its GPUs

    @property
    def gpus(self) -> tuple[str, ...]:
        """The clusters of all GPUs of the stage."""
        return tuple(cluster for replica in self.replicas for cluster in replica)


@dataclass(frozen=True)
class PlannedJob:
    """Plan as a planner proposes it: the blocks of each stage, and the clusters of its GPUs.

    Stages may have different parallel sizes. The plans of all planners are converted to this form,
    and then to a Grid, which an engine can run.
    """

    stages: tuple[Stage, ...]
    micro_batch: int
    predicted_s: float = 0.0  # step time by the planner's own cost model; 0 if it gives none

    def __post_init__(self) -> None:
        if not self.stages or not all(stage.gpus for stage in self.stages):
            raise HolmesError("a plan has at least one stage, and every stage at least one GPU")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> PlannedJob:
        stages = [
            Stage(item["blocks"], tuple(map(tuple, item["replicas"])))
            for item in document["stages"]
        ]
        return cls(tuple(stages), document["micro_batch"], document["predicted_s"])


@dataclass(frozen=True)
class Grid:
    """Plan that a training engine can run: its ranks form a grid pipeline x tensor x data.

    All stages have the same tensor-parallel and data-parallel size. Of every node, all GPUs are
    used or none. gridded() makes such a plan from a plan that may be less regular.
    """

    sizes: Sizes
    nodes: tuple[str, ...]  # in the order of their ranks
    split: tuple[int, ...]  # transformer blocks of each stage
    micro_batch: int
    predicted_s: float = 0.0  # step time by the planner's own cost model; 0 if it gives none
    changed: tuple[str, ...] = ()  # sentences: how the plan differs from that of the planner

    def __str__(self) -> str:
        sizes = (
            f"pipeline {self.sizes.pipeline} x tensor {self.sizes.tensor} x data {self.sizes.data}"
        )
        return f"{sizes}, micro-batch {self.micro_batch}, blocks {'-'.join(map(str, self.split))}"


def gridded(plan: PlannedJob, site: Site, blocks: int, batch: int) -> Grid:
    """Convert a planner's plan to one that an engine can run, with few changes.

    An engine needs equal parallel sizes on all stages, and whole nodes. The result has:

        stages         as many as the plan, or the nearest number that is possible
        tensor size    that of most GPUs
        clusters       those of the plan's GPUs, as far as nodes stay whole

    `changed` of the result lists the differences from the plan.

    Args:
        plan: The plan of a planner.
        site: Clusters and nodes of the case.
        blocks: Transformer blocks of the model.
        batch: Global batch size.

    Raises:
        HolmesError: No grid has the plan's GPUs and the batch.
    """
    changed: list[str] = []
    nodes = _whole_nodes(plan, site, changed)
    ranks = len(nodes) * site.processes
    count = len(plan.stages)
    gpus_with_tensor_size: Counter[int] = Counter()
    for stage in plan.stages:
        for replica in stage.replicas:
            gpus_with_tensor_size[len(replica)] += len(replica)
    # That of most GPUs; of several such sizes, the smallest.
    tensor = max(gpus_with_tensor_size, key=lambda size: (gpus_with_tensor_size[size], -size))
    if len(gpus_with_tensor_size) > 1:
        sizes_of_plan = _texts(sorted(gpus_with_tensor_size))
        changed.append(f"tensor sizes {sizes_of_plan} of stages became {tensor}")
    if ranks % tensor:
        tensor = max(size for size in divisors(ranks) if size <= tensor)
        changed.append(f"tensor size became {tensor}")
    data = {len(stage.replicas) for stage in plan.stages}
    if len(data) > 1:
        changed.append(f"data sizes {_texts(sorted(data))} of stages became one")
    # Numbers of stages that divide the ranks, the batch and the nodes.
    fitting = [
        size
        for size in divisors(ranks // tensor)
        if size <= blocks
        and batch % (ranks // tensor // size * plan.micro_batch) == 0
        and _divides_either_way(site.processes, ranks // size)
    ]
    if not fitting:
        raise HolmesError(
            f"{ranks} ranks in tensor groups of {tensor} and micro-batches of {plan.micro_batch} do not"
            f" divide a batch of {batch}"
        )
    pipeline = min(fitting, key=lambda size: (abs(size - count), size))
    if pipeline != count:
        changed.append(f"{count} stages became {pipeline}")
    wanted = [stage.blocks for stage in plan.stages]
    split = shared_out(_resampled(wanted, pipeline), blocks)
    if pipeline == count and list(split) != wanted:
        changed.append(f"blocks {'-'.join(map(str, wanted))} became {'-'.join(map(str, split))}")
    sizes = Sizes(pipeline, tensor, data=ranks // tensor // pipeline)
    return Grid(
        sizes,
        nodes=nodes,
        split=split,
        micro_batch=plan.micro_batch,
        predicted_s=plan.predicted_s,
        changed=tuple(changed),
    )


def _whole_nodes(plan: PlannedJob, site: Site, changed: list[str]) -> tuple[str, ...]:
    """Return whole nodes for the GPUs of a plan, in the order of the plan's GPUs.

    A planner may put GPUs of two clusters next to each other, but a node is in one cluster. So the
    GPUs are taken in groups of a node's size. Each group gets a free node of the cluster that the planner
    wanted for most of its GPUs, or of another cluster if that cluster has no free node.

    Args:
        plan: The plan, with the cluster of each GPU.
        site: Clusters and nodes of the case.
        changed: A line is appended if GPUs are left out, or are in another cluster than in the
            plan.

    Raises:
        HolmesError: The plan has an unknown cluster, more GPUs than the case, or fewer than a node.
    """
    free_nodes = grouped((node.cluster, node.name) for node in site.nodes)
    gpus: list[str] = []  # cluster of each GPU of the plan
    for stage in plan.stages:
        gpus += stage.gpus
    unknown_clusters = set(gpus) - set(free_nodes)
    if unknown_clusters:
        raise HolmesError(
            f"the plan names cluster {min(unknown_clusters)!r}; the case has {', '.join(free_nodes)}"
        )
    size = site.processes  # GPUs of a node
    nodes = []
    moved = 0  # GPUs in another cluster than in the plan
    if len(gpus) < site.world_size:
        changed.append(f"{site.world_size - len(gpus)} of {site.world_size} GPUs are left out")
    if len(gpus) > site.world_size:
        raise HolmesError(f"the plan has {len(gpus)} GPUs; the case has {site.world_size}")
    for start in range(0, len(gpus) // size * size, size):
        counts = Counter(gpus[start : start + size])
        with_free_node = [cluster for cluster, names in free_nodes.items() if names]
        best = max(with_free_node, key=counts.__getitem__)
        moved += size - counts[best]
        nodes.append(free_nodes[best].pop(0))
    if not nodes:
        raise HolmesError(f"the plan has {len(gpus)} GPUs, less than a node of {size}")
    if moved:
        changed.append(f"{moved} GPUs stand in another cluster: nodes stay whole")
    if len(gpus) % size:
        changed.append(f"{len(gpus) % size} GPUs more are left out: nodes stay whole")
    return tuple(nodes)


def shared_out(weights: Sequence[float], blocks: int) -> tuple[int, ...]:
    """Divide blocks among stages by weight, with at least one block for each stage.

    Shares are rounded down. Then blocks are added where most is missing, or removed where most is too much.

    Args:
        weights: Weight of each stage.
        blocks: Number of all blocks.
    """
    total = sum(weights) or 1.0
    exact = [weight * blocks / total for weight in weights]
    split = [max(1, int(share)) for share in exact]
    while sum(split) < blocks:
        split[max(range(len(split)), key=lambda at: exact[at] - split[at])] += 1
    while sum(split) > blocks:
        split[
            min(
                (at for at in range(len(split)) if split[at] > 1),
                key=lambda at: exact[at] - split[at],
            )
        ] -= 1
    return tuple(split)


def _resampled(values: Sequence[int], count: int) -> list[float]:
    """Convert a planner's distribution of blocks to another number of stages.

    A plan may need another number of stages than its planner chose. The pipeline is then cut into `count`
    parts of equally many old stages, perhaps fractions of a stage. A new stage gets the blocks of its part.

    Args:
        values: Number of blocks of each stage of the planner's plan.
        count: The other number of stages.

    Returns:
        Blocks of each new stage. They need not be whole numbers.
    """
    borders = [0.0, *accumulate(float(value) for value in values)]

    def sum_up_to(position: float) -> float:
        """Return the sum of the values before a position, which may lie inside of a stage."""
        stage = min(int(position), len(values) - 1)
        return borders[stage] + (position - stage) * values[stage]

    cuts = [sum_up_to(index * len(values) / count) for index in range(count + 1)]
    return [high - low for low, high in zip(cuts, cuts[1:])]


def _divides_either_way(processes: int, ranks: int) -> bool:
    """Return whether stages consist of whole nodes, or nodes of whole stages.

    Args:
        processes: Ranks of a node.
        ranks: Ranks of a stage.
    """
    return processes % ranks == 0 or ranks % processes == 0


def _texts(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
