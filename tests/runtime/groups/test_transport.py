from datetime import timedelta
from types import SimpleNamespace

import pytest

from holmes_ext.cluster.fabric import Fabric
from holmes_ext.cluster.nccl import file_settings
from holmes_ext.cluster.site import Node, Port, Site
from holmes_ext.errors import HolmesError
from holmes_ext.options import Options
from holmes_ext.plan import maker
from holmes_ext.plan.decide import derive_traffic
from holmes_ext.plan.plan import Plan
from holmes_ext.runtime.groups.transport import (
    Transport,
    gloo_interface,
    nccl_options,
    node_environment,
    refuse_forced,
    transport_on,
)
from holmes_ext.runtime.session import Session
from holmes_ext.runtime.start.launcher import Process

IB = Port("a", "ib0", "10.1.0.1", ("mlx5_0:1",), None, 200)
IB_NO_IP = Port("a", "", "", ("mlx5_0:1",), None, 200)
ROCE = Port("b", "roce0", "10.2.0.1", ("mlx5_2:1", "mlx5_3:1"), 3, 100)
ETH = Port("ethernet", "eth0", "10.0.0.1", rate_bps=25)
FABRICS = (
    Fabric("ethernet", "ethernet", 25, 0),
    Fabric("a", "ib", 200, 0),
    Fabric("b", "roce", 100, 0),
)


def site(**ports):
    nodes = tuple(Node(name, name[0], 1, (*fast, ETH)) for name, fast in ports.items())
    return Site(nodes, FABRICS)


def transport(of, node, *ranks, backend="nccl"):
    """Of a group of `ranks`, as the rank on `node` sees it."""
    plan = derive_traffic(Plan(of.digest, tuple(n.name for n in of.nodes), 1), of)
    rank = plan.nodes.index(node)
    return Session(
        Options(), Process(rank, plan.world_size, 0, 1, "", 0, "test"), of, plan, rank, maker=maker
    ).transport(ranks, backend)


def test_a_group_takes_the_fastest_fabric_that_all_share():
    s = site(a0=[IB], a1=[IB], b0=[ROCE], m0=[IB, ROCE])
    assert transport(s, "m0", 0, 3) == Transport("a", "ib", "ib0", "IB")
    assert transport(s, "m0", 2, 3) == Transport("b", "roce", "roce0", "IB")
    assert transport(s, "m0", 0, 2, 3) == Transport("ethernet", "ethernet", "eth0", "Socket")
    assert transport(s, "m0", 3) == Transport("local", "local", "lo", "")


def test_gloo_needs_an_address_on_every_member():
    s = site(a0=[IB], a1=[IB_NO_IP])
    for node in ("a0", "a1"):  # both ends come to the same
        assert transport(s, node, 0, 1, backend="gloo").fabric == "ethernet"
        assert transport(s, node, 0, 1).fabric == "a"


@pytest.mark.parametrize("backend", ["ucc", "mpi"])
def test_other_backends_choose_for_themselves(backend):
    assert transport(site(a0=[IB], a1=[IB]), "a0", 0, 1, backend=backend) == Transport(
        f"chosen by {backend}", "", "", ""
    )


def test_gloo_interface_is_set_inside_only_and_the_users_wins():
    s = site(a0=[IB], a1=[IB])
    over = transport(s, "a0", 0, 1, backend="gloo")
    environ = {}
    with pytest.raises(KeyError), gloo_interface(over, environ):
        assert environ == {"GLOO_SOCKET_IFNAME": "ib0"}
        raise KeyError
    assert environ == {}
    environ = {"GLOO_SOCKET_IFNAME": "mine"}
    with gloo_interface(over, environ):
        assert environ == {"GLOO_SOCKET_IFNAME": "mine"}
    assert environ == {"GLOO_SOCKET_IFNAME": "mine"}


class FakeOptions:
    """The shape of ProcessGroupNCCL.Options."""

    def __init__(self):
        self.config = SimpleNamespace(net_name=None, max_ctas=0, split_share=0)
        self.is_high_priority_stream = False


