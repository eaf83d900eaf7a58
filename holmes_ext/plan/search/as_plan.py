"""A candidate of a search as a Plan: what a job follows."""

from __future__ import annotations

from holmes_ext.options import Options
from holmes_ext.plan.cost.nodes import Predictor
from holmes_ext.plan.cost.stages import estimate
from holmes_ext.plan.decide import settle
from holmes_ext.plan.layout import Layout
from holmes_ext.plan.placement import straddling_groups
from holmes_ext.plan.plan import Plan
from holmes_ext.plan.search.explanation import causes, stock_like
from holmes_ext.plan.search.result import Candidate, Outcome


def plan_of(outcome: Outcome, candidate: Candidate) -> Plan:
    """The plan of `candidate`: its node order and sizes, its layers unless every stage has the same number."""
    site, shape = outcome.ground.site, candidate.shape
    sizes = shape.sizes(candidate.arrangement.order)
    nodes = candidate.arrangement.nodes(outcome.ground)
    model = shape.model(outcome.model)
    predictor = Predictor(site, Layout(sizes, site.processes), model.workload(sizes))
    even = len(set(candidate.split)) == 1
    plan = Plan(
        site_digest=site.digest,
        nodes=nodes,
        processes=site.processes,
        sizes=sizes,
        straddling=straddling_groups(predictor, nodes),
        stage_layers=() if even else candidate.split,
        partition="uniform" if even else "balanced",
        predicted=times(outcome, candidate),
        loads=outcome.costs(candidate).loads(candidate.split),
    )
    options = Options(inflight="auto" if outcome.hides else "off")
    return settle(plan, site, options, outcome.ground.links, predictor.workload, model.source)


def times(outcome: Outcome, candidate: Candidate) -> dict[str, float]:
    """Plan.predicted of `candidate`, in seconds; see plan/build.py."""
    stock, exposed = _times(*stock_like(outcome, candidate)), causes(outcome, candidate)
    return {
        **_times(outcome, candidate),
        "exposed_reduction_seconds": exposed["reduce_inside"] + exposed["reduce_across"],
        **{f"stock_{name}": value for name, value in stock.items()},
    }


def _times(outcome: Outcome, candidate: Candidate) -> dict[str, float]:
    """The keys of plan/build.py, in seconds."""
    whole = estimate(outcome.costs(candidate), candidate.split).reduction_s
    return {"step_seconds": candidate.step_s, "reduction_seconds": max(whole)}
