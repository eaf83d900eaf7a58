"""Jobs of which two cannot connect to each other: their exchange goes over the coordinator's relay."""

import threading

import pytest
import torch
from joined_jobs import Rank, coordinator, in_threads, joined_of

from holmes_ext.join.peers import routes as routes_module
from holmes_ext.join.peers.links import PeersFailed
from holmes_ext.join.peers.routes import Routes
from holmes_ext.join.settings import parse_outer
from integration_tests.jobs import some

CUT = {"east", "west"}


def swap(rank, other, number, attempt=1, patience_s=20.0):
    """Exchange a few bytes with another rank; return what has arrived."""
    into = bytearray(5)
    peer = other.peer
    data = rank.links.job.ljust(5).encode()
    rank.links.swap(
        number, attempt, {peer: [memoryview(data)]}, {peer: [memoryview(into)]}, patience_s
    )
    return into.decode().strip()


def both(east, west, number, **more):
    return in_threads(
        {
            "east": lambda: swap(east, west, number, **more),
            "west": lambda: swap(west, east, number, **more),
        }
    )


def refuse(*arguments):
    raise ConnectionRefusedError("a firewall is in between")


def test_a_pair_uses_the_relay_for_as_long_as_it_is_ordered_to(monkeypatch):
    with coordinator() as server:
        east, west = Rank("east", server.port), Rank("west", server.port)
        arrived = {"east": "west", "west": "east"}
        monkeypatch.setattr(routes_module, "call", refuse)
        with pytest.raises(PeersFailed):
            both(east, west, 1, patience_s=1.0)

        for rank in (east, west):
            rank.links.use_relay([["east", "west"], ["north", "south"]])
        assert both(east, west, 1, attempt=2) == arrived
        assert both(east, west, 2) == arrived  # over the same connection
        relayed_bytes = server.relay.counted()
        assert set(relayed_bytes) == CUT

        monkeypatch.undo()
        for rank in (east, west):
            rank.links.use_relay([])
        assert both(east, west, 3) == arrived
        assert server.relay.counted() == relayed_bytes, "the link is direct again"
        assert {key.is_relayed for rank in (east, west) for key in rank.links._open} == {False}
        east.links.close(), west.links.close()


SETTINGS = "every=2,fragments=2,delay=0,compress=off,min=2,timeout=4"


class Job:
    """A job of one rank; each step moves its weights towards 1."""

    def __init__(self, name, port, policy):
        self.name = name
        self.records = []
        self.model = torch.nn.ParameterList([torch.zeros(300)])
        settings = parse_outer(f"{SETTINGS},rounds={policy}")
        self.loop = joined_of(self.model, name, port, settings, self.records)

    def train(self, begun, steps):
        self.loop.begin()
        begun.wait(60)
        for _ in range(steps):
            with torch.no_grad():
                self.model[0] += 0.1 * (1 - self.model[0])
            self.loop.after_step(10)
        self.loop.end()
        return self.model[0].detach().clone()

    @property
    def commits(self):
        """Return the members of each round that this job has committed."""
        return [
            set(record.outcome.members)
            for record in self.records
            if record.outcome.verdict == "commit"
        ]


@pytest.mark.parametrize("jobs", some([4, 8], 4))
def test_with_one_cut_pair_all_jobs_take_part_in_all_rounds(monkeypatch, jobs):
    """F1: 0 of 30 rounds were committed."""
    dial = Routes.dial

    def cut(routes, peer, purpose, deadline):
        if {routes.identity.job, peer.job} == CUT and not routes.uses_relay(peer.job):
            refuse()
        return dial(routes, peer, purpose, deadline)

    monkeypatch.setattr(Routes, "dial", cut)
    names = ("east", "west", "north", "south", "alpha", "beta", "gamma", "zero")[:jobs]
    begun = threading.Barrier(jobs)
    with coordinator() as server:
        joined = [Job(name, server.port, "sync") for name in names]
        weights = in_threads(
            {job.name: lambda job=job: job.train(begun, 30) for job in joined}, seconds=120
        )
        told = server.told
    assert any("jobs east, west could not exchange, and now use the relay" in line for line in told)
    for job in joined:
        assert len([members for members in job.commits if members == set(names)]) == 30, told
    assert all(torch.equal(weights[name], weights["east"]) for name in names)
