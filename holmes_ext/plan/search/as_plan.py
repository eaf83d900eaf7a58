"""Candidates and what a job follows: a candidate of a search as a Plan, and a layout that the user has as a candidate.

That layout's nodes stand as the job itself would order them (plan/placement.py), its layers as the framework splits
them, unless the user says otherwise: so it is what `--holmes` alone gives.
"""

from __future__ import annotations

from collections.abc import Sequence

from holmes_ext.errors import HolmesError
from holmes_ext.options import Options
from holmes_ext.plan.cost.model import Model
from holmes_ext.plan.cost.nodes import Predictor
from holmes_ext.plan.cost.pipeline import uniform
from holmes_ext.plan.cost.stages import estimate
from holmes_ext.plan.decide import settle
from holmes_ext.plan.layout import Layout
from holmes_ext.plan.place_old import place, straddling_groups
from holmes_ext.plan.plan import Plan
from holmes_ext.plan.search.arrangement import arrangement_of
from holmes_ext.plan.search.explanation import causes, stock_like
from holmes_ext.plan.search.result import Candidate, Outcome
from holmes_ext.plan.search.space import Shape, zero_of
from holmes_ext.plan.sizes import Sizes


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


def shape_of(model: Model, sizes: Sizes, zero: int | None = None, virtual: int = 1) -> Shape:
    """Of a job of complete `sizes`; zero: None for what the model's sharded_bytes say. HolmesError when the batch or
    the chunks do not divide (experts may be a mean of several layers')."""
    steps, experts = model.micro_batches_of(sizes.data), model.experts or 1
    if sizes.expert > experts:
        raise HolmesError(f"{model.source}: expert size {sizes.expert} is more than the {experts} experts")
    if model.layers < sizes.pipeline * virtual:
        raise HolmesError(f"{model.source}: {model.layers} layers are too few for {sizes.pipeline} stages of {virtual}"
                          " chunks; every one needs one")
    if virtual > 1 and (steps % sizes.pipeline or model.layers % (sizes.pipeline * virtual)):
        units = f"{sizes.pipeline} stages and {model.layers} layers by {sizes.pipeline} x {virtual} chunks"
        raise HolmesError(f"{model.source}: interleaving needs {steps} micro-batches divisible by {units}")
    axes = sizes.pipeline, sizes.tensor, sizes.context, sizes.expert, sizes.data
    zero = zero_of(model) if zero is None else zero
    return Shape(*axes, virtual, model.micro_batch, steps, model.recompute, zero)


def given(
    outcome: Outcome, sizes: Sizes, shape: Shape, split: Sequence[int] = (), nodes: Sequence[str] = ()
) -> Candidate:
    """The candidate of `shape` and complete `sizes`; split: layers of the stages, even ones by default; nodes: their
    order, by default that of the job. HolmesError where the split is none of the model's layers."""
    if split and (len(split) != shape.pipeline or sum(split) != outcome.model.layers or min(split) < 1):
        said = ",".join(map(str, split))
        needs = f"{shape.pipeline} numbers above 0 whose sum is {outcome.model.layers}"
        raise HolmesError(f"layers of the stages {said}: they must be {needs}")
    pricing = outcome.pricing(shape)
    order = nodes or place(outcome.ground.links.site(outcome.ground.site), sizes, pricing.model.workload(sizes)).nodes
    arrangement = arrangement_of(outcome.ground, order, sizes)
    return outcome.candidate(pricing, arrangement, split or uniform(outcome.model.layers, shape.pipeline))
