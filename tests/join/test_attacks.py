"""The attacks of a security engineer on joined jobs, by number, and how each ends now.

The table says where a test of each attack stands:

 1  `serve` restarted with another token ended all jobs      identity/test_run_folder (its CA is kept),
                                                             coordinator/test_server
 2  whoever answers at its address ended them                coordinator/test_server (whoever_answers)
 3  a flipped bit made two jobs diverge                      here; sockets/test_channel
 4  a malformed report of one job ended the others           here (hello); test_liars (malformed)
 5  a lying job ruined the others                            test_liars; coordinator/test_rules (versions)
 6  a byte now and then, a stopped coordinator               test_links, sockets/test_channel,
                                                             .../test_server
 7  half-open connections, no descriptors left               test_bad_inputs, sockets/test_listener
 8  idle connections kept jobs out                           coordinator/test_server (idle_strangers)
 9  an empty token                                           identity/test_run_folder (full disk)
10  weights that take longer than 600 s                      test_take (slow_link)
11  the metrics port: all addresses, a thread a request      test_bad_inputs
12  the purpose was outside the HMAC                         sockets/test_handshake
                                                             (what_the_caller_wants)
13  no IPv6                                                  here; coordinator/test_server
14  --holmesX, and HOLMES=1 under -I                         here
15  tracebacks, pipes, escapes, damaged outer states         test_bad_inputs,
                                                             tests/test_document.py, here (layers)
16  status without a token, closed ports, silent logs        here; coordinator/test_server,
                                                             cli/test_join.py
"""

import contextlib
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from joined_jobs import (
    coordinator,
    credentials_of,
    in_threads,
    joined_of,
    place_at,
    served_run,
    weights_of,
)

from holmes_ext.cli.main import main
from holmes_ext.errors import HolmesError
from holmes_ext.join.address import JoinAddress, JoinPlace, PortRange
from holmes_ext.join.coordinator.client import ask_status
from holmes_ext.join.coordinator.server import CoordinatorServer
from holmes_ext.join.join import join
from holmes_ext.join.settings import parse_outer
from holmes_ext.plan.cost.model import Model
from holmes_ext.runtime.deadline import Deadline
from holmes_ext.runtime.sockets import split_address

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = "every=2,fragments=1,delay=0,compress=off,min=2,timeout=10"


class FlippingProxy:
    """Proxy between a caller and a port that flips one bit.

    The bit is in byte `at` of what the port sends.
    """

    def __init__(self, at):
        self.to, self.at, self.flipped = 0, at, 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._listening.accept()
                port = socket.create_connection(("127.0.0.1", self.to))
                for source, target, flips in ((caller, port, False), (port, caller, True)):
                    threading.Thread(
                        target=self._hand_on, args=(source, target, flips), daemon=True
                    ).start()

    def _hand_on(self, source, target, flips):
        seen = 0
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(2**16)):
                if flips and not self.flipped and seen + len(data) > self.at >= seen:
                    data[self.at - seen] ^= 0x40
                    self.flipped += 1
                seen += len(data)
                target.sendall(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self):
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def train(name, port, speed, ports=PortRange(), records=None):
    model = torch.nn.ParameterList([torch.zeros(3000)])
    loop = joined_of(model, name, port, parse_outer(SETTINGS), records, ports=ports)
    loop.begin()
    for _ in range(12):
        with torch.no_grad():
            model[0] -= speed
        loop.after_step(1)
    loop.end()
    return model[0].detach()


def test_3_a_flipped_bit_of_a_pseudo_gradient_costs_a_round_at_most():
    proxy, own = FlippingProxy(5000), free_port()
    proxy.to = own
    with coordinator() as server:
        east, west = [], []
        found = in_threads(
            {
                "east": lambda: train("east", server.port, 1.0, records=east),
                "west": lambda: train(
                    "west", server.port, 3.0, PortRange((own, own), "127.0.0.1", proxy.port), west
                ),
            }
        )
    proxy.close()
    assert proxy.flipped == 1
    assert torch.equal(found["east"], found["west"])
    committed = sum(record.outcome.verdict == "commit" for record in east)
    assert committed >= 4 and found["east"].abs().max() <= 12 * 3.0


