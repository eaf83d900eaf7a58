"""Attacks of a member of the run on the coordinator and the other jobs' ranks.

Strangers in a crowd try to flood the log. These attacks come from a second look, after those of
test_attacks.py and test_liars.py.
"""

import threading
from pathlib import Path
from types import SimpleNamespace

import joined_jobs
import pytest
import torch
from coordinator_rules import TIMEOUT, Run
from joined_jobs import coordinator, credentials_of, place_at
from waiting import soon

import holmes_ext
from holmes_ext.errors import HolmesError
from holmes_ext.join.codecs import codec_of
from holmes_ext.join.coordinator.client import CoordinatorClient, ask_status
from holmes_ext.join.peers import routes as routes_module
from holmes_ext.join.peers.routes import RankIdentity, Routes
from holmes_ext.join.peers.transfer import Speed
from holmes_ext.join.settings import parse_outer
from holmes_ext.join.sockets.channel import BrokenFrame
from holmes_ext.join.sockets.documents import MOST_VALUES
from holmes_ext.join.sockets.handshake import Refused

HELLO = {**joined_jobs.HELLO, "agreed": {"outer": {}}, "round": 0, "entered": False, "peers": []}


def called(port, purpose, job="zero"):
    """Connect to the coordinator with the certificate of a job."""
    return place_at(job, port).call(purpose, soon())


def test_after_a_restart_nobody_takes_the_name_of_a_job_before_it_is_back():
    with coordinator() as server:
        east = CoordinatorClient(place_at("east", server.port), lambda: HELLO)
        thief = {"purpose": "job", "job": "east", "incarnation": east.incarnation}
        with pytest.raises(Refused, match="is of zero, not of job 'east'"):
            called(server.port, thief)  # the coordinator is new: east has not been heard yet
        assert east.ask("enter", {}, soon())["verdict"] == "in"
        east.close("over")


def restarted(timeout):
    """Of a coordinator without rounds: two jobs, and a third one that knows of jobs that there are not."""
    run = Run(least=2)
    run.fragments = {name: [[8, 5]] * 2 for name in ("east", "west", "zero")}
    for name in ("east", "west"):
        run.hello(name, entered=True, round=8, peers=["east", "west"])
    run.hello("zero", entered=True, round=8, peers=["ghost"], timeout=timeout)
    return run


def test_after_a_restart_jobs_that_one_invents_are_not_awaited_for_as_long_as_it_says():
    """No round went for 86,400 s."""
    run = restarted(timeout=86400.0)
    assert run.ready("east", 9) is None and run.ready("west", 9) is None
    run.now += TIMEOUT + 1
    run.hello("zero", entered=True, round=8, peers=["another"], timeout=86400.0)
    run.ready("east", 9)
    run.ready("west", 9)
    run.now += TIMEOUT + 1  # zero is not ready either
    assert set(run.ready("east", 9)["members"]) == {"east", "west"}


def test_invented_jobs_are_bounded():
    run = Run("east", "west")
    for number in range(200):
        run.hello("zero", peers=[f"ghost{number}x{k}" for k in range(64)])
    assert len(run.coordinator._membership._awaited_peers._since) <= 4096


@pytest.mark.parametrize("is_ready", [True, False])
def test_who_lets_the_others_wait_round_after_round_sits_out(is_ready):
    """Each round cost the honest jobs a timeout, for ever. is_ready: it is ready, and never exchanges."""
    run, waited = Run("east", "west", "zero"), []
    for number in range(1, 101):
        verdict = (
            run.ready("zero", number) if is_ready or number == 1 else run.ready("zero", number - 1)
        )
        run.ready("east", number)
        reply = run.ready("west", number)
        if reply is None:
            run.now += TIMEOUT + 1
            reply = run.ready("west", number)
            waited.append(number)
        assert reply["verdict"] == "go", (number, verdict)
        attempt = 1
        if "zero" in reply["members"]:
            for name in ("east", "west"):
                run.done(name, number, unreached=("zero",))
            run.now += TIMEOUT + 1
            assert run.done("east", number)["attempt"] == 2
            waited.append(number)
            attempt = 2
        assert [one["verdict"] for one in run.end(number, "east", "west", attempt=attempt)] == [
            "commit"
        ] * 2
        run.fragments["zero"] = [list(one) for one in run.fragments["east"]]
    assert 3 <= len(waited) <= 12, waited


def test_who_is_back_for_good_sits_nothing_out():
    run = Run("east", "west", "zero")
    member = run.coordinator.state.members["zero"]
    member.delays_in_a_row = 2
    run.whole_round(1, "east", "west", "zero")
    assert member.delays_in_a_row == 0
    member.delays_in_a_row, member.sits_out_until = 5, 40
    run.coordinator.gone("east", "1", "over")
    run.coordinator.gone("west", "1", "over")
    assert run.ready("zero", 2)["verdict"] == "go", "nobody is there who goes on without it"


@pytest.mark.parametrize("incarnation", ["1", "2"])
def test_who_says_hello_again_sits_out_all_the_same(incarnation):
    run = Run("east", "west", "zero")
    (
        run.coordinator.state.members["zero"].delays_in_a_row,
        run.coordinator.state.members["zero"].sits_out_until,
    ) = 5, 40
    run.coordinator.gone("zero", "1", "over")
    run.hello("zero", incarnation)
    member = run.coordinator.state.members["zero"]
    assert (member.delays_in_a_row, member.sits_out_until) == (5, 40)


