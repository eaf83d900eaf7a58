"""Rounds without a barrier (rounds=async) and a job that takes weights slowly, on a simulated clock.

The rules of the coordinator are the real ones. Three jobs train half an hour. Each offers a pseudo-gradient
of one of four fragments every 10 s. One job, the taker, is absent for the first 30 s, and then must take
weights from another job. Rounds that the taker and a further job commit, with and without the rule that a
round waits for a taker (_waits_for_taker, with timeout=60 at most 15 s and four times):

    exchange of a    seconds to take    taker          further job
    round, seconds   a fragment         with  without  with  without
    4                1                  176   176      180   180
    4                5                  174     0      180   180
    4                8                  170     0      180   180
    9                1                  176     0      180   180
    9                5                  175     0      180   180
    9                8                  173     0      180   180
    9                12                   0     0      176   180
    12               1                  136     0      140   141
    12               12                 127     0      136   141
    12               15                   0     0      136   141

So without the rule, the taker is behind for ever if taking a fragment lasts longer than the time between the
end of a round and the begin of the next. With the rule, it takes part if the fragment is taken within this
time and a quarter of the timeout. The others lose at most four waits of this length.

A second rule is measured: a round waits for members of the last round that have not asked again
(_waits_for_last_members). Without it, in the last row but one, the further jobs commit 48 and 98 rounds
instead of 136.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from holmes_ext.join.coordinator.coordinator import Coordinator
from holmes_ext.join.coordinator.lock_step import LockStepRounds
from holmes_ext.join.coordinator.reports import (
    CheckedReport,
    Claim,
    DoneReport,
    Hello,
    NextReport,
    Offer,
)
from holmes_ext.join.coordinator.rolling import RollingRounds

NAMES = ("east", "north", "west")
TAKER = "west"
FRAGMENTS = 4
PERIOD_S = 10.0  # of a job's pseudo-gradients
ABSENT_S = 30.0
DURATION_S = 1800.0
POLL_S = 0.2  # between two requests of a job
TIMEOUT_S = 60.0
CHECKSUM = 16 * "0"


@dataclass
class Job:
    """A job that trains, and its rounds thread, which is busy until `free_at`."""

    name: str
    free_at: float = 0.0
    step: str = "next"  # its next request: next, done or checked; or "take" (weights)
    versions: list[int] = field(default_factory=lambda: [0] * FRAGMENTS)
    offers: set[int] = field(default_factory=set)  # fragments with a pseudo-gradient
    next_offer_at: float = 0.0
    fragments: Iterator[int] = field(default_factory=lambda: itertools.cycle(range(FRAGMENTS)))
    reply: dict[str, Any] = field(
        default_factory=dict
    )  # the last "go", with the check that followed
    donor: Job | None = None
    to_take: list[int] = field(default_factory=list)  # fragments
    version_under_way: int = 0  # of the fragment that it is taking
    commits: int = 0

    def train(self, now: float) -> None:
        """Offer a pseudo-gradient of the next fragment without one, if it is time."""
        if now >= self.next_offer_at:
            self.next_offer_at += PERIOD_S
            self.offers.add(next(self.fragments))


class Simulation:
    """A coordinator and three jobs.

    Args:
        exchange_s: Seconds that a job exchanges in a round.
        take_s: Seconds to take a fragment from another job.
    """

    def __init__(self, exchange_s: float, take_s: float):
        self.exchange_s = exchange_s
        self.take_s = take_s
        self.now = 0.0
        self.coordinator = Coordinator(self.now, policies=(LockStepRounds, RollingRounds))
        self.jobs = {name: Job(name) for name in NAMES}
        self.jobs[TAKER].free_at = ABSENT_S
        settings = {"outer": {"rounds": "async", "grace": "auto"}}
        claims = (Claim(0, CHECKSUM),) * FRAGMENTS
        hello = Hello(settings, {"all": (0, 8, 0)}, ("a:1",), claims, min=1, timeout=TIMEOUT_S)
        for name in NAMES:
            self.coordinator.hello(name, "1", hello, self.now)
        for name in NAMES:
            assert self.coordinator.enter(name, self.now)["verdict"] == "in"

    def run(self) -> dict[str, int]:
        """Return the rounds that each job commits."""
        for poll in range(round(DURATION_S / POLL_S)):
            self.now = poll * POLL_S
            for job in self.jobs.values():
                job.train(self.now)
                self.coordinator.heartbeat(job.name, "1", {}, self.now)
            for job in self.jobs.values():
                if self.now >= job.free_at:
                    self._go_on(job)
        return {name: job.commits for name, job in self.jobs.items()}

    def _go_on(self, job: Job) -> None:
        if job.step == "take":
            self._store_taken(job)
            return
        reply = self._reply(job)
        verdict = "" if reply is None else reply["verdict"]
        if verdict == "go":
            job.step, job.reply = "done", reply
            job.free_at = self.now + self.exchange_s
        elif verdict == "check":
            job.step = "checked"
            job.reply = {**job.reply, "check": reply["check"]}
        elif verdict == "commit":
            self._commit(job, reply["round"])
        elif verdict == "behind":
            job.step, job.to_take = "take", list(reply["fragments"])
            job.donor = self.jobs[reply["from"]]
            self._begin_to_take(job)
        elif verdict:
            raise AssertionError(reply)

    def _reply(self, job: Job) -> dict[str, Any] | None:
        if job.step == "next":
            claims = tuple(Claim(version, CHECKSUM) for version in job.versions)
            offers = {
                fragment: Offer(fragment, tokens=1.0, norm=1.0, slack_s=PERIOD_S / 2)
                for fragment in job.offers
            }
            return self.coordinator.next_round(
                "next", job.name, NextReport(claims, offers), self.now
            )
        number, attempt = job.reply["round"], job.reply["attempt"]
        if job.step == "done":
            return self.coordinator.done(job.name, DoneReport(number, attempt), self.now)
        contributors = [name for name, share in job.reply["members"].items() if share > 0]
        digests = dict.fromkeys(contributors, CHECKSUM)
        factors = dict.fromkeys(contributors, 1 / len(contributors))
        report = CheckedReport(number, attempt, job.reply["check"], digests, factors)
        return self.coordinator.checked(job.name, report, self.now)

    def _commit(self, job: Job, number: int) -> None:
        fragment = self.coordinator.state.rounds[number].fragment
        job.versions[fragment] = number
        if job.reply["members"][job.name] > 0:  # it has contributed
            job.offers.discard(fragment)
        job.commits += 1
        job.step = "next"

    def _begin_to_take(self, job: Job) -> None:
        """Begin to take the next fragment, as the donor has it now."""
        assert job.donor is not None
        job.version_under_way = job.donor.versions[job.to_take[0]]
        job.free_at = self.now + self.take_s

    def _store_taken(self, job: Job) -> None:
        fragment = job.to_take.pop(0)
        job.versions[fragment] = job.version_under_way
        job.offers.discard(fragment)  # it is a difference to weights that do not exist any more
        if job.to_take:
            self._begin_to_take(job)
        else:
            job.step = "next"


def commits(exchange_s: float, take_s: float) -> dict[str, int]:
    return Simulation(exchange_s, take_s).run()


def never(*arguments: Any) -> bool:
    return False


@pytest.fixture(params=[(4, 8), (9, 1), (9, 8), (12, 12)])
def seconds(request):
    """Return the seconds of an exchange, and to take a fragment."""
    return request.param


def test_a_slow_taker_takes_part_at_little_cost(seconds, monkeypatch):
    """Without the wait it never does."""
    waiting = commits(*seconds)
    monkeypatch.setattr(RollingRounds, "_waits_for_taker", never)
    not_waiting = commits(*seconds)
    assert not_waiting[TAKER] == 0
    assert waiting[TAKER] > 0.9 * not_waiting["east"]
    assert waiting["east"] > 0.95 * not_waiting["east"]


def test_a_taker_that_is_too_slow_does_not_delay_the_others_again_and_again(monkeypatch):
    waiting = commits(exchange_s=9, take_s=20)
    monkeypatch.setattr(RollingRounds, "_waits_for_taker", never)
    assert waiting["east"] > 0.95 * commits(exchange_s=9, take_s=20)["east"]


def test_no_member_of_a_round_is_behind_in_the_next_one(monkeypatch):
    """If the first two jobs after a round begin the next one, the third one is behind."""
    waiting = commits(exchange_s=12, take_s=12)
    monkeypatch.setattr(RollingRounds, "_waits_for_last_members", never)
    not_waiting = commits(exchange_s=12, take_s=12)
    assert not_waiting["east"] < 0.5 * waiting["east"]
    assert not_waiting[TAKER] < 0.75 * waiting[TAKER]