@pytest.mark.parametrize(
    "change",
    [
        {"maps": {}},
        {"addresses": []},
        {"maps": {"all": [0, 3000, 7]}},
        {"maps": {"all": [5, 10, 0]}},
        {"versions": []},
        {"agreed": None},
        {"min": 10**9},
        {"timeout": "x"},
        {"round": -1},
    ],
)
def test_4_a_malformed_hello_is_refused_and_ends_nobody(change):
    hello = {
        "op": "hello",
        "agreed": {},
        "maps": {"all": [0, 3000, 0]},
        "addresses": ["127.0.0.1:1"],
        "versions": [0],
        "checksums": [""],
        "min": 1,
        "timeout": 5.0,
        "round": 0,
        "entered": False,
        "peers": [],
    }
    with coordinator() as server:
        deadline = Deadline(10, "a test")
        purpose = {
            "purpose": "job",
            "job": "zero",
            "incarnation": "1",
        }
        channel = place_at("zero", server.port).call(purpose, deadline)
        channel.send({**hello, **change}, deadline)
        assert "error" in channel.receive(deadline)
        channel.close()
        assert (
            ask_status("127.0.0.1", server.port, credentials_of("zero", server.port))["jobs"] == []
        )


def test_13_jobs_join_over_ipv6():
    try:
        server = CoordinatorServer("::1", 0, served_run, lambda line: None)
    except HolmesError:
        pytest.skip("no IPv6 here")
    threading.Thread(target=server.serve, daemon=True).start()

    def job(name):
        model = torch.nn.ParameterList([torch.zeros(100)])
        place = JoinPlace(JoinAddress(name, "::1", server.port), credentials_of(name, server.port))
        loop = join(
            place, parse_outer(SETTINGS), lambda: weights_of(model), {}, torch.device("cpu")
        )
        assert split_address(loop.rounds.links.address)[0] == "::1"
        loop.begin()
        for _ in range(4):
            with torch.no_grad():
                model[0] -= len(name)
            loop.after_step(1)
        loop.end()
        return model[0].detach()

    found = in_threads({name: lambda name=name: job(name) for name in ("east", "northwest")})
    server.close()
    assert torch.equal(found["east"], found["northwest"]) and found["east"].abs().max() > 0


@pytest.mark.parametrize(
    "flags, argument, environ, armed",
    [
        ((), "--holmesX", {}, False),
        ((), "--holmes", {}, True),
        ((), "--holmes-verbose", {}, True),
        ((), "x", {"HOLMES": "1"}, True),
        (("-I",), "x", {"HOLMES": "1"}, False),
        (("-E",), "x", {"HOLMES": "1"}, False),
    ],
)
def test_14_what_activates_holmes(flags, argument, environ, armed):
    line = (ROOT / "holmes_ext.pth").read_text()
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); exec({line!r}); print('holmes_ext._pth' in "
        f"sys.modules)"
    )
    env = {
        **{key: value for key, value in os.environ.items() if not key.startswith("HOLMES")},
        **environ,
    }
    done = subprocess.run(
        [sys.executable, *flags, "-S", "-c", code, argument],
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split()[-1] == str(armed), done.stderr


def test_15_a_model_of_a_billion_layers_is_refused():
    """`holmes plan` filled the memory."""
    with pytest.raises(HolmesError, match="layers"):
        Model(layers=10**9, hidden=64, heads=4, sequence=32, vocabulary=100, micro_batches=2)


def counted(calls, function):
    def called(*arguments, **more):
        calls.append(arguments)
        return function(*arguments, **more)

    return called


def test_16_a_closed_port_is_said_at_once(capsys, monkeypatch):
    port = free_port()
    served_run(port)  # its certificates are there, but nobody listens
    tried = []
    monkeypatch.setattr(socket, "create_connection", counted(tried, socket.create_connection))
    assert main(["join", "status", f"127.0.0.1:{port}"]) == 2
    assert len(tried) == 1, "it was tried for 63 s"
    line = capsys.readouterr().err
    assert "no coordinator answers at" in line and "Connection refused" in line


def test_16_status_beside_serve_needs_no_certificate(capsys):
    """It uses the one in the coordinator's state folder."""
    with coordinator() as server:
        assert main(["join", "status", f"127.0.0.1:{server.port}", "--json"]) == 0
    assert '"jobs"' in capsys.readouterr().out
