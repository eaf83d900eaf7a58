"""The coordinator over sockets: the token, questions asked again, a restart, strangers."""

import contextlib
import socket
import threading
import time

import pytest

from holmes_ext.errors import HolmesError
from holmes_ext.runtime.outer.coordinator import client as clients
from holmes_ext.runtime.outer.coordinator.client import CoordinatorClient, ask_status
from holmes_ext.runtime.outer.coordinator.server import Server
from holmes_ext.runtime.outer.coordinator.wire import Line, Refused, answer, call, challenge, proof


@contextlib.contextmanager
def serving(port=0, token="secret"):
    told = []
    server = Server("127.0.0.1", port, token, told.append)
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    try:
        yield server, told
    finally:
        server.close()
        thread.join(5)
        assert not thread.is_alive()


def job(name, port, token="secret", least=1, timeout=20.0):
    document = {
        "agreed": {"model": "abc"},
        "maps": {"0": [[0, 8, 0]]},
        "addresses": ["10.0.0.1:5"],
        "fragments": [[0, 7]],
        "min": least,
        "timeout": timeout,
    }
    return CoordinatorClient(name, "127.0.0.1", port, token, lambda: document)


def soon(seconds=20.0):
    return time.monotonic() + seconds


READY = {"round": 1, "fragment": 0, "fragments": [[0, 7]], "norm": 1.0, "tokens": 8}


