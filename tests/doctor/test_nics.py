"""doctor/nics.py: findings on the NICs of one node."""

from dataclasses import asdict, replace

import pytest
from nics import ETHERNET, IB, ROCE, V2
from sysfs_builder import Sysfs

from holmes_ext.doctor.finding import Finding
from holmes_ext.doctor.nics import check_hcas, check_nics
from holmes_ext.document import Table
from holmes_ext.errors import HolmesError


def found(*nics):
    return {(f.level, f.about): f for f in check_nics(nics)}


def test_a_healthy_node_has_no_findings():
    assert found(IB, replace(IB, device="mlx5_2"), ETHERNET) == found(ROCE, ETHERNET) == {}


@pytest.mark.parametrize(
    "nics, key, words",
    [
        (
            [replace(IB, state="down", state_text="INIT"), ETHERNET],
            ("problem", "mlx5_0:1"),
            "no subnet manager",
        ),
        (
            [replace(IB, state="down", state_text="DOWN/Polling"), ETHERNET],
            ("note", "mlx5_0:1"),
            "DOWN/Polling",
        ),
        (
            [replace(ROCE, gids=(replace(V2, type="roce_v1"),)), ETHERNET],
            ("problem", "mlx5_1:1"),
            "no RoCE v2 GID",
        ),
        ([replace(ETHERNET, addresses=()), IB], ("note", "eth0"), "no IP address"),
        (
            [replace(IB, subnet_prefix="fe80:0000:0000:0000"), ETHERNET],
            ("note", "mlx5_0:1"),
            "default",
        ),
        (
            [replace(IB, max_rate_bps=63 * 10**9), ETHERNET],
            ("problem", "mlx5_0:1"),
            "PCIe carries 63 Gb/s, the link 200 Gb/s",
        ),
        (
            [IB, replace(IB, device="mlx5_2", rate_bps=100 * 10**9), ETHERNET],
            ("note", "mlx5_2:1"),
            "the link runs at 100 Gb/s, mlx5_0:1 at 200 Gb/s",
        ),
        (
            [ROCE, replace(ROCE, device="mlx5_2", gids=(replace(V2, index=5),)), ETHERNET],
            ("note", "GID indices"),
            "mlx5_1:1 at 3, mlx5_2:1 at 5",
        ),
        (
            [ROCE, replace(ROCE, device="mlx5_2", mtu=1500), ETHERNET],
            ("problem", "MTU"),
            "mlx5_1:1 9000, mlx5_2:1 1500",
        ),
        (
            [replace(ETHERNET, driver="mlx5_core")],
            ("note", "eth0"),
            "/sys/class/infiniband shows no port",
        ),
        ([replace(ETHERNET, state="down")], ("problem", "NICs"), "no NIC of this node can be used"),
    ],
)
def test_each_finding(nics, key, words):
    finding = found(*nics)[key]
    assert words in f"{finding.what}; {finding.why}" and finding.mend


def test_what_is_set_aside_is_not_judged():
    down = replace(
        ROCE, device="mlx5_5", state="down", state_text="DOWN", skipped="storage (by its name)"
    )
    assert found(IB, down, ETHERNET) == {}


def test_links_below_what_the_adapter_can_do(tmp_path):
    """One lane is a fault of an InfiniBand link; 10 to 100 Gb/s Ethernet may have one."""
    tree = Sysfs(tmp_path)
    links = [
        (IB, "200 Gb/sec (4X HDR)"),
        (IB, "25 Gb/sec (1X EDR)"),
        (IB, "100 Gb/sec (4X EDR)"),
        (replace(IB, state="down"), "10 Gb/sec (1X SDR)"),
        (replace(IB, skipped="left out by cluster.toml"), "10 Gb/sec (1X SDR)"),
        *((ROCE, f"{rate} Gb/sec (1X EDR)") for rate in (10, 25, 50, 100)),
    ]
    nics = []
    for number, (nic, rate) in enumerate(links):
        nics.append(replace(nic, device=f"mlx5_{number}"))
        adapter = "MT4123" if nic.kind == "ib" else ""
        tree.write(f"class/infiniband/mlx5_{number}/hca_type", adapter)
        tree.write(f"class/infiniband/mlx5_{number}/ports/1/rate", rate)
    assert [(f.level, f.about) for f in check_hcas(tmp_path, nics)] == [
        ("problem", "mlx5_1:1"),
        ("note", "mlx5_2:1"),
    ]


def test_a_finding_is_checked():
    good = Finding("note", "a", "b", "c", "d")
    assert Table(asdict(good), "x").into(Finding) == good
    for bad in (
        {},
        {**asdict(good), "level": "bad"},
        {**asdict(good), "what": "two\nlines"},
        {**asdict(good), "why": ""},
        {**asdict(good), "more": ""},
    ):
        with pytest.raises(HolmesError, match="^FILE: "):
            Table(bad, "FILE").into(Finding)
