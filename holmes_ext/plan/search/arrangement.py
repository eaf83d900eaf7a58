"""Which clusters' GPUs run which pipeline stage, and the order of nodes that makes it so.

    clusters A B, 4 stages    blocks (A)(B)      stages  A A B B       the pipeline crosses once, gradients stay inside
                              one group (AB)     stages  AB AB AB AB   whole pipelines in every cluster, gradients cross
    clusters A B C D          groups (AB)(CD)    stages  AB AB CD CD   both

A stage's content is a tuple of (cluster, ranks) in the order of its data-parallel ranks. Groups of equal numbers of
clusters are looked at, in every order; clusters that are alike (nodes, GPU, fabric's kind, rate and latency, measured
ones first) are interchangeable, so only distinct orders are listed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby, islice
from math import inf
from typing import Any, TypeVar

from holmes_ext.cluster.site import ETHERNET, Fabric, Site
from holmes_ext.cluster.wan import Wan
from holmes_ext.plan.cost.across import best_order, neighbours
from holmes_ext.plan.cost.links import Links
from holmes_ext.plan.cost.model import Gpu, Model
from holmes_ext.plan.cost.network_old import Way, crossing
from holmes_ext.plan.sizes import DEFAULT_ORDER, PIPELINES_FIRST, Sizes

T = TypeVar("T")
Content = tuple[tuple[int, int], ...]
#: Distinct orders of clusters that are looked at for one way to group them, times stages.
MAX_ORDERS = 9600
#: Orders where the network between clusters is not flat, which makes them all differ: chains over good links first.
MOST_CHAINED = 9


@dataclass(frozen=True)
class Ground:
    """A site as the search sees it: clusters by index, in the launcher's order. only: the fabric of all traffic
    (stock). links: measured ones."""

    site: Site
    gpus: tuple[Gpu, ...]
    only: Fabric | None = None
    links: Links = Links()

    @classmethod
    def of(cls, site: Site, model: Model, only: Fabric | None = None, links: Links = Links()) -> Ground:
        return cls(site, tuple(model.gpu_of(name) for name in site.clusters), only, links)

    @cached_property
    def nodes(self) -> tuple[tuple[str, ...], ...]:
        """Node names of each cluster."""
        found: dict[str, list[str]] = {name: [] for name in self.site.clusters}
        for node in self.site.nodes:
            found[node.cluster].append(node.name)
        return tuple(map(tuple, found.values()))

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(len(names) * self.processes for names in self.nodes)

    @cached_property
    def processes(self) -> int:
        return self.site.processes

    @cached_property
    def world(self) -> int:
        return sum(self.ranks)

    @cached_property
    def _memo(self) -> dict[Hashable, Any]:
        return {}

    def remember(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` gives, made once for each key."""
        if key not in self._memo:
            self._memo[key] = make()
        found: T = self._memo[key]
        return found

    def fabric(self, clusters: Sequence[int]) -> Fabric:
        """The fastest that nodes of all these clusters share; its rate and latency as measured, where they were."""
        key = frozenset(clusters)

        def shared() -> Fabric:
            return self.links.line(self.only or self.site.shared_fabric(self.nodes[index][0] for index in key))

        return self.remember(key, shared)

    def place(self, content: Content) -> str:
        """The names of the clusters that hold a stage."""
        return ", ".join(dict.fromkeys(self.site.clusters[index] for index, _ in content))

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """For each cluster the first one that it can be exchanged with."""
        own = [self.site.node_by_name[names[0]].fabrics for names in self.nodes]
        uses = Counter(name for fabrics in own for name in fabrics)

        def look(name: str) -> Hashable:
            fabric = self.links.line(self.site.fabric_by_name[name])
            return name if uses[name] > 1 else (fabric.kind, fabric.rate_bps, fabric.latency_s)

        keys = list(zip((tuple(map(look, fabrics)) for fabrics in own), self.ranks, self.gpus))
        every = range(len(keys))
        return tuple(next(j for j in every if keys[j] == keys[i] and self._between_alike(i, j)) for i in every)

    @cached_property
    def wan(self) -> Wan:
        """Between the clusters, as measured where that was."""
        return self.links.site(self.site).wan

    @cached_property
    def inside_alike(self) -> tuple[int, ...]:
        """For each cluster the first one whose nodes are like its own, whatever lies between clusters."""
        looks = [(self.gpus[index], self._look_of([index])) for index in range(len(self.ranks))]
        return tuple(map(looks.index, looks))

    def _look_of(self, clusters: Sequence[int]) -> Hashable:
        fabric = self.fabric(clusters)
        return fabric.kind, fabric.rate_bps, fabric.latency_s

    @cached_property
    def ways(self) -> tuple[tuple[float, ...], tuple[tuple[float, ...], ...], float]:
        """Where the network between clusters is not flat. Bits/s: of the links of their spanning tree of the best ones,
        descending; for 1, 2, ... others, into each cluster from so many over its best links, descending. Seconds: the
        least latency."""
        names, every = self.site.clusters, range(len(self.ranks))
        pairs = [(a, b) for a in every for b in every if a != b]
        slow = [pair for pair in pairs if self.fabric(pair).name == ETHERNET]
        hops = {pair: self.wan.hops(*(names[index] for index in pair)) if pair in slow else () for pair in pairs}
        rate = {pair: min((hop.rate_bps for hop in own), default=inf) for pair, own in hops.items()}
        joined, tree = {0}, []
        while len(joined) < len(every):  # Prim 1957
            one, two = max((pair for pair in rate if pair[0] in joined and pair[1] not in joined), key=rate.__getitem__)
            joined.add(two)
            tree.append(rate[one, two])
        links = [sorted((rate[a, b] for a in every if a != b), reverse=True) for b in every]
        into = [[min(sum(own[:count]), self.wan.uplink_of.get(name, inf)) for own, name in zip(links, names)]
                for count in every[1:]]
        latency_s = min(sum(hop.latency_s for hop in own) for own in hops.values())
        return tuple(sorted(tree, reverse=True)), tuple(tuple(sorted(own, reverse=True)) for own in into), latency_s

    def _between_alike(self, one: int, two: int) -> bool:
        """Whether all ways between clusters stay as they are when these two change places."""
        names, wan = self.site.clusters, self.wan
        a, b = names[one], names[two]

        def look(pair: tuple[str, str]) -> Hashable:
            return tuple((hop.key[0], hop.rate_bps, hop.latency_s) for hop in wan.hops(*pair))

        return a == b or not wan or all(look((a, n)) == look((b, n)) for n in names if n not in (a, b))

    def crossing(self, fabric: Fabric, clusters: Sequence[int], flows: float, ring: bool = False) -> tuple[Way, ...]:
        """What lies between these clusters, one after the other (ring: and round), on `fabric`, with as many flows."""
        if fabric.name != ETHERNET or not self.wan:
            return ()
        names = [self.site.clusters[index] for index in clusters]
        pairs = neighbours(names) if ring else [(one, two) for one, two in zip(names, names[1:]) if one != two]
        return crossing(self.wan, pairs, flows)


