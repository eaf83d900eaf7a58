"""What a message or a collective puts on the networks: plan/simulate/step.py's transfers, with their seconds and bits,
and what they share: NICs, and between clusters uplinks and links (cluster/wan.py). The one place that knows the way
from node to node.

A ring of n ranks passes every node once: 2 (n - 1) / n of the bytes through each NIC, both ways at once, in 2 (n - 1)
messages (half of both for a reduce-scatter or a gather); among GPUs of one node over their own link, where its rate is
known. Two levels: runtime/reduce/two_level.py's four steps, chunk after chunk.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf

from holmes_ext.cluster.site import ETHERNET, Fabric
from holmes_ext.plan.cost.across import Across, Pair, hop_loads
from holmes_ext.plan.cost.links import CORES, Links
from holmes_ext.plan.cost.model import Model
from holmes_ext.plan.cost.network import TwoLevels, chunks_of, inside_cluster, ring, slowest_inside, summed_across
from holmes_ext.plan.simulate.events import Transfer
from holmes_ext.plan.simulate.pipelines import DataGroups, Pipelines

Uses = tuple[tuple[Hashable, float], ...]


class Flows:
    """message_s: seconds that software adds to each message. slices: tensor ranks that share out an activation on
    Ethernet, and gather it then; 0: nothing that crosses is cut, tied weights neither."""

    def __init__(self, pipelines: Pipelines, links: Links, model: Model, message_s: float, slices: int = 0):
        self.pipelines, self.links, self.model, self.message_s = pipelines, links, model, message_s
        self.slices = slices
        self.wan = links.site(pipelines.site).wan
        self.gradient_bytes: dict[int, float] = {}  # of each stage
        self._rounds: dict[Hashable, tuple[Fabric, float, Uses]] = {}
        self.hops: dict[Hashable, float] = {}  # bits/s of what lies between clusters, as far as it is used

    def capacity(self, fabric: Fabric) -> float:
        """Bits/s of a node's NIC, each way."""
        link = self.links.of(fabric)
        return max(link.send.rate_bps, link.ring.rate_bps)

    def message(self, kind: int, stage: int, other: int, size: float) -> Transfer:
        """`size` bytes from a stage to another of one kind of pipeline."""
        one, two, leaving, reaching = self.pipelines.edge(kind, stage, other)
        if one == two:
            return Transfer(2, self.message_s + self._inside((one,), size) if stage != other else 0.0)
        fabric, channel = self.pipelines.fabric((one, two)), (kind, stage, other)
        curve, gathered_s = self.links.of(fabric).send, 0.0
        if self.slices > 1 and fabric.name == ETHERNET:
            gathered_s, size = self._inside((two,), (self.slices - 1) / self.slices * size), size / self.slices
        count, pair = self.pipelines.count[kind], (self.pipelines.cluster(one), self.pipelines.cluster(two))
        uses = self._uses(fabric, {one: leaving}, {two: reaching}, count, {pair: count})
        fixed, longer = curve.fixed_s(size) + self.message_s + gathered_s, self._longer_s(fabric, pair)
        across = self._across(one, two)
        return Transfer(2, fixed, 8 * size, curve.rate_bps, uses, channel, across=across, latency_s=longer)

    def tied(self, kind: int, size: float) -> Transfer:
        """All-reduce of `size` bytes between the first and the last stage of one kind of pipeline."""
        one, two, leaving, reaching = self.pipelines.edge(kind, 0, self.pipelines.stages - 1)
        if one == two:
            return Transfer(2, self._inside((one,), size))
        fabric, both = self.pipelines.fabric((one, two)), {one: leaving, two: reaching}
        curve = self.links.of(fabric).ring
        messages, share = ring(2)
        pair, count = (self.pipelines.cluster(one), self.pipelines.cluster(two)), self.pipelines.count[kind]
        fixed = messages * (curve.fixed_s(size / 2) + self.message_s + self._longer_s(fabric, pair))
        if (twins := self._twins(pair)) > 1:  # runtime/reduce/tied.py: what the levels inside take more than the share
            groups = [self.pipelines.groups(stage)[0] for stage in (0, self.pipelines.stages - 1)]
            inside_s = max(self._summed_inside(own, size) for own in groups)
            size /= twins
            fixed += max(0.0, inside_s - share * 8 * size * leaving / curve.rate_bps)
        uses = self._uses(fabric, both, both, 2 * count, {pair: count, pair[::-1]: count})
        return Transfer(2, fixed, share * 8 * size, curve.rate_bps, uses, across=self._across(one, two))

    def _twins(self, pair: Pair) -> int:
        """Data-parallel ranks of a stage that share out a tied gradient; 1: none, each pair sums it all."""
        stages = [self.pipelines.groups(stage) for stage in (0, self.pipelines.stages - 1)]
        apart = pair[0] != pair[1] and all(len(own.clusters) == 1 for groups in stages for own in groups)
        return stages[0][0].ranks if apart and self.slices else 1

    def _summed_inside(self, groups: DataGroups, size: float) -> float:
        """Seconds of a reduce-scatter and an all-gather of `size` bytes in such a group, which lies in one cluster."""
        if len(groups.members) == 1:
            return self._inside(groups.members, ring(groups.ranks)[1] * size)
        own = self.pipelines.fabric(tuple(groups.members))
        here, sharers = max(groups.members.values()), max(groups.alike.values())
        return slowest_inside(own, groups.ranks, here, sharers, False).seconds(size)

    def number(self, kind: int, stage: int, other: int) -> Transfer:
        """One number from a stage to another: its latency, and no bytes to speak of."""
        return replace(self.message(kind, stage, other, 4.0), bits=0.0, uses=(), channel=None)

    def norm(self, kind: int) -> Transfer:
        """All-reduce of one number among all stages of one kind of pipeline: round a ring twice; the first message of
        all waits until its receiver is known to be there."""
        count = self.pipelines.stages
        hops = [self.number(kind, stage, (stage + 1) % count) for stage in range(count)]
        each = [hop.fixed_s + hop.latency_s for hop in hops]
        seconds = 2 * (sum(each) - min(each)) + max(hop.latency_s for hop in hops)
        return Transfer(count, seconds, across=any(hop.across for hop in hops))

    def number_summed(self, groups: DataGroups) -> Transfer:
        """All-reduce of one number in such a group over gloo's ring (gloo/allreduce.cc): from the last rank down to the
        first, and from there down to the second; the last one hears first that the one below it waits."""
        fabric, nodes = self.pipelines.fabric(tuple(groups.members)), list(groups.members)
        down = [(self.pipelines.cluster(one), self.pipelines.cluster(two))
                for one, two in zip([*nodes[:0:-1], nodes[0]], [*nodes[-2::-1], nodes[-1]])]
        ways = [self._longer_s(fabric, pair) if pair[0] != pair[1] else 0.0 for pair in down]  # the last: first to last
        longer = 2 * sum(ways) - sum(ways[-2:]) + ways[0]
        ring = self.ring(replace(groups, crossed={}), [4.0], 1.0, None)
        return replace(ring, fixed_s=ring.fixed_s + longer, bits=0.0, uses=())

    def ring(
        self, groups: DataGroups, sizes: Sequence[float], part: float, channel: Hashable, host: float = 1.0
    ) -> Transfer:
        """Buckets of `sizes` bytes, one after the other; part: 1 of an all-reduce, 1/2 of a reduce-scatter or a gather;
        host: CPU seconds of a byte, to an all-reduce's."""
        parties, total = len(groups.kinds), sum(sizes)
        messages, share = (part * value for value in ring(groups.ranks))
        if len(groups.members) == 1:
            return Transfer(parties, self._inside(groups.members, share * total), channel=channel)
        fabric, longer_s, uses = self._round(groups)
        curve = self.links.of(fabric).ring
        fixed = messages * sum(curve.fixed_s(size / groups.ranks) + self.message_s for size in sizes)
        fixed += len(sizes) * 2 * part * longer_s
        across = len(groups.clusters) > 1
        uses = tuple((nic, weight * host if nic == CORES else weight) for nic, weight in uses)
        return Transfer(parties, fixed, share * 8 * total, curve.rate_bps, uses, channel, across=across)

    def _round(self, groups: DataGroups) -> tuple[Fabric, float, Uses]:
        """Of a ring: the fabric, the seconds that its ways between clusters add once round, and what it shares."""
        key = groups.stage, groups.kinds, tuple(groups.members), tuple(groups.crossed.items())  # shards have such, too
        if key not in self._rounds:
            fabric = self.pipelines.fabric(tuple(groups.members))
            longer = [self._longer_s(fabric, pair) for pair, times in groups.crossed.items() for _ in range(times)]
            longer += [0.0] * (groups.ranks - len(longer))
            crossed = {pair: times * groups.count for pair, times in groups.crossed.items()}
            uses = self._uses(fabric, groups.alike, groups.alike, groups.count * len(groups.members), crossed)
            self._rounds[key] = fabric, sum(longer) - min(longer), uses
        return self._rounds[key]

    def two_levels(
        self, groups: DataGroups, sizes: Sequence[float], direct: bool, most: int, tag: tuple[Hashable, ...]
    ) -> tuple[dict[Hashable, Transfer], list[Hashable]]:
        """The transfers of an all-reduce of buckets of `sizes` bytes, and those that start it: chunks, each in four
        that follow each other; `tag` itself is the last of the last chunk."""
        ranks = groups.ranks_of
        way, price = self.summed(groups, direct)
        chunks = min(most, sum(chunks_of(size, price.chunk_bytes) for size in sizes))
        size = sum(sizes) / chunks
        fixed = 0.0
        inside: dict[Hashable, float] = {}
        for name, nodes in groups.clusters.items():
            if len(nodes) > 1:
                own, here = self.pipelines.fabric(nodes), max(groups.members[node] for node in nodes)
                messages, volume = inside_cluster(ranks[name], here, direct)
                weights = {node: groups.alike[node] * volume for node in nodes}
                sent = groups.count * ranks[name] * (ranks[name] - 1) / size if direct else 0.0
                for nic, weight in self._uses(own, weights, weights, groups.count * volume * len(nodes), messages=sent):
                    inside[nic] = inside.get(nic, 0.0) + weight
                link = self.links.of(own)
                curve = link.send if direct else link.ring
                fixed = max(fixed, messages * (curve.fixed_s(size / ranks[name]) + self.message_s))
        halves = [self._half(groups, half, size) for half in way.halves]
        ethernet = self.pipelines.fabric(tuple(groups.members))
        longer = way.latency_s(lambda pair: self._longer_s(ethernet, pair))
        transfers: dict[Hashable, Transfer] = {}
        starts: list[Hashable] = []
        for chunk in range(chunks):
            phases: list[Hashable] = [(*tag, chunk, phase) for phase in range(4)]
            phases[3] = tag if chunk == chunks - 1 else phases[3]
            starts.append(phases[0])
            for phase, one in enumerate(phases):
                parties, then = len(groups.kinds) if phase == 0 else 1, phases[phase + 1] if phase < 3 else None
                seconds, uses = halves[phase - 1] if phase in (1, 2) else (fixed, tuple(inside.items()))
                way_s = longer if phase in (1, 2) else 0.0
                fixed_s, latency_s = (seconds + 2 * way_s, 0.0) if price.stalls else (seconds, way_s)  # as two_levels()
                channel, bits = (tag[:3], phase), 8 * size
                transfers[one] = Transfer(parties, fixed_s, bits, inf, uses, channel, then, True, latency_s)
        return transfers, starts

    def summed(self, groups: DataGroups, direct: bool) -> tuple[Across, TwoLevels]:
        """How these groups sum in two levels: the way across, and what it takes; as plan/decide.py has it."""
        clusters = groups.clusters.values()
        inside = [self.pipelines.fabric(nodes) for nodes in clusters if len(nodes) > 1]
        here = max(groups.members.values())
        sharers = max(groups.alike.values())
        slowest = min(inside, key=lambda fabric: fabric.rate_bps)
        price = slowest_inside(slowest, max(groups.ranks_of.values()), here, sharers, direct)
        fabric, total = self.pipelines.fabric(tuple(groups.members)), self.gradient_bytes.get(groups.stage, 0.0)
        return summed_across(
            total, price, fabric, groups.ranks_of, here * sharers, direct=direct, wan=self.wan, groups=groups.count
        )

    def _half(self, groups: DataGroups, volumes: Mapping[Pair, float], size: float) -> tuple[float, Uses]:
        """Seconds and shares of a chunk's way across, there or back; without the latency of long ways."""
        leaving: dict[str, float] = {}
        reaching: dict[str, float] = {}
        for (one, two), volume in volumes.items():
            leaving[one] = leaving.get(one, 0.0) + volume
            reaching[two] = reaching.get(two, 0.0) + volume
        out, into = (
            {node: groups.alike[node] * groups.members[node] * of[name] / groups.ranks_of[name]
             for name, nodes in groups.clusters.items() if name in of for node in nodes}
            for of in (leaving, reaching)
        )
        fabric = self.pipelines.fabric(tuple(groups.members))
        share = max(volume / groups.ranks_of[one] for one, volume in leaving.items())
        fixed = self.links.of(fabric).send.fixed_s(share * size) + self.message_s
        crossed = {pair: groups.count * volume for pair, volume in volumes.items()}
        sent = groups.count * sum(max(groups.ranks_of[name] for name in pair) for pair in volumes) / size
        return fixed, self._uses(fabric, out, into, groups.count * sum(volumes.values()), crossed, sent)

    def _across(self, one: str, two: str) -> bool:
        return self.pipelines.cluster(one) != self.pipelines.cluster(two)

    def _inside(self, nodes: Iterable[str], size: float) -> float:
        """Seconds of `size` bytes between GPUs of one node; 0 where the rate of their link is not known."""
        rate = min(self.model.gpu_of(self.pipelines.cluster(node)).link_bps for node in nodes)
        return size * 8 / rate if rate else 0.0

    def _longer_s(self, fabric: Fabric, pair: Pair) -> float:
        """What the way between two clusters takes longer than `fabric` elsewhere; seconds."""
        seconds = sum(hop.latency_s for hop in self.wan.hops(*pair)) if fabric.name == ETHERNET else 0.0
        return max(0.0, seconds - fabric.latency_s)

    def _uses(
        self, fabric: Fabric, out: Mapping[str, float], into: Mapping[str, float], senders: float,
        crossed: Mapping[Pair, float] = {}, messages: float = 0.0,  # noqa: B006
    ) -> Uses:
        """out, into: how many such flows leave and reach each node; senders, messages: nodes that send at once, and
        messages of a two-level sum for each byte, as far as they share cores; crossed: flows from cluster to cluster.
        """
        found: dict[Hashable, float] = {}
        for hop, flows in hop_loads(self.wan, crossed).items() if fabric.name == ETHERNET else ():
            self.hops[hop.key], found[hop.key] = hop.rate_bps, flows
        for way, nodes in (("out", out), ("in", into)):
            for node, weight in nodes.items():
                nic = self.pipelines.nic(node, fabric, way)
                found[nic] = max(found.get(nic, 0.0), weight)
        return (*found.items(), *self.links.on_cores(fabric, senders, messages))
