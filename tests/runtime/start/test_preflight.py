"""The pairs that the preflight tries, what it leaves out, and its messages.

The nodes are threads that talk over loopback addresses.
"""

import os
import socket
import threading
from dataclasses import replace

import pytest
import torch.distributed as dist
from stores import Client

from holmes_ext.cluster.addresses import TcpLimits
from holmes_ext.cluster.fabric import ETHERNET, Fabric
from holmes_ext.cluster.site import Node, Port, Site
from holmes_ext.cluster.wan import Between, Wan
from holmes_ext.errors import HolmesError, RemoteError
from holmes_ext.options import Options
from holmes_ext.plan import maker
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.engine import EngineTraits
from holmes_ext.plan.sizes import Sizes
from holmes_ext.runtime.start import preflight
from holmes_ext.runtime.start.launcher import Process
from holmes_ext.runtime.start.preflight import ConnectionAttempt, ports_at_fault

FABRICS = (
    Fabric(ETHERNET, "ethernet", 10**9, 3e-5),
    Fabric("ib", "ib", 10**10, 2e-6),
    Fabric("roce", "roce", 10**10, 4e-6),
)
#: 127.FABRIC.0.NODE: every address of 127/8 is this machine's own.
NETS = {ETHERNET: 1, "ib": 2, "roce": 3}


def node(name, fabric, number, processes=1, **changed):
    def port(on):
        return Port(
            on,
            f"{on}0",
            changed.get(on, f"127.{NETS[on]}.0.{number}"),
            () if on == ETHERNET else ("mlx5_0:1",),
            None,
            10**9,
        )

    return Node(name, fabric, processes, (port(fabric), port(ETHERNET)))


def site_of(*, processes=1, **changed):
    names = [("a0", "ib"), ("a1", "ib"), ("b0", "roce"), ("b1", "roce")]
    return Site(
        tuple(node(n, f, i + 1, processes, **changed.get(n, {})) for i, (n, f) in enumerate(names)),
        FABRICS,
    )


