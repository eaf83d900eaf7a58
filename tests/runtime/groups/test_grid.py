"""grid: the sizes that a framework makes, against the plan's."""

from dataclasses import replace

import pytest
from clusters import example

from holmes_ext.cluster.fabric import Fabric
from holmes_ext.cluster.site import Node, Port, Site
from holmes_ext.errors import HolmesError
from holmes_ext.options import Options
from holmes_ext.patches.deepspeed import p2p as deepspeed_p2p
from holmes_ext.patches.megatron.command_line.describe import sizes_from_arguments
from holmes_ext.plan import maker
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.sizes import Sizes
from holmes_ext.runtime import session as sessions
from holmes_ext.runtime.groups import grid
from holmes_ext.runtime.session import Session
from holmes_ext.runtime.start.launcher import Process

SITE = example()
TURN = Site(tuple(SITE.node_by_name[name] for name in ("a0", "b0", "a1", "b1")), SITE.fabrics)


def session(sizes=None, given=(), nodes=None, site=SITE):
    plan = build_plan(site, sizes)
    plan = replace(plan, nodes=nodes) if nodes else plan
    return Session(
        Options(given=frozenset(given)),
        Process(0, plan.world_size, 0, 1, "", 0, "test"),
        site,
        plan,
        0,
        maker=maker,
    )


IN_TURN = {"nodes": ("a0", "b0", "a1", "b1")}


def test_sizes_given_on_purpose_must_be_the_programs():
    planned = session(Sizes(pipeline=2), given={"sizes"})
    grid.refuse_other_sizes(planned, Sizes(pipeline=2, data=2))
    with pytest.raises(
        HolmesError, match="--holmes-sizes says pipeline=2, but the program initializes tensor=2"
    ):
        grid.refuse_other_sizes(planned, Sizes(tensor=2, data=2))
    # read off the command line: a guess
    grid.refuse_other_sizes(session(Sizes(pipeline=2)), Sizes(tensor=2, data=2))


class Grid:
    """What PipelineParallelGrid says of itself."""

    def __init__(self, pipeline, tensor=1):
        self.pipe_parallel_size, self.model_parallel_size = pipeline, tensor


@pytest.mark.parametrize("planned, said", [(4, "pipeline=4"), (1, "pipeline=1")])
def test_deepspeeds_grid_is_compared_too(monkeypatch, planned, said):
    """pipeline=4 ran on a script of 2 stages without a word, pipeline=1 died in an IndexError."""
    monkeypatch.setattr(sessions, "_active", session(Sizes(pipeline=planned), given={"sizes"}))
    with pytest.raises(
        HolmesError, match=f"--holmes-sizes says {said}, but the program initializes pipeline=2"
    ):
        deepspeed_p2p._check_grid(lambda: None, Grid(2), (), {})
    deepspeed_p2p._check_grid(lambda: None, Grid(planned), (), {})


def advice(current, sizes, instances=1):
    return maker.advice_on_spanning(current.plan, current.site, sizes, instances)


def test_an_instance_is_to_be_a_cluster():
    """Data 4 spans in any order; its two slices need not."""
    current = session(Sizes(data=4), site=TURN)
    assert advice(current, Sizes(data=4), 2).endswith(
        "span clusters (on ethernet) and need not: start without --holmes-sizes"
    )
    assert (
        sizes_from_arguments(
            "--tensor-model-parallel-size 2 --num-distributed-optimizer-instances 2".split()
        )
        is None
    )
    assert sizes_from_arguments(
        "--tensor-model-parallel-size 2 --num-distributed-optimizer-instances 1".split()
    ) == Sizes(tensor=2)


def test_what_spans_is_told_with_the_way_out_if_there_is_one():
    pipelined = Sizes(pipeline=2, data=2)
    text = "2 data groups span clusters (on ethernet) and need not: start with --holmes-sizes pipeline=2"
    assert advice(session(**IN_TURN), pipelined) == text
    assert (
        advice(session(**IN_TURN), Sizes(data=4)) == "1 data group spans clusters (on ethernet)"
    )  # no order helps
    assert advice(session(pipelined), pipelined) == ""
    assert advice(session(pipelined, **IN_TURN), pipelined) == ""  # the start line says it


def test_where_nobody_has_better_nothing_spans(monkeypatch, capsys):
    """The check of DeepSpeed's grid called every group on Ethernet crossing."""
    nodes = tuple(Node(f"n{i}", "ab"[i % 2], 1, (Port("ethernet"),)) for i in range(4))
    slow = session(site=Site(nodes, (Fabric("ethernet", "ethernet", 10**9, 3e-5),)))
    monkeypatch.setattr(sessions, "_active", slow)
    deepspeed_p2p._check_grid(lambda: None, Grid(2), (), {})
    assert capsys.readouterr().err == ""
