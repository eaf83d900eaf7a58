"""A first cost model: the seconds of one training step, from rates, latencies and a few numbers about the model.

    stage 0  F F F F    B   B   B   B [reduce]          each stage reduces its gradients right after its own
    stage 1    F F F B F B ...  B [reduce]              last backward, as DeepSpeed's and Megatron's 1F1B do;
                       step ends with the last of them -^   the later the stage, the earlier it can start

Sources: alpha-beta model and ring all-reduce, 2(n-1)/n of the bytes through every NIC in 2(n-1) messages (Thakur,
Rabenseifner, Gropp 2005; Patarasuk and Yuan 2009); 1F1B and its bubble (Narayanan et al. 2021, arXiv 2104.04473, sec. 2.2).
It compares orders of nodes; it does not promise milliseconds. Traffic inside a node counts as free, collectives do not
overlap with computing, the optimizer and what it gathers are left out, as is the reduction of tied embeddings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from math import ceil

from holmes_ext.cluster.site import ETHERNET, Fabric, Site
from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.orders import passes
from holmes_ext.plan.layout import INSIDE, Layout
from holmes_ext.plan.sizes import Sizes


@dataclass(frozen=True)
class Workload:
    """What one rank computes and sends. Seconds and bytes of one micro-batch on one stage, unless said otherwise.

    forward_s, backward_s: computing. micro_batches: in a step. gradient_bytes: reduced by one rank in a step.
    activation_bytes: sent by one rank to the next stage (as much comes back). tensor_bytes: all-reduced in tensor groups,
    forward and backward together. context_bytes: passed around the context ring. expert_bytes: sent in all-to-alls.

    The defaults are nominal, for when the model is unknown: 10^9 parameters in each rank (5 layers of hidden size 4096),
    one sequence of 2048 tokens, 150 TFLOP/s (2 FLOPs a parameter and token forward, 4 backward), 16-bit activations,
    32-bit gradients, four tensor all-reduces a layer (Shoeybi et al. 2019), K and V and their gradients around the ring,
    four all-to-alls a layer.
    """

    forward_s: float = 0.027
    backward_s: float = 0.055
    micro_batches: int = 8
    gradient_bytes: float = 4e9
    activation_bytes: float = 2048 * 4096 * 2
    tensor_bytes: float = 5 * 4 * 2048 * 4096 * 2
    context_bytes: float = 5 * 4 * 2048 * 4096 * 2
    expert_bytes: float = 5 * 4 * 2048 * 4096 * 2

    def __post_init__(self):
        for item in fields(self):
            value = getattr(self, item.name)
            if not 0 <= value < 1e30:
                raise HolmesError(f"workload: {item.name} is {value}; it must be 0 or more, and finite")
        if self.micro_batches < 1:
            raise HolmesError(f"workload: micro_batches is {self.micro_batches}; it must be 1 or more")


@dataclass(frozen=True)
class Breakdown:
    """Seconds of one step. backward_end_s: each stage's last backward; reduction_s: each stage's, after that;
    transfer_s: one activation over each edge between stages."""

    backward_end_s: tuple[float, ...]
    reduction_s: tuple[float, ...]
    transfer_s: tuple[float, ...]

    @property
    def step_s(self) -> float:
        return max(end + reduction for end, reduction in zip(self.backward_end_s, self.reduction_s))

    @property
    def exposed_s(self) -> float:
        """What reductions add after the first stage's last backward."""
        return self.step_s - self.backward_end_s[0]


def allreduce_seconds(size_bytes: float, members: Sequence[int], fabric: Fabric, sharers: int = 1) -> float:
    """Ring all-reduce of `size_bytes` in each rank; `members`: how many ranks on each node of the group.

    The ring enters and leaves each node once, so a node's NIC carries 2(n-1)/n of the bytes for each group that it has a part
    in; `sharers` such groups share its rate. 0 when one node holds all.
    """
    count = sum(members)
    if len(members) < 2:
        return 0.0
    return 2 * (count - 1) / count * size_bytes * 8 * sharers / fabric.rate_bps + 2 * (count - 1) * fabric.latency_s