def test_nccl_options_are_fresh_and_keep_settings():
    s = site(a0=[IB], a1=[IB])
    over = transport(s, "a0", 0, 1)
    given = FakeOptions()
    given.config.max_ctas, given.is_high_priority_stream = 7, True
    first, second = (nccl_options(over, given, FakeOptions) for _ in range(2))
    assert first is not second and first is not given and first.config is not given.config
    assert (first.config.net_name, first.config.max_ctas, first.is_high_priority_stream) == (
        "IB",
        7,
        True,
    )
    assert given.config.net_name is None
    assert nccl_options(over, None, FakeOptions).config.net_name == "IB"


@pytest.mark.parametrize("as_parent", [False, True])
def test_resources_are_not_shared_with_a_group_of_another_network(as_parent):
    """A group of another network may not share: ncclCommSplit ends with ncclInvalidUsage."""
    s, other = site(a0=[IB], a1=[IB]), FakeOptions()
    other.config.split_share, other.config.max_ctas = 1, 7
    given, parent = (None, other) if as_parent else (other, None)
    made = nccl_options(transport(s, "a0", 0, 1), given, FakeOptions, None, parent)
    assert (made.config.split_share, made.config.max_ctas, other.config.split_share) == (0, 7, 1)


def test_a_users_net_name_stays():
    s = site(a0=[IB], a1=[IB])
    given = FakeOptions()
    given.config.net_name = "Socket"
    assert nccl_options(transport(s, "a0", 0, 1), given, FakeOptions) is given


def test_node_environment():
    s = site(b0=[ROCE])
    environ = {"NCCL_NET": "IB", "NCCL_IB_HCA": "mine"}
    lines = node_environment(s.nodes[0], environ)
    assert environ == {
        "NCCL_IB_HCA": "mine",
        "NCCL_SOCKET_IFNAME": "=eth0",
        "NCCL_IB_GID_INDEX": "3",
    }
    assert (
        len(lines) == 2
        and "NCCL_IB_HCA=mine was set by you" in lines[0]
        and "NCCL_NET=IB is unset" in lines[1]
    )
    environ = {}
    assert node_environment(s.nodes[0], environ) == []
    assert environ["NCCL_IB_HCA"] == "=mlx5_2:1,mlx5_3:1"


@pytest.mark.parametrize(
    "name, value, planned",
    [
        ("NCCL_IB_HCA", "mlx5_2", "=mlx5_2:1,mlx5_3:1"),
        ("NCCL_IB_GID_INDEX", "0", "3"),
        ("NCCL_SOCKET_IFNAME", "bond0", "=eth0"),
    ],
)
def test_each_variable_that_the_user_sets_wins(name, value, planned):
    """As docs/nccl_variables.md says: the user's value stays, the other two are set, one line reports it."""
    node = site(b0=[ROCE]).nodes[0]
    chosen: dict[str, str] = {}
    node_environment(node, chosen)
    environ = {name: value}
    assert node_environment(node, environ) == [
        f"{name}={value} was set by you and stays (holmes would use {planned})"
    ]
    assert environ == {**chosen, name: value} and chosen[name] == planned


def test_a_variable_that_is_set_to_nothing_counts_as_unset():
    environ = {"NCCL_IB_HCA": ""}
    assert node_environment(site(b0=[ROCE]).nodes[0], environ) == []
    assert environ["NCCL_IB_HCA"] == "=mlx5_2:1,mlx5_3:1"


@pytest.mark.parametrize(
    "requested, told",
    [
        ("AWS Libfabric", "groups on efa request 'Libfabric' by name"),
        ("socket", "groups on ethernet request 'Socket' by name"),
        ("gIB", "no group of this node uses it"),
    ],
)
def test_a_message_tells_which_groups_request_the_network_of_nccl_net(requested, told):
    fabrics = (FABRICS[0], Fabric("efa", "efa", 400, 0, net="Libfabric"))
    ports = Port("efa", hcas=("rdmap64s0:1",), verbs=False), Port("ethernet", "eth0", "10.0.0.1")
    environ = {"NCCL_NET": requested}
    lines = node_environment(Node("a0", "a", 1, ports), environ, fabrics)
    assert f"NCCL_NET={requested} is unset" in lines[0] and told in lines[0]
    assert environ == {"NCCL_SOCKET_IFNAME": "=eth0"}


