"""A job that takes fragments from another one (peers/take.py): the giver's side, at the moment of a commit."""

import socket
import threading

import pytest
import torch

from holmes_ext.runtime.outer.coordinator.wire import Line
from holmes_ext.runtime.outer.ownership import RankRange
from holmes_ext.runtime.outer.peers import take
from holmes_ext.runtime.outer.settings import parse_outer
from holmes_ext.runtime.outer.state import OuterState, Pending
from holmes_ext.runtime.outer.weights import Part, Tensor, Weights


@pytest.fixture
def state():
    """Of 8 ones, one fragment of version 0; an outer step takes the gradient off."""
    weights = Weights("all", [Tensor("w", (8,), "float32")], [Part(0, torch.ones(8))])
    return OuterState(
        parse_outer("algorithm=average,every=1,fragments=1,timeout=60"), weights, [RankRange(0, 8, 0)], 0
    )


@pytest.fixture
def taker(state):
    """A line to `give` in a thread, as another job's rank has one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()

    def giver():
        try:
            take.give(state, Line(theirs))
        except OSError:
            pass  # the taker has closed the line

    thread = threading.Thread(target=giver)
    thread.start()
    line = Line(ours)
    yield line
    line.close()
    thread.join(10)
    assert not thread.is_alive()


class Clock:
    """In place of `time`: sleeping passes at once, and is when `then` happens."""

    def __init__(self, then=lambda: None):
        self.now, self.slept, self._then = 0.0, 0, then

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now, self.slept = self.now + seconds, self.slept + 1
        self._then()


def ask(line, version):
    """Version and anchor of all elements."""
    line.send({"fragment": 0, "version": version, "start": 0, "stop": 8})
    told, anchor = line.receive(10), torch.empty(8)
    take._read(line, take._bytes(anchor), told["anchor"], 10)
    assert told["momentum"] == 0
    return told["version"], anchor


def committed(state, number):
    state.fragments[0].pending = Pending(number, torch.full((8,), 0.25), 0.0, 1.0, None)


def test_a_taker_that_comes_before_the_commit_waits_for_it(state, taker, monkeypatch):
    """The coordinator has told it of a commit that the giver has not heard of yet: what the giver has now is the
    version before, and the taker would be behind again."""
    clock = Clock(lambda: committed(state, 5))
    monkeypatch.setattr(take, "time", clock)
    version, anchor = ask(taker, 5)
    assert version == 5 and torch.equal(anchor, torch.full((8,), 0.75))
    assert clock.slept == 1 and state.fragments[0].version == 0, "the giver's own step is still to come"
    assert ask(taker, 5)[0] == 5 and clock.slept == 1, "what is there is given at once"


def test_a_version_that_never_comes_is_not_waited_for_longer_than_half_the_timeout(state, taker, monkeypatch):
    monkeypatch.setattr(take, "time", clock := Clock())
    version, anchor = ask(taker, 5)
    assert version == 0 and torch.equal(anchor, torch.ones(8))
    assert clock.now == pytest.approx(30, abs=1)
