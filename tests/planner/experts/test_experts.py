"""Experts placed by traffic: against all orders of small cases, EPLB, and the bound; files and bad input."""

import itertools
import json
import random

import pytest
from clusters import example

import holmes_ext
from holmes_ext.errors import HolmesError
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.experts import EXPERT, RANK, Counts, ExpertOrder, load_order, load_traffic
from holmes_ext.plan.sizes import Sizes
from holmes_ext.planner.experts.places import Places, places_of
from holmes_ext.planner.experts.program import EPLB, solve

pytest.importorskip("scipy")


def places(name="two_clusters_4", expert=4):
    site = example(name)
    return places_of(build_plan(site, Sizes(expert=expert).complete(site.world_size)))


def counts(seed, rows, experts, kind=RANK):
    rng = random.Random(seed)
    return Counts(
        kind, tuple(tuple(rng.expovariate(1) ** 3 for _ in range(experts)) for _ in range(rows))
    )


def cost_of(order, given, where):
    """By the definition: tokens times the distance of their way."""
    each = len(order) // where.ranks
    rank_of = {expert: slot // each for slot, expert in enumerate(order)}
    if given.rows == RANK:
        return sum(
            n * where.far[rank][rank_of[e]]
            for rank, row in enumerate(given.table)
            for e, n in enumerate(row)
        )
    pairs = itertools.combinations(range(len(order)), 2)
    return sum(
        (given.table[i][j] + given.table[j][i]) / 2 * where.far[rank_of[i]][rank_of[j]]
        for i, j in pairs
    )


@pytest.mark.parametrize("kind", [RANK, EXPERT])
@pytest.mark.parametrize("seed", range(4))
def test_small_cases_against_all_orders(seed, kind):
    """With no limit on loads the program's answer is the least of all, and the bound not above it."""
    where = places()
    given = counts(seed, 4 if kind == RANK else 8, 8, kind)
    found = solve(given, where, balance=100, seconds=120)
    splits = itertools.permutations(range(8))
    least = min(
        cost_of(order, given, where)
        for order in splits
        if all(a < b for a, b in zip(order[::2], order[1::2]))
    )
    assert found.best.cost == pytest.approx(cost_of(found.best.order, given, where))
    assert found.bound <= least * (1 + 1e-9)
    assert found.best.cost <= least * (1.003 if kind == RANK else 1.2)


@pytest.mark.parametrize("kind", [RANK, EXPERT])
@pytest.mark.parametrize("seed", range(4))
def test_no_more_crosses_than_under_eplb_and_no_place_is_much_fuller(seed, kind):
    where = places("two_clusters_8", 8)
    given = counts(seed, 8 if kind == RANK else 32, 32, kind)
    found = solve(given, where, seconds=120)
    eplb = next(way for way in found.placements if way.name == EPLB)
    assert found.best.crossing <= eplb.crossing and found.best.cost <= eplb.cost
    assert found.best.fullest <= 1.2 * max(1.1, eplb.fullest)  # 1.1: of a cluster
    assert found.bound <= found.best.cost
    if kind == RANK:
        assert found.gap <= 0.02


def test_distances_are_zero_on_a_node_little_in_a_cluster_and_follow_the_links():
    flat = places("two_clusters_8", 8)
    assert {flat.far[i][j] for i in range(8) for j in range(8)} == {0.0, 1e-4, 1.0}
    wan = places("three_links_6", 6)
    assert max(map(max, wan.far)) == pytest.approx(4.0)  # links 200 : 200 : 50 Mb/s


def test_ranks_of_one_node_are_one_place():
    where = Places(
        ((0, 1), (2, 3)), ((0, 0, 1, 1),) * 2 + ((1, 1, 0, 0),) * 2, *[((0,) * 4,) * 4] * 2
    )
    given = Counts(RANK, ((9, 0, 0, 0), (0, 9, 0, 0), (0, 0, 9, 0), (0, 0, 0, 9)))
    found = solve(given, where)
    assert found.best.cost == 0 and {frozenset(found.best.order[:2])} == {frozenset((0, 1))}


def test_rows_of_all_ranks_are_added_up_by_their_place_in_the_group():
    given = Counts(RANK, ((1, 0), (0, 2), (3, 0), (0, 4)))
    assert given.folded(2) == ((4, 0), (0, 6))


def test_place_experts_from_python_reads_a_plan(tmp_path):
    site = example()
    plan = build_plan(site, Sizes(expert=4).complete(4))
    plan.save(tmp_path / "plan.json")
    # those of rank 0 and 2 change places
    far = [[0.0] * 4 + [9.0] * 4, [0.0] * 8, [9.0] * 4 + [0.0] * 4, [0.0] * 8]
    placed = holmes_ext.place_experts(far, str(tmp_path / "plan.json"), balance=2)
    assert placed == holmes_ext.place_experts(far, plan, balance=2)
    assert placed.crossing == 0 and set(placed.order[:4]) == {4, 5, 6, 7}


def test_an_order_is_read_as_it_was_written(tmp_path):
    for layers in ({0: (1, 0, 3, 2)}, {2: (1, 0, 3, 2), 5: (0, 1, 2, 3)}):
        order = ExpertOrder(2, layers)
        order.save(tmp_path / "order.json")
        assert load_order(tmp_path / "order.json") == order
    assert order.of(2) == (1, 0, 3, 2) and order.of(3) is None


def bad_traffic(tmp_path, **content):
    file = tmp_path / "traffic.json"
    file.write_text(json.dumps({"version": 1, "rows": "rank", **content}))
    with pytest.raises(HolmesError) as error:
        load_traffic(file)
    assert str(error.value).startswith(str(file)) and "\n" not in str(error.value)
    return str(error.value)


def test_bad_traffic_is_named(tmp_path):
    assert "key 'counts': it is not square: 2 rows of 3" in bad_traffic(
        tmp_path, rows="expert", counts=[[1, 2, 3], [4, 5, 6]]
    )
    assert "NaN is no number of JSON" in bad_traffic(tmp_path, counts=[[1, 2], [float("nan"), 3]])
    assert "row 0, expert 1: tokens must be 0" in bad_traffic(tmp_path, counts=[[1, -2], [2, 3]])
    assert "rows differ in length" in bad_traffic(tmp_path, counts=[[1, 2], [3]])
    assert "list of rows of numbers" in bad_traffic(tmp_path, counts=[[1, "2"]])
    assert "neither 'rank' nor 'expert'" in bad_traffic(tmp_path, rows="token", counts=[[1]])
    assert "'layers' names no layer" in bad_traffic(tmp_path, layers={}).replace(
        ": names", " names"
    )
    assert "key 'layers.2': row" in bad_traffic(tmp_path, layers={"2": [[1, -1]]})


@pytest.mark.parametrize(
    "more, told",
    [
        ({"per_rank": 1}, "8 experts do not fit on 4 ranks of 1 each"),
        ({"balance": 0.5}, "balance is 0.5"),
    ],
)
def test_what_cannot_be_is_refused(more, told):
    with pytest.raises(HolmesError, match=told):
        solve(counts(1, 4, 8), places(), **more)
    with pytest.raises(HolmesError, match="9 experts cannot be split evenly over 4"):
        solve(counts(1, 4, 9), places())
    with pytest.raises(HolmesError, match="5 rows are not a multiple of the 4"):
        solve(counts(1, 5, 8), places())


@pytest.mark.parametrize(
    "content, told",
    [
        ({"ranks": 2, "order": [0, 0]}, "list each expert once"),
        ({"ranks": 3, "order": [0, 1]}, "as many on each of 3"),
        ({"ranks": 0, "order": [0, 1]}, "'ranks' must be 1 or more"),
        ({"ranks": 1, "order": ["a"]}, "experts whole numbers"),
    ],
)
def test_a_bad_order_is_named(tmp_path, content, told):
    (tmp_path / "order.json").write_text(json.dumps({"version": 1, **content}))
    with pytest.raises(HolmesError, match=f"order.json: .*{told}"):
        load_order(tmp_path / "order.json")