def test_groups_on_a_plugins_fabric_request_its_network():
    fabric = Fabric("efa", "efa", 400, 0, net="Libfabric")
    node = Node("a0", "a", 1, (Port("efa", hcas=("rdmap64s0:1",), verbs=False), Port("ethernet")))
    assert transport_on(fabric, node).net_name == "Libfabric"
    # A file of NCCL may force another name of the same network.
    refuse_forced(transport_on(fabric, node), {"AWS Libfabric": "/etc/nccl.conf of node a0"})


def test_shared_resources_are_unset_where_a_node_has_several_networks():
    environ = {"NCCL_COMM_SPLIT_SHARE_RESOURCES": "1"}
    (line,) = node_environment(site(b0=[ROCE]).nodes[0], environ)
    assert (
        "NCCL_COMM_SPLIT_SHARE_RESOURCES=1 is unset" in line
        and "NCCL_COMM_SPLIT_SHARE_RESOURCES" not in environ
    )


def test_a_split_keeps_its_parents_settings_but_not_its_network():
    s = site(a0=[IB], a1=[IB])
    parent = FakeOptions()
    parent.config.net_name, parent.config.max_ctas, parent.is_high_priority_stream = (
        "Socket",
        7,
        True,
    )
    made = nccl_options(transport(s, "a0", 0, 1), None, FakeOptions, timedelta(minutes=3), parent)
    assert (made.config.net_name, made.config.max_ctas, made.is_high_priority_stream) == (
        "IB",
        7,
        True,
    )
    assert made._timeout == timedelta(minutes=3) and parent.config.net_name == "Socket"
    inside = nccl_options(transport(s, "a0", 0), None, FakeOptions, None, parent)
    assert (
        inside.config.net_name is None
    )  # in one node NCCL is left to choose, whatever the parent had


@pytest.mark.parametrize(
    "net, name", [("", "IB"), ("AWS Libfabric", "AWS Libfabric"), ("auto", "")]
)
def test_the_network_of_a_fabric_is_what_cluster_toml_calls_it(net, name):
    s = site(a0=[IB], a1=[IB])
    s = Site(s.nodes, (FABRICS[0], Fabric("a", "ib", 200, 0, net=net), FABRICS[2]))
    assert transport(s, "a0", 0, 1).net_name == name


def test_a_network_that_a_file_forces_on_all_groups_is_refused_where_the_plan_has_another():
    over = Transport("ethernet", "ethernet", "eth0", "Socket")
    refuse_forced(over, {})
    refuse_forced(
        over, {"socket": "/etc/nccl.conf of node a0"}
    )  # NCCL does not look at the case either
    refuse_forced(Transport("local", "local", "lo", ""), {"IB": "/etc/nccl.conf of node a0"})
    with pytest.raises(
        HolmesError,
        match="NCCL_NET=IB in /etc/nccl.conf of node a0 overrides .* planned over Socket",
    ):
        refuse_forced(over, {"IB": "/etc/nccl.conf of node a0"})


def test_nodes_without_verbs_and_with_files_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(file_settings, "__defaults__", (str(tmp_path / "nccl.conf"),))
    (tmp_path / "nccl.conf").write_text("NCCL_SOCKET_IFNAME=bond0\n")
    environ = {}
    no_verbs = Port(
        "b", "roce0", "10.2.0.1", ("mlx5_2:1",), 3, 100, no_verbs="NCCL_IB_DISABLE=1 is set"
    )
    (line,) = node_environment(site(b0=[no_verbs]).nodes[0], environ)
    assert environ == {} and "NCCL_SOCKET_IFNAME=bond0 is set in" in line and "=eth0" in line
