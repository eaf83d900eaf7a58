"""Nodes of each pipeline stage, and the groups of ranks on them.

    rank       0 1 | 2 3 | 4 5 | 6 7      rank r runs on slot r // processes
    slot        0     1     2     3       a position in the order of the nodes
    slots      (a, 2), (b, 2)             the types of the nodes in the slots, as runs of equal kinds
    stages     ((a, 4),), ((b, 4),)       pipeline 2: the types of the nodes of each stage, with ranks

Nodes of one kind are equal for the network (Network.kinds): in the same cluster, on the same fabrics.

Prices and simulations need not look at all ranks. A Fold finds equal ranks and counts them:

    pipeline   one rank of every stage. Pipelines of one kind have equal nodes, groups and stage links.
    node       Nodes of one class hold ranks of the same pipeline classes, so their NICs are equally busy.
    family     equal groups of a stage

A Fold looks at one unit of ranks in a run of equal nodes: the shortest piece that contains whole nodes and
whole groups. If a node holds several neighbours of a tensor-parallel group, it looks at one of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, groupby
from math import gcd, lcm
from typing import NamedTuple, TypeVar

from holmes_ext.plan.sizes import AXES, KINDS, Sizes, expert_grid

#: (node type, number of nodes or ranks)
Run = tuple[int, int]
#: Runs of a stage, in the order of its ranks.
Content = tuple[Run, ...]


def runs(kinds: Iterable[int]) -> Content:
    """Return runs of equal kinds: 0 0 1 -> (0, 2), (1, 1)."""
    return tuple((kind, len(list(equal))) for kind, equal in groupby(kinds))


def joined(parts: Iterable[Run]) -> Content:
    """Join neighbouring runs of one kind: (0, 2), (0, 1), (1, 1) -> (0, 3), (1, 1)."""
    merged: list[Run] = []
    for kind, count in parts:
        if merged and merged[-1][0] == kind:
            count += merged.pop()[1]
        merged.append((kind, count))
    return tuple(merged)


@dataclass(frozen=True)
class Placement:
    """Order of the nodes of a job, as node types."""

    sizes: Sizes  # parallel sizes, with the data size
    processes: int  # of each node
    node_runs: Content  # types of the nodes, in the order of the ranks
    #: Names of the nodes in the order of the ranks, if a user chose them. Otherwise the nodes of a kind stand
    #: in the launcher's order.
    names: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, sizes: Sizes, processes: int, kinds: Iterable[int]) -> Placement:
        """Return the placement with these node types, in the order of the ranks."""
        return cls(sizes, processes, runs(kinds))

    @classmethod
    def of_parts(cls, sizes: Sizes, processes: int, parts: Sequence[Sequence[int]]) -> Placement:
        """Return the placement with these node types in each component.

        Args:
            sizes: Parallel sizes, with the data size.
            processes: Ranks of each node.
            parts: For each component (stages that share nodes), the kinds of its nodes. All components have
                as many nodes.
        """
        if len(parts) == 1:
            return cls.of(sizes, processes, parts[0])
        ranks = sum(map(len, parts)) * processes
        nodes = len(parts[0])
        # The ranks consist of blocks with all stages, and each component has a piece of each block.
        block_ranks = sizes.strides()["pp"] * sizes.pipeline
        blocks = ranks // block_ranks
        piece = nodes // blocks  # nodes of a component in a block
        kinds: list[int] = []
        for start in range(0, nodes, piece):
            for part in parts:
                kinds += part[start : start + piece]
        return cls.of(sizes, processes, kinds)

    @cached_property
    def nodes(self) -> int:
        """Return the number of nodes."""
        return sum(count for _, count in self.node_runs)

    @cached_property
    def stage_ranks(self) -> int:
        """Return the number of ranks of a stage."""
        return self.nodes * self.processes // self.sizes.pipeline

    @cached_property
    def stride(self) -> int:
        """Return the distance, in ranks, from a rank to the same position of the next stage."""
        return self.sizes.strides()["pp"]

    def node_types(self) -> list[int]:
        """Return the type of the node in each slot."""
        return [kind for kind, count in self.node_runs for _ in range(count)]

    def rank(self, position: int, stage: int) -> int:
        """Return the rank at a position (0, 1, ...) among the ranks of a stage."""
        block, offset = divmod(position, self.stride)
        return (block * self.sizes.pipeline + stage) * self.stride + offset

    @cached_property
    def stages(self) -> tuple[Content, ...]:
        """Return the node types of each stage, in order, with the number of ranks on each.

        Ranks come in blocks of pipeline x stride ranks. In a block, each stage has `stride` ranks that follow
        each other.
        """
        block_ranks = self.stride * self.sizes.pipeline
        parts: list[list[Run]] = [[] for _ in range(self.sizes.pipeline)]
        rank = 0
        for kind, nodes in self.node_runs:
            end = rank + nodes * self.processes
            while rank < end:
                stage, offset = divmod(rank % block_ranks, self.stride)
                is_at_block_start = rank % block_ranks == 0
                # Blocks that lie in this run of equal nodes as a whole are added at once.
                whole_blocks = (end - rank) // block_ranks if is_at_block_start else 0
                if whole_blocks:
                    for part in parts:
                        part.append((kind, whole_blocks * self.stride))
                    rank += whole_blocks * block_ranks
                else:
                    ranks = min(self.stride - offset, end - rank)
                    parts[stage].append((kind, ranks))
                    rank += ranks
        # Equal stages share one object, which makes comparisons fast.
        shared: dict[Content, Content] = {}
        return tuple(shared.setdefault(content, content) for content in map(joined, parts))

    @cached_property
    def borders(self) -> list[int]:
        """Return the positions at which the node type changes in some stage, with 0 and the end."""
        contents = dict.fromkeys(self.stages)
        ends = {end for content in contents for end in accumulate(ranks for _, ranks in content)}
        return [0, *sorted(ends)]

    @cached_property
    def stages_per_component(self) -> int:
        """Return the number of neighbouring stages that share nodes and form a component.

        A stage begins on a new node after every `count` stages. If `count` divides the pipeline, that many
        stages are a component; else all stages are one. All components are equal, and only stage links leave
        them.
        """
        count = self.processes // gcd(self.stride, self.processes)
        return count if self.sizes.pipeline % count == 0 else self.sizes.pipeline

    @cached_property
    def components(self) -> tuple[tuple[int, ...], ...]:
        """Return the slots of each component, in the order of the stages."""
        slots_of: dict[int, list[int]] = {}
        for slot in range(self.nodes):
            stage = slot * self.processes // self.stride % self.sizes.pipeline
            slots_of.setdefault(stage // self.stages_per_component, []).append(slot)
        return tuple(tuple(slots_of[index]) for index in sorted(slots_of))

    @cached_property
    def parts(self) -> tuple[Content, ...]:
        """Return the types of the nodes of each component."""
        if self.stages_per_component > 1:
            kinds = self.node_types()
            return tuple(runs(kinds[slot] for slot in slots) for slots in self.components)
        return tuple(
            tuple((kind, ranks // self.processes) for kind, ranks in content)
            for content in self.stages
        )

    def alone(self, *components: int) -> Placement:
        """Return a placement of some components (stages that share nodes) without the others."""
        if len(components) == len(self.parts):
            return self
        sizes = replace(self.sizes, pipeline=len(components) * self.stages_per_component)
        kinds = [
            [kind for kind, count in self.parts[component] for _ in range(count)]
            for component in components
        ]
        return Placement.of_parts(sizes, self.processes, kinds)


@dataclass(frozen=True)
class GroupPart:
    """Nodes of one class in a group."""

    node_class: int  # class of the nodes
    node_type: int  # cluster and fabrics of the nodes: an index of Network.node_types
    nodes: int  # number of such nodes in one group
    ranks_per_node: int  # ranks of a group on each of these nodes
    groups: int  # groups of the family on each node
    concurrent_groups: int  # groups of all families and stages on each node


@dataclass(frozen=True)
class GroupFamily:
    """Equal groups of a stage."""

    stage: int
    ranks: int  # of each group
    count: int  # number of groups
    parts: tuple[GroupPart, ...]
    pipeline_classes: tuple[int, ...]  # classes of the pipelines whose ranks are in the groups
    ring: Content  # nodes on a ring of all ranks of a group

    @cached_property
    def node_types(self) -> frozenset[int]:
        """Return the node types in a group; equal nodes are of one kind."""
        return frozenset(part.node_type for part in self.parts)

    @cached_property
    def nodes(self) -> int:
        """Return the number of nodes of a group."""
        return sum(part.nodes for part in self.parts)


@dataclass(frozen=True)
class StageMessages:
    """Messages from a stage to another, in pipelines of one kind."""

    sender: int  # class of the sending nodes
    receiver: int  # class of the receiving nodes
    node_types: tuple[int, int]  # types of the sending and the receiving nodes
    leaving: int  # messages that leave a sending node at once
    reaching: int  # messages that reach a receiving node at once
    count: int  # messages of all pipelines of this kind
    local: bool = False  # whether they stay inside a node

    @property
    def turned(self) -> StageMessages:
        """Return the messages in the opposite direction."""
        sender_kind, receiver_kind = self.node_types
        return StageMessages(
            sender=self.receiver,
            receiver=self.sender,
            node_types=(receiver_kind, sender_kind),
            leaving=self.reaching,
            reaching=self.leaving,
            count=self.count,
            local=self.local,
        )


def family_of(placement: Placement, ranks: Sequence[int]) -> GroupFamily:
    """Return a group of arbitrary ranks as a family that contains only this group.

    The remaining ranks of its nodes are assumed to be in groups like this one, which use the NICs too.

    Args:
        placement: Nodes of the job.
        ranks: The group.
    """
    kinds = placement.node_types()
    ranks_on = Counter(rank // placement.processes for rank in ranks)  # slot -> ranks on it
    # (node type, ranks of the group on it) -> number of such nodes
    nodes_like = Counter((kinds[slot], count) for slot, count in ranks_on.items())
    parts = []
    for node_class, ((kind, ranks_per_node), nodes) in enumerate(nodes_like.items()):
        groups = max(1, placement.processes // ranks_per_node)
        part = GroupPart(
            node_class=node_class,
            node_type=kind,
            nodes=nodes,
            ranks_per_node=ranks_per_node,
            groups=groups,
            concurrent_groups=groups,
        )
        parts.append(part)
    return GroupFamily(
        stage=0,
        ranks=len(ranks),
        count=1,
        parts=tuple(parts),
        pipeline_classes=(),
        ring=joined((kinds[slot], 1) for slot in ranks_on),
    )


Key = TypeVar("Key", bound=Hashable)


def numbered(looks: Mapping[Key, Hashable]) -> dict[Key, int]:
    """Return a number (0, 1, ...) for each key: {a: x, b: y, c: x} -> {a: 0, b: 1, c: 0}."""
    number_of = {look: number for number, look in enumerate(dict.fromkeys(looks.values()))}
    return {key: number_of[look] for key, look in looks.items()}


class _Copies(NamedTuple):
    """Ranks and groups that stand for one position and one group of a Fold."""

    ranks: int
    groups: int


class Fold:
    """Pipeline classes, classes of nodes and families of groups of a placement.

    A position is the index of a rank among the ranks of its stage. The pipeline at a position consists of the
    ranks at this position in all stages. The fold looks at some positions only, each with a weight: the
    number of positions like it.
    """

    def __init__(self, placement: Placement):
        """Choose the positions to look at, and number the pipeline classes and the classes of nodes."""
        self.full_placement = placement  # that is folded
        #: Neighbours of a tensor-parallel group on a node, of which the fold looks at one.
        self.tensor_neighbours = _tensor_neighbours(placement)
        processes = placement.processes // self.tensor_neighbours
        sizes = placement.sizes
        if self.tensor_neighbours > 1:
            sizes = replace(sizes, tensor=sizes.tensor // self.tensor_neighbours)
        self.placement = Placement(sizes, processes, placement.node_runs)  # of the ranks looked at
        self.stages = range(sizes.pipeline)
        self._strides = _strides(self.placement)
        self._unit = _repeating_ranks(self.placement, self._strides)
        self._weight = dict(self._positions())  # position -> how many positions are like it
        self._slots = {
            position: tuple(
                self.placement.rank(position, stage) // processes for stage in self.stages
            )
            for position in self._weight
        }  # position -> slot of each stage
        ends = list(accumulate(count for _, count in placement.node_runs))  # slot after each run
        self._node_type_of_slot = {
            slot: placement.node_runs[bisect_right(ends, slot)][0]
            for slots in self._slots.values()
            for slot in slots
        }
        tensor_stride = self._strides["tp"]
        self._data_group = {
            position: position // tensor_stride % sizes.tensor for position in self._weight
        }
        self.pipeline_class_of = self._classes_of_pipelines()  # position -> pipeline class
        self.count: Counter[int] = Counter()  # pipeline class -> number of pipelines
        for position, kind in self.pipeline_class_of.items():
            self.count[kind] += self._weight[position] * self.tensor_neighbours
        # In reverse, so that the first position of a kind is the one that stays in the mapping.
        first_position = {
            kind: position for position, kind in reversed(self.pipeline_class_of.items())
        }
        #: By pipeline class: the slots of one that stands for all.
        self.pipeline_classes = [
            self._slots[first_position[kind]] for kind in sorted(first_position)
        ]
        #: Slot -> (pipeline class, stage) -> ranks.
        self._ranks_on: dict[int, Counter[tuple[int, int]]] = {}
        for position, slots in self._slots.items():
            for stage, slot in enumerate(slots):
                self._ranks_on.setdefault(slot, Counter())[
                    self.pipeline_class_of[position], stage
                ] += 1
        # Slots with equal contents form a class: nodes of one kind, with as many ranks of the same pipelines.
        contents = {
            slot: (self._node_type_of_slot[slot], frozenset(ranks.items()))
            for slot, ranks in self._ranks_on.items()
        }
        self.node_of = numbered(contents)  # slot -> class of node
        # Results that are computed once.
        self._families_of: dict[tuple[int, str], tuple[GroupFamily, ...]] = {}
        self._leaving_between: dict[tuple[int, int], Counter[tuple[int, int]]] = {}

    def _positions(self) -> Iterator[tuple[int, int]]:
        """Yield the positions that the fold looks at, each with the number of positions like it."""
        borders = self.placement.borders
        for low, high in zip(borders, borders[1:]):
            # Between two borders all nodes are equal. If only whole units lie there, the first unit stands
            # for all of them.
            stop = high
            weight = 1
            if low % self._unit == 0 and high % self._unit == 0:
                stop = low + self._unit
                weight = (high - low) // self._unit
            for position in range(low, stop):
                yield position, weight

    def _classes_of_pipelines(self) -> dict[int, int]:
        """Return position -> class of the pipeline that consists of the ranks at this position.

        Pipelines of one kind have equal nodes, cross between nodes at the same stages, and have data-parallel
        groups with the same mixture of pipelines.
        """
        # A look is a value that is equal for pipelines with equal nodes.
        looks = {position: self._look(slots) for position, slots in self._slots.items()}
        mixture: dict[int, Counter[Hashable]] = {}  # data-parallel group -> look -> pipelines
        for position, look in looks.items():
            mixture.setdefault(self._data_group[position], Counter())[look] += self._weight[
                position
            ]
        group_looks = {group: frozenset(counts.items()) for group, counts in mixture.items()}
        return numbered(
            {
                position: (look, group_looks[self._data_group[position]])
                for position, look in looks.items()
            }
        )

    def _look(self, slots: tuple[int, ...]) -> Hashable:
        """Return the kinds of a pipeline's nodes, and whether each stage's next stage is on its node."""
        following = (*slots[1:], slots[0])
        kinds = tuple(self._node_type_of_slot[slot] for slot in slots)
        return kinds, tuple(slot == other for slot, other in zip(slots, following))

    def pipeline_class_at(self, position: int) -> int:
        """Return the class of the pipeline that consists of the ranks at a position of every stage."""
        folded_position = position // self.tensor_neighbours
        # The fold looks at the first unit of a run of equal nodes only.
        if folded_position not in self.pipeline_class_of:
            run_start = max(
                border for border in self.placement.borders if border <= folded_position
            )
            folded_position = run_start + (folded_position - run_start) % self._unit
        return self.pipeline_class_of[folded_position]

    def node_type_on(self, pipeline: int, stage: int) -> int:
        """Return the type of the node that holds a stage of a pipeline class."""
        return self._node_type_of_slot[self.pipeline_classes[pipeline][stage]]

    def ranks(self, pipeline: int, stage: int) -> tuple[int, ...]:
        """Return all ranks of a stage that belong to pipelines of a kind (those on equal nodes)."""
        ranks: list[int] = []
        for first_position, kind in self.pipeline_class_of.items():
            if kind != pipeline:
                continue
            stop = first_position + self._weight[first_position] * self._unit
            for position in range(first_position, stop, self._unit):
                first = self.placement.rank(position, stage) * self.tensor_neighbours
                ranks += range(first, first + self.tensor_neighbours)
        return tuple(sorted(ranks))

    def stage_link(self, pipeline: int, stage: int, other: int) -> StageMessages:
        """Return the messages from `stage` to `other` in a pipeline class, if no other kind sends."""
        return self._stage_link(pipeline, stage, other, concurrent={pipeline})

    def stage_links(
        self, stage: int, other: int, fabric: Callable[[Sequence[int]], Hashable]
    ) -> list[StageMessages]:
        """Return the messages from `stage` to `other` of each pipeline class.

        Args:
            stage: Number of the sending stage.
            other: Number of the receiving stage.
            fabric: Returns the fabric between two node types. All pipeline classes whose messages use
                one fabric send at the same time, so their messages are counted together.
        """
        pipelines = range(len(self.pipeline_classes))
        fabric_of = {
            pipeline: fabric(
                (self.node_type_on(pipeline, stage), self.node_type_on(pipeline, other))
            )
            for pipeline in pipelines
        }
        pipelines_on: dict[Hashable, set[int]] = {}
        for pipeline, name in fabric_of.items():
            pipelines_on.setdefault(name, set()).add(pipeline)
        return [
            self._stage_link(pipeline, stage, other, pipelines_on[fabric_of[pipeline]])
            for pipeline in pipelines
        ]

    def _stage_link(
        self, pipeline: int, stage: int, other: int, concurrent: Collection[int]
    ) -> StageMessages:
        """Return the messages from a stage to another in pipelines of one kind.

        Args:
            pipeline: Pipeline class.
            stage: Number of the sending stage.
            other: Number of the receiving stage.
            concurrent: Pipeline classes that send at the same time, `pipeline` included.
        """
        source = self.pipeline_classes[pipeline][stage]
        target = self.pipeline_classes[pipeline][other]
        leaving_from = self._leaving(stage, other)
        leaving = sum(leaving_from[source, kind] for kind in concurrent)
        # As many messages reach the receiving node as leave it in the opposite direction.
        returning_from = self._leaving(other, stage)
        reaching = sum(returning_from[target, kind] for kind in concurrent)
        return StageMessages(
            sender=self.node_of[source],
            receiver=self.node_of[target],
            node_types=(self._node_type_of_slot[source], self._node_type_of_slot[target]),
            leaving=max(1, self.tensor_neighbours * leaving),
            reaching=max(1, self.tensor_neighbours * reaching),
            count=self.count[pipeline],
            local=source == target,
        )

    def _leaving(self, stage: int, other: int) -> Counter[tuple[int, int]]:
        """Return (slot, pipeline class) -> ranks of `stage` whose `other` stage is on another node."""
        key = (stage, other)
        if key not in self._leaving_between:
            self._leaving_between[key] = Counter(
                (slots[stage], self.pipeline_class_of[position])
                for position, slots in self._slots.items()
                if slots[stage] != slots[other]
            )
        return self._leaving_between[key]

    @cached_property
    def data_groups(self) -> dict[int, int]:
        """Return class of node -> number of data-parallel groups, of all stages, on such a node."""
        groups_on: dict[int, set[tuple[int, int]]] = {}  # slot -> (stage, group)
        for position, slots in self._slots.items():
            for stage, slot in enumerate(slots):
                groups_on.setdefault(slot, set()).add((stage, self._data_group[position]))
        return {
            self.node_of[slot]: len(groups) * self.tensor_neighbours
            for slot, groups in groups_on.items()
        }

    def families(self, stage: int, kind: str = "data") -> tuple[GroupFamily, ...]:
        """Return the groups of a stage, as families of equal groups.

        Args:
            stage: Number of the stage.
            kind: Kind of group, a key of plan/sizes.py's KINDS. Groups of a rank are left out unless this
                is "data".
        """
        if (stage, kind) not in self._families_of:
            self._families_of[stage, kind] = tuple(self._families(stage, kind))
        return self._families_of[stage, kind]

    def _families(self, stage: int, kind: str) -> Iterator[GroupFamily]:
        """Yield the families of a stage's groups of a kind.

        Groups are equal if they have as many ranks on nodes of the same classes, and ranks of the same kinds
        of pipelines.

        Args:
            stage: Number of the stage.
            kind: Kind of group, a key of plan/sizes.py's KINDS.
        """
        members_of = self._groups(kind)
        slot_of = {position: slots[stage] for position, slots in self._slots.items()}
        groups_on: dict[int, set[Hashable]] = {}  # slot -> groups with a rank on it
        for group, members in members_of.items():
            for position in members:
                groups_on.setdefault(slot_of[position], set()).add(group)
        equal_groups: dict[Hashable, list[Hashable]] = {}
        for group, members in members_of.items():
            ranks_on = Counter(slot_of[position] for position in members)
            nodes = Counter((self.node_of[slot], ranks) for slot, ranks in ranks_on.items())
            pipelines = frozenset(self.pipeline_class_of[position] for position in members)
            # (class of node, ranks on it) -> number of such nodes; pipeline classes
            look = (frozenset(nodes.items()), pipelines)
            equal_groups.setdefault(look, []).append(group)
        for groups in equal_groups.values():
            yield self._family(stage, kind, groups, members_of, slot_of, groups_on)

    def _family(
        self,
        stage: int,
        kind: str,
        groups: Sequence[Hashable],
        members_of: Mapping[Hashable, Sequence[int]],
        slot_of: Mapping[int, int],
        groups_on: Mapping[int, Collection[Hashable]],
    ) -> GroupFamily:
        """Return the family of equal groups, counted by the first of them.

        Args:
            stage: Number of the stage.
            kind: Kind of group.
            groups: The equal groups.
            members_of: Group -> positions of its ranks, in order.
            slot_of: Position -> slot in this stage.
            groups_on: Slot -> groups of this kind on it.
        """
        # A data-parallel group contains all units of a run of nodes, other groups lie within one unit.
        is_data = kind == "data"
        copies = self._copies(kind)
        members = members_of[groups[0]]
        # Slot -> number of nodes of the group that it stands for.
        nodes_like = {
            slot_of[position]: self._weight[position] if is_data else 1 for position in members
        }
        count = len(groups)
        if not is_data:
            count = sum(self._weight[members_of[group][0]] for group in groups)
        nodes_of: Counter[GroupPart] = Counter()
        for slot, ranks in Counter(slot_of[position] for position in members).items():
            family_groups = copies.groups * sum(group in groups_on[slot] for group in groups)
            if is_data:
                concurrent_groups = self.data_groups[self.node_of[slot]]
            else:
                stages_on_node = {stage for _, stage in self._ranks_on[slot]}
                concurrent_groups = copies.groups * len(groups_on[slot]) * len(stages_on_node)
            part = GroupPart(
                node_class=self.node_of[slot],
                node_type=self._node_type_of_slot[slot],
                nodes=0,  # counted in nodes_of
                ranks_per_node=copies.ranks * ranks,
                groups=family_groups,
                concurrent_groups=concurrent_groups,
            )
            nodes_of[part] += nodes_like[slot]
        parts = tuple(replace(part, nodes=nodes) for part, nodes in nodes_of.items())
        return GroupFamily(
            stage=stage,
            ranks=sum(part.nodes * part.ranks_per_node for part in parts),
            count=copies.groups * count,
            parts=parts,
            pipeline_classes=tuple(
                sorted({self.pipeline_class_of[position] for position in members})
            ),
            ring=self._ring([slot_of[position] for position in members], nodes_like),
        )

    def _copies(self, kind: str) -> _Copies:
        """Return how many ranks and groups stand for one of each that the fold looks at."""
        if kind == "tensor":
            return _Copies(ranks=self.tensor_neighbours, groups=1)
        return _Copies(ranks=1, groups=self.tensor_neighbours)

    def _ring(self, slots: Sequence[int], nodes_like: Mapping[int, int]) -> Content:
        """Return the node types on a ring of ranks.

        Args:
            slots: Slot of each rank, in the order of the ring.
            nodes_like: Slot -> number of nodes that it stands for.
        """
        visited = [slot for slot, _ in groupby(slots)]  # neighbours on a node count once
        return joined((self._node_type_of_slot[slot], nodes_like[slot]) for slot in visited)

    def _groups(self, kind: str) -> dict[Hashable, list[int]]:
        """Return the positions of the members of every group of a kind, in order.

        A group is named by its coordinates on the axes along which its members do not differ.
        """
        sizes = self.placement.sizes
        if kind == "expert":
            grid, strides = expert_grid(sizes)
            axes = [(strides[axis], grid[axis]) for axis in ("tp", "dp")]  # all but "ep"
        else:
            axes = [
                (self._strides[axis], sizes.size(axis))
                for axis in AXES
                if axis != "pp" and axis not in KINDS[kind]
            ]
        members_of: dict[Hashable, list[int]] = {}
        for position in self._weight:
            coordinates = tuple(position // stride % size for stride, size in axes)
            members_of.setdefault(coordinates, []).append(position)
        # A group of one rank sends nothing. But a position may stand for several ranks of a tensor-parallel
        # group, and a data-parallel group of one rank still counts as a group.
        keep_single = kind == "data" or (kind == "tensor" and self.tensor_neighbours > 1)
        if keep_single:
            return members_of
        return {group: members for group, members in members_of.items() if len(members) > 1}


def _tensor_neighbours(placement: Placement) -> int:
    """Return how many neighbours of a tensor-parallel group every node holds; 1 if they may differ."""
    sizes = placement.sizes
    is_innermost = sizes.axes[0] == "tp"
    experts_keep_tensor = sizes.expert == 1 or expert_grid(sizes)[0]["tp"] == sizes.tensor
    if not is_innermost or not experts_keep_tensor:
        return 1
    return gcd(sizes.tensor, placement.processes)


def _strides(placement: Placement) -> dict[str, int]:
    """Return the distance between neighbours along each axis, among the ranks of a stage."""
    sizes = placement.sizes
    strides = sizes.strides()
    del strides["pp"]
    outside_pipeline = sizes.axes[sizes.axes.index("pp") :]
    return {
        axis: stride // sizes.pipeline if axis in outside_pipeline else stride
        for axis, stride in strides.items()
    }


def _repeating_ranks(placement: Placement, strides: Mapping[str, int]) -> int:
    """Return the number of ranks in the shortest piece of a stage that repeats, or all if none does.

    A piece repeats if it contains whole nodes and, for each group but data-parallel ones, all of its ranks.

    Args:
        placement: The placement.
        strides: Distance between neighbours along each axis, among the ranks of a stage.
    """
    sizes = placement.sizes
    processes = placement.processes
    stage_ranks = placement.stage_ranks
    unit = strides["dp"]  # contains whole tensor and context groups if data is the outermost axis
    is_data_outermost = unit * sizes.data == stage_ranks
    if not is_data_outermost:
        return stage_ranks
    if sizes.expert > 1:
        grid, expert_strides = expert_grid(sizes)
        expert_unit = expert_strides[
            "dp"
        ]  # contains whole expert groups, if "dp" is outermost there too
        if expert_unit * grid["dp"] != stage_ranks:
            return stage_ranks
        unit = lcm(unit, expert_unit)
    stride = placement.stride  # ranks of a stage that follow each other in the order of all ranks
    if stride % processes == 0:
        unit = lcm(unit, processes)
    elif stride < stage_ranks:
        # A stage begins in the middle of a node. Blocks of all stages repeat where a node and a block end.
        block = stride * sizes.pipeline
        unit = lcm(unit, stride * lcm(block, processes) // block)
    else:
        return stage_ranks
    return unit if stage_ranks % unit == 0 else stage_ranks
