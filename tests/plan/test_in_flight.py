"""How many micro-batches a plan has under way: as hide the stage links, as memory holds, as the user asks."""

from dataclasses import replace
from pathlib import Path

import pytest
from clusters import site

from holmes_ext.options import Options
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.cost.model import Gpu, load_model
from holmes_ext.plan.maker import complete_plan, with_loads
from holmes_ext.plan.plan import more_bytes, parse_plan
from holmes_ext.plan.sizes import Sizes

SITE = site("a ib 200Gb/s a[0-3]", "b roce 200Gb/s b[0-3]", ethernet="2Gb/s")
MODEL = replace(
    load_model(Path(__file__).parents[2] / "examples/models/gpt_7.5b.toml"), global_batch=512
)


def held(model=MODEL, options=Options(), stages=2, **more):
    plan = build_plan(SITE, Sizes(stages), model=model, options=options, **more)
    return plan, plan.traffic_of("sockets").in_flight


def test_a_slow_stage_link_takes_as_many_as_hide_it_and_memory_as_many_as_it_holds():
    plan, free = held(replace(MODEL, gpu=Gpu(MODEL.gpu.flops)))
    assert free[0] >= 3 and free[-1] == 1 and plan.loads[0].most == float("inf")
    kept = plan.loads[0].kept_bytes
    for room in range(2, free[0] + 2):
        limit = plan.loads[0].fixed_bytes + (room + 0.5) * kept
        capped, found = held(replace(MODEL, gpu=Gpu(MODEL.gpu.flops, limit)))
        assert found[0] == min(room, free[0]) and capped.loads[0].bytes_of(found[0]) <= limit
        assert (
            more_bytes(capped)[0] == pytest.approx((found[0] - 2) * kept)
            and more_bytes(capped)[-1] == 0
        )
        assert capped.predicted["step_seconds"] >= plan.predicted["step_seconds"]


def test_fewer_in_flight_take_longer():
    whole, _ = held(replace(MODEL, gpu=Gpu(MODEL.gpu.flops)))
    engines, none = held(options=Options(inflight="off"))
    assert none == () and more_bytes(engines) == ()
    assert whole.predicted["step_seconds"] < 0.9 * engines.predicted["step_seconds"]


def test_what_the_user_asks_for_is_taken_and_told():
    plan, found = held(replace(MODEL, gpu=Gpu(MODEL.gpu.flops, 1e9)), Options(inflight="3"))
    assert found == (5, 1) and more_bytes(plan)[0] == pytest.approx(3 * plan.loads[0].kept_bytes)


def test_a_command_lines_model_is_enough():
    """The job's own plan is made of a Workload; its model tells the memory afterwards, once."""
    sizes = Sizes(2).complete(8)
    small = replace(MODEL, gpu=Gpu(MODEL.gpu.flops, held()[0].loads[0].bytes_of(2.5)))
    plan = build_plan(SITE, sizes, MODEL.workload(sizes), basis=MODEL.source)
    assert not plan.loads and plan.traffic_of("sockets").in_flight == (3, 1)
    known = with_loads(plan, Options(), small)
    assert known.traffic_of("sockets").in_flight == (2, 1) == known.traffic_of("verbs").in_flight
    assert parse_plan(known.to_json(), known.source) == known
    assert with_loads(known, Options(), MODEL) is known  # decided once
    assert with_loads(plan, Options(), replace(MODEL, layers=1)) is plan  # the framework refuses it
    four = complete_plan(known, Sizes(4).complete(8), Options(), small)
    assert len(four.loads) == 4 and len(four.traffic_of("sockets").in_flight) == 4
    nobody = build_plan(SITE, sizes)
    assert with_loads(nobody, Options(), None) is nobody and nobody.traffic_of(
        "sockets"
    ).in_flight == (2, 1)


def test_stage_links_that_take_next_to_nothing_are_the_frameworks():
    """One cluster: nothing is worth hiding, the plan's step is that of the framework's own schedule."""
    one = site("a ib 200Gb/s a[0-3]", ethernet="2Gb/s")
    plan = build_plan(one, Sizes(2), model=MODEL)
    assert plan.traffic_of("sockets").in_flight == () and plan.loads
    off = build_plan(one, Sizes(2), model=MODEL, options=Options(inflight="off"))
    assert plan.predicted == off.predicted
