"""Tests the lower bounds on the time of a training step (holmes_ext/planner/bound).

The search for the best plan leaves out placements whose lower bound is too high. So a bound must never exceed
the real step time. The tests draw random clusters and models, and compare the bound of each placement with
its simulated step time.
"""

import random
from dataclasses import replace
from math import inf

import clusters
import pytest
from layer_splits import some_splits
from selection import some

from holmes_ext.cluster.wan import Between, Wan
from holmes_ext.plan.cost.model import Gpu, Model
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.engine import Rules
from holmes_ext.planner.bound.shape import ShapeBound
from holmes_ext.planner.search.evaluate import Evaluator
from holmes_ext.planner.search.result import SearchResult
from holmes_ext.planner.search.simulated import job_of
from holmes_ext.planner.search.space import Limits, shapes
from holmes_ext.planner.simulate.repeat import folded_s

#: Seeds of random searches; those named run in every test run, the others only in exhaustive runs.
#: In 35, messages and reductions of a model chunk leave through different NICs.
SEEDS = some(range(200), *range(14), 35)

#: The same for sites whose clusters differ in the GPUs of a node. In 230, the messages of a narrow node
#: occupy its NIC for a shorter time than that of the wide node which receives them.
UNEQUAL_SEEDS = some(range(200, 400), *range(200, 206), 230)


def case(pick, unequal=False):
    """Return a random search with no result yet.

    It has two or three clusters, flat or with links between, and GPUs that differ.
    """
    names = "abc"[: pick.choice((2, 2, 3))]
    rates = [pick.choice(("20Gb/s", "100Gb/s", "400Gb/s")) for _ in names]
    kinds, each = pick.choice((("ib", "roce", "ib"), ("roce", "ib", "roce"))), pick.choice((2, 4))
    lines = [
        f"{name} {kind} {rate} {name}[0-{each - 1}]"
        for name, kind, rate in zip(names, kinds, rates)
    ]
    site = clusters.site(
        *lines, ethernet=pick.choice(("1Gb/s", "5Gb/s", "25Gb/s")), processes=pick.choice((1, 2, 4))
    )
    if unequal:
        narrow, wide = pick.choice(((1, 2), (2, 4), (1, 4)))
        nodes = [
            replace(node, processes=wide if node.cluster == "b" else narrow) for node in site.nodes
        ]
        site = replace(site, nodes=tuple(nodes))
    if pick.random() < 0.4:
        pairs = [(one, two) for one in names for two in names if one < two]
        between = [
            Between(pair, pick.choice((10**8, 10**9, 10**10)), pick.choice((1e-4, 0.01)))
            for pair in pairs
        ]
        site = replace(site, wan=Wan((), tuple(between)))
    memory = pick.choice((0.0, 0.0, 4e8, 8e8, 1.5e9))
    gpus = {
        name: Gpu(pick.choice((10e12, 20e12, 60e12)), memory, pick.choice((0.0, 1e11)))
        for name in names
    }
    model = Model(
        layers=pick.choice((8, 12)),
        hidden=512,
        heads=8,
        sequence=512,
        vocabulary=pick.choice((512, 20000)),
        tied=pick.random() < 0.3,
        flash=True,
        micro_batches=1,
        gpu=Gpu(20e12),
        gpus=gpus,
    )
    batch = site.world_size * pick.choice((1, 2, 4))
    rules = Rules(overlap=pick.random() < 0.7)
    result = SearchResult(Network(site), model, batch, Limits({"recompute": ("none",)}), rules)
    return replace(result, gather_overlap=pick.random() < 0.3)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_simulated_step_is_below_the_bound(seed):
    pick = random.Random(seed)
    compare(case(pick), pick)


@pytest.mark.parametrize("seed", UNEQUAL_SEEDS)
def test_no_simulated_step_is_below_the_bound_on_unequal_nodes(seed):
    """The nodes of one cluster have more GPUs than those of the other clusters."""
    pick = random.Random(seed)
    compare(case(pick, unequal=True), pick)


def compare(result, pick):
    """Compare the bounds of some placements with simulated steps."""
    evaluator, layers = Evaluator(result), result.model.layers
    every = list(shapes(result.network, result.model, result.global_batch, result.limits))
    pipelines = [shape for shape in every if shape.virtual == 1 and shape.pipeline > 1]
    compared = 0
    for shape in [
        *pick.sample(pipelines, min(6, len(pipelines))),
        *pick.sample(every, min(3, len(every))),
    ]:
        found, _ = evaluator.placements(shape)
        for placement in pick.sample(found, min(2, len(found))):
            prices, stages = result.prices(shape), evaluator.stage_bounds(shape, placement)
            alone = evaluator.lower_bound(shape, placement, stages.costs)
            least = max(ShapeBound(result.network, prices, shape).seconds, alone.seconds())
            if shape.virtual == 1 and shape.pipeline > 1 and least < inf:
                closer, own = alone.chained(least, 3 * least)
                assert closer >= least and (
                    sum(own) == layers and stages.fits(own) if own else closer == 3 * least
                )
                least = closer
            even = (layers // shape.pipeline,) * shape.pipeline
            for split in (
                some_splits(pick, layers, shape.pipeline, 3) if shape.virtual == 1 else [even]
            ):
                if not stages.fits(split):
                    continue
                step = folded_s(job_of(result, result.candidate(shape, placement, split)))
                assert step >= least * (1 - 1e-9), (shape, result.network.nodes(placement), split)
                compared += 1
    assert compared


def test_a_time_below_the_bound_is_not_possible_and_one_above_the_step_is():
    """It can fail both ways: a bound of nothing, and one above a step."""
    pick = random.Random(3)
    result = case(pick)
    evaluator = Evaluator(result)
    every = shapes(result.network, result.model, result.global_batch, result.limits)
    shape = next(one for one in every if one.pipeline == 2 and one.virtual == 1)
    placement = evaluator.placements(shape)[0][0]
    stages = evaluator.stage_bounds(shape, placement)
    least = evaluator.lower_bound(shape, placement, stages.costs)
    seconds, split = least.seconds(), evaluator.good_split(stages)
    step = folded_s(job_of(result, result.candidate(shape, placement, split)))
    assert 0.5 * step < seconds <= step
    assert least.seconds(0.9 * seconds) == pytest.approx(0.9 * seconds), (
        "known: beyond it nothing is asked"
    )
