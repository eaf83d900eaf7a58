"""Closed form, simulation, bound and explanation agree for 300 random sites, models and engines.

They are equal where nothing contends, and ordered where something does. Better hardware is never
predicted slower.

What contends: a reduction with the backward pass that it travels under, the steps of a chunk hierarchically
with those of the next, and in a pipeline messages with each other.
"""

import random
from dataclasses import replace

import clusters
import pytest

from holmes_ext.options import Options
from holmes_ext.patches.traits import ENGINES
from holmes_ext.plan.cost.model import Gpu, Model
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.cost.stages import estimate, predict
from holmes_ext.plan.engine import rules_of
from holmes_ext.planner.search.changed import what_if, with_fabric
from holmes_ext.planner.search.evaluate import Evaluator
from holmes_ext.planner.search.result import SearchResult
from holmes_ext.planner.search.search import search
from holmes_ext.planner.search.simulated import job_of, timed
from holmes_ext.planner.search.space import Limits
from holmes_ext.planner.search.stock import causes
from holmes_ext.planner.simulate.repeat import folded_s


def random_job(seed):
    rng = random.Random(seed)
    nodes, processes = rng.choice((1, 2, 2)), rng.choice((1, 1, 2))
    names = "abc"[: rng.choice((1, 2, 2, 3))]
    listed = [
        f"{name} {rng.choice(('ib', 'roce'))} {rng.choice((25, 50, 100))}Gb/s {name}[0-{nodes - 1}]"
        if nodes > 1
        else f"{name} ib 100Gb/s {name}0"
        for name in names
    ]
    site = clusters.site(*listed, ethernet=f"{rng.choice((1, 5, 25))}Gb/s", processes=processes)
    gpus = {"b": Gpu(rng.choice((10e12, 20e12)))} if rng.random() < 0.4 else {}
    model = Model(
        layers=rng.choice((4, 6)),
        hidden=512,
        heads=8,
        sequence=256,
        vocabulary=4000,
        tied=rng.random() < 0.3,
        micro_batches=1,
        gpu=Gpu(20e12),
        gpus=gpus,
    )
    engine = ENGINES[rng.choice(sorted(ENGINES))]
    overlap = rng.random() < 0.5
    rules = rules_of(engine, Options(), overlap=overlap)
    limits = Limits(
        {
            **engine.limits,
            "micro_batch": (1,),
            "recompute": ("none",),
            "context": (1,),
            "expert": (1,),
        }
    )
    return SearchResult(Network(site), model, 24, limits, rules, engine)


def slow_stage_links(seed):
    """Return a job whose stages send over a slow Ethernet.

    The job has three or more stages, which send through the NICs of their nodes. As many micro-batches
    are in flight as hide the transfers.
    """
    rng = random.Random(seed)
    names, nodes, processes = (
        "abcd"[: rng.choice((2, 3, 4))],
        rng.choice((1, 1, 2)),
        rng.choice((1, 2)),
    )
    listed = [
        f"{name} ib 50Gb/s {name}[0-{nodes - 1}]" if nodes > 1 else f"{name} ib 50Gb/s {name}0"
        for name in names
    ]
    ethernet = f"{rng.choice((100, 200, 400, 800, 1600, 5000))}Mb/s"
    site = clusters.site(*listed, ethernet=ethernet, processes=processes)
    model = Model(
        layers=8,
        hidden=512,
        heads=8,
        sequence=256,
        vocabulary=4000,
        tied=rng.random() < 0.5,
        micro_batches=1,
        gpu=Gpu(20e12),
    )
    stages = tuple(count for count in (2, 3, 4) if site.world_size % count == 0)
    limits = Limits(
        {
            **dict.fromkeys(("tensor", "context", "expert", "virtual", "micro_batch"), (1,)),
            "recompute": ("none",),
            "zero": (0,),
            "pipeline": stages,
        }
    )
    engine = ENGINES["deepspeed"]
    return SearchResult(Network(site), model, 24, limits, rules_of(engine, Options()), engine)


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_the_closed_form_knows_what_a_nic_sends(first):
    """The closed form counts both directions of a NIC.

    It used to end up to 2.1 times too early where the stages in the middle of a pipeline send
    activations and gradients through one NIC.
    """
    for seed in range(first, first + 20):
        found = search(slow_stage_links(seed), rows=3, prove=False)
        for one in found.candidates[:3]:
            timed_one = timed(found, one)
            assert timed_one.in_flight
            walked_s = predict(found.costs(timed_one), timed_one.split).step_s
            assert walked_s * (1 - 1e-9) <= timed_one.simulated_s <= 1.15 * walked_s, seed


