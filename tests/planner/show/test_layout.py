"""Tests the user's layout in the table of `holmes plan`: its row, the nearest plan, and the best one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from clusters import TWO, example, toml

from holmes_ext.cli.main import main
from holmes_ext.plan.cost.model import Gpu, Model
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.engine import Rules
from holmes_ext.plan.sizes import Sizes
from holmes_ext.planner.search.as_plan import layout_candidate
from holmes_ext.planner.search.result import SearchResult
from holmes_ext.planner.search.search import search
from holmes_ext.planner.search.simulated import timed
from holmes_ext.planner.search.space import Limits
from holmes_ext.planner.show.layout import compared, nearest_to

EXAMPLES = Path(__file__).parents[3] / "examples"
CLUSTER = str(EXAMPLES / "clusters" / "two_clusters_8.toml")
GPT = (
    "pretrain_gpt.py --num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 256 "
    "--global-batch-size 48 --vocab-size 50000 --pipeline-model-parallel-size 4"
).split()
MODEL = Model(
    layers=8, hidden=512, heads=8, sequence=128, vocabulary=50000, global_batch=48, gpu=Gpu(1e11)
)


def result_and_layout(limits=Limits(), **changes):
    """Return plans of a search, and a layout of 4 stages that was not among them."""
    request = SearchResult(Network(example("two_clusters_8")), MODEL, 48, limits, Rules())
    found = search(request, prove=False)
    shape = next(s for s in found.ideals if s.pipeline == 4 and s.virtual == 1)
    shape = replace(shape, **changes)
    layout = layout_candidate(found, Sizes(4, shape.tensor, data=shape.data), shape)
    return found, timed(found, layout)


def test_a_faster_layout_outside_the_search_space_is_the_best_plan():
    """The search tries no micro-batch of 3, and only the fastest plan may be called the best."""
    found, layout = result_and_layout(Limits({"tensor": (2,)}))
    layout = replace(layout, shape=replace(layout.shape, micro_batch=3), simulated_s=1e-6)
    assert layout.shape not in found.ideals
    found = replace(found, user_layout=layout)
    assert compared(found, Limits()).best.step_s == layout.step_s
    assert compared(found, Limits()).optimality_gap.gap == 0.0
    excluding = Limits({"micro_batch": (1, 2)})
    assert compared(found, excluding).best.step_s == found.best.step_s


def test_nearest_plan_has_the_sizes_of_the_layout_and_better_layers():
    found, layout = result_and_layout()
    nearest = nearest_to(found, layout)
    assert nearest.shape == layout.shape and nearest.split != layout.split
    assert nearest.step_s < layout.step_s
    assert nearest_to(found, nearest) is None  # nothing is nearer to the nearest


def test_no_plan_is_nearest_to_a_layout_without_a_pipeline():
    found, _ = result_and_layout()
    plain = next(plan for plan in found.candidates if plan.shape.pipeline == 1)
    assert nearest_to(found, plain) is None


def test_nearest_plan_has_a_row_and_its_flag(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    words = [*GPT, "--micro-batch-size", "1"]
    assert main(["plan", "--cluster", CLUSTER, "--limit", "pipeline=1,2", "--", *words]) == 0
    out = capsys.readouterr().out
    rows = [line.split()[0] for line in out.splitlines() if " D" in line and line.split()]
    assert rows[:3] == ["yours", "nearest", "1"]
    assert "nearest: your tensor and pipeline sizes, other layers" in out
    assert "s: add --holmes-partition " in out


def test_best_plan_within_limits_may_be_slower_than_the_layout(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    words = [*GPT, "--micro-batch-size", "1"]
    limits = ["--limit", "tensor=8"]  # over the slow network
    assert main(["plan", "--cluster", CLUSTER, *limits, "--", *words]) == 0
    out = capsys.readouterr().out
    assert "best plan within --limit: " in out and "your layout is faster: " in out


def test_layout_stands_in_the_table_with_little_time(capsys):
    words = [*GPT, "--micro-batch-size", "3"]
    assert main(["plan", "--cluster", CLUSTER, "--seconds", "0.01", "--json", "--", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["yours"]["micro_batch"] == 3
    assert found["candidates"][0]["step_seconds"] <= found["yours"]["step_seconds"]


@pytest.mark.parametrize("keys, is_noted", [({}, True), ({"gpu": "A100"}, False)])
def test_memory_without_a_limit_is_noted_where_it_is_shown(
    capsys, monkeypatch, tmp_path, keys, is_noted
):
    monkeypatch.setenv("COLUMNS", "200")
    file = tmp_path / "cluster.toml"
    file.write_text(toml(*TWO, **keys))
    words = [*GPT, "--micro-batch-size", "1"]
    assert main(["plan", "--cluster", str(file), "--limit", "pipeline=2", "--", *words]) == 0
    out = capsys.readouterr().out
    memory = next(line for line in out.splitlines() if line.startswith("memory of the fullest"))
    legend = next(line for line in out.splitlines() if line.startswith("T tensor, P pipeline"))
    for line in (memory, legend):
        assert ("no memory limit assumed" in line) == is_noted
