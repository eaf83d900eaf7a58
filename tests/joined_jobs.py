"""Joined jobs for tests, with a coordinator in this process.

Each job is a thread with one rank, or processes that form a gloo world.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from ranks import seeded
from torch import nn

from holmes_ext.join.address import JoinAddress, JoinPlace, PortRange
from holmes_ext.join.coordinator.server import CoordinatorServer
from holmes_ext.join.identity.job_certificate import JobCertificate
from holmes_ext.join.identity.run_folder import RunFolder, ServedRun
from holmes_ext.join.join import join
from holmes_ext.join.loop import OuterLoop, Record
from holmes_ext.join.peers.links import PeerLinks
from holmes_ext.join.peers.listening import open_port
from holmes_ext.join.peers.routes import Peer, RankIdentity, Routes
from holmes_ext.join.settings import OuterSettings
from holmes_ext.join.shards.weights import Part, Tensor, Weights, tensor_starts
from holmes_ext.join.sockets.certificates import make_key, make_request
from holmes_ext.join.sockets.handshake import Credentials
from holmes_ext.runtime.sockets import address_text

_MARK = ".holmes-tests"
#: What a job with one rank says of itself to the coordinator, without settings.
HELLO = {
    "agreed": {},
    "maps": {"all": [0, 8, 0]},
    "addresses": ["127.0.0.1:1"],
    "versions": [0],
    "checksums": [""],
    "min": 1,
    "timeout": 30.0,
}


def _use_temporary_state_home() -> None:
    """Keep certificates of tests in a temporary folder, which processes that tests start inherit."""
    if os.environ.get("XDG_STATE_HOME", "").endswith(_MARK):
        return  # the process was started by a test
    home = tempfile.mkdtemp(suffix=_MARK)
    os.environ["XDG_STATE_HOME"] = home
    owner = os.getpid()
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(home, ignore_errors=True))


_use_temporary_state_home()


def run_at(port: int, name: str = "") -> RunFolder:
    """Return the run of the coordinator on a port of loopback; with a name: another run, of another CA."""
    folder = RunFolder.of_port(os.environ, port)
    run = RunFolder(Path(f"{folder.path}-{name}")) if name else folder
    run.make()
    return run


def served_run(port: int) -> ServedRun:
    """Return the run on a port of loopback, as CoordinatorServer takes it."""
    return run_at(port).served()


@lru_cache(maxsize=4096)
def certificate_of(job: str, run: RunFolder) -> JobCertificate:
    """Return the certificate of a job in a run."""
    key = make_key()
    invitation = run.invite(job, "")
    issued = run.redeem(job, invitation.secret, make_request(key))
    return JobCertificate(key, issued.certificate, issued.authority, invitation.digest)


def credentials_of(job: str, port: int, run: str = "") -> Credentials:
    """Return the credentials of a job for the coordinator on a port of loopback.

    Args:
        run: Name of another run (see run_at()).
    """
    return _credentials_of(job, run_at(port, run))


@lru_cache(maxsize=4096)
def _credentials_of(job: str, run: RunFolder) -> Credentials:
    return certificate_of(job, run).credentials()


@contextlib.contextmanager
def coordinator(
    port: int = 0, settings: OuterSettings | None = None, host: str = "127.0.0.1"
) -> Iterator[CoordinatorServer]:
    """Start a coordinator on loopback; `told` are its events."""
    told: list[str] = []
    server = CoordinatorServer(host, port, served_run, told.append, settings=settings)
    server.told = told
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join(5)
        assert not thread.is_alive()


def weights_of(model: torch.nn.Module) -> Weights:
    """All of a model's parameters."""
    named = [(name, p.data) for name, p in model.named_parameters()]
    tensors = [Tensor(name, tuple(value.shape), str(value.dtype)) for name, value in named]
    starts = tensor_starts(tensors)
    return Weights("all", tensors, [Part(starts[name], value.view(-1)) for name, value in named])


def place_at(job: str, port: int, ports: PortRange = PortRange(), run: str = "") -> JoinPlace:
    """On loopback. port: the coordinator's."""
    return JoinPlace(JoinAddress(job, "127.0.0.1", port), credentials_of(job, port, run), ports)


def joined_of(
    model: torch.nn.Module,
    job: str,
    port: int,
    settings: OuterSettings,
    records: list[Record] | None = None,
    ports: PortRange = PortRange(),
    **more: Any,
) -> OuterLoop:
    told = records.append if records is not None else (lambda record: None)
    return join(
        place_at(job, port, ports),
        settings,
        lambda: weights_of(model),
        {},
        torch.device("cpu"),
        on_round=told,
        **more,
    )


def in_threads(calls: dict[str, Callable[[], Any]], seconds: float = 200.0) -> dict[str, Any]:
    """Make each call in a thread, and return the results; raise the error of a call that fails."""
    results: dict[str, Any] = {}
    errors: dict[str, BaseException] = {}

    def run(name: str, call: Callable[[], Any]) -> None:
        try:
            results[name] = call()
        except BaseException as error:  # noqa: BLE001 - handed on
            errors[name] = error

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in calls.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    for error in errors.values():
        raise error
    assert not any(thread.is_alive() for thread in threads), "a job hangs"
    return {name: results[name] for name in calls}


def model_of(seed=3):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(7, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 3)
    )


def batch(rows, job, step):
    generator = seeded(1000 * job + step)
    return torch.randn(rows, 7, generator=generator), torch.randn(rows, 3, generator=generator)


def plain_sgd(rank, rows, steps):
    """Train one synchronous job that reads the data of two joined jobs, and return all weights."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        inputs, labels = (
            torch.cat(both) for both in zip(batch(rows, 0, step), batch(rows, 1, step))
        )
        optimizer.zero_grad()
        (model(inputs) - labels).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


class Rank:
    """One rank of a job. port: the coordinator's; listens: others can call it; serve: what it does then."""

    def __init__(self, job, port=1, listens=True, run="", serve=None):
        self.identity = RankIdentity(job, f"incarnation-of-{job}", 0)
        place = place_at(job, port, PortRange() if listens else PortRange(None), run)
        listening = open_port(place, 0)
        address = address_text("127.0.0.1", listening.getsockname()[1]) if listens else ""

        def routes(incoming):
            return Routes(self.identity, place, listening, address, incoming)

        self.links = PeerLinks(job, routes, serve or (lambda channel, purpose: channel.close()))

    @property
    def peer(self):
        """As other ranks know it."""
        identity = self.identity
        return Peer(identity.job, identity.incarnation, identity.rank, self.links.address)