@pytest.mark.parametrize("flops, slower", [(1e12, "computing"), (1e15, "sending")])
def test_the_next_layers_weights_travel_while_a_layer_computes(flops, slower):
    """FSDP2 over NCCL: what computes, or what travels, and little more; over gloo one after the other."""
    site = clusters.site("a ib 100Gb/s a[0-3]", ethernet="10Gb/s", processes=1)
    model = Model(
        layers=12,
        hidden=1024,
        heads=8,
        sequence=512,
        vocabulary=4000,
        tied=False,
        micro_batches=1,
        gpu=Gpu(flops),
    )
    engine, steps = ENGINES["fsdp2"], {}
    limits = Limits({**engine.limits, "micro_batch": (1,), "recompute": ("none",)})
    for direct in (False, True):
        rules = rules_of(engine, Options(), direct)
        found = search(
            SearchResult(Network(site), model, 4, limits, rules, engine), rows=1, prove=False
        )
        one = timed(found, found.best)
        why = causes(found, one)
        assert one.simulated_s - why["optimizer"] == pytest.approx(one.formula_s, rel=0.03)
        steps[direct] = one.formula_s
    computes = why["compute"]
    sends = steps[True] - computes
    assert 0.99 * max(computes, sends) < steps[False] < 1.2 * max(computes, sends)
    assert (computes > sends) == (slower == "computing")


def agree(job, one):
    """Check that a candidate's prices agree, and return the seconds of its simulated step."""
    shape, timed_one = one.shape, timed(job, one)
    why = causes(job, timed_one)
    assert sum(why.values()) == pytest.approx(timed_one.simulated_s)
    closed = replace(one, simulated_s=0.0)
    assert sum(causes(job, closed).values()) == pytest.approx(one.formula_s)
    costs = job.costs(timed_one)
    # the closed form leaves the optimizer out
    simulated_s = timed_one.simulated_s - why["optimizer"]
    sums = set(one.reductions) - {"none", "local"}
    if shape.pipeline == 1 and not (job.rules.overlap and sums) and "hierarchical" not in sums:
        most = 1.001
        if job.rules.prefetch:  # not all hides; the owners' sums follow the scatters inside
            most = 1.25 if "hybrid" in sums else 1.01
        assert one.formula_s * 0.999 <= simulated_s <= one.formula_s * most
    elif shape.virtual == 1:
        assert simulated_s >= 0.9 * predict(costs, timed_one.split).step_s
    else:
        assert simulated_s >= 0.9 * estimate(costs, timed_one.split).step_s
    bound = Evaluator(job).lower_bound(shape, timed_one.placement, costs)
    assert bound.seconds(1e9) <= timed_one.simulated_s * (1 + 1e-9)
    return timed_one.simulated_s


def not_slower(job, one, step_s):
    """Check the same plan with twice the rate of any fabric, and with half its latency.

    Where a stage in the middle sends both ways through one NIC, in the framework's own schedule, a
    message that comes earlier may share the NIC with one that is waited for. Then the simulation
    (not the closed form, nor the search) takes up to 5.1 % longer with half the latency. On NICs
    that have room for both messages it does not.
    """
    shared = one.shape.pipeline > 2 and not one.in_flight
    for fabric in job.network.site.fabrics:
        for change in ({"rate": 2.0}, {"latency": 0.5}):
            most = 1.052 if shared and "latency" in change else 1.001
            better = job.on(Network(with_fabric(job.network.site, fabric.name, **change)))
            again = better.candidate(one.shape, one.placement, one.split)
            assert again.formula_s <= one.formula_s * 1.001
            kept = folded_s(job_of(better, again, in_flight=one.in_flight))
            assert min(kept, timed(better, again).simulated_s) <= step_s * most
            if most > 1.01:
                assert with_room_s(better, again) <= with_room_s(job, one) * 1.001


def with_room_s(job, one):
    """Return the step on NICs that carry several messages, each at the full rate of one."""
    roomy = job_of(job, one)
    roomy.capacities = {nic: 8 * bps for nic, bps in roomy.capacities.items()}
    return roomy.step().step_s


@pytest.mark.full(share=4)
@pytest.mark.parametrize("first", range(0, 300, 20))
def test_all_that_price_a_step_agree(first):
    for seed in range(first, first + 20):
        found = search(random_job(seed), rows=3, prove=False)
        steps = [agree(found, one) for one in found.candidates[:3]]
        not_slower(found, found.best, steps[0])


@pytest.mark.full(share=4)
@pytest.mark.parametrize("seed", range(0, 300, 25))
def test_better_hardware_is_not_slower_by_more_than_the_optimality_gap(seed):
    found = search(random_job(seed), rows=3, prove=True, seconds=2.0)
    assert found.optimality_gap.bound_s <= found.best.simulated_s
    for what, step_s in what_if(found):
        if not what.startswith("one node moved"):
            assert step_s <= found.best.step_s * (1 + found.optimality_gap.gap + 1e-9), what
