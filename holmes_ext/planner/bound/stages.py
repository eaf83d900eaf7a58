"""What every stage of a placement does at least, simulated: messages, reductions, optimizer, gathers.

What stages share is counted once: a NIC carries the messages of one kind of pipeline at a time, whatever
others do, and a link between clusters the reductions of one stage. A column are pipelines that lie on the
same kinds of nodes; the slowest one's messages are taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, inf
from typing import NamedTuple

from holmes_ext.cluster.fabric import ETHERNET
from holmes_ext.plan.cost.network import FREE, Price
from holmes_ext.plan.cost.pipeline import both_ways
from holmes_ext.plan.cost.price import Prices
from holmes_ext.plan.cost.reductions import WORTH, Hierarchical, PricedReduction, hierarchical
from holmes_ext.plan.cost.stages import Rows, StageCosts
from holmes_ext.plan.engine import POSTED
from holmes_ext.plan.placement import GroupFamily, Placement
from holmes_ext.planner.simulate.execution import Execution


class Message(NamedTuple):
    """Seconds at least: of an activation to the next stage; that its sender is held up; in which it flows;
    that the sender's NIC carries it; and the fabric."""

    all_s: float
    held_s: float
    flow_s: float
    nic_s: float
    fabric: str


@dataclass(frozen=True)
class After:
    """What a stage does when its last backward begins: seconds at least, (of a block, besides)."""

    #: Its gradients' reductions, hidden under that backward where `hidden`.
    reduce: tuple[float, float]
    #: Optimizer and gathers.
    rest: tuple[float, float]
    hidden: bool
    #: Of a block's reduction, what passes the NIC that carries activations inside its clusters.
    shared: float


