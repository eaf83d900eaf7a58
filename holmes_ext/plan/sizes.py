"""Parallel sizes of a job (degrees of parallelism), and the groups of ranks that follow from them.

Training engines lay ranks out as a grid, with the first axis of `order` innermost. This is the `order` of
megatron.core.parallel_state.RankGenerator; DeepSpeed's ProcessTopology has pipe outermost, then data,
then model. For example:

    order "tp-cp-ep-dp-pp", world 8, tensor 2, pipeline 2:   grid[pp, dp, tp] = arange(8).reshape(2, 2, 2)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.words import named_values

AXES = {"tp": "tensor", "cp": "context", "dp": "data", "pp": "pipeline"}
#: Kind of group -> axes along which its ranks differ. Gradients are reduced over data x context (the dp_cp
#: group of megatron.core). Expert groups are lines in another grid (expert_grid).
KINDS = {
    "data": ("dp", "cp"),
    "tensor": ("tp",),
    "context": ("cp",),
    "expert": (),
    "pipeline": ("pp",),
}
#: Kinds of groups that a placement keeps inside a fabric.
INSIDE = ("data", "tensor", "context", "expert")
#: Largest tensor size, and number of pipeline sizes, that an error message proposes.
_MOST_TENSOR = 64
_MOST_NAMED = 6
_MOST_DIGITS = 9
DEFAULT_ORDER = "tp-cp-ep-dp-pp"
#: Order in which whole pipelines follow each other (Megatron-LM's --use-tp-pp-dp-mapping).
PIPELINES_FIRST = "tp-cp-ep-pp-dp"


@dataclass(frozen=True)
class Sizes:
    """Parallel sizes of a job: number of ranks along each axis of the grid of ranks."""

    pipeline: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1  # divides data x context x tensor
    data: int = 0  # 0: the world size divided by the other sizes
    order: str = DEFAULT_ORDER  # axes of the grid of ranks, innermost first

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_order()

    def _check_sizes(self) -> None:
        """Raise HolmesError if a size is too small; only the data size may be 0 (not given)."""
        for name in ("pipeline", "tensor", "context", "expert"):
            if getattr(self, name) < 1:
                raise HolmesError(
                    f"parallel size {name} is {getattr(self, name)}; it must be 1 or more"
                )
        if self.data < 0:
            least = "it must be 1 or more, or 0 to derive it from the world size"
            raise HolmesError(f"parallel size data is {self.data}; {least}")

    def _check_order(self) -> None:
        """Raise HolmesError if `order` has unknown or repeated axes, or lacks an axis of a size above 1."""
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
        """Return the axes of the grid of all ranks ("tp", "cp", "dp", "pp"), innermost first.

        Ranks that are neighbours along the innermost axis have consecutive numbers. Axes that `order`
        lacks come last. The expert axis "ep" is left out: expert-parallel groups are made of ranks
        along the other axes (expert_grid).
        """
        named = [axis for axis in self.order.split("-") if axis != "ep"]
        return (*named, *(axis for axis in AXES if axis not in named))

    def complete(self, world_size: int, processes: int = 1) -> Sizes:
        """Return these parallel sizes with the data size for which their product is the world size.

        Args:
            world_size: Number of ranks.
            processes: Ranks of each node, for the error message; 1 if the nodes differ.

        Raises:
            HolmesError: The sizes do not multiply to the world size. The message names sizes and numbers of
                nodes that would.
        """
        model_ranks = self.pipeline * self.tensor * self.context
        data = self.data or world_size // model_ranks
        if model_ranks * data != world_size or data == 0:
            product = f"pipeline {self.pipeline} x tensor {self.tensor} x context {self.context}"
            if self.data:
                problem = f"{product} x data {self.data} is not"
            else:
                problem = f"{product} does not divide"
            way_out = self._advice_on_sizes(world_size, processes)
            raise HolmesError(f"{problem} the world size {world_size}; {way_out}")
        if (data * self.context * self.tensor) % self.expert:
            raise HolmesError(
                f"expert size {self.expert} does not divide data {data} x context x tensor"
            )
        return replace(self, data=data)

    def _advice_on_sizes(self, world_size: int, processes: int) -> str:
        """Return the end of an error message: two ways to make the sizes and the nodes fit.

        The message begins with "... does not divide the world size 56; ". Its end proposes another
        value of the size at fault, or other numbers of nodes (`node_counts`):

            data         "leave data out; or 12 or 16 nodes for pipeline 4"
            tensor       "tensor 1, 2, 4 would (context 2); or 12 nodes for pipeline 4"
            pipeline     "for tensor 8: pipeline 1, 7; or 12 or 16 nodes for pipeline 4"

        Args:
            world_size: Number of ranks of the job; the sizes do not divide it.
            processes: Ranks of each node; 1 if the nodes differ.
        """
        world_sizes = self._fitting_world_sizes(world_size, processes)
        counts = " or ".join(str(ranks // processes) for ranks in world_sizes)
        unit = "nodes" if processes > 1 else "processes"
        node_counts = f"{counts} {unit} for pipeline {self.pipeline}"
        if self.data:  # given by the user, though it would follow from the other sizes
            return f"leave data out; or {node_counts}" if counts else "leave data out"
        ranks_per_stage_copy = self.tensor * self.context
        if world_size % ranks_per_stage_copy:
            # No pipeline size fits. Propose tensor sizes that divide the ranks.
            most = min(world_size, _MOST_TENSOR)
            tensor_sizes = [
                size for size in range(1, most + 1) if world_size % (size * self.context) == 0
            ]
            return (
                f"tensor {_listed(tensor_sizes)} would (context {self.context}); or {node_counts}"
            )

        # Tensor and context size fit. Propose the pipeline sizes that are nearest by ratio.
        fixed = f"tensor {self.tensor}"
        if self.context > 1:
            fixed += f" x context {self.context}"
        pipeline_sizes = divisors(world_size // ranks_per_stage_copy)
        pipeline_sizes.sort(key=lambda size: abs(math.log(size / self.pipeline)))
        nearest = sorted(pipeline_sizes[:_MOST_NAMED])
        return f"for {fixed}: pipeline {_listed(nearest)}; or {node_counts}"

    def _fitting_world_sizes(self, world_size: int, processes: int) -> list[int]:
        """Return the nearest world sizes below and above `world_size` that consist of whole pipelines.

        They also consist of whole nodes, with `processes` ranks each. `world_size` itself is left out.
        """
        pipeline_ranks = self.pipeline * self.tensor * self.context
        step = math.lcm(pipeline_ranks, processes)  # all world sizes that fit are multiples of it
        below = world_size // step * step
        above = math.ceil(world_size / step) * step
        return sorted({ranks for ranks in (below, above) if ranks} - {world_size})

    def tensor_inside(self, processes: int) -> bool:
        """Return whether every tensor-parallel group lies in a single node of `processes` ranks."""
        return processes % (self.strides()["tp"] * self.tensor) == 0

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis of the grid, such as "tp"."""
        size: int = getattr(self, AXES[axis])
        return size

    def strides(self) -> dict[str, int]:
        """Return the distance, in ranks, between neighbours along each axis; needs the data size."""
        assert self.data, "complete() first"
        sizes = [self.size(axis) for axis in self.axes]
        return {axis: math.prod(sizes[:index]) for index, axis in enumerate(self.axes)}

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` only along an axis, such as "dp"."""
        stride = self.strides()[axis]
        size = self.size(axis)
        first = rank - (rank // stride % size) * stride
        return tuple(first + index * stride for index in range(size))

    def stage(self, rank: int) -> int:
        """Return the pipeline stage of a rank."""
        return rank // self.strides()["pp"] % self.pipeline


def groups(sizes: Sizes, kind: str) -> list[tuple[int, ...]]:
    """Return the ranks of every group of a kind, in the order of their first ranks.

    The ranks of a group differ only in their coordinates on the axes KINDS[kind] of the grid of ranks.

    Args:
        sizes: Parallel sizes, with the data size.
        kind: "data", "tensor", "context", "expert" or "pipeline".
    """
    strides = sizes.strides()
    if kind == "expert":
        return _expert_groups(sizes, strides)
    # A group is its first rank plus the same distances as in every other group.
    members = _offsets(strides, {axis: sizes.size(axis) for axis in KINDS[kind]})
    firsts = _offsets(strides, {axis: sizes.size(axis) for axis in AXES if axis not in KINDS[kind]})
    return [tuple(first + member for member in members) for first in firsts]


def expert_grid(sizes: Sizes) -> tuple[dict[str, int], dict[str, int]]:
    """Return the sizes and strides of the grid of experts over the ranks of a stage, by axis.

    A stage's ranks form a grid of data x context x tensor ranks. Layers with experts arrange the same
    ranks in another grid (as megatron.core.parallel_state), with the axes "tp", "ep" and "dp" and
    without a context axis. An expert-parallel group is a line along "ep".

    The grid keeps the job's tensor size if data x context is a multiple of the expert size. Otherwise
    its tensor size is 1. Example: of 8 ranks with data 2, tensor 4 and expert 2, the grid is "tp" 4, "ep"
    2, "dp" 1. With expert 8 it is "tp" 1, "ep" 8, "dp" 1.

    Returns:
        Axis -> size, and axis -> distance between neighbours, among the ranks of a stage.
    """
    is_tensor_kept = (sizes.data * sizes.context) % sizes.expert == 0
    tensor = sizes.tensor if is_tensor_kept else 1
    ranks = sizes.data * sizes.context * sizes.tensor
    grid = {"tp": tensor, "ep": sizes.expert, "dp": ranks // (tensor * sizes.expert)}
    named = [axis for axis in sizes.order.split("-") if axis in grid]
    strides = {}
    stride = 1
    # Innermost axis first; axes that `order` lacks come last.
    for axis in dict.fromkeys((*named, *grid)):
        strides[axis] = stride
        stride *= grid[axis]
    return grid, strides


def _expert_groups(sizes: Sizes, rank_strides: dict[str, int]) -> list[tuple[int, ...]]:
    """Return the ranks of every expert-parallel group, in the order of their first ranks.

    The groups follow from the grid of experts, a second arrangement of the ranks of each stage (see
    expert_grid()).

    Args:
        sizes: Parallel sizes, with the data size.
        rank_strides: Axis -> difference of the global ranks of two neighbours along it.
    """
    # First find the groups as positions among the ranks of a stage: 0, 1, 2, ... A group is a line
    # along "ep" in the grid of experts, so it has the position of its first member, plus each offset
    # along "ep".
    expert_sizes, expert_strides = expert_grid(sizes)
    outside_group = {axis: expert_sizes[axis] for axis in ("tp", "dp")}
    first_positions = _offsets(expert_strides, outside_group)
    offsets_in_group = _offsets(expert_strides, {"ep": expert_sizes["ep"]})

    # Then convert positions into global ranks, which are in order of position in each stage. Ranks
    # at the same position in neighbouring stages differ by the stride of "pp".
    axes_of_stage = {axis: sizes.size(axis) for axis in AXES if axis != "pp"}
    ranks_of_stage_0 = _offsets(rank_strides, axes_of_stage)  # by position
    result = []
    for first in first_positions:
        group_of_stage_0 = [ranks_of_stage_0[first + offset] for offset in offsets_in_group]
        for stage in range(sizes.pipeline):
            shift = stage * rank_strides["pp"]
            result.append(tuple(rank + shift for rank in group_of_stage_0))
    return sorted(result)


def _offsets(strides: dict[str, int], sizes: dict[str, int]) -> list[int]:
    """Return the distance of every point of a grid of ranks from its first point, ascending.

    Args:
        strides: Axis -> distance between neighbours.
        sizes: Axis -> number of coordinates.
    """
    ranks = [0]
    for axis, size in sizes.items():
        ranks = [rank + index * strides[axis] for rank in ranks for index in range(size)]
    return sorted(ranks)


def _listed(values: Sequence[int]) -> str:
    """Join numbers to a text such as "1, 2, 4"."""
    return ", ".join(map(str, values))


def parse_sizes(text: str, where: str) -> Sizes:
    """Return the sizes in a text such as "pipeline=2,tensor=1".

    Args:
        text: Fields of Sizes with their values.
        where: Origin of the text, for messages.

    Raises:
        HolmesError: A key is unknown, or a value is bad.
    """
    values: dict[str, Any] = {}
    named = named_values(text.split(","), [item.name for item in fields(Sizes)], where)
    for key, value in named.items():
        if key == "order":
            values[key] = value
            continue
        if not value.isdecimal() or len(value) > _MOST_DIGITS:
            raise HolmesError(
                f"{where}: {key} is {value!r:.80}, which is not a whole number below 10^9"
            )
        values[key] = int(value)
    return Sizes(**values)


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending."""
    small = [value for value in range(1, int(number**0.5) + 1) if number % value == 0]
    large = [number // value for value in small]  # may repeat the root of a square
    return sorted({*small, *large})


def tied_sums(sizes: Sizes) -> list[tuple[int, ...]]:
    """Return the groups that sum the gradient of a weight that the first and the last stage share.

    The ranks of a group hold the same part of this tied weight (such as the embedding). In each
    group, ranks of the first and of the last stage alternate.

    Args:
        sizes: Parallel sizes, with the data size.
    """
    # Ranks with the same part of the weight in a stage are a data-parallel group.
    group_of = {rank: group for group in groups(sizes, "data") for rank in group}
    # The groups of the first and the last stage that belong together: pipelines connect them.
    ends = {(group_of[ranks[0]], group_of[ranks[-1]]) for ranks in groups(sizes, "pipeline")}
    result = []
    for first, last in sorted(ends):
        pairs = zip(first, last)
        result.append(tuple(rank for pair in pairs for rank in pair))
    return result


def sizes_text(sizes: Sizes) -> str:
    """Return the sizes as --holmes-sizes takes them, such as "pipeline=2, tensor=4"."""
    named = [
        f"{name}={getattr(sizes, name)}"
        for name in ("pipeline", "tensor", "context", "expert")
        if getattr(sizes, name) > 1
    ]
    if sizes.order != DEFAULT_ORDER:
        named.append(f"order={sizes.order}")
    return ", ".join(named) or "pipeline=1"