def test_two_jobs_go_through_a_round():
    with serving() as (server, told):
        jobs = [job(name, server.port, least=2) for name in ("east", "west")]
        answers = {}

        def run(one):
            entered = one.ask("enter", {}, soon())
            go = one.ask("ready", READY, soon())
            commit = one.ask(
                "done", {"round": 1, "attempt": 1, "ok": True, "accused": [], "factors": [0.5, 0.5]}, soon()
            )
            answers[one.job] = (entered["verdict"], go["members"], commit["verdict"], commit["factors"])

        threads = [threading.Thread(target=run, args=(one,)) for one in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert answers == {
            name: ("in", {"east": 0.5, "west": 0.5}, "commit", [0.5, 0.5]) for name in ("east", "west")
        }
        assert jobs[0].ask("maps", {"of": "west"}, soon())["maps"] == {"0": [[0, 8, 0]]}
        for one in jobs:
            one.close("done")
        assert any("round 1: commit" in line for line in told)


def test_a_wrong_token_is_one_line_and_never_tried_again():
    with serving() as (server, told):
        with pytest.raises(Refused, match="the token is not the coordinator's; set HOLMES_JOIN_TOKEN"):
            job("east", server.port, token="guess").ask("enter", {}, soon())
        with pytest.raises(HolmesError, match="the token is not"):
            ask_status("127.0.0.1", server.port, "guess")
        assert any("was turned away" in line for line in told)


def test_a_meeting_point_that_does_not_know_the_token_is_not_believed():
    """It answers the challenge, but with what it knows itself."""
    listener = socket.create_server(("127.0.0.1", 0))

    def impostor():
        line = Line(listener.accept()[0])
        ours = challenge()
        line.send({"holmes": 1, "challenge": ours})
        theirs = line.receive(5)["challenge"]
        line.send({"proof": proof("something", "listener", ours, theirs)})

    threading.Thread(target=impostor, daemon=True).start()
    with pytest.raises(Refused, match="does not know the token of this run"):
        call("127.0.0.1", listener.getsockname()[1], "secret", {"purpose": "status"})
    listener.close()


def test_the_token_does_not_travel_and_answers_cannot_be_used_again():
    assert "secret" not in proof("secret", "caller", "a", "b")
    assert (
        proof("secret", "caller", "a", "b")
        != proof("secret", "listener", "a", "b")
        != proof("secret", "listener", "a", "c")
    )


def test_a_job_that_ends_is_gone_at_once(monkeypatch):
    monkeypatch.setattr(clients, "HEARTBEAT_S", 0.1)
    with serving() as (server, _):
        one = job("east", server.port)
        one.ask("enter", {}, soon())
        one.heartbeat(lambda: {"step": 5, "round": 2, "steps_per_second": 10.0, "bits_per_second": 8e6})
        until(lambda: ask_status("127.0.0.1", server.port, "secret")["jobs"][0]["step"] == 5)
        one.close("training is over")
        until(lambda: ask_status("127.0.0.1", server.port, "secret")["jobs"][0]["state"] == "gone")
        assert (
            "job east is gone: training is over" in ask_status("127.0.0.1", server.port, "secret")["events"]
        )


def test_a_job_that_dies_before_its_first_pulse_is_gone_at_once():
    """Its next incarnation is not told that the name is taken."""
    with serving() as (server, told):
        first = job("east", server.port)
        first.ask("enter", {}, soon())
        first._drop()  # as its kernel does when it is killed
        until(lambda: ask_status("127.0.0.1", server.port, "secret")["jobs"][0]["state"] == "gone")
        again = job("east", server.port)
        assert again.ask("enter", {}, soon())["verdict"] == "in"
        again.close("over")
        assert told.count("job east is gone: its connection was closed") >= 1


def test_jobs_come_back_to_a_restarted_meeting_point(monkeypatch):
    monkeypatch.setattr(clients, "HEARTBEAT_S", 0.1)
    with serving() as (server, _):
        one = job("east", server.port)
        one.ask("enter", {}, soon())
        one.heartbeat(lambda: {"step": 5})
    one._hello = lambda document=one._hello(): {**document, "entered": True, "round": 0}
    again = {}
    thread = threading.Thread(target=lambda: again.update(one.ask("ready", READY, soon())))
    thread.start()  # nobody is there yet
    with serving(server.port) as (second, _):
        thread.join(20)
        assert again["members"] == {"east": 1.0}
        until(lambda: ask_status("127.0.0.1", second.port, "secret")["jobs"][0]["step"] == 5)
        one.close("over")


def test_a_question_that_is_not_answered_in_time_ends():
    with serving() as (server, _):
        with pytest.raises(TimeoutError, match="did not answer 'enter' in time"):
            job("east", server.port, least=2, timeout=60).ask("enter", {}, time.monotonic() + 0.2)
    with pytest.raises(TimeoutError):
        job("east", server.port).ask("enter", {}, time.monotonic() + 0.2)


def test_nonsense_is_answered_or_cut_off():
    with serving() as (server, _):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
            data = b""
            with contextlib.suppress(ConnectionResetError):
                while chunk := raw.recv(4096):
                    data += chunk
            assert data.count(b"\n") == 1  # the challenge, then nothing
        line = call("127.0.0.1", server.port, "secret", {"purpose": "job"})
        line.send({"op": "dance", "job": "east"})
        assert "does not know 'dance'" in line.receive(5)["error"]
        line.send({"op": "hello", "job": "east"})
        assert "cannot be read" in line.receive(5)["error"]
        line.close()


def test_an_address_that_cannot_be_had_is_named():
    with serving() as (server, _):
        with pytest.raises(HolmesError, match=f"127.0.0.1:{server.port} cannot be listened on"):
            Server("127.0.0.1", server.port, "secret", print)
    with pytest.raises(HolmesError, match="is `holmes join serve` running there"):
        ask_status("127.0.0.1", server.port, "secret", 2.0)


def until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def tcp_pair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


def trickle(connection):
    with contextlib.suppress(OSError):
        for _ in range(20):
            connection.send(b"x")
            time.sleep(0.2)


def test_a_stranger_cannot_fill_the_memory_or_stay():
    ours, theirs = tcp_pair()
    theirs.sendall(b"x" * 200_000)
    with pytest.raises(ConnectionError):
        answer(Line(ours), "a token", timeout_s=5.0)
    ours, theirs = tcp_pair()
    threading.Thread(target=trickle, args=(theirs,), daemon=True).start()
    with pytest.raises(OSError):  # a byte now and then does not keep it waiting
        Line(ours).receive(1.0)
