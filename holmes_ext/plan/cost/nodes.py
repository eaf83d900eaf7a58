"""The step under any order of nodes, rank by rank: what placement compares orders with, and the costs of a job's stages
on them.

Every group gets the fastest fabric that all its nodes share, groups that share a node's NIC share its rate, the slowest
group of a stage counts. It compares orders of nodes; it does not promise milliseconds: traffic inside a node counts as
free, collectives do not overlap with computing, the optimizer and what it gathers are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, inf

from holmes_ext.cluster.site import ETHERNET, Fabric, Site
from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.across import hop_loads
from holmes_ext.plan.cost.model import Model
from holmes_ext.plan.cost.network_old import FREE, Price, Way, all_reduce, latency_s, message, passes, tied_seconds
from holmes_ext.plan.cost.pipeline import Estimate, formula_ends, step_of
from holmes_ext.plan.cost.stages import Portion, StageCosts, StagePrice, costs_of
from holmes_ext.plan.cost.workload import Workload
from holmes_ext.plan.layout import INSIDE, Layout, Tie
from holmes_ext.plan.sizes import Sizes

Part = tuple[int, ...]  # the node class in each slot of a component


def fast_fabrics(site: Site) -> tuple[frozenset[str], ...]:
    """For each node, in the launcher's order, the fabrics that are better than Ethernet; for one without, where the
    network between the clusters is not flat, Ethernet inside its own. Equal nodes of a cluster are interchangeable."""
    ethernet = site.fabric_by_name[ETHERNET]
    fast = {fabric.name for fabric in site.fabrics if fabric.preference > ethernet.preference}
    found = [frozenset(node.fabrics) & fast for node in site.nodes]
    if site.wan:
        found = [own or frozenset([f"{ETHERNET} of {node.cluster}"]) for own, node in zip(found, site.nodes)]
    return tuple(found)


def stock_fabric(site: Site) -> Fabric:
    """Where a job without holmes runs all its traffic: the one fabric that every node is on, else Ethernet."""
    return site.shared_fabric(node.name for node in site.nodes)


@dataclass(frozen=True)
class Component:
    """Prices by stage of a component, of each kind of group, and of the edges between its stages. reduction: seconds of
    a step's, collectives: of a micro-batch's. straddling: of each kind, the groups that only Ethernet holds though a
    member has better: (count, slots)."""

    prices: dict[str, tuple[Price, ...]]
    edges: tuple[Price, ...]
    reduction: tuple[float, ...]
    collectives: tuple[float, ...]
    straddling: dict[str, tuple[tuple[int, tuple[int, ...]], ...]]


class Predictor:
    """Predicts steps of one job for many orders of nodes. An order is a tuple of node classes by slot (an index of
    `classes`; nodes with equal fast fabrics are of one class; where the network between clusters is not flat, those of
    one cluster), cut into components. inside: kinds of groups to treat as if each were on the slowest of its members'
    own best fabrics; only: the fabric of all traffic, whatever the nodes have (stock behaviour). like() makes another
    that shares the layout."""

    def __init__(
        self, site: Site, layout: Layout, workload: Workload, inside: frozenset[str] = frozenset(),
        only: Fabric | None = None,
    ):
        self.site, self.layout, self.workload, self.inside, self.only = site, layout, workload, inside, only
        looks = [(own, node.cluster if site.wan else "") for own, node in zip(fast_fabrics(site), site.nodes)]
        kinds = list(dict.fromkeys(looks))
        self.classes = tuple(own for own, _ in kinds)
        self.class_of = {node.name: kinds.index(look) for node, look in zip(site.nodes, looks)}
        self._name = {index: name for name, index in reversed(self.class_of.items())}
        self._fabrics: dict[tuple[bool, frozenset[int]], Fabric] = {}
        self._components: dict[Part, Component] = {}
        self._onward: dict[tuple[Part, Part], Price] = {}

    def like(self, inside: frozenset[str]) -> Predictor:
        return Predictor(self.site, self.layout, self.workload, inside)

    def cut(self, order: Sequence[int]) -> tuple[Part, ...]:
        """Classes by slot -> classes of each component's slots."""
        return tuple(tuple(order[slot] for slot in component) for component in self.layout.components)

    def parts(self, names: Sequence[str]) -> tuple[Part, ...]:
        """The same for nodes' names."""
        return self.cut([self.class_of[name] for name in names])

    def join(self, parts: Iterable[Part]) -> tuple[int, ...]:
        """The inverse of cut."""
        order = [0] * self.layout.slots
        for component, part in zip(self.layout.components, parts):
            for slot, index in zip(component, part):
                order[slot] = index
        return tuple(order)

    def breakdown(self, parts: Sequence[Part]) -> Estimate:
        """The predicted step of an order that was cut."""
        work, components = self.workload, [self.component(part) for part in parts]
        reduction = [seconds for one in components for seconds in one.reduction]
        halves = [seconds / 2 for one in components for seconds in one.collectives]
        forward, backward = [work.forward_s + half for half in halves], [work.backward_s + half for half in halves]
        transfer = [edge.seconds(work.activation_bytes) for edge in self.edges(parts)]
        return step_of(formula_ends, forward, backward, transfer, work.micro_batches, reduction, reduction)

    def edges(self, parts: Sequence[Part]) -> list[Price]:
        """Of an activation, from each stage to the next."""
        found: list[Price] = []
        for part, following in zip(parts, (*parts[1:], None)):
            found += self.component(part).edges
            if following is not None:
                found.append(self.edge(part, following))
        return found

    def straddles(self, parts: Sequence[Part]) -> bool:
        return any(self.component(part).straddling for part in parts)

    def component(self, part: Part) -> Component:
        if part not in self._components:
            self._components[part] = self._price(part)
        return self._components[part]

    def fabric(self, members: Iterable[int], inside: bool = False) -> Fabric:
        """The fastest fabric that the classes `members` share; with `inside`, the slowest of their own best ones."""
        if self.only is not None:
            return self.only
        key = (inside, frozenset(members))
        if key not in self._fabrics:
            own = [self.site.shared_fabric([self._name[index]]) for index in key[1]]
            shared = self.site.shared_fabric(self._name[index] for index in key[1])
            self._fabrics[key] = min(own, key=lambda fabric: fabric.preference) if inside else shared
        return self._fabrics[key]

    def cluster(self, index: int) -> str:
        """The cluster of a class's (first) node."""
        return self.site.node_by_name[self._name[index]].cluster

    def edge(self, part: Part, following: Part) -> Price:
        """Of an activation from a component to the next."""
        if (part, following) not in self._onward:
            self._onward[part, following] = self._edge(self.layout.onward, part, following)
        return self._onward[part, following]

    def _between(self, fabric: Fabric, pairs: Iterable[tuple[int, int]]) -> list[tuple[str, str]]:
        """Of these pairs of classes the clusters, where they differ and the way leads between them."""
        if not self.site.wan or fabric.name != ETHERNET:
            return []
        clusters = [(self.cluster(one), self.cluster(two)) for one, two in pairs]
        return [(one, two) for one, two in clusters if one != two]

    def _price(self, part: Part) -> Component:
        work, stages = self.workload, self.layout.stages
        sizes = dict(zip(INSIDE, (work.gradient_bytes, work.tensor_bytes, work.context_bytes, work.expert_bytes)))
        prices = {kind: [FREE] * stages for kind in INSIDE}
        straddling: dict[str, list[tuple[int, tuple[int, ...]]]] = {}
        for kind, ties in self.layout.ties.items():
            members = [{part[slot] for slot in tie.slots} for tie in ties]
            fabrics = [self.fabric(classes, kind in self.inside) for classes in members]
            load: Counter[tuple[int, str]] = Counter()  # groups on each node's way to a fabric, of all its stages
            crossed: Counter[tuple[str, str]] = Counter()  # groups on each way between clusters, likewise
            between = []
            for tie, fabric in zip(ties, fabrics):
                for slot in tie.slots:
                    load[slot, fabric.name] += tie.count
                order = [part[slot] for slot in tie.slots]
                between.append(self._between(fabric, zip(order, (*order[1:], order[0]))))
                crossed.update({pair: tie.count * times for pair, times in Counter(between[-1]).items()})
            loads = hop_loads(self.site.wan, crossed)
            for tie, fabric, classes, pairs in zip(ties, fabrics, members, between):
                ways = [tuple((hop, loads[hop]) for hop in self.site.wan.hops(*pair)) for pair in pairs]
                price = _collective(kind, tie, fabric, max(load[slot, fabric.name] for slot in tie.slots), ways)
                if price.seconds(sizes[kind] or 1.0) > prices[kind][tie.stage].seconds(sizes[kind] or 1.0):
                    prices[kind][tie.stage] = price
                if len(classes) > 1 and fabric.name == ETHERNET:  # two classes: one at least has better
                    straddling.setdefault(kind, []).append((tie.count, tie.slots))
        seconds = {kind: [price.seconds(sizes[kind]) for price in own] for kind, own in prices.items()}
        return Component(
            {kind: tuple(own) for kind, own in prices.items()},
            tuple(self._edge(pairs, part, part) for pairs in self.layout.inner), tuple(seconds["data"]),
            tuple(map(sum, zip(*(seconds[kind] for kind in INSIDE if kind != "data")))),
            {kind: tuple(found) for kind, found in straddling.items()},
        )

    def _edge(self, pairs: dict[tuple[int, int], int], sender: Part, receiver: Part) -> Price:
        """Until the slowest pair of ranks has its activation across; free inside a node."""
        fabrics = {pair: self.fabric((sender[pair[0]], receiver[pair[1]])) for pair in pairs}
        load: Counter[tuple[str, int, str]] = Counter()
        for (one, two), count in pairs.items():
            load["out", one, fabrics[one, two].name] += count
            load["in", two, fabrics[one, two].name] += count
        crossed: Counter[tuple[str, str]] = Counter()
        ways = {pair: self._between(fabrics[pair], [(sender[pair[0]], receiver[pair[1]])]) for pair in pairs}
        for pair, count in pairs.items():
            crossed.update(dict.fromkeys(ways[pair], count))
        loads = hop_loads(self.site.wan, crossed)
        prices, copied = [], self.workload.copies and self.only is None
        slices = slices_of(self.layout.sizes, self.workload.copies, self.layout.processes) if copied else 1
        for (one, two), fabric in fabrics.items():
            way = tuple((hop, loads[hop]) for pair in ways[one, two] for hop in self.site.wan.hops(*pair))
            sharers = max(load["out", one, fabric.name], load["in", two, fabric.name])
            price = message(fabric, sharers, way=way)
            sliced = fabric.name == ETHERNET and slices > 1
            prices.append(Price(price.byte_s / slices, price.latency_s) if sliced else price)
        return max(prices, key=lambda price: price.seconds(self.workload.activation_bytes or 1.0), default=FREE)