def send_seconds(size_bytes: float, fabric: Fabric, sharers: int = 1, messages: int = 1) -> float:
    """`size_bytes` out of a rank in `messages` parts, where `sharers` ranks share the node's rate."""
    return size_bytes * 8 * sharers / fabric.rate_bps + messages * fabric.latency_s


def pace(busy: Sequence[float], transfer: Sequence[float]) -> float:
    """Seconds from one micro-batch to the next under 1F1B; busy: forward and backward of each stage, transfer: of each edge, one way.

    It is that of the slowest run of neighbouring stages s..t: F goes down from s to t, there its B follows at once, goes back up, and then s
    may begin the micro-batch t - s + 1 later: (sum of busy[s..t] + 2 x transfers between them) / (t - s + 1). The largest such
    average is found by Dinkelbach's method: find the run that exceeds the pace so far most, take its average.
    """
    best, top = max(busy), max(busy)
    while True:
        total, count = busy[-1], 1
        for stage in reversed(range(len(busy) - 1)):
            hop = 2 * transfer[stage]
            onward = total + hop > best * count  # the run from the next stage on is slower than the pace, with its edge
            total, count = (total + hop + busy[stage], count + 1) if onward else (busy[stage], 1)
            top = max(top, total / count)
        if top <= best * (1 + 1e-13):
            return best
        best = top


def backward_ends(
    forward: Sequence[float], backward: Sequence[float], transfer: Sequence[float], micro_batches: int
) -> tuple[float, ...]:
    """When each stage ends its last backward under 1F1B; seconds for each stage, and for each edge between stages.

    The first micro-batch goes down and comes back, all others follow at the pace. Then the last backward runs up to stage 0. Exact for
    equal stages and free edges: (m + p - 1)(f + b); how far from a simulation otherwise: tests/test_cost.py, tests/test_stages.py.
    """
    busy = [f + b for f, b in zip(forward, backward)]
    ends = [sum(busy) + 2 * sum(transfer) + (micro_batches - 1) * pace(busy, transfer)]
    for stage, edge in enumerate(transfer):
        ends.append(ends[-1] - backward[stage] - edge)
    return tuple(ends)


def simulated_ends(
    forward: Sequence[float], backward: Sequence[float], transfer: Sequence[float], micro_batches: int
) -> tuple[float, ...]:
    """What backward_ends has a formula for, pass by pass: each after the one before it on its stage, and what it needs of its neighbour.

    The formula is too long where the first stage computes more than the others: it fills its wait for the first gradient with a forward pass.
    """
    last = len(forward) - 1
    orders = [passes("1f1b", stage, last + 1, micro_batches) for stage in range(last + 1)]
    ended: dict[str, list[list[float]]] = {kind: [[] for _ in orders] for kind in "FB"}  # of each stage, by micro-batch
    clock, place = [0.0] * len(orders), [0] * len(orders)
    while place[0] < len(orders[0]):
        for stage, order in enumerate(orders):
            while place[stage] < len(order):
                kind, micro_batch, _ = order[place[stage]]
                seconds, ready = (forward if kind == "F" else backward)[stage], 0.0
                neighbour = stage - 1 if kind == "F" else stage + 1
                if 0 <= neighbour <= last:
                    if len(ended[kind][neighbour]) <= micro_batch:
                        break
                    ready = ended[kind][neighbour][micro_batch] + transfer[min(stage, neighbour)]
                clock[stage] = max(clock[stage], ready) + seconds
                ended[kind][stage].append(clock[stage])
                place[stage] += 1
    return tuple(clock)


