"""Sums of a tied weight (plan/cost/reductions.py), simulated, whatever clusters its two stages lie on."""

import clusters
import pytest

from holmes_ext.plan.cost.model import Gpu, Model
from holmes_ext.plan.sizes import Sizes
from holmes_ext.planner.simulate.execution import Execution
from holmes_ext.planner.simulate.step import simulate

MODEL = Model(
    layers=4,
    hidden=256,
    heads=4,
    sequence=128,
    vocabulary=20000,
    micro_batches=4,
    tied=True,
    gpu=Gpu(1e12),
)


def step_s(order):
    site = clusters.site("a ib 10Gb/s a[0-3]", "b roce 10Gb/s b[0-3]", ethernet="1Gb/s")
    options = Execution(hierarchical=True)
    return simulate(site, order.split(), Sizes(pipeline=2), MODEL, options).step_s


@pytest.mark.parametrize(
    "order",
    [
        "a0 b0 b1 a1 a2 a3 b2 b3",  # twins in one cluster and in two
        "a0 a1 a2 b0 b1 b2 b3 a3",
        "a0 b0 a1 b1 a2 b2 a3 b3",
        "a0 a1 a2 b0 b1 b2 a3 b3",
    ],
)
def test_stages_on_several_clusters_sum_by_pairs(order):
    assert step_s(order) > 0, "nobody waits for ever"
