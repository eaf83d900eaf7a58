"""Joined jobs for tests: each a thread with one rank, or processes that form a gloo world; a coordinator in
this process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from ranks import seeded
from torch import nn

from holmes_ext.join.address import JoinAddress, JoinPlace, PortRange, incarnation_of, ticket
from holmes_ext.join.coordinator.server import CoordinatorServer
from holmes_ext.join.join import join
from holmes_ext.join.loop import OuterLoop, Record
from holmes_ext.join.peers.links import PeerLinks
from holmes_ext.join.peers.listening import open_port
from holmes_ext.join.peers.routes import Peer, RankIdentity, Routes
from holmes_ext.join.settings import OuterSettings
from holmes_ext.join.shards.weights import Part, Tensor, Weights, tensor_starts
from holmes_ext.join.sockets.handshake import Credentials
from holmes_ext.runtime.sockets import address_text

TOKEN = "a token for these tests"


@contextlib.contextmanager
def coordinator(
    port: int = 0, token: str = TOKEN, host: str = "127.0.0.1"
) -> Iterator[CoordinatorServer]:
    """A coordinator, on loopback by default; `told` are its events."""
    told: list[str] = []
    server = CoordinatorServer(host, port, Credentials(token), told.append)
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


def place_at(job: str, port: int, ports: PortRange = PortRange(), token: str = TOKEN) -> JoinPlace:
    """On loopback. port: the coordinator's."""
    return JoinPlace(JoinAddress(job, "127.0.0.1", port), Credentials(token), ports)


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

    def __init__(self, job, port=1, listens=True, token=TOKEN, serve=None):
        self.identity = RankIdentity(job, incarnation_of(f"secret-of-{job}"), 0, f"secret-of-{job}")
        place = place_at(job, port, PortRange() if listens else PortRange(None), token)
        listening = open_port(place, 0)
        address = address_text("127.0.0.1", listening.getsockname()[1]) if listens else ""

        def routes(incoming):
            return Routes(self.identity, place, listening, address, incoming)

        self.links = PeerLinks(job, routes, serve or (lambda channel, purpose: channel.close()))

    def as_seen_by(self, other):
        """With the ticket that the coordinator would give."""
        one, two = self.identity, other.identity
        shown = ticket(one.secret, two.job, two.incarnation)
        return Peer(one.job, one.incarnation, one.rank, self.links.address, shown)
