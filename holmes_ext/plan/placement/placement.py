"""Which ranks hold which stage, cluster by cluster, in order: the one value that all others read.

    rank       0 1 | 2 3 | 4 5 | 6 7      rank r runs on slot r // processes
    slot        0     1     2     3       a slot is a place for a node
    slots      (a, 2), (b, 2)             runs of nodes that are alike (Network.kinds)
    stages     ((a, 4),), ((b, 4),)       pipeline 2: for each stage its ranks, run by run
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, groupby
from math import gcd

from holmes_ext.plan.sizes import Sizes

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
        kinds = (kind for at in range(0, size, piece) for part in parts for kind in part[at : at + piece])
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
        a component: only pipeline edges leave it. All components are alike.
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
                tuple((kind, ranks // self.processes) for kind, ranks in content) for content in self.stages
            )
        kinds = self.kinds()
        return tuple(runs(kinds[slot] for slot in slots) for slots in self.components)

    def alone(self, *components: int) -> Placement:
        """These components by themselves."""
        if len(components) == len(self.parts):
            return self
        sizes = replace(self.sizes, pipeline=len(components) * self.tied)
        kinds = [[kind for kind, count in self.parts[at] for _ in range(count)] for at in components]
        return Placement.of_parts(sizes, self.processes, kinds)
