"""Sums by way of other clusters: round a ring, or up a tree and down again (plan/across.py).

    ring a b c   a: send part 0 | take 2, add, send on | take 1,
                 add: the total of 1, send on | take 0, 2: totals
    tree b: a c  a: send        |                        take the total
                 b: take from a and c, add, send both the total

Of every piece one rank in each cluster has the cluster's sum; those act as above. All receives of a tensor
are posted when its reduction begins and each round has a thread of its own (steps.py), so chunks follow each
other on a link without waiting for what its latency holds back. An element is added up in one order, on one
rank, and its total passed on: all ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from holmes_ext.runtime.reduce.direct import wait_for

if TYPE_CHECKING:
    from holmes_ext.plan.across import CrossClusterAlgorithm
    from holmes_ext.runtime.reduce.direct import DirectExchange, Parts

#: Tags: of a tree's ways, and of a ring's rounds from _UP on.
_UP, _DOWN = 10, 11


@dataclass(frozen=True)
class Round:
    """takes: (cluster, part, tag, added or replacing), then sends: (cluster, part, tag); numbers of
    clusters."""

    takes: tuple[tuple[int, int, int, bool], ...]
    sends: tuple[tuple[int, int, int], ...]


def rounds(across: CrossClusterAlgorithm, names: Sequence[str], me: str) -> list[Round]:
    """What cluster `me` does."""
    number = {name: index for index, name in enumerate(names)}
    if across.algorithm == "tree":
        parent = dict(zip(across.order, across.parents))[me]
        children = [number[child] for child, above in zip(across.order, across.parents) if above == me]
        down = tuple((child, 0, _DOWN) for child in children)
        up = Round(tuple((child, 0, _UP, True) for child in children),
                   ((number[parent], 0, _UP),) if parent else down)
        return [up, Round(((number[parent], 0, _DOWN, False),), down)] if parent else [up]
    count, place = len(across.order), across.order.index(me)
    before, after = number[across.order[place - 1]], number[across.order[(place + 1) % count]]
    ring = [Round((), ((after, place, _UP),))]
    for turn in range(1, 2 * count - 1):
        part, goes_on = (place - turn) % count, turn < 2 * count - 2
        take = before, part, _UP + turn - 1, turn < count
        ring.append(Round((take,), ((after, part, _UP + turn),) if goes_on else ()))
    return ring


@dataclass
class Passage:
    """A chunk on its way. arriving: by round, (works, what arrives, where it goes, added)."""

    owned: list[Parts]
    arriving: list[list[tuple[Any, torch.Tensor, torch.Tensor, bool]]]
    sent: list[Any] = field(default_factory=list)


class Relay:
    """exchange: its groups and tags from _UP on are used; clusters: as owners are listed; me: this rank's."""

    def __init__(self, exchange: DirectExchange, across: CrossClusterAlgorithm, clusters: Sequence[str],
                 me: str):
        self._exchange, self.rounds = exchange, rounds(across, clusters, me)
        self.parts = 1 if across.algorithm == "tree" else len(clusters)

    def expect(self, owned: list[Parts]) -> Passage:
        """Posts the receives of a chunk. owned: this rank's pieces, in `parts` parts, an owner per
        cluster."""
        arriving: list[list[tuple[Any, torch.Tensor, torch.Tensor, bool]]] = [[] for _ in self.rounds]
        for turn, step in enumerate(self.rounds):
            for parts, owners in owned:
                for cluster, number, tag, added in step.takes:
                    mine = parts[number]
                    wire = torch.empty_like(mine) if added else mine
                    works: list[Any] = []
                    self._exchange.post(works, dist.irecv, wire, owners[cluster], tag)
                    arriving[turn].append((works, wire, mine, added))
        return Passage(owned, arriving)

    def turn(self, turn: int, passage: Passage) -> None:
        """One round of a chunk; after the last one all has left and come."""
        for works, wire, mine, added in passage.arriving[turn]:
            wait_for(works)
            if added:
                mine.add_(wire)
        for parts, owners in passage.owned:
            for cluster, number, tag in self.rounds[turn].sends:
                self._exchange.post(passage.sent, dist.isend, parts[number], owners[cluster], tag)
        if turn == len(self.rounds) - 1:
            wait_for(passage.sent)
