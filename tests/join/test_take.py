"""A job that takes fragments from another one (peers/take.py).

The tests cover the giver's side, and what the taker refuses.
"""

import socket
import threading
import time

import pytest
import torch

from holmes_ext.errors import HolmesError
from holmes_ext.join.peers import take
from holmes_ext.join.settings import parse_outer
from holmes_ext.join.shards.ownership import RankRange
from holmes_ext.join.shards.state import OuterState, Pending
from holmes_ext.join.shards.weights import Part, Tensor, Weights
from holmes_ext.join.sockets.channel import Channel
from holmes_ext.runtime import deadline as deadlines
from holmes_ext.runtime.deadline import Deadline


@pytest.fixture
def state():
    """Of 8 ones, one fragment of version 0; an outer step takes the gradient off."""
    weights = Weights("all", [Tensor("w", (8,), "float32")], [Part(0, torch.ones(8))])
    return OuterState(
        parse_outer("algorithm=average,every=1,fragments=1,timeout=60"),
        weights,
        [RankRange(0, 8, 0)],
        0,
    )


@pytest.fixture
def taker(state):
    """Connect to a Giver in a thread, as another job's rank does."""
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=take.Giver(state).give, args=(Channel(theirs), {}))
    thread.start()
    channel = Channel(ours)
    yield channel
    channel.close()
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


def ask(channel, version):
    """Version and anchor of all elements."""
    anchor = torch.empty(8)
    return take._read(channel, 0, version, 0, 8, {take.ANCHOR: anchor}, 100), anchor


def committed(state, number):
    state.fragments[0].pending = [Pending(number, torch.full((8,), 0.25))]


def test_a_taker_that_comes_before_the_commit_waits_for_it(state, taker, monkeypatch):
    """A taker may know of a commit before the giver does.

    The coordinator has reported a commit that has not reached the giver. The giver still has the
    version before, and with that version the taker would be behind again.
    """
    clock = Clock(lambda: committed(state, 5))
    monkeypatch.setattr(take, "time", clock)
    monkeypatch.setattr(deadlines, "time", clock)
    version, anchor = ask(taker, 5)
    assert version == 5 and torch.equal(anchor, torch.full((8,), 0.75))
    assert clock.slept == 1 and state.fragments[0].version == 0, (
        "the giver's own step is still to come"
    )
    assert ask(taker, 5)[0] == 5 and clock.slept == 1, "what is there is given at once"


def test_a_version_that_never_comes_is_not_waited_for_longer_than_half_the_timeout(
    state, taker, monkeypatch
):
    monkeypatch.setattr(take, "time", clock := Clock())
    monkeypatch.setattr(deadlines, "time", clock)
    version, anchor = ask(taker, 5)
    assert version == 0 and torch.equal(anchor, torch.ones(8))
    assert clock.now == pytest.approx(30, abs=1)


@pytest.mark.parametrize(
    "question",
    [
        {},
        {"fragment": 1, "version": 0, "start": 0, "stop": 8},
        {"fragment": -1, "version": 0, "start": 0, "stop": 8},
        {"fragment": 0, "version": 0, "start": 0, "stop": 9},
        {"fragment": 0, "version": 0, "start": 5, "stop": 2},
        {"fragment": 0, "version": "x", "start": 0, "stop": 8},
        {"fragment": 0, "version": True, "start": 0, "stop": 8},
    ],
)
def test_a_question_for_what_is_not_there_ends_the_connection(question, taker):
    deadline = Deadline(10, "a test")
    taker.send(question, deadline)
    with pytest.raises(ConnectionError):
        taker.receive(deadline)


@pytest.mark.parametrize(
    "told, data",
    [
        ({"version": 5, "anchor": 32, "momentum": 0}, torch.full((8,), float("nan"))),
        ({"version": 5, "anchor": 32, "momentum": 0}, torch.full((8,), float("inf"))),
        ({"version": 5, "anchor": 16, "momentum": 0}, torch.ones(4)),
        ({"version": 5, "anchor": 32, "momentum": 32}, torch.ones(8)),
        ({"version": 5}, torch.ones(8)),
        ({"version": "x", "anchor": 32, "momentum": 0}, torch.ones(8)),
    ],
)
def test_what_cannot_be_weights_is_refused(told, data):
    ours, theirs = map(Channel, socket.socketpair())
    deadline = Deadline(10, "a test")
    theirs.send(told, deadline)
    theirs.send_bytes([take.bytes_of(data)], deadline)
    with pytest.raises((OSError, HolmesError)):
        take._read(ours, 0, 5, 0, 8, {take.ANCHOR: torch.empty(8)}, 10)


