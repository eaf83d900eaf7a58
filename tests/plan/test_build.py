"""build: the whole plan of small sites, and that every rank would compute the same."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import clusters
import pytest
from prices import costs_on_site, step_seconds

from holmes_ext.cluster.site import Site
from holmes_ext.errors import HolmesError
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.cost.links import Link, Links
from holmes_ext.plan.cost.model import Gpu, load_model
from holmes_ext.plan.cost.stages import estimate
from holmes_ext.plan.decide import derive_traffic
from holmes_ext.plan.plan import Plan, check_plan, parse_plan
from holmes_ext.plan.sizes import Sizes, groups
from holmes_ext.plan.workload import Workload

EXAMPLES = Path(__file__).parents[2] / "examples" / "clusters"
MODEL = replace(load_model(EXAMPLES.parent / "models" / "deepspeed_demo.toml"), source="model")


def sample(name, order=None):
    site = clusters.example(name)
    return (
        site
        if order is None
        else Site(tuple(site.node_by_name[node] for node in order), site.fabrics)
    )


def test_two_clusters():
    plan = build_plan(sample("two_clusters_4", ("a0", "b0", "a1", "b1")), Sizes(2))
    assert plan.nodes == ("a0", "a1", "b0", "b1")
    assert plan.sizes == Sizes(2, data=2)
    assert plan.transports == {
        "data": ("a", "b"),
        "tensor": ("local",),
        "context": ("local",),
        "pipeline": ("ethernet",),
        "world": ("ethernet",),
    }
    assert (plan.spanning, plan.stage_layers, plan.partition) == ((), (), "uniform")
    assert plan.predicted["stock_step_seconds"] > 1.3 * plan.predicted["step_seconds"]
    assert plan.predicted["exposed_reduction_seconds"] <= plan.predicted["reduction_seconds"]
    assert parse_plan(plan.to_json(), plan.source) == plan


@pytest.mark.parametrize(
    "name,sizes,first",
    [
        ("two_clusters_6", Sizes(3), ("a", "b", "b")),
        ("two_clusters_8", Sizes(2), ("a", "b")),
        ("two_clusters_8_slow_roce", Sizes(2), ("a", "b")),
        ("three_clusters_8", Sizes(4), ("a", "c", "c", "b")),
        ("two_clusters_3_5", Sizes(8), ("local",)),
        ("paper_4_roce_4_ib", Sizes(2, 8), None),
    ],
)
def test_samples_fit(name, sizes, first):
    site = sample(name)
    plan = build_plan(site, sizes)
    assert plan.spanning == ()
    assert "ethernet" not in plan.transports["data"]
    assert first is None or plan.transports["data"] == first
    assert check_plan(plan, site) == plan


def test_transports_agree_with_the_site():
    site, sizes = sample("two_clusters_6"), Sizes(3, order="tp-cp-ep-pp-dp").complete(6)
    nodes = tuple(node.name for node in site.nodes)
    found = derive_traffic(Plan(site.digest, nodes, site.processes, sizes), site).transports
    for kind in ("data", "pipeline"):
        expected = tuple(
            site.shared_fabric(nodes[rank] for rank in group).name for group in groups(sizes, kind)
        )
        assert found[kind] == (expected[:1] if len(set(expected)) == 1 else expected)


def test_spanning_is_in_the_plan():
    plan = build_plan(sample("two_clusters_3_5"), Sizes(2))
    assert [spanning.kind for spanning in plan.spanning] == ["data"]
    assert "ethernet" in plan.transports["data"]


def test_one_cluster_gains_nothing_and_loses_nothing():
    site = sample("two_clusters_4", ("a1", "a0"))
    plan = build_plan(site, Sizes(2))
    assert plan.nodes == ("a1", "a0")
    assert plan.predicted["step_seconds"] == plan.predicted["stock_step_seconds"]
    assert plan.transports["world"] == ("a",)


def test_unknown_sizes():
    plan = build_plan(sample("two_clusters_4", ("b0", "a0", "b1", "a1")))
    assert plan.nodes == ("a0", "a1", "b0", "b1")
    assert (plan.sizes, plan.transports, plan.predicted) == (None, {"world": ("ethernet",)}, {})
    assert parse_plan(plan.to_json(), plan.source) == plan


def test_workload_is_used():
    site, work = sample("two_clusters_4"), Workload(1.0, 2.0, 4, 1e6, 1e3)
    plan = build_plan(site, Sizes(2), work)
    assert (
        plan.predicted["step_seconds"]
        == step_seconds(site, plan.nodes, plan.sizes, work, hide_stage_links=True).step_s
    )


def test_refusals():
    site = sample("two_clusters_4")
    with pytest.raises(HolmesError, match="does not divide the world size 4"):
        build_plan(site, Sizes(3))
    with pytest.raises(
        HolmesError, match="partition 'speed' needs to know the model: give --holmes-model"
    ):
        build_plan(site, Sizes(2), partition="speed")
    with pytest.raises(
        HolmesError,
        match="partition 'balanced': the number of stages is not known; give --holmes-sizes",
    ):
        build_plan(site, partition="balanced", model=MODEL)
    with pytest.raises(
        HolmesError, match="partition 'best' is not one of uniform, speed, balanced"
    ):
        build_plan(site, Sizes(2), partition="best", model=MODEL)
    with pytest.raises(HolmesError, match="model: 6 layers are too few for 8 pipeline stages"):
        build_plan(sample("two_clusters_8"), Sizes(8), partition="balanced", model=MODEL)
    with pytest.raises(HolmesError, match="layers 1,2,3: 3 numbers for 2 pipeline stages"):
        build_plan(site, Sizes(2), stage_layers=(1, 2, 3))
    small = replace(MODEL, gpu=Gpu(5e9, 1e6))
    with pytest.raises(
        HolmesError,
        match=r"stage 0 \(cluster a\): one layer needs .* MB and its GPUs have 1 "
        r"MB",
    ):
        build_plan(site, Sizes(2), partition="balanced", model=small)


def test_partition_fills_the_stages():
    site = sample("two_clusters_4")
    slow = replace(MODEL, gpus={"b": Gpu(2.5e9)})
    for method, split in (("uniform", ()), ("speed", (4, 2)), ("balanced", (4, 2))):
        plan = build_plan(site, Sizes(2), partition=method, model=slow)
        assert (plan.stage_layers, plan.partition) == (split, method)
        assert parse_plan(plan.to_json(), plan.source) == plan
    assert build_plan(site, Sizes(2), partition="balanced", model=MODEL).stage_layers == (3, 3)
    steps = [
        build_plan(site, Sizes(2), partition=method, model=slow).predicted["step_seconds"]
        for method in ("uniform", "balanced")
    ]
    assert steps[0] > 1.1 * steps[1]


def test_listed_layers():
    plan = build_plan(sample("two_clusters_4"), Sizes(2), stage_layers=(5, 1))
    assert (plan.stage_layers, plan.partition) == ((5, 1), "explicit")


def test_a_models_times_agree_with_the_cost_model():
    """The two ways to a step time agree: estimate() and step_seconds().

    There is one kind of GPU, almost no embedding, and 1F1B.
    """
    site, sizes = sample("two_clusters_8"), Sizes(2).complete(8)
    plain = replace(MODEL, vocabulary=1, positions="none", tied=False)
    costs = costs_on_site(
        site, [node.name for node in site.nodes], sizes, plain, async_stage_links=False
    )
    by_stage = estimate(costs, (3, 3))
    whole = step_seconds(site, [node.name for node in site.nodes], sizes, plain.workload(sizes))
    assert by_stage.step_s == pytest.approx(whole.step_s, rel=1e-3)
    assert by_stage.reduction_s == pytest.approx(whole.reduction_s, rel=1e-3)
    assert by_stage.transfer_s == pytest.approx(whole.transfer_s, rel=1e-3)


def test_tied_embeddings_are_reduced_between_the_clusters():
    site, sizes = sample("two_clusters_4"), Sizes(2)
    order = [node.name for node in site.nodes]
    tied, untied = (
        costs_on_site(site, order, sizes, replace(MODEL, tied=value)) for value in (True, False)
    )
    ethernet = site.fabric_by_name["ethernet"]
    pairs = costs_on_site(site, order, sizes, replace(MODEL, tied=True), only=ethernet).tied_s
    assert untied.tied_s == 0
    # two ranks: all bytes once, over Ethernet
    assert pairs == pytest.approx(256 * 288 * 4 * 8 / 250e6, rel=1e-2)
    assert (
        0.5 * pairs < tied.tied_s < 0.7 * pairs
    )  # half of it hierarchically, and what they take inside
    assert estimate(tied, (3, 3)).step_s > estimate(untied, (3, 3)).step_s + 0.9 * tied.tied_s


def test_a_stage_on_two_clusters_is_as_slow_as_the_slower_one():
    site = sample("two_clusters_4")
    costs = costs_on_site(
        site, ["a0", "b0", "a1", "b1"], Sizes(2), replace(MODEL, gpus={"b": Gpu(2.5e9, 1e9)})
    )
    assert costs.names[0] == "stage 0 (cluster a, b)"
    assert costs.forward_s[0][1] == pytest.approx(MODEL.costs()[1].forward_flops / 2.5e9)
    assert costs.limit_bytes == (1e9, 1e9)


def test_every_rank_computes_the_same_plan():
    """Ranks are processes with different hash seeds: sets must not decide anything."""
    script = """
