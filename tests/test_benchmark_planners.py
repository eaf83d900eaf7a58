"""benchmarks/planners.py: its cases, other planners' plans in our words, and what the judge says of them."""

import json
import sys
from argparse import Namespace
from collections import Counter
from math import inf
from pathlib import Path

import pytest

from holmes_ext.errors import HolmesError

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
MODULES = "planners", "harness", "referee"


@pytest.fixture
def planners(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import planners

    yield planners
    for name in [name for name in sys.modules if name.partition(".")[0] in MODULES]:
        sys.modules.pop(name)


@pytest.fixture
def cases(planners):
    return planners.load_cases()


def stage(planners, blocks, *replicas):
    from referee.plans import Stage

    return Stage(blocks, tuple(tuple(replica.split()) for replica in replicas))


def planned(*stages, micro_batch=1, predicted_s=0.0):
    from referee.plans import PlannedJob

    return PlannedJob(tuple(stages), micro_batch, predicted_s)


def gridded(case, plan):
    from referee.plans import gridded

    return gridded(plan, case.site, case.model.layers, case.batch)


def view(cases, name, planner):
    from referee.sailor_files import View

    return View.of(cases[name], planner)


def read(view, planner, *plans):
    from referee.sailor import read

    return list(read(view, planner, json.loads(json.dumps(plans))))


def test_the_cases_are_what_the_issue_asks_for(cases):
    assert Counter(case.run for case in cases.values()) == {"lab": 12, "simulation": 12}
    for run in ("lab", "simulation"):
        own = [case for case in cases.values() if case.run == run]
        assert (
            len({case.model.name for case in own}) == 3 and len({case.batch for case in own}) == 2
        )
        assert {len(case.site.clusters) for case in own} <= set(range(2, 6))
        assert any(case.site.wan for case in own) and not all(case.site.wan for case in own)
        assert any(len(case.gpu_kinds) > 1 for case in own)
    assert all(4 <= case.site.world_size <= 8 for case in cases.values() if case.run == "lab")


def test_a_plan_of_the_grid_stays_as_it_is(planners, cases):
    first, second = stage(planners, 4, "b", "b"), stage(planners, 2, "a", "a")
    grid = gridded(cases["2+2"], planned(first, second, micro_batch=3, predicted_s=1.5))
    assert (grid.nodes, grid.split, grid.micro_batch, grid.changed) == (
        ("b0", "b1", "a0", "a1"),
        (4, 2),
        3,
        (),
    )
    assert (grid.sizes.pipeline, grid.sizes.tensor, grid.sizes.data, grid.predicted_s) == (
        2,
        1,
        2,
        1.5,
    )


def test_sizes_that_differ_by_stage_become_the_nearest_of_the_grid_and_say_so(planners, cases):
    plan = planned(
        stage(planners, 2, "a"), stage(planners, 2, "a"), stage(planners, 4, "b", "b", "b", "b")
    )
    grid = gridded(cases["2+4"], plan)
    assert (grid.sizes.pipeline, grid.sizes.data, grid.split) == (3, 2, (2, 2, 4))
    assert grid.nodes == ("a0", "a1", "b0", "b1", "b2", "b3")
    assert "data sizes 1, 4" in " ".join(grid.changed)


def test_nodes_stay_whole(planners, cases):
    half = stage(planners, 18, *["ib"] * 12, *["roce"] * 20)
    grid = gridded(cases["32+32"], planned(half, stage(planners, 18, *["roce"] * 12, *["ib"] * 20)))
    assert sorted(grid.nodes) == sorted(node.name for node in cases["32+32"].site.nodes)
    assert "nodes stay whole" in " ".join(grid.changed)


def test_gpus_that_are_left_out_are_said(planners, cases):
    grid = gridded(cases["2+4"], planned(stage(planners, 8, "b", "b", "b", "b")))
    assert grid.nodes == ("b0", "b1", "b2", "b3") and "2 of 6 GPUs are left out" in grid.changed


def test_a_stage_with_the_embedding_alone_gets_a_block(planners, cases):
    grid = gridded(
        cases["2+2"],
        planned(*(stage(planners, blocks, one) for blocks, one in zip((0, 2, 4, 0), "aabb"))),
    )
    assert min(grid.split) == 1 and sum(grid.split) == 6


@pytest.mark.parametrize(
    "replicas, what", [(("a", "a", "a"), None), (("z",), "'z'"), (("a",) * 9, "9 GPUs")]
)
def test_a_plan_that_the_case_cannot_hold_is_refused(planners, cases, replicas, what):
    plan = planned(stage(planners, 6, *replicas), micro_batch=1 if what else 7)
    with pytest.raises(HolmesError, match=what):
        gridded(cases["2+2"], plan)


def test_stages_of_sailors_planners_are_read(cases):
    text = {
        "pipeline_list": [
            {
                "layers_per_stage": [[0, 1, 2, 3], [4, 5, 6, 7]],
                "dp": [1, 1],
                "num_stages": 2,
                "tmp_per_stage": [
                    [[[["A100-40", 1, "us-west1-b"]], 1], [[["A100-40", 1, "us-west1-b"]], 1]],
                    [[[["A100-40", 1, "us-central1-a"]], 1]],
                ],
            }
        ],
        "mbs": 2,
        "iter_time": 4.25,
    }
    (plan,) = read(view(cases, "2+2", "SAILOR"), "SAILOR", text)
    assert [one.blocks for one in plan.stages] == [3, 3]
    assert [one.replicas for one in plan.stages] == [(("b",), ("b",)), (("a",),)]
    assert (plan.micro_batch, plan.predicted_s) == (2, 4.25)


def test_milliseconds_of_metis_are_seconds(cases):
    one = {
        "layers_per_stage": [list(range(8))],
        "tmp_per_stage": [[[[["A100-40", 1, "us-central1-a"]], 1]]],
        "dp": [1],
    }
    (plan,) = read(
        view(cases, "2+2", "Metis"),
        "Metis",
        {"pipeline_list": [one], "mbs": 1, "iter_time": 1500.0},
    )
    assert plan.predicted_s == pytest.approx(1.5)


def test_pipelines_of_flashflex_become_replicas(cases):
    gpus = [["A100-40", 1, "us-central1-a"], ["V100-16", 1, "us-central1-a"]]
    one = {
        "layers_per_stage": [[0, 1, 2, 3, 4], [5, 6, 7]],
        "dp": [1, 1],
        "tmp_per_stage": [[[[gpus[0]], 1]], [[[gpus[1]], 1]]],
    }
    (plan,) = read(
        view(cases, "2+2", "FlashFlex"), "FlashFlex", {"pipeline_list": [one, one], "mbs": 1}
    )
    stages = [(own.blocks, own.replicas) for own in plan.stages]
    assert stages == [(4, (("a",), ("a",))), (2, (("b",), ("b",)))]


def test_three_sizes_of_varuna_are_stages_in_the_launchers_order(cases):
    (plan,) = read(
        view(cases, "2+2", "Varuna"),
        "Varuna",
        {"P": 2, "D": 2, "T": 1, "mbs": 4, "estimated_throughput": 0.5},
    )
    assert [own.blocks for own in plan.stages] == [3, 3] and plan.predicted_s == 2.0
    assert [own.gpus for own in plan.stages] == [("a", "a"), ("b", "b")]


def test_a_plan_with_more_gpus_than_there_are_is_refused(cases):
    with pytest.raises(HolmesError, match="more GPUs"):
        read(view(cases, "2+2", "Varuna"), "Varuna", {"P": 2, "D": 4, "T": 1, "mbs": 4})


def test_stages_of_dtfm_keep_their_matching(cases):
    from referee import dtfm

    request = dtfm.request_of(cases["2+2+2 links"])
    assert (request["num_devices"], request["way"], request["partition_size"]) == (6, 3, 2)
    assert request["delay_ms"][0][5] == 20.0 and request["rate_gbps"][0][5] == 0.05
    plan = dtfm.read(cases["2+2"], [[2, 0], [1, 3]])
    assert [one.gpus for one in plan.stages] == [("b", "a"), ("a", "b")]


def test_a_planner_sees_the_pairs_of_clusters(cases):
    zones = view(cases, "2+2+2 links", "SAILOR")
    (a, b, c) = zones.groups
    assert zones.link(a, c) == (50e6 / 8, 0.020) and zones.link(a, b)[0] == 200e6 / 8
    assert zones.link(a, a)[0] == 1e9 / 8
    flat = view(cases, "2+2+2 links", "Varuna")
    (key,) = flat.groups
    assert flat.link(key, key) == (50e6 / 8, 0.020)  # the slowest


@pytest.mark.parametrize("rate, latency", [(1e9, 0.08), (18.75e6, 0.02), (2e11, 2e-6)])
def test_a_rate_is_positive_over_its_messages(planners, rate, latency):
    import numpy as np
    from referee.sailor_files import polynomial

    curve = polynomial(rate, latency, 300, 1e9)
    ends = [np.log2(size / 1e6) for size in (300, 1e9)]
    assert (np.polyval(curve, np.linspace(*ends, 50)) > 0).all()
    assert np.polyval(curve, ends[1]) == pytest.approx(1e9 / (1e9 / rate + latency) / 1e9)


def test_layers_of_a_profile_take_what_our_model_says(cases):
    case = cases["2+2 two GPUs"]
    own = view(cases, "2+2 two GPUs", "SAILOR")
    fast, slow = (own.layers(gpu, 1, 2) for gpu in ("A100-40", "V100-16"))
    assert fast[1]["forward"] * 2 == slow[1]["forward"] and len(fast) == case.model.layers + 2
    assert sum(layer["parameters"] for layer in fast) == pytest.approx(case.model.parameters)


def test_our_plan_is_judged_at_what_it_predicts_and_no_dice_beat_it(planners, cases):
    case = cases["2+2 uplinks"]
    grid, seconds, gap = planners.judge.holmes_plan(case, 20.0)
    ours = planners.judge.simulate_plan(case, grid)
    assert ours.step_s == pytest.approx(grid.predicted_s) and ours.fits and gap >= 0
    others = [
        planners.judge.simulate_plan(case, one).step_s
        for one in planners.judge.random_plans(case, 12)
    ]
    assert ours.step_s <= min(others) * (1 + 1e-9)
    assert max(others) > ours.step_s * 1.05, "the judge tells plans apart"


def test_what_a_careful_person_types_fits_the_memory(planners, cases):
    case = cases["64+32"]
    grid = planners.judge.careful_plan(case)
    assert planners.judge.simulate_plan(case, grid).fits
    assert grid.sizes.tensor * grid.sizes.pipeline > 1, (
        "18 * 10^9 parameters are too many for one GPU"
    )


def test_what_the_file_has_is_not_run_again(planners, cases, tmp_path, monkeypatch):
    args, path = Namespace(limit=20.0, sailor=tmp_path, python=""), tmp_path / "planners.json"
    table = planners.Table(path)
    planners.ask(table, cases["2+2"], "typed", args)
    planners.ask(table, cases["2+2"], "SAILOR", args)
    again = planners.Table(path)
    assert all(again.has("2+2", name, 20.0) for name in ("typed", "SAILOR"))
    assert again.has("2+2", "typed", 30.0) and not again.has("2+2", "SAILOR", 30.0), (
        "no plan, and now more time"
    )
    assert not again.has("2+2", "holmes plan", 20.0)
    assert "git clone" in again.notes["2+2"]["SAILOR"]["no plan"]
    planners.regrets(again, ["2+2"])
    assert again.value("2+2", "typed", planners.REGRET) == 0.0
    assert again.value("2+2", "SAILOR", planners.STEP) is None
    again.add("2+2", "typed", planners.MEASURED, [3.0], "s")
    planners.ask(again, cases["2+2"], "typed", args)  # the same plan: what the lab measured stays
    assert again.value("2+2", "typed", planners.MEASURED) == 3.0
    again.notes["2+2"]["typed"]["split"] = [1]
    planners.ask(again, cases["2+2"], "typed", args)
    assert again.value("2+2", "typed", planners.MEASURED) is None
    again.forget("2+2", "typed")
    assert not again.has("2+2", "typed", 20.0) and again.has("2+2", "SAILOR", 20.0)
    assert again.value("2+2", "typed", planners.STEP) is None


def test_a_run_in_the_lab_is_shared_kept_and_begins_with_ours(
    planners, cases, monkeypatch, tmp_path
):
    """Two planners with one plan, one whose plan does not start: what a run has is not run again."""
    ran, file = [], tmp_path / "rows.json"
    note = {
        "nodes": ["a0", "a1", "b0", "b1"],
        "sizes": [2, 1, 2],
        "split": [3, 3],
        "micro_batch": 1,
        "limit": 1.0,
    }

    def run(case, grid):
        ran.append((case.name, grid.split))
        if grid.split == (5, 1):
            raise HolmesError("no room")
        return planners.lab.Run([2.0, 3.0, 5.0], 1e-7, 0.4)

    monkeypatch.setattr(planners.lab, "run", run)
    table = planners.Table(file)
    for name in ("2+2", "2+2 20 ms"):
        table.notes[name] = {
            "AMP": note | {"split": [5, 1]},
            "typed": dict(note),
            "holmes plan": dict(note),
        }
        for planner, step in (("AMP", 3.0), ("typed", 2.5), ("holmes plan", 2.5)):
            table.add(name, planner, planners.STEP, [step], "s")
    table.save()
    every = [cases["2+2"], cases["2+2 20 ms"]]
    for end in (0.0, inf, inf):  # nothing begins after the first one
        for case, named in planners.in_turns(table, every):
            planners.run_in_lab(table, case, named, end)
        table = planners.Table(file)
    assert ran == [("2+2", (3, 3)), ("2+2 20 ms", (3, 3)), ("2+2", (5, 1)), ("2+2 20 ms", (5, 1))]
    assert table.value("2+2", "typed", planners.MEASURED) == 3.0
    assert "no room" in table.notes["2+2"]["AMP"]["lab"]


def test_a_planner_that_is_late_is_cut_and_asked_with_more_time(
    planners, cases, monkeypatch, tmp_path
):
    def late(case, planner, args):
        raise HolmesError(f"no plan within {args.limit:g} CPU s")

    monkeypatch.setattr(planners, "plans_of", late)
    table, names = planners.Table(tmp_path / "rows.json"), ["2+2", "2+4", "3+5", "2+2+4"]
    for limit in (10.0, 60.0):
        for name in names:
            assert not table.has(name, "Metis", limit)
            planners.ask(table, cases[name], "Metis", Namespace(limit=limit))
            assert table.has(name, "Metis", limit)
        reasons = [table.notes[name]["Metis"][planners.NONE] for name in names]
        assert [reason.startswith("not asked") for reason in reasons] == [False, False, False, True]
