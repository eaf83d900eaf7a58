"""Order the nodes so that only pipeline edges cross between fabrics.

    launcher: a0 b0 a1 b1            stages: [a0 b0] [a1 b1]     every data-parallel group on Ethernet
    placed:   a0 a1 b0 b1            stages: [a0 a1] [b0 b1]     each on its own fabric, one edge on Ethernet

The layout ties slots into equal components (plan/layout.py); nodes that are on the same fast fabrics are
interchangeable (a class). Nodes on one fast fabric at most: an order without straddling groups gives every component
the nodes of one class, so it exists exactly when a component is one slot or its size divides every class. Nodes on
several: pack() searches which fabric each node serves. Among orders equally free of straddling the least predicted time
wins, among equal times the launcher's order: so the fabric whose reduction is slowest goes last, where the others'
backward hides it, and a site that gains nothing is left alone.

How sure: up to `budget` orders all are tried. Above, runs of equal components are permuted, then pairs are swapped
while that helps: whether straddling can be avoided stays exact (with nodes on several fabrics: by whole components),
and the time is never more than the launcher's where that straddles no less. Where nothing straddles and tensor, context
and expert groups stay in their nodes, it exceeds the least by at most what the crossing edges cost: runs in the order
of their reductions are best when edges are free. (Small sites with only 6 orders allowed, tests/test_placement.py:
within 10 % of the least.)
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from holmes_ext.cluster.site import ETHERNET, Site
from holmes_ext.plan.cost.across import best_order
from holmes_ext.plan.cost.nodes import Part, Predictor, fast_fabrics
from holmes_ext.plan.cost.pipeline import Estimate
from holmes_ext.plan.cost.workload import Workload
from holmes_ext.plan.layout import Layout
from holmes_ext.plan.plan import Straddle
from holmes_ext.plan.sizes import Sizes

T = TypeVar("T")
#: Work allowed in a search, in slots of groups looked at anew and in stages whose known costs are added up.
SLOT_BUDGET = 300_000
STAGE_BUDGET = 100_000
#: Steps of pack().
PACK_BUDGET = 150_000
#: Different components whose chains over slow links are worked out.
MOST_CHAINED = 64
#: A swap that gains less than this fraction of a step is not worth a less orderly placement.
SWAP_GAIN = 1e-3


@dataclass(frozen=True)
class Placement:
    """nodes: names by slot. straddling: groups that only Ethernet holds. predicted: None when the sizes are unknown."""

    nodes: tuple[str, ...]
    straddling: tuple[Straddle, ...]
    predicted: Estimate | None


def place(
    site: Site, sizes: Sizes | None = None, workload: Workload | None = None, budget: int | None = None
) -> Placement:
    """The order of `site`'s nodes for a job of `sizes`; HolmesError when they do not multiply to the world size. sizes
    None (the job's are not known yet): each cluster's nodes together, the fastest fabric first. That is free of
    straddling for every pipeline size whose stages divide the clusters, and puts the slowest reduction last. budget:
    orders tried one by one (default: what about half a second allows)."""
    if sizes is None:
        return Placement(_fastest_first(site), (), None)
    predictor = Predictor(site, Layout(sizes.complete(site.world_size), site.processes), workload or Workload())
    best = _search(predictor, budget)
    names: dict[int, list[str]] = {}
    for name, index in reversed(predictor.class_of.items()):
        names.setdefault(index, []).append(name)
    nodes = tuple(names[index].pop() for index in predictor.join(best))
    return Placement(nodes, straddling_groups(predictor, nodes), predictor.breakdown(best))


def straddling_groups(predictor: Predictor, nodes: Sequence[str]) -> tuple[Straddle, ...]:
    """What straddles when the nodes stand in this order. A group's cost: the step against one in which all groups of
    its kind were on the slowest of their members' own fabrics. example: one node of each class of one group."""
    parts = predictor.parts(nodes)
    step, found = predictor.breakdown(parts).step_s, []
    kinds = dict.fromkeys(kind for part in parts for kind in predictor.component(part).straddling)
    for kind in kinds:
        groups = [
            (count, [nodes[slots[index]] for index in tie])
            for part, slots in zip(parts, predictor.layout.components)
            for count, tie in predictor.component(part).straddling.get(kind, ())
        ]
        example = {predictor.class_of[name]: name for name in reversed(groups[0][1])}
        inside = predictor.like(inside=frozenset([kind])).breakdown(parts).step_s
        names = tuple(name for name in nodes if name in example.values())
        found.append(Straddle(kind, sum(count for count, _ in groups), names, ETHERNET, max(0.0, step - inside)))
    return tuple(found)


def _fastest_first(site: Site) -> tuple[str, ...]:
    best = {node.name: site.shared_fabric([node.name]) for node in site.nodes}
    blocks: dict[frozenset[str], list[str]] = {}
    for node, own in zip(site.nodes, fast_fabrics(site)):
        blocks.setdefault(own, []).append(node.name)
    ordered = sorted(blocks.values(), key=lambda names: -best[names[0]].rate_bps)
    if site.wan:
        clusters = dict.fromkeys(site.node_by_name[name].cluster for names in ordered for name in names)
        chain = _slow_links_apart(site, list(clusters))
        return tuple(node.name for cluster in chain for node in site.nodes if node.cluster == cluster)
    return tuple(name for names in ordered for name in names)


def _line_up(counts: Mapping[int, int], size: int, best: _Best, limit: int) -> None:
    """Where clusters do not fill whole components: offer `best` all nodes of one cluster after the other, those with a
    good link next to each other, then clusters swapped."""
    predictor = best.predictor
    index_of: dict[str, list[int]] = {}
    for index in counts:
        index_of.setdefault(predictor.cluster(index), []).append(index)

    def parts(clusters: Sequence[str]) -> tuple[Part, ...]:
        line = [index for name in clusters for index in index_of[name] for _ in range(counts[index])]
        return tuple(tuple(line[at : at + size]) for at in range(0, len(line), size))

    chain = _slow_links_apart(predictor.site, list(index_of))
    best.offer(parts(chain))
    _swap(chain, lambda clusters: best.offer_swapped(parts(clusters)), limit)


def _slow_links_apart(site: Site, clusters: Sequence[str]) -> tuple[str, ...]:
    """The chain of clusters whose worst link is the best, begun at the end that stood nearer to the front."""

    def cost(pair: tuple[str, str]) -> tuple[float, float]:
        hops = site.wan.hops(*pair)
        return max((1 / hop.rate_bps for hop in hops), default=0.0), sum(hop.latency_s for hop in hops)

    order = best_order(clusters, cost)
    return order if clusters.index(order[0]) < clusters.index(order[-1]) else order[::-1]


class _Best:
    """The best order offered so far; the first, the launcher's, stays unless another is better by more than rounding.
    """

    def __init__(self, predictor: Predictor, first: tuple[Part, ...]):
        self.predictor, self.parts = predictor, first
        self.score = self._score(first)

    def _score(self, parts: tuple[Part, ...]) -> tuple[bool, float]:
        return self.predictor.straddles(parts), self.predictor.breakdown(parts).step_s

    def offer(self, parts: tuple[Part, ...], gain: float = 1e-9) -> bool:
        """Take `parts` if it straddles less, or no more and is faster by more than the fraction `gain`."""
        score = self._score(parts)
        better = score[0] < self.score[0] or (score[0] == self.score[0] and score[1] < self.score[1] * (1 - gain))
        if better:
            self.parts, self.score = parts, score
        return better

    def offer_swapped(self, parts: tuple[Part, ...]) -> bool:
        return self.offer(parts, SWAP_GAIN)


def _search(predictor: Predictor, budget: int | None) -> tuple[Part, ...]:
    layout = predictor.layout
    launcher = tuple(predictor.class_of.values())
    best = _Best(predictor, predictor.cut(launcher))
    counts, size = Counter(launcher), len(layout.components[0])
    if len(counts) == 1:
        return best.parts
    fresh = max(4, SLOT_BUDGET // layout.work) if budget is None else budget
    known = max(50, STAGE_BUDGET // layout.sizes.pipeline) if budget is None else budget
    packed = pack(counts, predictor.classes, size)
    several = any(len(fabrics) > 1 for fabrics in predictor.classes)
    if packed is not None and not several:
        _arrange(packed, best, known)
    elif order_count(counts) <= fresh:
        for order in distinct_orders(counts):
            best.offer(predictor.cut(order))
    elif packed is not None:
        _arrange(packed, best, known)
    elif predictor.site.wan:
        _line_up(counts, size, best, fresh)
    else:
        mixtures = list(itertools.islice(_with_leftovers(counts, size), min(24, max(2, fresh // 2))))
        for parts in mixtures:
            _arrange(parts, best, min(known, fresh) // len(mixtures))
        _swap(predictor.join(best.parts), lambda order: best.offer_swapped(predictor.cut(order)), fresh)
    return best.parts


def pack(counts: dict[int, int], classes: Sequence[frozenset[str]], size: int) -> list[Part] | None:
    """Components of `size` nodes, each sharing a fast fabric or having none; None when there is no such packing.
    counts: nodes of each class. Whether it fits depends on numbers modulo `size` only, so the search goes over the
    classes, and its state is what each fabric that can still get nodes has beyond whole components. The parts come in
    the order of classes. Where most nodes are on three fast fabrics or more the states can be too many; then only
    PACK_BUDGET steps are looked at."""
    if size == 1:
        return [(index,) for index, count in counts.items() for _ in range(count)]
    homes = {index: sorted(classes[index]) or [ETHERNET] for index in counts}
    states: dict[frozenset[tuple[str, int]], tuple[tuple[str, int, int], ...]] = {frozenset(): ()}
    waiting = list(counts)
    while waiting:
        index = waiting.pop(0)
        later = {home for other in waiting for home in homes[other]}
        following: dict[frozenset[tuple[str, int]], tuple[tuple[str, int, int], ...]] = {}
        steps = ((rests, shares) for rests in states for shares in _shares(counts[index], len(homes[index]), size))
        for rests, shares in itertools.islice(steps, PACK_BUDGET // len(counts)):
            now = dict(rests)
            for home, share in zip(homes[index], shares):
                now[home] = (now.get(home, 0) + share) % size
            open_rests = frozenset((home, rest) for home, rest in now.items() if rest)
            if open_rests not in following and all(home in later for home, _ in open_rests):
                gifts = tuple((home, index, share) for home, share in zip(homes[index], shares) if share)
                following[open_rests] = states[rests] + gifts
        states = following
    if not states:
        return None
    nodes: dict[str, list[int]] = {}
    for home, index, share in states[frozenset()]:
        nodes.setdefault(home, []).extend([index] * share)
    position = {index: place for place, index in enumerate(counts)}
    parts = [tuple(line[at : at + size]) for line in nodes.values() for at in range(0, len(line), size)]
    return sorted(parts, key=lambda part: [position[index] for index in part])


def _shares(count: int, homes: int, size: int) -> Iterator[tuple[int, ...]]:
    """Ways to share `count` nodes among `homes` fabrics that differ modulo `size`; whole components stay with the
    first."""
    if homes == 1:
        yield (count,)
        return
    for last in range(min(count, size - 1) + 1):
        for rest in _shares(count - last, homes - 1, size):
            yield (*rest, last)


def _with_leftovers(counts: dict[int, int], size: int) -> Iterator[list[Part]]:
    """Whole components of one class, and what is left of the classes in mixed ones: for every order of the classes."""
    pure = [(index,) * size for index, count in counts.items() for _ in range(count // size)]
    rest = {index: count % size for index, count in counts.items() if count % size}
    for classes in itertools.permutations(rest):
        left = [index for index in classes for _ in range(rest[index])]
        yield pure + [tuple(left[at : at + size]) for at in range(0, len(left), size)]


def _arrange(parts: list[Part], best: _Best, limit: int) -> None:
    """Offer `best` orders of these components: all if they are few, else runs of equal ones permuted, then swaps."""
    counts = Counter(parts)
    if order_count(counts) <= limit:
        for order in distinct_orders(counts):
            best.offer(order)
        return

    def line(runs: Sequence[Part]) -> tuple[Part, ...]:
        return tuple(part for part in runs for _ in range(counts[part]))

    runs, activation = list(counts), best.predictor.workload.activation_bytes
    if math.factorial(len(runs)) <= limit // 2:
        for order in itertools.permutations(runs):
            best.offer(line(order))
    else:
        best.offer(line(runs))
        runs.sort(key=lambda part: max(best.predictor.component(part).reduction))
        best.offer(line(runs))
    if best.predictor.site.wan and 2 < len(runs) <= MOST_CHAINED:
        edges = {(x, y): best.predictor.edge(x, y).seconds(activation) for x, y in itertools.permutations(runs, 2)}
        for worst in (1.0, 0.0):
            chain = best_order(runs, lambda pair: (worst * edges[pair], edges[pair]))  # noqa: B023
            best.offer(line(chain))
            best.offer(line(chain[::-1]))
        runs = list(dict.fromkeys(best.parts))
    if math.factorial(len(runs)) > limit // 2:
        _swap(runs, lambda order: best.offer_swapped(line(order)), limit // 4)
    _swap(best.parts, best.offer_swapped, limit // 4)


def _swap(order: Sequence[T], offer: Callable[[tuple[T, ...]], bool], limit: int) -> None:
    """Swap any two different items as long as the result is accepted, for at most `limit` offers."""
    current, tried, improved = list(order), 0, True
    while improved:
        improved = False
        for left, right in itertools.combinations(range(len(current)), 2):
            if current[left] == current[right]:
                continue
            if tried == limit:
                return
            tried += 1
            current[left], current[right] = current[right], current[left]
            if offer(tuple(current)):
                improved = True
            else:
                current[left], current[right] = current[right], current[left]


def order_count(counts: Mapping[T, int]) -> int:
    """How many distinct orders a multiset has."""
    total = math.factorial(sum(counts.values()))
    return total // math.prod(math.factorial(count) for count in counts.values())


def distinct_orders(counts: Mapping[T, int]) -> Iterator[tuple[T, ...]]:
    """Every distinct order of a multiset, once, in the lexicographic order of its keys as given."""
    keys = list(counts)
    order = [index for index, key in enumerate(keys) for _ in range(counts[key])]
    while True:
        yield tuple(keys[index] for index in order)
        at = next((at for at in reversed(range(len(order) - 1)) if order[at] < order[at + 1]), None)
        if at is None:
            return
        greater = next(place for place in reversed(range(len(order))) if order[place] > order[at])
        order[at], order[greater] = order[greater], order[at]
        order[at + 1 :] = reversed(order[at + 1 :])
