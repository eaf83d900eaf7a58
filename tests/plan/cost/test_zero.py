"""price: what ZeRO and experts send, by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from holmes_ext.cluster.site import site_from_spec
from holmes_ext.cluster.spec import load_spec
from holmes_ext.plan.cost.model import Gpu, Model
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.cost.stages import estimate
from holmes_ext.planner.search.evaluate import Evaluator
from holmes_ext.planner.search.result import SearchResult
from holmes_ext.planner.search.space import Limits, shapes

EXAMPLES = Path(__file__).parents[3] / "examples" / "clusters"
MODEL = Model(
    layers=8, hidden=1024, heads=8, sequence=256, vocabulary=30000, global_batch=32, gpu=Gpu(50e12)
)
FREE = Gpu(9e29)  # computes in no time: what is left of a step is its traffic
FLAT = Limits(
    {
        "pipeline": (1,),
        "tensor": (1,),
        "context": (1,),
        "micro_batch": (1,),
        "recompute": ("none",),
        "reduction": ("flat",),
        "replicas": (1,),
    }
)


def priced(model, **allowed):
    """Return prices and step of the only shape within limits.

    The site has 2 + 2 nodes with 250 Mb/s of Ethernet and no latency.
    """
    spec = load_spec(EXAMPLES / "two_clusters_4.toml")
    site = site_from_spec(replace(spec, ethernet_latency_s=0.0))
    limits = Limits({**FLAT.allowed, **{name: (value,) for name, value in allowed.items()}})
    result = SearchResult(Network(site), model, 12, limits)
    (shape,) = shapes(result.network, model, 12, limits)
    (placement,) = Evaluator(result).placements(shape)[0]
    prices = result.prices(shape)
    return prices.job, estimate(prices.costs(placement), (model.layers,)).step_s


def every_layer(job):
    embedding, block, output = job.layers
    return embedding, *[block] * job.blocks, output


@pytest.mark.parametrize(
    "zero, gradients, weights, once",
    [(0, 0, 0, 2 * 4), (1, 0, 0, 4 + 2), (2, 1, 0, 2), (3, 1, 2, 0)],
)
def test_what_zero_sends(zero, gradients, weights, once):
    """ZeRO sends 3/4 of every reduce-scatter and gather through each NIC, counted by hand.

    There are n = 4 ranks, 3 micro-batches, 4 bytes of gradients and 2 of weights.
    """
    job, step_s = priced(replace(MODEL, tied=False, gpus={}, gpu=FREE), zero=zero)
    parameters = sum(layer.parameters for layer in every_layer(job))
    expected = 3 / 4 * parameters * (3 * (4 * gradients + 2 * weights) + once)
    assert step_s == pytest.approx(8 * expected / 250e6, rel=1e-6)


def test_what_experts_send():
    """Experts send 4 all-to-alls of a block and micro-batch, and the gradients of all but experts.

    256 tokens go to 2 experts each, 1024 wide, 16 bits, 3 of 4 to other ranks.
    """
    job, step_s = priced(
        replace(MODEL, tied=False, gpus={}, gpu=FREE, experts=4, experts_per_token=2),
        expert=4,
        zero=0,
    )
    sent = 4 * 256 * 2 * 1024 * 2 * 3 / 4
    dense = sum(layer.parameters - layer.expert_parameters for layer in every_layer(job))
    assert step_s == pytest.approx(8 * (3 * 8 * sent + 2 * 3 / 4 * 4 * dense) / 250e6, rel=1e-6)
    again, _ = priced(
        replace(MODEL, tied=False, gpus={}, gpu=FREE, experts=4, experts_per_token=2),
        expert=4,
        zero=0,
        recompute="full",
    )
    assert again.block.expert_bytes == 1.5 * sent  # 6 all-to-alls: forward runs twice
