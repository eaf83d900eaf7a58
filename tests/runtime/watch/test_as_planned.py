"""Tests the comparison of what a job did with what holmes planned for it.

The plan says which network each process group uses and how gradients are reduced. A job prints one line with
"not as planned" for each difference, and nothing if there is none. These tests make each difference on
purpose. The integration tests check that real jobs print no such line (integration_tests/jobs.py).
"""

from dataclasses import replace

import pytest

from holmes_ext.cluster.fabric import ETHERNET, Fabric
from holmes_ext.cluster.site import Node, Port, Site
from holmes_ext.options import Options
from holmes_ext.patches.traits import ENGINES
from holmes_ext.plan import maker
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.cost.model import load_model
from holmes_ext.plan.sizes import Sizes
from holmes_ext.runtime import session
from holmes_ext.runtime.groups.transport import GLOO_VARIABLE, as_made
from holmes_ext.runtime.session import GroupRecord, Session
from holmes_ext.runtime.start import launcher
from holmes_ext.runtime.watch.as_planned import COMPARED_STEP, Comparison

GB = 10**9


@pytest.fixture
def job():
    """Return a function that makes a session on two clusters of four nodes, with its groups.

    Its arguments are (engine, rank, sizes, **options).
    """

    def make(engine, rank=0, sizes=Sizes(), **options):
        fast = {"a": Port("a", "ib0", "10.1.0.1"), "b": Port("b", "roce0", "10.2.0.1")}
        nodes = (
            Node(f"{name}{i}", name, 1, (fast[name], Port(ETHERNET, "eth0", "10.0.0.1")))
            for i in range(4)
            for name in "ab"
        )
        fabrics = (
            Fabric(ETHERNET, "ethernet", GB, 1e-4),
            Fabric("a", "ib", 100 * GB, 2e-6),
            Fabric("b", "roce", 100 * GB, 2e-6),
        )
        site, traits, asked = Site(tuple(nodes), fabrics), ENGINES[engine], Options(**options)
        model = load_model("examples/models/gpt3_xl.toml") if sizes.pipeline > 1 else None
        plan = build_plan(site, sizes, model=model, options=asked, engine=traits)
        process = launcher.Process(rank, 8, 0, 1, "", 0, launcher.NONE)
        current = Session(asked, process, site, plan, rank, engine=traits, maker=maker)
        for kind, ranks in plan.groups():
            if rank in ranks:
                current.groups.append(
                    GroupRecord(kind, ranks, "gloo", current.transport(ranks, "gloo"))
                )
        session.set_active(current)
        return current

    yield make
    session.set_active(None)


def compared(current, capsys):
    """Let a job take a few training steps, after which holmes compares what the job did with its plan.

    Returns:
        What the job did, as holmes's report has it, and the lines that holmes printed to stderr.
    """
    documents = []  # of the report
    comparison = Comparison(current, documents.append)  # `current` is the job's session
    for _ in range(COMPARED_STEP + 3):  # compares after step COMPARED_STEP, and only then
        comparison.step_done()
    (document,) = documents
    return document["done"], capsys.readouterr().err.splitlines()


def follow(current, **other):
    """Sum the gradients of this rank's stage as the plan has it, but for `other`."""
    ranks = next(
        ranks for kind, ranks in current.plan.groups() if kind == "data" and current.rank in ranks
    )
    planned = current.reduction(ranks, "gloo")
    done = {"hierarchical": bool(planned.clusters), "overlap": planned.overlap, **other}
    session.note_reduction(ranks, planned, 1e12, **done)
    return planned


@pytest.mark.parametrize("engine", ["ddp", "deepspeed"])
def test_one_ring_in_place_of_hierarchical(engine, job, capsys):
    current = job(engine)
    assert follow(current).clusters == ("a", "b")
    done, lines = compared(current, capsys)
    assert done["differences"] == lines == [] and done["reductions"] == [[0, True, True]]
    current = job(engine)
    follow(current, hierarchical=False)
    done, lines = compared(current, capsys)
    text = "gradients of stage 0 are summed in one ring, planned hierarchically"
    assert done["differences"] == [text] and lines == [f"holmes: not as planned: {text}"]


def test_what_holmes_takes_over_never_came(job, capsys):
    done, (line,) = compared(job("deepspeed"), capsys)
    assert "by deepspeed itself, planned hierarchically" in line and done["reductions"] == []
    assert compared(job("fsdp2"), capsys)[1] == [], "FSDP2 shards: nothing of holmes's is planned"
    assert compared(job("megatron-lm", overlap="off"), capsys)[1] == []


def test_a_framework_that_keeps_its_own_reduction_is_no_difference(job, capsys):
    current = job("deepspeed")
    current.keeps_own_reduction = True  # as ZeRO 3, of which holmes has printed it
    done, lines = compared(current, capsys)
    assert done["differences"] == lines == [] and done["reductions"] == []


def test_no_overlap(job, capsys):
    current = job("deepspeed")
    follow(current, overlap=False)
    assert "after the backward pass, planned under" in compared(current, capsys)[1][0]
    current = job("deepspeed")
    follow(current, overlap=False, reported=True)
    done, lines = compared(current, capsys)
    assert len(done["differences"]) == 1 and lines == [], "the user knows why"


def test_another_nic(job, capsys):
    current = job("ddp", sizes=Sizes(pipeline=2))
    here, fabrics = current.node, current.site.fabric_by_name
    moved = [
        replace(
            one,
            transport=as_made(
                one.transport, here, "gloo", fabrics, environ={GLOO_VARIABLE: "eth0"}
            ),
        )
        for one in current.groups
    ]
    follow(current)
    before, current.groups[:] = list(current.groups), moved
    lines = compared(current, capsys)[1]
    assert lines == ["holmes: not as planned: data groups are on ethernet, planned on a"]
    assert all(
        as_made(one.transport, here, "gloo", fabrics, environ={}) == one.transport for one in before
    )


@pytest.mark.parametrize("engine", ["deepspeed", "megatron-lm"])
def test_another_number_in_flight(engine, job, capsys):
    current = job(engine, sizes=Sizes(pipeline=2))
    planned = current.plan.traffic_of("sockets").in_flight
    assert planned
    follow(current)
    (line,) = compared(current, capsys)[1]
    assert "are the framework's own, planned " + "+".join(map(str, planned)) in line
    current = job(engine, sizes=Sizes(pipeline=2))
    follow(current)
    current.in_flight = planned
    assert compared(current, capsys)[1] == []
