"""A candidate of a search as a Plan: what a job follows."""

from __future__ import annotations

from holmes_ext.plan.cost.step import Predictor
from holmes_ext.plan.decide import settle
from holmes_ext.plan.layout import Layout
from holmes_ext.plan.placement import straddling_groups
from holmes_ext.plan.plan import Plan
from holmes_ext.plan.search.breakdown import breakdown, stock
from holmes_ext.plan.search.result import Candidate, Outcome


def plan_of(outcome: Outcome, candidate: Candidate) -> Plan:
    """The plan of `candidate`: its node order and sizes, its layers unless every stage has the same number."""
    site, shape = outcome.ground.site, candidate.shape
    sizes = shape.sizes(candidate.arrangement.order)
    nodes = candidate.arrangement.nodes(outcome.ground)
    model = shape.model(outcome.model)
    predictor = Predictor(site, Layout(sizes, site.processes), model.workload(sizes))
    today, split = stock(outcome, shape)
    even = len(set(candidate.split)) == 1
    plan = Plan(
        site_digest=site.digest,
        nodes=nodes,
        processes=site.processes,
        sizes=sizes,
        straddling=straddling_groups(predictor, nodes),
        stage_layers=() if even else candidate.split,
        partition="uniform" if even else "balanced",
        predicted={**_times(outcome.stages(candidate), candidate.split, ""), **_times(today, split, "stock_")},
    )
    return settle(plan, site, links=outcome.ground.links, workload=predictor.workload, basis=model.source)


def _times(stages, split, prefix: str) -> dict[str, float]:
    """The keys of plan/build.py, in seconds."""
    parts = breakdown(stages, split)
    whole = [stages.extra_reduce[s] + n * stages.reduce[s] + stages.prices[s].latency_s for s, n in enumerate(split)]
    times = {f"{prefix}step_seconds": stages.estimate(split), f"{prefix}reduction_seconds": max(whole)}
    if not prefix:
        times["exposed_reduction_seconds"] = parts["reduce_inside"] + parts["reduce_across"]
    return times
