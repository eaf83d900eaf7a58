"""A whole job of four ranks on two clusters, between which sums become slow and fast again: by real votes its
clusters go apart and come back, at one step on all ranks."""

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from clusters import site
from ranks import run_ranks, seeded
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holmes_ext.adapt import learning
from holmes_ext.adapt.reductions import SumEvaluator
from holmes_ext.options import Options
from holmes_ext.patches import registry
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.sizes import Sizes
from holmes_ext.runtime import session
from holmes_ext.runtime.measure import telemetry
from holmes_ext.runtime.reduce.reducer import GradientReducer
from holmes_ext.runtime.start.launcher import Process

STEPS, WIDTH, FALLS, RISES = 60, 32, 8, 35
WEIGHTS = 6 * WIDTH * (WIDTH + 1)
OPTIONS = Options(apart="3", outer="every=8,fragments=2,delay=2")
#: Of a sum between the clusters, and of a step without it.
SLOW_S, STEP_S = 0.6, 0.05


def session_of(rank):
    where, store = site(), dist.distributed_c10d._get_default_store().underlying_store
    plan = build_plan(where, Sizes(), options=OPTIONS)
    traffic = tuple(
        replace(one, reductions=tuple(replace(way, two_level_from=0) for way in one.reductions))
        for one in plan.traffic)
    process = Process(rank, 4, 0, 1, store.host, store.port, "test")
    return session.Session(OPTIONS, process, where, replace(plan, traffic=traffic), rank, store=store)


def between_clusters(rank, slow):
    """Sums across take SLOW_S while `slow` holds something: a rank gets a quarter of the weights twice."""
    wait, quarter = telemetry.Recorder.wait, WEIGHTS  # of four bytes each

    def slowly(self, op, ends):
        def later():
            result = ends()
            if slow and op.name == "receive" and (op.peer < 2) != (rank < 2):
                time.sleep(SLOW_S / 2 * op.payload / quarter)
            return result

        return wait(self, op, later)

    telemetry.Recorder.wait = slowly


def job(rank, how):
    """(whether all ranks' weights were the same bits, after each step; what was told)"""
    told, slow = [], []
    learning.tell_user = told.append
    SumEvaluator._best = lambda self, decided, before, stage, one: (one.reduction, one.seconds)  # two levels
    registry().enable(["telemetry", "ddp"])
    between_clusters(rank, slow)
    current = session_of(rank)
    session.set_active(current)
    telemetry.set_recorder(telemetry.Recorder(rank, current.plan.sizes))
    torch.manual_seed(7)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
    train = DistributedDataParallel(model) if how == "ddp" else model
    reducer = GradientReducer(model.named_parameters()) if how == "reducer" else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    alike = []
    for step in range(STEPS):
        slow[:] = ["slow"] * (FALLS <= step < RISES)
        loss = train(torch.randn(4, WIDTH, generator=seeded(100 * step + rank))).square().mean()
        time.sleep(STEP_S)
        if reducer is not None:
            reducer.arm()
        loss.backward()
        if reducer is not None:
            reducer.finish()
        optimizer.step()
        telemetry.recorder.step_done("optimizer")
        optimizer.zero_grad()
        every = [torch.empty(WEIGHTS) for _ in range(4)]
        dist.all_gather(every, torch.cat([weight.detach().flatten() for weight in model.parameters()]))
        alike.append([torch.equal(one, every[0]) for one in every])
    learning.stop()
    telemetry.set_recorder(None)
    session.set_active(None)
    return alike, told


@pytest.mark.parametrize("how", ["reducer", "ddp"])
def test_clusters_go_apart_and_come_back(how):
    answers = run_ranks(job, 4, how)
    alike, told = answers[0]
    apart = [step for step, of in enumerate(alike) if not all(of)]
    text = "\n".join(told)
    assert apart and apart == list(range(apart[0], apart[-1] + 1)), (apart, text)
    assert FALLS <= apart[0] < RISES <= apart[-1] + 1 < STEPS, (apart, text)
    assert all(alike[step] == [True, True, False, False] for step in apart)  # ranks of a cluster are one
    assert "inside each cluster only, weights averaged across in rounds of 8 steps (were in two" in text, text
    assert "; reverted" not in text and "the clusters are one job again" in text, text
