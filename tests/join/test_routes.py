"""Ranks that cannot be called: they call back, or the coordinator hands the bytes on, as ciphertext."""

import contextlib
import os
import socket
import sys
import threading
import traceback

import pytest
import torch
from joined_jobs import Rank, coordinator, credentials_of, in_threads, joined_of, place_at
from waiting import await_, soon

from holmes_ext.errors import HolmesError
from holmes_ext.join.address import PortRange, without_loopback
from holmes_ext.join.coordinator import relay
from holmes_ext.join.coordinator.client import ask_status, new_incarnation
from holmes_ext.join.peers import listening
from holmes_ext.join.peers import routes as routes_module
from holmes_ext.join.peers.links import PeersFailed
from holmes_ext.join.peers.listening import open_port
from holmes_ext.join.peers.routes import Peer, RankIdentity
from holmes_ext.join.settings import parse_outer
from holmes_ext.join.sockets import requests
from holmes_ext.runtime.sockets import address_text

PATIENCE_S = 60.0


def swap(rank, other, data, number=1):
    """Send `data` to the other rank, and return what it sent meanwhile."""
    peer, into = other.peer, bytearray(len(data))
    rank.links.swap(number, 1, {peer: [memoryview(data)]}, {peer: [memoryview(into)]}, PATIENCE_S)
    return bytes(into)


@pytest.fixture
def pair(request):
    """(server, east, west): east calls. The parameter: which of them can be called."""
    east_listens, west_listens = request.param
    with coordinator() as server:
        made = [Rank("east", server.port, east_listens), Rank("west", server.port, west_listens)]
        yield server, *made
        for one in made:
            one.links.close()


def both_ways(east, west, size, number=1):
    """Bytes of each reach the other."""
    ours, theirs = os.urandom(size), os.urandom(size)
    came = in_threads(
        {
            "east": lambda: swap(east, west, ours, number),
            "west": lambda: swap(west, east, theirs, number),
        }
    )
    assert came == {"east": theirs, "west": ours}


REVERSED, RELAYED = (True, False), (False, False)


@pytest.mark.parametrize("pair", [REVERSED], indirect=True)
def test_a_rank_that_cannot_be_called_calls_back(pair):
    server, east, west = pair
    both_ways(east, west, 1_000_000)
    east.links.drop()
    both_ways(east, west, 1000, 2)  # its standing line stands on
    assert server.relay.counted() == {}


@pytest.mark.parametrize("pair", [RELAYED], indirect=True)
def test_where_neither_can_be_called_the_coordinator_hands_the_bytes_on(pair):
    server, east, west = pair
    both_ways(east, west, 3_000_000)
    both_ways(east, west, 3_000_000, 2)  # over the same connection
    east.links.drop(), west.links.drop()
    both_ways(east, west, 1000, 3)  # over a new one: it has a standing line again
    counted = server.relay.counted()
    assert set(counted) == {"east", "west"} and min(counted.values()) > 6_000_000


@pytest.mark.parametrize("pair", [RELAYED], indirect=True)
def test_the_relay_sees_ciphertext_alone(pair, monkeypatch):
    """Neither what is exchanged nor who calls, also where the coordinator is on the host of both ranks."""
    seen, read = bytearray(), relay._Direction.read

    def watched(direction):
        before = len(direction.held)
        count = read(direction)
        seen.extend(direction.held[before:])
        return count

    monkeypatch.setattr(relay._Direction, "read", watched)
    _, east, west = pair
    data = b"the weights of this run " * 20_000
    came = in_threads(
        {"east": lambda: swap(east, west, data), "west": lambda: swap(west, east, data)}
    )
    assert came == {"east": data, "west": data}
    assert len(seen) > 2 * len(data)
    for text in (b"weights of this run", b"purpose", b"exchange", b"incarnation"):
        assert text not in seen