def test_a_slow_link_is_waited_for_as_long_as_it_carries_bytes():
    """1.5 GB at 20 Mb/s take 600 s."""
    assert Deadline.for_bytes(60, 1_500_000_000, "taking weights").seconds > 1000


def test_takers_that_are_gone_do_not_keep_others_waiting(state):
    """Takers that are gone free their turns.

    Each used to wait for its version for half the timeout, four at a time, and a later taker waited
    for its turn.
    """
    giver, threads = take.Giver(state), []

    def taker():
        ours, theirs = socket.socketpair()
        threads.append(threading.Thread(target=giver.give, args=(Channel(theirs), {})))
        threads[-1].start()
        return Channel(ours)

    for _ in range(6):
        liar = taker()
        liar.send({"fragment": 0, "version": 10**9, "start": 0, "stop": 8}, Deadline(5, "a lie"))
        liar.close()
    honest = taker()
    assert ask(honest, 0)[0] == 0
    honest.close()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def test_one_job_cannot_take_all_turns(state):
    """One job gets only some of the turns.

    Four connections of one job with unanswered requests used to keep the weights from all other
    jobs that came back.
    """
    giver, threads = take.Giver(state), []

    def taker(job):
        ours, theirs = socket.socketpair()
        threads.append(threading.Thread(target=giver.give, args=(Channel(theirs), {"job": job})))
        threads[-1].start()
        return Channel(ours)

    liars = [taker("zero") for _ in range(8)]
    for liar in liars:  # for a version that never comes
        liar.send({"fragment": 0, "version": 10**9, "start": 0, "stop": 8}, Deadline(5, "a lie"))
    until = Deadline(20, "the liar's turns")
    while giver._served_takers["zero"] < 2:
        until.check()
    honest = taker("west")
    assert ask(honest, 0)[0] == 0
    assert giver._served_takers["zero"] == 2
    for channel in (honest, *liars):
        channel.close()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


class DonorOfOneRank:
    """Routes to a donor of one rank, whose Giver answers each connection in a thread."""

    def __init__(self, state):
        self.giver, self.threads, self.accepted = take.Giver(state), [], []

    def dial(self, peer, purpose, deadline, or_relay):
        ours, theirs = socket.socketpair()
        self.accepted.append(Channel(theirs))
        arguments = (self.accepted[-1], {"job": "west"})
        self.threads.append(threading.Thread(target=self.giver.give, args=arguments))
        self.threads[-1].start()
        return Channel(ours)

    def as_seen_by_ranks(self, mine):
        """As a Donor, for a job whose ranks exchange the elements of `mine`."""
        return take.Donor(mine, [RankRange(0, 8, 0)], {0: None}, self)

    def joined(self):
        for thread in self.threads:
            thread.join(20)
        return not any(thread.is_alive() for thread in self.threads)


def outer_state(ranges, rank=0, value=1.0):
    """Four fragments of two elements each."""
    part = Part(0, torch.full((8,), value))
    return OuterState(
        parse_outer("algorithm=average,every=4,fragments=4,timeout=60,delay=0"),
        Weights("all", [Tensor("w", (8,), "float32")], [part]),
        ranges,
        rank,
    )


def test_all_fragments_are_taken_over_two_connections():
    """Over a WAN, each further connection delays the taker's first step by four round trips."""
    everything = [RankRange(0, 8, 0)]
    donor, mine = DonorOfOneRank(outer_state(everything)), outer_state(everything, value=0.0)
    view = donor.as_seen_by_ranks(everything)
    assert not take.take_fragments(
        mine, dict.fromkeys(range(4), 0), view, Alone(), 10, mine.replace
    )
    assert torch.equal(torch.cat([part.anchor for part in mine.fragments]), torch.ones(8))
    assert len(donor.accepted) == 2
    assert donor.joined(), "the taker has closed them"


