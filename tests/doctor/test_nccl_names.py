"""doctor/nccl_names.py: NCCL_SOCKET_IFNAME and NCCL_IB_HCA are expanded as NCCL does."""

from dataclasses import replace

import pytest
from nics import ETHERNET, IB, ROCE

from holmes_ext.doctor.nccl_names import check_hca_names, check_socket_names, parse_names

HCAS = ("mlx5_0", "mlx5_1", "mlx5_10", "bnxt_re0")
IBS = tuple(replace(IB, device=f"mlx5_{number}") for number in (0, 10, 11))
#: Training over InfiniBand, storage over RoCE, with a common start of their names.
MIXED = (*IBS, ROCE, replace(ETHERNET, device="ens1", netdevs=("ens1",), rdma="mlx5_1:1"), ETHERNET)
DOCKER = replace(
    ETHERNET, device="docker0", netdevs=("docker0",), skipped="container network (by its name)"
)


@pytest.mark.parametrize(
    "value, selected",
    [
        ("mlx5_1", "mlx5_1 mlx5_10"),
        ("=mlx5_1", "mlx5_1"),
        ("^mlx5_1", "mlx5_0 bnxt_re0"),
        ("^=mlx5_1", "mlx5_0 mlx5_10 bnxt_re0"),
        ("mlx5_0:1,bnxt", "mlx5_0 bnxt_re0"),
        ("mlx5_0:2", ""),
        ("=mlx5_1:1,mlx5_10:1", "mlx5_1 mlx5_10"),
        ("mlx5_0, mlx5_1", "mlx5_0"),  # NCCL does not remove the space
        ("", "mlx5_0 mlx5_1 mlx5_10 bnxt_re0"),
        ("^", ""),
    ],
)
def test_a_list_selects_hcas(value, selected):
    """NCCL selects by parseStringList and matchIfList of src/misc/utils.cc."""
    names = parse_names(value)
    assert [hca for hca in HCAS if names.selects(hca, port=1)] == selected.split()


@pytest.mark.parametrize(
    "value, level, words",
    [
        (
            "mlx5_1",
            "problem",
            "of 2 kinds (names are prefixes): ib: mlx5_10:1, mlx5_11:1; roce: mlx5_1:1",
        ),
        (
            "mlx5",
            "problem",
            "of 2 kinds (names are prefixes): ib: mlx5_0:1, mlx5_10:1, mlx5_11:1; roce",
        ),
        (
            "^mlx5_0",
            "problem",
            "of 2 kinds (names are prefixes): ib: mlx5_10:1, mlx5_11:1; roce: mlx5_1:1",
        ),
        ("=mlx5_0,mlx5_1", "problem", "of 2 kinds: ib: mlx5_0:1; roce: mlx5_1:1"),
        ("=mlx5_0:1,mlx5_10:1", "note", "selects mlx5_0:1, mlx5_10:1"),
        ("mlx5_1:1", "problem", "of 2 kinds"),
        ("=mlx5_1", "note", "selects mlx5_1:1"),
        ("mlx5_10,mlx5_2", "problem", "names mlx5_2, which this node does not have"),
        ("mlx5_10,bnxt_re", "note", "selects mlx5_10:1"),
        ("bnxt_re,irdma", "problem", "names bnxt_re, irdma, which this node does not have"),
        ("^mlx5_", "problem", "leaves no HCA that is up"),
    ],
)
def test_nccl_ib_hca(value, level, words):
    """Input hca_mixes_kinds: as a prefix, mlx5_1 selects mlx5_10 and mlx5_11, too."""
    fast_nics = [nic for nic in MIXED if nic.fast]
    (found,) = check_hca_names(value, fast_nics, unused=())
    assert found.level == level and words in found.what


@pytest.mark.parametrize("value", ["", "^mlx5_1", "^=mlx5_9"])
def test_nccl_ib_hca_that_leaves_one_kind_has_no_finding(value):
    assert list(check_hca_names(value, [IB, replace(IB, device="mlx5_2")], unused=())) == []


def test_the_way_out_names_the_largest_kind():
    (found,) = check_hca_names("mlx5_1", [nic for nic in MIXED if nic.fast], unused=())
    assert 'NCCL_IB_HCA="=mlx5_10:1,mlx5_11:1"' in found.mend


@pytest.mark.parametrize(
    "value, level, words",
    [
        ("enp27s0,eth0", "note", "selects eth0"),
        ("eth0,en,eth,em,bond", "note", "selects ens1, eth0"),
        ("=eth0", "note", "selects eth0"),
        ("^lo,docker0", "note", "selects ens1, eth0"),
        ("^lo", "problem", "selects docker0 (inside this node only); ens1, eth0 (Ethernet)"),
        ("docker0", "problem", "selects docker0 (inside this node only)"),
        ("veth,eth0", "problem", "selects eth0 (Ethernet); veth1 (inside this node only)"),
        ("lo", "problem", "selects lo (inside this node only)"),
        ("=eth", "problem", "names eth, which this node does not have"),
        ("bond0,team0", "problem", "names bond0, team0, which this node does not have"),
        ("eth1", "problem", "selects only eth1 (no IP address)"),
    ],
)
def test_nccl_socket_ifname(value, level, words):
    """Input ifname_list: names are alternatives, of which one must exist."""
    ens1 = replace(ETHERNET, device="ens1", netdevs=("ens1",))
    no_address = replace(ETHERNET, device="eth1", netdevs=("eth1",), addresses=())
    veth = replace(DOCKER, device="veth1", netdevs=("veth1",), skipped="veth without an address")
    nics = [ens1, ETHERNET, no_address, DOCKER]
    (found,) = check_socket_names(value, [*nics, veth] if "veth" in value else nics)
    assert found.level == level and words in found.what


@pytest.mark.parametrize("value", ["", "e", "^"])
def test_values_that_nccl_ignores_have_no_finding(value):
    assert list(check_socket_names(value, [ETHERNET, DOCKER])) == []
