"""Where the time of a candidate's step goes, what the same job takes without holmes, and what it would with another
Ethernet.
"""

from __future__ import annotations

from dataclasses import replace

from holmes_ext.cluster.site import ETHERNET, Fabric, Site
from holmes_ext.plan.cost.stages import estimate
from holmes_ext.plan.search.arrangement import Ground
from holmes_ext.plan.search.ranking import simulated
from holmes_ext.plan.search.result import Candidate, Outcome

CAUSES = {
    "compute": "computing",
    "collectives": "tensor, context and expert groups",
    "optimizer": "optimizer",
    "bubble": "waiting for other stages",
    "send_inside": "sends between stages inside clusters",
    "send_across": "sends between stages across clusters",
    "reduce_inside": "exposed reductions and gathers in one cluster",
    "reduce_across": "the same across clusters",
}


def causes(outcome: Outcome, candidate: Candidate) -> dict[str, float]:
    """Seconds of CAUSES, the mean over all ranks; they add up to the candidate's step: to the simulated one where there
    is one."""
    pricing, order = outcome.pricing(candidate.shape), candidate.arrangement.order
    prices = [pricing.stage(content, order) for content in candidate.arrangement.contents]
    stages, steps = len(prices), candidate.shape.micro_batches
    collectives = steps * sum(n * price.collective_s for n, price in zip(candidate.split, prices)) / stages
    found = dict.fromkeys(CAUSES, 0.0)
    if candidate.simulated_s:
        found |= simulated(outcome, candidate).causes
    else:
        one = estimate(outcome.costs(candidate), candidate.split)
        found |= {"compute": sum(one.compute_s) / stages, "bubble": sum(one.idle_s) / stages}
        for content, exposed in zip(candidate.arrangement.contents, one.exposed_s):
            found["reduce_across" if len(content) > 1 else "reduce_inside"] += exposed / stages
    return found | {"collectives": collectives, "compute": found["compute"] - collectives}


def stock_like(outcome: Outcome, candidate: Candidate) -> tuple[Outcome, Candidate]:
    """Stock with the sizes of `candidate`, simulated if that is."""
    stock, one = outcome.stock(candidate.shape)
    return stock, replace(one, simulated_s=simulated(stock, one).step_s) if candidate.simulated_s else one


def best_stock(outcome: Outcome) -> Candidate | None:
    """Stock with the sizes that suit it best of all that were worked out and fit (in closed form), simulated if the
    best candidate is."""
    every = [outcome.stock(shape)[1] for shape in dict.fromkeys(one.shape for one in outcome.candidates)]
    fitting = [one for one in every if all(used <= limit for used, limit in zip(one.memory_bytes, one.limit_bytes))]
    least = min(fitting, key=lambda one: one.formula_s, default=None)
    return least and stock_like(outcome, replace(least, simulated_s=outcome.best.simulated_s))[1]


def on_ethernet(outcome: Outcome, candidate: Candidate, rate_bps: float) -> tuple[float, float]:
    """Seconds, in closed form, of a candidate's step and of stock's with its shape, if Ethernet had this rate on every
    node."""
    factor = rate_bps / outcome.ground.site.fabric_by_name[ETHERNET].rate_bps
    site = with_ethernet(outcome.ground.site, rate_bps)
    ground = Ground.of(site, outcome.model, links=outcome.ground.links.scaled(ETHERNET, factor))
    changed = replace(outcome, ground=ground)
    return estimate(changed.costs(candidate), candidate.split).step_s, changed.stock(candidate.shape)[1].formula_s


def with_ethernet(site: Site, rate_bps: float) -> Site:
    """`site` with another Ethernet."""

    def changed(fabric: Fabric) -> Fabric:
        return replace(fabric, rate_bps=round(rate_bps)) if fabric.name == ETHERNET else fabric

    return replace(site, fabrics=tuple(map(changed, site.fabrics)))
