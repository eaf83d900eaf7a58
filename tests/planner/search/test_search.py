"""The search: its winner is exhaustive search's, its optimality gap is true, and bad input is one line."""

import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import clusters
import pytest

from holmes_ext.cluster.fabric import Fabric
from holmes_ext.cluster.site import site_from_spec
from holmes_ext.cluster.spec import load_spec, parse_spec
from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.links import Link, Links, fit
from holmes_ext.plan.cost.model import Gpu, Model
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.cost.stages import estimate
from holmes_ext.plan.engine import Rules
from holmes_ext.planner.bound.shape import ShapeBound
from holmes_ext.planner.search import search as searching
from holmes_ext.planner.search import sketch
from holmes_ext.planner.search.changed import with_ethernet
from holmes_ext.planner.search.evaluate import Evaluator
from holmes_ext.planner.search.result import SearchResult
from holmes_ext.planner.search.simulated import simulated
from holmes_ext.planner.search.space import Limits, parse_limits, shapes

EXAMPLES = Path(__file__).parents[3] / "examples" / "clusters"
MODEL = Model(
    layers=6, hidden=512, heads=8, sequence=128, vocabulary=8000, global_batch=16, gpu=Gpu(20e12)
)


def small(ethernet="10Gb/s", a="a[0-1]", b="b[0-1]"):
    return clusters.site(f"a ib 100Gb/s {a}", f"b roce 50Gb/s {b}", ethernet=ethernet, processes=2)


def splits(layers, stages):
    for borders in combinations(range(1, layers), stages - 1):
        yield tuple(high - low for low, high in zip((0, *borders), (*borders, layers)))


def asked(site, model, batch, limits=Limits(), overlap=False, links=Links()):
    return SearchResult(Network(site, links), model, batch, limits, Rules(overlap=overlap))


def search(site, model, batch, limits=Limits(), overlap=False, links=Links(), prove=False, **more):
    return searching.search(asked(site, model, batch, limits, overlap, links), prove=prove, **more)


def least(found):
    """Of the closed forms."""
    return min(one.formula_s for one in found.candidates)


