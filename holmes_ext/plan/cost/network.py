"""What a message or a collective puts on the networks, and what it takes where it is alone.

Every time is linear in the bytes (alpha-beta model: Thakur, Rabenseifner and Gropp 2005; Patarasuk and Yuan
2009). The simulation (planner/simulate) shares what carries the same loads.

    ring of n      passes every node once, each way: 2 (n - 1) / n of the bytes through its NIC, in 2 (n - 1)
                   messages that follow each other
    all-to-all     every rank sends the others their parts, one after the other
    between        what crosses clusters passes more than NICs: uplinks and links that all who cross share
    clusters       (cluster/wan.py); the slowest counts, and latencies are added
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from holmes_ext.cluster.fabric import ETHERNET, Fabric
from holmes_ext.cluster.site import Site
from holmes_ext.cluster.wan import Hop, Wan
from holmes_ext.plan.across import hop_loads
from holmes_ext.plan.cost.links import Curve, Link, Links
from holmes_ext.plan.placement import Content, GroupFamily, Placement, StageMessages
from holmes_ext.plan.sizes import Sizes
from holmes_ext.plan.traffic import Pair, neighbours

T = TypeVar("T")
#: (class of node, fabric, "out" or "in")
Nic = tuple[int, str, str]


@dataclass(frozen=True)
class Price:
    """Seconds of each byte, and those that no byte changes."""

    byte_s: float = 0.0
    latency_s: float = 0.0

    def seconds(self, size: float) -> float:
        """Of `size` bytes; nothing takes no time."""
        return self.latency_s + size * self.byte_s if size > 0 else 0.0

    def scaled(self, factor: float) -> Price:
        return Price(factor * self.byte_s, factor * self.latency_s)

    def __add__(self, other: Price) -> Price:
        return Price(self.byte_s + other.byte_s, self.latency_s + other.latency_s)


FREE = Price()


@dataclass(frozen=True)
class Load:
    """A message or a collective, for each byte of it."""

    #: NIC, and how many such flows it carries at once.
    nics: tuple[tuple[Nic, float], ...] = ()
    #: The same between clusters.
    hops: tuple[tuple[Hop, float], ...] = ()
    #: None: inside a node, at inside_bps (0: not known, counts as free).
    fabric: Fabric | None = None
    inside_bps: float = 0.0
    #: Bytes through a NIC.
    volume: float = 1.0
    #: That follow each other, each with this part of the bytes.
    messages: float = 1.0
    part: float = 1.0
    #: What its way between clusters takes longer than the fabric's latency says.
    longer_s: float = 0.0
    #: Whether its messages are steps of a ring: which of a link's curves holds.
    ring: bool = False
    across: bool = False
    #: Nodes that send at once; messages of a hierarchical all-reduce for each byte, besides.
    senders: float = 0.0
    posts: float = 0.0

    def scaled(self, factor: float) -> Load:
        """So many times as many messages and bytes: 1/2 of a ring is a reduce-scatter, or a gather."""
        volume, messages = factor * self.volume, factor * self.messages
        return replace(self, volume=volume, messages=messages, longer_s=factor * self.longer_s)

    @cached_property
    def price(self) -> Price:
        """Alone; `fabric` is what stands for a measured one (Links.line)."""
        if self.fabric is None:
            return Price(8 * self.volume / self.inside_bps) if self.inside_bps else FREE
        rate = self.fabric.rate_bps
        slowest = max([1 / rate, *(flows / rate for _, flows in self.nics)])
        slowest = max([slowest, *(flows / hop.rate_bps for hop, flows in self.hops)])
        return Price(
            8 * self.volume * slowest, self.messages * self.fabric.latency_s + self.longer_s
        )


class Network:
    """A site as prices see it.

    kinds: of nodes, those that are alike: in one cluster, on the same fabrics. only: the fabric of all
    traffic, as without holmes. links: what was measured of the networks. uneven: for bounds: NCCL's sums in
    a hierarchical all-reduce may have other numbers of ranks in each cluster. on_best_fabrics: a
    question "what if": every
    group uses the slowest of its nodes' own best fabrics, even if the nodes do not share that fabric.
    """

    def __init__(
        self,
        site: Site,
        links: Links = Links(),
        only: Fabric | None = None,
        uneven: bool = False,
        on_best_fabrics: bool = False,
    ):
        self.site, self.links, self.only, self.uneven = site, links, only, uneven
        self.on_best_fabrics = on_best_fabrics
        self.processes, self.world = site.processes, site.world_size
        #: Fabrics are chosen by what was measured of them.
        self.measured = links.site(site)
        self.wan: Wan = self.measured.wan
        looks = {node.name: (node.cluster, node.fabrics) for node in site.nodes}
        self.kinds = tuple(dict.fromkeys(looks.values()))
        numbers = {look: index for index, look in enumerate(self.kinds)}
        self.kind_of = {name: numbers[look] for name, look in looks.items()}
        self._known: dict[Hashable, Any] = {}

    def remember(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` gives, made once for each key."""
        if key not in self._known:
            self._known[key] = make()
        result: T = self._known[key]
        return result

    @cached_property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """Nodes of each kind, as the launcher has them."""
        by_kind: list[list[str]] = [[] for _ in self.kinds]
        for name, kind in self.kind_of.items():
            by_kind[kind].append(name)
        return tuple(map(tuple, by_kind))

    def cluster(self, kind: int) -> str:
        return self.kinds[kind][0]

    def clusters(self, content: Content) -> list[str]:
        """Names, in the order of nodes."""
        return list(dict.fromkeys(self.cluster(kind) for kind, _ in content))

    def placement(self, names: Sequence[str], sizes: Sizes) -> Placement:
        """Of nodes in the order of ranks."""
        kinds = [self.kind_of[name] for name in names]
        return replace(Placement.of(sizes, self.processes, kinds), names=tuple(names))

    def nodes(self, placement: Placement) -> tuple[str, ...]:
        """Names by slot."""
        if placement.names:
            return placement.names
        unused = [iter(names) for names in self.names]
        return tuple(next(unused[kind]) for kind in placement.kinds())

    def fabric(self, kinds: Iterable[int]) -> Fabric:
        """The fastest that nodes of these kinds share (or see on_best_fabrics); with the numbers that
        cluster.toml states."""
        if self.only is not None:
            return self.only
        if self.on_best_fabrics:
            own_best = [self._shared_fabric(frozenset([kind])) for kind in kinds]
            return min(own_best, key=lambda fabric: fabric.preference)
        return self._shared_fabric(frozenset(kinds))

    def _shared_fabric(self, kinds: frozenset[int]) -> Fabric:
        """Return the fastest fabric that nodes of these kinds share, as cluster.toml describes it."""
        firsts = (self.names[kind][0] for kind in kinds)
        return self.remember(
            kinds, lambda: self.site.fabric_by_name[self.measured.shared_fabric(firsts).name]
        )

    def line(self, fabric: Fabric) -> Fabric:
        """With rate and latency as measured, where that was."""
        return self.remember(fabric.name, lambda: self.links.line(fabric))

    # ------------------------------------------------------------------- what lies between clusters

    def hops(self, fabric: Fabric, pairs: Mapping[Pair, float]) -> tuple[tuple[Hop, float], ...]:
        """What so many flows from cluster to cluster pass on a fabric, with the flows of each."""
        if not self.wan or fabric.name != ETHERNET:
            return ()
        return tuple(hop_loads(self.wan, pairs).items())

    def longer_s(self, fabric: Fabric, pair: Pair) -> float:
        """What the way between two clusters takes longer than the fabric's latency."""
        if not self.wan or fabric.name != ETHERNET:
            return 0.0
        seconds = sum(hop.latency_s for hop in self.wan.hops(*pair))
        return max(0.0, seconds - self.line(fabric).latency_s)

    def neighbours(self, ring: Content) -> list[Pair]:
        """Clusters that follow each other in a ring of such nodes."""
        return neighbours([self.cluster(kind) for kind, _ in ring])

    # ------------------------------------------------------------------- loads

    def ring(self, family: GroupFamily, groups: float = 0, inside_bps: float = 0.0) -> Load:
        """An all-reduce of each group of a family. groups: 0 where others are loads of their own
        (simulation); else how many cross at once. inside_bps: of the GPUs of a node."""
        messages, volume = 2 * (family.ranks - 1), 2 * (family.ranks - 1) / family.ranks
        if family.nodes == 1:
            return Load(inside_bps=inside_bps, volume=volume)
        return self.remember(
            ("ring", family, groups), lambda: self._ring(family, groups, messages, volume)
        )

    def _ring(self, family: GroupFamily, groups: float, messages: int, volume: float) -> Load:
        fabric, pairs = self.fabric(family.kinds), Counter(self.neighbours(family.ring))
        longer = [
            self.longer_s(fabric, pair) for pair, times in pairs.items() for _ in range(times)
        ]
        longer += [0.0] * (family.ranks - len(longer))
        crossing = {pair: times * (groups or family.count) for pair, times in pairs.items()}
        flows = {
            part.node: part.concurrent_groups if groups else part.groups for part in family.parts
        }
        return Load(
            self.both_ways(fabric, flows),
            self.hops(fabric, crossing),
            self.line(fabric),
            volume=volume,
            messages=messages,
            part=1 / family.ranks,
            ring=True,
            longer_s=2 * (sum(longer) - min(longer)),
            across=self.across(family.kinds),
            senders=family.count * family.nodes,
        )

    def in_turn(self, family: GroupFamily, every: bool, inside_bps: float = 0.0) -> Load:
        """Bytes passed on in parts: around a ring of the group (context), or from every rank to each other
        one."""
        if family.nodes == 1:
            return Load(inside_bps=inside_bps)
        fabric, pairs = self.fabric(family.kinds), Counter(self.neighbours(family.ring))
        flows = {
            part.node: part.concurrent_groups * (part.ranks_per_node if every else 1)
            for part in family.parts
        }
        longer_s = max((self.longer_s(fabric, pair) for pair in pairs), default=0.0)
        messages = family.ranks - 1
        return Load(
            self.both_ways(fabric, flows),
            self.hops(fabric, pairs),
            self.line(fabric),
            messages=messages,
            longer_s=messages * longer_s,
            across=self.across(family.kinds),
        )

    def message(
        self, stage_link: StageMessages, inside_bps: float = 0.0, crossing: float = 0
    ) -> Load:
        """From a stage to another. crossing: pipelines that cross at once, if not this kind's alone."""
        if stage_link.local:
            return Load(inside_bps=inside_bps)
        fabric = self.fabric(stage_link.kinds)
        pair = self.cluster(stage_link.kinds[0]), self.cluster(stage_link.kinds[1])
        flows = {pair: crossing or stage_link.count} if pair[0] != pair[1] else {}
        nics = (
            ((stage_link.sender, fabric.name, "out"), stage_link.leaving),
            ((stage_link.receiver, fabric.name, "in"), stage_link.reaching),
        )
        longer_s = self.longer_s(fabric, pair) if flows else 0.0
        return Load(
            nics,
            self.hops(fabric, flows),
            self.line(fabric),
            longer_s=longer_s,
            across=bool(flows),
            senders=stage_link.count,
        )

    def pairwise(self, stage_link: StageMessages, inside_bps: float = 0.0) -> Load:
        """An all-reduce between two ranks on these nodes."""
        there, back = (
            self.message(stage_link, inside_bps),
            self.message(stage_link.turned, inside_bps),
        )
        if there.fabric is None:
            return there
        hops: dict[Hop, float] = {}
        for hop, flows in (*there.hops, *back.hops):
            hops[hop] = hops.get(hop, 0.0) + flows
        nics = dict((*there.nics, *back.nics))
        return replace(
            there,
            nics=tuple(nics.items()),
            hops=tuple(hops.items()),
            messages=2,
            part=0.5,
            ring=True,
            longer_s=2 * there.longer_s,
            senders=2 * stage_link.count,
        )

    def both_ways(
        self, fabric: Fabric, flows: Mapping[int, float]
    ) -> tuple[tuple[Nic, float], ...]:
        """So many flows out of and into each class of nodes."""
        return tuple(
            ((node, fabric.name, direction), count)
            for direction in ("out", "in")
            for node, count in flows.items()
        )

    def homes(self, kind: int) -> list[str]:
        """The fabrics that hold groups of such nodes: the fast ones, else Ethernet (of its own cluster where
        there is a WAN)."""
        cluster, fabrics = self.kinds[kind]
        lowest = self.site.fabric_by_name[ETHERNET].preference
        fast = [
            name for name in sorted(fabrics) if self.site.fabric_by_name[name].preference > lowest
        ]
        return fast or [f"{ETHERNET} of {cluster}" if self.wan else ETHERNET]

    def spans_networks(self, kinds: frozenset[int]) -> bool:
        """Whether they have Ethernet alone in common, though one of them has a better home."""
        if len(kinds) == 1 or self.fabric(kinds).name != ETHERNET:
            return False
        return len({tuple(self.homes(kind)) for kind in kinds}) > 1

    def across(self, kinds: Iterable[int]) -> bool:
        return len(set(map(self.cluster, kinds))) > 1

    def link(self, load: Load) -> Link:
        """As measured."""
        assert load.fabric is not None
        return self.links.of(load.fabric)

    def curve(self, load: Load) -> Curve:
        link = self.link(load)
        return link.ring if load.ring else link.send


def stock_fabric(site: Site) -> Fabric:
    """Where stock runs all its traffic: the fabric that every node is on, else Ethernet."""
    return site.shared_fabric(node.name for node in site.nodes)
