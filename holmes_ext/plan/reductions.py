"""Which sums go in two levels, inside clusters and across them: where that is faster than one ring, and the sums of
gradients that two stages share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import ceil, inf

from holmes_ext.plan.cost.across import Across, neighbours
from holmes_ext.plan.cost.network_old import FREE, all_reduce, crossing, slowest_inside, summed_across
from holmes_ext.plan.layout import groups
from holmes_ext.plan.plan import Plan
from holmes_ext.plan.sizes import Sizes
from holmes_ext.plan.traffic import SOCKETS, VERBS, Reduction

#: Bytes on the wire for each byte of gradients that crosses (runtime/reduce/compress.py).
SHARES = {"off": 1.0, "bf16": 0.5, "int8": (1 + 4 / 256) / 4}
#: Streams of two ranks at most; the part of a link that they are to fill, as measuring one is not exact.
MOST_STREAMS, STREAM_SHARE = 8, 0.8
#: Sums for which two levels are compared with a flat ring: 1 KiB to 1 GiB.
_SUMS = tuple(2**power for power in range(10, 31))

#: What in_two_levels() returns for one flat ring.
FLAT: tuple[tuple[str, ...], int, int, Across | None, int] = (), 0, 0, None, 1


def in_two_levels(
    plan: Plan, found: Sequence[Sequence[int]], carrier: str, compress: str, total_bytes: float, pairs: bool = False
) -> tuple[tuple[str, ...], int, int, Across | None, int]:
    """(names of clusters, bytes of the least sum, bytes of a chunk, way across, streams); no names where one ring is
    faster for large sums; no way where it is direct. pairs: in place of the ring every rank of a cluster sums with one
    of the other (tied weights as engines do it).

    A cluster that is on the network between the clusters only sends as much as in the ring. NCCL's collectives
    (runtime/reduce/two_level_nccl.py) need clusters of equal size.
    """
    names: dict[str, None] = {}
    least, chunks, ways, streams = 0, [], {}, 1
    straddling = [ranks for ranks in found if len(plan.by_cluster(ranks)) > 1]
    for ranks in straddling:
        parts, across = plan.by_cluster(ranks), plan.fabric_of(ranks, carrier)
        if across is None:
            continue
        inside = [fabric for part in parts.values() if (fabric := plan.fabric_of(part, carrier)) is not None]
        clusters = {name: len(part) for name, part in parts.items()}
        nothing_inside = across in inside and not plan.wan
        if nothing_inside or not (inside or pairs) or carrier == VERBS and len(set(clusters.values())) > 1:
            return FLAT
        here = max(Counter(map(plan.node_of, ranks)).values())
        sharers, direct = max(1, plan.processes // here), carrier == SOCKETS
        slowest = min(inside, key=lambda f: f.rate_bps, default=None)  # none: each cluster's ranks are in one node
        price = slowest_inside(slowest, max(clusters.values()), here, sharers, direct) if slowest is not None else FREE
        order = list(map(plan.cluster_of_rank, ranks))
        if pairs:
            both = list(zip(clusters, [*list(clusters)[1:], next(iter(clusters))]))
            ways_of_pair = crossing(plan.wan, both, len(straddling) * len(ranks) // 2)
            flat = all_reduce(2, across, here * sharers, ways_of_pair)
        else:
            flat = all_reduce(len(ranks), across, sharers, crossing(plan.wan, neighbours(order), len(straddling)))
        total = min(total_bytes, _SUMS[-1])
        way, best = summed_across(
            total, price, across, clusters, here * sharers, SHARES[compress], direct, plan.wan, len(straddling)
        )
        slower = [size for size in _SUMS if best.seconds(size) >= flat.seconds(size)]
        if _SUMS[-1] in slower:
            return FLAT
        names.update(dict.fromkeys(parts))
        ways[frozenset(parts)] = way
        if direct:
            streams = max(streams, _streams(plan, way, clusters, across.rate_bps / (here * sharers), len(straddling)))
        least = max(least, 2 * slower[-1] if slower else 0)
        chunks.append(int(best.chunk_bytes))
    same_way = next(iter(ways.values())) if len(ways) == 1 and carrier == SOCKETS else None
    across_way = same_way if same_way is not None and same_way.way != "direct" else None
    return tuple(names), least, min(chunks, default=0), across_way, streams


def _streams(plan: Plan, way: Across, clusters: dict[str, int], nic_bps: float, groups: int) -> int:
    """TCP streams between two ranks that it takes to fill the links on the way, as far as one was measured to carry
    less. nic_bps: a rank's part of its NIC; groups: like this one at once."""
    found = 1
    for one, two in way.halves[0]:
        link = plan.wan.pair_of.get((one, two))
        if link is not None and link.stream_bps and link.rate_bps:
            wanted = min(nic_bps, link.rate_bps / (groups * min(clusters[one], clusters[two])))
            found = max(found, ceil(STREAM_SHARE * wanted / link.stream_bps))
    return min(found, MOST_STREAMS)


def tied_reduction(plan: Plan, carrier: str) -> Reduction | None:
    """How gradients of a weight that the first and the last stage share are summed over all their ranks (tied_sums);
    None: each rank with its twin, as engines do it, and that is then averaged."""
    sums = tied_sums(plan.sizes) if plan.sizes is not None and plan.sizes.pipeline > 1 else []
    stages = [ranks[start::2] for ranks in sums for start in (0, 1)]
    if any(len(plan.by_cluster(stage)) > 1 or len(stage) == 1 for stage in stages):
        return None
    way = in_two_levels(plan, sums, carrier, "off", inf, pairs=True)
    return Reduction(False, 0, *way[:3], "off", *way[3:]) if way[0] else None


def tied_sums(sizes: Sizes) -> list[tuple[int, ...]]:
    """The ranks that hold the same part of such a weight: those of the first and of the last stage in turn."""
    of = {rank: own for own in groups(sizes, "data") for rank in own}
    both = {(of[ranks[0]], of[ranks[-1]]) for ranks in groups(sizes, "pipeline")}
    return [tuple(rank for twins in zip(first, last) for rank in twins) for first, last in sorted(both)]
