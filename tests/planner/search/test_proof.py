"""The optimality gap of simulated steps (planner/search/search.py).

It is compared with every plan of a small space, each simulated.
"""

import time
from dataclasses import replace
from itertools import combinations

import clusters
import pytest

from holmes_ext.plan.cost.model import Gpu, Model
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.engine import Rules
from holmes_ext.planner.search import search as searching
from holmes_ext.planner.search.evaluate import Evaluator, PlacedShape
from holmes_ext.planner.search.result import SearchResult
from holmes_ext.planner.search.search import proven, search
from holmes_ext.planner.search.simulated import job_of
from holmes_ext.planner.search.space import Limits, shapes
from holmes_ext.planner.simulate.repeat import folded_s

SITE = clusters.site("a ib 100Gb/s a[0-1]", "b roce 50Gb/s b[0-1]", ethernet="2Gb/s", processes=2)
MODEL = Model(
    layers=6,
    hidden=512,
    heads=8,
    sequence=512,
    vocabulary=2000,
    tied=False,
    micro_batches=1,
    flash=True,
    gpu=Gpu(20e12),
    gpus={"a": Gpu(40e12)},
)
LIMITS = Limits({"recompute": ("none",), "micro_batch": (1, 2), "context": (1,), "zero": (0, 1)})


def ranked():
    return search(
        SearchResult(Network(SITE), MODEL, 32, LIMITS, Rules(overlap=True)), rows=1, prove=False
    )


def prove(result, seconds=1e9, **more):
    return proven(result, time.monotonic() + seconds, **more)


def steps(outcome):
    """Of every plan: all splits of all placements of all shapes."""
    evaluator = Evaluator(outcome)
    for shape in shapes(outcome.network, MODEL, 32, LIMITS):
        for placement in evaluator.placements(shape)[0]:
            fits = evaluator.stage_bounds(shape, placement).fits
            borders = combinations(range(1, 6), shape.pipeline - 1)
            every = [tuple(high - low for low, high in zip((0, *at), (*at, 6))) for at in borders]
            for split in every if shape.virtual == 1 else [(6 // shape.pipeline,) * shape.pipeline]:
                if fits(split):
                    yield folded_s(job_of(outcome, outcome.candidate(shape, placement, split)))


@pytest.mark.parametrize("alone_s", [1e9, 0.0], ids=["one process", "two"])
def test_what_is_proven_holds_for_every_plan(alone_s, monkeypatch):
    monkeypatch.setattr(searching, "ALONE_S", alone_s)
    first, told = ranked(), []
    found = prove(first, progress=lambda *said: told.append(said))
    least = min(steps(first))
    assert (
        found.optimality_gap.bound_s <= least * (1 + 1e-9)
        and found.best.simulated_s <= first.best.simulated_s
    )
    assert found.best.simulated_s <= least * 1.01 and found.optimality_gap.gap < 0.1
    least = min(one.simulated_s or 1e9 for one in found.candidates)
    assert found.optimality_gap.step_s == found.best.simulated_s == least
    assert told and told[-1][1] == 0 and told[-1][2] == found.best.simulated_s
    assert len({one.key for one in found.candidates}) == len(found.candidates)


def test_what_is_akin_to_the_best_comes_first(monkeypatch):
    monkeypatch.setattr(searching, "ALONE_S", 1e9)
    monkeypatch.setattr(searching, "MAX_EARLY_TIGHTENED", 3)
    monkeypatch.setattr(searching, "MAX_EARLY_SIMULATED", 1)
    seen, do = [], Evaluator.process
    monkeypatch.setattr(
        Evaluator, "process", lambda self, item, *given: seen.append(item) or do(self, item, *given)
    )
    first = ranked()
    assert first.best.shape.pipeline > 1 and first.best.shape.virtual == 1
    prove(first)
    arranged = [isinstance(item, PlacedShape) for item in seen]
    begun = arranged.index(True)
    assert {item.recompute for item in seen[:begun]} == {"none"} and first.best.shape in seen[
        :begun
    ]
    early = seen[
        begun : 1 + next(at for at, item in enumerate(seen) if arranged[at] and item.is_tightened)
    ]
    assert len(early) <= 4 and early[-1].predicted_s and sum(early[-1].split) == MODEL.layers
    assert {replace(item.shape, zero=0) for item in early} == {replace(first.best.shape, zero=0)}
    assert not arranged[begun + len(early)], "then the least bound of all"
    ideal = first.ideals[first.best.shape]
    ended = prove(replace(first, ideals={first.best.shape: ideal}), seconds=0.0).optimality_gap
    assert ended.bound_s == ideal < ended.step_s, (
        "what still waits there counts when the time is over"
    )


def test_ctrl_c_and_the_end_of_the_time_keep_what_was_found():
    def stop(*_):
        raise KeyboardInterrupt

    first = ranked()
    for found in (prove(first, progress=stop), prove(first, seconds=0.0)):
        assert found.best.simulated_s <= first.best.simulated_s
        assert found.optimality_gap.bound_s <= found.best.simulated_s
    assert prove(first, progress=stop).interrupted and not found.interrupted
