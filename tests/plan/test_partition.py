"""stages: balanced against brute force and a MILP; the paper's formula; bad input."""

import random
from dataclasses import replace
from itertools import combinations
from math import inf, nan

import pytest
from one_forward_one_backward import simulate

from holmes_ext.errors import HolmesError
from holmes_ext.plan import partition as partition_of
from holmes_ext.plan.cost.pipeline import uniform
from holmes_ext.plan.cost.stages import StageCosts, estimate, predict
from holmes_ext.plan.partition import (
    METHODS,
    balanced,
    by_moves,
    by_speed,
    in_closed_form,
    partition,
    speeds,
)


def splits(blocks, stages):
    for cuts in combinations(range(1, blocks), stages - 1):
        borders = (0, *cuts, blocks)
        yield tuple(b - a for a, b in zip(borders, borders[1:]))


def scaled(row, factor):
    return tuple(value * factor for value in row)


def random_costs(rng, stages, blocks, alike=False, limits=True):
    """Return layers of any cost (or alike blocks), and stages of up to 3 kinds of GPU and NIC.

    They come with and without overlap, limits and tied embeddings.
    """
    before, after = rng.randint(0, 2), rng.randint(0, 2)
    layers = before + blocks + after

    def row():
        if alike:
            return (
                [rng.random()] * before + [rng.choice((1.0, 2.0))] * blocks + [rng.random()] * after
            )
        return [
            rng.choice((0.0, 0.1, 0.5, 1.0, 2.0)) * rng.choice((1, rng.random()))
            for _ in range(layers)
        ]

    forward, backward, reduction = row(), row(), row()
    transfer = (
        [rng.random() * rng.choice((0.0, 0.1, 2.0))] * layers if rng.random() < 0.5 else row()
    )
    kinds = [(rng.choice((1.0, 1.5, 2.0)), rng.choice((1.0, 0.3, 3.0))) for _ in range(3)]
    kind = [rng.choice(kinds) for _ in range(stages)]
    limit = tuple(rng.choice((inf, rng.uniform(3, 10) * blocks / stages)) for _ in range(stages))
    return StageCosts(
        forward_s=tuple(scaled(forward, gpu) for gpu, _ in kind),
        backward_s=tuple(scaled(backward, gpu) for gpu, _ in kind),
        reduction_s=tuple(scaled(reduction, nic) for _, nic in kind),
        transfer_s=tuple(scaled(transfer, rng.choice((0.0, 1.0, 3.0))) for _ in range(stages)),
        micro_batches=rng.choice((1, 2, 3, 8, 64)),
        latency_s=tuple(rng.random() * 0.1 for _ in range(stages)),
        state_bytes=tuple(row()),
        kept_bytes=tuple(row()),
        limit_bytes=limit if limits and rng.random() < 0.4 else (),
        before=before,
        after=after,
        tied_s=rng.choice((0.0, 0.0, 0.5, 3.0)),
        overlap=rng.random() < 0.5,
    )


def two_kinds(factor=1.0, reduction=(0.1, 0.1), blocks=8, micro=8, **more):
    """Two stages, the second's GPUs `factor` times as slow; equal layers of 1 s forward and 2 s backward."""
    rows = (1.0,) * blocks, (factor,) * blocks
    return StageCosts(
        forward_s=rows,
        backward_s=tuple(scaled(row, 2.0) for row in rows),
        reduction_s=tuple((value,) * blocks for value in reduction),
        transfer_s=((0.0,) * blocks,) * 2,
        micro_batches=micro,
        before=0,
        after=0,
        **more,
    )


@pytest.mark.full(share=4)
def test_balanced_is_the_best_of_all_splits():
    rng, unfit = random.Random(1), 0
    for case in range(1500):
        stages = rng.randint(1, 5)
        costs = random_costs(rng, stages, rng.randint(stages, 8), alike=rng.random() < 0.3)
        outcomes = [predict(costs, split) for split in splits(costs.blocks, stages)]
        fitting = [outcome.step_s for outcome in outcomes if all(outcome.fits)]
        if not fitting:
            unfit += 1
            with pytest.raises(HolmesError, match="memory|needs"):
                balanced(costs)
            continue
        found = predict(costs, balanced(costs))
        assert all(found.fits) and found.step_s == pytest.approx(min(fitting), rel=2e-7), case
    assert 20 < unfit < 1000


