"""Tests the one-line message with which a job ends after a failed reduction of gradients.

The message names the lost node, which holmes finds by its IP address in the error text of gloo.
"""

import pytest
import torch.distributed as dist
from ranks import run_ranks

from holmes_ext.cluster.fabric import ETHERNET, Fabric
from holmes_ext.cluster.site import Node, Port, Site
from holmes_ext.options import Options
from holmes_ext.plan import maker
from holmes_ext.plan.plan import Plan
from holmes_ext.runtime import session
from holmes_ext.runtime.start.launcher import Process
from holmes_ext.runtime.watch.failure import describe_failure, note

FABRICS = (
    Fabric("ib", "ib", 2 * 10**9, 5e-6),
    Fabric("roce", "roce", 2 * 10**9, 5e-6),
    Fabric(ETHERNET, "ethernet", 250 * 10**6, 5e-5),
)


def node(number, fabric):
    ports = (
        Port(fabric, f"{fabric}0", f"10.1.0.{number}"),
        Port(ETHERNET, "eth0", f"10.0.0.{number}/16"),
    )
    return Node(f"n{number}", fabric, 1, ports)


def activate(rank=0):
    """Make this process rank `rank` of a holmes job on the nodes n1, n2 (InfiniBand) and n3, n4 (RoCE).

    The ranks are on the nodes in another order than the nodes' names: rank 0 is on n3, rank 1 on n1.
    """
    site = Site(
        tuple(node(number, "ib" if number < 3 else "roce") for number in (1, 2, 3, 4)), FABRICS
    )
    plan = Plan(site.digest, ("n3", "n1", "n4", "n2"), 1)  # the node of each rank
    process = Process(rank, 4, 0, 1, "127.0.0.1", 29500, "torchrun")
    session.set_active(session.Session(Options(), process, site, plan, rank, maker=maker))


@pytest.fixture
def current():
    activate()
    yield session.active()
    session.set_active(None)


def one_line(rank, error):
    activate(rank)
    return describe_failure("bucket 1 of 3", (0, 1), FABRICS[2], error)


def test_names_the_node_behind_the_address():
    for address in ("10.1.0.4", "10.0.0.4"):
        error = f"[pair.cc:553] Connection closed by peer [{address}]:4711. This is typically caused by\nx"
        first, second = run_ranks(one_line, 2, error)
        assert first.startswith(
            "rank 0 on node n3: the reduction of bucket 1 of 3 failed over fabric ethernet in the group of "
            "ranks 0, 1"
        )
        assert second.startswith("rank 1 on node n1: the reduction of bucket 1 of 3 failed")
        assert (
            "Connection closed by peer" in first and "typically" not in first and "\n" not in first
        )


def test_the_first_sight_is_repeated():
    lines = run_ranks(one_line, 2, "Connection closed by peer [10.1.0.1]:4711")
    assert sum("first seen as: rank" in line for line in lines) == 1
    assert all("node n1 (rank 1) is lost" in line for line in lines)


def refusing(rank, error):
    """Let rank 0 end because of a wrong flag; return the message of rank 1, whose connection then closes."""
    activate(rank)
    if rank == 0:  # note() tells the other ranks the reason
        note("rank 0: --holmes-outer: every=7 is not divisible by fragments=2")
    dist.barrier()
    return describe_failure("bucket 1 of 3", (0, 1), FABRICS[2], error) if rank else ""


def test_what_another_rank_refused_is_all_that_is_said():
    said = run_ranks(refusing, 2, "Connection closed by peer [10.1.0.1]:4711")[1]
    assert said == (
        "rank 0: --holmes-outer: every=7 is not divisible by fragments=2 "
        "(rank 1 on node n1 ends with it)"
    )


def test_an_unknown_address_names_nobody():
    lines = run_ranks(one_line, 2, "Connection closed by peer [192.168.0.1]:4711")
    assert not any("is lost" in line for line in lines)
