"""Where the time of a candidate's step goes, what the same job takes without holmes, and what it would with another
network between the clusters.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from holmes_ext.cluster.site import ETHERNET, Fabric, Site
from holmes_ext.cluster.wan import Between
from holmes_ext.plan.cost.links import Links
from holmes_ext.plan.cost.stages import estimate
from holmes_ext.plan.search.arrangement import Ground
from holmes_ext.plan.search.ranking import job_of, simulated, timed
from holmes_ext.plan.search.result import Candidate, Outcome
from holmes_ext.plan.simulate.fold import folded_s

#: Of Ethernet's rate, to see what it decides.
LESS = 0.9
#: Shapes for which stock is simulated to find those that suit it best.
STOCKS = 3
CAUSES = {
    "compute": "computing",
    "collectives": "tensor, context and expert groups",
    "optimizer": "optimizer",
    "bubble": "waiting for other stages",
    "send_inside": "sends between stages inside clusters",
    "send_across": "sends between stages across clusters",
    "reduce_inside": "exposed reductions and gathers in one cluster",
    "reduce_across": "exposed reductions and gathers across clusters",
}


def causes(outcome: Outcome, candidate: Candidate) -> dict[str, float]:
    """Seconds of CAUSES, the mean over all ranks; they add up to the candidate's step: to the simulated one where there
    is one."""
    prices = outcome.pricing(candidate.shape).stages(candidate.arrangement)
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
    """Stock with the sizes of `candidate`, simulated if that is; of the user's layout with its layers and order."""
    own = candidate.arrangement.given and candidate.split, candidate.arrangement.order
    stock, one = outcome.stock(candidate.shape, *(own if candidate.arrangement.given else ()))
    return stock, replace(one, simulated_s=simulated(stock, one).step_s) if candidate.simulated_s else one


def best_stock(outcome: Outcome) -> Candidate | None:
    """Stock with the sizes that suit it best of all that were worked out and fit; if the best candidate is simulated,
    the least of those few that are the first in closed form."""
    asked = [*outcome.candidates, *([outcome.yours] if outcome.yours else [])]
    every = [outcome.stock(shape)[1] for shape in dict.fromkeys(one.shape for one in asked)]
    fitting = [one for one in every if all(used <= limit for used, limit in zip(one.memory_bytes, one.limit_bytes))]
    ranked = sorted(fitting, key=lambda one: one.formula_s)
    if not outcome.best.simulated_s:
        return next(iter(ranked), None)
    plain, chunked = ([one for one in ranked if (one.shape.virtual > 1) == wanted] for wanted in (False, True))
    own = [one for one in ranked if outcome.yours and one.shape == outcome.yours.shape]
    first = dict.fromkeys([*plain[:STOCKS], *chunked[:STOCKS], *own])  # the closed form flatters chunks
    return min((timed(outcome.stock(one.shape)[0], one) for one in first), key=lambda one: one.step_s, default=None)


def with_ethernet(outcome: Outcome, candidate: Candidate, factor: float) -> tuple[float, float]:
    """with_site, if the network between clusters had `factor` times its rates: uplinks and links; where it is flat,
    Ethernet on every node."""
    site, links = outcome.ground.links.site(outcome.ground.site), outcome.ground.links
    if site.wan:
        return with_site(outcome, candidate, replace(site, wan=site.wan.scaled(factor)))
    return with_site(
        outcome, candidate, with_fabric(outcome.ground.site, ETHERNET, factor), links.scaled(ETHERNET, factor))


def ethernet_s(outcome: Outcome, candidate: Candidate) -> float:
    """What of a candidate's step Ethernet's rate decides: by how much longer it takes with LESS of that rate; simulated
    if the candidate is."""
    site, links = with_fabric(outcome.ground.site, ETHERNET, LESS), outcome.ground.links.scaled(ETHERNET, LESS)
    if candidate.simulated_s:
        slower = replace(outcome, ground=Ground.of(site, outcome.model, links=links))
        longer = folded_s(job_of(slower, candidate)) - candidate.simulated_s
    else:
        longer = with_site(outcome, candidate, site, links)[0] - candidate.formula_s
    return min(candidate.step_s, max(0.0, longer / (1 / LESS - 1)))


def with_fabric(site: Site, name: str, rate: float = 1.0, latency: float = 1.0) -> Site:
    """`site` with so many times the rate and latency of one fabric."""

    def changed(fabric: Fabric) -> Fabric:
        if fabric.name != name:
            return fabric
        return replace(fabric, rate_bps=round(fabric.rate_bps * rate), latency_s=fabric.latency_s * latency)

    return replace(site, fabrics=tuple(map(changed, site.fabrics)))


def with_latency(site: Site, seconds: float) -> Site:
    """`site` with this latency, one way, between any two clusters."""
    pairs = list(combinations(site.clusters, 2))
    rates = {pair: link.rate_bps for pair in pairs if (link := site.wan.pair_of.get(pair))}
    between = tuple(Between(pair, rates.get(pair, 0), seconds) for pair in pairs)
    return replace(site, wan=replace(site.wan, between=between))


def with_site(
    outcome: Outcome, candidate: Candidate, site: Site, links: Links | None = None
) -> tuple[float, float]:
    """Seconds, in closed form, of a candidate's step and of stock's with its shape, on a site with another network."""
    links = replace(links or outcome.ground.links, pairs=())  # the site has them
    changed = replace(outcome, ground=Ground.of(site, outcome.model, links=links))
    return estimate(changed.costs(candidate), candidate.split).step_s, changed.stock(candidate.shape)[1].formula_s
