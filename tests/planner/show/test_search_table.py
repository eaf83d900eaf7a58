"""planner.show.search_table: the text around the table of a search."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from clusters import example

from holmes_ext.cli.show.table import Screen
from holmes_ext.plan.cost.model import Gpu, Model
from holmes_ext.plan.cost.network import Network
from holmes_ext.planner.search.result import SearchResult
from holmes_ext.planner.search.search import search
from holmes_ext.planner.search.space import Limits
from holmes_ext.planner.show import search_table


@pytest.mark.parametrize(
    "shapes, plans, text",
    [
        (1, 1, "1 shape, 1 plan worked out, 3 left out by their bound, 0 too large, 0.5 s"),
        (2, 0, "2 shapes, 0 plans worked out, 3 left out by their bound, 0 too large, 0.5 s"),
    ],
)
def test_counts(capsys, shapes, plans, text):
    result = SimpleNamespace(
        interrupted=False,
        optimality_gap=None,
        shapes=shapes,
        candidates=[object()] * plans,
        pruned=3,
        misfits=0,
        seconds=0.5,
        network=SimpleNamespace(links=SimpleNamespace(measured=())),
    )
    search_table._show_counts(Screen(), result)
    assert capsys.readouterr().out.strip() == text


def test_title_of_one_gpu():
    site = SimpleNamespace(clusters=("a",))
    result = SimpleNamespace(
        network=SimpleNamespace(site=site, world=1),
        model=SimpleNamespace(name="gpt"),
        global_batch=8,
    )
    assert search_table.title(result) == "gpt: 1 GPU, 1 cluster, global batch 8"


@pytest.mark.parametrize("factor, is_noted", [(1.1, True), (1.4, True), (1.5, False)])
def test_a_plan_that_nearly_fills_its_gpus_says_what_is_not_counted(factor, is_noted):
    """nvidia-smi read up to 1.41 times as much as the counted tensors in published runs."""
    model = Model(12, hidden=512, heads=8, sequence=128, vocabulary=8000, global_batch=16)
    limits = Limits({"pipeline": (1,), "tensor": (1,), "micro_batch": (1,), "recompute": ("none",)})

    def found(memory_bytes):
        sized = replace(model, gpu=Gpu(20e12, memory_bytes))
        request = SearchResult(Network(example("two_clusters_4")), sized, 16, limits)
        return search(request, prove=False, simulate=False)

    needed = found(1e12).best.peak_bytes
    lines = search_table.why_lines(found(needed * factor))
    assert (search_table.MAY_NOT_FIT in lines) == is_noted
