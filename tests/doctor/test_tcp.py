"""doctor/tcp.py: findings on TCP over the links of a cluster.toml."""

from dataclasses import replace

import clusters

from holmes_ext.cluster.addresses import TcpLimits
from holmes_ext.cluster.wan import Between, Wan
from holmes_ext.doctor.tcp import check_tcp

SPEC = replace(
    clusters.spec("a ib 200Gb/s a0,a1", "b roce 100Gb/s b0", "c ethernet - c0", ethernet="10Gb/s"),
    wan=Wan(
        (),
        (
            Between(("a", "b"), 10**10, 0.03),
            Between(("a", "c"), 10**10, 1e-4),
            Between(("b", "c"), 10**10, 0.03),
        ),
    ),
)
SMALL = TcpLimits(4 << 20, 6 << 20, True)


def test_a_node_hears_of_its_own_links():
    findings = list(check_tcp(SPEC, "a0", SMALL, {}))
    assert [(each.level, each.about) for each in findings] == [("problem", "TCP"), ("note", "TCP")]
    assert "of the 10 Gb/s from a to b: round trip 60 ms" in findings[0].what
    assert "tcp_rmem" in findings[0].mend and "slow_start_after_idle=0" in findings[1].mend


def test_a_login_node_hears_of_all():
    problems = [
        each.what for each in check_tcp(SPEC, "login", SMALL, {}) if each.level == "problem"
    ]
    ways = ["from a to b", "from b to a", "from b to c", "from c to b"]
    assert len(problems) == 4 and all(way in what for way, what in zip(ways, problems))


def test_tuned_hosts_and_several_sockets_are_fine():
    assert not list(check_tcp(SPEC, "a0", TcpLimits(256 << 20, 256 << 20, False), {}))
    many = {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "16"}
    assert not [each for each in check_tcp(SPEC, "a0", SMALL, many) if each.level == "problem"]


def test_bbr_paces_small_messages_where_round_trips_are_long():
    paced = TcpLimits(256 << 20, 256 << 20, False, True)
    (finding,) = check_tcp(SPEC, "a0", paced, {})
    assert finding.level == "note" and "BBR" in finding.what and "cubic" in finding.mend
    near = replace(
        SPEC, wan=Wan((), tuple(replace(link, latency_s=1e-4) for link in SPEC.wan.between))
    )
    assert not list(check_tcp(near, "a0", paced, {}))
