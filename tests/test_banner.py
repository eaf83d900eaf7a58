"""banner: what the start line says of ranks, networks and reductions."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from clusters import example

from holmes_ext import banner
from holmes_ext.cluster.site import Port, Site
from holmes_ext.options import Options
from holmes_ext.plan import maker
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.cost.model import load_model
from holmes_ext.plan.sizes import Sizes
from holmes_ext.plan.workload import Workload
from holmes_ext.runtime.session import Session
from holmes_ext.runtime.start.launcher import Process
from holmes_ext.samples import examples

SITE = example()
TURN = Site(tuple(SITE.node_by_name[name] for name in ("a0", "b0", "a1", "b1")), SITE.fabrics)


@pytest.fixture(autouse=True)
def no_patches(monkeypatch):
    monkeypatch.setattr(banner, "_patches", lambda: "patched: nothing")


def said(site=TURN, sizes=None, options=Options(), **more):
    plan = build_plan(site, sizes, options=options, **more)
    return banner.describe(
        Session(options, Process(0, 4, 0, 1, "", 0, "test"), site, plan, 0, maker=maker)
    )


def test_without_sizes():
    text = (
        "2 clusters: a (2 nodes, ib) -> b (2 nodes, roce); world size 4, ranks renumbered; patched: "
        "nothing"
    )
    assert said() == text
    assert "order kept" in said(SITE)


def test_a_pipeline_over_two_clusters():
    text = said(sizes=Sizes(2))
    assert (
        "pipeline 2 x data 2, layers as the framework splits them; data groups on ib and roce"
        in text
    )
    assert (
        "pipeline, world groups on ethernet; reductions planned for a nominal model; patched"
        in text
    )
    assert "2 data groups span" not in text and "with gloo" not in text


def test_a_model_that_was_told_and_what_spans():
    text = said(sizes=Sizes(), workload=Workload(), basis="m.toml")
    assert "1 data group spans clusters (on ethernet)" in text and "nominal" not in text
    assert "nominal" not in said(sizes=Sizes(2), options=Options(overlap="off"))


def test_layers_and_gloos_own_networks():
    nodes = [
        replace(node, ports=(Port(node.ports[0].fabric, "", "", ("hca",)), node.ports[-1]))
        for node in SITE.nodes
    ]
    text = said(Site(tuple(nodes), SITE.fabrics), Sizes(2), stage_layers=(5, 1))
    assert "explicit stages of 5+1 layers" in text and "as the framework" not in text
    assert (
        "data groups on ib and roce, pipeline, world groups on ethernet; with gloo data, pipeline, world "
        "groups on" in text
    )


@pytest.mark.parametrize("on", [True, False])
def test_what_an_stage_link_does(monkeypatch, on):
    """Only where a framework's stage links are patched; more micro-batches with what they cost."""
    monkeypatch.setattr(
        banner,
        "registry",
        lambda: SimpleNamespace(summary=lambda: (["megatron-stage-links"] * on, {})),
    )
    assert ("; pipeline sends do not block; " in said(sizes=Sizes(2))) == on
    assert "do not block" not in said(sizes=Sizes(2), options=Options(inflight="off"))
    model = replace(load_model(examples() / "models" / "gpt_7.5b.toml"), global_batch=64)
    text = said(sizes=Sizes(2), options=Options(inflight="3"), model=model)
    assert (
        "pipeline sends do not block, 5+1 micro-batches in flight hide the stage links, " in text
    ) == on
    assert ("GB more on the fullest stage" in text) == on