from holmes_ext.cluster.site import *
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.sizes import Sizes
own = [('f', 'g'), ('g', 'h'), ('h',), ('f', 'h'), ()]
nodes = tuple(Node(f'n{i}', 'c', 2, tuple(map(Port, (*own[i % 5], ETHERNET)))) for i in range(20))
fabrics = tuple(Fabric(n, 'ib', 10**9, 0.0) for n in 'fgh') + (Fabric(ETHERNET, 'ethernet', 10**8, 0.0),)
sizes = ((1, 1), (2, 1), (4, 1), (2, 2), (20, 2))
print([build_plan(Site(nodes, fabrics), Sizes(p, t)).digest for p, t in sizes])
"""
    seen = set()
    for seed in ("1", "2", "3"):
        path = os.pathsep.join(filter(None, sys.path))
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
        seen.add(
            subprocess.run(
                [sys.executable, "-c", script],
                env=environment,
                check=True,
                capture_output=True,
                text=True,
            ).stdout
        )
    assert len(seen) == 1


def test_times_follow_what_was_measured_and_fabrics_what_is_stated():
    """All networks measured at a tenth of their rates: everything takes longer, and goes where it went."""
    site, sizes = sample("two_clusters_4", ("a0", "b0", "a1", "b1")), Sizes(2)
    slow = {
        name: Link.of(
            replace(site.fabric_by_name[name], rate_bps=site.fabric_by_name[name].rate_bps // 10)
        )
        for name in ("ethernet", "a", "b")
    }
    stated, measured = build_plan(site, sizes), build_plan(site, sizes, links=Links(slow))
    assert measured.predicted["reduction_seconds"] == pytest.approx(
        10 * stated.predicted["reduction_seconds"], rel=0.3
    )
    assert measured.predicted["stock_step_seconds"] > 2 * stated.predicted["stock_step_seconds"]
    assert (measured.transports, measured.site_digest) == (stated.transports, stated.site_digest)
    check_plan(measured, site)


def test_what_crosses_hierarchically_is_priced_so():
    """Without a pipeline, as the plan's reductions say."""
    site = clusters.site("a ib 2Gb/s a[0-3]", "b roce 1.6Gb/s b[0-3]", ethernet="250Mb/s")
    plan = build_plan(site, Sizes())
    assert all(traffic.reductions[0].clusters == ("a", "b") for traffic in plan.traffic)
    assert plan.predicted["step_seconds"] < 0.3 * plan.predicted["stock_step_seconds"]
    assert plan.predicted["reduction_seconds"] == pytest.approx(
        8 * 4e9 / 2 * 2 / 4 / 0.25e9, rel=0.1
    )


def test_clusters_of_three_and_two_nodes_sum_hierarchically_over_sockets_only():
    """Clusters may have different numbers of ranks with gloo, but not with NCCL's collectives."""
    site = clusters.site("a ib 2Gb/s a[0-2]", "b roce 1.6Gb/s b[0-1]", ethernet="250Mb/s")
    plan = build_plan(site, Sizes())
    sockets, verbs = (
        plan.traffic_of(network_api).reductions[0] for network_api in ("sockets", "verbs")
    )
    assert sockets.clusters == ("a", "b") and not verbs.clusters
