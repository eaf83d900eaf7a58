"""Tests which network NCCL uses between nodes of an emulated cluster, and which NICs carry its data."""

from pathlib import Path

import pytest
import torch
from holmes_lab.gpu.communicators import INSIDE
from packaging.version import Version

NUMBERS = str(Path(__file__).with_name("nccl_numbers.py"))
SMALL = ("--largest", "4099", "--types", "float32,bfloat16,int64")


def assert_right(ran):
    for line in ran.json:
        assert line["checks"] > 40 and line["wrong"] == []


def test_two_rails_of_infiniband(lab):
    ran = lab.run(NUMBERS, *SMALL, order="a0,a1")
    assert_right(ran)
    assert [(group.network, group.nics) for group in ran.groups] == [("IB", ("ib0", "ib1"))]
    for nics in ran.sent.values():
        assert nics["ib0"] > 100_000 and nics["ib1"] > 100_000 > nics["eth0"]


def test_one_of_the_rails_by_name(lab):
    ran = lab.run(NUMBERS, *SMALL, order="a0,a1", env={"NCCL_IB_HCA": "=mlx5_1"})
    assert_right(ran)
    assert all(nics["ib1"] > 100_000 > nics["ib0"] for nics in ran.sent.values())


def test_stock_over_two_fabrics_takes_the_ethernet(lab):
    ran = lab.run(NUMBERS, *SMALL)
    assert_right(ran)
    assert [(group.network, group.nics) for group in ran.groups] == [("Socket", ("eth0",))]
    for nics in ran.sent.values():
        assert nics["eth0"] > 100_000 > max(size for name, size in nics.items() if name != "eth0")


def test_inside_a_node_no_nic_carries_anything(lab):
    ran = lab.run(NUMBERS, *SMALL, order="b0")
    assert_right(ran)
    assert [group.network for group in ran.groups] == [INSIDE]
    assert max(ran.sent["b0"].values()) < 50_000


@pytest.mark.parametrize("algorithm", ["Ring", "Tree"])
@pytest.mark.parametrize("protocol", ["Simple", "LL", "LL128"])
def test_numbers_of_torch_over_nccl(lab, algorithm, protocol, exhaustive):
    """All-reduces give the right numbers with each algorithm and protocol of NCCL.

    All data types are tested, between nodes and inside a node.
    """
    largest = "65536" if exhaustive else "1000"
    assert_right(
        lab.run(
            NUMBERS,
            "--largest",
            largest,
            order="a0,a1",
            env={"NCCL_ALGO": f"allreduce:{algorithm}", "NCCL_PROTO": protocol},
        )
    )


def test_groups_are_named_by_their_descriptions(lab):
    """The table of networks names a group by its group_desc, also where torch itself names it "2" or a hash.

    torch 2.15 makes the communicator of every group at once; older versions only if the group is used.
    """
    ran = lab.run(str(Path(__file__).with_name("group_names.py")), order="a0,a1", processes=1)
    assert ran.result.returncode == 0, ran.said
    names = {group.group for group in ran.groups}
    assert names >= {"default_pg", "described", "hashed name"}
    (other_name,) = names - {"default_pg", "described", "hashed name", "never used"}
    assert other_name.isdecimal()  # torch numbers a group without a description
    has_unused_communicator = "never used" in names
    assert has_unused_communicator == (Version(torch.__version__) >= Version("2.15"))
