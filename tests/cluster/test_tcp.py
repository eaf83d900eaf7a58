"""cluster/addresses.py: what a stream's window carries of a link, and the way out."""

import pytest

from holmes_ext.cluster.addresses import WMEM_SHARE, TcpLimits, read_limits, shortfalls, sockets
from holmes_ext.cluster.wan import Between, Uplink, Wan

MIB = 1 << 20
SMALL, LARGE = TcpLimits(4 * MIB, 32 * MIB, True), TcpLimits(512 * MIB, 512 * MIB, False)
WAN = Wan(
    (Uplink("a", 8 * 10**9),),
    (
        Between(("a", "b"), 10 * 10**9, 0.02),
        Between(("a", "c"), 10**8, 0.001),
        Between(("b", "c"), 10**8, 0.001),
    ),
)
COUNT = {"a": 4, "b": 4, "c": 1}


def found(limits, streams=1, here="a", ethernet=25 * 10**9):
    return list(shortfalls(WAN, ethernet, COUNT, here, limits, streams))


def test_what_was_measured_in_the_lab():
    assert SMALL.stream_bps(0.08) == pytest.approx(268e6, rel=0.01)
    assert TcpLimits(64 * MIB, 4 * MIB, True).stream_bps(0.08) == pytest.approx(327e6, rel=0.01)
    assert SMALL.stream_bps(0.0) == float("inf")


def test_the_link_that_a_stream_cannot_fill_is_named_with_the_way_out():
    (short,) = found(SMALL)
    # the uplink's, shared by four
    assert (short.other, short.rate_bps, short.trip_s) == ("b", 2 * 10**9, 0.04)
    assert short.carries_bps == pytest.approx(8 * WMEM_SHARE * 4 * MIB / 0.04)
    assert short.what.startswith(
        "one stream carries 536.9 Mb/s of the 2 Gb/s from a to b: round trip 40 ms, tcp"
    )
    assert TcpLimits(short.buffer, short.buffer, True).stream_bps(0.04) >= short.rate_bps
    assert f'tcp_wmem="4096 65536 {short.buffer}"' in short.mend
    assert "NCCL_SOCKET_NTHREADS=1 NCCL_NSOCKS_PERTHREAD=4" in short.mend


def test_large_windows_several_sockets_and_slow_nics_leave_nothing_to_say():
    assert not found(LARGE) and not found(SMALL, streams=4) and not found(SMALL, ethernet=10**8)
    assert len(found(SMALL, streams=3)) == 1 and "3 sockets of" in found(SMALL, streams=3)[0].what
    assert not list(shortfalls(Wan(), 10**11, COUNT, "a", SMALL))


def test_sockets_of_nccl():
    assert (
        sockets({}) == 1 == sockets({"NCCL_NSOCKS_PERTHREAD": "none", "NCCL_SOCKET_NTHREADS": "0"})
    )
    assert sockets({"NCCL_NSOCKS_PERTHREAD": "4", "NCCL_SOCKET_NTHREADS": "2"}) == 8
    assert sockets({"NCCL_NSOCKS_PERTHREAD": "64", "NCCL_SOCKET_NTHREADS": "16"}) == 64


def test_limits_are_read_as_the_kernel_writes_them(tmp_path):
    for name, text in (
        ("tcp_wmem", "4096\t16384\t4194304\n"),
        ("tcp_rmem", "4096\t131072\t6291456\n"),
        ("tcp_slow_start_after_idle", "1\n"),
        ("tcp_congestion_control", "cubic\n"),
    ):
        (tmp_path / name).write_text(text)
    assert read_limits(tmp_path) == TcpLimits(4194304, 6291456, True)
    for name, text in (("tcp_slow_start_after_idle", "0\n"), ("tcp_congestion_control", "bbr\n")):
        before = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text)
        assert read_limits(tmp_path) == TcpLimits(4194304, 6291456, False, text == "bbr\n")
        (tmp_path / name).write_text(before)
    assert read_limits().wmem > 0