def milp_step(costs):
    """Return the least step by scipy's MILP solver.

    The solver has a path of segments (stage, start, stop), P and the end as in plan/partition.py.
    """
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    stages, blocks, last = costs.stages, costs.blocks, costs.stages - 1
    segments = [
        (s, i, j)
        for s in range(stages)
        for i in range(blocks)
        for j in range(i + 1, blocks + 1)
        if (i == 0) == (s == 0) and (j == blocks) == (s == last)
    ]
    pace, end = len(segments), len(segments) + 1
    rows, lower = [], []

    def row(entries, least):
        line = np.zeros(end + 1)
        for column, value in entries:
            line[column] += value
        rows.append(line)
        lower.append(least)

    cost = {}
    for column, (s, i, j) in enumerate(segments):
        low, high = costs.bounds(i, j)
        x = costs.transfer_s[s][high - 1] if s < last else 0.0
        cost[column] = (
            sum(costs.forward_s[s][low:high]),
            sum(costs.backward_s[s][low:high]),
            x,
            costs.exposed_s(s, low, high),
        )
    of = [[c for c, segment in enumerate(segments) if segment[0] == s] for s in range(stages)]
    for s in range(stages):
        row([(c, 1) for c in of[s]], 1)
        row([(c, -1) for c in of[s]], -1)
        for i in range(1, blocks) if s else ():  # what ends at i is continued at i
            flow = [(c, 1) for c in of[s - 1] if segments[c][2] == i] + [
                (c, -1) for c in of[s] if segments[c][1] == i
            ]
            row(flow, 0)
            row([(c, -value) for c, value in flow], 0)
        busy = [(c, -(cost[c][0] + cost[c][1])) for c in of[s]]
        tail = [
            (c, -(cost[c][0] + cost[c][1] + 2 * cost[c][2]))
            for t in range(s, stages)
            for c in of[t]
        ]
        row([(pace, 1), *busy], 0)
        for t in range(s, stages):
            run = [
                (c, -(cost[c][0] + cost[c][1] + 2 * cost[c][2] * (u < t)))
                for u in range(s, t + 1)
                for c in of[u]
            ]
            row([(pace, t - s + 1), *run], 0)
        ahead = [(c, -(cost[c][0] + cost[c][2])) for t in range(s) for c in of[t]]
        row([(end, 1), *ahead, *tail, *((c, -cost[c][3]) for c in of[s])], 0)
    whole = [(c, -(cost[c][0] + cost[c][1] + 2 * cost[c][2])) for c in cost]
    if tied := costs.tied_s * (costs.stages > 1):
        for s in (0, last):
            row([(end, 1), *whole, *((c, -cost[c][3]) for c in of[s])], tied)
    goal = np.zeros(end + 1)
    goal[pace], goal[end] = costs.micro_batches - 1, 1
    upper = np.array([1.0] * len(segments) + [np.inf] * 2)
    found = milp(
        goal,
        constraints=LinearConstraint(np.array(rows), lower, np.inf),
        integrality=[1] * len(segments) + [0, 0],
        bounds=Bounds(0, upper),
        options={"mip_rel_gap": 1e-9},
    )
    assert found.success, found.message
    return found.fun


@pytest.mark.full(share=4)
@pytest.mark.parametrize("seed", range(4))
def test_balanced_is_what_a_milp_solver_finds(seed):
    pytest.importorskip("scipy")
    rng = random.Random(seed)
    costs = random_costs(rng, 3 + seed % 3, 11 + seed, alike=seed % 2 == 0, limits=False)
    least, moved = milp_step(costs), min(in_closed_form(costs, split) for split in by_moves(costs))
    assert least * (1 - 1e-6) <= moved <= least * 1.05
    assert (
        predict(costs, balanced(costs)).step_s <= 1.1 * least
    )  # the formula leaves some waiting out


def test_128_layers_on_64_stages():
    """How long that takes is in benchmarks/stages_speed.py."""
    rng = random.Random(3)
    rows = {
        gpu: (0.1 * gpu, *(gpu * rng.uniform(0.9, 1.1) for _ in range(128)), 0.6 * gpu)
        for gpu in (1.0, 1.5)
    }
    kinds = [1.0] * 32 + [1.5] * 32
    costs = StageCosts(
        forward_s=tuple(rows[kind] for kind in kinds),
        backward_s=tuple(scaled(rows[kind], 2.0) for kind in kinds),
        reduction_s=tuple((2.0 * kind,) * 130 for kind in kinds),
        transfer_s=((0.01,) * 130,) * 64,
        micro_batches=128,
    )
    steps = [estimate(costs, partition(method, costs)).step_s for method in METHODS]
    assert estimate(costs, balanced(costs)).step_s == min(steps) < 0.9 * steps[0]


