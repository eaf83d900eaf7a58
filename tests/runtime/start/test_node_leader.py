"""Ranks of one node that speak through one of them, over the node's abstract sockets."""

import threading
import uuid

import pytest

from holmes_ext.runtime.start import exchange
from holmes_ext.runtime.start.exchange import (
    NodeLeader,
    leader_socket_name,
    receive_from_leader,
    report_to_leader,
)


@pytest.fixture
def name():
    return leader_socket_name(f"node {uuid.uuid4()}", "host", 1)


def in_threads(function, count):
    found = {}
    threads = [
        threading.Thread(target=lambda n=n: found.update({n: function(n)})) for n in range(count)
    ]
    for thread in threads:
        thread.start()
    return threads, found


def test_all_are_heard_and_receive_from_leader(name):
    """Whoever comes first, and a document that no message holds."""
    document = bytes(range(256)) * 4096

    def neighbour(number):
        return receive_from_leader(report_to_leader(name, b"report %d" % number, 10.0), 10.0)

    threads, found = in_threads(neighbour, 7)
    leader = NodeLeader(name)
    assert sorted(leader.collect_reports(7, 10.0)) == [b"report %d" % number for number in range(7)]
    leader.send_to_all(b"said", document)
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(7), (b"said", document))


def test_who_comes_late_is_not_heard(name):
    leader = NodeLeader(name)
    assert leader.collect_reports(1, 0.05) == []
    assert report_to_leader(name, b"late", 0.05) is None


def test_who_is_in_the_queue_when_the_leader_speaks_is_not_heard(name):
    leader = NodeLeader(name)
    threads, found = in_threads(lambda number: report_to_leader(name, b"late", 60.0), 1)
    while not leader._listener or not _connected(name):
        pass
    assert leader.collect_reports(0, 1.0) == []
    threads[0].join()
    assert found == {0: None}


def _connected(name):
    with open("/proc/net/unix") as lines:
        return sum(name[1:] in line for line in lines) > 1


def test_a_leader_that_ends_has_told_nothing(name):
    threads, found = in_threads(
        lambda number: receive_from_leader(report_to_leader(name, b"report", 10.0), 10.0), 1
    )
    leader = NodeLeader(name)
    assert leader.collect_reports(1, 10.0) == [b"report"]
    for connection in leader._connections:
        connection.close()
    threads[0].join()
    assert found == {0: (b"", b"")}


def test_a_leader_that_says_nothing_is_not_waited_for_for_ever(name):
    threads, found = in_threads(
        lambda number: receive_from_leader(report_to_leader(name, b"report", 10.0), 0.1), 1
    )
    NodeLeader(name).collect_reports(1, 10.0)
    threads[0].join()
    assert found == {0: (b"", b"")}


def test_a_name_that_another_process_has(name):
    first, second = NodeLeader(name), NodeLeader(name)
    assert second.collect_reports(1, 10.0) == []  # at once: it cannot be heard
    threads, _ = in_threads(lambda number: report_to_leader(name, b"report", 10.0), 1)
    assert first.collect_reports(1, 10.0) == [b"report"]
    threads[0].join()


def test_another_users_process_is_not_spoken_to(name, monkeypatch):
    leader = NodeLeader(name)
    monkeypatch.setattr(exchange, "_user_at_other_end", lambda connection: -1)
    assert report_to_leader(name, b"report", 0.1) is None
    assert leader.collect_reports(1, 0.1) == []


def test_jobs_and_nodes_have_sockets_of_their_own():
    names = {
        leader_socket_name(*given)
        for given in (("a", "h", 1), ("b", "h", 1), ("a", "i", 1), ("a", "h", 2))
    }
    assert len(names) == 4 and all(name.startswith("\0") for name in names)
