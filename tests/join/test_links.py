"""Connections between ranks of jobs: bytes arrive, and a failing peer is named in time.

The failing peer is killed, silent, slow or a stranger.
"""

import os
import threading
import time
from pathlib import Path

import pytest
from joined_jobs import Rank, place_at
from waiting import await_

from holmes_ext.errors import HolmesError
from holmes_ext.join.address import PortRange
from holmes_ext.join.peers import links as links_module
from holmes_ext.join.peers import transfer
from holmes_ext.join.peers.links import PeersFailed, lanes_for, split
from holmes_ext.join.peers.listening import open_port
from holmes_ext.join.peers.routes import Peer
from holmes_ext.runtime.deadline import Deadline


@pytest.fixture
def ranks():
    made = [Rank(job) for job in ("east", "south", "west")]
    yield made
    for one in made:
        one.links.close()


def swap(rank, others, data, number=1, attempt=1, patience=10.0):
    """Send `data` to all others; what they sent, by job (or the failure)."""
    into = {other.peer: bytearray(len(data)) for other in others}
    try:
        rank.links.swap(
            number,
            attempt,
            {peer: [memoryview(data)] for peer in into},
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


def exchange(ranks, data, number=1):
    """Return what each of the ranks got."""
    sends = (
        lambda k=k: swap(ranks[k], ranks[:k] + ranks[k + 1 :], data[k], number)
        for k in range(len(ranks))
    )
    return together(*sends)


def test_all_get_what_the_others_sent(ranks):
    data = [os.urandom(3_000_000) for _ in ranks]
    for number in (1, 2):  # the second time over the same connections
        for k, one in enumerate(exchange(ranks, data, number)):
            assert one == {other.identity.job: data[j] for j, other in enumerate(ranks) if j != k}


def test_much_goes_over_several_connections(ranks, monkeypatch):
    monkeypatch.setattr(links_module, "LANE_BYTES", 1_000_000)
    data = [os.urandom(1_500_001) for _ in ranks]
    assert lanes_for(2 * len(data[0])) == 4
    for k, one in enumerate(exchange(ranks, data)):
        assert one == {other.identity.job: data[j] for j, other in enumerate(ranks) if j != k}
    assert len(ranks[0].links._open) == 8


def test_split_is_in_order_and_whole():
    data = memoryview(bytes(range(256)))
    for cuts in ([0, 256], [0, 1, 1, 100, 256], [0, 255, 256]):
        buffers = [data[a:b] for a, b in zip(cuts, cuts[1:])]
        for parts in (1, 2, 3, 4):
            made = split(buffers, parts)
            assert len(made) == parts and b"".join(
                bytes(one) for part in made for one in part
            ) == bytes(data)
    assert split([], 3) == [[], [], []]


def test_bytes_may_go_one_way_only(ranks):
    east, _, west = ranks
    into = bytearray(500)
    there, back = west.peer, east.peer
    together(
        lambda: east.links.swap(
            1, 1, {there: [memoryview(b"x" * 200), memoryview(b"y" * 300)]}, {there: []}, 10.0
        ),
        lambda: west.links.swap(1, 1, {back: []}, {back: [memoryview(into)]}, 10.0),
    )
    assert bytes(into) == b"x" * 200 + b"y" * 300


def test_a_killed_peer_is_named_at_once_and_the_others_are_served(ranks):
    east, south, west = ranks
    data = bytes(8_000_000)

    def dies():
        sizes = {east.peer: 5, west.peer: 5}
        connections = south.links._connect(sizes, 10.0)[0]
        next(iter(connections.values()))[0].socket.send(b"half a")
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


def connected(rank, other):
    return rank.links._connect({other.peer: 5}, 5.0)[0]


def test_a_peer_that_calls_again_during_an_exchange_fails_and_keeps_nobody(ranks, monkeypatch):
    """A new connection replaces the one that the exchange waits for.

    The thread that takes calls closes the former one.
    """
    east, _, west = ranks
    waits, move = threading.Event(), transfer.PeerTransfer.move
    monkeypatch.setattr(
        transfer.PeerTransfer, "move", lambda one, mask: (move(one, mask), waits.set())
    )

    def calls_again():
        connected(east, west)
        waits.wait(30)
        again = Deadline(10, "calling again")
        return east.links.routes.dial(west.peer, {"purpose": "exchange", "lane": 0}, again)

    found, again = together(lambda: swap(west, [east], bytes(10), patience=30.0), calls_again)
    again.close()
    assert found.jobs == {"east"} and "silent" not in str(found)


def test_a_connection_that_is_closed_between_two_moves_ends_no_training(ranks, monkeypatch):
    move = transfer.PeerTransfer.move

    def closed_then(one, mask):
        before = one.events
        move(one, mask)
        if one.events != before:
            one.connection.close()

    monkeypatch.setattr(transfer.PeerTransfer, "move", closed_then)
    east, _, west = ranks
    first, second = together(
        lambda: swap(east, [west], b"1234"), lambda: swap(west, [east], b"5678")
    )
    assert isinstance(first, PeersFailed) and isinstance(second, PeersFailed)


def test_a_silent_peer_is_given_up_after_the_patience(ranks):
    east, _, west = ranks
    found = swap(west, [east], b"x", patience=0.5)  # east never calls
    assert found.jobs == {"east"} and "it did not call within 0.2" in str(found)
    found = together(
        lambda: swap(east, [west], bytes(10), patience=1.0), lambda: connected(west, east)
    )[0]
    assert found.jobs == {"west"} and "silent for 1 s" in str(found)


def test_a_byte_now_and_then_does_not_keep_it_waiting(ranks, monkeypatch):
    """A peer that sends a byte now and then is given up in the end.

    It is never silent for its patience. It is given up once it takes four times as long as such
    bytes did before (here: than the least rate allows).
    """
    monkeypatch.setattr(
        transfer.Speed, "deadline", lambda self, peer, count, patience: Deadline(patience, "it")
    )
    east, _, west = ranks
    stop = threading.Event()

    def trickle():
        (channel,) = next(iter(connected(west, east).values()))
        while not stop.wait(0.1):
            try:
                channel.socket.send(b"\0")
            except OSError:
                return

    thread = threading.Thread(target=trickle)
    thread.start()
    found = swap(east, [west], bytes(10), patience=1.0)
    stop.set()
    thread.join(10)
    assert found.jobs == {"west"} and "not done after 1 s" in str(found)


def test_how_long_a_peer_may_take_follows_what_it_took():
    speed, peer = transfer.Speed(), Peer("west", "1", 0)
    first = speed.deadline(peer, 64_000_000, 2.0).seconds
    assert first == 2 + 1000  # nothing is known: 64 kB/s
    speed.record_duration(peer, 8_000_000, 1.0)
    assert speed.deadline(peer, 64_000_000, 2.0).seconds == pytest.approx(2 + 4 * 8)
    speed.record_duration(peer, 100, 50.0)
    assert speed.deadline(peer, 64_000_000, 2.0).seconds == pytest.approx(2 + 4 * 8), (
        "few bytes say nothing"
    )
    speed.failed("west")
    assert speed.deadline(peer, 64_000_000, 2.0).seconds == first


def test_another_round_is_not_taken_for_this_one(ranks):
    east, _, west = ranks
    found = together(
        lambda: swap(east, [west], bytes(10), number=3, patience=3.0),
        lambda: swap(west, [east], bytes(10), number=4, patience=3.0),
    )
    assert all(isinstance(one, PeersFailed) for one in found)
    again = together(
        lambda: swap(east, [west], bytes(10), number=5),
        lambda: swap(west, [east], bytes(10), number=5),
    )
    assert again == [{"west": bytes(10)}, {"east": bytes(10)}]


def test_strangers_and_earlier_incarnations_are_not_let_in(ranks):
    east, _, west = ranks
    stranger = Rank("aaa", run="another")
    found = swap(stranger, [west], b"x", patience=2.0)
    assert found.jobs == {"west"} and "certificate" in str(found)
    late = Peer("west", "an-earlier-one", 0, west.links.address)
    with pytest.raises(PeersFailed):
        east.links.swap(1, 1, {late: [memoryview(b"x")]}, {late: [memoryview(bytearray(1))]}, 1.0)
    stranger.links.close()


def test_a_call_for_an_earlier_incarnation_is_not_served():
    asked = []
    east, west = Rank("east", serve=lambda channel, purpose: asked.append(purpose)), Rank("west")
    now = east.peer
    earlier = Peer(now.job, "an-earlier-one", now.rank, now.address)
    deadline = Deadline(5, "a test")
    with pytest.raises(OSError):
        west.links.routes.dial(earlier, {"purpose": "fetch"}, deadline).receive(deadline)
    assert not asked
    for one in (east, west):
        one.links.close()


def test_no_job_speaks_for_another(ranks):
    """South has a certificate of this run, and knows east's name and incarnation."""
    east, south, west = ranks
    routes = south.links.routes
    routes.identity = east.identity
    with pytest.raises(OSError, match="of this caller is of south, not of job 'east'"):
        routes.dial(west.peer, {"purpose": "exchange", "lane": 0}, Deadline(5, "a test"))
    assert not west.links._open


def test_no_job_answers_for_another(ranks):
    """South listens at the address that east believes to be west's."""
    east, south, west = ranks
    false = Peer("west", west.peer.incarnation, 0, south.links.address)
    with pytest.raises(OSError, match="has the certificate of south, not of 'west'"):
        east.links.routes.dial(false, {"purpose": "fetch"}, Deadline(5, "a test"))


def test_a_port_that_is_closed_is_named(ranks):
    east, _, west = ranks
    west.links.routes._listener.close()
    found = swap(east, [west], b"x", patience=1.0)
    assert f"at {west.links.address} cannot be reached (Connection refused)" in str(found)


def test_questions_have_a_connection_of_their_own():
    asked = []

    def serve(channel, purpose):
        asked.append(purpose["purpose"])
        deadline = Deadline(5, "a question")
        channel.send({"echo": channel.receive(deadline)["say"]}, deadline)
        channel.close()

    east, west = Rank("east", serve=serve), Rank("west")
    deadline = Deadline(5, "a test")
    channel = west.links.routes.dial(east.peer, {"purpose": "fetch"}, deadline)
    channel.send({"say": "hello"}, deadline)
    assert channel.receive(deadline) == {"echo": "hello"} and asked == ["fetch"]
    channel.close()
    for one in (east, west):
        one.links.close()


def test_a_port_in_use_is_named_and_another_of_the_range_is_taken():
    first = open_port(place_at("east", 1), 0)
    port = first.getsockname()[1]
    with pytest.raises(
        HolmesError,
        match=f"rank 3 cannot listen on port {port} of 127.0.0.1 .* --holmes-join-ports",
    ):
        open_port(place_at("east", 1, PortRange((port, port))), 3)
    second = open_port(place_at("east", 1, PortRange((port, min(port + 50, 65535)))), 0)
    assert second.getsockname()[1] > port
    first.close(), second.close()


def connections_in_close_wait(port):
    """Return this process's connections to a port of 127.0.0.1 whose other end has closed.

    A line of /proc/net/tcp has the own address, the other one and the state; CLOSE_WAIT is 08.
    """
    lines = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    fields = [line.split() for line in lines]
    end = f"0100007F:{port:04X}"
    return [row for row in fields if row[3] == "08" and end in row[1:3]]


def test_a_job_that_ends_leaves_no_connection_behind():
    """Each end, or restart, of another job left a connection in CLOSE_WAIT, until there were 128."""
    west, data = Rank("west"), b"x" * 1000
    port = int(west.links.address.rpartition(":")[2])
    for number, job in enumerate(("east1", "east2", "east3", "north")):
        other = Rank(job)
        pair = [west, other]
        assert exchange(pair, [data, data], number) == [{job: data}, {"west": data}]
        if job != "north":
            other.links.close()
            await_(lambda: connections_in_close_wait(port), what="the other end has closed")
    assert connections_in_close_wait(port) == []
    other.links.close(), west.links.close()
