"""doctor/side_by_side.py: what differs between nodes, and the file that one node's check is."""

import json
from dataclasses import replace

import clusters
import pytest
from nics import ETHERNET, IB, ROCE

from holmes_ext.cluster.nccl import NcclOfNode
from holmes_ext.cluster.node_report import NodeReport
from holmes_ext.doctor.finding import note
from holmes_ext.doctor.side_by_side import NodeCheck, compare, load_check
from holmes_ext.errors import HolmesError

SPEC = clusters.spec("a ib 200Gb/s a[0-2]", "b roce 100Gb/s b0", ethernet="25Gb/s")


def check(name, *nics, versions=None, settings=None, findings=()):
    node = NodeReport(name, f"boot/{name}", "eth0", tuple(nics), 1)
    return NodeCheck(node, {"torch": "2.13.0", **(versions or {})}, settings or {}, findings)


def healthy():
    return [check(f"a{n}", IB, ETHERNET) for n in range(3)] + [check("b0", ROCE, ETHERNET)]


def texts(findings):
    return [f"{f.level} {f.about}: {f.what}" for f in findings]


def test_alike_nodes_have_no_findings():
    assert compare(healthy(), SPEC) == [] and compare(healthy(), None) == []


def test_a_node_without_the_plugin_of_the_others_is_named():
    checks = [check(f"a{n}", replace(IB, kind="efa", subnet_prefix=""), ETHERNET) for n in range(3)]
    for number, one in enumerate(checks):
        nccl = NcclOfNode(plugin="/opt/libnccl-net.so", network="Libfabric")
        if number == 1:
            nccl = NcclOfNode(plugin_problem="no libnccl-net.so is on LD_LIBRARY_PATH")
        checks[number] = replace(one, node=replace(one.node, nccl=nccl))
    described = clusters.spec("a efa 200Gb/s a[0-2]", ethernet="25Gb/s")
    for spec in (described, None):
        (text,) = texts(compare(checks, spec))
        assert text.endswith(": network of NCCL's plugin: Libfabric on most, but a1 none")


@pytest.mark.parametrize(
    "odd, expected",
    [
        (
            dict(nics=(replace(IB, rate_bps=10**11), ETHERNET)),
            "note cluster a: rate of the fast NICs: 200 Gb/s on most, but a1 100 Gb/s",
        ),
        (
            dict(nics=(replace(IB, rate_bps=10**11), ETHERNET)),
            "problem a1: mlx5_0:1 runs at 100 Gb/s, but the rate of fabric 'a' is 200 Gb/s in cluster.toml",
        ),
        (
            dict(nics=(IB, replace(ETHERNET, rate_bps=10**10))),
            "problem a1: eth0 runs at 10 Gb/s, but the rate of fabric 'ethernet' is 25 Gb/s in cluster.toml",
        ),
        (
            dict(nics=(replace(IB, mtu=4092), ETHERNET)),
            "problem cluster a: MTU of the fast NICs: 2044 on most, but a1 4092",
        ),
        (
            dict(nics=(replace(IB, device="ibp1s0"), ETHERNET)),
            "note cluster a: names of the fast NICs: mlx5_0:1 on most, but a1 ibp1s0:1",
        ),
        (
            dict(nics=(IB, replace(IB, device="mlx5_1"), ETHERNET)),
            "note cluster a: number of fast NICs that are up: 1 on most, but a1 2",
        ),
        (
            dict(versions={"torch": "2.4.0"}),
            "problem all nodes: version of torch: 2.13.0 on most, but a1 2.4.0",
        ),
        (
            dict(settings={"NCCL_IB_HCA": "mlx5_0"}),
            "problem all nodes: NCCL_IB_HCA: unset on most, but a1 mlx5_0",
        ),
    ],
)
def test_an_odd_node_is_named(odd, expected):
    nodes = healthy()
    nodes[1] = check("a1", *odd.pop("nics", (IB, ETHERNET)), **odd)
    if expected.startswith(
        "problem all nodes: NCCL"
    ):  # a setting: serious only where the versions are
        expected = expected.replace("problem", "note")
    assert expected in texts(compare(nodes, SPEC))


def test_a_node_that_cluster_toml_is_wrong_about():
    nodes = healthy()
    nodes[3] = check("b0", IB, ETHERNET)
    (line,) = [text for text in texts(compare(nodes, SPEC)) if text.startswith("problem b0")]
    assert "has no roce NIC that is up" in line


def test_nodes_that_were_not_looked_at_and_a_machine_outside():
    assert "note cluster.toml: 2 of its nodes were not looked at: a1, a2" in texts(
        compare([healthy()[0], healthy()[3]], SPEC)
    )
    assert "note laptop: this machine is in no cluster of cluster.toml" in texts(
        compare([check("laptop", ETHERNET)], SPEC)
    )


def test_a_file_round_trips_and_bad_ones_are_one_line(tmp_path):
    good, path = (
        check("a0", IB, ETHERNET, findings=(note("a", "b", "c", "d"),)),
        tmp_path / "a0.json",
    )
    path.write_text(json.dumps(good.to_dict()))
    assert load_check(path).to_dict() == good.to_dict()
    document = good.to_dict()
    bad = [
        "",
        "{",
        "[]",
        "{}",
        json.dumps({**document, "version": 2}),
        json.dumps({**document, "node": {}}),
        json.dumps({**document, "findings": [1]}),
        json.dumps({**document, "versions": {"torch": 2}}),
        json.dumps({**document, "node": {**document["node"], "nics": [{}]}}),
    ]
    for text in bad:
        path.write_text(text)
        with pytest.raises(HolmesError) as error:
            load_check(path)
        assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)
    with pytest.raises(HolmesError, match="cannot be read"):
        load_check(tmp_path / "none.json")
