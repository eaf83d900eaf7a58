"""Which ranks hold which stage, cluster by cluster, in order; and what of that is alike.

    rank       0 1 | 2 3 | 4 5 | 6 7      rank r runs on slot r // processes
    slot        0     1     2     3       a slot is a place for a node
    slots      (a, 2), (b, 2)             runs of nodes that are alike (Network.kinds)
    stages     ((a, 4),), ((b, 4),)       pipeline 2: for each stage its ranks, run by run

A Fold counts ranks that are alike once: what prices and simulations of a placement look at.

    pipeline   one rank on every stage; those of a kind have like nodes, groups and stage links
    node       those of a class hold the same kinds of ranks: one NIC stands for all of theirs
    family     groups of one stage that are alike

Of a run of like nodes one `unit` of ranks is looked at: the shortest piece that holds whole nodes and whole
groups. Where a node holds `times` neighbours of a tensor group, one stands for all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, groupby
from math import gcd, lcm
from typing import TypeVar

from holmes_ext.plan.sizes import AXES, KINDS, Sizes, expert_grid

#: (kind of node, how many nodes, or ranks)
Run = tuple[int, int]
#: Of one stage, in the order of its ranks.
Content = tuple[Run, ...]


def runs(kinds: Iterable[int]) -> Content:
    """Neighbours of one kind taken together."""
    return tuple((kind, len(list(alike))) for kind, alike in groupby(kinds))


def joined(parts: Iterable[Run]) -> Content:
    """The same for runs, of which neighbours may be of one kind."""
    merged: list[Run] = []
    for kind, count in parts:
        if merged and merged[-1][0] == kind:
            count += merged.pop()[1]
        merged.append((kind, count))
    return tuple(merged)


@dataclass(frozen=True)
class Placement:
    """sizes: complete.  processes: of each node.  slots: nodes in the order of ranks."""

    sizes: Sizes
    processes: int
    slots: Content
    #: Node names by slot, where a user gave them; else those of a kind stand as the launcher has them.
    names: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, sizes: Sizes, processes: int, kinds: Iterable[int]) -> Placement:
        """kinds: of the node in each slot."""
        return cls(sizes, processes, runs(kinds))

    @classmethod
    def of_parts(cls, sizes: Sizes, processes: int, parts: Sequence[Sequence[int]]) -> Placement:
        """parts: kinds of the nodes of each component."""
        if len(parts) == 1:
            return cls.of(sizes, processes, parts[0])
        ranks, size = sum(map(len, parts)) * processes, len(parts[0])
        blocks = ranks // (sizes.strides()["pp"] * sizes.pipeline)
        piece = size // blocks  # nodes of a component that follow each other
        kinds = (
            kind for at in range(0, size, piece) for part in parts for kind in part[at : at + piece]
        )
        return cls.of(sizes, processes, kinds)

    @cached_property
    def nodes(self) -> int:
        return sum(count for _, count in self.slots)

    @cached_property
    def stage_ranks(self) -> int:
        """Ranks of one stage."""
        return self.nodes * self.processes // self.sizes.pipeline

    @cached_property
    def stride(self) -> int:
        """Ranks from one stage to the next."""
        return self.sizes.strides()["pp"]

    def kinds(self) -> list[int]:
        """By slot."""
        return [kind for kind, count in self.slots for _ in range(count)]

    def rank(self, position: int, stage: int) -> int:
        """The rank that stands at `position` among those of a stage."""
        block, place = divmod(position, self.stride)
        return (block * self.sizes.pipeline + stage) * self.stride + place

    @cached_property
    def stages(self) -> tuple[Content, ...]:
        """Kinds of nodes and how many ranks, of each stage."""
        block, stages = self.stride * self.sizes.pipeline, range(self.sizes.pipeline)
        parts: list[list[Run]] = [[] for _ in stages]
        begin = 0
        for kind, count in self.slots:
            end = begin + count * self.processes
            while begin < end:
                stage, place = divmod(begin % block, self.stride)
                whole_blocks = 0 if begin % block else (end - begin) // block
                if whole_blocks:  # blocks of all stages
                    for part in parts:
                        part.append((kind, whole_blocks * self.stride))
                    begin += whole_blocks * block
                    continue
                ranks = min(self.stride - place, end - begin)
                parts[stage].append((kind, ranks))
                begin += ranks
        known: dict[Content, Content] = {}
        return tuple(known.setdefault(content, content) for content in map(joined, parts))

    @cached_property
    def borders(self) -> list[int]:
        """Positions in a stage between which no stage's kind of node changes, 0 and the end among them."""
        contents = dict.fromkeys(self.stages)
        ends = {end for content in contents for end in accumulate(ranks for _, ranks in content)}
        return [0, *sorted(ends)]

    @cached_property
    def tied(self) -> int:
        """Stages that share nodes.

        A stage begins on a node of its own after every `count` stages. If that divides the pipeline, they are
        a component: only stage links leave it. All components are alike.
        """
        count = self.processes // gcd(self.stride, self.processes)
        return count if self.sizes.pipeline % count == 0 else self.sizes.pipeline

    @cached_property
    def components(self) -> tuple[tuple[int, ...], ...]:
        """The slots of each, in the order of stages."""
        slots_of: dict[int, list[int]] = {}
        for slot in range(self.nodes):
            stage = slot * self.processes // self.stride % self.sizes.pipeline
            slots_of.setdefault(stage // self.tied, []).append(slot)
        return tuple(tuple(slots_of[index]) for index in sorted(slots_of))

    @cached_property
    def parts(self) -> tuple[Content, ...]:
        """The nodes of each component."""
        if self.tied == 1:
            return tuple(
                tuple((kind, ranks // self.processes) for kind, ranks in content)
                for content in self.stages
            )
        kinds = self.kinds()
        return tuple(runs(kinds[slot] for slot in slots) for slots in self.components)

    def alone(self, *components: int) -> Placement:
        """These components by themselves."""
        if len(components) == len(self.parts):
            return self
        sizes = replace(self.sizes, pipeline=len(components) * self.tied)
        kinds = [
            [kind for kind, count in self.parts[at] for _ in range(count)] for at in components
        ]
        return Placement.of_parts(sizes, self.processes, kinds)


@dataclass(frozen=True)
class GroupPart:
    """Nodes of one class in a group."""

    node: int
    kind: int
    #: In one group.
    nodes: int
    #: Ranks of one group on each node.
    ranks_per_node: int
    #: Groups of the family on each node.
    groups: int
    #: Groups of all families and stages on each node.
    concurrent_groups: int


@dataclass(frozen=True)
class GroupFamily:
    """Groups of one stage that are alike."""

    stage: int
    #: Of each group.
    ranks: int
    #: How many groups.
    count: int
    parts: tuple[GroupPart, ...]
    #: Kinds of pipelines whose ranks are in them.
    pipelines: tuple[int, ...]
    #: Nodes round a ring of all ranks, in runs of one kind.
    ring: Content

    @cached_property
    def kinds(self) -> frozenset[int]:
        return frozenset(part.kind for part in self.parts)

    @cached_property
    def nodes(self) -> int:
        """Of one group."""
        return sum(part.nodes for part in self.parts)


@dataclass(frozen=True)
class StageMessages:
    """Messages from a stage to another of one kind of pipeline."""

    #: Classes of the nodes, and their kinds.
    sender: int
    receiver: int
    kinds: tuple[int, int]
    #: How many leave a node, reach one, in all.
    leaving: int
    reaching: int
    count: int
    #: Inside one node.
    local: bool = False

    @property
    def turned(self) -> StageMessages:
        """The way back."""
        sender, receiver = self.kinds
        kinds = receiver, sender
        return StageMessages(
            self.receiver, self.sender, kinds, self.reaching, self.leaving, self.count, self.local
        )


def family_of(placement: Placement, ranks: Sequence[int]) -> GroupFamily:
    """A group of any ranks, as if the others of its nodes were in groups like it."""
    kinds, here = placement.kinds(), Counter(rank // placement.processes for rank in ranks)
    alike = Counter((kinds[slot], count) for slot, count in here.items())
    parts = []
    for number, ((kind, count), nodes) in enumerate(alike.items()):
        together = max(1, placement.processes // count)
        parts.append(GroupPart(number, kind, nodes, count, together, together))
    return GroupFamily(
        0, len(ranks), 1, tuple(parts), (), joined((kinds[slot], 1) for slot in here)
    )


Key = TypeVar("Key", bound=Hashable)


def numbered(looks: Mapping[Key, Hashable]) -> dict[Key, int]:
    """Equal looks get equal numbers, in the order of appearance."""
    known = {look: number for number, look in enumerate(dict.fromkeys(looks.values()))}
    return {key: known[look] for key, look in looks.items()}


class Fold:
    """kinds: of pipelines, the slots of one that stands for them; count: pipelines of each kind."""

    def __init__(self, placement: Placement):
        self.of, self.times = placement, _times(placement)
        sizes, processes = placement.sizes, placement.processes // self.times
        if self.times > 1:
            sizes = replace(sizes, tensor=sizes.tensor // self.times)
        self.placement = Placement(sizes, processes, placement.slots)
        self.stages = range(sizes.pipeline)
        self._step = _strides(self.placement)
        self._unit = _unit(self.placement, self._step)
        self._weight = dict(self._positions())
        self._ends = list(accumulate(count for _, count in placement.slots))
        rank = self.placement.rank
        self._slots = {
            at: tuple(rank(at, stage) // processes for stage in self.stages) for at in self._weight
        }
        self._kind_of_slot = {
            slot: self._kind(slot) for slots in self._slots.values() for slot in slots
        }
        looks = {at: self._look(slots) for at, slots in self._slots.items()}
        self._group = {at: at // self._step["tp"] % sizes.tensor for at in self._weight}
        mixed: dict[int, Counter[Hashable]] = {}
        for at, look in looks.items():
            mixed.setdefault(self._group[at], Counter())[look] += self._weight[at]
        made_of = {group: frozenset(counts.items()) for group, counts in mixed.items()}
        self.kind_of = numbered(
            {at: (look, made_of[self._group[at]]) for at, look in looks.items()}
        )
        self.count: Counter[int] = Counter()
        for at, kind in self.kind_of.items():
            self.count[kind] += self._weight[at] * self.times
        first = {kind: at for at, kind in reversed(self.kind_of.items())}
        self.kinds = [self._slots[first[kind]] for kind in sorted(first)]
        self._on: dict[int, Counter[tuple[int, int]]] = {}
        for at, slots in self._slots.items():
            for stage, slot in enumerate(slots):
                self._on.setdefault(slot, Counter())[self.kind_of[at], stage] += 1
        contents = {
            slot: (self._kind_of_slot[slot], frozenset(on.items())) for slot, on in self._on.items()
        }
        self.node_of = numbered(contents)
        self._family: dict[tuple[int, str], tuple[GroupFamily, ...]] = {}
        self._apart: dict[tuple[int, int], Counter[tuple[int, int]]] = {}

    def _positions(self) -> Iterable[tuple[int, int]]:
        """Of a stage's ranks those that are looked at, and how many like each there are."""
        borders = self.placement.borders
        for low, high in zip(borders, borders[1:]):
            stop, like = high, 1
            if low % self._unit == 0 and high % self._unit == 0:
                stop, like = low + self._unit, (high - low) // self._unit
            yield from ((at, like) for at in range(low, stop))

    def _kind(self, slot: int) -> int:
        return self.placement.slots[bisect_right(self._ends, slot)][0]

    def _look(self, slots: tuple[int, ...]) -> Hashable:
        pairs = zip(slots, (*slots[1:], slots[0]))
        return tuple(self._kind_of_slot[slot] for slot in slots), tuple(a == b for a, b in pairs)

    def kind_at(self, position: int) -> int:
        """The kind of pipeline whose ranks stand at a position of every stage."""
        at = position // self.times
        if at not in self.kind_of:
            first = max(border for border in self.placement.borders if border <= at)
            at = first + (at - first) % self._unit
        return self.kind_of[at]

    def kind_on(self, pipeline: int, stage: int) -> int:
        """The kind of node that holds a stage of a kind of pipeline."""
        return self._kind_of_slot[self.kinds[pipeline][stage]]

    def ranks(self, pipeline: int, stage: int) -> tuple[int, ...]:
        """All ranks of a stage of a kind of pipeline."""
        ranks = []
        for at, kind in self.kind_of.items():
            if kind == pipeline:
                places = range(at, at + self._weight[at] * self._unit, self._unit)
                firsts = [self.placement.rank(place, stage) * self.times for place in places]
                ranks += [first + more for first in firsts for more in range(self.times)]
        return tuple(sorted(ranks))

    def stage_link(self, pipeline: int, stage: int, other: int) -> StageMessages:
        """From `stage` to `other` of a kind of pipeline."""
        return self._stage_link(pipeline, stage, other, {pipeline})

    def stage_links(
        self, stage: int, other: int, fabric: Callable[[Sequence[int]], Hashable]
    ) -> list[StageMessages]:
        """Of each kind of pipeline, with all that leaves and reaches a node; fabric: of two kinds of node."""
        pipelines = range(len(self.kinds))
        on = {
            kind: fabric((self.kind_on(kind, stage), self.kind_on(kind, other)))
            for kind in pipelines
        }
        together = {name: {kind for kind in pipelines if on[kind] == name} for name in on.values()}
        return [self._stage_link(kind, stage, other, together[on[kind]]) for kind in pipelines]

    def _stage_link(
        self, pipeline: int, stage: int, other: int, together: Collection[int]
    ) -> StageMessages:
        """together: kinds of pipelines that are counted."""
        source, target = self.kinds[pipeline][stage], self.kinds[pipeline][other]
        kinds = self._kind_of_slot[source], self._kind_of_slot[target]
        leaving = sum(self._leaving(stage, other)[source, kind] for kind in together)
        reaching = sum(self._leaving(other, stage)[target, kind] for kind in together)
        leaving, reaching = (max(1, self.times * count) for count in (leaving, reaching))
        sender, receiver, count = self.node_of[source], self.node_of[target], self.count[pipeline]
        return StageMessages(
            sender, receiver, kinds, leaving, reaching, count, local=source == target
        )

    def _leaving(self, stage: int, other: int) -> Counter[tuple[int, int]]:
        """(slot, kind of pipeline) -> ranks of a stage whose next one is on another node."""
        if (stage, other) not in self._apart:
            apart = (
                (at, slots[stage])
                for at, slots in self._slots.items()
                if slots[stage] != slots[other]
            )
            self._apart[stage, other] = Counter((slot, self.kind_of[at]) for at, slot in apart)
        return self._apart[stage, other]

    @cached_property
    def data_groups(self) -> dict[int, int]:
        """Class of node -> data-parallel groups of all stages on it."""
        groups_on: dict[int, set[tuple[int, int]]] = {}
        for at, slots in self._slots.items():
            for stage, slot in enumerate(slots):
                groups_on.setdefault(slot, set()).add((stage, self._group[at]))
        return {self.node_of[slot]: len(groups) * self.times for slot, groups in groups_on.items()}

    def families(self, stage: int, kind: str = "data") -> tuple[GroupFamily, ...]:
        """Groups of a kind (sizes.py's KINDS) of a stage, those of one rank left out."""
        if (stage, kind) not in self._family:
            self._family[stage, kind] = tuple(self._families(stage, kind))
        return self._family[stage, kind]

    def _families(self, stage: int, kind: str) -> Iterable[GroupFamily]:
        groups = self._groups(kind)
        slot_of = {at: slots[stage] for at, slots in self._slots.items()}
        on: dict[int, set[Hashable]] = {}
        for name, members in groups.items():
            for at in members:
                on.setdefault(slot_of[at], set()).add(name)
        is_data = kind == "data"  # its groups hold all units of a run, others one of them
        ranks_of, groups_of = (self.times, 1) if kind == "tensor" else (1, self.times)
        alike: dict[Hashable, list[Hashable]] = {}
        for name, members in groups.items():
            ranks_on = Counter(slot_of[at] for at in members)
            look = Counter((self.node_of[slot], ranks) for slot, ranks in ranks_on.items())
            kinds = frozenset(self.kind_of[at] for at in members)
            alike.setdefault((frozenset(look.items()), kinds), []).append(name)
        for names in alike.values():
            members = groups[names[0]]
            ranks_on = Counter(slot_of[at] for at in members)
            like = {slot_of[at]: self._weight[at] for at in members}
            count = len(names) if is_data else sum(self._weight[groups[name][0]] for name in names)
            nodes_of: Counter[GroupPart] = Counter()
            for slot, ranks in ranks_on.items():
                node, groups_here = (
                    self.node_of[slot],
                    groups_of * sum(name in on[slot] for name in names),
                )
                stages_there = {stage for _, stage in self._on[slot]}
                crowd = groups_of * len(on[slot]) * len(stages_there)
                crowd = self.data_groups[node] if is_data else crowd
                part = GroupPart(
                    node, self._kind_of_slot[slot], 0, ranks_of * ranks, groups_here, crowd
                )
                nodes_of[part] += like[slot] if is_data else 1
            parts = tuple(replace(part, nodes=nodes) for part, nodes in nodes_of.items())
            turns = [
                at
                for at, before in zip(members, (None, *members))
                if before is None or slot_of[at] != slot_of[before]
            ]
            ring = joined(
                (self._kind_of_slot[slot_of[at]], like[slot_of[at]] if is_data else 1)
                for at in turns
            )
            ranks = sum(part.nodes * part.ranks_per_node for part in parts)
            pipelines = tuple(sorted({self.kind_of[at] for at in members}))
            yield GroupFamily(stage, ranks, groups_of * count, parts, pipelines, ring)

    def _groups(self, kind: str) -> dict[Hashable, list[int]]:
        """Positions of every group's members, in their order, by what they have in common."""
        sizes, members_of = self.placement.sizes, dict[Hashable, list[int]]()
        if kind == "expert":
            grid, strides = expert_grid(sizes)
            steps = [(strides[axis], grid[axis]) for axis in ("tp", "dp")]
        else:
            axes = [axis for axis in AXES if axis != "pp" and axis not in KINDS[kind]]
            steps = [(self._step[axis], sizes.size(axis)) for axis in axes]
        for at in self._weight:
            members_of.setdefault(tuple(at // step % size for step, size in steps), []).append(at)
        skip_single = kind != "data" and (kind != "tensor" or self.times == 1)
        return {
            key: members
            for key, members in members_of.items()
            if len(members) > 1 or not skip_single
        }


def _times(placement: Placement) -> int:
    sizes = placement.sizes
    dense = sizes.expert == 1 or expert_grid(sizes)[0]["tp"] == sizes.tensor
    return gcd(sizes.tensor, placement.processes) if sizes.axes[0] == "tp" and dense else 1


def _strides(placement: Placement) -> dict[str, int]:
    """From one coordinate to the next of each axis, among the ranks of one stage."""
    sizes = placement.sizes
    strides, outer = sizes.strides(), sizes.axes.index("pp")
    del strides["pp"]
    beyond = sizes.axes[outer:]
    return {
        axis: step // sizes.pipeline if axis in beyond else step for axis, step in strides.items()
    }


def _unit(placement: Placement, step: Mapping[str, int]) -> int:
    """Ranks of a stage in the shortest piece that repeats; all of them where none does."""
    sizes, processes, stage_ranks = placement.sizes, placement.processes, placement.stage_ranks
    stride, unit = placement.stride, step["dp"]
    if unit * sizes.data != stage_ranks:
        return stage_ranks
    if sizes.expert > 1:
        grid, strides = expert_grid(sizes)
        unit = lcm(
            unit, strides["dp"] if strides["dp"] * grid["dp"] == stage_ranks else stage_ranks
        )
    if stride % processes == 0:
        unit = lcm(unit, processes)
    elif stride < stage_ranks:
        block = stride * sizes.pipeline
        unit = lcm(unit, stride * lcm(block, processes) // block)
    else:
        return stage_ranks
    return unit if stage_ranks % unit == 0 else stage_ranks