def test_balanced_pass_by_pass(monkeypatch):
    """Where splits are many: never slower than the other two, nearly always the best of all."""
    monkeypatch.setattr(partition_of, "MOST_FORMULAS", 40)
    rng, missed = random.Random(5), 0
    for _ in range(150):
        costs = random_costs(rng, rng.randint(1, 4), rng.randint(6, 9), alike=True)
        fitting = [
            one.step_s
            for one in (predict(costs, split) for split in splits(costs.blocks, costs.stages))
            if all(one.fits)
        ]
        if not fitting:
            continue
        found = predict(costs, partition("balanced", costs))
        others = [predict(costs, partition(method, costs)) for method in ("uniform", "speed")]
        assert all(found.fits) and found.step_s <= min(
            (one.step_s for one in others if all(one.fits)), default=found.step_s
        )
        assert found.step_s < 1.1 * min(fitting)
        missed += found.step_s > min(fitting) * (1 + 1e-6)
    assert missed < 12


def test_slower_gpus_get_fewer_layers():
    assert balanced(two_kinds(1.0)) == (4, 4)
    assert balanced(two_kinds(1.5, blocks=10)) == (6, 4)
    assert (
        estimate(two_kinds(1.5, blocks=10), (5, 5)).step_s
        > 1.1 * estimate(two_kinds(1.5, blocks=10), (6, 4)).step_s
    )


def test_a_slow_nic_at_the_end_is_hidden_unless_it_is_exposed():
    """The last stage's reduction runs under the first one's backward: only what sticks out moves layers."""
    assert balanced(two_kinds(reduction=(0.0, 1.0), micro=4)) == (4, 4)
    assert balanced(two_kinds(reduction=(0.0, 9.0), micro=1)) == (7, 1)
    assert balanced(two_kinds(reduction=(9.0, 0.0), micro=1)) == (1, 7)


def test_overlap_hides_all_but_the_last_layer():
    without, overlap = (two_kinds(reduction=(1.0, 1.0), overlap=value) for value in (False, True))
    assert estimate(without, (4, 4)).exposed_s == (4.0, 4.0)
    # 2 s of backward for 1 s of reduction: one layer is left
    assert estimate(overlap, (4, 4)).exposed_s == (1.0, 1.0)
    slow = two_kinds(reduction=(3.0, 3.0), overlap=True)
    assert estimate(slow, (4, 4)).exposed_s == (4 * 3.0 - 3 * 2.0,) * 2


def test_tied_embeddings_make_the_last_stage_wait():
    free, tied = (estimate(two_kinds(tied_s=seconds), (4, 4)) for seconds in (0.0, 0.5))
    assert free.end_s[1] == pytest.approx(free.end_s[0] - 8.0)  # the first stage's backward
    assert tied.end_s == pytest.approx((free.end_s[0] + 0.5,) * 2)


def test_memory_moves_layers():
    room = two_kinds(
        # stage 0 keeps two micro-batches: 2 bytes a layer, stage 1: 1.5
        state_bytes=(1.0,) * 8,
        kept_bytes=(0.5,) * 8,
    )
    assert balanced(room) == (4, 4)
    assert balanced(replace(room, limit_bytes=(6.0, inf))) == (3, 5)
    assert estimate(room, (4, 4)).memory_bytes == (8.0, 6.0)


def test_the_paper_splits_48_layers_26_to_22():
    assert by_speed(48, (197.0, 160.0)) == (26, 22)
    assert by_speed(48, (197.0, 160.0), alpha=1.05) == (27, 21)


