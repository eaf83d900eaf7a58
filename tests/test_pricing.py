"""Prices and closed forms of the search against plan/stage_costs.py, which counts every rank."""

from dataclasses import replace
from pathlib import Path

import pytest

from holmes_ext.cluster.site import site_from_spec
from holmes_ext.cluster.spec import load_spec
from holmes_ext.plan.arrangement import Ground, arrangements, launcher
from holmes_ext.plan.bounds import Stages
from holmes_ext.plan.cost import stock_fabric
from holmes_ext.plan.model import Gpu, Model
from holmes_ext.plan.pricing import Pricing
from holmes_ext.plan.space import Limits, shapes
from holmes_ext.plan.stage_costs import costs_on_site, estimate
from holmes_ext.plan.stages import balanced, uniform

EXAMPLES = Path(__file__).parents[1] / "examples" / "clusters"
MODEL = Model(layers=8, hidden=1024, heads=8, sequence=256, vocabulary=30000, global_batch=32, gpu=Gpu(50e12))
MODEL = replace(MODEL, gpus={"a": Gpu(50e12), "b": Gpu(30e12)})
PLAIN = Limits({"virtual": (1,), "zero": (0,), "recompute": ("none", "full"), "reduction": ("flat",), "micro_batch": (1, 2)})


def everything(sample, limits=PLAIN, model=MODEL, only=False):
    site = site_from_spec(load_spec(EXAMPLES / f"{sample}.toml"))
    ground = Ground.of(site, model, stock_fabric(site) if only else None)
    for shape in shapes(ground, model, 32, limits):
        pricing = Pricing(ground, model, shape, limits.allowed.get("reduction", ("flat", "two-level")))
        found = arrangements(ground, shape.pipeline, shape.tensor * shape.context)[0]
        for arrangement in [launcher(ground, shape.pipeline)] if only else found:
            yield site, ground, shape, pricing, arrangement


@pytest.mark.parametrize("sample", ["two_clusters_4", "two_clusters_3_5", "three_clusters_8", "paper_4_roce_4_ib"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("only", [False, True])
def test_the_estimate_is_stage_costs(sample, overlap, only):
    """Same step for every shape and arrangement, from cluster-wise prices and from counting ranks."""
    compared = 0
    limits = PLAIN if "paper" not in sample else replace(PLAIN, allowed={**PLAIN.allowed, "micro_batch": (1,), "recompute": ("none",), "context": (1, 2)})
    for index, (site, ground, shape, pricing, arrangement) in enumerate(everything(sample, limits, only=only)):
        if "paper" in sample and index % 3:
            continue
        stages = Stages(pricing, arrangement, overlap)
        order, sizes = arrangement.nodes(ground), shape.sizes(arrangement.order)
        costs = costs_on_site(site, order, sizes, shape.model(MODEL), overlap, ground.only)
        split = uniform(MODEL.layers, shape.pipeline)
        expected = estimate(costs, split)
        assert stages.estimate(split) == pytest.approx(expected.step_s, rel=1e-6), (shape, arrangement)
        for ours, theirs in zip(stages.memory_bytes(split), expected.memory_bytes):
            assert ours - pricing.working == pytest.approx(theirs, rel=1e-9), (shape, arrangement)
        compared += 1
    assert compared >= 6


@pytest.mark.parametrize("sample", ["two_clusters_4", "two_clusters_6", "three_clusters_8"])
@pytest.mark.parametrize("overlap", [False, True])
def test_no_split_beats_the_bound(sample, overlap):
    for site, ground, shape, pricing, arrangement in everything(sample):
        stages = Stages(pricing, arrangement, overlap)
        bound, split = stages.bound()
        costs = costs_on_site(site, arrangement.nodes(ground), shape.sizes(arrangement.order), shape.model(MODEL), overlap)
        best = estimate(costs, balanced(costs)).step_s
        assert bound <= best * (1 + 1e-9) and best <= stages.estimate(split) * (1 + 1e-6), (shape, arrangement)
