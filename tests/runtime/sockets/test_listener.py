"""A port that strangers may reach: limits for each address and in all, and a loop that survives."""

import contextlib
import errno
import socket
import threading
from types import SimpleNamespace

import pytest
from waiting import await_

from holmes_ext.runtime import sockets
from holmes_ext.runtime.deadline import Deadline
from holmes_ext.runtime.sockets import (
    Listener,
    address_text,
    is_loopback,
    listen,
    peer_host,
    split_address,
)


@contextlib.contextmanager
def listening(handle, **limits):
    one = Listener(socket.create_server(("127.0.0.1", 0)), handle, "test", **limits)
    one.start()
    try:
        yield one
    finally:
        one.close()


def call(one):
    return socket.create_connection(("127.0.0.1", one.port), timeout=10)


def waits(guest):
    """Until its connection ends."""
    with contextlib.suppress(OSError):
        guest.socket.recv(1)


def test_the_oldest_stranger_of_an_address_goes_when_there_are_too_many():
    with listening(waits, per_address=3, strangers=10) as one:
        calls = [call(one) for _ in range(4)]
        assert calls[0].recv(1) == b"", "the first one is closed"
        calls[3].sendall(b"x")
        assert calls[3].recv(1) == b"", "the last one was served"
        for each in calls:
            each.close()


def test_a_crowded_address_makes_room_for_others(monkeypatch):
    hosts = iter(["one"] * 5 + ["two"] * 2)
    monkeypatch.setattr(sockets, "peer_host", lambda connection: next(hosts))
    served = []

    def handle(guest):
        served.append(guest.host)
        waits(guest)

    with listening(handle, per_address=5, strangers=6) as one:
        calls = [call(one) for _ in range(7)]
        await_(lambda: len(served) == 7)
        assert calls[0].recv(1) == b"", "of the address that has most"
        for each in calls[1:]:
            each.settimeout(0.2)
            with pytest.raises(TimeoutError):
                each.recv(1)
        for each in calls:
            each.close()


def test_all_addresses_of_one_ipv6_network_count_as_one(monkeypatch):
    """Somebody with a /64 has any number of addresses: an honest caller was the oldest of many, and went."""
    hosts = iter(["2001:db8:1::1", *(f"2001:db8:2::{k:x}" for k in range(20))])
    monkeypatch.setattr(sockets, "peer_host", lambda connection: next(hosts))
    with listening(waits, per_address=5, strangers=8) as one:
        honest = call(one)
        crowd = [call(one) for _ in range(20)]
        await_(lambda: crowd[14].recv(1) == b"")
        honest.settimeout(0.2)
        with pytest.raises(TimeoutError):
            honest.recv(1)
        for each in (honest, *crowd):
            each.close()


