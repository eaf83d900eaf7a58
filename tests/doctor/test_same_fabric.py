"""doctor/same_fabric.py: nodes that cluster.toml puts on one fabric, and whose NICs are not."""

from dataclasses import replace
from pathlib import Path

import clusters
import pytest
from nics import ETHERNET, IB, ROCE

from holmes_ext.cluster.nic import Gid
from holmes_ext.cluster.node_report import NodeReport
from holmes_ext.cluster.spec import load_spec
from holmes_ext.doctor.side_by_side import NodeCheck, compare, load_check

INPUTS = Path(__file__).parents[1] / "inputs"
OTHER = "fec0:0000:0000:0002"


def texts(spec, **nics_of):
    checks = [
        NodeCheck(NodeReport(name, f"boot/{name}", "eth0", (*nics, ETHERNET), 1), {}, {}, ())
        for name, nics in nics_of.items()
    ]
    return [f"{f.level} {f.about}: {f.what}" for f in compare(checks, spec)]


def ib(number, **more):
    return replace(IB, device=f"mlx5_{number}", **more)


def roce(number, address, **more):
    return replace(ROCE, device=f"mlx5_{number}", addresses=(address,), **more)


ONE_IB = clusters.spec("c ib 200Gb/s a[0-1]", ethernet="25Gb/s")
RAILS = clusters.spec("c ib 400Gb/s a[0-1]", ethernet="25Gb/s")
ONE_ROCE = clusters.spec("c roce 100Gb/s a[0-1]", ethernet="25Gb/s")
SHARED = clusters.spec("c ib 200Gb/s a0 fabric=f", "d ib 200Gb/s a1 fabric=f", ethernet="25Gb/s")


def test_two_infiniband_subnets_in_one_cluster():
    """Input subnets_not_compared (NVIDIA/nccl#733)."""
    folder = INPUTS / "subnets_not_compared"
    checks = [load_check(folder / name) for name in ("n1.json", "n2.json")]
    (found,) = compare(checks, load_spec(folder / "cluster.toml"))
    assert found.level == "problem" and "error 12" in found.why
    assert f"{found.about}: {found.what}" == (
        "cluster c: its InfiniBand ports are in several subnets: fec0:0000:0000:0001: n1; "
        "fec0:0000:0000:0002: n2"
    )


@pytest.mark.parametrize(
    "spec, nics_of",
    [
        (ONE_IB, dict(a0=[ib(0, lid=4, sm_lid=1)], a1=[ib(0, lid=5, sm_lid=1)])),
        (
            RAILS,
            dict(a0=[ib(0), ib(1, subnet_prefix=OTHER)], a1=[ib(0), ib(1, subnet_prefix=OTHER)]),
        ),
        (ONE_ROCE, dict(a0=[roce(0, "10.0.0.1/24")], a1=[roce(0, "10.0.0.2/24")])),
        # The second rail of a1 is down, which is another finding.
        (RAILS, dict(a0=[ib(0), ib(1, subnet_prefix=OTHER)], a1=[ib(0, rate_bps=400 * 10**9)])),
        # Addresses without a subnet say nothing.
        (ONE_ROCE, dict(a0=[roce(0, "10.0.0.1/32")], a1=[roce(0, "10.0.1.2/32")])),
    ],
)
def test_nodes_on_one_fabric_have_no_finding_about_it(spec, nics_of):
    about_nics = ("number of fast NICs", "rate of the fast NICs", "names of the fast NICs")
    assert not [
        text for text in texts(spec, **nics_of) if not any(words in text for words in about_nics)
    ]


@pytest.mark.parametrize(
    "spec, nics_of, line",
    [
        (
            SHARED,
            dict(a0=[ib(0)], a1=[ib(0, subnet_prefix=OTHER)]),
            "problem clusters c, d: its InfiniBand ports are in several subnets: fec0:0000:0000:0001: a0; "
            "fec0:0000:0000:0002: a1",
        ),
        (
            RAILS,
            dict(
                a0=[ib(0), ib(1, subnet_prefix=OTHER)],
                a1=[ib(0), ib(1, subnet_prefix="fec0:0000:0000:0003")],
            ),
            "problem cluster c: its InfiniBand ports are in several subnets: fec0:0000:0000:0001, "
            "fec0:0000:0000:0002: a0; fec0:0000:0000:0001, fec0:0000:0000:0003: a1",
        ),
        (
            ONE_IB,
            dict(a0=[ib(0, lid=4, sm_lid=1)], a1=[ib(0, lid=5, sm_lid=9)]),
            "note cluster c: its ports in subnet fec0:0000:0000:0001 have different subnet managers: "
            "LID 1: a0; LID 9: a1",
        ),
        (
            ONE_IB,
            dict(a0=[ib(0, lid=7)], a1=[ib(0, lid=7)]),
            "problem cluster c: mlx5_0:1 has LID 7 in subnet fec0:0000:0000:0001 on a0, a1",
        ),
        (
            ONE_ROCE,
            dict(a0=[roce(0, "10.0.0.1/24")], a1=[roce(0, "10.0.1.2/24")]),
            "note cluster c: the RoCE ports of its nodes are in different IP subnets: 10.0.0.0/24: a0; "
            "10.0.1.0/24: a1",
        ),
        (
            ONE_ROCE,
            dict(a0=[roce(0, "10.0.0.1/24")], a1=[roce(0, "10.0.0.2/24", driver="bnxt_en")]),
            "note cluster c: the fast NICs of its nodes are of different vendors: NVIDIA (Mellanox): a0; "
            "Broadcom: a1",
        ),
    ],
)
def test_nodes_that_are_not_on_one_fabric(spec, nics_of, line):
    assert texts(spec, **nics_of) == [line]


def test_subnets_behind_an_infiniband_router_are_a_note():
    """Ports with an address for routers (FLID) in GID 1, which newer versions of NCCL use."""

    def routed(prefix):
        gid = Gid(1, "fec0:0000:0041:0001:a088:c203:0001:0000", "ib")
        return ib(0, subnet_prefix=prefix, gids=(gid,))

    (line,) = texts(ONE_IB, a0=[routed(IB.subnet_prefix)], a1=[routed(OTHER)])
    assert line.startswith("note cluster c: its InfiniBand ports are in several subnets")


def test_nodes_without_a_file_on_which_a_job_would_end():
    """A job without a cluster.toml cannot tell one InfiniBand fabric from two by the default prefix."""
    default = ib(0, subnet_prefix="fe80:0000:0000:0000")
    (line,) = texts(None, a0=[default], a1=[default])
    assert line.startswith(
        "problem no cluster.toml: the InfiniBand ports of 2 nodes (a0, a1) all have"
    )
    assert texts(None, a0=[default]) == []
    assert texts(None, a0=[ib(0)], a1=[ib(0)]) == []
