"""Placements of given sizes that are worth a look: whole clusters one after the other, or sharing stages.

    clusters A B, 4 stages    (A)(B)    A A B B        the pipeline crosses once, gradients stay inside
                              (AB)      AB AB AB AB    whole pipelines in every cluster, gradients cross
    clusters A B C D          (AB)(CD)  AB AB CD CD    both

Groups of equal numbers of kinds of nodes, in every order; kinds that are alike (nodes, GPUs, fabric, ways
between clusters) are interchangeable, so only distinct orders are listed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice

from holmes_ext.plan.across import best_order
from holmes_ext.plan.cost.model import Gpu
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.placement import Placement, joined
from holmes_ext.plan.sizes import PIPELINES_FIRST, Sizes

#: Kinds of nodes that share stages, in the order of stages.
Groups = tuple[tuple[int, ...], ...]
#: Distinct orders that are looked at for one way to group them, times stages.
MAX_ORDERS = 9600
#: Orders where the network between clusters is not flat, which makes them all differ: chains over good links
#: first.
MOST_CHAINED = 9


class Orders:
    """Of one network and the GPUs of its kinds of nodes."""

    def __init__(self, network: Network, gpus: Sequence[Gpu]):
        self.network, self.gpus = network, tuple(gpus)
        self.every = range(len(network.kinds))
        self.nodes = [len(names) for names in network.names]
        fabrics_by_kind = [fabrics for _, fabrics in network.kinds]
        self._uses = Counter(name for fabrics in fabrics_by_kind for name in fabrics)
        looks = [
            (tuple(map(self._look, fabrics)), nodes, gpu)
            for fabrics, nodes, gpu in zip(fabrics_by_kind, self.nodes, self.gpus)
        ]
        #: For each kind the first one that it can be exchanged with.
        self.alike = tuple(
            next(
                first
                for first in self.every
                if looks[first] == looks[kind] and self._between_alike(kind, first)
            )
            for kind in self.every
        )

    def _look(self, name: str) -> Hashable:
        fabric = self.network.line(self.network.site.fabric_by_name[name])
        return name if self._uses[name] > 1 else (fabric.kind, fabric.rate_bps, fabric.latency_s)

    def _between_alike(self, first: int, second: int) -> bool:
        """Whether exchanging these two kinds leaves all links between clusters as they are."""
        wan, names = self.network.wan, self.network.site.clusters
        a, b = self.network.cluster(first), self.network.cluster(second)

        def look(pair: tuple[str, str]) -> Hashable:
            return tuple((hop.key[0], hop.rate_bps, hop.latency_s) for hop in wan.hops(*pair))

        return (
            a == b or not wan or all(look((a, n)) == look((b, n)) for n in names if n not in (a, b))
        )

    def placements(self, sizes: Sizes) -> tuple[list[Placement], bool]:
        """All of them for complete sizes in the default order of ranks, and whether none was left out."""
        pipeline, complete = sizes.pipeline, True
        placements: list[Placement] = []
        for together in (
            size for size in range(1, len(self.every) + 1) if len(self.every) % size == 0
        ):
            if pipeline == 1 and together > 1:
                break  # one stage holds all clusters anyhow
            orders = chain(self._chained(together), self._distinct(together))
            most = min(
                MOST_CHAINED if self.network.wan else MAX_ORDERS, max(8, MAX_ORDERS // pipeline)
            )
            listed = list(dict.fromkeys(islice(orders, 1 if pipeline == 1 else most)))
            complete = complete and (pipeline == 1 or next(orders, None) is None)
            for groups in listed:
                placements += self.made(sizes, groups)
        return placements, complete

    def made(self, sizes: Sizes, groups: Groups) -> list[Placement]:
        """The placement of groups of equal numbers of kinds; none where that does not come out even."""
        if len(groups[0]) > 1:
            return self._shared(sizes, groups)
        slots = tuple((kind, self.nodes[kind]) for (kind,) in groups)
        return [Placement(sizes, self.network.processes, slots)]

    def _chained(self, together: int) -> Iterator[Groups]:
        """On a WAN: the chain over the best links in groups of neighbours, both ways, and with one pair of
        groups exchanged."""
        if not self.network.wan or len(self.every) < 3:
            return

        def cost(pair: tuple[int, int]) -> tuple[float, float]:
            source, target = map(self.network.cluster, pair)
            return self.network.wan.cost((source, target))

        order = self.network.remember("chain", lambda: best_order(self.every, cost))
        groups = tuple(order[at : at + together] for at in range(0, len(order), together))
        yield from (groups, groups[::-1])
        for place in range(len(groups) - 1):
            yield (*groups[:place], groups[place + 1], groups[place], *groups[place + 2 :])

    def _distinct(self, together: int) -> Iterator[Groups]:
        """Distinct sequences of groups of so many kinds."""
        members: dict[int, list[int]] = {}
        for kind, first in enumerate(self.alike):
            members.setdefault(first, []).append(kind)
        used = dict.fromkeys(members, 0)

        def choose(size: int, firsts: list[int]) -> Iterator[tuple[int, ...]]:
            if not size:
                yield ()
            elif firsts:
                available = len(members[firsts[0]]) - used[firsts[0]]
                for amount in range(min(size, available), -1, -1):
                    for rest in choose(size - amount, firsts[1:]):
                        yield (firsts[0],) * amount + rest

        def extend(groups: Groups) -> Iterator[Groups]:
            if len(groups) * together == len(self.alike):
                yield groups
                return
            for firsts in list(choose(together, list(members))):
                group = []
                for first in firsts:
                    group.append(members[first][used[first]])
                    used[first] += 1
                yield from extend((*groups, tuple(group)))
                for first in firsts:
                    used[first] -= 1

        return extend(())

    def _shared(self, sizes: Sizes, groups: Groups) -> list[Placement]:
        """Each kind of a group holds the same part of all its stages; [] where that is uneven."""
        processes, slots, whole_nodes = self.network.processes, [], True
        size, replica = self.network.world // sizes.pipeline, sizes.tensor * sizes.context
        for group in groups:
            ranks = [self.nodes[kind] * processes for kind in group]
            stages = sum(ranks) // size
            if sum(ranks) % size or any(count % (stages * replica) for count in ranks):
                return []
            whole_nodes = whole_nodes and all(count // stages % processes == 0 for count in ranks)
            slots += [
                (kind, count // stages // processes)
                for _ in range(stages)
                for kind, count in zip(group, ranks)
            ]
        if whole_nodes:
            return [Placement(sizes, processes, joined(slots))]
        if len(groups) > 1:
            return []
        slots = [(kind, self.nodes[kind]) for kind in groups[0]]
        return [Placement(replace(sizes, order=PIPELINES_FIRST), processes, tuple(slots))]


def launched(network: Network, sizes: Sizes) -> Placement:
    """The order of the file, as without holmes."""
    names = [node.name for node in network.site.nodes]
    return replace(network.placement(names, sizes), names=())


def described(network: Network, placement: Placement) -> str:
    """ "a -> b" where the pipeline goes from a to b, "a + b" where both hold the same stages."""
    stages_of: dict[str, list[int]] = {}
    for stage, content in enumerate(placement.stages):
        for name in dict.fromkeys(network.cluster(kind) for kind, _ in content):
            stages_of.setdefault(name, []).append(stage)
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, stages in stages_of.items():
        groups.setdefault(tuple(stages), []).append(name)
    return " -> ".join(" + ".join(names) for names in groups.values())