def slices_of(sizes: Sizes, copies: int, processes: int) -> int:
    """Tensor ranks that share out an activation on Ethernet (runtime/groups/wire.py), `copies` of which have all of it:
    where those that receive it are in one node. 0, nobody told whether there is sequence parallelism: all of them."""
    return copies or sizes.tensor if sizes.tensor_inside(processes) else 1


def _collective(kind: str, tie: Tie, fabric: Fabric, sharers: int, ways: Sequence[Way] = ()) -> Price:
    """ways: between neighbouring slots in two clusters."""
    if kind in ("data", "tensor"):
        return all_reduce(tie.members, fabric, sharers, ways)
    if kind == "expert":  # in an all-to-all every rank sends off its node
        sharers *= ceil(tie.members / len(tie.slots))
    slowest = max(ways, key=lambda way: (passes(fabric, sharers, [way]), latency_s(fabric, way)), default=())
    return message(fabric, sharers, tie.members - 1, slowest)


def step_seconds(
    site: Site, order: Sequence[str], sizes: Sizes, workload: Workload | None = None, only: Fabric | None = None
) -> Estimate:
    """The predicted step with the nodes in `order` (names; rank r runs on order[r // processes]); only: see Predictor.
    """
    layout = Layout(sizes.complete(site.world_size), site.processes)
    predictor = Predictor(site, layout, workload or Workload(), only=only)
    return predictor.breakdown(predictor.parts(order))