def fast_fabrics(site: Site) -> tuple[frozenset[str], ...]:
    """For each node, in the launcher's order, the fabrics that are better than Ethernet. Equal nodes are interchangeable."""
    ethernet = site.fabric_by_name[ETHERNET]
    fast = {fabric.name for fabric in site.fabrics if fabric.preference > ethernet.preference}
    return tuple(frozenset(node.fabrics) & fast for node in site.nodes)


@dataclass(frozen=True)
class _Component:
    """Seconds for each stage of a component: reduction in a step, collectives in a micro-batch, edges between its stages.
    straddling: for each kind, the groups that only Ethernet holds though a member has better: (count, slots)."""

    reduction: tuple[float, ...]
    collectives: tuple[float, ...]
    transfer: tuple[float, ...]
    straddling: dict[str, tuple[tuple[int, tuple[int, ...]], ...]]


class Predictor:
    """Predicts steps of one job for many orders of nodes.

    An order is a tuple of node classes by slot (an index of `classes`; nodes with equal fast fabrics are of one class), cut
    into components. inside: kinds of groups to treat as if each were on the slowest of its members' own best fabrics;
    only: the fabric of all traffic, whatever the nodes have (stock behaviour). like() makes another that shares the layout.
    """

    def __init__(
        self, site: Site, layout: Layout, workload: Workload, inside: frozenset[str] = frozenset(), only: Fabric | None = None
    ):
        self.site, self.layout, self.workload, self.inside, self.only = site, layout, workload, inside, only
        fabrics = fast_fabrics(site)
        self.classes = tuple(dict.fromkeys(fabrics))
        self.class_of = {node.name: self.classes.index(own) for node, own in zip(site.nodes, fabrics)}
        self._name = {index: name for name, index in reversed(self.class_of.items())}
        self._fabrics: dict[tuple[bool, frozenset[int]], Fabric] = {}
        self._components: dict[tuple[int, ...], _Component] = {}
        self._edges: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}

    def like(self, **options) -> Predictor:
        return Predictor(self.site, self.layout, self.workload, **options)

    def cut(self, order: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Classes by slot -> classes of each component's slots."""
        return tuple(tuple(order[slot] for slot in component) for component in self.layout.components)

    def join(self, parts: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
        """The inverse of cut."""
        order = [0] * self.layout.slots
        for component, part in zip(self.layout.components, parts):
            for slot, index in zip(component, part):
                order[slot] = index
        return tuple(order)

    def breakdown(self, parts: Sequence[tuple[int, ...]]) -> Breakdown:
        """The predicted step of an order that was cut."""
        costs = [self.component(part) for part in parts]
        reduction, collectives, transfer = [], [], []
        for index, cost in enumerate(costs):
            reduction += cost.reduction
            collectives += cost.collectives
            transfer += cost.transfer
            if index + 1 < len(parts):
                transfer.append(self._onward(parts[index], parts[index + 1]))
        forward = [self.workload.forward_s + seconds / 2 for seconds in collectives]
        backward = [self.workload.backward_s + seconds / 2 for seconds in collectives]
        ends = backward_ends(forward, backward, transfer, self.workload.micro_batches)
        return Breakdown(ends, tuple(reduction), tuple(transfer))

    def straddles(self, parts: Sequence[tuple[int, ...]]) -> bool:
        return any(self.component(part).straddling for part in parts)

    def component(self, part: tuple[int, ...]) -> _Component:
        if part not in self._components:
            self._components[part] = self._measure(part)
        return self._components[part]

    def fabric(self, members: Iterable[int], inside: bool = False) -> Fabric:
        """The fastest fabric that the classes `members` share; with `inside`, the slowest of their own best ones."""
        if self.only is not None:
            return self.only
        key = (inside, frozenset(members))
        if key not in self._fabrics:
            own = [self.site.shared_fabric([self._name[index]]) for index in key[1]]
            slowest = min(own, key=lambda fabric: fabric.preference)
            self._fabrics[key] = slowest if inside else self.site.shared_fabric(self._name[index] for index in key[1])
        return self._fabrics[key]

    def _measure(self, part: tuple[int, ...]) -> _Component:
        seconds = {kind: [0.0] * self.layout.stages for kind in INSIDE}
        straddling: dict[str, list[tuple[int, tuple[int, ...]]]] = {}
        for kind, ties in self.layout.ties.items():
            members = [{part[slot] for slot in tie.slots} for tie in ties]
            fabrics = [self.fabric(classes, kind in self.inside) for classes in members]
            load: Counter = Counter()  # groups on each node's way to a fabric, of all its stages
            for tie, fabric in zip(ties, fabrics):
                for slot in tie.slots:
                    load[slot, fabric.name] += tie.count
            for tie, fabric, classes in zip(ties, fabrics, members):
                sharers = max(load[slot, fabric.name] for slot in tie.slots)
                seconds[kind][tie.stage] = max(seconds[kind][tie.stage], self._collective(kind, tie, fabric, sharers))
                if len(classes) > 1 and fabric.name == ETHERNET:  # two classes: one at least has better
                    straddling.setdefault(kind, []).append((tie.count, tie.slots))
        collectives = tuple(sum(parts) for parts in zip(*(seconds[kind] for kind in INSIDE if kind != "data")))
        transfer = tuple(self._transfer(pairs, part, part) for pairs in self.layout.inner)
        kinds = {kind: tuple(found) for kind, found in straddling.items()}
        return _Component(tuple(seconds["data"]), collectives, transfer, kinds)

    def _collective(self, kind: str, tie, fabric: Fabric, sharers: int) -> float:
        work = self.workload
        if kind in ("data", "tensor"):
            size = work.gradient_bytes if kind == "data" else work.tensor_bytes
            here = [tie.members // len(tie.slots)] * (len(tie.slots) - 1)
            return allreduce_seconds(size, [*here, tie.members - sum(here)], fabric, sharers) if size else 0.0
        if kind == "context":
            return send_seconds(work.context_bytes, fabric, sharers, tie.members - 1) if work.context_bytes else 0.0
        together = sharers * ceil(tie.members / len(tie.slots))  # in an all-to-all every rank sends off its node
        return send_seconds(work.expert_bytes, fabric, together, tie.members - 1) if work.expert_bytes else 0.0

    def _onward(self, part: tuple[int, ...], following: tuple[int, ...]) -> float:
        if (part, following) not in self._edges:
            self._edges[part, following] = self._transfer(self.layout.onward, part, following)
        return self._edges[part, following]

    def _transfer(self, pairs: dict[tuple[int, int], int], sender: tuple[int, ...], receiver: tuple[int, ...]) -> float:
        """Seconds until the slowest pair of ranks on an edge has its activation across; 0 inside a node."""
        fabrics = {pair: self.fabric((sender[pair[0]], receiver[pair[1]])) for pair in pairs}
        load: Counter = Counter()
        for pair, count in pairs.items():
            load["out", pair[0], fabrics[pair].name] += count
            load["in", pair[1], fabrics[pair].name] += count
        slowest = 0.0
        for pair, fabric in fabrics.items():
            sharers = max(load["out", pair[0], fabric.name], load["in", pair[1], fabric.name])
            slowest = max(slowest, send_seconds(self.workload.activation_bytes, fabric, sharers))
        return slowest


def step_seconds(site: Site, order: Sequence[str], sizes: Sizes, workload: Workload | None = None, **options) -> Breakdown:
    """The predicted step with the nodes in `order` (names; rank r runs on order[r // processes]); options: see Predictor."""
    predictor = Predictor(site, Layout(sizes.complete(site.world_size), site.processes), workload or Workload(), **options)
    return predictor.breakdown(predictor.cut([predictor.class_of[name] for name in order]))


def stock_fabric(site: Site) -> Fabric:
    """Where a job without holmes runs all its traffic: the one fabric that every node is on, else Ethernet."""
    return site.shared_fabric(node.name for node in site.nodes)
