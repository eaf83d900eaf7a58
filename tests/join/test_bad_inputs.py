"""Sends bad input to the ports of two joined jobs while they train, and loads damaged checkpoints.

Joined jobs are separate training jobs that regularly average their weights (DiLoCo) over TCP connections.
They and their coordinator must withstand random bytes, wrong messages of a member, and damaged files:

    the jobs go on training
    no thread ends with an exception, and no traceback is printed
    the numbers of threads and the memory stay bounded

The exhaustive tests use about 10,000 inputs, the others a quarter of them.
"""

import collections
import contextlib
import copy
import io
import json
import os
import random
import resource
import socket
import sys
import threading
import time
import traceback

import pytest
import torch
from joined_jobs import coordinator, credentials_of, in_threads, joined_of

from holmes_ext.errors import HolmesError
from holmes_ext.join.coordinator.client import ask_status
from holmes_ext.join.identity.invitation import read_invitation
from holmes_ext.join.settings import parse_outer
from holmes_ext.join.shards.saved import unwrap_verified, wrap_with_digest
from holmes_ext.join.sockets import documents
from holmes_ext.join.sockets.certificates import COORDINATOR
from holmes_ext.join.sockets.channel import Channel
from holmes_ext.join.sockets.handshake import call
from holmes_ext.runtime.deadline import Deadline

SEED = os.environ.get("HOLMES_TEST_SEED", "33")


@pytest.fixture
def input_divisor(exhaustive):
    """Return 4, by which a test divides its number of inputs to be short, or 1 in an exhaustive test."""
    return 1 if exhaustive else 4


class Training:
    """Two joined jobs, east and west, that train in threads of this process while the context is open."""

    def __init__(self, port):
        settings = parse_outer("every=2,fragments=2,delay=0,compress=off,min=2,timeout=30")
        self.models = {
            name: torch.nn.ParameterList([torch.zeros(500)]) for name in ("east", "west")
        }
        self.loops = {
            name: joined_of(model, name, port, settings) for name, model in self.models.items()
        }
        self.until = threading.Event()
        self.thread = threading.Thread(target=self._run)
        self.error = None
        self.steps = 0

    def _run(self):
        try:
            in_threads({name: lambda name=name: self._train(name) for name in self.loops}, 600)
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            self.error = error

    def _train(self, name):
        loop, model = self.loops[name], self.models[name]
        loop.begin()
        while not self.until.is_set():
            with torch.no_grad():
                model[0] += 0.01
            loop.after_step(10)
            self.steps += name == "east"
            time.sleep(0.002)
        loop.end()

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.until.set()
        self.thread.join(120)

    def assert_goes_on(self):
        """Assert that the two jobs still average their weights: within 60 s they finish four rounds."""
        before = self.loops["east"].number
        end = time.monotonic() + 60
        while self.loops["east"].number < before + 4 and time.monotonic() < end:
            assert self.error is None and self.thread.is_alive(), self.error
            time.sleep(0.05)
        assert self.loops["east"].number >= before + 4


@pytest.fixture
def quiet(monkeypatch, capfd):
    """Let the test fail if a thread ends with an exception or a traceback is printed."""
    raised = []
    monkeypatch.setattr(threading, "excepthook", lambda told: raised.append(told.exc_value))
    yield
    assert not raised, raised
    assert "Traceback" not in "".join(capfd.readouterr())


def assert_bounded(before):
    """Assert that there are not many more threads and not much more memory than `before`.

    Args:
        before: The result of an earlier call of threads_and_memory().
    """
    end = time.monotonic() + 30
    while threading.active_count() > before[0] + 8 and time.monotonic() < end:
        time.sleep(0.1)
    assert threading.active_count() <= before[0] + 8, count_threads_by_line()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before[1] + 400_000  # kB


def count_threads_by_line():
    """Return how many threads execute each line of holmes (the innermost one of a thread's stack)."""
    frames = sys._current_frames()
    found = collections.Counter()
    for thread in threading.enumerate():
        lines = [
            line
            for line in traceback.extract_stack(frames.get(thread.ident))
            if "holmes_ext" in line.filename
        ]
        found[
            thread.name,
            f"{lines[-1].filename.rpartition('/')[2]}:{lines[-1].lineno}" if lines else "",
        ] += 1
    return found.most_common()


