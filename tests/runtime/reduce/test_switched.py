"""A reducer whose plan is decided again while it trains.

All ranks change the way of their sums at the same step, and the losses are stock's.
"""

from dataclasses import replace

import torch
import torch.distributed as dist
from clusters import site
from ranks import run_ranks, seeded

from holmes_ext.options import Options
from holmes_ext.plan import maker
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.sizes import Sizes
from holmes_ext.plan.traffic import NETWORK_APIS
from holmes_ext.runtime import session
from holmes_ext.runtime.reduce.reducer import GradientReducer
from holmes_ext.runtime.start.launcher import Process

STEPS, WIDTH = 8, 16


def model():
    torch.manual_seed(7)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(6)))


def data(rank, step):
    return torch.randn(4, WIDTH, generator=seeded(1000 * step + rank))


def trained(rank, changes, arms):
    """Train while the plan's reduction changes.

    changes: step -> changed fields of the plan's reduction from then on.

    Returns:
        ([loss of every step], the same of stock, [(hierarchically, buckets) of every step])
    """
    options, where = Options(), site()
    plan = build_plan(where, Sizes(), options=options)
    (reduction,) = plan.traffic_of("sockets").reductions
    reduction = replace(reduction, hierarchical_from=0, chunk_bytes=4096, bucket_bytes=1024)
    current = session.Session(
        options, Process(rank, 4, 0, 1, "", 0, "test"), where, plan, rank, maker=maker
    )
    session.set_active(current)

    def adopt(new):
        traffic = tuple(replace(one, reductions=(new,)) for one in plan.traffic)
        assert {network_api for one in traffic for network_api in one.network_apis} == set(
            NETWORK_APIS
        )
        current.adopt(plan.sizes, replace(plan, traffic=traffic), sums=True)

    adopt(reduction)
    ours, stock = model(), model()
    reducer = GradientReducer(ours.named_parameters())
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.01) for one in (ours, stock)]
    losses, wanted, reductions = [], [], []
    for step in range(STEPS):
        if step in changes:
            adopt(replace(reduction, **changes[step]))
        for one, found in ((ours, losses), (stock, wanted)):
            one.zero_grad(set_to_none=True)
            if one is ours and arms:
                reducer.arm()
            loss = one(data(rank, step)).square().sum()
            loss.backward()
            found.append(loss.item())
        reducer.finish()
        for parameter in stock.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= 4
        for optimizer in optimizers:
            optimizer.step()
        reductions.append((current.reductions[0, 1, 2, 3].hierarchical, len(reducer._buckets)))
    reducer.close()
    session.set_active(None)
    return losses, wanted, reductions


def switched(changes, arms=True):
    """Return the reductions of each step, after checking that they are the same on all ranks."""
    answers = run_ranks(trained, 4, changes, arms)
    for losses, wanted, reductions in answers:
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted), rtol=1e-6, atol=1e-6)
        assert reductions == answers[0][2]
    return answers[0][2]


def test_hierarchical_and_one_ring_and_back():
    reductions = switched({3: {"clusters": ()}, 6: {}})
    assert [hierarchical for hierarchical, _ in reductions] == [True] * 3 + [False] * 3 + [True] * 2


def test_other_chunks_and_buckets():
    reductions = switched(
        {
            2: {"chunk_bytes": 2048},
            4: {"clusters": (), "bucket_bytes": 8192},
            6: {"clusters": (), "bucket_bytes": 2048},
        },
        arms=False,
    )
    counts = [count for _, count in reductions]
    assert counts[2] > counts[0] and counts[4] < counts[2] and counts[6] > counts[4]
