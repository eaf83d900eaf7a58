"""Prices and closed forms of the search against plan/cost/nodes.py, which counts every rank."""

from dataclasses import replace
from pathlib import Path

import pytest

from holmes_ext.cluster.site import site_from_spec
from holmes_ext.cluster.spec import load_spec
from holmes_ext.plan.cost.model import Gpu, Model
from holmes_ext.plan.cost.nodes import costs_on_site, stock_fabric
from holmes_ext.plan.cost.pipeline import uniform
from holmes_ext.plan.cost.stages import estimate
from holmes_ext.plan.search.arrangement import Ground, arrangements, launcher
from holmes_ext.plan.search.balanced import balanced
from holmes_ext.plan.search.bound.formula import Bounds
from holmes_ext.plan.search.pricing import Pricing
from holmes_ext.plan.search.space import Limits, shapes

EXAMPLES = Path(__file__).parents[3] / "examples" / "clusters"
MODEL = Model(layers=8, hidden=1024, heads=8, sequence=256, vocabulary=30000, global_batch=32, gpu=Gpu(50e12))
MODEL = replace(MODEL, gpus={"a": Gpu(50e12), "b": Gpu(30e12)})
PLAIN = Limits(
    {"virtual": (1,), "zero": (0,), "recompute": ("none", "full"), "reduction": ("flat",), "micro_batch": (1, 2)})


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
    limits = PLAIN if "paper" not in sample else replace(
        PLAIN, allowed={**PLAIN.allowed, "micro_batch": (1,), "recompute": ("none",), "context": (1, 2)})
    for index, (site, ground, shape, pricing, arrangement) in enumerate(everything(sample, limits, only=only)):
        if "paper" in sample and index % 3:
            continue
        ours = pricing.costs(arrangement, overlap)
        order, sizes = arrangement.nodes(ground), shape.sizes(arrangement.order)
        costs = costs_on_site(site, order, sizes, shape.model(MODEL), overlap, ground.only)
        split = uniform(MODEL.layers, shape.pipeline)
        expected = estimate(costs, split)
        found = estimate(ours, split)
        assert found.step_s == pytest.approx(expected.step_s, rel=1e-6), (shape, arrangement)
        assert found.memory_bytes == pytest.approx(expected.memory_bytes, rel=1e-9), (shape, arrangement)
        compared += 1
    assert compared >= 6


@pytest.mark.parametrize("sample", ["two_clusters_4", "two_clusters_6", "three_clusters_8"])
@pytest.mark.parametrize("overlap", [False, True])
def test_no_split_beats_the_bound(sample, overlap):
    for site, ground, shape, pricing, arrangement in everything(sample):
        ours = pricing.costs(arrangement, overlap)
        bound, split = Bounds(ours).bound()
        costs = costs_on_site(site, arrangement.nodes(ground), shape.sizes(arrangement.order), shape.model(MODEL),
                              overlap)
        best = estimate(costs, balanced(costs)).step_s
        assert bound <= best * (1 + 1e-9) and best <= estimate(ours, split).step_s * (1 + 1e-6), (shape, arrangement)


FREE = Gpu(9e29)  # computes in no time: what is left of a step is its traffic
FLAT = Limits({"pipeline": (1,), "tensor": (1,), "context": (1,), "micro_batch": (1,), "recompute": ("none",),
               "reduction": ("flat",)})


def priced(model, **allowed):
    """Prices and step of the only shape within limits, on 2 + 2 nodes with 250 Mb/s of Ethernet and no latency."""
    spec = load_spec(EXAMPLES / "two_clusters_4.toml")
    site = site_from_spec(replace(spec, ethernet_latency_s=0.0))
    ground = Ground.of(site, model)
    (shape,) = shapes(
        ground, model, 12, Limits({**FLAT.allowed, **{name: (value,) for name, value in allowed.items()}}))
    (arrangement,) = arrangements(ground, 1, 1)[0]
    pricing = Pricing(ground, model, shape, ("flat",))
    return pricing, estimate(pricing.costs(arrangement, False), (model.layers,)).step_s


def every_layer(pricing):
    embedding, block, output = pricing.portion.layers
    return embedding, *[block] * pricing.portion.blocks, output


@pytest.mark.parametrize(
    "zero, gradients, weights, once", [(0, 0, 0, 2 * 4), (1, 0, 0, 4 + 2), (2, 1, 0, 2), (3, 1, 2, 0)])
def test_what_zero_sends(zero, gradients, weights, once):
    """By hand, n = 4 ranks, 3 micro-batches, 4 bytes of gradients and 2 of weights: 3/4 of every reduce-scatter and
    gather through each NIC."""
    pricing, step_s = priced(replace(MODEL, tied=False, gpus={}, gpu=FREE), zero=zero)
    parameters = sum(layer.parameters for layer in every_layer(pricing))
    expected = 3 / 4 * parameters * (3 * (4 * gradients + 2 * weights) + once)
    assert step_s == pytest.approx(8 * expected / 250e6, rel=1e-6)


def test_what_experts_send():
    """4 all-to-alls of a block and micro-batch: 256 tokens to 2 experts each, 1024 wide, 16 bits, 3 of 4 to other
    ranks; gradients of all but experts."""
    pricing, step_s = priced(replace(MODEL, tied=False, gpus={}, gpu=FREE, experts=4, experts_per_token=2), expert=4,
                             zero=0)
    sent = 4 * 256 * 2 * 1024 * 2 * 3 / 4
    dense = sum(layer.parameters - layer.expert_parameters for layer in every_layer(pricing))
    assert step_s == pytest.approx(8 * (3 * 8 * sent + 2 * 3 / 4 * 4 * dense) / 250e6, rel=1e-6)
    again, _ = priced(replace(MODEL, tied=False, gpus={}, gpu=FREE, experts=4, experts_per_token=2), expert=4, zero=0,
                      recompute="full")
    assert again.block.expert_bytes == 1.5 * sent  # 6 all-to-alls: forward runs twice
