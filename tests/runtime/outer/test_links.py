"""Connections between ranks of jobs: bytes arrive, and whoever is killed, silent or a stranger is named in time."""

import os
import socket
import threading
import time

import pytest

from holmes_ext.runtime.outer.peers.links import Peer, PeerLinks, PeersFailed, reach


class Rank:
    """One rank of a job, with its peers by job."""

    def __init__(self, job, token="secret", serve=None):
        self.links = PeerLinks(job, f"incarnation of {job}", 0, token, "127.0.0.1", serve=serve)
        self.peer = Peer(job, f"incarnation of {job}", 0, self.links.address)


@pytest.fixture
def ranks():
    made = [Rank(job) for job in ("east", "south", "west")]
    yield made
    for one in made:
        one.links.close()


def swap(rank, others, data, number=1, attempt=1, patience=10.0, expect=None):
    """Send `data` to all others; what they sent, by job (or the failure)."""
    into = {other.peer: bytearray(len(data) if expect is None else expect) for other in others}
    try:
        rank.links.swap(
            number,
            attempt,
            {other.peer: [memoryview(data)] for other in others},
            {peer: [memoryview(one)] for peer, one in into.items()},
            patience,
        )
    except PeersFailed as failed:
        return failed
    return {peer.job: bytes(one) for peer, one in into.items()}


def together(*calls):
    results = [None] * len(calls)

    def run(place, call):
        results[place] = call()

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_all_get_what_the_others_sent(ranks):
    data = [os.urandom(3_000_000) for _ in ranks]
    for number in (1, 2):  # the second time over the same connections
        sends = (
            lambda k=k, n=number: swap(ranks[k], ranks[:k] + ranks[k + 1 :], data[k], n) for k in range(3)
        )
        found = together(*sends)
        for k, one in enumerate(found):
            assert one == {other.peer.job: data[j] for j, other in enumerate(ranks) if j != k}


def test_bytes_may_go_one_way_only(ranks):
    east, _, west = ranks
    into = bytearray(500)
    together(
        lambda: east.links.swap(
            1, 1, {west.peer: [memoryview(b"x" * 200), memoryview(b"y" * 300)]}, {west.peer: []}, 10.0
        ),
        lambda: west.links.swap(1, 1, {east.peer: []}, {east.peer: [memoryview(into)]}, 10.0),
    )
    assert bytes(into) == b"x" * 200 + b"y" * 300


def test_a_killed_peer_is_named_at_once_and_the_others_are_served(ranks):
    east, south, west = ranks
    data = bytes(8_000_000)

    def dies():
        connections = south.links._connect([east.peer, west.peer], 10.0)[0]
        next(iter(connections.values())).send(b"half a")
        south.links.close()

    started = time.monotonic()
    first, second, _ = together(
        lambda: swap(east, [south, west], data), lambda: swap(west, [east, south], data), dies
    )
    assert first.jobs == {"south"} and second.jobs == {"south"}
    assert time.monotonic() - started < 9
    assert together(
        lambda: swap(east, [west], data, attempt=2), lambda: swap(west, [east], data, attempt=2)
    ) == [
        {"west": data},
        {"east": data},
    ]


def test_a_silent_peer_is_given_up_after_the_patience(ranks):
    east, _, west = ranks
    with pytest.raises(PeersFailed, match="could not|cannot be reached"):
        west.links.swap(1, 1, {east.peer: []}, {}, 0.5)  # east never calls
    west.links._connect([], 0)
    found = together(
        lambda: swap(east, [west], bytes(10), patience=1.0), lambda: west.links._connect([east.peer], 5.0)
    )[0]
    assert found.jobs == {"west"} and "silent for 1 s" in str(found)


def test_another_round_is_not_taken_for_this_one(ranks):
    east, _, west = ranks
    found = together(
        lambda: swap(east, [west], bytes(10), number=3, patience=3.0),
        lambda: swap(west, [east], bytes(10), number=4, patience=3.0),
    )
    assert all(isinstance(one, PeersFailed) for one in found)
    again = together(
        lambda: swap(east, [west], bytes(10), number=5), lambda: swap(west, [east], bytes(10), number=5)
    )
    assert again == [{"west": bytes(10)}, {"east": bytes(10)}]


def test_strangers_and_earlier_lives_are_not_let_in(ranks):
    east, _, west = ranks
    stranger = Rank("aaa", token="guess")
    assert swap(stranger, [west], b"x", patience=2.0).jobs == {"west"}
    late = Peer("west", "an earlier incarnation", 0, west.links.address)
    with pytest.raises(PeersFailed):
        east.links.swap(1, 1, {late: [memoryview(b"x")]}, {late: [memoryview(bytearray(1))]}, 1.0)
    stranger.links.close()


def test_questions_have_a_line_of_their_own():
    asked = []

    def serve(line, purpose):
        asked.append(purpose["purpose"])
        line.send({"echo": line.receive(5)["say"]})

    rank = Rank("east", serve=serve)
    line = reach(rank.peer.address, "secret", {"purpose": "fetch", "to": rank.peer.incarnation}, 5.0)
    line.send({"say": "hello"})
    assert line.receive(5) == {"echo": "hello"} and asked == ["fetch"]
    line.close()
    rank.links.close()


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        from holmes_ext.errors import HolmesError

        with pytest.raises(HolmesError, match="HOLMES_JOIN_PORT"):
            PeerLinks("east", "1", 0, "secret", "127.0.0.1", taken.getsockname()[1])
