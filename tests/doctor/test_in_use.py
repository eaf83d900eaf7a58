"""doctor/in_use.py: NICs that cluster.toml leaves to others are not judged."""

from dataclasses import replace
from pathlib import Path

import clusters
import pytest
from healthy_nodes import NODES, Machine
from nics import ETHERNET, IB, ROCE

from holmes_ext.cluster.node_report import NodeReport
from holmes_ext.cluster.spec import load_spec
from holmes_ext.cluster.sysfs.node import FOREIGN, read_nics
from holmes_ext.doctor.finding import merged, note
from holmes_ext.doctor.in_use import check_used_nics, mark_unused
from holmes_ext.doctor.nccl import handed_over
from holmes_ext.doctor.variables import check_variables

INPUTS = Path(__file__).parents[1] / "inputs"


def used(nics, spec, node="n1"):
    return [nic.name for nic in mark_unused(nics, node, spec) if not nic.skipped]


def test_excluded_nics_are_not_judged(tmp_path):
    """Input doctor_ignores_exclude: the front end of an OCI node has another MTU and no address."""
    machine = Machine(tmp_path)
    for number in (0, 1):
        machine.roce(f"mlx5_{number}", f"rdma{number}", f"10.224.{number}.3/24", mtu=4220)
    machine.roce("mlx5_2", "eth0", "10.1.2.3/24")
    machine.roce("mlx5_11", "eth1")
    root = machine.save()
    nics = read_nics(root)
    spec = load_spec(INPUTS / "doctor_ignores_exclude" / "cluster.toml")
    assert [f.about for f in check_used_nics(root, nics, False, is_in_cluster=True)] == [
        "MTU",
    ]
    marked = mark_unused(nics, "n1", spec)
    assert check_used_nics(root, marked, False, is_in_cluster=True) == []
    assert used(nics, spec) == ["mlx5_0:1", "mlx5_1:1", "eth0", "eth1", "rdma0", "rdma1"]


def test_only_nics_of_the_clusters_kind_are_judged():
    nics = (IB, replace(ROCE, mtu=1500), replace(ROCE, device="mlx5_2"), ETHERNET)
    assert used(nics, None) == ["mlx5_0:1", "mlx5_1:1", "mlx5_2:1", "eth0"]
    assert used(nics, clusters.spec("a ib 200Gb/s n1")) == ["mlx5_0:1", "eth0"]
    assert used(nics, clusters.spec("a roce 200Gb/s n1")) == ["mlx5_1:1", "mlx5_2:1", "eth0"]
    assert used(nics, clusters.spec("a ethernet - n1")) == ["eth0"]
    assert used(nics, clusters.spec("a ib 200Gb/s n2")) == used(nics, None)


def test_ethernet_with_an_address_stays():
    """`exclude` is for fast NICs: the job reaches the other nodes over Ethernet, whatever it says."""
    cluster = replace(clusters.spec("a ib 200Gb/s n1").clusters[0], exclude=("eth*",))
    spec = replace(clusters.spec("a ib 200Gb/s n1"), clusters=(cluster,))
    no_address = replace(ETHERNET, device="eth1", netdevs=("eth1",), addresses=())
    assert used((IB, ETHERNET, no_address), spec) == ["mlx5_0:1", "eth0"]


def test_a_pattern_that_matches_nothing_marks_nothing():
    """compare() reports the pattern, as the job does when it starts."""
    spec = replace(
        clusters.spec("a ib 200Gb/s n1"),
        clusters=(replace(clusters.spec("a ib 200Gb/s n1").clusters[0], exclude=("mlx9_*",)),),
    )
    assert used((IB, ROCE, ETHERNET), spec) == ["mlx5_0:1", "mlx5_1:1", "eth0"]


def test_hcas_of_another_network_namespace_do_not_get_into_nccl_ib_hca(tmp_path):
    """Input pod_foreign_hcas: a pod sees the host's physical functions without their net devices."""
    machine = Machine(tmp_path)
    NODES["pod_sriov_roce"](machine)
    nics = read_nics(machine.save())
    assert {nic.name: nic.skipped for nic in nics if nic.fast} == {
        "mlx5_0:1": FOREIGN,
        "mlx5_1:1": FOREIGN,
        "mlx5_2:1": "",
        "mlx5_3:1": "",
    }
    spec = load_spec(INPUTS / "pod_foreign_hcas" / "cluster.toml")
    lines = handed_over(NodeReport("n1", "boot/n1", "", nics, 1), spec, {})
    assert 'NCCL_IB_HCA="=mlx5_2:1,mlx5_3:1"' in lines


def test_a_captured_tree_without_net_devices_says_nothing_of_namespaces(tmp_path):
    machine = Machine(tmp_path)
    machine.roce("mlx5_0", "rdma0", "10.0.0.1/24")
    root = machine.tree.root
    (root / "class/net").rename(root / "class/network")
    assert [nic.skipped for nic in read_nics(root)] == [""]


@pytest.mark.parametrize(
    "value, level", [("mlx5_0", "problem"), ("mlx5_", "note"), ("^mlx5_9", "note")]
)
def test_a_variable_that_selects_excluded_nics(value, level):
    """It is a problem if the variable selects no other NIC."""
    nics = [IB, replace(IB, device="mlx5_2"), ETHERNET]
    (found,) = check_variables({"NCCL_IB_HCA": value}, nics, unused=["mlx5_0:1"])
    assert found.level == level and "selects mlx5_0:1 " in found.what
    assert "which cluster.toml leaves out" in found.what


def test_one_finding_for_nics_with_the_same_fault():
    findings = [note(f"mlx5_{number}:1", "slow", "cable", "reseat") for number in range(8)]
    other = note("mlx5_8:1", "slower", "cable", "reseat")
    assert [f.about for f in merged([*findings, other])] == [
        ", ".join(f"mlx5_{number}:1" for number in range(8)),
        "mlx5_8:1",
    ]
