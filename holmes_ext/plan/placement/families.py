"""Groups of ranks that are alike, and messages between stages, by the nodes on which they lie."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from holmes_ext.plan.placement.placement import Content, Placement, joined


@dataclass(frozen=True)
class GroupPart:
    """Nodes of one class in a group."""

    node: int
    kind: int
    #: In one group.
    nodes: int
    #: Ranks of one group on each node.
    here: int
    #: Groups of the family on each node.
    groups: int
    #: Groups of all families and stages on each node.
    crowd: int


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
class StageEdge:
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
    def turned(self) -> StageEdge:
        """The way back."""
        sender, receiver = self.kinds
        kinds = receiver, sender
        return StageEdge(self.receiver, self.sender, kinds, self.reaching, self.leaving, self.count,
                         self.local)


def family_of(placement: Placement, ranks: Sequence[int]) -> GroupFamily:
    """A group of any ranks, as if the others of its nodes were in groups like it."""
    kinds, here = placement.kinds(), Counter(rank // placement.processes for rank in ranks)
    alike = Counter((kinds[slot], count) for slot, count in here.items())
    parts = []
    for number, ((kind, count), nodes) in enumerate(alike.items()):
        together = max(1, placement.processes // count)
        parts.append(GroupPart(number, kind, nodes, count, together, together))
    return GroupFamily(0, len(ranks), 1, tuple(parts), (), joined((kinds[slot], 1) for slot in here))
