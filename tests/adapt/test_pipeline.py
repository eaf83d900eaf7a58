"""Deciding again, of what a job measured: what is changed, what is taken back, and that nothing flaps."""

from dataclasses import replace

import pytest
from clusters import site

from holmes_ext.adapt.pipeline import PipelineEvaluator, better_split, pipeline_s
from holmes_ext.options import Options
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.cost.stages import StageCosts
from holmes_ext.plan.engine import EngineTraits
from holmes_ext.plan.sizes import Sizes
from holmes_ext.plan.workload import StageLoad, Workload

OPTIONS, ENGINE = Options(), EngineTraits()
PLAN = build_plan(site(), Sizes(2), options=OPTIONS)


def learned(plan, stage_link_s=0.03, forward_s=0.02, micro_batches=8, **memory):
    """`plan` as measured: two equal stages, backward twice the forward."""
    loads = tuple(
        StageLoad(forward_s, 2 * forward_s, stage_link_s=stage_link, **memory)
        for stage_link in (stage_link_s, 0.0)
    )
    return replace(
        plan, loads=loads, workload=Workload(micro_batches=micro_batches), basis="measured"
    )


def took(plan, stage_link_s, **more):
    """Seconds of a step of which the measured plan is right, with 0.02 s of the host's own."""
    known = learned(plan, stage_link_s, **more)
    return known, 0.02 + pipeline_s(known, [stage_link_s], held(plan))


def held(plan):
    return plan.traffic_of("sockets").in_flight


def evaluator():
    return PipelineEvaluator("sockets", OPTIONS, ENGINE)


def test_a_slow_stage_link_that_nobody_told_of_is_hidden_once_it_is_measured():
    own, plan = evaluator(), PLAN
    assert held(plan) == (2, 1) and plan.basis == "nominal"
    known, step_s = took(plan, 0.03)
    change = own.next(known, step_s)
    assert change.in_flight == (3, 1) and change.before == (2, 1) and not change.takes_back
    own.taken(change, known)
    plan = change.adapted(plan, "sockets")
    assert held(plan) == (3, 1) and plan.nodes == PLAN.nodes
    after, then_s = took(plan, 0.03)
    assert then_s == pytest.approx(change.then_s)
    assert own.next(after, then_s) is None
    assert own.trials.ended == (change, then_s, True)


@pytest.mark.parametrize("stage_link_s", [1e-5, 0.0005])
def test_a_free_stage_link_changes_nothing(stage_link_s):
    own = evaluator()
    for _ in range(5):
        assert own.next(*took(PLAN, stage_link_s)) is None


def test_what_does_not_bring_what_was_predicted_is_taken_back_and_not_tried_again():
    own, plan = evaluator(), PLAN
    known, step_s = took(plan, 0.03)
    change = own.next(known, step_s)
    own.taken(change, known)
    plan = change.adapted(plan, "sockets")
    back = own.next(learned(plan), step_s)  # it takes as long as before
    assert (
        back.takes_back and back.in_flight == (2, 1) and own.trials.ended == (change, step_s, False)
    )
    own.taken(back, learned(plan))
    plan = back.adapted(plan, "sockets")
    for _ in range(5):
        assert own.next(*took(plan, 0.03)) is None
    slower = own.next(*took(plan, 0.05))  # another stage link: it may help now
    assert slower.in_flight[0] > 2


def test_a_plan_follows_a_rate_that_drifts_both_ways():
    own, plan, seen = evaluator(), PLAN, []
    for stage_link_s in (0.005, 0.005, 0.05, 0.05, 0.05, 0.05, 0.005, 0.005, 0.005):
        known, step_s = took(plan, stage_link_s)
        if change := own.next(known, step_s):
            own.taken(change, known)
            plan = change.adapted(plan, "sockets")
        seen.append(held(plan)[0])
    assert seen[1] == seen[0] and max(seen[2:6]) > seen[0] and seen.count(max(seen)) >= 3, seen
    changes = sum(a != b for a, b in zip(seen, seen[1:]))
    assert changes <= 2, seen


def test_memory_bounds_what_is_in_flight():
    room = {"fixed_bytes": 10.0, "kept_bytes": 10.0, "limit_bytes": 45.0}
    known, step_s = took(PLAN, 0.05)
    free = evaluator().next(known, step_s)
    bounded = evaluator().next(learned(PLAN, 0.05, **room), step_s)
    assert free.in_flight[0] > 3 and bounded.in_flight[0] == 3


def test_more_are_in_flight_than_hide_the_stage_link_where_few_micro_batches_fill_the_pipeline():
    def change(forward_s, **more):
        plan = learned(PLAN, 0.045, **more)
        loads = tuple(
            replace(load, forward_s=own, backward_s=2 * own)
            for load, own in zip(plan.loads, (0.03, forward_s))
        )
        plan = replace(plan, loads=loads)
        return evaluator().next(plan, 0.02 + pipeline_s(plan, [0.045], (2, 1))).in_flight

    assert change(0.03) == (3, 1) and change(0.024)[0] > 3  # a second stage that is faster
    assert change(0.024, micro_batches=40) == (3, 1)
    assert change(0.024, fixed_bytes=0.0, kept_bytes=1.0, limit_bytes=4.0) == (4, 1)


def test_what_the_user_asked_for_stays():
    asked = Options(inflight="1")
    own = PipelineEvaluator("sockets", asked, ENGINE)
    plan = build_plan(site(), Sizes(2), options=asked)
    known, step_s = took(plan, 0.1)
    assert own.next(known, step_s) is None


def test_layers_that_only_a_restart_can_give():
    def costs(*factors):
        rows = [
            tuple(tuple(each * factor for _ in range(8)) for factor in factors)
            for each in (0.01, 0.02)
        ]
        none = ((0.0,) * 8,) * 2
        return StageCosts(*rows, none, none, 16, before=0, after=0)

    assert better_split(costs(1, 1), (4, 4), 3.0) is None
    better = better_split(costs(1, 3), (4, 4), 16 * 0.36)
    assert better.layers[0] > better.layers[1] and 0.4 < better.then_s / better.now_s < 0.8
