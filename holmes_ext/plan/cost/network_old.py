"""What networks take: a message, a ring all-reduce, an all-to-all, two levels. Seconds from bytes, a fabric's rate and
its latency.

Every time is linear in the bytes (alpha-beta model: Thakur, Rabenseifner and Gropp 2005; Patarasuk and Yuan 2009), so
it is a Price: latency_s + size x byte_s. Groups that share a node's NICs share their rate: `sharers`.

    ring of n    passes every node once, each way: 2 (n - 1) / n of the bytes through its NIC, in 2 (n - 1) messages
                 that follow each other
    two levels   inside every cluster, across (across.py), inside: chunks follow each other, so the slower level is
                 always busy

What crosses clusters passes more than NICs: uplinks and links that all who cross share (cluster/wan.py). The slowest of
them counts; on a flat network there is none.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from holmes_ext.cluster.site import Fabric
from holmes_ext.cluster.wan import Hop, Wan
from holmes_ext.plan.cost.across import Across, hop_loads, ways_across

#: Bytes of a chunk of a two-level all-reduce for each rank of the smallest cluster: what its Ethernet NIC carries at a
#: time.
CHUNK_SHARE_BYTES = 512 * 2**10
#: NCCL's collectives need some MiB to reach a network's rate, and more only fills the pipeline later.
NCCL_CHUNK_BYTES = 4 * 2**20, 16 * 2**20
#: Below this, there and back, chunks are not made larger to outlast latency: other costs of a message are as long.
HIDDEN_LATENCY_S = 5e-4
#: What another way across must take at most of the direct one's time.
WORTH = 0.95
#: What lies between two clusters: each hop with the flows that share it.
Way = tuple[tuple[Hop, float], ...]


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


FREE = Price()


def ring(ranks: int) -> tuple[int, float]:
    """Of a ring all-reduce: messages that follow each other, and bytes through each node's NIC for each byte that is
    reduced."""
    return 2 * (ranks - 1), 2 * (ranks - 1) / ranks


def passes(fabric: Fabric, sharers: float, ways: Iterable[Way] = ()) -> float:
    """Seconds of a byte through the slowest of a node's NIC, which `sharers` share, and the hops of `ways`."""
    return max([8 * sharers / fabric.rate_bps, *(8 * flows / hop.rate_bps for way in ways for hop, flows in way)])


def latency_s(fabric: Fabric, way: Way) -> float:
    """Of a message on its way."""
    return sum(hop.latency_s for hop, _ in way) or fabric.latency_s


def crossing(wan: Wan, pairs: Sequence[tuple[str, str]], flows: float = 1) -> tuple[Way, ...]:
    """What lies between each of these pairs of clusters, when `flows` go from the one to the other of all of them at
    once; () on a flat network."""
    if not wan:
        return ()
    loads = hop_loads(wan, {pair: count * flows for pair, count in Counter(pairs).items()})
    return tuple(tuple((hop, loads[hop]) for hop in wan.hops(*pair)) for pair in pairs)


def all_reduce(ranks: int, fabric: Fabric, sharers: float = 1, ways: Sequence[Way] = ()) -> Price:
    """Of the bytes in each rank; the group is on several nodes. ways: between neighbours of the ring in two clusters
    (crossing). A byte passes 2 (n - 1) neighbours one after the other: their latencies twice, but for the least."""
    messages, share = ring(ranks)
    if not ways:
        return Price(share * passes(fabric, sharers), messages * fabric.latency_s)
    latencies = [*(latency_s(fabric, way) for way in ways), *[fabric.latency_s] * (ranks - len(ways))]
    return Price(share * passes(fabric, sharers, ways), 2 * (sum(latencies) - min(latencies)))


def message(fabric: Fabric, sharers: float = 1, messages: int = 1, way: Way = ()) -> Price:
    """Of bytes that leave a rank in `messages` parts one after the other (activations; K and V around a context ring;
    an all-to-all). way: between the clusters (crossing)."""
    return Price(passes(fabric, sharers, [way]), messages * latency_s(fabric, way))


