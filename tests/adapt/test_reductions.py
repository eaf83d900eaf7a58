"""Sums of gradients decided again: networks as fast as the sums on them were, what is changed, what
is taken back."""

from dataclasses import replace

import pytest
from clusters import site

from holmes_ext.adapt.reductions import (
    RoundsApart,
    SumEvaluator,
    Summed,
    in_two_levels,
    measured_networks,
)
from holmes_ext.options import Options
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.decide import decisions
from holmes_ext.plan.engine import EngineTraits
from holmes_ext.plan.sizes import Sizes

OPTIONS, ENGINE, SIZE = Options(), EngineTraits(), 64e6
KNOWN = "sockets", OPTIONS, ENGINE


def plan_of(ethernet, fast="1.2Gb/s", processes=4):
    """Four ranks of a node share its fast NIC, which makes two levels slower than one ring on such an
    Ethernet."""
    clusters = site(f"a ib {fast} a[0-1]", f"b roce {fast} b[0-1]", ethernet=ethernet, processes=processes)
    return build_plan(clusters, Sizes(), options=OPTIONS)


def summed(plan, slower=1.0):
    """The sums of a job on whose Ethernet all takes `slower` times what the plan's rate says."""
    (reduction,) = plan.traffic_of("sockets").reductions
    decided = decisions(replace(plan, workload=replace(plan.workload, gradient_bytes=SIZE)), *KNOWN)
    (sums,) = decided.prices.sums(decided.placement, 0)
    if in_two_levels(reduction, SIZE):
        busy = {"ethernet": slower * sums.both.across.seconds(SIZE)}
        seconds = max(*busy.values(), sums.both.inside.seconds(SIZE))
    else:
        busy = {"ethernet": slower * sums.flat.seconds(SIZE)}
        seconds = busy["ethernet"]
    return [Summed(reduction, SIZE, seconds, seconds, busy)]


def evaluator():
    return SumEvaluator(*KNOWN)


def test_a_network_is_as_fast_as_the_sums_on_it():
    plan = plan_of("1Gb/s")
    assert not plan.traffic_of("sockets").reductions[0].clusters
    rates = {one.name: one.rate_bps for one in measured_networks(plan, *KNOWN, summed(plan, 20)).fabrics}
    assert rates["ethernet"] == pytest.approx(5e7, rel=0.01)
    assert {rate for name, rate in rates.items() if name != "ethernet"} == {1_200_000_000}


def test_one_ring_becomes_two_levels_where_ethernet_is_slower_than_told():
    plan, own = plan_of("1Gb/s"), evaluator()
    slow = summed(plan, 20)
    change = own.next(plan, slow, 2.5 + slow[0].seconds)
    assert in_two_levels(change.after[0], SIZE) and not in_two_levels(change.before[0], SIZE)
    assert "in two levels" in change.text and "were in one ring" in change.text
    own.taken(change, plan, slow)
    after = change.adapted(plan, "sockets")
    assert after.traffic_of("sockets").reductions == change.after
    then = summed(after, 20)
    assert then[0].seconds < slow[0].seconds / 1.5
    assert change.then_s == pytest.approx(2.5 + then[0].seconds, rel=0.02)
    assert own.next(after, then, change.then_s) is None and own.trials.ended == (change, change.then_s, True)


def test_what_was_told_rightly_changes_nothing():
    for ethernet in ("1Gb/s", "20Mb/s"):
        plan, own = plan_of(ethernet), evaluator()
        for _ in range(4):
            right = summed(plan)
            assert own.next(plan, right, 2.5 + right[0].seconds) is None


def test_two_levels_become_one_ring_where_ethernet_is_faster_than_told():
    plan, own = plan_of("50Mb/s", fast="150Mb/s", processes=1), evaluator()
    assert plan.traffic_of("sockets").reductions[0].clusters
    fast = summed(plan, 1 / 50)
    change = own.next(plan, fast, fast[0].seconds + 0.1)
    assert change is not None and not in_two_levels(change.after[0], SIZE)


