"""The simulated buckets are those that a running job makes.

GradientReducer runs over the example's stages, as DeepSpeed's overlapped engine uses it
(patches/deepspeed/reduce.py: the stage's own parameters, its tied weight deferred).
"""

import sys

import pytest
import torch
from clusters import example
from prices import job_on_site
from ranks import run_ranks

from holmes_ext.patches.deepspeed.features import DEEPSPEED
from holmes_ext.plan.cost.model import Model
from holmes_ext.plan.sizes import Sizes
from holmes_ext.planner.simulate.execution import Execution
from holmes_ext.runtime.reduce.reducer import GradientReducer
from holmes_ext.samples import examples

pytest.importorskip("deepspeed")
LAYERS, HIDDEN, HEADS, SEQUENCE = 6, 288, 4, 16
SITE = example()


def stages(tied):
    """Return the layers of two pipeline stages, three blocks each."""
    folder = str(examples() / "deepspeed_pipeline")
    sys.path.insert(0, folder)
    try:
        from model import layer_specs, tied_head
    finally:
        sys.path.remove(folder)
    specs = [spec.build() for spec in layer_specs(LAYERS, HIDDEN, HEADS, SEQUENCE, tied)]
    cut = 2 + LAYERS // 2
    head = (lambda x: tied_head(specs[-1], x)) if tied else specs[-1]
    return (specs[:cut], specs[:cut]), (specs[cut:], [*specs[cut:-1], head])


def real(rank, stage, tied, bucket_bytes):
    """Return the bytes of every gradient, bucket by bucket.

    The order is the one in which they leave once the reducer has seen one step.
    """
    modules, run = stages(tied)[stage]
    module, deferred = torch.nn.ModuleList(modules), []
    if tied:
        deferred = [modules[0 if stage == 0 else -1].weight]
    fabric = SITE.shared_fabric([("a0", "a1"), ("b0", "b1")][stage])
    reducer = GradientReducer(
        module.named_parameters(), fabric=fabric, bucket_bytes=bucket_bytes, deferred=deferred
    )
    for _ in range(2):
        x = (
            torch.zeros(1, SEQUENCE, dtype=torch.long)
            if stage == 0
            else torch.zeros(1, SEQUENCE, HIDDEN)
        )
        for layer in run:
            x = layer(x)
        with reducer.overlapped():
            x.sum().backward()
    return [
        sum(reducer._items[index].bytes for index in bucket.indices) for bucket in reducer._buckets
    ]


def simulated(stage, tied, bucket_bytes):
    model = Model(
        LAYERS, HIDDEN, HEADS, SEQUENCE, 256, micro_batches=8, activation_width=4, tied=tied
    )
    sizes, order = Sizes(pipeline=2, data=2), [node.name for node in SITE.nodes]
    execution = Execution(DEEPSPEED, overlap="on", bucket_bytes=bucket_bytes or 0)
    collectives = job_on_site(SITE, order, sizes, model, execution).collectives
    ((_, leaving),) = [item for item in collectives.bucket_groups.items() if item[0][1] == stage]
    late = [one.after is None for one in leaving]
    assert late == sorted(late) and any(late) == tied, (
        "a tied weight is sent after the backward pass"
    )
    return [size for one in leaving for size in one.sizes]


CASES = [
    (stage, tied, size)
    for stage in (0, 1)
    for tied in (False, True)
    for size in (None, 400_000, 3_000_000)
]


def every(rank):
    return [real(rank, *case) for case in CASES]


def test_the_simulated_buckets_are_the_real_ones():
    first, second = run_ranks(every, 2)
    for case, mine, theirs in zip(CASES, first, second):
        assert mine == theirs == simulated(*case) and len(mine) > 3, case
