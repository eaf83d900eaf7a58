"""A job that comes back trains as soon as it has the others' anchors (rounds/taking.py).

The momenta follow while it trains, before its first round.
"""

import threading

import pytest
import torch
from joined_jobs import coordinator, in_threads, joined_of
from waiting import await_

from holmes_ext.join.peers.take import ANCHOR, MOMENTUM
from holmes_ext.join.rounds import taking
from holmes_ext.join.settings import parse_outer

SETTINGS = "every=4,fragments=2,delay=0,compress=off,momentum=0.5,timeout=20"


class Job:
    """A job of one rank, stepped by hand. Each step takes `speed` off its weights."""

    def __init__(self, name, port, settings, speed):
        self.model, self.records, self.speed = torch.nn.ParameterList([torch.zeros(600)]), [], speed
        self.joined = joined_of(self.model, name, port, parse_outer(settings), self.records)
        self.begun = self.joined.begin()

    def period(self):
        """Train until one round of one fragment has ended."""
        for _ in range(2):
            with torch.no_grad():
                self.model[0] -= self.speed
            self.joined.after_step()

    def kill(self):
        """As if the process were gone: every connection is closed, nobody says goodbye."""
        self.joined.rounds.links.close()
        self.joined.rounds.coordinator.client.close("")
        self.joined.rounds._inbox.put(None)

    @property
    def fragments(self):
        return self.joined.state.fragments

    @property
    def verdicts(self):
        return [record.outcome.verdict for record in self.records]


def together(*jobs):
    in_threads({str(number): job.period for number, job in enumerate(jobs)})


class HeldBack:
    """In place of take_fragments(): momenta are taken only when the test allows it."""

    def __init__(self, monkeypatch):
        self.allowed, self.tensors, self.take = threading.Event(), [], taking.take_fragments
        monkeypatch.setattr(taking, "take_fragments", self)

    def __call__(self, *arguments):
        self.tensors.append(list(arguments[6]))
        if self.tensors[-1] == [MOMENTUM]:
            assert self.allowed.wait(60)
        return self.take(*arguments)


@pytest.fixture
def held_back(monkeypatch):
    return HeldBack(monkeypatch)


@pytest.fixture
def comeback(held_back):
    """East, which has trained on, and west, which was killed and has begun again; `settings` may differ."""
    with coordinator() as server:
        jobs, held_back.told = [], server.told

        def come_back(settings=SETTINGS):
            east, west = (Job(name, server.port, settings, 1.0) for name in ("east", "west"))
            together(east, west)
            together(east, west)
            west.kill()
            east.period()
            east.period()
            jobs.extend((east, Job("west", server.port, settings, 3.0)))
            return jobs

        yield come_back
        held_back.allowed.set()
        for job in jobs:
            job.joined.end()


def same_state(one, other):
    pairs = zip(one.fragments, other.fragments)
    return all(
        left.version == right.version
        and torch.equal(left.anchor, right.anchor)
        and torch.equal(left.momentum, right.momentum)
        for left, right in pairs
    )


def test_training_begins_before_the_momenta_are_there(comeback, held_back):
    east, west = comeback()
    anchors = torch.cat([fragment.anchor for fragment in east.fragments])
    assert "of job east" in west.begun and torch.equal(west.model[0], anchors)
    assert held_back.tensors[0] == [ANCHOR]
    assert all(fragment.lacks_momentum for fragment in west.fragments)
    held_back.allowed.set()
    together(east, west)
    assert west.verdicts == ["commit"] and same_state(east, west)
    assert sorted(west.records[-1].outcome.members) == ["east", "west"]
    assert any(float(fragment.momentum.abs().max()) for fragment in west.fragments)


def test_nobody_gets_weights_without_their_momentum(comeback):
    _, west = comeback()
    assert [fragment.copy_version for fragment in west.fragments] == [0, 0]


def test_a_momentum_of_another_version_is_not_used(comeback, held_back, monkeypatch):
    """The donor has taken an outer step meanwhile: the job takes the fragment again in its first round."""
    monkeypatch.setattr(
        taking.OuterState,
        "add_momentum",
        lambda state, fragment, version, *tensors, add=taking.OuterState.add_momentum: add(
            state, fragment, version + 1, *tensors
        ),
    )
    held_back.allowed.set()
    east, west = comeback()
    together(east, west)
    assert west.verdicts == ["taken"] and same_state(east, west)
    assert not any("other weights" in line for line in held_back.told), "the donor is honest"
    together(east, west)
    assert west.verdicts == ["taken", "commit"] and same_state(east, west)


def test_a_donor_that_is_gone_before_it_gave_its_momenta(comeback, held_back):
    """The job goes on alone with the anchors, and others may take its weights."""
    east, west = comeback()
    east.kill()
    held_back.allowed.set()

    def has_stepped_all_fragments():
        west.period()
        return all(fragment.copy_version == fragment.version > 0 for fragment in west.fragments)

    await_(has_stepped_all_fragments, 60, "outer steps of all fragments")


def test_a_checkpoint_waits_for_the_momenta(comeback, held_back):
    east, west = comeback()
    saved = []
    thread = threading.Thread(target=lambda: saved.append(west.joined.state_dict()), daemon=True)
    thread.start()
    assert not saved and thread.is_alive()
    held_back.allowed.set()
    thread.join(60)
    together(east, west)
    [checkpoint] = saved
    assert checkpoint


def test_an_algorithm_without_momentum_takes_all_at_once(comeback, held_back):
    settings = SETTINGS.replace("momentum=0.5", "algorithm=average")
    comeback(settings)
    assert held_back.tensors == [[ANCHOR, MOMENTUM]]


def test_rounds_async_take_the_momenta_too(held_back):
    held_back.allowed.set()
    settings = SETTINGS.replace("delay=0", "delay=1,grace=0,rounds=async")
    with coordinator() as server:
        east = Job("east", server.port, settings, 1.0)

        def has_committed():
            east.period()
            return "commit" in east.verdicts

        await_(has_committed, 60, "a round of east")
        west = Job("west", server.port, settings, 3.0)
        west.joined.rounds.taker.wait_for_momenta()
        assert held_back.tensors[:2] == [[ANCHOR], [MOMENTUM]]
        assert not any(fragment.lacks_momentum for fragment in west.fragments)
        for job in (east, west):
            job.joined.end()