@pytest.mark.parametrize("pair", [REVERSED], indirect=True)
def test_who_calls_back_encrypts_as_well(pair):
    server, east, west = pair
    both_ways(east, west, 100_000)
    assert server.relay.counted() == {}


@pytest.mark.parametrize("pair", [RELAYED], indirect=True)
def test_no_more_than_the_limit_is_relayed(pair):
    server, east, west = pair
    server.relay._limit_bytes = 500_000
    data = bytes(2_000_000)
    with pytest.raises(PeersFailed):
        in_threads({"east": lambda: swap(east, west, data), "west": lambda: swap(west, east, data)})
    assert 500_000 <= sum(server.relay.counted().values()) < 500_000 + 2 * relay.BUFFER_BYTES
    east.links.drop(), west.links.drop()
    with pytest.raises(PeersFailed, match="the relay takes no more pairs, or no more bytes"):
        swap(east, west, b"x")


def test_a_rank_that_is_gone_is_told(monkeypatch):
    monkeypatch.setattr(relay, "WAIT_S", 0.2)
    with coordinator() as server:
        east = Rank("east", server.port, False)
        gone = Peer("west", "an-incarnation", 0, "")
        with pytest.raises(PeersFailed, match="it has no standing line to the coordinator"):
            east.links.swap(1, 1, {gone: [memoryview(b"x")]}, {gone: []}, 4.0)
        east.links.close()


@pytest.mark.parametrize("pair", [RELAYED], indirect=True)
def test_who_has_the_certificate_of_another_job_is_not_let_in_by_the_relay(pair):
    """The relayed connection has a handshake of its own, between the two ranks."""
    server, east, west = pair
    south = Rank("south", server.port, False)
    routes = south.links.routes
    facts = {**east.identity.facts, "purpose": "exchange", "to": west.identity.incarnation}
    with pytest.raises(HolmesError, match="of this caller is of south, not of job 'east'"):
        routes._dial_through_coordinator(west.peer, facts, soon())
    assert not west.links._open
    south.links.close()


@pytest.mark.parametrize("pair", [RELAYED], indirect=True)
def test_a_dead_standing_line_is_replaced(pair):
    _, east, west = pair
    both_ways(east, west, 10)
    east.links.drop(), west.links.drop()
    west.links.routes._standby_line.cut()
    both_ways(east, west, 10, 2)


def test_a_standing_line_on_which_something_else_came_is_dropped(monkeypatch):
    """A closed one was kept for ever where unread bytes hid its end."""
    monkeypatch.setattr(relay, "_LOOK_S", 0.05)
    with coordinator() as server:
        told = {
            "purpose": "standby",
            "job": "west",
            "incarnation": "1",
            "rank": 0,
        }
        deadline = soon()
        line = place_at("west", server.port).call(told, deadline)
        await_(lambda: server.relay._lines)
        line.send({"nobody": "asked"}, deadline)
        await_(lambda: not server.relay._lines)
        with pytest.raises(OSError):
            line.receive(deadline)


@pytest.fixture(scope="module", autouse=True)
def threads_of_other_tests():
    """Return the threads that existed before the first test of this module."""
    return set(threading.enumerate())


def test_no_thread_or_connection_is_left(threads_of_other_tests):
    def connections():
        """Return the threads that serve a connection of this module's tests."""
        threads = set(threading.enumerate()) - threads_of_other_tests
        return [one for one in threads if one.name.startswith("holmes-serve guest")]

    with contextlib.suppress(AssertionError):  # the assertion below shows where they wait
        await_(lambda: not connections(), PATIENCE_S)
    frames = sys._current_frames()
    stacks = [traceback.format_stack(frames.get(one.ident)) for one in connections()]
    assert not stacks, "\n".join("".join(stack) for stack in stacks)


# Whole jobs


SETTINGS = "every=4,fragments=2,delay=1,compress=off,min=2,timeout=60"


