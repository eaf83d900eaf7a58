"""Tests a search whose time ends early: it returns plans, and its lower bound stays true.

No test measures a time.
"""

import itertools
import json
import time
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from clusters import example

from holmes_ext.cli.main import _process_begin, main
from holmes_ext.plan.cost.model import Gpu, Model
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.engine import Rules
from holmes_ext.planner.launch_flags import Launch
from holmes_ext.planner.search import evaluate, sketch
from holmes_ext.planner.search.evaluate import Evaluator, PlacedShape
from holmes_ext.planner.search.result import SearchResult
from holmes_ext.planner.search.search import search
from holmes_ext.planner.search.simulated import framework_schedule_s, simulated, with_passes
from holmes_ext.planner.search.stock import are_reasons_simulated, best_stock, causes, reasons
from holmes_ext.planner.show.start import UNKNOWN_S, start_line, step_without_plan_file
from holmes_ext.planner.show.time_limit import TimeLimit
from holmes_ext.planner.simulate import deadline
from holmes_ext.planner.simulate.deadline import TimeIsOver, simulations_until

MODEL = Model(
    layers=12, hidden=512, heads=8, sequence=128, vocabulary=8000, global_batch=16, gpu=Gpu(20e12)
)
PAST = -inf  # a moment of time.monotonic() that is over


def request(name="two_clusters_8"):
    return SearchResult(Network(example(name)), MODEL, 16, rules=Rules(overlap=True))


@pytest.mark.parametrize("name", ["two_clusters_8", "four_us_regions_64"])
def test_search_without_time_finds_a_plan_and_bounds_all_others(name):
    found = search(request(name), seconds=0.0)
    everything = search(request(name), prove=False)
    assert found.best.simulated_s and found.shapes == everything.shapes
    assert len(found.ideals) < len(everything.ideals)
    least_s = min(plan.step_s for plan in everything.candidates)
    assert found.optimality_gap.bound_s <= found.computing_s < least_s


def test_lower_bounds_without_an_end_are_those_of_every_shape_in_order():
    found = search(request(), prove=False)
    assert found.unbounded_s == inf
    listed = list(sketch.shapes(found.network, MODEL, 16, found.limits))
    assert list(found.ideals) == [shape for shape in listed if shape in found.ideals]
    assert found.shapes == len(listed) == len(found.ideals) + found.misfits


def test_only_one_plan_is_simulated_after_the_end():
    result = search(request(), prove=False, simulate=False)
    simulated = sketch.simulate_first(result, rows=10, end=PAST).candidates
    assert [bool(plan.simulated_s) for plan in simulated[:2]] == [True, False]
    assert len(simulated) == len(result.candidates)


def test_a_placement_gets_one_split_if_the_time_ends_meanwhile(monkeypatch):
    result = search(request(), prove=False)
    shape = next(s for s in result.ideals if s.pipeline == 4 and s.virtual == 1)
    placement = Evaluator(result).placements(shape).listed[0]
    item = PlacedShape(shape, placement, is_tightened=True)
    whole = Evaluator(result).process(item, bound_s=0.0, best_s=inf)
    moments = iter([0.0, 0.0, 0.0])  # at the start, and around the first simulation
    monkeypatch.setattr(evaluate.time, "monotonic", lambda: next(moments, 1e9))
    cut = Evaluator(result, end=1.0).process(item, bound_s=0.0, best_s=inf)
    assert len(cut.candidates) == 1 < len(whole.candidates)


def test_a_placement_is_left_out_if_its_simulation_would_end_too_late():
    """Its lower bound stays, so the optimality gap counts it."""
    result = search(request(), prove=False)
    shape = next(s for s in result.ideals if s.pipeline == 4 and s.virtual == 1)
    placement = Evaluator(result).placements(shape).listed[0]
    evaluator = Evaluator(result, end=time.monotonic() + 1000.0)
    evaluator.pass_s = 1e6
    outcome = evaluator.process(PlacedShape(shape, placement, is_tightened=True), 0.5, inf)
    assert not outcome.candidates and outcome.remaining_s == 0.5


def test_no_order_of_passes_is_sought_after_the_end():
    result = search(request(), prove=False)
    assert with_passes(result, end=PAST) is result


def test_seconds_by_cause_are_computed_once(monkeypatch):
    result = search(request(), prove=False)
    first = causes(result, result.best)
    monkeypatch.setattr("holmes_ext.planner.search.stock.folded_causes", None)
    assert causes(result, result.best) == first
    with pytest.raises(TypeError):  # other rules are another job
        causes(result.on(result.network), result.best)


def test_process_began_before_this_moment():
    begin = _process_begin()
    assert begin <= time.monotonic()


def test_a_simulation_is_given_up_at_the_deadline(monkeypatch):
    """The clock is read inside of the simulation, as one of 1024 GPUs may take seconds."""
    result = search(request(), prove=False)
    moments = itertools.count()
    monkeypatch.setattr(deadline.time, "monotonic", lambda: next(moments))
    with simulations_until(3.0), pytest.raises(TimeIsOver):
        for _ in range(100):
            simulated(result, result.best)
    assert next(moments) == 5  # read at 0, 1, 2, 3 and 4
    assert simulated(result, result.best).step_s  # without a deadline


def test_output_after_the_deadline_is_that_of_the_closed_form():
    result = search(request(), prove=False)
    closed = replace(result, candidates=[replace(result.best, simulated_s=0.0)], remembered={})
    with simulations_until(PAST):
        assert not are_reasons_simulated(result)
        assert reasons(result) == reasons(closed)
        assert framework_schedule_s(result, result.best) == framework_schedule_s(
            closed, closed.best
        )
        assert best_stock(result) is None
    # The page, which has no deadline, simulates what the terminal did not.
    assert are_reasons_simulated(result)
    # What was remembered before the deadline stays simulated.
    again = replace(result, remembered={})
    simulated_reasons = reasons(again)
    with simulations_until(PAST):
        assert are_reasons_simulated(again) and reasons(again) is simulated_reasons


def test_the_step_without_a_plan_file_is_unknown_after_the_deadline():
    """It needs prices of many orders of the nodes, and a simulation. Nothing is promised instead."""
    result = search(request("spot_64"), seconds=0.0)
    with simulations_until(PAST):
        assert step_without_plan_file(result) == UNKNOWN_S
        starts = {"torch": Launch(flags=())}
        assert "too short to predict its step" in start_line(result, starts)


def test_a_step_that_was_not_predicted_is_null_in_json(monkeypatch, capsys):
    """The time of the output is over when it begins. Nothing else is missing in the document."""
    monkeypatch.setattr(TimeLimit, "simulations_end", PAST)
    examples = Path(__file__).parents[3] / "examples"
    words = [
        "--cluster",
        str(examples / "clusters" / "two_clusters_4.toml"),
        "--global-batch",
        "16",
    ]
    words += ["--model", str(examples / "models" / "deepspeed_demo.toml")]
    assert main(["plan", *words, "--limit", "pipeline=2", "--seconds", "0.01", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {launch["step_s"] for launch in found["launch"].values()} == {None}
    assert sum(found["where"]["holmes"].values()) == pytest.approx(
        found["candidates"][0]["closed_form_seconds"]
    )
