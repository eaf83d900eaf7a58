"""What a message or a collective puts on the networks: plan/simulate/step.py's transfers, with their seconds and bits,
and the NICs that they share. The one place that knows the way from node to node.

A ring of n ranks passes every node once: 2 (n - 1) / n of the bytes through each NIC, both ways at once, in 2 (n - 1)
messages (half of both for a reduce-scatter or a gather); among GPUs of one node over their own link, where its rate is
known. Two levels: runtime/reduce/two_level.py's four steps, chunk after chunk.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from math import inf

from holmes_ext.cluster.site import Fabric
from holmes_ext.plan.cost.links import Links
from holmes_ext.plan.cost.model import Model
from holmes_ext.plan.cost.network import CHUNK_SHARE_BYTES, across_clusters, inside_cluster, ring
from holmes_ext.plan.simulate.events import Transfer
from holmes_ext.plan.simulate.pipelines import DataGroups, Pipelines

Uses = tuple[tuple[Hashable, float], ...]


class Flows:
    """message_s: seconds that software adds to each message."""

    def __init__(self, pipelines: Pipelines, links: Links, model: Model, message_s: float):
        self.pipelines, self.links, self.model, self.message_s = pipelines, links, model, message_s

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
        curve = self.links.of(fabric).send
        uses = self._uses(fabric, {one: leaving}, {two: reaching}, self.pipelines.count[kind])
        fixed = curve.fixed_s(size) + self.message_s
        return Transfer(2, fixed, 8 * size, curve.rate_bps, uses, channel, across=self._across(one, two))

    def tied(self, kind: int, size: float) -> Transfer:
        """All-reduce of `size` bytes between the first and the last stage of one kind of pipeline."""
        one, two, leaving, reaching = self.pipelines.edge(kind, 0, self.pipelines.stages - 1)
        if one == two:
            return Transfer(2, self._inside((one,), size))
        fabric, both = self.pipelines.fabric((one, two)), {one: leaving, two: reaching}
        curve = self.links.of(fabric).ring
        messages, share = ring(2)
        fixed = messages * (curve.fixed_s(size / 2) + self.message_s)
        uses = self._uses(fabric, both, both, 2 * self.pipelines.count[kind])
        return Transfer(2, fixed, share * 8 * size, curve.rate_bps, uses, across=self._across(one, two))

    def ring(self, groups: DataGroups, sizes: Sequence[float], part: float, channel: Hashable) -> Transfer:
        """Buckets of `sizes` bytes, one after the other; part: 1 of an all-reduce, 1/2 of a reduce-scatter or a gather.
        """
        parties, total = len(groups.kinds), sum(sizes)
        messages, share = (part * value for value in ring(groups.ranks))
        if len(groups.members) == 1:
            return Transfer(parties, self._inside(groups.members, share * total), channel=channel)
        fabric = self.pipelines.fabric(tuple(groups.members))
        curve = self.links.of(fabric).ring
        fixed = messages * sum(curve.fixed_s(size / groups.ranks) + self.message_s for size in sizes)
        uses = self._uses(fabric, groups.alike, groups.alike, groups.count * len(groups.members))
        across = len(groups.clusters) > 1
        return Transfer(parties, fixed, share * 8 * total, curve.rate_bps, uses, channel, across=across)

    def two_levels(
        self, groups: DataGroups, sizes: Sequence[float], direct: bool, most: int, tag: tuple[Hashable, ...]
    ) -> tuple[dict[Hashable, Transfer], list[Hashable]]:
        """The transfers of an all-reduce of buckets of `sizes` bytes, and those that start it: chunks, each in four
        that follow each other; `tag` itself is the last of the last chunk."""
        ranks = {name: sum(groups.members[node] for node in nodes) for name, nodes in groups.clusters.items()}
        chunk_bytes = CHUNK_SHARE_BYTES * min(ranks.values())
        chunks = min(most, sum(max(1, int(size // chunk_bytes)) for size in sizes))
        size, share = sum(sizes) / chunks, across_clusters(list(ranks.values()))
        ethernet = self.pipelines.fabric(tuple(groups.members))
        crossing = {
            node: groups.alike[node] * groups.members[node] * share * min(ranks.values()) / ranks[name]
            for name, nodes in groups.clusters.items()
            for node in nodes
        }
        fixed = 0.0
        inside: dict[Hashable, float] = {}
        for name, nodes in groups.clusters.items():
            if len(nodes) > 1:
                own, here = self.pipelines.fabric(nodes), max(groups.members[node] for node in nodes)
                messages, volume = inside_cluster(ranks[name], here, direct)
                weights = {node: groups.alike[node] * volume for node in nodes}
                for nic, weight in self._uses(own, weights, weights, groups.count * volume * len(nodes)):
                    inside[nic] = inside.get(nic, 0.0) + weight
                link = self.links.of(own)
                curve = link.send if direct else link.ring
                fixed = max(fixed, messages * (curve.fixed_s(size / ranks[name]) + self.message_s))
        piece = self.links.of(ethernet).send.fixed_s(share * size) + self.message_s
        across = self._uses(ethernet, crossing, crossing, groups.count * (len(ranks) - 1))
        transfers: dict[Hashable, Transfer] = {}
        starts: list[Hashable] = []
        for chunk in range(chunks):
            phases: list[Hashable] = [(*tag, chunk, phase) for phase in range(4)]
            phases[3] = tag if chunk == chunks - 1 else phases[3]
            starts.append(phases[0])
            for phase, one in enumerate(phases):
                parties, then = len(groups.kinds) if phase == 0 else 1, phases[phase + 1] if phase < 3 else None
                seconds, uses = (piece, across) if phase in (1, 2) else (fixed, tuple(inside.items()))
                channel = (tag[:3], phase)
                transfers[one] = Transfer(parties, seconds, 8 * size, inf, uses, channel, then, across=True)
        return transfers, starts

    def _across(self, one: str, two: str) -> bool:
        return self.pipelines.cluster(one) != self.pipelines.cluster(two)

    def _inside(self, nodes: Iterable[str], size: float) -> float:
        """Seconds of `size` bytes between GPUs of one node; 0 where the rate of their link is not known."""
        rate = min(self.model.gpu_of(self.pipelines.cluster(node)).link_bps for node in nodes)
        return size * 8 / rate if rate else 0.0

    def _uses(self, fabric: Fabric, out: Mapping[str, float], into: Mapping[str, float], senders: float) -> Uses:
        """out, into: how many such flows leave and reach each node; senders: nodes that send at once, as far as they
        share cores."""
        found: dict[Hashable, float] = {}
        for way, nodes in (("out", out), ("in", into)):
            for node, weight in nodes.items():
                nic = self.pipelines.nic(node, fabric, way)
                found[nic] = max(found.get(nic, 0.0), weight)
        return (*found.items(), *self.links.on_cores(fabric, senders))