@pytest.mark.parametrize(
    "host, network",
    [
        ("10.1.2.3", "10.1.2.3"),
        ("::ffff:10.1.2.3", "::ffff:10.1.2.3"),
        ("2001:db8:0:1:a:b:c:d", "2001:db8:0:1::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("a name", "a name"),
    ],
)
def test_networks(host, network):
    assert sockets.network_of(host) == network


def test_who_is_admitted_is_no_stranger_any_more():
    def handle(guest):
        if guest.admit():
            guest.socket.sendall(b"in")
            waits(guest)

    with listening(handle, per_address=2, admitted=4) as one:
        calls = [call(one) for _ in range(4)]
        assert [each.recv(2) for each in calls[:3]] == [b"in"] * 3
        assert calls[3].recv(2) == b"", "there is room for four, three of them from one address"
        calls[0].close()
        await_(lambda: len(one._admitted) == 2)
        assert call(one).recv(2) == b"in"


@pytest.mark.parametrize(
    "number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ECONNABORTED, errno.EPERM]
)
def test_the_loop_survives_what_accept_says(number):
    """Out of descriptors, say: the port is there again when there are some."""
    real = socket.create_server(("127.0.0.1", 0))

    class Failing:
        def __init__(self):
            self.left = 3

        def accept(self):
            if self.left:
                self.left -= 1
                raise OSError(number, "as the system says")
            return real.accept()

        def __getattr__(self, name):
            return getattr(real, name)

    one = Listener(Failing(), lambda guest: guest.socket.sendall(b"here"), "test")
    one.start()
    assert call(one).recv(4) == b"here"
    one.close()


def test_the_loop_survives_a_thread_that_cannot_be_started(monkeypatch):
    started, start = [], threading.Thread.start

    def failing(thread):
        if "guest" in thread.name and not started:
            started.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    with listening(lambda guest: guest.socket.sendall(b"here")) as one:
        monkeypatch.setattr(threading.Thread, "start", failing)
        assert call(one).recv(4) == b""
        assert call(one).recv(4) == b"here"
        await_(lambda: not one._strangers)


def test_close_ends_everything():
    with listening(waits) as one:
        calls = [call(one) for _ in range(3)]
        await_(lambda: len(one._strangers) == 3)
    assert [each.recv(1) for each in calls] == [b""] * 3
    await_(lambda: not any("test guest" in thread.name for thread in threading.enumerate()))


def test_a_deadline_is_for_all_parts():
    whole = Deadline(0.05, "all of it")
    part = whole.part(100, "a part")
    assert part.seconds <= 0.05 and whole.part(0.01, "a short one").seconds == 0.01
    await_(lambda: whole.passed)
    assert whole.left == 0
    with pytest.raises(TimeoutError, match="all of it took longer than 0.05 s"):
        whole.check()
    with pytest.raises(TimeoutError):
        whole.limit(None)


@pytest.mark.parametrize(
    "text, found",
    [
        ("host:5", ("host", 5)),
        ("10.0.0.1:29600", ("10.0.0.1", 29600)),
        ("[::1]:29600", ("::1", 29600)),
        ("[fe80::1%eth0]:7", ("fe80::1%eth0", 7)),
    ],
)
def test_addresses(text, found):
    assert split_address(text) == found and split_address(address_text(*found)) == found


def test_an_address_without_a_port_takes_the_default():
    assert split_address("host", 7) == ("host", 7) and split_address("[::1]", 7) == ("::1", 7)


@pytest.mark.parametrize(
    "text",
    [
        "a" * 64 + ":5",
        "a..b:5",
        ".:5",
        "",
        "host",
        "host:",
        ":5",
        "host:0",
        "host:65536",
        "host:-1",
        "host:1e3",
        "::1:29600",
        "[::1",
        "[::1]29600",
        "[zz]:5",
        "a b:5",
        "a\x1b[31m:5",
        "host:٥",
        "host:5:6",
        "x" * 300 + ":5",
    ],
)
def test_what_is_no_address(text):
    with pytest.raises(ValueError):
        split_address(text)


def test_loopback_and_mapped_addresses():
    assert is_loopback("127.0.0.5") and is_loopback("::1") and is_loopback("::ffff:127.0.0.1")
    assert (
        not is_loopback("10.0.0.1")
        and not is_loopback("localhost.example.org")
        and not is_loopback("::ffff:10.0.0.1")
    )


def test_all_addresses_of_both_families():
    with listen("", 0) as everywhere:
        port = everywhere.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            connection, _ = everywhere.accept()
            assert peer_host(connection) == "127.0.0.1"
            connection.close()


def test_a_port_in_use_is_refused_though_there_is_another_family():
    with listen("", 0) as everywhere, pytest.raises(OSError):
        listen("", everywhere.getsockname()[1])
    assert sockets.errno.EADDRINUSE


def test_who_shares_the_host():
    """Both ends have a loopback address, or the same address."""
    for own, other, shared in (
        ("127.0.0.1", "127.0.0.2", True),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("fd00::1", "fd00::1", True),
        ("127.0.0.1", "10.0.0.1", False),
    ):
        connection = SimpleNamespace(
            getsockname=lambda own=own: (own, 1), getpeername=lambda other=other: (other, 2)
        )
        assert sockets.shares_host(connection) is shared, (own, other)


def test_an_answer_of_many_levels_is_not_of_this_job():
    """The address of a node may lead to anybody."""
    with listen("127.0.0.1", 0) as port:
        address = port.getsockname()

        def answer():
            connection, _ = port.accept()
            connection.recv(100)
            connection.sendall(b"[" * 4000 + b"\n")
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        error = sockets.exchange_hello("127.0.0.1", address, {}, {}, 5.0, 5.0)
        thread.join(10)
    assert "it is not of this job" in error
