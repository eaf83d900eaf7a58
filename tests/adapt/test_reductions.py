"""New decisions on how gradients are summed.

The cases: the networks are as fast as the sums on them were, a sum changes, a change is taken back.
"""

from dataclasses import replace

import pytest
from clusters import site

from holmes_ext.adapt.reductions import (
    MeasuredReductions,
    ReductionEvaluator,
    is_hierarchical,
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
    """Return a plan in which four ranks of a node share its fast NIC.

    On such an Ethernet, a hierarchical all-reduce is then slower than one ring.
    """
    clusters = site(
        f"a ib {fast} a[0-1]", f"b roce {fast} b[0-1]", ethernet=ethernet, processes=processes
    )
    return build_plan(clusters, Sizes(), options=OPTIONS)


def summed(plan, slower=1.0):
    """Return the sums of a job on an Ethernet where each takes `slower` times what the plan's rate says."""
    (reduction,) = plan.traffic_of("sockets").reductions
    decided = decisions(replace(plan, workload=replace(plan.workload, gradient_bytes=SIZE)), *KNOWN)
    (sums,) = decided.prices.family_reductions(decided.placement, 0)
    if is_hierarchical(reduction, SIZE):
        busy = {"ethernet": slower * sums.hierarchical.across.seconds(SIZE)}
        seconds = max(*busy.values(), sums.hierarchical.inside.seconds(SIZE))
    else:
        busy = {"ethernet": slower * sums.flat.seconds(SIZE)}
        seconds = busy["ethernet"]
    return [MeasuredReductions(reduction, SIZE, seconds, seconds, busy)]


def evaluator():
    return ReductionEvaluator(*KNOWN)


def test_a_network_is_as_fast_as_the_sums_on_it():
    plan = plan_of("1Gb/s")
    assert not plan.traffic_of("sockets").reductions[0].clusters
    rates = {
        one.name: one.rate_bps for one in measured_networks(plan, *KNOWN, summed(plan, 20)).fabrics
    }
    assert rates["ethernet"] == pytest.approx(5e7, rel=0.01)
    assert {rate for name, rate in rates.items() if name != "ethernet"} == {1_200_000_000}


def test_one_ring_becomes_hierarchical_where_ethernet_is_slower_than_told():
    plan, own = plan_of("1Gb/s"), evaluator()
    slow = summed(plan, 20)
    change = own.next(plan, slow, 2.5 + slow[0].seconds)
    assert is_hierarchical(change.after[0], SIZE) and not is_hierarchical(change.before[0], SIZE)
    assert "hierarchically" in change.text and "were in one ring" in change.text
    own.taken(change, plan, slow)
    after = change.adapted(plan, "sockets")
    assert after.traffic_of("sockets").reductions == change.after
    then = summed(after, 20)
    assert then[0].seconds < slow[0].seconds / 1.5
    assert change.then_s == pytest.approx(2.5 + then[0].seconds, rel=0.02)
    assert own.next(after, then, change.then_s) is None and own.trials.ended == (
        change,
        change.then_s,
        True,
    )


def test_what_was_told_rightly_changes_nothing():
    for ethernet in ("1Gb/s", "20Mb/s"):
        plan, own = plan_of(ethernet), evaluator()
        for _ in range(4):
            right = summed(plan)
            assert own.next(plan, right, 2.5 + right[0].seconds) is None


def test_hierarchical_become_one_ring_where_ethernet_is_faster_than_told():
    plan, own = plan_of("50Mb/s", fast="150Mb/s", processes=1), evaluator()
    assert plan.traffic_of("sockets").reductions[0].clusters
    fast = summed(plan, 1 / 50)
    change = own.next(plan, fast, fast[0].seconds + 0.1)
    assert change is not None and not is_hierarchical(change.after[0], SIZE)


def test_what_brings_nothing_is_taken_back_and_not_tried_again():
    plan, own = plan_of("1Gb/s"), evaluator()
    slow = summed(plan, 20)
    step_s = 2.5 + slow[0].seconds
    change = own.next(plan, slow, step_s)
    own.taken(change, plan, slow)
    after = change.adapted(plan, "sockets")
    same = [replace(slow[0], reduction=change.after[0])]
    back = own.next(after, same, step_s)
    assert back.takes_back and back.after == change.before
    own.taken(back, after, same)
    for _ in range(4):
        assert own.next(plan, slow, step_s) is None
    slower = summed(plan, 40)  # another network: it may help now
    assert own.next(plan, slower, 2.5 + slower[0].seconds) is not None


def test_a_sum_that_the_backward_pass_hides_is_left():
    plan = plan_of("1Gb/s")
    hidden = [replace(summed(plan, 20)[0], exposed_s=0.0)]
    assert evaluator().next(plan, hidden, 20.0) is None