def threads_and_memory():
    """Return the number of threads and the largest resident memory of this process so far, in kB."""
    return threading.active_count(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def garbage(rng):
    """Return random bytes, or a damaged beginning of the handshake, as a stranger may send them."""
    # The first frame of the handshake. A frame is a length, a sequence number (here 0), and a content.
    hello = documents.pack({"holmes": 2, "challenge": "00" * 16})
    frame = len(hello).to_bytes(4, "big") + bytes(8) + hello
    kinds = (
        "random bytes",
        "HTTP",
        "TLS",
        "a part of the frame",
        "a flipped bit",
        "a wrong length",
        "a wrong proof",
        "the frame twice",
    )
    kind = rng.choice(kinds)
    if kind == "random bytes":
        return rng.randbytes(rng.choice([0, 1, 3, 12, 100, 5000]))
    if kind == "HTTP":
        return b"GET /" + rng.randbytes(20) + b" HTTP/1.1\r\n\r\n"
    if kind == "TLS":
        return b"\x16\x03\x01" + rng.randbytes(rng.randrange(600))
    if kind == "a part of the frame":
        return frame[: rng.randrange(len(frame))]
    if kind == "a flipped bit":
        damaged = bytearray(frame)
        damaged[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
        return bytes(damaged)
    if kind == "a wrong length":
        return rng.choice([2**32 - 1, 8193, 0]).to_bytes(4, "big") + rng.randbytes(8)
    # The second frame must prove that the sender has the token of the jobs.
    proof = documents.pack(
        {"purpose": rng.choice(['{"purpose":"job"}', "[]", "{", "\x00"]), "proof": "f" * 64}
    )
    second_frame = len(proof).to_bytes(4, "big") + (1).to_bytes(8, "big") + proof
    if kind == "a wrong proof":
        return frame + second_frame
    return frame + frame


def send_bytes(port, data, rng):
    """Open a connection to the port of this host, send the bytes, and close the connection.

    Sometimes the connection is half closed first, or an answer is awaited.
    """
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", port), timeout=2) as raw,
    ):
        raw.sendall(data)
        if rng.random() < 0.3:
            raw.shutdown(socket.SHUT_WR)  # half close: no more bytes follow
        if rng.random() < 0.2:
            raw.settimeout(0.05)
            raw.recv(1000)


ODD = [
    None,
    True,
    -1,
    0,
    2**63,
    10**19,
    1e300,
    -0.5,
    "",
    "x",
    "\x1b[31m",
    "a" * 5000,
    [],
    {},
    [[]],
    [1],
    ["x"],
    {"a": {}},
    "0" * 16,
    "f" * 16,
    [-1],
    [2**62],
    ["é" * 100],
]


def deep(rng):
    value = "x"
    for _ in range(rng.choice([5, 50, 400])):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def mutated(document, rng):
    """Return a copy of the nested dict with one to three random values replaced, removed or added."""
    changed = copy.deepcopy(document)
    for _ in range(rng.randint(1, 3)):
        # Choose the outer dict or, by chance, one inside of it.
        table = changed
        while True:
            inner = [value for value in table.values() if isinstance(value, dict) and value]
            if not inner or rng.random() >= 0.4:
                break
            table = rng.choice(inner)
        key = rng.choice([*table, "more"])  # "more" is a new key
        if rng.random() < 0.2:
            table.pop(key, None)
        elif rng.random() < 0.1:
            table[key] = deep(rng)  # deeply nested lists and dicts
        else:
            table[key] = rng.choice(ODD)  # values of unexpected types and sizes
    return changed


CLAIMS = {"versions": [0, 0], "checksums": ["", "f" * 16]}
QUESTIONS = [
    {
        "op": "hello",
        "agreed": {"outer": {"every": 2}},
        "maps": {"all": [0, 500, 0]},
        "addresses": ["127.0.0.1:1"],
        **CLAIMS,
        "min": 1,
        "timeout": 5.0,
        "round": 0,
        "entered": False,
        "peers": ["east"],
    },
    {"op": "enter"},
    {
        "op": "ready",
        "round": 1,
        "fragment": 0,
        "tokens": 5,
        "norm": 1.0,
        "salted": "f" * 16,
        "salt_round": 1,
        **CLAIMS,
    },
    {"op": "next", "offers": [{"fragment": 0, "tokens": 5, "norm": 1.0, "slack_s": 1.0}], **CLAIMS},
    {"op": "done", "round": 1, "attempt": 1, "unreached": ["east"], "faults": {"east": "x"}},
    {
        "op": "checked",
        "round": 1,
        "attempt": 1,
        "check": 1,
        "digests": {"east": "f" * 16},
        "factors": {"east": 1.0},
        "gap": 1.0,
    },
    {"op": "maps", "of": "east"},
    {"op": "dance"},
    {},
]
HEARTBEAT = {
    "round": 1,
    "step": 2,
    "steps_per_second": 1.0,
    "bits_per_second": 1.0,
    "drift": 0.1,
    "ends": "",
}


def lie_to_coordinator(port, rng):
    """Send a random, mostly wrong message to the coordinator, as a member of the run."""
    kind = rng.choice(
        ["job", "job", "job", "heartbeat", "status", "standby", "relay", "reachable", "else"]
    )
    # The handshake states the purpose of the connection. The coordinator reads these values.
    purpose = {
        "purpose": kind,
        "job": rng.choice(["zero", "one"]),
        "incarnation": "1",
        "port": rng.choice([0, 1, 70000, "x"]),
        "rank": 0,
        "to_job": "east",
        "to": "1",
        "to_rank": 0,
        "call": "c",
        "address": "",
    }
    if rng.random() < 0.3:
        purpose = mutated(purpose, rng)
    deadline = Deadline(3, "a lie")
    with contextlib.suppress(OSError, HolmesError, ValueError):
        # call() makes the handshake, with the certificate of a job that is not in the run yet.
        credentials = credentials_of(rng.choice(["zero", "one"]), port)
        channel = call("127.0.0.1", port, credentials, COORDINATOR, purpose, deadline)
        try:
            for _ in range(rng.randint(1, 3)):
                if kind == "heartbeat":
                    message = HEARTBEAT
                else:
                    message = rng.choice(QUESTIONS)  # one of each kind
                if rng.random() < 0.9:
                    message = mutated(message, rng)
                send_any(channel, message, rng, deadline)
        finally:
            channel.close()


def send_any(channel, document, rng, deadline):
    """Send a document as JSON; sometimes send invalid JSON or random bytes instead."""
    draw = rng.random()
    if draw < 0.8:  # valid JSON, 80 % of all
        text = json.dumps(document).encode()
    elif draw < 0.9:  # invalid or unusual JSON
        odd = [
            b'{"a":NaN}',
            b'{"a":"\\ud800"}',
            b"[" * 100_000,
            b"\xff",
            b"",
            b"null",
            b'{"op":1e999}',
        ]
        text = rng.choice(odd)
    else:  # random bytes
        text = rng.randbytes(30)
    # Write the bytes as one frame. `_sent` has its sequence number.
    header = channel._sent.header(len(text))
    channel._write(memoryview(header + text), deadline)


def lie_to_rank(loop, credentials, rng):
    """Send a random, mostly wrong message to a rank of a joined job, as a rank of another job would."""
    host, port = loop.rounds.links.address.split(":")
    identity = loop.rounds.links.routes.identity
    # The handshake states the purpose of the connection. The rank reads these values.
    purpose = {
        "purpose": rng.choice(["exchange", "fetch", "reversed", "else"]),
        "job": "zero",
        "incarnation": "1",
        "rank": rng.choice([0, -1, "x"]),
        "lane": rng.choice([0, 99, None]),
        "to": identity.incarnation,
    }
    if rng.random() < 0.3:
        purpose = mutated(purpose, rng)
    deadline = Deadline(3, "a lie")
    with contextlib.suppress(OSError, HolmesError, ValueError):
        # call() makes the handshake, with the certificate of a job that is not in the run.
        channel = call(host, int(port), credentials, identity.job, purpose, deadline)
        try:
            # Asks for the weights 0 to 249 of a fragment, a part of the model.
            good = {"fragment": 0, "version": 0, "start": 0, "stop": 250}
            send_any(channel, mutated(good, rng), rng, deadline)
        finally:
            channel.close()


def test_ports_while_two_jobs_train(quiet, input_divisor):
    """Two joined jobs, east and west, go on training while their ports get bad input."""
    rng = random.Random(SEED)
    with (
        coordinator() as server,
        Training(server.port) as training,
    ):  # trains in threads of this process
        training.assert_goes_on()
        before = threads_and_memory()
        # Random bytes and damaged handshakes, as from a stranger.
        port_of_west = int(training.loops["west"].rounds.links.address.split(":")[1])
        for _ in range(1500 // input_divisor):
            send_bytes(server.port, garbage(rng), rng)
            send_bytes(port_of_west, garbage(rng), rng)
        training.assert_goes_on()
        # Wrong messages, as from a member.
        for number in range(2500 // input_divisor):
            lie_to_coordinator(server.port, rng)
            if number % 3 == 0:
                loop = training.loops[rng.choice(["east", "west"])]
                lie_to_rank(loop, credentials_of("zero", server.port), rng)
        training.assert_goes_on()
        assert_bounded(before)  # threads and memory
        status = ask_status("127.0.0.1", server.port, credentials_of("zero", server.port))
        states = {job["job"]: job["state"] for job in status["jobs"]}
        assert states["east"] == states["west"] == "in"  # both still take part
    assert training.error is None


def test_half_open_connections_to_a_rank(quiet):
    """500 idle connections to a rank do not start 500 threads, and the rank goes on training."""
    with coordinator() as server, Training(server.port) as training:
        training.assert_goes_on()
        before = threads_and_memory()
        port_of_west = int(training.loops["west"].rounds.links.address.split(":")[1])
        idle = [socket.create_connection(("127.0.0.1", port_of_west)) for _ in range(500)]
        number_of_threads, _ = before
        most_new_threads = 40  # far fewer than connections
        assert threading.active_count() <= number_of_threads + most_new_threads
        training.loops["west"].rounds.links.drop()  # the two jobs must be able to connect again
        training.assert_goes_on()
        for connection in idle:
            connection.close()
        assert_bounded(before)


def test_the_metrics_port(quiet, monkeypatch, input_divisor):
    """The HTTP port for Prometheus (--holmes-metrics) answers despite idle connections and bad requests."""
    pytest.importorskip("prometheus_client")
    from holmes_ext.options import Options
    from holmes_ext.runtime.start.launcher import Process
    from holmes_ext.runtime.watch.metrics import open_metrics

    rng = random.Random(SEED)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]  # is free when the server is closed
    process = Process(
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        master_addr="127.0.0.1",
        master_port=0,
        launcher="test",
    )
    metrics = open_metrics(Options(metrics=str(port)), process)
    assert metrics.destination == f"http://127.0.0.1:{port}/metrics"  # other hosts cannot connect
    before = threads_and_memory()

    # 100 connections that send nothing do not get a thread each.
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
    number_of_threads, _ = before
    assert threading.active_count() <= number_of_threads + 12

    for _ in range(1000 // input_divisor):
        requests = [b"GET /metrics" + rng.randbytes(9), b"POST / HTTP/1.1\r\n\r\n", b"\r\n\r\n"]
        send_bytes(port, rng.choice([garbage(rng), *requests]), rng)

    with socket.create_connection(("127.0.0.1", port), timeout=10) as raw:
        raw.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert raw.recv(20).startswith(b"HTTP/1.1 200 OK")
    for connection in idle:
        connection.close()
    assert_bounded(before)
    metrics.close()


def test_damaged_outer_states(input_divisor):
    """A saved state of a joined job whose file has flipped bits is refused with a one-line error.

    The state has a digest of its content. It is accepted only if the digest fits.
    """
    rng = random.Random(SEED)
    with coordinator() as server:
        # A joined job of one rank, which takes four steps.
        loop = joined_of(
            torch.nn.Linear(20, 30), "east", server.port, parse_outer("every=2,fragments=2,delay=0")
        )
        loop.begin()
        for _ in range(4):
            loop.after_step(1)
        file = io.BytesIO()
        torch.save(loop.state_dict(), file)
        loop.end()
    good = file.getvalue()
    digest = torch.load(io.BytesIO(good), weights_only=True)["digest"]

    refused = 0
    for _ in range(1000 // input_divisor):
        data = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)  # flip a bit of the file
        try:
            saved = torch.load(io.BytesIO(bytes(data)), weights_only=True)
        except Exception:  # noqa: BLE001 - torch refuses the file, so holmes never sees it
            continue
        try:
            unwrap_verified(saved, "file.pt")  # checks the digest
            assert saved["digest"] == digest, "the damage touched only parts that are not used"
        except HolmesError as error:
            refused += 1
            assert "file.pt" in str(error) and "\n" not in str(error)
    assert refused > 20  # torch has not refused all of the files


def with_digest_if_possible(state):
    """Return the document of a checkpoint; a state nested too deeply for a digest gets a wrong one."""
    try:
        return wrap_with_digest(state)
    except RecursionError:
        return {**wrap_with_digest({}), "outer": state}


def test_outer_states_that_somebody_made(input_divisor):
    """A saved state with wrong values and a fitting digest is loaded or refused with a one-line error.

    Anyone who can write a checkpoint can also compute the digest of its content.
    """
    rng = random.Random(SEED)
    with coordinator() as server:
        settings = parse_outer("every=4,fragments=2,delay=1")
        # A joined job of one rank, which takes four steps.
        loop = joined_of(torch.nn.Linear(20, 30), "east", server.port, settings)
        loop.begin()
        for _ in range(4):
            loop.after_step(1)
        good = loop.state_dict()["outer"]
        refused = 0
        for _ in range(1000 // input_divisor):
            wrong = mutated(good, rng)  # a copy with some values replaced
            try:
                loop.load_state_dict(with_digest_if_possible(wrong), "file.pt")
            except HolmesError as error:
                refused += 1
                assert "file.pt" in str(error) and "\n" not in str(error)
        assert refused > 20  # many of the values are really wrong
        loop.load_state_dict(
            wrap_with_digest(good), "file.pt"
        )  # the right state can still be loaded
        loop.end()


@pytest.mark.parametrize(
    "value",
    [
        None,
        5,
        [],
        {},
        {"version": 2},
        {"version": 1, "digest": "", "outer": {}},
        {"version": 2, "digest": "x", "outer": {"a": object()}},
        {"version": "x"},
    ],
)
def test_what_is_no_outer_state(value):
    with pytest.raises(HolmesError, match="file.pt: "):
        unwrap_verified(value, "file.pt")


def test_a_changed_number_of_an_outer_state_is_noticed():
    state = {
        "a": 1,
        "b": torch.ones(3),
        "c": [1.5, "x", None, {"d": torch.zeros(2, dtype=torch.bfloat16)}],
    }
    assert unwrap_verified(wrap_with_digest(state), "file.pt") is state
    for change in (
        lambda s: s["outer"].update(a=2),
        lambda s: s["outer"]["b"].__setitem__(1, float("nan")),
        lambda s: s["outer"]["c"].append(1),
        lambda s: s["outer"].update(a=True),
        lambda s: s["outer"].pop("a"),
    ):
        broken = wrap_with_digest(copy.deepcopy(state))
        change(broken)
        with pytest.raises(HolmesError, match="is damaged"):
            unwrap_verified(broken, "file.pt")


def test_damaged_invitation_files(tmp_path, input_divisor):
    rng = random.Random(SEED)
    path = tmp_path / "invitation"
    good = b'{"job": "east", "address": "a:1", "fingerprint": "00", "secret": "s"}'
    for _ in range(1000 // input_divisor):
        data = bytearray(rng.choice([good, rng.randbytes(rng.choice([0, 5, 30, 5000]))]))
        for _ in range(rng.randint(0, 2)):
            if data:
                data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data)
        path.chmod(0o600)
        with contextlib.suppress(HolmesError):
            assert read_invitation(path).job


def test_channels_take_any_bytes(input_divisor):
    rng = random.Random(SEED)
    for _ in range(2000 // input_divisor):
        ours, theirs = socket.socketpair()
        ours.sendall(rng.randbytes(rng.choice([1, 12, 13, 40, 300])))
        ours.close()
        with contextlib.suppress(OSError):
            Channel(theirs).receive(Deadline(5, "a test"), 1000)
        theirs.close()
    assert sys.getrecursionlimit() >= 1000