def test_the_next_fragment_is_requested_before_the_last_one_was_read(monkeypatch):
    """Otherwise, over a WAN, the donor sends nothing for a round trip after each fragment."""
    two_requests = threading.Barrier(2, timeout=10)
    answer = take.Giver._answer

    def answer_two(*arguments):
        two_requests.wait()
        answer(*arguments)

    monkeypatch.setattr(take.Giver, "_answer", answer_two)
    everything = [RankRange(0, 8, 0)]
    donor, mine = DonorOfOneRank(outer_state(everything)), outer_state(everything, value=0.0)
    view = donor.as_seen_by_ranks(everything)
    wanted = dict.fromkeys(range(4), 0)
    assert not take.take_fragments(mine, wanted, view, Alone(), 20, mine.replace)
    assert donor.joined()


def test_a_taker_that_gives_up_leaves_no_connection(monkeypatch):
    """The donor ends the connection of one reader, and does not answer the other one."""
    both_requested = threading.Barrier(2, timeout=10)

    def refuse_first(giver, channel, document):
        both_requested.wait()
        while document["fragment"] == 1 and channel.lives():
            time.sleep(0.01)
        raise ConnectionError

    monkeypatch.setattr(take.Giver, "_answer", refuse_first)
    everything = [RankRange(0, 8, 0)]
    donor, mine = DonorOfOneRank(outer_state(everything)), outer_state(everything, value=0.0)
    view = donor.as_seen_by_ranks(everything)
    assert take.take_fragments(mine, {0: 0, 1: 0}, view, Alone(), 600, mine.replace)
    assert donor.joined()


def test_a_connection_that_the_donor_has_closed_meanwhile_is_opened_anew(monkeypatch):
    """A donor closes a connection over which nothing was asked for a long time."""
    monkeypatch.setattr(take, "_READERS", 1)
    everything = [RankRange(0, 8, 0)]
    donor, mine = DonorOfOneRank(outer_state(everything)), outer_state(everything, value=0.0)

    def store(*what):
        mine.replace(*what)
        donor.accepted[-1].cut()
        donor.threads[-1].join(20)

    view = donor.as_seen_by_ranks(everything)
    assert not take.take_fragments(mine, dict.fromkeys(range(4), 0), view, Alone(), 10, store)
    assert len(donor.accepted) == 4 and donor.joined()


def test_ranks_that_wait_for_each_other_between_fragments_keep_no_turns():
    """Ranks that have their answers must not keep a third one waiting.

    Each rank of the taking job waits for the others before its next fragment. The donor's only rank
    answers two requests of a job at a time.
    """
    mine = [RankRange(2 * k + half, 2 * k + half + 1, half) for k in range(4) for half in (0, 1)]
    mine[1::4] = [RankRange(span.start, span.stop, 2) for span in mine[1::4]]
    donor = DonorOfOneRank(outer_state([RankRange(0, 8, 0)]))
    together = threading.Barrier(3, timeout=20)
    reports, results = {}, {}

    class Rank:
        def __init__(self, rank):
            self.rank = rank

        def all_gather(self, report):
            reports[self.rank] = report
            together.wait()
            gathered = [reports[rank] for rank in range(3)]
            together.wait()
            return gathered

    def take_all(rank):
        state = outer_state(mine, rank, value=0.0)
        view = donor.as_seen_by_ranks(mine)
        wanted = dict.fromkeys(range(4), 0)
        results[rank] = take.take_fragments(state, wanted, view, Rank(rank), 10, state.replace)

    ranks = [threading.Thread(target=take_all, args=(rank,)) for rank in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(30)
    assert results == {0: "", 1: "", 2: ""} and donor.joined()


class Alone:
    """A job of one rank."""

    rank = 0

    def all_gather(self, one):
        return [one]


@pytest.mark.parametrize(
    "versions, stored", [({5}, True), ({7}, True), ({3}, False), ({5, 6}, False)]
)
def test_what_is_older_than_it_should_be_or_of_two_versions_is_not_taken(
    versions, stored, state, monkeypatch
):
    asked, kept = [], []
    monkeypatch.setattr(take, "_fetch", lambda *arguments, **named: asked.append(1) or versions)
    why = take.take_fragments(state, {0: 5}, None, Alone(), 1.0, lambda *what: kept.append(what[1]))
    assert (kept == list(versions)) is stored and bool(why) is not stored
    assert len(asked) == 1 or versions == {5, 6}, (
        "a giver that has waited for the version is not asked again"
    )