def test_what_brings_nothing_is_taken_back_and_not_tried_again():
    plan, own = plan_of("1Gb/s"), evaluator()
    slow = summed(plan, 20)
    step_s = 2.5 + slow[0].seconds
    change = own.next(plan, slow, step_s)
    own.taken(change, plan, slow)
    after = change.adapted(plan, "sockets")
    same = [replace(slow[0], reduction=change.after[0])]
    back = own.next(after, same, step_s)
    assert back.back and back.after == change.before
    own.taken(back, after, same)
    for _ in range(4):
        assert own.next(plan, slow, step_s) is None
    slower = summed(plan, 40)  # another network: it may help now
    assert own.next(plan, slower, 2.5 + slower[0].seconds) is not None


def test_a_sum_that_the_backward_pass_hides_is_left():
    plan = plan_of("1Gb/s")
    hidden = [replace(summed(plan, 20)[0], exposed_s=0.0)]
    assert evaluator().next(plan, hidden, 20.0) is None


APART, ROUNDS = Options(apart="2"), RoundsApart(every=32, fragments=4, delay=5)


def apart_evaluator():
    return SumEvaluator("sockets", APART, ENGINE, ROUNDS)


def gone_apart(slower):
    """(evaluator, plan, change) of a job that computes 1 s a step, whose clusters are apart."""
    plan, own = plan_of("50Mb/s"), apart_evaluator()
    found = summed(plan, slower)
    change = own.next(plan, found, 1.0 + found[0].seconds)
    own.taken(change, plan, found)
    return own, change.adapted(plan, "sockets"), change


def apart_summed(change, round_s):
    return [Summed(change.after[0], SIZE, 0.1, 0.1, {}, round_s=round_s)]


def test_clusters_go_apart_where_the_network_between_them_is_too_slow():
    plan = plan_of("50Mb/s")
    assert plan.traffic_of("sockets").reductions[0].clusters
    found = summed(plan)
    assert apart_evaluator().next(plan, found, 100 + found[0].seconds) is None  # not twice as long
    own, _, change = gone_apart(1)
    assert change.after[0].apart == 32 and "inside each cluster only" in change.text
    # 5 steps hide a fourth of the sum: only gradients inside the clusters are left of it
    assert 1 < change.then_s < 3 < change.now_s / 2


def test_clusters_go_apart_at_once_where_another_sum_would_not_be_enough():
    for ethernet, slower, apart in (("1Gb/s", 400, True), ("1Gb/s", 20, False)):
        plan = plan_of(ethernet)
        found = summed(plan, slower)
        change = apart_evaluator().next(plan, found, 2.5 + found[0].seconds)
        assert bool(change.after[0].apart) == apart, (slower, change)


def test_nobody_goes_apart_unasked_or_where_weights_cannot_be_averaged():
    plan = plan_of("50Mb/s")
    found = summed(plan)
    step_s = 1.0 + found[0].seconds
    assert evaluator().next(plan, found, step_s) is None
    assert apart_evaluator().next(plan, [replace(found[0], why_not_apart="for a reason")], step_s) is None


def test_clusters_come_back_when_a_round_is_quick_again():
    own, plan, change = gone_apart(1)
    slow, fast = apart_summed(change, 5.0), apart_summed(change, 0.5)
    for found in (apart_summed(change, 0.0), slow, slow):  # no round yet; as slow as before
        assert own.next(plan, found, 2.7) is None
    back = own.next(plan, fast, 2.7)
    assert back.together and back.after == change.before and back.then_s == pytest.approx(3.2)
    own.taken(back, plan, fast)
    assert own.trials.running is None


def test_apart_that_brings_nothing_is_taken_back():
    own, plan, change = gone_apart(1)
    as_long = [replace(apart_summed(change, 0.0)[0], exposed_s=change.now_s - 1.0)]
    back = own.next(plan, as_long, change.now_s)
    assert back.together and back.after == change.before
    own.taken(back, plan, as_long)
    now = back.adapted(plan, "sockets")
    assert own.next(now, summed(now), change.now_s) is None
