"""runtime/measure/crossings.py: which pairs at once, when a network is flat, one pair on the loopback."""

import socket
import threading

import clusters
import pytest

from holmes_ext.cluster.wan import MeasuredPair
from holmes_ext.runtime.measure import crossings


@pytest.mark.parametrize("count", [2, 3, 4, 7, 8])
def test_every_pair_once_and_no_cluster_twice_in_a_round(count):
    rounds = crossings.rounds(count)
    every = [pair for pairs in rounds for pair in pairs]
    assert sorted(every) == [(a, b) for a in range(count) for b in range(a + 1, count)]
    assert all(len({end for pair in pairs for end in pair}) == 2 * len(pairs) for pairs in rounds)
    assert len(rounds) == count - 1 + count % 2


def test_flat_is_what_shows_no_more_than_the_nics():
    site = clusters.site(
        "a ib 2Gb/s a[0-1]".replace("a[0-1]", "a0,a1"), "b roce 1Gb/s b0,b1", ethernet="100Mb/s"
    )
    flat = MeasuredPair(("a", "b"), 195_000_000, 100e-6)
    assert crossings.is_flat(site, [flat]) and crossings.is_flat(site, [])
    assert not crossings.is_flat(site, [MeasuredPair(("a", "b"), 120_000_000, 100e-6)])
    assert not crossings.is_flat(site, [MeasuredPair(("a", "b"), 195_000_000, 20e-3)])


def test_the_stated_rate_is_the_least_on_the_way():
    site = clusters.site(
        "a ib 2Gb/s a0,a1", "b roce 1Gb/s b0,b1 uplink=150Mb/s", ethernet="100Mb/s"
    )
    assert (
        crossings.stated_bps(site, "a", "b", 1) == 100e6
        and crossings.stated_bps(site, "a", "b", 2) == 150e6
    )
    assert [crossings.streams_of(nodes) for nodes in (0, 1, 2, 3, 8)] == [8, 8, 4, 2, 1]


def test_both_ends_pass_the_same_barriers_and_the_sender_knows_what_arrived(monkeypatch):
    monkeypatch.setattr(crossings, "LEAD_S", 0.05)
    monkeypatch.setattr(crossings, "WINDOW_S", 0.25)
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    addresses, found = [server.getsockname() for server in servers], {}
    barrier = threading.Barrier(3)
    parts = [([0], [1]), ([0], [1]), None]

    def part(rank):
        found[rank] = crossings._measure_pair(
            rank, parts[rank], servers[rank], addresses, barrier.wait
        )

    crossings._together([lambda rank=rank: part(rank) for rank in range(3)])
    trip, stream, together = found[0]
    assert 0 < trip < 10 and stream > 0 and len(together) == crossings.PARTS and sum(together) > 0
    assert found[1] == found[2] == (0.0, 0.0, (0.0,) * crossings.PARTS)


def test_what_piled_up_and_came_at_once_is_no_rate_of_the_link():
    steady, burst = (50e6,) * 10, (50e6,) * 4 + (0.0, 0.0, 0.0, 300e6) + (50e6,) * 2
    assert crossings._median([steady, burst]) == 100e6 and crossings._median([]) == 0.0
    assert crossings._median([(0.0,) * 9 + (10e6,)]) == 1e6


def test_a_receiver_that_goes_away_is_an_error():
    server = socket.create_server(("127.0.0.1", 0))

    def leave():
        connection, _ = server.accept()
        connection.recv(17)
        connection.close()

    thread = threading.Thread(target=leave)
    thread.start()
    with pytest.raises(OSError):
        crossings._ping(server.getsockname())
    thread.join()
