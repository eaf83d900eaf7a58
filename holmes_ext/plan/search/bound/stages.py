"""What every stage of a shape under an arrangement does at least, simulated: messages, reductions, optimizer, gathers.

What stages share is counted once: a NIC carries the messages of one kind of pipeline at a time, whatever others do, and
a link between clusters the reductions of one stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holmes_ext.plan.cost.network_old import FREE, WORTH, Price
from holmes_ext.plan.search.arrangement import Arrangement
from holmes_ext.plan.search.bound.edges import cluster_at, columns, least_edges, least_tied_s, sent_both_ways
from holmes_ext.plan.search.bound.formula import Bounds
from holmes_ext.plan.search.pricing import Pricing
from holmes_ext.plan.simulate.execution import Execution
from holmes_ext.plan.sizes import PIPELINES_FIRST


@dataclass(frozen=True)
class After:
    """What a stage does when its last backward begins: seconds at least, of a block and besides. reduce: its gradients'
    reductions, hidden under that backward where `hidden`; rest: optimizer and gathers. shared: of the reduction of a
    block, what passes the NIC that carries activations inside its clusters."""

    reduce: tuple[float, float]
    rest: tuple[float, float]
    hidden: bool
    shared: float


class Stages:
    """Of one shape under an arrangement. run: how it is simulated; costs of `bounds` are those of the simulation.
    ahead: micro-batches that a stage begins before its first backward, at most. Seconds of the edges of the slowest
    column, by the stage above: edges, all; gone, that hold up who sends; flow, of a message behind others; around:
    those of the last stage to the first. sent: a NIC's for an activation down and a gradient up. together: stages of
    one node, where nodes have several. barrier: gradients' norm is summed over all stages before any optimizer
    (megatron); tied: before it, after its reductions, a stage sums a tied embedding's gradient."""

    def __init__(self, pricing: Pricing, arrangement: Arrangement, bounds: Bounds, run: Execution):
        self.pricing, self.arrangement, self.bounds, self.run = pricing, arrangement, bounds, run
        self.count, self.layers, self.m = bounds.count, bounds.costs.blocks, bounds.micro_batches
        held = run.in_flight or [self.count - stage for stage in range(self.count)]
        self.ahead = [min(one, self.m) for one in held]
        inside = [*(edge.seconds(pricing.block.activation_bytes) for edge in pricing.edges(arrangement)), 0.0]
        every = {column: least_edges(pricing, arrangement, column, inside) for column in columns(arrangement)}
        column, found = max(every.items(), key=lambda item: sum(seconds for seconds, _, _ in item[1]))
        self.edges, self.gone, self.flow = ([one[part] for one in found[:-1]] for part in range(3))
        self.around, self.sent = found[-1], sent_both_ways(pricing, arrangement, column)
        if run.in_flight:
            self.gone = [0.0] * len(self.gone)
        afters = pricing.known.setdefault(("after", run.two_level, arrangement.order), {})
        keys = [(content, cluster_at(content, column[0]), stage == 0, stage == self.count - 1)
                for stage, content in enumerate(arrangement.contents)]
        for stage, key in enumerate(keys):
            if key not in afters:
                afters[key] = self._after(stage, key[1])
        self.after: list[After] = [afters[key] for key in keys]
        step = pricing._step(arrangement.order)
        here = max(1, pricing.processes // step)  # stages of a node
        stages = range(self.count)
        self.together = [list(stages[low : low + here]) for low in range(0, self.count, here)] if here > 1 else []
        self.even = len({*zip(bounds.forward, bounds.backward)}) == 1
        self.barrier = run.engine == "megatron" and self.count > 1
        self.tied = [0.0] * self.count
        if self.barrier:
            self.tied[0] = self.tied[-1] = least_tied_s(pricing, arrangement, column)

    def _after(self, stage: int, cluster: int) -> After:
        pricing, content, order = self.pricing, self.arrangement.contents[stage], self.arrangement.order
        portion, processes = pricing.portion, pricing.processes
        way, whole = pricing._reduction(content, order, 1)
        own = min(processes, pricing.stage_ranks)  # ranks of this stage on a node
        if order == PIPELINES_FIRST:
            step = pricing._step(order)
            own = min(processes, step * max(1, processes // (step * pricing.shape.pipeline)))
        factor = (WORTH if pricing.ground.wan else 1.0) * min(1.0, own / processes)
        if self.run.two_level != "off" and way == "flat" and len(content) > 1:
            whole = FREE  # a simulation sums it in two levels: not priced here
        shared = factor * pricing.inside_s(content, order, way, cluster) * (0.5 if self.run.zero == 1 else 1.0)
        whole = Price(factor * whole.byte_s, whole.latency_s)
        zero, weights = self.run.zero, pricing.model.activation_width / pricing.model.gradient_width
        half = whole.scaled(0.5)
        reduce = (whole, half, FREE, FREE)[zero]
        gather = Price(weights * half.byte_s, half.latency_s) if zero in (1, 2) else FREE
        if zero == 1 and self.run.gather_overlap:
            gather = FREE
        share = portion.shards if zero else 1
        seconds = [self.run.parameter_s * layer.parameters / share + gather.byte_s * size
                   for layer, size in zip(portion.layers, portion.reduced_bytes)]
        bytes_s = [reduce.byte_s * size for size in portion.reduced_bytes]
        ends = (stage == 0) * 1, (stage == self.count - 1) * 1

        def split(each: Sequence[float], fixed_s: float) -> tuple[float, float]:
            return each[1], ends[0] * each[0] + ends[1] * each[2] + fixed_s

        hidden = self.run.buckets_on(stage)
        shared *= portion.reduced_bytes[1] * (self.run.zero < 2)
        return After(split(bytes_s, reduce.latency_s), split(seconds, gather.latency_s), hidden, shared)
