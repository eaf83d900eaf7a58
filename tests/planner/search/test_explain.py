"""Why a plan is as it is: thin stages, what the best wins, what one change of the site would give."""

from dataclasses import replace

import clusters
import pytest

from holmes_ext.plan.cost.model import Gpu, Model
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.cost.pipeline import uniform
from holmes_ext.plan.engine import Rules
from holmes_ext.plan.shape import shape_of
from holmes_ext.plan.sizes import Sizes
from holmes_ext.planner.search.as_plan import layout_candidate
from holmes_ext.planner.search.changed import what_if
from holmes_ext.planner.search.explain import explain, thin_stages
from holmes_ext.planner.search.result import SearchResult
from holmes_ext.planner.search.search import search
from holmes_ext.planner.search.simulated import timed
from holmes_ext.planner.search.space import Limits

SITE = clusters.site("a ib 100Gb/s a[0-1]", "b roce 50Gb/s b[0-1]", ethernet="10Gb/s", processes=2)
MODEL = Model(
    layers=12,
    hidden=1024,
    heads=16,
    sequence=512,
    vocabulary=2000,
    tied=False,
    global_batch=32,
    flash=True,
    gpu=Gpu(20e12),
)
PIPELINE = Limits(
    {
        "pipeline": (2,),
        "tensor": (1,),
        "micro_batch": (1,),
        "recompute": ("none",),
        "zero": (0,),
        "context": (1,),
        "virtual": (1,),
    }
)


def found(model=MODEL, limits=PIPELINE, site=SITE, prove=False, **rules):
    asked = SearchResult(Network(site), model, 32, limits, Rules(overlap=True, **rules))
    return search(asked, prove=prove)


def test_a_thin_stage_of_slow_gpus_is_explained_with_what_even_layers_take():
    outcome = found(replace(MODEL, gpus={"a": Gpu(40e12), "b": Gpu(3e12)}))
    best = outcome.best
    slow = best.placement.stages.index(((1, 4),))
    assert best.split[slow] == 1
    lines = thin_stages(outcome, best)
    assert (
        lines[0].startswith(f"stage {slow} (b) has 1 layer: ")
        and "13.3 x as long there as on stage" in lines[0]
    )
    even = timed(outcome, outcome.candidate(best.shape, best.placement, uniform(12, 2)))
    assert even.step_s > best.step_s
    assert (
        lines[1]
        == f"with even layers the step takes {even.step_s:.4g} s instead of {best.step_s:.4g} s"
    )


def test_a_stage_that_memory_keeps_thin():
    outcome = found(replace(MODEL, gpus={"a": Gpu(20e12), "b": Gpu(20e12, 0.7e9)}))
    best = outcome.best
    thin = best.placement.stages.index(((1, 4),))
    assert best.split[thin] <= 2
    said = " ".join(thin_stages(outcome, best))
    assert (
        "its memory has no room for another layer" in said
        and "even layers do not fit in memory" in said
    )


def test_a_slow_stage_link_keeps_the_stages_beside_it_thin():
    """Few layers go to the stages beside a slow stage link.

    There are two stages in each cluster, and Ethernet between the second and the third. Without
    sequence parallelism the whole activation crosses.
    """
    site = clusters.site(
        "a ib 100Gb/s a[0-3]", "b roce 100Gb/s b[0-3]", ethernet="0.5Gb/s", processes=2
    )
    only = Limits({**PIPELINE.allowed, "pipeline": (4,), "tensor": (2,)})
    outcome = found(replace(MODEL, layers=24, sequence=2048), only, site, hide_stage_links=False)
    said = " ".join(thin_stages(outcome, outcome.best))
    assert min(outcome.best.split) == min(outcome.best.split[1:3]), outcome.best.split
    assert "activation and gradient take" in said


def test_even_stages_need_no_words():
    assert thin_stages(found(), found().best) == []


def test_a_given_layout_is_what_the_search_finds_for_the_same():
    outcome = found()
    best = outcome.best
    sizes = Sizes(pipeline=2, data=4)
    shape = shape_of(MODEL, sizes)
    assert shape == best.shape
    one = layout_candidate(outcome, sizes, shape, best.split, outcome.network.nodes(best.placement))
    assert one.placement == best.placement and one.formula_s == pytest.approx(best.formula_s)
    assert timed(outcome, one).simulated_s == pytest.approx(best.simulated_s)
    assert outcome.describe(one) == outcome.describe(best)


def test_clusters_of_any_order_of_nodes():
    network = found().network
    mixed = network.placement(["a0", "b0", "b1", "a1"], Sizes(pipeline=2, data=4))
    assert mixed.stages == (((0, 2), (1, 2)), ((1, 2), (0, 2)))
    assert network.nodes(mixed) == ("a0", "b0", "b1", "a1")
    first = network.placement(
        ["a0", "a1", "b0", "b1"], Sizes(pipeline=2, data=4, order="tp-cp-ep-pp-dp")
    )
    assert first.stages == (((0, 2), (1, 2)),) * 2


def test_changes_of_the_site_are_judged_by_simulation_and_sorted():
    outcome = found(prove=True)
    gains = dict(what_if(outcome))
    assert gains["twice the rate of ethernet"] < outcome.best.step_s
    assert gains["half the latency of ethernet"] <= outcome.best.step_s * (1 + 1e-9)
    # stages of 4 ranks lie on two clusters then
    assert gains["one node moved from a to b"] > outcome.best.step_s
    lines = explain(outcome)
    assert len(lines) <= 10 and lines[0].startswith("against stock: ")
    shown = [float(line.split(": ")[1].split()[0]) for line in lines if line.startswith("with ")]
    assert shown == sorted(shown) and shown
    gap = outcome.optimality_gap.gap
    assert all(abs(seconds / outcome.best.step_s - 1) >= 0.99 * gap for seconds in shown), (
        "else it may be noise"
    )


def test_slow_gpus_and_little_memory_are_among_the_changes():
    outcome = found(
        replace(MODEL, gpus={"a": Gpu(20e12), "b": Gpu(10e12, 1.3e9)}), Limits({"pipeline": (1, 2)})
    )
    gains = dict(what_if(outcome))
    assert gains["GPUs of b as fast as the fastest"] < outcome.best.step_s
    assert "twice the memory on GPUs of b" in gains