def exposed_stages(
    site: Site, nodes: Sequence[str], sizes: Sizes, workload: Workload | None = None
) -> tuple[bool, ...]:
    """For each stage, whether reducing in one piece after its last backward would end after the first stage's last
    backward. (Frameworks bucket and overlap on the first stage only, which is right on one uniform network.) nodes: in
    the order of ranks. workload: nominal by default, whose proportions hold for any model size."""
    step = step_seconds(site, nodes, sizes, workload)
    first = step.end_s[0] - step.exposed_s[0]
    return tuple(bool(reduction) and end > first for end, reduction in zip(step.end_s, step.reduction_s))


def costs_on_site(
    site: Site, order: Sequence[str], sizes: Sizes, model: Model, overlap: bool = False, only: Fabric | None = None,
    hides: bool = True,
) -> StageCosts:
    """The layers of `model` on the stages of a job of `sizes` whose rank r runs on order[r // processes]. A stage
    computes as fast as its slowest GPU and holds what its smallest one does (model.gpu, model.gpus). only: the fabric
    of all traffic, as without holmes; hides: see costs_of. HolmesError: fewer layers than stages."""
    sizes = sizes.complete(site.world_size)
    if model.layers < sizes.pipeline:
        what = f"{model.layers} layers are too few for {sizes.pipeline} pipeline stages"
        raise HolmesError(f"{model.source}: {what}; every stage needs one")
    portion, layout = Portion(model, sizes), Layout(sizes, site.processes)
    predictor = Predictor(site, layout, model.workload(sizes), only=only)
    parts = predictor.parts(order)
    of = {kind: [p for part in parts for p in predictor.component(part).prices[kind]] for kind in INSIDE}
    block = portion.block
    sent = {"tensor": block.tensor_bytes, "context": block.context_bytes, "expert": block.expert_bytes}
    places = clusters_of_stages(site, order, sizes)
    prices = []
    for stage, clusters in enumerate(places):
        gpus = [model.gpu_of(name) for name in clusters]
        collective_s = sum(of[kind][stage].seconds(size) for kind, size in sent.items())
        flops, limit = min(gpu.flops for gpu in gpus), min((gpu.memory_bytes or inf) for gpu in gpus)
        prices.append(StagePrice(flops, collective_s, of["data"][stage], limit_bytes=limit))
    tied_s, names = _tied_s(site, order, sizes, only, model.tied_bytes(sizes)), [", ".join(own) for own in places]
    hides = hides and only is None
    return costs_of(portion, prices, predictor.edges(parts), tied_s, names, overlap, hides=hides)