def exhaustive(site, model, batch, limits=Limits(), overlap=False):
    """Return the least step in closed form over every shape, placement and split that fits."""
    result, best, count = asked(site, model, batch, limits, overlap), None, 0
    evaluator = Evaluator(result)
    for shape in shapes(result.network, model, batch, limits):
        found, complete = evaluator.placements(shape)
        assert complete
        for placement in found:
            costs = result.prices(shape).costs(placement)
            uniform = (model.layers // shape.pipeline,) * shape.pipeline
            for split in [uniform] if shape.virtual > 1 else splits(model.layers, shape.pipeline):
                count += 1
                one = estimate(costs, split)
                if all(one.fits) and (best is None or one.step_s < best):
                    best = one.step_s
    assert count > 200
    return best


def check_least(found, wanted):
    """Check that the winner is exhaustive search's in closed form.

    The search moves single blocks only, which may leave 1 %.
    """
    assert wanted * (1 - 1e-9) <= least(found) <= wanted * 1.01


@pytest.mark.full(share=4)
@pytest.mark.parametrize("ethernet", ["1Gb/s", "10Gb/s", "40Gb/s"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("flops", [(20e12, 20e12), (20e12, 9e12)])
def test_the_winner_is_exhaustive_searchs(ethernet, overlap, flops):
    model = replace(MODEL, gpus={"a": Gpu(flops[0]), "b": Gpu(flops[1])})
    found = search(small(ethernet), model, 16, overlap=overlap)
    check_least(found, exhaustive(small(ethernet), model, 16, overlap=overlap))
    times = [one.simulated_s for one in found.candidates if one.simulated_s]
    assert times == sorted(times) and found.best.step_s == times[0]


@pytest.mark.full(share=4)
@pytest.mark.parametrize("memory", [250e6, 330e6, 500e6])
def test_the_winner_fits_the_memory(memory):
    limits = Limits(memory_bytes=memory)
    try:
        found = search(small(), MODEL, 16, limits)
    except HolmesError:
        assert exhaustive(small(), MODEL, 16, limits) is None
        return
    check_least(found, exhaustive(small(), MODEL, 16, limits))
    assert all(one.peak_bytes <= memory * (1 + 1e-9) for one in found.candidates)


def test_three_clusters_and_uneven_ones():
    site = site_from_spec(load_spec(EXAMPLES / "three_clusters_8.toml"))
    limits = parse_limits(["recompute=none", "zero=1"])
    check_least(search(site, MODEL, 16, limits), exhaustive(site, MODEL, 16, limits))
    site, model = small(b="b[0-2]"), replace(MODEL, heads=10, hidden=640)
    check_least(search(site, model, 10), exhaustive(site, model, 10))


def test_data_across_the_clusters_when_that_is_faster():
    """With Ethernet faster than the fabrics, data parallelism crosses the clusters.

    A pipeline gains nothing then. With a slow Ethernet, gradients stay inside.
    """
    limits = parse_limits(["tensor=1", "context=1", "pipeline=1,2", "micro_batch=1", "virtual=1"])
    fast = search(small("400Gb/s"), MODEL, 16, limits).best
    slow = search(small("100Mb/s"), MODEL, 16, limits).best
    assert all(len(content) == 2 for content in fast.placement.stages)
    assert slow.shape.pipeline == 2 and all(len(content) == 1 for content in slow.placement.stages)


def test_limits_are_kept():
    limits = parse_limits(["tensor=2", "recompute=full", "reduction=flat", "clusters=data,both"])
    for one in search(small(), MODEL, 16, limits).candidates:
        assert (
            one.shape.tensor == 2
            and one.shape.recompute == "full"
            and "hierarchical" not in one.reductions
        )
        assert any(len(content) > 1 for content in one.placement.stages)


def test_nodes_follow_the_placement():
    found = search(small(), MODEL, 16, rows=200)
    for one in found.candidates:
        assert sorted(found.network.nodes(one.placement)) == ["a0", "a1", "b0", "b1"]


@pytest.mark.full(share=4)
def test_a_time_limit_leaves_a_true_bound():
    full = search(small(), MODEL, 16, prove=True)
    cut = search(small(), MODEL, 16, seconds=0.0, prove=True)
    assert cut.optimality_gap.bound_s <= full.best.step_s <= cut.best.step_s and len(
        cut.candidates
    ) < len(full.candidates)


def test_some_shapes_are_examined_however_short_the_time_is(monkeypatch):
    """The shape with the least lower bound alone may be poor; the result says that others were skipped."""
    monkeypatch.setattr(sketch, "FLOOR_S", 1e9)
    whole = searching.first_look(asked(small(), MODEL, 16), seconds=1e9)
    assert not whole.is_unfinished
    cut = searching.first_look(asked(small(), MODEL, 16), seconds=0.0)
    assert cut.is_unfinished and cut.skipped > 0
    # A shape that is examined may turn out to have no split of the layers that fits the memory.
    assert 0.9 * sketch.MIN_RANKED <= len(cut.candidates) <= sketch.MIN_RANKED
    monkeypatch.setattr(sketch, "MIN_RANKED", 1)
    first_only = searching.first_look(asked(small(), MODEL, 16), seconds=0.0)
    assert first_only.skipped > cut.skipped
    assert whole.best.step_s <= cut.best.step_s < first_only.best.step_s


@pytest.fixture
def layout():
    """Return the best plan of a search, as the layout that a user gives."""
    return search(small(), MODEL, 16, rows=1).best


def with_layout(layout, limits=Limits(), **more):
    """Search for no time at all, with a layout of the user."""
    request = replace(asked(small(), MODEL, 16, limits), user_layout=layout)
    return searching.search(request, seconds=0.0, rows=1, **more)


@pytest.mark.parametrize("prove", [False, True])
def test_no_plan_worse_than_the_users_layout_is_called_the_best(layout, prove, monkeypatch):
    monkeypatch.setattr(sketch, "MIN_RANKED", 1)
    found = with_layout(layout, prove=prove)
    assert found.best.step_s <= layout.step_s
    assert found.user_layout.step_s == layout.step_s and found.best is not found.user_layout


def test_the_users_layout_is_the_best_if_no_other_plan_is_possible(layout, monkeypatch):
    """Such a layout has a shape that the search does not try, for example a micro-batch of 3."""
    monkeypatch.setattr(sketch, "shapes", lambda *_: iter(()))
    found = with_layout(layout, prove=False)
    assert [plan.key for plan in found.candidates] == [layout.key]
    too_small = replace(layout, limit_bytes=(1.0,) * len(layout.limit_bytes))
    with pytest.raises(HolmesError, match="no parallel sizes are possible"):
        with_layout(too_small, prove=False)


def test_a_layout_outside_the_limits_is_not_the_best(layout):
    """A limit that the user gives counts more than the layout of the command line."""
    other = next(size for size in (1, 2, 4) if size != layout.shape.pipeline)
    found = with_layout(layout, Limits({"pipeline": (other,)}), prove=False)
    assert found.best.shape.pipeline == other


def test_ctrl_c_keeps_the_best_so_far():
    def stop(done, left, best, gap):
        raise KeyboardInterrupt

    found = search(small(), MODEL, 16, progress=stop, rows=10**6)
    assert found.interrupted and found.candidates


def test_clusters_of_one_node():
    site = small(a="a0", b="b0")
    check_least(search(site, MODEL, 16), exhaustive(site, MODEL, 16))


def test_a_model_that_fits_nowhere():
    needs = (
        r"does not fit in GPU memory: nearest is tensor .* needs .*B, .*B more than its 50 MB \(\w+: .*B\); "
        r"use"
    )
    with pytest.raises(HolmesError, match=needs):
        search(small(), MODEL, 16, Limits(memory_bytes=50e6))


@pytest.mark.parametrize(
    "text, message",
    [
        ("tensr=2", "did you mean 'tensor'?"),
        ("tensor", "is not NAME=VALUE"),
        (
            "recompute=ful",
            "limit recompute: 'ful' is not one of none, selective, full; did you mean 'full'?",
        ),
        ("memory=big", "--limit memory: 'big' is not a size above 0"),
        ("tensor=0", "limit tensor: 0 is not a whole number, 1 or more"),
        ("tensor=", "--limit: 'tensor=' is not NAME=VALUE"),
    ],
)
def test_bad_limits(text, message):
    with pytest.raises(HolmesError) as error:
        parse_limits([text])
    assert message in str(error.value) and "\n" not in str(error.value)


def test_impossible_limits():
    with pytest.raises(
        HolmesError, match="no parallel sizes are possible: 8 GPUs .* within tensor=16"
    ):
        search(small(), MODEL, 16, parse_limits(["tensor=16"]))
    with pytest.raises(
        HolmesError,
        match="no arrangement of the clusters is possible, within pipeline=1 clusters=pipeline",
    ):
        search(small(), MODEL, 16, parse_limits(["pipeline=1", "clusters=pipeline"]))


@pytest.mark.full(share=4)
@pytest.mark.parametrize("ethernet, link", [("1Gb/s", 0.0), ("10Gb/s", 0.0), ("10Gb/s", 4e9)])
def test_no_simulated_step_beats_its_bound(ethernet, link):
    """What the optimality gap of simulated steps rests on."""
    model = replace(MODEL, gpu=Gpu(20e12, link_bps=link))
    found = search(
        small(ethernet), model, 16, parse_limits(["recompute=none", "micro_batch=1,2"]), rows=400
    )
    compared = 0
    for one in found.candidates[::7]:
        step, prices = simulated(found, one).step_s, found.prices(one.shape)
        bound = (
            Evaluator(found)
            .lower_bound(one.shape, one.placement, prices.costs(one.placement))
            .seconds()
        )
        assert step >= max(bound, ShapeBound(found.network, prices, one.shape).seconds) * (
            1 - 1e-9
        ), one
        compared += 1
    assert compared >= 10


def test_simulated_candidates_come_first():
    found = search(small(), MODEL, 16)
    times = [one.simulated_s for one in found.candidates if one.simulated_s]
    assert len(times) >= 3 and times == sorted(times) and found.best.simulated_s == times[0]
    assert found.optimality_gap.step_s == times[0] and found.optimality_gap.bound_s <= times[0]


def test_measured_links_change_the_search():
    """A slow measured curve makes steps longer, in closed form and simulated.

    Bounds stay bounds, and a what-if starts from the curve.
    """
    points = ((1024, 2e-3), (65536, 5e-3), (4194304, 0.2))
    links = Links({"ethernet": Link("ethernet", fit(points), fit(points))})
    limits = parse_limits(["recompute=none", "micro_batch=1,2"])
    nominal, measured = (
        search(small(), MODEL, 16, limits, rows=200, links=one) for one in (Links(), links)
    )
    steps = {one.key: one for one in nominal.candidates}
    both = [(steps[one.key], one) for one in measured.candidates if one.key in steps]
    assert both and all(other.formula_s >= one.formula_s * (1 - 1e-9) for one, other in both)
    crossing = next(one for one in measured.candidates if measured.describe(one) == "a -> b")
    assert simulated(measured, crossing).step_s > 1.02 * simulated(nominal, crossing).step_s
    for one in measured.candidates[::5]:
        costs = measured.costs(one)
        bound = Evaluator(measured).lower_bound(one.shape, one.placement, costs).seconds()
        assert simulated(measured, one).step_s >= bound * (1 - 1e-9), one
    ethernet = measured.network.line(measured.network.fabric([0, 1]))
    assert ethernet.rate_bps < 2e8
    assert with_ethernet(measured, crossing, 1.0)[0] == pytest.approx(crossing.step_s)
    assert with_ethernet(measured, crossing, 4.0)[0] < with_ethernet(measured, crossing, 1.0)[0]


def test_a_line_under_a_curve():
    curve = fit(((1024, 2e-3), (65536, 5e-3), (4194304, 0.2)))
    line = Links({"x": Link("x", curve, curve)}).line(Fabric("x", "ib", 10**9, 1e-6))
    assert all(
        line.latency_s + 8 * size / line.rate_bps <= curve.seconds(size) * (1 + 1e-9)
        for size in (1, 1e3, 5e4, 1e6, 1e8)
    )


@pytest.mark.parametrize(
    "sample, ethernet",
    [
        ("four_clusters_1024", "1Gb/s"),
        ("three_clusters_8", "20Mb/s"),
        ("paper_4_roce_4_ib", "1Gb/s"),
    ],
)
def test_no_placement_beats_the_bound_of_its_shape(sample, ethernet):
    """On networks so slow that they set the pace."""
    text = re.sub(
        r'rate = "[^"]+"', f'rate = "{ethernet}"', (EXAMPLES / f"{sample}.toml").read_text()
    )
    site, model = (
        site_from_spec(parse_spec(text)),
        replace(MODEL, layers=32, gpu=Gpu(100e12, link_bps=1e12), global_batch=0, micro_batches=1),
    )
    batch, limits = (
        2 * site.world_size,
        parse_limits(["micro_batch=1", "context=1", "recompute=none", "zero=0"]),
    )
    result, compared = asked(site, model, batch, limits, True), 0
    evaluator = Evaluator(result)
    for shape in shapes(result.network, model, batch, limits):
        ideal = ShapeBound(result.network, result.prices(shape), shape)
        for placement in evaluator.placements(shape)[0][:8]:
            stages = evaluator.stage_bounds(shape, placement)
            split = evaluator.good_split(stages)
            seconds = estimate(stages.costs, split).step_s
            assert ideal.seconds <= seconds * (1 + 1e-9), (shape, result.network.nodes(placement))
            compared += ideal.stage_link_s() > 0
    assert compared > 20
