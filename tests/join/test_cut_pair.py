"""Jobs of which two cannot connect to each other: their exchange goes over the coordinator's relay."""

import socket
import threading

import pytest
import torch
from joined_jobs import Rank, coordinator, in_threads, joined_of
from waiting import await_

from holmes_ext.errors import HolmesError
from holmes_ext.join.coordinator import relay
from holmes_ext.join.coordinator.relay import PeerRelay
from holmes_ext.join.peers import routes as routes_module
from holmes_ext.join.peers.links import PeersFailed
from holmes_ext.join.peers.routes import Routes
from holmes_ext.join.rounds import round_runner
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

    def __init__(self, name, port, policy, settings=SETTINGS):
        self.name = name
        self.records = []
        self.model = torch.nn.ParameterList([torch.zeros(300)])
        if policy == "async":
            settings = settings.replace("every=2", "every=4").replace("delay=0", "delay=1")
        outer = parse_outer(f"{settings},rounds={policy}")
        self.loop = joined_of(self.model, name, port, outer, self.records)

    def train(self, begun, steps):
        self.loop.begin()
        begun.wait(60)
        self.step(steps)
        self.loop.end()
        return self.model[0].detach().clone()

    def step(self, steps):
        for _ in range(steps):
            with torch.no_grad():
                self.model[0] += 0.1 * (1 - self.model[0])
            self.loop.after_step(10)

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

    def cut(routes, peer, *more, **options):
        if {routes.identity.job, peer.job} == CUT and not routes.uses_relay(peer.job):
            refuse()
        return dial(routes, peer, *more, **options)

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


@pytest.fixture(params=["standby line", "call of the coordinator"])
def relayed_bytes_of(request, monkeypatch):
    """Cut all direct connections of ranks; return a function that runs a job that joins later.

    Ranks on loopback have standby lines at the coordinator. Any other rank is called by the coordinator.
    """
    if request.param == "call of the coordinator":
        monkeypatch.setattr(relay, "is_loopback", lambda host: False)
        monkeypatch.setattr(routes_module, "is_loopback_address", lambda address: False)
    called_jobs = []

    def refuse_call(host, port, credentials, name, *more):
        called_jobs.append(name)
        refuse()

    monkeypatch.setattr(routes_module, "call", refuse_call)

    def run(server, policy):
        settings = SETTINGS.replace("min=2", "min=1")
        east = Job("east", server.port, policy, settings)
        east.loop.begin()

        def has_committed():
            east.step(4)
            return len(east.commits) > 1

        await_(has_committed, 60, "rounds of east")
        west = Job("west", server.port, policy, settings)
        begun = west.loop.begin()
        anchors = torch.cat([fragment.anchor for fragment in west.loop.state.fragments])
        assert "the weights of job east" in begun and anchors.abs().max() > 0
        west.loop.rounds.taker.wait_for_momenta()
        # Two threads take the anchors, then two the momenta, without another attempt.
        assert called_jobs.count("east") <= 2
        for job in (east, west):
            job.loop.end()
        return server.relay.counted()

    return run


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_a_job_takes_weights_over_the_relay_from_the_only_donor(relayed_bytes_of, policy):
    """It could not join, because only exchanges of pseudo-gradients used the relay."""
    with coordinator() as server:
        relayed_bytes = relayed_bytes_of(server, policy)
    weights = 2 * 4 * 300  # bytes of the anchors and momenta
    assert relayed_bytes["east"] > weights


@pytest.mark.parametrize("relayed_bytes_of", ["call of the coordinator"], indirect=True)
def test_a_job_takes_no_weights_over_a_relay_that_may_carry_no_bytes(relayed_bytes_of, monkeypatch):
    monkeypatch.setattr(round_runner, "_AGAIN_S", 0.0)
    with coordinator() as server:
        server.relay._limit_bytes = 0
        with pytest.raises(HolmesError, match="through the coordinator: the relay takes no more"):
            relayed_bytes_of(server, "sync")
        assert not server.relay.counted()


def test_the_relay_calls_no_loopback_port():
    """A job at the end of a tunnel seems to be on the coordinator's host, whose ports it may not call."""
    peers = PeerRelay()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert peers.reaches("127.0.0.1", "east", "1", {"rank": 0, "port": port})
        assert peers._connect_to_rank("east", relay._key("east", "1", 0)) is None