def fly(site, plan, monkeypatch, fallback="ethernet", absent=(), seconds=(1.0, 5.0, 5.0, 10.0)):
    """run() of every rank in a thread; what each returned or raised."""
    for name, value in zip(("CONNECT_S", "ANSWER_S", "LISTEN_S", "FINDINGS_S"), seconds):
        monkeypatch.setattr(preflight, name, value)
    store, outcome = dist.HashStore(), {}

    def one(rank):
        process = Process(
            rank, plan.world_size, rank % plan.processes, plan.processes, "host", 1, "test"
        )
        host = site.nodes[rank // plan.processes].name
        try:
            arguments = Client(store), "holmes/1", process, host, site, plan
            outcome[rank] = preflight.run(
                *arguments, Options(fallback=fallback), EngineTraits(), maker
            )
        except HolmesError as error:
            outcome[rank] = error

    threads = [
        threading.Thread(target=one, args=(rank,))
        for rank in range(plan.world_size)
        if rank not in absent
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcome


def test_each_pair_of_nodes_once_for_each_fabric():
    site = site_of(processes=2)
    todo = preflight.neighbour_pairs(build_plan(site, Sizes(pipeline=2)))
    keys = [(pair.fabric, frozenset((pair.first, pair.second))) for pair in todo]
    assert len(keys) == len(set(keys))
    fast = {names for fabric, names in keys if fabric != ETHERNET}
    assert fast == {frozenset(("a0", "a1")), frozenset(("b0", "b1"))}
    assert {names for fabric, names in keys if fabric != ETHERNET} <= {
        names for fabric, names in keys if fabric == ETHERNET
    }
    assert {pair.kind for pair in todo if pair.fabric == "ib"} == {"data"}


def test_without_sizes_the_clusters_are_tried():
    site = site_of()
    todo = preflight.neighbour_pairs(build_plan(site))
    assert {(p.fabric, p.kind) for p in todo} >= {
        ("ib", "cluster"),
        ("roce", "cluster"),
        (ETHERNET, "world"),
    }


def test_64_ranks_need_few_connections():
    nodes = tuple(node(f"n{i}", "ib" if i < 4 else "roce", i + 1, 8) for i in range(8))
    site = Site(nodes, FABRICS)
    for sizes in (Sizes(pipeline=2), Sizes(pipeline=4, tensor=4), Sizes(tensor=8)):
        assert len(preflight.neighbour_pairs(build_plan(site, sizes))) <= 24


def test_all_is_well(monkeypatch):
    site = site_of(processes=2)
    plan = build_plan(site, Sizes(pipeline=2))
    outcome = fly(site, plan, monkeypatch)
    assert all(result == (site, plan, []) for result in outcome.values()) and len(outcome) == 8


def test_one_line_says_where_tcp_carries_less_than_a_link(monkeypatch):
    far = replace(site_of(), wan=Wan((), (Between(("ib", "roce"), 10**9, 0.05),)))
    plan = build_plan(far, Sizes(pipeline=2))
    monkeypatch.setattr(preflight, "read_limits", lambda: TcpLimits(1 << 20, 1 << 20, True))
    for _, _, lines in fly(far, plan, monkeypatch).values():
        (line,) = lines
        assert "preflight: TCP (4 nodes are short of it): node" in line and "tcp_wmem" in line
        assert "53.69 Mb/s of the 500 Mb/s from ib to roce: round trip 100 ms" in line
    monkeypatch.setattr(preflight, "read_limits", lambda: TcpLimits(1 << 28, 1 << 28, True))
    assert all(lines == [] for _, _, lines in fly(far, plan, monkeypatch).values())


@pytest.mark.parametrize("sizes", [Sizes(pipeline=2), None])
def test_a_fast_nic_that_does_not_answer_is_left_out_on_all_ranks(monkeypatch, sizes):
    site = site_of(b1={"roce": "192.0.2.1"})  # TEST-NET-1: nobody's; b1 cannot even listen there
    plan = build_plan(site, sizes)
    outcome = fly(site, plan, monkeypatch)
    assert all(result[:2] == outcome[0][:2] for result in outcome.values())
    after, new, (line,) = outcome[0]
    assert (
        after.shared_fabric(["b0", "b1"]).name == ETHERNET
        and after.shared_fabric(["a0", "a1"]).name == "ib"
    )
    assert new.nodes == plan.nodes and after.digest == site.digest
    for part in (
        "node b0",
        "node b1",
        "rank 2",
        "rank 3",
        "roce0 (mlx5_0:1)",
        "127.3.0.3",
        "192.0.2.1",
        "cannot listen on its own address",
    ):
        assert part in line, line
    if sizes:
        assert new.transports["data"] == ("ib", ETHERNET)
        assert "the data group of ranks 2, 3 goes over ethernet on all its ranks" in line


def test_fail_ends_all_ranks(monkeypatch):
    site = site_of(b1={"roce": "192.0.2.1"})
    outcome = fly(site, build_plan(site, Sizes(pipeline=2)), monkeypatch, fallback="fail")
    assert all(
        "node b1 (rank 3" in str(error) and "--holmes-fallback ethernet" in str(error)
        for error in outcome.values()
    ), outcome
    assert [isinstance(outcome[rank], RemoteError) for rank in range(4)] == [
        False,
        True,
        True,
        True,
    ]


def test_bad_ethernet_ends_all_ranks(monkeypatch):
    site = site_of(b0={ETHERNET: "192.0.2.1"})
    outcome = fly(site, build_plan(site, Sizes(pipeline=2)), monkeypatch)
    assert all(
        "b0 (rank 2, ethernet0, 192.0.2.1)" in str(error) and "fix its cable" in str(error)
        for error in outcome.values()
    ), outcome


def hello_to(address, port, expected, token="t", answer_s=5.0):
    hello = {"node": "a0", "token": token}
    answer = {"node": expected, "token": token}
    return preflight.exchange_hello(address, (address, port), hello, answer, 5.0, answer_s)


def test_an_address_that_another_node_answers():
    site = site_of(b1={"roce": "127.3.0.3"})  # b0's
    listeners = preflight.NodeListeners(
        site, "b0", [preflight.NeighbourPair("roce", "b1", "b0", "data", (2, 3))], "t"
    )
    try:
        port = listeners.ports["roce"]
        assert (
            hello_to("127.3.0.3", port, "b1")
            == "the address is answered by node 'b0', so two nodes have it"
        )
        assert hello_to("127.3.0.3", port, "b0") == ""
        assert hello_to("127.3.0.3", port, "b0", token="another job") != ""
    finally:
        listeners.close()


def test_a_node_that_stays_away_is_named(monkeypatch):
    site = site_of()
    outcome = fly(
        site,
        build_plan(site, Sizes(pipeline=2)),
        monkeypatch,
        absent={3},
        seconds=(0.5, 0.5, 0.5, 2.0),
    )
    assert len(outcome) == 3 and all(
        "node b1 (rank 3) did not finish it within 2 s" in str(error) for error in outcome.values()
    ), outcome


def test_nobody_answers_although_the_port_is_open():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        problem = hello_to("127.0.0.1", silent.getsockname()[1], "b", answer_s=0.2)
    assert "no answer within 0.2 s" in problem


def test_garbage_is_no_answer():
    def serve(listener):
        connection, _ = listener.accept()
        connection.sendall(os.urandom(64) + b"\n")
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        assert hello_to("127.0.0.1", listener.getsockname()[1], "b")
        thread.join()


@pytest.mark.parametrize(
    "findings, expected",
    [
        ([("f", "a", "b", ""), ("f", "b", "c", "x"), ("f", "c", "a", "x")], {"c"}),
        ([("f", "a", "b", "x")], {"a", "b"}),
        (
            [("f", "a", "b", "x"), ("f", "b", "c", ""), ("f", "c", "d", ""), ("f", "d", "a", "")],
            {"a", "b"},
        ),
        ([("f", "a", "b", ""), ("g", "a", "b", "")], set()),
        (
            [
                ("f", "a", "b", "x"),
                ("f", "b", "c", "x"),
                ("f", "c", "d", "x"),
                ("f", "d", "a", "x"),
            ],
            {"a", "b", "c", "d"},
        ),
    ],
)
def test_who_is_to_blame(findings, expected):
    attempts = [ConnectionAttempt(*finding) for finding in findings]
    assert {node for node, _ in ports_at_fault(attempts)} == expected


def test_a_port_without_an_address_is_said_not_to_be_tried(monkeypatch):
    site = site_of(a0={"ib": ""})
    _, _, (line,) = fly(site, build_plan(site, Sizes(pipeline=2)), monkeypatch)[1]
    assert line.startswith("preflight: not tried on ib: a0 (ib0 (mlx5_0:1))"), line


@pytest.mark.parametrize("net", ["Libfabric", "auto", "IB", ""])
def test_the_network_of_a_plugin_is_confirmed(monkeypatch, net):
    """Sockets cannot try it; what is known is on which nodes the plugin is."""
    site = site_of()
    fabrics = tuple(replace(one, net=net) if one.name == "ib" else one for one in site.fabrics)
    site = replace(site, fabrics=fabrics)
    _, _, lines = fly(site, build_plan(site, Sizes(pipeline=2)), monkeypatch)[1]
    line = "preflight: ib: the plugin of NCCL's network 'Libfabric' was found on 2 of its 2 nodes"
    assert lines == ([line] if net == "Libfabric" else [])
