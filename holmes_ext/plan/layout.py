"""Which node slots the framework's default layout ties together.

Rank r sits in node slot r // processes, whatever node stands there. The groups of a job (data, tensor, context, expert)
never leave a pipeline stage, and together they connect all ranks of it; stages that share a slot are tied by that slot.
What is tied is a component: it must lie inside one fabric, and only pipeline edges run between components.

    processes 2, 3 ranks a stage        slots    0   1   2 | 3   4   5
                                        stages   0 0 0 1 1 1 2 2 2 3 3 3
                                                 component   component

Every component is the first one, moved along. Proof: a slot border falls between stages j-1 and j of the repeated
sequence (stage s owns the ranks whose rank // stride % pipeline is s) where j * stride is a multiple of `processes`,
that is at multiples of q = processes / gcd(stride, processes); if the sequence repeats (data outside pipeline) a border
must fall there in every repetition, so components exist only where q divides the pipeline size, and each has q stages.
(Asserted below, and tested for all small sizes.)
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from holmes_ext.plan.sizes import AXES, Sizes

#: What each kind of group runs over. Gradients are reduced over data x context (megatron.core's dp_cp group).
KINDS = {"data": ("dp", "cp"), "tensor": ("tp",), "context": ("cp",), "expert": (), "pipeline": ("pp",)}
INSIDE = ("data", "tensor", "context", "expert")  # the kinds that placement keeps inside one fabric


def _span(strides: dict[str, int], sizes: dict[str, int]) -> list[int]:
    """All sums of coordinate x stride, ascending."""
    ranks = [0]
    for axis, size in sizes.items():
        ranks = [rank + index * strides[axis] for rank in ranks for index in range(size)]
    return sorted(ranks)


def groups(sizes: Sizes, kind: str) -> list[tuple[int, ...]]:
    """The ranks of every group of `kind` (a key of KINDS), in the order of first ranks; of complete sizes."""
    if kind == "expert":
        return _expert_groups(sizes)
    strides = sizes.strides()
    members = _span(strides, {axis: sizes.size(axis) for axis in KINDS[kind]})
    firsts = _span(strides, {axis: sizes.size(axis) for axis in AXES if axis not in KINDS[kind]})
    return [tuple(first + member for member in members) for first in firsts]


def _expert_groups(sizes: Sizes) -> list[tuple[int, ...]]:
    """Expert-parallel groups: a second grid over the ranks of each stage, without a context axis.
    megatron.core.parallel_state makes it with the expert tensor size, which is the tensor size unless the user says
    otherwise; here 1 where expert x tensor does not divide a stage."""
    stride = sizes.strides()["pp"]
    stage = _span(sizes.strides(), {axis: sizes.size(axis) for axis in AXES if axis != "pp"})
    tensor = sizes.tensor if (sizes.data * sizes.context) % sizes.expert == 0 else 1
    grid = {"tp": tensor, "ep": sizes.expert, "dp": len(stage) // (tensor * sizes.expert)}
    strides, step = {}, 1
    for axis in dict.fromkeys([axis for axis in sizes.order.split("-") if axis in grid] + list(grid)):
        strides[axis], step = step, step * grid[axis]
    members = _span(strides, {"ep": grid["ep"]})
    firsts = _span(strides, {"tp": grid["tp"], "dp": grid["dp"]})
    local = [[stage[first + member] for member in members] for first in firsts]
    return sorted(tuple(rank + index * stride for rank in group) for group in local for index in range(sizes.pipeline))


@dataclass(frozen=True)
class Tie:
    """`count` groups of one kind and stage, of `members` ranks each, that touch the same slots (more than one)."""

    stage: int
    slots: tuple[int, ...]
    members: int
    count: int


class Layout:
    """Components, and what ties the first one; slots of a component are counted from 0, stages too. sizes: complete.
    components: the slots of each, in the order of stages. ties: for each kind of INSIDE. inner[s] and onward: {(slot,
    slot): ranks} that send activations from stage s to s + 1 inside a component, and from a component's last stage to
    the next component; pairs in one slot are left out."""

    def __init__(self, sizes: Sizes, processes: int):
        self.sizes, self.processes = sizes, processes
        self.stride = sizes.strides()["pp"]
        self.slots = sizes.pipeline * sizes.tensor * sizes.context * sizes.data // processes
        self.stages = self._tied_stages()  # stages in each component
        self.components = self._components()
        self._index = {slot: index for index, slot in enumerate(self.components[0])}

    def _stage(self, rank: int) -> int:
        return rank // self.stride % self.sizes.pipeline  # Sizes.stage, which works out the stride anew

    def _tied_stages(self) -> int:
        """Union-find over stages, two being tied where a slot holds ranks of both."""
        parent = list(range(self.sizes.pipeline))

        def root(stage: int) -> int:
            while parent[stage] != stage:
                parent[stage] = stage = parent[parent[stage]]
            return stage

        for rank in range(1, self.slots * self.processes):
            if rank % self.processes:
                one, other = root(self._stage(rank - 1)), root(self._stage(rank))
                parent[max(one, other)] = min(one, other)
        roots = [root(stage) for stage in range(self.sizes.pipeline)]
        count = self.sizes.pipeline // len(set(roots))
        assert roots == [stage // count * count for stage in range(self.sizes.pipeline)], "components differ"
        return count

    def _components(self) -> tuple[tuple[int, ...], ...]:
        found: dict[int, dict[int, None]] = {}
        for slot in range(self.slots):
            stage = self._stage(slot * self.processes)
            found.setdefault(stage // self.stages, {})[slot] = None
        components = tuple(tuple(found[index]) for index in sorted(found))
        for index, component in enumerate(components):
            assert component == tuple(slot + component[0] - components[0][0] for slot in components[0]), index
        return components

    @cached_property
    def ties(self) -> dict[str, tuple[Tie, ...]]:
        return {kind: self._ties(kind) for kind in INSIDE}

    def _ties(self, kind: str) -> tuple[Tie, ...]:
        counts: Counter[tuple[int, tuple[int, ...], int]] = Counter()
        size = self.sizes.expert if kind == "expert" else math.prod(self.sizes.size(axis) for axis in KINDS[kind])
        for group in groups(self.sizes, kind) if size > 1 else ():
            stage = self._stage(group[0])
            slots = sorted({rank // self.processes for rank in group}) if stage < self.stages else ()
            if len(slots) > 1:
                counts[stage, tuple(self._index[slot] for slot in slots), len(group)] += 1
        return tuple(Tie(*key, count) for key, count in counts.items())

    @property
    def work(self) -> int:
        """Slots of groups and edges, over all components: what predicting one order costs when nothing is known."""
        first = sum(len(tie.slots) for ties in self.ties.values() for tie in ties) + sum(map(len, self.inner))
        return (first + len(self.onward) + 1) * len(self.components)

    @cached_property
    def inner(self) -> tuple[dict[tuple[int, int], int], ...]:
        return tuple(self._edges(stage, 0) for stage in range(self.stages - 1))

    @cached_property
    def onward(self) -> dict[tuple[int, int], int]:
        if len(self.components) == 1:
            return {}
        return self._edges(self.stages - 1, self.components[1][0] - self.components[0][0])

    def _edges(self, stage: int, shift: int) -> dict[tuple[int, int], int]:
        counts: Counter[tuple[int, int]] = Counter()
        axes = {axis: self.sizes.size(axis) for axis in AXES if axis != "pp"}
        for first in _span(self.sizes.strides(), axes):
            sender = first + stage * self.stride
            slots = sender // self.processes, (sender + self.stride) // self.processes
            if slots[0] != slots[1]:
                counts[self._index[slots[0]], self._index[slots[1] - shift]] += 1
        return dict(counts)
