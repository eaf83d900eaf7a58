"""The coordinator over sockets.

The tests cover certificates, repeated questions, a restart, strangers, and jobs that speak for
others.
"""

import contextlib
import socket
import threading
import time

import pytest
from joined_jobs import coordinator, credentials_of, place_at, run_at, served_run
from waiting import await_, soon

from holmes_ext.errors import HolmesError
from holmes_ext.join.coordinator import client as clients
from holmes_ext.join.coordinator.client import CoordinatorClient, ask_status
from holmes_ext.join.coordinator.server import CoordinatorServer
from holmes_ext.join.sockets.handshake import Refused, call

SUM = "0" * 16


def hello(least=1, timeout=20.0, **more):
    return {
        "agreed": {"model": "abc"},
        "maps": {"0": [0, 8, 0]},
        "addresses": ["10.0.0.1:5"],
        "versions": [0],
        "checksums": ["0000000000000007"],
        "min": least,
        "timeout": timeout,
        **more,
    }


def job(name, port, run="", least=1, timeout=20.0, **more):
    document = hello(least, timeout, **more)
    return CoordinatorClient(place_at(name, port, run=run), lambda: document)


def status(port, run=""):
    return ask_status("127.0.0.1", port, credentials_of("any", port, run))


READY = {
    "round": 1,
    "fragment": 0,
    "versions": [0],
    "checksums": ["0000000000000007"],
    "norm": 1.0,
    "tokens": 8,
}


