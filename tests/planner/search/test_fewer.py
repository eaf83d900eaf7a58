"""planner/search/fewer.py: which nodes a job is faster without, against a search on every set of them."""

import time
from dataclasses import replace
from itertools import product

import pytest

from holmes_ext.cluster.site import site_from_spec
from holmes_ext.cluster.spec import parse_spec
from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.links import Links
from holmes_ext.plan.cost.model import Gpu, Model
from holmes_ext.plan.cost.network import Network
from holmes_ext.planner.search import fewer
from holmes_ext.planner.search.result import SearchResult
from holmes_ext.planner.search.search import search
from holmes_ext.planner.search.space import Limits

MODEL = Model(
    layers=8,
    hidden=1024,
    heads=8,
    sequence=512,
    vocabulary=1000,
    micro_batches=1,
    gpu=Gpu(flops=1e13),
)
LIMITS = Limits(
    {
        **dict.fromkeys(("tensor", "context", "virtual", "micro_batch"), (1,)),
        "zero": (0,),
        "recompute": ("none",),
    }
)
SLOW, FAST = "100Mb/s", "100Gb/s"


def spec_of(nodes, between=()):
    """Clusters a, b, ... of so many nodes; between: (clusters, rate)."""
    names = "abcdefg"[: len(nodes)]
    clusters = [
        f'{{name = "{name}", kind = "ethernet", nodes = ["{name}[0-{count - 1}]"]}}'
        for name, count in zip(names, nodes)
    ]
    links = [
        f'{{clusters = ["{pair[0]}", "{pair[1]}"], rate = "{rate}", latency = "1ms"}}'
        for pair, rate in between
    ]
    text = f'version = 2\nethernet = {{rate = "25Gb/s"}}\ncluster = [{", ".join(clusters)}]\n'
    return parse_spec(text + (f"between = [{', '.join(links)}]\n" if links else ""))


def first_look(spec, batch, model=MODEL):
    asked = SearchResult(Network(site_from_spec(spec), Links.of_spec(spec)), model, batch, LIMITS)
    return search(asked, prove=False)


def best_use(spec, batch, model=MODEL):
    return fewer.best_use(first_look(spec, batch, model), spec, time.monotonic() + 60)


def least_s(spec, batch):
    """Of every set of whole clusters."""
    found = []
    for chosen in product((0, 1), repeat=len(spec.clusters)):
        names = {
            name for one, cluster in zip(chosen, spec.clusters) for name in cluster.nodes if one
        }
        try:
            found += [first_look(spec.only(names), batch).best.step_s] if names else []
        except HolmesError:  # no sizes divide
            continue
    return min(found)


@pytest.mark.parametrize(
    "between, kept",
    [
        ((("ab", FAST), ("ac", SLOW), ("bc", SLOW)), "ab"),
        ((("ab", SLOW), ("ac", SLOW), ("bc", FAST)), "bc"),
        ((("ab", FAST), ("ac", FAST), ("bc", FAST)), "abc"),
    ],
)
def test_clusters_behind_slow_links_are_left_out(between, kept):
    spec = spec_of((4, 4, 4), between)
    found = best_use(spec, 48)
    assert "".join(found.network.site.clusters) == kept
    assert (found.on_all is None) == (kept == "abc")
    assert found.best.step_s <= least_s(spec, 48) * (1 + 1e-9)
    assert found.optimality_gap.step_s == found.best.step_s
    if found.on_all is not None:
        assert found.on_all.network.world == 12 and found.best.step_s < found.on_all.best.step_s


def test_of_clusters_that_look_the_same_alone_one_is_looked_at(monkeypatch):
    looked = []
    first_look_at = fewer._NodeSets._searched_briefly
    monkeypatch.setattr(
        fewer._NodeSets,
        "_searched_briefly",
        lambda sets, counts: looked.append(counts) or first_look_at(sets, counts),
    )
    found = best_use(spec_of((4, 4), [("ab", "1Mb/s")]), 16)
    assert "".join(found.network.site.clusters) == "a" and (4, 0) in looked and (0, 4) not in looked


def test_a_node_that_divides_nothing_is_left_out():
    """Five ranks for four sequences: a pipeline of five, whose bubble is half of it, or one rank less."""
    found = best_use(spec_of((5,)), 4, replace(MODEL, gpu=Gpu(flops=1e12)))
    assert [node.name for node in found.network.site.nodes] == ["a0", "a1", "a2", "a3"]
    assert found.on_all.network.world == 5


def test_of_many_clusters_those_that_fast_links_join_are_kept():
    names = "abcdef"
    between = [
        (one + two, SLOW if two in "ef" else FAST) for one in names for two in names if one < two
    ]
    found = best_use(spec_of((2,) * 6, between), 48)
    assert "".join(found.network.site.clusters) == "abcd"


def test_what_gpus_cannot_compute_in_time_is_not_searched(monkeypatch):
    looked = []
    whole = fewer._NodeSets._searched_briefly
    monkeypatch.setattr(
        fewer._NodeSets,
        "_searched_briefly",
        lambda self, counts: looked.append(counts) or whole(self, counts),
    )
    spec = spec_of((4, 4))
    found = first_look(spec, 512)
    assert fewer.best_use(found, spec, time.monotonic() + 60).on_all is None
    floors = [found.batch_flops / (sum(counts) * MODEL.gpu.flops) for counts in looked]
    assert (0, 4) not in looked and (4, 0) not in looked
    assert all(floor_s < found.best.step_s for floor_s in floors)


def test_ctrl_c_leaves_the_best_so_far(monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    spec = spec_of((4, 4), (("ab", SLOW),))
    found = first_look(spec, 48)
    monkeypatch.setattr(fewer, "first_look", interrupted)
    told = fewer.best_use(found, spec, time.monotonic() + 60)
    assert told.interrupted and told.on_all is None and told.best.step_s == found.best.step_s