@dataclass(frozen=True)
class Arrangement:
    """groups: clusters that share stages, in the order of stages. contents: by stage. order: of the ranks' axes. given:
    nodes in an order that no rule makes."""

    groups: tuple[tuple[int, ...], ...]
    contents: tuple[Content, ...]
    order: str = DEFAULT_ORDER
    given: tuple[str, ...] = ()

    def describe(self, ground: Ground) -> str:
        """ "a -> b" where the pipeline goes from a to b, "a + b" where both hold the same stages."""
        if len(self.contents) == 1:
            return " + ".join(ground.site.clusters[index] for index, _ in self.contents[0])
        return " -> ".join(" + ".join(ground.site.clusters[index] for index in group) for group in self.groups)

    def nodes(self, ground: Ground) -> tuple[str, ...]:
        """Node names by slot: rank r runs on nodes[r // processes]."""
        if self.given:
            return self.given
        if self.order == PIPELINES_FIRST or all(len(group) == 1 for group in self.groups):
            return tuple(name for group in self.groups for index in group for name in ground.nodes[index])
        left = [iter(names) for names in ground.nodes]
        parts = [part for content in self.contents for part in content]
        return tuple(name for index, ranks in parts for name in islice(left[index], ranks // ground.processes))


def arrangements(
    ground: Ground, pipeline: int, replica: int, limit: int = MAX_ORDERS
) -> tuple[list[Arrangement], bool]:
    """All arrangements of `pipeline` stages whose tensor x context groups have `replica` ranks, and whether none was
    left out."""
    count, complete = len(ground.ranks), True
    found: list[Arrangement] = []
    for together in (size for size in range(1, count + 1) if count % size == 0):
        if pipeline == 1 and together > 1:
            break  # one stage holds all clusters anyhow
        orders = chain(_chained(ground, together), _orders(ground, together))
        most = min(MOST_CHAINED if ground.wan else limit, max(8, limit // pipeline))
        listed = list(dict.fromkeys(islice(orders, 1 if pipeline == 1 else most)))
        complete = complete and (pipeline == 1 or next(orders, None) is None)
        for groups in listed:
            if together == 1:
                found.append(Arrangement(groups, _fill(ground, groups, pipeline)))
            else:
                found += _share(ground, groups, pipeline, replica)
    return found, complete


def launcher(ground: Ground, pipeline: int) -> Arrangement:
    """The order of the file, as without holmes."""
    groups = tuple((index,) for index in range(len(ground.ranks)))
    return Arrangement(groups, _fill(ground, groups, pipeline))


def arrangement_of(ground: Ground, nodes: Sequence[str], sizes: Sizes) -> Arrangement:
    """Of nodes in the order of ranks, whatever the order: which clusters' ranks hold which stage."""
    clusters = {name: index for index, own in enumerate(ground.nodes) for name in own}
    of_stage: list[list[int]] = [[] for _ in range(sizes.pipeline)]
    for rank in range(ground.world):
        of_stage[sizes.stage(rank)].append(clusters[nodes[rank // ground.processes]])
    contents: list[Content] = [tuple((index, len(list(run))) for index, run in groupby(own)) for own in of_stage]
    alike = [tuple(dict.fromkeys(index for index, _ in content)) for content in contents]
    return Arrangement(tuple(group for group, _ in groupby(alike)), tuple(contents), sizes.order, tuple(nodes))


def _chained(ground: Ground, together: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Where the network between the clusters is not flat: their chain over the best links in groups of neighbours, both
    ways, and those that differ from it by a pair of neighbouring groups."""
    names = ground.site.clusters
    if not ground.wan or len(names) < 3:
        return

    def cost(pair: tuple[int, int]) -> tuple[float, float]:
        hops = ground.wan.hops(*(names[index] for index in pair))
        return max((1 / hop.rate_bps for hop in hops), default=0.0), sum(hop.latency_s for hop in hops)

    line = ground.remember("chain", lambda: best_order(range(len(names)), cost))
    groups = tuple(line[at : at + together] for at in range(0, len(line), together))
    yield from (groups, groups[::-1])
    for place in range(len(groups) - 1):
        yield (*groups[:place], groups[place + 1], groups[place], *groups[place + 2 :])


def _orders(ground: Ground, together: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Distinct sequences of groups of `together` clusters."""
    members: dict[int, list[int]] = {}
    for index, kind in enumerate(ground.alike):
        members.setdefault(kind, []).append(index)
    used = dict.fromkeys(members, 0)

    def choose(size: int, kinds: list[int]) -> Iterator[tuple[int, ...]]:
        if not size:
            yield ()
        elif kinds:
            first = kinds[0]
            for amount in range(min(size, len(members[first]) - used[first]), -1, -1):
                for rest in choose(size - amount, kinds[1:]):
                    yield (first,) * amount + rest

    def extend(groups: tuple[tuple[int, ...], ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
        if len(groups) * together == len(ground.alike):
            yield groups
            return
        for kinds in list(choose(together, list(members))):
            group = []
            for kind in kinds:
                group.append(members[kind][used[kind]])
                used[kind] += 1
            yield from extend((*groups, tuple(group)))
            for kind in kinds:
                used[kind] -= 1

    return extend(())


def _fill(ground: Ground, groups: Sequence[tuple[int, ...]], pipeline: int) -> tuple[Content, ...]:
    """Clusters one after the other; a stage may hold the end of one and the start of the next."""
    size = room = ground.world // pipeline
    contents: list[Content] = []
    current: list[tuple[int, int]] = []
    for (index,) in groups:
        ranks = ground.ranks[index]
        while ranks:
            taken = min(ranks, room)
            current.append((index, taken))
            ranks, room = ranks - taken, room - taken
            if not room:
                contents.append(tuple(current))
                current, room = [], size
    known: dict[Content, Content] = {}
    return tuple(known.setdefault(content, content) for content in contents)


def _share(ground: Ground, groups: Sequence[tuple[int, ...]], pipeline: int, replica: int) -> list[Arrangement]:
    """Stages of which every cluster of a group holds the same part; none where that does not come out even."""
    size, whole = ground.world // pipeline, True
    contents: list[Content] = []
    for group in groups:
        total = sum(ground.ranks[index] for index in group)
        stages = total // size
        if total % size or any(ground.ranks[index] % (stages * replica) for index in group):
            return []
        content = tuple((index, ground.ranks[index] // stages) for index in group)
        whole = whole and all(ranks % ground.processes == 0 for _, ranks in content)
        contents += [content] * stages
    if not whole and len(groups) > 1:
        return []
    return [Arrangement(tuple(groups), tuple(contents), DEFAULT_ORDER if whole else PIPELINES_FIRST)]
