"""The parallel sizes of a job, and which ranks they put together.

Both engines lay ranks out as one grid, first axis of `order` innermost
(megatron.core.parallel_state.RankGenerator's `order`; DeepSpeed's ProcessTopology has pipe outermost, then
data, then model):

    order "tp-cp-ep-dp-pp", world 8, tensor 2, pipeline 2:   grid[pp, dp, tp] = arange(8).reshape(2, 2, 2)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.words import named_values

AXES = {"tp": "tensor", "cp": "context", "dp": "data", "pp": "pipeline"}
#: What each kind of group runs over. Gradients are reduced over data x context (megatron.core's dp_cp group).
KINDS = {
    "data": ("dp", "cp"),
    "tensor": ("tp",),
    "context": ("cp",),
    "expert": (),
    "pipeline": ("pp",),
}
#: The kinds that placement keeps inside one fabric.
INSIDE = ("data", "tensor", "context", "expert")
DEFAULT_ORDER = "tp-cp-ep-dp-pp"
#: Where whole pipelines follow each other (Megatron-LM's --use-tp-pp-dp-mapping).
PIPELINES_FIRST = "tp-cp-ep-pp-dp"


@dataclass(frozen=True)
class Sizes:
    """data = 0: what the world size leaves. expert divides data x context x tensor."""

    pipeline: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1
    data: int = 0
    order: str = DEFAULT_ORDER

    def __post_init__(self) -> None:
        for name in ("pipeline", "tensor", "context", "expert"):
            if getattr(self, name) < 1:
                raise HolmesError(
                    f"parallel size {name} is {getattr(self, name)}; it must be 1 or more"
                )
        if self.data < 0:
            least = "it must be 1 or more, or 0 to derive it from the world size"
            raise HolmesError(f"parallel size data is {self.data}; {least}")
        axes = self.order.split("-")
        unknown = [axis for axis in axes if axis not in (*AXES, "ep")]
        if unknown or len(set(axes)) != len(axes):
            raise HolmesError(
                f"order {self.order!r}: its parts are tp, cp, ep, dp, pp, each at most once"
            )
        named = {**AXES, "ep": "expert"}
        absent = [
            axis for axis, name in named.items() if axis not in axes and getattr(self, name) > 1
        ]
        if absent:
            size = getattr(self, named[absent[0]])
            raise HolmesError(f"order {self.order!r} lacks {absent[0]}, whose size is {size}")

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Innermost first, without the expert axis (it subdivides the others)."""
        named = [axis for axis in self.order.split("-") if axis != "ep"]
        return (*named, *(axis for axis in AXES if axis not in named))

    def complete(self, world_size: int, processes: int = 1) -> Sizes:
        """With `data` worked out; HolmesError names sizes that multiply to `world_size`, and numbers of nodes
        (of so many `processes`) that these would."""
        model = self.pipeline * self.tensor * self.context
        data = self.data or world_size // model
        if model * data != world_size or data == 0:
            product = f"pipeline {self.pipeline} x tensor {self.tensor} x context {self.context}"
            wrong = (
                f"{product} x data {self.data} is not"
                if self.data
                else f"{product} does not divide"
            )
            raise HolmesError(
                f"{wrong} the world size {world_size}; {self._fits(world_size, processes)}"
            )
        if (data * self.context * self.tensor) % self.expert:
            raise HolmesError(
                f"expert size {self.expert} does not divide data {data} x context x tensor"
            )
        return Sizes(self.pipeline, self.tensor, self.context, self.expert, data, self.order)

    def _fits(self, world: int, processes: int) -> str:
        """What would divide: "for tensor 8: pipeline 1, 2, 7, 14; or 12 or 16 nodes for pipeline 4"."""
        inner, model = self.tensor * self.context, self.tensor * self.context * self.pipeline
        fixed = f"tensor {self.tensor}" + (f" x context {self.context}" if self.context > 1 else "")
        unit = math.lcm(model, processes)
        known = sorted(
            {ranks for ranks in (world // unit * unit, -(-world // unit) * unit) if ranks} - {world}
        )
        counts = " or ".join(str(ranks // processes) for ranks in known)
        others = (
            f"{counts} {'nodes' if processes > 1 else 'processes'} for pipeline {self.pipeline}"
        )
        if self.data:
            return "leave data out" + (f"; or {others}" if counts else "")
        if world % inner:
            fitting = [
                size for size in range(1, min(world, 64) + 1) if world % (size * self.context) == 0
            ]
            return f"tensor {_listed(fitting)} would (context {self.context}); or {others}"
        fitting = [size for size in range(1, world // inner + 1) if world // inner % size == 0]
        near = sorted(sorted(fitting, key=lambda size: abs(math.log(size / self.pipeline)))[:6])
        return f"for {fixed}: pipeline {_listed(near)}; or {others}"

    def tensor_inside(self, processes: int) -> bool:
        """Whether every tensor group lies in one node of so many processes."""
        return processes % (self.strides()["tp"] * self.tensor) == 0

    def size(self, axis: str) -> int:
        size: int = getattr(self, AXES[axis])
        return size

    def strides(self) -> dict[str, int]:
        """Distance in ranks between neighbours along each axis; of complete sizes."""
        assert self.data, "complete() first"
        sizes = [self.size(axis) for axis in self.axes]
        return {axis: math.prod(sizes[:index]) for index, axis in enumerate(self.axes)}

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` in coordinate `axis` alone ("dp": its data-parallel group)."""
        stride, size = self.strides()[axis], self.size(axis)
        first = rank - (rank // stride % size) * stride
        return tuple(first + index * stride for index in range(size))

    def stage(self, rank: int) -> int:
        """Pipeline stage of `rank`."""
        return rank // self.strides()["pp"] % self.pipeline


def groups(sizes: Sizes, kind: str) -> list[tuple[int, ...]]:
    """The ranks of every group of `kind` (a key of KINDS), in the order of first ranks; of complete sizes."""
    strides = sizes.strides()
    if kind == "expert":
        return _expert_groups(sizes, strides)
    members = _span(strides, {axis: sizes.size(axis) for axis in KINDS[kind]})
    firsts = _span(strides, {axis: sizes.size(axis) for axis in AXES if axis not in KINDS[kind]})
    return [tuple(first + member for member in members) for first in firsts]


def expert_grid(sizes: Sizes) -> tuple[dict[str, int], dict[str, int]]:
    """(sizes, strides) of a second grid over the ranks of a stage, without a context axis, whose "ep" is an
    expert-parallel group: megatron.core.parallel_state's, its tensor size 1 where expert x tensor does not
    divide a stage."""
    tensor = sizes.tensor if (sizes.data * sizes.context) % sizes.expert == 0 else 1
    ranks = sizes.data * sizes.context * sizes.tensor
    grid = {"tp": tensor, "ep": sizes.expert, "dp": ranks // (tensor * sizes.expert)}
    named = [axis for axis in sizes.order.split("-") if axis in grid]
    strides, step = {}, 1
    for axis in dict.fromkeys((*named, *grid)):
        strides[axis] = step
        step *= grid[axis]
    return grid, strides


def _expert_groups(sizes: Sizes, rank_strides: dict[str, int]) -> list[tuple[int, ...]]:
    grid, strides = expert_grid(sizes)
    stage = _span(rank_strides, {axis: sizes.size(axis) for axis in AXES if axis != "pp"})
    members = _span(strides, {"ep": grid["ep"]})
    firsts = _span(strides, {"tp": grid["tp"], "dp": grid["dp"]})
    local = [[stage[first + member] for member in members] for first in firsts]
    shifts = [index * rank_strides["pp"] for index in range(sizes.pipeline)]
    return sorted(tuple(rank + shift for rank in group) for group in local for shift in shifts)


def _span(strides: dict[str, int], sizes: dict[str, int]) -> list[int]:
    """All sums of coordinate x stride, ascending."""
    ranks = [0]
    for axis, size in sizes.items():
        ranks = [rank + index * strides[axis] for rank in ranks for index in range(size)]
    return sorted(ranks)


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


def parse_sizes(text: str, where: str) -> Sizes:
    """Sizes from "pipeline=2,tensor=1" (keys: pipeline, tensor, context, expert, data, order)."""
    values: dict[str, Any] = {}
    named = named_values(text.split(","), [item.name for item in fields(Sizes)], where)
    for key, value in named.items():
        if key != "order" and not (value.isdecimal() and len(value) < 10):
            raise HolmesError(
                f"{where}: {key} is {value!r:.80}, which is not a whole number below 10^9"
            )
        values[key] = value if key == "order" else int(value)
    return Sizes(**values)


def divisors(number: int) -> list[int]:
    """Ascending."""
    small = [value for value in range(1, int(number**0.5) + 1) if number % value == 0]
    return small + [number // value for value in reversed(small) if value * value != number]


def tied_sums(sizes: Sizes) -> list[tuple[int, ...]]:
    """Ranks with the same part of such a weight: of the first and of the last stage in turn."""
    group_of = {rank: group for group in groups(sizes, "data") for rank in group}
    ends = {(group_of[ranks[0]], group_of[ranks[-1]]) for ranks in groups(sizes, "pipeline")}
    return [
        tuple(rank for pair in zip(first, last) for rank in pair) for first, last in sorted(ends)
    ]


def sizes_text(sizes: Sizes) -> str:
    """ "pipeline=2, tensor=4": as --holmes-sizes takes it."""
    axes = ("pipeline", "tensor", "context", "expert")
    named = [f"{name}={size}" for name in axes if (size := getattr(sizes, name)) > 1]
    named += [f"order={sizes.order}"] if sizes.order != DEFAULT_ORDER else []
    return ", ".join(named) or "pipeline=1"
