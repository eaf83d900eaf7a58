"""A plan in the words that all planners share, and how our one grid of ranks runs it.

    Stage(blocks=9, replicas=((("ib", "ib"), ("ib", "ib")), ...))   a stage: transformer blocks, data-parallel
                                                                    replicas, of each the clusters of its GPUs

The grid (plan/sizes.py) has one tensor size and one data size for all stages, and nodes that are whole.
`gridded` finds the plan of the grid that is nearest: the same stages where their number divides the ranks,
the tensor size that most GPUs have, each GPU of the cluster where the planner has it as far as nodes stay
whole. What it changed is said.
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


@dataclass(frozen=True)
class Stage:
    """blocks: transformer blocks; 0 where it has the embedding or the output alone."""

    blocks: int
    replicas: tuple[tuple[str, ...], ...]

    @property
    def gpus(self) -> tuple[str, ...]:
        return tuple(cluster for replica in self.replicas for cluster in replica)


@dataclass(frozen=True)
class PlannedJob:
    """predicted_s: of a step, by the planner's own cost model; 0 where it tells none."""

    stages: tuple[Stage, ...]
    micro_batch: int
    predicted_s: float = 0.0

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
    """Complete sizes, nodes in the order of ranks, blocks of each stage; changed: what the planner's plan had
    otherwise."""

    sizes: Sizes
    nodes: tuple[str, ...]
    split: tuple[int, ...]
    micro_batch: int
    predicted_s: float = 0.0
    changed: tuple[str, ...] = ()

    def __str__(self) -> str:
        sizes = (
            f"pipeline {self.sizes.pipeline} x tensor {self.sizes.tensor} x data {self.sizes.data}"
        )
        return f"{sizes}, micro-batch {self.micro_batch}, blocks {'-'.join(map(str, self.split))}"


def gridded(plan: PlannedJob, site: Site, blocks: int, batch: int) -> Grid:
    """The plan of the grid that is nearest; HolmesError where none has its GPUs and the batch."""
    changed: list[str] = []
    nodes = _whole_nodes(plan, site, changed)
    ranks, count = len(nodes) * site.processes, len(plan.stages)
    tensors = Counter(
        size for stage in plan.stages for size in map(len, stage.replicas) for _ in range(size)
    )
    tensor = max(tensors, key=lambda size: (tensors[size], -size))
    if len(tensors) > 1:
        changed.append(f"tensor sizes {_texts(sorted(tensors))} of stages became {tensor}")
    if ranks % tensor:
        tensor = max(size for size in divisors(ranks) if size <= tensor)
        changed.append(f"tensor size became {tensor}")
    data = {len(stage.replicas) for stage in plan.stages}
    if len(data) > 1:
        changed.append(f"data sizes {_texts(sorted(data))} of stages became one")
    fitting = [
        size
        for size in divisors(ranks // tensor)
        if size <= blocks
        and batch % (ranks // tensor // size * plan.micro_batch) == 0
        and _even(site.processes, ranks // size)
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
    return Grid(sizes, nodes, split, plan.micro_batch, plan.predicted_s, tuple(changed))


def _whole_nodes(plan: PlannedJob, site: Site, changed: list[str]) -> tuple[str, ...]:
    """As many nodes as the plan's GPUs fill, in their order: for each node's worth of GPUs, a node of the
    cluster that most of them are in, among the clusters that have a node left."""
    free = {
        name: [node.name for node in site.nodes if node.cluster == name] for name in site.clusters
    }
    gpus = [cluster for stage in plan.stages for cluster in stage.gpus]
    if strangers := set(gpus) - set(free):
        raise HolmesError(
            f"the plan names cluster {min(strangers)!r}; the case has {', '.join(free)}"
        )
    size, nodes, moved = site.processes, [], 0
    if len(gpus) < site.world_size:
        changed.append(f"{site.world_size - len(gpus)} of {site.world_size} GPUs are left out")
    if len(gpus) > site.world_size:
        raise HolmesError(f"the plan has {len(gpus)} GPUs; the case has {site.world_size}")
    for at in range(0, len(gpus) // size * size, size):
        counts = Counter(gpus[at : at + size])
        best = max(free, key=lambda name: (bool(free[name]), counts[name]))  # noqa: B023
        moved += size - counts[best]
        nodes.append(free[best].pop(0))
    if not nodes:
        raise HolmesError(f"the plan has {len(gpus)} GPUs, less than a node of {size}")
    if moved:
        changed.append(f"{moved} GPUs stand in another cluster: nodes stay whole")
    if len(gpus) % size:
        changed.append(f"{len(gpus) % size} GPUs more are left out: nodes stay whole")
    return tuple(nodes)


def shared_out(weights: Sequence[float], blocks: int) -> tuple[int, ...]:
    """Blocks by weight, at least one each, their sum as given."""
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
    """The same curve of so many stages: their sums over equal parts of the pipeline."""
    borders = [0.0, *accumulate(float(value) for value in values)]

    def at(place: float) -> float:
        whole = min(int(place), len(values) - 1)
        return borders[whole] + (place - whole) * values[whole]

    cuts = [at(index * len(values) / count) for index in range(count + 1)]
    return [high - low for low, high in zip(cuts, cuts[1:])]


def _even(processes: int, ranks: int) -> bool:
    return processes % ranks == 0 or ranks % processes == 0


def _texts(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
