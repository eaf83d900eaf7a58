"""Where the time of a step goes: computing, bubble, and what communication adds inside clusters and across them.

Every part is what the step gets shorter by when it is taken out, one after the other: reductions across, reductions inside, sends across, sends
inside; then what is left but the computing of the slowest stage is the bubble. Collectives of tensor, context and expert groups count by themselves. The
parts add up to the step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Sequence

from holmes_ext.cluster.site import Fabric, Site
from holmes_ext.plan.arrangement import Ground, launcher
from holmes_ext.plan.bounds import Stages
from holmes_ext.plan.cost import stock_fabric
from holmes_ext.plan.finalists import uniform_split
from holmes_ext.plan.outcome import Candidate, Outcome
from holmes_ext.plan.pricing import Pricing
from holmes_ext.plan.space import Shape

PARTS = {
    "compute": "computing of the slowest stage",
    "collectives": "tensor, context and expert groups",
    "bubble": "waiting for other stages",
    "send_inside": "sends between stages inside clusters",
    "send_across": "sends between stages across clusters",
    "reduce_inside": "exposed reduction of groups in one cluster",
    "reduce_across": "exposed reduction across, and tied embeddings",
}


def breakdown(stages: Stages, split: Sequence[int]) -> dict[str, float]:
    """Seconds by name of PARTS; they add up to stages.estimate(split). Leaves `stages` as it was."""
    kept = stages.edges, stages.prices, stages.reduce, stages.extra_reduce, stages.tied_s, stages.forward, stages.backward
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
        own = [price.collective_s + price.forward_extra_s + price.backward_extra_s for price in stages.prices]
        stages.forward = [f - price.collective_s / 2 - price.forward_extra_s for f, price in zip(stages.forward, stages.prices)]
        stages.backward = [b - price.collective_s / 2 - price.backward_extra_s for b, price in zip(stages.backward, stages.prices)]
        compute = _slowest(stages, split) if any(own) else busy
    finally:
        stages.edges, stages.prices, stages.reduce, stages.extra_reduce, stages.tied_s, stages.forward, stages.backward = kept
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


def _slowest(stages: Stages, split: Sequence[int]) -> float:
    forward, backward = stages.work(split)
    return stages.micro_batches * max(f + b for f, b in zip(forward, backward))


def stock(outcome: Outcome, shape: Shape) -> tuple[Stages, tuple[int, ...]]:
    """The same shape without holmes: the launcher's order, all traffic on the network that all nodes share, layers even, nothing overlapped."""
    ground = Ground.of(outcome.ground.site, outcome.model, stock_fabric(outcome.ground.site))
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
    site = with_ethernet(outcome.ground.site, rate_bps)
    changed = replace(outcome, ground=Ground.of(site, outcome.model))
    planned = changed.stages(candidate).estimate(candidate.split)
    stages, split = stock(changed, candidate.shape)
    return planned, stages.estimate(split)


def with_ethernet(site: Site, rate_bps: float) -> Site:
    """`site` with another Ethernet."""

    def changed(fabric: Fabric) -> Fabric:
        return replace(fabric, rate_bps=round(rate_bps)) if fabric.name == "ethernet" else fabric

    return replace(site, fabrics=tuple(map(changed, site.fabrics)))