def train(name, port, listens, begun):
    """Weights after ten rounds of a job of one rank."""
    model = torch.nn.ParameterList([torch.zeros(3000)])
    ports = PortRange() if listens else PortRange(None)
    loop = joined_of(model, name, port, parse_outer(SETTINGS), ports=ports)
    generator = torch.Generator().manual_seed(ord(name[0]))
    loop.begin()
    begun.wait(60)
    for _ in range(20):
        with torch.no_grad():
            model[0] += 0.1 * (1 - model[0]) + 0.01 * torch.randn(3000, generator=generator)
        loop.after_step(10)
    loop.end()
    return model[0].detach()


def run(east_listens, west_listens):
    begun = threading.Barrier(2)
    with coordinator() as server:
        found = in_threads(
            {
                name: (lambda name=name, listens=listens: train(name, server.port, listens, begun))
                for name, listens in (("east", east_listens), ("west", west_listens))
            }
        )
        assert sum("commit (" in line for line in server.told) == 10, server.told
        status = ask_status("127.0.0.1", server.port, credentials_of("east", server.port))
    return found, {job["job"]: job["relayed"] for job in status["jobs"] if job["relayed"]}


def test_jobs_that_cannot_be_called_learn_the_same():
    direct, relayed = run(True, True)
    assert relayed == {}
    for listens in ((True, False), (False, True), (False, False)):
        found, relayed = run(*listens)
        assert all(torch.equal(found[name], direct[name]) for name in direct), listens
        assert bool(relayed) == (listens == (False, False))


def test_a_port_that_is_closed_from_outside_is_found_at_the_start(monkeypatch):
    """The coordinator tries the rank's port; where it cannot be reached, others are told no address."""
    with coordinator() as server:
        place, identity = (
            place_at("east", server.port),
            RankIdentity("east", "1", 0),
        )
        opened = open_port(place, 0)

        def told(one):
            return listening.published_address(place, one, identity)

        assert told(opened) == address_text("127.0.0.1", opened.getsockname()[1])
        opened.close()
        with socket.socket() as closed:  # bound, and nobody listens: as behind a firewall
            closed.bind(("127.0.0.1", 0))
            assert told(closed) == ""


def test_loopback_is_not_advertised_to_other_hosts(monkeypatch):
    """A job beside the coordinator advertised 127.0.0.1, which leads others to their own host."""
    for module in (requests, relay):
        monkeypatch.setattr(module, "shares_host", lambda connection: False)  # all are elsewhere
    begun = threading.Barrier(2)
    called = []

    def call_back(routes, caller):
        called.append(caller["address"])

    monkeypatch.setattr(routes_module.Routes, "_call_back", call_back)
    with coordinator() as server:
        in_threads(
            {
                name: (lambda name=name: train(name, server.port, True, begun))
                for name in ("east", "west")
            }
        )
        assert sum("commit (" in line for line in server.told) == 10, server.told
        members = server._coordinator.state.members.values()
        assert [member.hello.addresses for member in members] == [("",), ("",)]
        assert len(server.relay.counted()) == 2
    assert set(called) == {""}, "a rank was told to call a loopback address of another host"


def test_loopback_is_told_to_jobs_on_the_same_host_only(monkeypatch):
    """The description of a job beside the coordinator has its loopback address; a job elsewhere gets ""."""
    hello = {
        "op": "hello",
        "addresses": ["127.0.0.1:5", "10.0.0.1:5", "[::1]:5", "localhost:5", ""],
    }
    assert without_loopback(hello) == {"op": "hello", "addresses": ["", "10.0.0.1:5", "", "", ""]}
    for other in ({"verdict": "wait"}, {"addresses": 7}, {"addresses": [7, None, "x"]}):
        assert without_loopback(other) == other


def test_a_loopback_address_that_leads_nowhere_is_not_published():
    """The coordinator is at the far end of a tunnel: its 127.0.0.1 is another host's."""
    with coordinator() as server, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens
        identity = RankIdentity("east", new_incarnation(), 0)
        place = place_at("east", server.port)
        assert listening.published_address(place, closed, identity) == ""
