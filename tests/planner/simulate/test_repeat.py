"""planner/simulate/repeat.py: a step whose middle repeats takes what the whole simulation says."""

from dataclasses import replace

import clusters
import pytest
from prices import job_on_site

from holmes_ext.cluster.wan import Between, Wan
from holmes_ext.patches.deepspeed.features import DEEPSPEED
from holmes_ext.patches.torch.features import LOOP
from holmes_ext.plan.cost.model import Gpu, Model
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.shape import shape_of
from holmes_ext.plan.sizes import Sizes
from holmes_ext.planner.search.as_plan import layout_candidate
from holmes_ext.planner.search.result import SearchResult
from holmes_ext.planner.search.simulated import job_of
from holmes_ext.planner.simulate import repeat
from holmes_ext.planner.simulate.execution import Execution
from holmes_ext.planner.simulate.repeat import folded_causes, folded_s
from holmes_ext.planner.simulate.step import JobStep

CASES = [
    (Sizes(pipeline=2), Execution(), 64),
    (Sizes(pipeline=2), Execution(overlap="on"), 61),
    (Sizes(pipeline=4), Execution(DEEPSPEED), 96),
    (Sizes(pipeline=4), Execution(LOOP), 97),
    (Sizes(pipeline=2), Execution(virtual=2), 96),
    (Sizes(pipeline=2), Execution(DEEPSPEED, in_flight=(4, 1)), 80),
    (Sizes(), Execution(zero=2), 40),
    (Sizes(), Execution(zero=3), 41),
    (Sizes(), Execution(hierarchical=True), 30),
    (Sizes(pipeline=2), Execution(zero=1, gather_overlap=True), 64),
]


def job(sizes, execution, micro_batches, ethernet, mixed=False):
    site = clusters.site(
        "a ib 10Gb/s a[0-1]", "b roce 4Gb/s b[0-1]", ethernet=ethernet, processes=2
    )
    order = [site.nodes[index].name for index in ((0, 2, 1, 3) if mixed else range(4))]
    model = Model(
        layers=8,
        hidden=256,
        heads=4,
        sequence=128,
        vocabulary=256,
        micro_batches=micro_batches,
        tied=False,
        gpu=Gpu(2e11),
    )
    return job_on_site(site, order, sizes, model, execution)


@pytest.mark.parametrize("sizes, execution, micro_batches", CASES)
@pytest.mark.parametrize("ethernet, mixed", [("1Gb/s", False), ("200Mb/s", True)])
def test_a_folded_step_takes_what_the_whole_one_does(
    sizes, execution, micro_batches, ethernet, mixed
):
    whole = job(sizes, execution, micro_batches, ethernet, mixed).step().step_s
    assert folded_s(job(sizes, execution, micro_batches, ethernet, mixed)) == pytest.approx(
        whole, rel=1e-8
    )


@pytest.mark.parametrize("sizes, execution, micro_batches", [*CASES[:2], *CASES[4:9]])
def test_few_micro_batches_are_simulated_where_the_middle_repeats(
    sizes, execution, micro_batches, monkeypatch
):
    simulated, simulation = [], JobStep.simulation
    monkeypatch.setattr(
        JobStep,
        "simulation",
        lambda self, count: simulated.append(count) or simulation(self, count),
    )
    folded_s(job(sizes, execution, micro_batches, "1Gb/s"))
    assert max(simulated) < micro_batches


def test_kinds_of_pipelines_without_a_common_link_have_a_pace_of_their_own(monkeypatch):
    """Two pipelines without a common link go on at different paces.

    One of the two links is slower than the computation. The pipelines meet when gradients are
    reduced.
    """
    names = ("a", "b", "c", "d")
    site = clusters.site(
        *(f"{name} ib 10Gb/s {name}0" for name in names), ethernet="10Gb/s", processes=1
    )
    rates = {("a", "c"): 2 * 10**7}
    pairs = [(one, two) for one in names for two in names if one < two]
    site = replace(
        site, wan=Wan((), tuple(Between(pair, rates.get(pair, 10**10), 1e-3) for pair in pairs))
    )
    model = Model(
        layers=8,
        hidden=256,
        heads=4,
        sequence=128,
        vocabulary=256,
        micro_batches=120,
        tied=False,
        gpu=Gpu(2e11),
    )
    one = job_on_site(
        site,
        ["a0", "b0", "c0", "d0"],
        Sizes(pipeline=2),
        model,
        Execution(DEEPSPEED, in_flight=(4, 1)),
    )
    assert [*map(sorted, one.apart())] == [[0], [1]]
    whole, simulated, simulation = one.step().step_s, [], JobStep.simulation
    monkeypatch.setattr(
        JobStep, "simulation", lambda *given: simulated.append(given[1]) or simulation(*given)
    )
    assert folded_s(one) == pytest.approx(whole, rel=1e-9) and max(simulated) < 120


def test_what_does_not_repeat_is_simulated_whole(monkeypatch):
    """A pace that is found where there is none would be wrong by as much as the period."""
    monkeypatch.setattr(repeat, "_period_s", lambda spans, stages, period: 0.0)
    one = job(Sizes(pipeline=2), Execution(), 64, "1Gb/s")
    assert folded_s(one) == one.step().step_s


@pytest.mark.parametrize("virtual, micro_batches", [(1, 400), (2, 800), (1, 12)])
def test_seconds_by_cause_are_those_of_a_full_simulation(virtual, micro_batches):
    model = Model(
        layers=8, hidden=512, heads=8, sequence=128, vocabulary=8000, global_batch=4 * micro_batches
    )
    result = SearchResult(Network(clusters.example("two_clusters_8")), model, 4 * micro_batches)
    sizes = Sizes(2, 1, data=4).complete(8, 1)
    shape = shape_of(replace(model, micro_batch=1), sizes, zero=0, virtual=virtual)
    job = job_of(result, layout_candidate(result, sizes, shape))
    folded = folded_causes(job, folded_s(job))
    full = job.step().causes
    assert folded == pytest.approx(full, rel=1e-6, abs=1e-9 * sum(full.values()))