def _tied_s(site: Site, order: Sequence[str], sizes: Sizes, only: Fabric | None, size: float) -> float:
    """All-reduce of `size` bytes between a rank of the first stage and its twin of the last; the slowest pair."""
    stride, processes = sizes.strides()["pp"], site.processes
    last = (sizes.pipeline - 1) * stride
    firsts = [rank for rank in range(site.world_size) if rank // stride % sizes.pipeline == 0]
    pairs = Counter((order[rank // processes], order[(rank + last) // processes]) for rank in firsts)
    fabrics = {pair: only or site.shared_fabric(pair) for pair in pairs if pair[0] != pair[1]}
    crossed: dict[tuple[str, str], list[tuple[str, str]]] = {pair: [] for pair in fabrics}
    loads: Counter[tuple[str, str]] = Counter()
    for pair, fabric in fabrics.items() if site.wan else ():
        one, two = (site.node_by_name[name].cluster for name in pair)
        if fabric.name == ETHERNET and one != two:
            crossed[pair] = [(one, two), (two, one)]
            loads.update(dict.fromkeys(crossed[pair], pairs[pair]))
    hops = hop_loads(site.wan, loads)
    ways = {pair: [tuple((hop, hops[hop]) for hop in site.wan.hops(*way)) for way in crossed[pair]] for pair in fabrics}
    sharers = min(processes, stride)
    prices = {pair: all_reduce(2, fabrics[pair], sharers, ways[pair]) for pair in fabrics}
    slowest = max(prices, key=lambda pair: prices[pair].seconds(size), default=None)
    ends, count = clusters_of_stages(site, order, sizes), sizes.data * sizes.context
    apart = len(ends[0]) == len(ends[-1]) == 1 and ends[0] != ends[-1]
    if slowest is None or only is not None or count == 1 or not apart:
        return prices[slowest].seconds(size) if slowest is not None else 0.0
    inside = []
    for ranks in {firsts[0], firsts[0] + last}:
        nodes = Counter(order[rank // processes] for rank in _data_group(sizes, ranks))
        here = max(nodes.values())
        inside.append(all_reduce(count, site.shared_fabric(nodes), processes // here) if count > here else FREE)
    dearer, clusters = max(inside, key=lambda price: price.byte_s), (ends[0][0], ends[-1][0])
    across = fabrics[slowest], clusters, count, processes, site.wan, sizes.tensor
    return tied_seconds(size, prices[slowest], dearer, *across)


def _data_group(sizes: Sizes, rank: int) -> list[int]:
    """Ranks with which `rank` averages gradients."""
    return [other + inner - rank for other in sizes.group(rank, "dp") for inner in sizes.group(rank, "cp")]


def clusters_of_stages(site: Site, order: Sequence[str], sizes: Sizes) -> list[list[str]]:
    """The names of the clusters that each stage lies on."""
    stride = sizes.strides()["pp"]
    found: list[dict[str, None]] = [{} for _ in range(sizes.pipeline)]
    for rank in range(site.world_size):
        found[rank // stride % sizes.pipeline][site.node_by_name[order[rank // site.processes]].cluster] = None
    return [list(names) for names in found]