def test_a_peer_that_takes_longer_each_time_is_not_given_more_each_time():
    """Four times what it took the last time let each round last four times as long as the one before."""
    speed, peer, seconds = Speed(), SimpleNamespace(job="zero"), 1.0
    for _ in range(10):
        speed.record_duration(peer, 10_000_000, seconds)
        seconds = speed.deadline(peer, 10_000_000, 2.0).seconds * 0.99
    assert seconds < 10


def test_a_document_of_tens_of_millions_of_values_is_not_parsed():
    """64 MB of "[]," are 2 GB of lists. Who sends it is dropped; the others go on."""
    with coordinator() as server:
        channel = called(
            server.port,
            {"purpose": "job", "job": "zero", "incarnation": "1"},
        )
        bomb = b'{"op":"hello","maps":[' + b"[]," * MOST_VALUES + b"[]]}"
        header = channel._sent.header(len(bomb))
        channel._write(memoryview(header + bomb), soon())
        with pytest.raises((ConnectionResetError, BrokenFrame)):
            channel.receive(soon())
        channel.close()
        assert (
            ask_status("127.0.0.1", server.port, credentials_of("zero", server.port))["jobs"] == []
        )


def test_addresses_that_others_want_to_be_called_at_do_not_pile_up(monkeypatch):
    """A standing rank is told of each address by any member."""
    monkeypatch.setattr(routes_module, "_MOST_UNREACHABLE", 16)
    monkeypatch.setattr(
        routes_module, "call", lambda *arguments: (_ for _ in ()).throw(OSError("closed"))
    )
    routes = Routes(RankIdentity("east", "1", 0), place_at("east", 1), None, "127.0.0.1:1", print)
    for port in range(1, 200):
        assert (
            routes._call_back({"address": f"10.0.0.1:{port}", "job": "zero", "incarnation": "1"})
            is None
        )
    assert len(routes._unreachable_addresses) <= 16


def test_the_log_of_a_crowd_from_many_addresses_is_short():
    """Five lines a minute for each address were as many as somebody has addresses."""
    with coordinator() as server:
        for number in range(500):
            server._complain(f"2001:db8::{number:x}", "it has no certificate")
        assert len(server.told) <= 5
        for number in range(2000):
            server._complain(f"10.0.{number // 250}.{number % 250}", "it has no certificate")
        assert len(server.told) <= 60 and "are not listed" in server.told[-1]
        assert len(server._complaints._latest) <= 60


def test_a_relay_is_none_for_those_without_a_standing_line(monkeypatch):
    """A member cannot make the coordinator call, or carry bytes to, an address of his choice."""
    from holmes_ext.join.coordinator import relay

    monkeypatch.setattr(relay, "WAIT_S", 0.2)
    with coordinator() as server:
        purpose = {
            "purpose": "relay",
            "job": "zero",
            "incarnation": "1",
            "to_job": "10.0.0.1",
            "to": "22",
            "to_rank": 0,
            "call": "c",
            "address": "10.0.0.1:22",
        }
        channel = called(server.port, purpose)
        assert channel.receive(soon()) == {"relay": "alone"}
        channel.close()
        assert server.relay.counted() == {}


@pytest.mark.parametrize("compress", ["bf16", "int8", "2bit"])
@pytest.mark.parametrize("count", [1, 511, 513, 4097, 10_000])
def test_any_bytes_of_a_compressed_pseudo_gradient_are_as_many_elements_as_there_should_be(
    compress, count
):
    """What comes is as long as the receiver says, and becomes no more than that."""
    codec, like = codec_of(parse_outer(f"compress={compress}")), torch.zeros(count)
    wire = codec.buffer(like)
    generator = torch.Generator().manual_seed(count)
    for _ in range(5):
        raw = wire.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))
        assert codec.decode(wire, like).shape == like.shape


def test_a_caller_without_a_name_or_incarnation_is_refused():
    with coordinator() as server:
        for change in (
            {"incarnation": "x" * 65},
            {"job": "a b"},
            {"incarnation": ""},
            {"incarnation": None},
            {"job": ["zero"]},
        ):
            purpose = {"purpose": "job", "job": "zero", "incarnation": "1"}
            with pytest.raises(Refused):
                called(server.port, {**purpose, **change})


def test_many_jobs_of_one_liar_do_not_keep_others_from_answers():
    """64 jobs is the most; the next one is refused in words, and those that are there are answered."""
    with coordinator() as server:
        clients = [
            CoordinatorClient(place_at(f"j{k}", server.port), lambda: HELLO) for k in range(65)
        ]
        for client in clients[:64]:
            client.ask("enter", {}, soon())
        with pytest.raises((Refused, HolmesError), match="there are 64 jobs already"):
            clients[64].ask("enter", {}, soon())
        assert (
            len(ask_status("127.0.0.1", server.port, credentials_of("zero", server.port))["jobs"])
            == 64
        )
        for client in clients:
            client.close("over")
    assert threading.active_count() < 300


def test_no_wait_asks_the_clock_that_can_be_set():
    """Whoever answers a host's NTP moves it by a day; integration_tests/joined has two hosts apart."""
    package = Path(holmes_ext.__file__).parent
    files = [*(package / "join").rglob("*.py"), *(package / "runtime" / "sockets").rglob("*.py")]
    assert len(files) > 40
    assert not [file.name for file in files if "time.time(" in file.read_text()]
