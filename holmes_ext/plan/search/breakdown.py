"""Where the time of a step goes: computing, bubble, and what communication adds inside clusters and across them.

Every part is what the step gets shorter by when it is taken out, one after the other: reductions across, reductions inside, sends across, sends
inside; then what is left but the computing of the slowest stage is the bubble. Collectives of tensor, context and expert groups count by themselves. The
parts add up to the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from holmes_ext.cluster.site import ETHERNET, Fabric, Site
from holmes_ext.plan.cost.pricing import Pricing, StagePrice
from holmes_ext.plan.cost.step import stock_fabric
from holmes_ext.plan.search.arrangement import Ground, launcher
from holmes_ext.plan.search.bounds import Stages
from holmes_ext.plan.search.refine import uniform_split
from holmes_ext.plan.search.result import Candidate, Outcome
from holmes_ext.plan.search.space import Shape

PARTS = {
    "compute": "computing of the slowest stage",
    "collectives": "tensor, context and expert groups, shards of ZeRO 2 and 3",
    "bubble": "waiting for other stages",
    "send_inside": "sends between stages inside clusters",
    "send_across": "sends between stages across clusters",
    "reduce_inside": "exposed reduction of groups in one cluster",
    "reduce_across": "exposed reduction across, and tied embeddings",
}


def breakdown(stages: Stages, split: Sequence[int]) -> dict[str, float]:
    """Seconds by name of PARTS; they add up to stages.estimate(split). Leaves `stages` as it was."""
    names = ("edges", "prices", "reduce", "extra_reduce", "tied_s", "forward", "backward", "extra_forward", "extra_backward")
    kept = {name: getattr(stages, name) for name in names}
    clusters = [{index for index, _ in content} for content in stages.arrangement.contents]
    crossing = [len(one | other) > 1 for one, other in zip(clusters, clusters[1:])]
    wide = [len(own) > 1 for own in clusters]
    steps = [stages.estimate(split)]
    try:
        _quiet(stages, wide)
        if len(clusters) > 1 and clusters[0] != clusters[-1]:
            stages.tied_s = 0.0
        steps.append(stages.estimate(split))
        _quiet(stages, [True] * len(wide))
        stages.tied_s = 0.0
        steps.append(stages.estimate(split))
        stages.edges = [0.0 if across else edge for edge, across in zip(stages.edges, crossing)]
        steps.append(stages.estimate(split))
        stages.edges = [0.0] * len(stages.edges)
        steps.append(stages.estimate(split))
        busy = _slowest(stages, split)
        compute = _slowest(stages, split) if _only_compute(stages, kept["prices"]) else busy
    finally:
        for name, value in kept.items():
            setattr(stages, name, value)
    whole, inner, unreduced, local, free = steps
    return {
        "compute": compute,
        "collectives": busy - compute,
        "bubble": free - busy,
        "send_inside": local - free,
        "send_across": unreduced - local,
        "reduce_inside": inner - unreduced,
        "reduce_across": whole - inner,
    }


def _quiet(stages: Stages, which: Sequence[bool]) -> None:
    """Take out these stages' reductions."""
    stages.prices = [replace(price, byte_s=0.0, latency_s=0.0) if quiet else price for price, quiet in zip(stages.prices, which)]
    stages.reduce = [0.0 if quiet else value for value, quiet in zip(stages.reduce, which)]
    stages.extra_reduce = [0.0 if quiet else value for value, quiet in zip(stages.extra_reduce, which)]


def _only_compute(stages: Stages, prices: Sequence[StagePrice]) -> bool:
    """Take out the communication inside forwards and backwards; whether there was any."""
    pricing, last = stages.pricing, stages.count - 1
    if not any(price.collective_s or price.gather_byte_s or price.scatter_byte_s for price in prices):
        return False
    stages.forward = [pricing.block.forward_flops / price.flops for price in prices]
    stages.backward = [pricing.block.backward_flops / price.flops for price in prices]
    stages.extra_forward, stages.extra_backward = ([0.0] * stages.count for _ in range(2))
    for stage, layer in ((0, pricing.embedding), (last, pricing.output)):
        stages.extra_forward[stage] += layer.forward_flops / prices[stage].flops
        stages.extra_backward[stage] += layer.backward_flops / prices[stage].flops
    return True


def _slowest(stages: Stages, split: Sequence[int]) -> float:
    forward, backward = stages.work(split)
    return stages.micro_batches * max(f + b for f, b in zip(forward, backward))


def stock(outcome: Outcome, shape: Shape) -> tuple[Stages, tuple[int, ...]]:
    """The same shape without holmes: the launcher's order, all traffic on the network that all nodes share, layers even, nothing overlapped."""
    ground = Ground.of(outcome.ground.site, outcome.model, stock_fabric(outcome.ground.site), outcome.ground.links)
    stages = Stages(Pricing(ground, outcome.model, shape, ("flat",)), launcher(ground, shape.pipeline), False)
    return stages, uniform_split(stages)


def best_stock(outcome: Outcome) -> tuple[Shape, float]:
    """The sizes with which stock is fastest, of all shapes that were worked out, and its step."""
    found = {}
    for one in outcome.candidates:
        if one.shape not in found:
            stages, split = stock(outcome, one.shape)
            found[one.shape] = stages.estimate(split) if stages.fits(split) else float("inf")
    shape = min(found, key=found.__getitem__)
    return shape, found[shape]


def on_ethernet(outcome: Outcome, candidate: Candidate, rate_bps: float) -> tuple[float, float]:
    """Seconds of a candidate's step and of stock's with its shape, if Ethernet had this rate on every node."""
    factor = rate_bps / outcome.ground.site.fabric_by_name[ETHERNET].rate_bps
    site = with_ethernet(outcome.ground.site, rate_bps)
    changed = replace(outcome, ground=Ground.of(site, outcome.model, links=outcome.ground.links.scaled(ETHERNET, factor)))
    planned = changed.stages(candidate).estimate(candidate.split)
    stages, split = stock(changed, candidate.shape)
    return planned, stages.estimate(split)


def with_ethernet(site: Site, rate_bps: float) -> Site:
    """`site` with another Ethernet."""

    def changed(fabric: Fabric) -> Fabric:
        return replace(fabric, rate_bps=round(rate_bps)) if fabric.name == ETHERNET else fabric

    return replace(site, fabrics=tuple(map(changed, site.fabrics)))