def test_remainder_of_speed():
    assert by_speed(30, (2.0, 2.0, 1.0, 1.0)) == (10, 10, 5, 5)
    assert by_speed(31, (2.0, 2.0, 1.0, 1.0)) == (11, 10, 5, 5)
    assert by_speed(6, (1.55, 1.55, 1.45, 1.45)) == (2, 2, 1, 1)
    assert by_speed(30, (2.0, 2.0, 1.0, 1.0), alpha=1.1) == (11, 11, 4, 4)
    assert by_speed(10, (1.0, 1.0, 1.0)) == (4, 3, 3)
    assert by_speed(4, (100.0, 1.0, 1.0)) == (2, 1, 1)
    rng = random.Random(0)
    for _ in range(500):
        stages = rng.randint(1, 8)
        layers = rng.randint(stages, 40)
        found = by_speed(layers, [rng.uniform(0.1, 3) for _ in range(stages)], rng.uniform(0.5, 2))
        assert sum(found) == layers and min(found) >= 1


def test_speeds_are_those_of_a_job_of_such_stages():
    slow, fast = speeds(two_kinds(2.0))[1], speeds(two_kinds(2.0))[0]
    assert fast == pytest.approx(1 / (9 * 12 + 0.4)) and slow == pytest.approx(1 / (9 * 24 + 0.4))


def test_uniform():
    assert uniform(10, 4) == (3, 3, 2, 2)


def simulated(costs, split):
    """Seconds until the first stage's last backward, operation by operation."""
    ranges = [costs.bounds(sum(split[:s]), sum(split[: s + 1])) for s in range(costs.stages)]
    f, b = (
        [sum(rows[s][low:high]) for s, (low, high) in enumerate(ranges)]
        for rows in (costs.forward_s, costs.backward_s)
    )
    return simulate(f, b, estimate(costs, split).transfer_s, costs.micro_batches)[0]


def test_estimate_against_a_simulation_of_1f1b():
    """The estimate is never more than 1 % too short, and at most a quarter too long.

    The GPUs differ 1.5 : 1, and the splits are the ones that are used.

    The formula lets no bubble of a fast stage hide behind a slow one, so it is worst where stages are least
    equal.
    """
    rng, errors = random.Random(0), []
    for _ in range(300):
        stages, blocks = rng.randint(2, 6), rng.randint(12, 40)
        gpus = [rng.choice((1.0, 1.5)) for _ in range(stages)]
        rows = tuple((0.1, *(gpu,) * blocks, 0.7 * gpu) for gpu in gpus)
        costs = StageCosts(
            rows,
            tuple(scaled(row, 2.0) for row in rows),
            ((0.5,) * (blocks + 2),) * stages,
            ((0.05,) * (blocks + 2),) * stages,
            rng.randint(4, 32),
        )
        for method in METHODS:
            split = partition(method, costs)
            outcome = estimate(costs, split)
            errors.append((outcome.end_s[0] - outcome.exposed_s[0]) / simulated(costs, split) - 1)
    assert min(errors) > -0.01 and max(errors) < 0.25


@pytest.mark.parametrize("value", [-1.0, nan, inf])
@pytest.mark.parametrize("name", ["forward_s", "backward_s", "reduction_s", "transfer_s"])
def test_bad_times_are_named(name, value):
    rows = ((1.0, 1.0, 1.0), (1.0, value, 1.0))
    with pytest.raises(HolmesError, match=f"stage 1, layer 1: {name} is {value}"):
        replace(two_kinds(blocks=3), **{name: rows})


def test_bad_input():
    with pytest.raises(HolmesError, match="3 layers are too few for 4"):
        uniform(3, 4)
    with pytest.raises(HolmesError, match="1 layer is too few for 2 pipeline stages"):
        two_kinds(blocks=1)
    with pytest.raises(HolmesError, match="stage 1: a speed of nan"):
        by_speed(4, (1.0, nan))
    with pytest.raises(HolmesError, match="alpha is 0"):
        by_speed(4, (1.0, 2.0), 0)
    with pytest.raises(HolmesError, match="'best' is not one of uniform, speed, balanced"):
        partition("best", two_kinds())
    with pytest.raises(HolmesError, match="micro_batches is 0"):
        two_kinds(micro=0)
    with pytest.raises(HolmesError, match="memory limit of nan"):
        two_kinds(limit_bytes=(1.0, nan))
    heavy = two_kinds(state_bytes=(1e9,) * 8)
    with pytest.raises(
        HolmesError, match="^stage 1: one layer needs 1 GB and its GPUs have 500 MB"
    ):
        balanced(replace(heavy, limit_bytes=(inf, 5e8)))
    with pytest.raises(
        HolmesError,
        match="no split of 8 layers fits the GPUs' memory: the stages hold at most 3.2 layers",
    ):
        balanced(replace(heavy, limit_bytes=(3e9, 2e9)))