def test_two_jobs_go_through_a_round():
    with coordinator() as server:
        jobs = [job(name, server.port, least=2) for name in ("east", "west")]
        answers = {}

        def run(one):
            entered = one.ask("enter", {}, soon())
            go = one.ask("ready", READY, soon())
            check = one.ask("done", {"round": 1, "attempt": 1}, soon())
            report = {
                "round": 1,
                "attempt": 1,
                "check": check["check"],
                "digests": {"east": SUM, "west": SUM},
                "factors": {"east": 0.5, "west": 0.5},
            }
            commit = one.ask("checked", report, soon())
            answers[one.job] = (
                entered["verdict"],
                go["members"],
                commit["verdict"],
                commit["factors"],
            )

        threads = [threading.Thread(target=run, args=(one,)) for one in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        shares = {"east": 0.5, "west": 0.5}
        assert answers == dict.fromkeys(("east", "west"), ("in", shares, "commit", shares))
        maps = jobs[0].ask("maps", {"of": "west"}, soon())
        assert maps["maps"] == {"0": [0, 8, 0]} and maps["addresses"] == ["10.0.0.1:5"]
        for one in jobs:
            one.close("done")
        assert any("round 1: commit" in line for line in server.told)


def test_the_first_request_uses_the_connection_that_was_opened_early(monkeypatch):
    opened = []
    connect = CoordinatorClient.connect
    monkeypatch.setattr(
        CoordinatorClient, "connect", lambda *args: opened.append(args[1]) or connect(*args)
    )
    with coordinator() as server:
        east = job("east", server.port)
        east.connect_early()
        for _ in range(2):
            assert east.ask("maps", {"of": "nobody"}, soon())["verdict"] == "void"
        east.close("done")
    assert opened == ["job"]


def test_an_early_connection_that_failed_is_tried_again_and_its_error_is_told():
    with coordinator() as server:
        east = job("east", server.port, run="another")
        east.connect_early()
        with pytest.raises(Refused, match="does not have a certificate of this run"):
            east.ask("enter", {}, soon())
        port = server.port
    north = job("north", port)
    north.connect_early()
    assert isinstance(north._first_channel.exception(20), OSError), "nobody listens yet"
    with coordinator(port):
        assert north.ask("maps", {"of": "nobody"}, soon())["verdict"] == "void"
        north.close("done")


def test_a_certificate_of_another_run_is_one_line_and_not_tried_again():
    with coordinator() as server:
        with pytest.raises(Refused, match="does not have a certificate of this run") as told:
            job("east", server.port, run="another").ask("enter", {}, soon())
        assert "\n" not in str(told.value)
        with pytest.raises(HolmesError, match="does not have a certificate of this run"):
            status(server.port, "another")
        await_(
            lambda: any("was turned away: it has no certificate" in line for line in server.told)
        )


def test_a_certificate_that_the_coordinator_does_not_accept_is_one_line():
    """The job knows the coordinator's CA, but its own certificate is of another one."""
    with coordinator() as server:
        ours, theirs = (
            credentials_of("east", server.port),
            credentials_of("east", server.port, "another"),
        )
        theirs.contexts.client.load_verify_locations(cadata=run_at(server.port).authority)
        with pytest.raises(Refused, match="does not accept this job's certificate"):
            call("127.0.0.1", server.port, theirs, "holmes join serve", {"purpose": "job"}, soon())
        assert ours is not theirs


def test_a_job_that_ends_is_gone_at_once(monkeypatch):
    monkeypatch.setattr(clients, "HEARTBEAT_S", 0.1)
    with coordinator() as server:
        one = job("east", server.port)
        one.ask("enter", {}, soon())
        one.start_heartbeat(
            lambda: {"step": 5, "round": 2, "steps_per_second": 10.0, "bits_per_second": 8e6}
        )
        await_(lambda: status(server.port)["jobs"][0]["step"] == 5)
        one.close("training is over")
        await_(lambda: status(server.port)["jobs"][0]["state"] == "gone")
        assert "job east is gone: training is over" in status(server.port)["events"]


def test_a_job_that_dies_before_its_first_heartbeat_is_gone_at_once():
    """Its next incarnation is not told that the name is taken."""
    with coordinator() as server:
        first = job("east", server.port)
        first.ask("enter", {}, soon())
        first._drop()  # as its kernel does when it is killed
        await_(lambda: status(server.port)["jobs"][0]["state"] == "gone")
        again = job("east", server.port)
        assert again.ask("enter", {}, soon())["verdict"] == "in"
        again.close("over")
        assert server.told.count("job east is gone: its connection was closed") >= 1


def test_jobs_come_back_to_a_restarted_coordinator(monkeypatch):
    monkeypatch.setattr(clients, "HEARTBEAT_S", 0.1)
    with coordinator() as server:
        one = job("east", server.port)
        one.ask("enter", {}, soon())
        one.start_heartbeat(lambda: {"step": 5})
    one._hello = lambda document=one._hello(): {**document, "entered": True, "round": 0}
    again = {}
    thread = threading.Thread(target=lambda: again.update(one.ask("ready", READY, soon())))
    thread.start()  # nobody is there yet
    with coordinator(server.port) as second:
        thread.join(20)
        assert again["members"] == {"east": 1.0}
        await_(lambda: status(second.port)["jobs"][0]["step"] == 5)
        one.close("over")


def test_another_run_at_its_address_is_away_for_a_job_that_was_in(monkeypatch):
    """Somebody else answers: the job waits for its own coordinator, but not for long."""
    monkeypatch.setattr(clients, "_IMPOSTOR_S", 0.5)
    with coordinator() as server:
        one = job("east", server.port)
        one.ask("enter", {}, soon())
    with contextlib.ExitStack() as running:
        other = CoordinatorServer(
            "127.0.0.1", server.port, lambda port: run_at(port, "another").served(), print
        )
        running.callback(other.close)
        threading.Thread(target=other.serve, daemon=True).start()
        begin = time.monotonic()
        with pytest.raises(TimeoutError, match="does not have a certificate of this run"):
            one.ask("ready", READY, soon(60))
        assert time.monotonic() - begin < 30  # training stalled for the whole deadline
    with coordinator(server.port):
        assert one.ask("ready", READY, soon())["members"] == {"east": 1.0}
        one.close("over")


def test_a_refusal_of_a_job_that_was_in_is_not_tried_again():
    """TLS proves that it comes from the coordinator. Training stalled for the whole deadline."""
    with coordinator() as server:
        one = job("east", server.port)
        one.ask("enter", {}, soon())
        with pytest.raises(Refused, match="does not know 'dance'"):
            one.ask("dance", {}, soon(3600))
        one.close("over")


@pytest.mark.parametrize(
    "answer",
    [
        b'{"holmes":2}\n',
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\x00\x00\x00\x02" + bytes(8) + b"{}",
        b"",
    ],
)
def test_whoever_answers_in_its_place_does_not_end_a_job_that_was_in(answer):
    with coordinator() as server:
        one = job("east", server.port)
        one.ask("enter", {}, soon())
    with socket.create_server(("127.0.0.1", server.port)) as listener:

        def impostor():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    connection.sendall(answer)
                    connection.close()

        threading.Thread(target=impostor, daemon=True).start()
        with pytest.raises(TimeoutError, match="did not answer 'ready' in 1 s"):
            one.ask("ready", READY, soon(1.0))
        listener.shutdown(socket.SHUT_RDWR)
    with coordinator(server.port):
        assert one.ask("ready", READY, soon())["members"] == {"east": 1.0}
        one.close("over")


def test_services_run_while_the_coordinator_serves():
    events = []

    def service(name):
        @contextlib.contextmanager
        def run(server):
            events.append(f"{name} begins at round {server.status()['round']}")
            yield
            events.append(f"{name} ends")

        return run

    services = (service("one"), service("two"))
    server = CoordinatorServer("127.0.0.1", 0, served_run, print, services=services)
    assert not events
    thread = threading.Thread(target=server.serve)
    thread.start()
    assert status(server.port)["jobs"] == []
    assert events == ["one begins at round 0", "two begins at round 0"]
    server.close()
    thread.join(10)
    assert not thread.is_alive() and events[2:] == ["two ends", "one ends"]


def test_a_service_that_cannot_begin_ends_the_server_and_the_other_services():
    events = []

    @contextlib.contextmanager
    def good(server):
        try:
            yield
        finally:
            events.append("ended")

    def bad(server):
        raise HolmesError("the service cannot begin")

    server = CoordinatorServer("127.0.0.1", 0, served_run, print, services=(good, bad))
    try:
        with pytest.raises(HolmesError, match="the service cannot begin"):
            server.serve()
    finally:
        server.close()
    assert events == ["ended"]


def test_a_question_that_is_not_answered_in_time_ends():
    with (
        coordinator() as server,
        pytest.raises(TimeoutError, match="did not answer 'enter' in 0.2 s"),
    ):
        job("east", server.port, least=2, timeout=60).ask("enter", {}, soon(0.2))
    with pytest.raises(TimeoutError, match="Connection refused"):
        job("east", server.port).ask("enter", {}, soon(0.2))


def test_a_coordinator_that_is_stopped_costs_what_the_deadline_says():
    """It accepts, and says nothing: the deadline is for the whole question, connecting included."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = job("east", listener.getsockname()[1])
        for seconds in (1.0, 0.5):
            begin = time.monotonic()
            with pytest.raises(TimeoutError):
                one.ask("enter", {}, soon(seconds))
            assert time.monotonic() - begin < 9  # an answer alone was waited for 16


def test_nonsense_is_answered_or_cut_off_and_named():
    with coordinator() as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert raw.recv(4096) == b""
        away = "127.0.0.1 was turned away: it does not speak TLS"
        await_(lambda: any(away in line for line in server.told))
        one = job("east", server.port)
        with pytest.raises(Refused, match="does not know 'dance'"):
            one.ask("dance", {}, soon())
        del (broken := hello())["maps"]
        one = CoordinatorClient(place_at("west", server.port), lambda: broken)
        with pytest.raises(Refused, match="hello of a job: key 'maps' is missing"):
            one.ask("enter", {}, soon())


def test_complaints_about_one_address_are_few():
    with coordinator() as server:
        for _ in range(30):
            socket.create_connection(("127.0.0.1", server.port)).close()
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
            raw.sendall(b"x" * 100)
            with contextlib.suppress(ConnectionResetError):
                raw.recv(1)
        assert len(server.told) <= 5


def test_a_connection_speaks_for_its_own_job_alone():
    """South has a certificate of the run, and knows east's name and incarnation."""
    with coordinator() as server:
        east = job("east", server.port)
        east.ask("enter", {}, soon())
        thief = job("south", server.port)
        thief.job, thief.incarnation = "east", east.incarnation
        with pytest.raises(Refused, match="is of south, not of job 'east'"):
            thief.ask("ready", READY, soon(2))
        await_(lambda: any("is of south, not of job 'east'" in line for line in server.told))
        assert east.ask("ready", {**READY, "job": "west"}, soon())["members"] == {"east": 1.0}
        east.close("over")


def test_an_address_that_cannot_be_had_is_named():
    with (
        coordinator() as server,
        pytest.raises(HolmesError, match=f"127.0.0.1:{server.port} cannot be listened on"),
    ):
        CoordinatorServer("127.0.0.1", server.port, served_run, print)
    for host in ("a" * 64, "\udcff", "256.1.1.1"):  # the first two raised UnicodeError
        with pytest.raises(HolmesError, match="cannot be listened on"):
            CoordinatorServer(host, 0, served_run, print)
    with pytest.raises(HolmesError, match="is `holmes join serve` running there"):
        ask_status("127.0.0.1", server.port, credentials_of("any", server.port), 2.0)


def test_idle_strangers_do_not_keep_jobs_out():
    """The oldest of the address that has most of them goes."""
    with coordinator() as server:
        idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(200)]
        assert status(server.port)["jobs"] == []
        for one in idle:
            one.close()


def test_threads_and_descriptors_of_strangers_are_bounded():
    with coordinator() as server:
        before = threading.active_count()
        idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(300)]
        await_(lambda: threading.active_count() - before <= 20)
        for one in idle:
            one.close()


def test_ipv6():
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    server = CoordinatorServer("", 0, served_run, lambda line: None)
    threading.Thread(target=server.serve, daemon=True).start()
    for host in ("127.0.0.1", "::1"):
        with contextlib.suppress(OSError):
            assert ask_status(host, server.port, credentials_of("any", server.port))["jobs"] == []
    server.close()


def test_the_channel_of_a_status_is_closed():
    with coordinator() as server:
        deadline = soon()
        channel = place_at("any", server.port).call({"purpose": "status"}, deadline)
        assert channel.receive(deadline)["version"] == 1
        with pytest.raises(ConnectionError):
            channel.receive(deadline)