class Stages:
    """Of one placement; costs: of the simulation. Lists by stage."""

    def __init__(self, prices: Prices, placement: Placement, costs: StageCosts, run: Execution):
        self.prices, self.placement, self.costs, self.run = prices, placement, costs, run
        self.count, self.layers, self.m = costs.stages, costs.blocks, costs.micro_batches
        #: Seconds of a block, and of what the first and the last stage have besides (embedding, output).
        self.forward, self.extra_forward = _of(costs.forward_s)
        self.backward, self.extra_backward = _of(costs.backward_s)
        self.each = [f + b for f, b in zip(self.forward, self.backward)]
        self.extra = [f + b for f, b in zip(self.extra_forward, self.extra_backward)]
        #: Blocks that the memory holds.
        self.most = [
            self.layers
            if room == inf
            else min(self.layers, floor((room - extra) / block * (1 + 1e-12)))
            for room, block, extra in zip(costs.room_bytes, *_of(costs.memory))
        ]

    def fits(self, split: Sequence[int]) -> bool:
        return all(layers <= most for layers, most in zip(split, self.most))

    def look_at_networks(self) -> None:
        """Messages, reductions, what follows them."""
        run, count = self.run, self.count
        #: Whether as many micro-batches are in flight as hide the stage links.
        self.async_stage_links = self.costs.hidden is not None
        columns = self.placement.borders[:-1]
        by_column = [[self._message(stage, low) for stage in range(count)] for low in columns]
        self.column, messages = max(
            zip(columns, by_column), key=lambda item: sum(message.all_s for message in item[1])
        )
        self.stage_links = [message.all_s for message in messages[:-1]]
        blocks = not self.async_stage_links and run.engine.sends != POSTED
        self.gone = [message.held_s if blocks else 0.0 for message in messages[:-1]]
        self.flow = [message.flow_s for message in messages[:-1]]
        #: Micro-batches that a stage begins before its first backward, at most.
        self.ahead = [min(ahead, self.m) for ahead in self._most_ahead()]
        #: From the last stage to the first.
        self.around = messages[-1]
        self.sent = self._sent_both_ways(messages)
        #: The same where that NIC is the one that After.shared speaks of.
        self.sent_there = [
            sent * (message.fabric == self._home(stage))
            for stage, (sent, message) in enumerate(zip(self.sent, messages))
        ]
        #: What a sum of gradients carries of an all-reduce once a step.
        self.part = (1.0, 0.5 if run.engine.scatters else 1.0, 0.0, 0.0)[run.zero]
        self.after = [self._after(stage) for stage in range(count)]
        per_node = max(1, self.prices.network.processes // self.placement.stride)
        firsts = range(0, count, per_node) if per_node > 1 else ()
        #: Stages of one node, where nodes have several.
        self.together = [list(range(count)[first : first + per_node]) for first in firsts]
        #: Whether a layer takes as long on every stage.
        self.even = len({*zip(self.forward, self.backward)}) == 1
        #: Whether the gradients' norm is summed over all stages before any optimizer.
        self.barrier = run.engine.norm and count > 1
        self.tied = [0.0] * count
        if self.barrier and self.prices.job.tied_bytes:
            self.tied[0] = self.tied[-1] = self._tied_s()

    def _most_ahead(self) -> list[int]:
        """1F1B's, and as many more as hide the stage links below at the least pace (plan/cost/pipeline.py,
        in_flight)."""
        result = [self.count - stage for stage in range(self.count)]
        if self.costs.hidden is None:
            return result
        stage_links = tuple(row[1] for row in self.costs.transfer_s[: self.count - 1])
        mean_s = (sum(self.extra) + self._least_work()) / self.count
        alone = stage_links, self.costs.hidden
        shared = both_ways(*alone, self.costs.nics, mean_s)
        paces = [(stage_links_s, max(mean_s, *sent)) for stage_links_s, sent in (alone, shared)]
        for stage in reversed(range(self.count - 1)):
            more = max(
                2 * stage_links_s[stage] / pace if pace else 0.0 for stage_links_s, pace in paces
            )
            result[stage] = result[stage + 1] + 1 + ceil(more)
        return result

    def _least_work(self) -> float:
        """Of all blocks of one micro-batch: each stage one, the others where they are fastest and fit."""
        remaining, total = self.layers - self.count, sum(self.each)
        for stage in sorted(range(self.count), key=self.each.__getitem__):
            taken = min(remaining, self.most[stage] - 1)
            total, remaining = total + taken * self.each[stage], remaining - taken
            if not remaining:
                break
        return total

    # ------------------------------------------------------------------- messages

    def _message(self, stage: int, low: int) -> Message:
        """Of the pipelines at `low`, which send at the same time, the others being still."""
        following = (stage + 1) % self.count
        if following == stage:
            return Message(0.0, 0.0, 0.0, 0.0, "")
        parts, tied = self.placement.parts, self.placement.tied
        key = parts[stage // tied], parts[following // tied], stage % tied, following - stage, low
        return self.prices.remember("message", key, lambda: self._message_of(stage, following, low))

    def _message_of(self, stage: int, following: int, low: int) -> Message:
        prices, network = self.prices, self.prices.network
        fold, ends = prices.fold(self.placement, stage, following)
        stage_link = fold.stage_link(fold.kind_at(low), *ends)
        link, size = prices.link_bps(stage_link.kinds), prices.job.block.activation_bytes
        load = network.message(stage_link, link)
        if load.fabric is None:
            seconds = load.price.seconds(size)
            return Message(seconds, seconds, 0.0, 0.0, "")
        if load.fabric.name == ETHERNET:
            size *= prices.job.compressed_share(prices.rules.compression) / prices.slices(
                self.placement
            )
        flow_s, rate = size * load.price.byte_s, load.fabric.rate_bps
        nic_s = 8 * size * max(flows for _, flows in load.nics) / rate
        held_s = flow_s + load.fabric.latency_s
        return Message(load.price.seconds(size), held_s, flow_s, nic_s, load.fabric.name)

    def _sent_both_ways(self, messages: Sequence[Message]) -> list[float]:
        """In which a stage's NIC sends an activation down and a gradient up; 0 where these leave through
        others, or networks were measured (a NIC may carry more then than one message)."""
        result = [0.0] * self.count
        if (
            self.prices.network.links.measured
            or self.placement.stride % self.prices.network.processes
        ):
            return result
        for stage in range(1, self.count - 1):
            up, down = messages[stage - 1], messages[stage]
            result[stage] = up.nic_s + down.nic_s if up.fabric == down.fabric else 0.0
        return result

    # ------------------------------------------------------------------- reductions

    def _after(self, stage: int) -> After:
        tied, run = self.placement.tied, self.run
        content = self.placement.parts[stage // tied], stage % tied
        ends = stage == 0, stage == self.count - 1
        key = content, self.column, ends, run.hierarchical, run.reductions[stage : stage + 1]
        return self.prices.remember("after", key, lambda: self._after_of(stage))

    def _after_of(self, stage: int) -> After:
        prices, run = self.prices, self.run
        job, reduction, family = prices.job, *self.reduction(stage)
        ring = prices.network.ring(family, 0, prices.link_bps(family.kinds)).price
        half = ring.scaled(0.5)
        gather = Price(job.weights * half.byte_s, half.latency_s) if run.zero in (1, 2) else FREE
        if run.zero == 1 and run.gather_overlap:
            gather = FREE
        reduce = reduction.once
        if isinstance(reduction, Hierarchical):
            slower = max(reduction.inside.byte_s, reduction.across.byte_s)
            worth = (
                WORTH if prices.network.wan else 1.0
            )  # another route may suit what the stage has in fact
            reduce = Price(worth * slower, reduction.inside.latency_s + reduction.across.latency_s)
        elif run.zero:
            reduce = (FREE, half if run.engine.scatters else ring, FREE, FREE)[run.zero]
        shards = family.ranks if run.zero else 1
        seconds = [
            run.parameter_s * layer.parameters / shards + gather.byte_s * size
            for layer, size in zip(job.layers, job.reduced_bytes)
        ]
        bytes_s = [reduce.byte_s * size for size in job.reduced_bytes]
        ends = float(stage == 0), float(stage == self.count - 1)

        def split(by_kind: Sequence[float], fixed_s: float) -> tuple[float, float]:
            return by_kind[1], ends[0] * by_kind[0] + ends[1] * by_kind[2] + fixed_s

        shared = self._shared(reduction, self._home(stage)) * job.reduced_bytes[1] * self.part
        once, rest = split(bytes_s, reduce.latency_s), split(seconds, gather.latency_s)
        return After(once, rest, run.buckets_on(stage), shared)

    def reduction(self, stage: int) -> tuple[PricedReduction, GroupFamily]:
        """Of the family that the column is in, as it is simulated."""
        prices, run = self.prices, self.run
        fold, (place,) = prices.fold(self.placement, stage)
        kind = fold.kind_at(self.column)
        family = next(
            candidate for candidate in fold.families(place) if kind in candidate.pipelines
        )
        if family.ranks == 1:
            return PricedReduction(), family
        link = prices.link_bps(family.kinds)
        if run.is_hierarchical(stage):
            size = prices.job.total_bytes / self.count
            levels = hierarchical(prices.network, family, size, run.direct, 0, run.compress, link)
            if levels is not None:
                return levels, family
        return PricedReduction(prices.network.ring(family, 0, link)), family

    def _home(self, stage: int) -> str:
        """The fabric that carries activations inside the cluster of a stage."""
        fold, (place,) = self.prices.fold(self.placement, stage)
        return self.prices.network.fabric([fold.kind_on(fold.kind_at(self.column), place)]).name

    @staticmethod
    def _shared(reduction: PricedReduction, home: str) -> float:
        """Seconds a byte of the reduction on a NIC of this fabric."""
        twice, loads = (
            (2, reduction.insides)
            if isinstance(reduction, Hierarchical)
            else (1, (reduction.load,))
        )
        byte_s = [
            8 * load.volume * max(flows for _, flows in load.nics) / load.fabric.rate_bps
            for load in loads
            if load.fabric is not None and load.fabric.name == home
        ]
        return twice * min(byte_s, default=0.0)

    def _tied_s(self) -> float:
        """All-reduce of the tied gradient at least; 0 where first and last stage may share a node."""
        prices, size, last = self.prices, self.prices.job.tied_bytes, self.count - 1
        if last * self.placement.stride < prices.network.processes:
            return 0.0
        fold, _ = prices.fold(self.placement, 0, last)
        pairs, hierarchical = prices.tied_of(fold, fold.kind_at(self.column), alone=True)
        seconds = [pairs.seconds(size)]
        if hierarchical is not None:
            seconds.append(hierarchical.seconds(size) * (WORTH if prices.network.wan else 1.0))
        return min(seconds)


def _of(rows: Rows) -> tuple[list[float], list[float]]:
    """By stage: of a block, and of what the stage has besides."""
    extra = [0.0] * len(rows)
    extra[0] += rows[0][0]
    extra[-1] += rows[-1][2]
    return [row[1] for row in rows], extra