def inside_cluster(ranks: int, here: int, direct: bool) -> tuple[int, float]:
    """Of a reduce-scatter or an all-gather among a cluster's `ranks`, `here` of them on each node: messages that follow
    each other, and bytes through a node's NIC for each byte. A ring (NCCL); with `direct` every rank sends each other
    its block (runtime/reduce/direct.py, over gloo), so a node's ranks send to all others' nodes."""
    messages, share = ring(ranks)
    return (1, here * (ranks - here) / ranks) if direct else (messages // 2, share / 2)


def chunk_bytes(ranks: int, direct: bool) -> int:
    """Of a two-level all-reduce; ranks: of the group in the smallest cluster; direct: see inside_cluster."""
    size, (least, most) = CHUNK_SHARE_BYTES * ranks, NCCL_CHUNK_BYTES
    return size if direct else min(max(size, least), most)


def chunks_of(size: float, chunk_bytes: float) -> int:
    """Chunks of a two-level all-reduce of `size` bytes, all alike: what is left beside whole ones would cost nearly as
    much as one (DistributedDataParallel's buckets end above their limit)."""
    return max(1, int(size // chunk_bytes))


@dataclass(frozen=True)
class TwoLevels:
    """An all-reduce inside clusters and across them, each the price of its two steps; inside: of the slowest cluster.
    stalls: whether a chunk's step across must arrive before the next chunk's leaves (runtime/reduce/direct.py, both
    steps in time with each other; relay.py sends on)."""

    inside: Price
    across: Price
    chunk_bytes: float
    stalls: bool = False

    @property
    def pipelined(self) -> Price:
        """Of many chunks: the slower level all the time. Never more than seconds()."""
        return Price(max(self.inside.byte_s, self._across_byte_s), self.inside.latency_s + self.across.latency_s)

    @property
    def _across_byte_s(self) -> float:
        return self.across.byte_s + (self.across.latency_s / 2 / self.chunk_bytes if self.stalls else 0.0)

    def seconds(self, size: float) -> float:
        """The same, and the first chunk on the faster level."""
        if size <= self.chunk_bytes:  # nothing follows that could stall
            slower = max(self.inside.byte_s, self.across.byte_s)
            once = Price(slower, self.pipelined.latency_s)
            return once.seconds(size) + size * min(self.inside.byte_s, self.across.byte_s)
        return self.pipelined.seconds(size) + self.chunk_bytes * min(self.inside.byte_s, self._across_byte_s)

    def sized(self, size: float) -> TwoLevels:
        """With the chunks that suit a sum of `size` bytes: small ones fill the levels soon, large ones outlast the
        latency."""
        if not self.stalls or self.across.latency_s < HIDDEN_LATENCY_S:
            return self
        least, steps = self.chunk_bytes, 0
        while least * 2**steps < size:
            steps += 1
        return min((replace(self, chunk_bytes=least * 2**step) for step in range(steps + 1)),
                   key=lambda one: one.seconds(size))


def two_levels(
    inside: Price, fabric: Fabric, clusters: Mapping[str, int], processes: int, share: float = 1.0,
    across: Across | None = None, wan: Wan = Wan(), groups: float = 1, direct: bool = True,
) -> TwoLevels:
    """clusters: ranks of the group in each. processes: ranks of a node that send across at once, groups: like this one
    between the same clusters. share: what compression leaves of the bytes that cross; NCCL then gathers all clusters'
    sums whole (runtime/reduce/two_level_nccl.py). across: default direct. direct: see inside_cluster."""
    across = across or Across("direct", tuple(clusters))
    share *= len(clusters) / 2 if share < 1 and not direct else 1
    there, back = across.halves
    both = {pair: there.get(pair, 0.0) + back.get(pair, 0.0) for pair in {**there, **back}}

    def byte_s(volumes: Mapping[tuple[str, str], float]) -> float:
        nics: defaultdict[tuple[str, int], float] = defaultdict(float)
        for (one, two), volume in volumes.items():
            nics[one, 0] += volume / clusters[one]
            nics[two, 1] += volume / clusters[two]
        loads = [groups * load / hop.rate_bps for hop, load in hop_loads(wan, volumes).items()]
        return 8 * share * max([processes * max(nics.values()) / fabric.rate_bps, *loads])

    half_s = across.latency_s(lambda pair: sum(hop.latency_s for hop in wan.hops(*pair)) or fabric.latency_s)
    stalls = bool(wan) and direct and across.way == "direct"
    half_s *= 2 if stalls else 1  # receives are posted with the sends: gloo's sender hears of one a latency later
    return TwoLevels(inside, Price(byte_s(both), 2 * half_s), chunk_bytes(min(clusters.values()), direct), stalls)


def summed_across(
    size: float, inside: Price, fabric: Fabric, clusters: Mapping[str, int], processes: int, share: float = 1.0,
    direct: bool = True, wan: Wan = Wan(), groups: float = 1,
) -> tuple[Across, TwoLevels]:
    """Of all ways across the one that takes the least for a sum of `size` bytes; arguments as of two_levels. direct:
    gloo, where runtime/reduce/ can do all; NCCL's all-reduce goes round the clusters in the order of ranks (what is
    compressed goes directly, too)."""
    names = tuple(clusters)
    ways = ways_across(wan, names) if direct else (Across("ring", names) if wan else Across("direct", names),)
    if share != 1.0:
        ways = ways[:1]
    known = inside, fabric, clusters, processes, share
    prices = [two_levels(*known, way, wan, groups, direct).sized(size) for way in ways]
    found = list(zip(ways, prices))
    first, best = found[0], min(found, key=lambda one: one[1].seconds(size))
    return best if best[1].seconds(size) < WORTH * first[1].seconds(size) else first


def two_level_seconds(
    size: float, clusters: Sequence[int], inside: Fabric, across: Fabric, here: int = 1, sharers: int = 1,
    share: float = 1.0, direct: bool = True,
) -> tuple[float, float]:
    """On a flat network: seconds of an all-reduce of `size` bytes (flat ring on `across`, two levels). clusters: ranks
    of the group in each; see slowest_inside."""
    flat = all_reduce(sum(clusters), across, sharers).seconds(size)
    slowest = slowest_inside(inside, max(clusters), here, sharers, direct)
    named = {str(number): ranks for number, ranks in enumerate(clusters)}
    return flat, two_levels(slowest, across, named, here * sharers, share, direct=direct).seconds(size)


def slowest_inside(inside: Fabric, ranks: int, here: int, sharers: int, direct: bool) -> Price:
    """Both steps inside the largest cluster, of `ranks` ranks of the group. inside: the slowest cluster's fabric; here:
    ranks of the group on a node; sharers: such groups that share the node's NICs; direct: see inside_cluster."""
    messages, volume = inside_cluster(ranks, here, direct)
    return Price(2 * volume * 8 * sharers / inside.rate_bps, 2 * messages * inside.latency_s)


def tied_seconds(
    size: float, pair: Price, inside: Price, across: Fabric, clusters: tuple[str, str], ranks: int, processes: int,
    wan: Wan = Wan(), groups: float = 1,
) -> float:
    """Of a gradient that two stages share, each in a cluster of its own with `ranks` data-parallel ranks: by pairs of
    ranks, or in two levels (runtime/reduce/tied.py), whichever is faster. Other arguments: see two_levels."""
    both = summed_across(size, inside, across, dict.fromkeys(clusters, ranks), processes, wan=wan, groups=groups)[1]
    return min(pair.seconds(size), both.seconds(size))
