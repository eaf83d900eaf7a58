"""The rate of weights: a limit for all streams, pauses for training's rounds, and the mark on packets."""

import socket

import pytest

from holmes_ext.join.coordinator.state import RoundState
from holmes_ext.weights import rate
from holmes_ext.weights.rate import PAUSE_S, RateLimit, make_background

MB = 10**6


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(rate, "time", clock)
    return clock


def test_all_streams_together_have_the_rate(clock):
    limit = RateLimit(8 * MB)
    for _ in range(100):
        limit.take(MB // 10)
    assert clock.now - 1000 == pytest.approx(10, abs=0.1)


def test_no_limit(clock):
    RateLimit().take(10**12)
    assert clock.now == 1000


def test_weights_pause_while_a_round_is_exchanged(clock):
    limit = RateLimit(is_training_sending=lambda: 1005 <= clock.now < 1008)
    limit.take(MB)
    assert clock.now == 1000
    clock.now = 1006
    limit.take(MB)
    assert clock.now == pytest.approx(1008, abs=0.01)


def test_bytes_that_wait_for_their_turn_pause_too(clock):
    limit = RateLimit(8 * MB, is_training_sending=lambda: 1000.5 <= clock.now < 1003)
    limit.take(MB)
    assert clock.now == pytest.approx(1003, abs=0.01)


def test_jobs_that_always_exchange_do_not_stop_the_weights(clock):
    limit = RateLimit(8 * MB, is_training_sending=lambda: True)
    sent_at = []
    for _ in range(40):
        limit.take(MB)
        sent_at.append(clock.now)
    pauses = [after - before for before, after in zip(sent_at, sent_at[1:], strict=False)]
    assert max(pauses) <= PAUSE_S + 1.1
    assert clock.now - 1000 == pytest.approx(
        80, abs=PAUSE_S + 2
    )  # 40 s for the bytes, and as many of pauses


def test_a_round_is_exchanged_from_its_begin_to_the_comparison_of_the_data():
    state = RoundState(number=1, fragment=0, opening_time=0.0)
    assert not state.is_exchanging
    state.attempt = 1
    assert state.is_exchanging
    state.check_number = 1
    assert not state.is_exchanging
    state.attempt, state.check_number = 2, 0
    assert state.is_exchanging
    state.outcome = "void"
    assert not state.is_exchanging


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_packets_are_marked(family):
    try:
        connection = socket.socket(family)
    except OSError:
        pytest.skip("this host has no IPv6")
    with connection:
        make_background(connection)
        assert connection.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) == 0x20
        if family == socket.AF_INET6:
            assert connection.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS) == 0x20
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) == 2
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == 2**17
