"""Model of joined jobs that talk to the real rules of the coordinator, with a network that fails by plan.

World has a Coordinator, and jobs that send it their requests and exchange data with each other. Nothing
happens by itself: a test says which job polls next, or that time passes. joined_explorer.py explores all
orders of these events; other tests play one fair order.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, is_dataclass
from typing import Any

from holmes_ext.join.coordinator.coordinator import Coordinator
from holmes_ext.join.coordinator.lock_step import LockStepRounds
from holmes_ext.join.coordinator.reports import (
    CheckedReport,
    Claim,
    DoneReport,
    Hello,
    NextReport,
    Offer,
    ReadyReport,
)
from holmes_ext.join.coordinator.rolling import RollingRounds
from holmes_ext.join.coordinator.state import NotInRun

TIMEOUT = 30.0
START = 1e6  # time at which the coordinator starts; numbers of this size are times
FRAGMENTS = 2
NAMES = ("east", "north", "south", "west", "zero", "alpha", "beta", "gamma")
#: What a lying job does (of the last of the jobs; its victim is the first one).
LIES = (
    "accuses one",  # reports that it could not reach its victim, which it has reached
    "accuses all",
    "fails with one",  # exchanges nothing with its victim, and does not report it
    "fails with all",
    "vanishes",  # is ready, and then neither exchanges nor reports
    "two faces",  # sends something else to its victim than to the others
    "false digests",
)


@dataclass(frozen=True)
class Scene:
    """What goes wrong among some joined jobs."""

    jobs: int
    cut: tuple[str, ...] = ()  # two jobs that cannot connect to each other
    relay: bool = True  # whether the two can exchange over the coordinator's relay
    crash: str = ""  # job that may crash, once, at any time
    liar: str = ""  # job that lies
    lie: str = ""  # how, one of LIES
    slow: tuple[str, ...] = ()  # once, a timeout passes although these jobs could go on
    policy: str = "ready"  # "ready": rounds=sync; "next": rounds=async
    rounds: int = 2  # that each job makes

    @property
    def names(self) -> tuple[str, ...]:
        return NAMES[: self.jobs]

    @property
    def victim(self) -> str:
        return self.names[0]


@dataclass
class ModelJob:
    """A job between two requests."""

    name: str
    step: str = "ask"  # what it does next: ask (for a round), done, checked, take (weights)
    round: int = 1
    attempt: int = 0
    check: int = 0
    members: tuple[str, ...] = ()
    contributors: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    relayed: tuple[tuple[str, str], ...] = ()
    salt: str = ""
    unreached: tuple[str, ...] | None = None  # after the exchange of this attempt
    received: dict[str, str] = field(default_factory=dict)  # sender -> data
    donor: str = ""  # job from which this one takes weights
    wanted: dict[int, int] = field(default_factory=dict)  # fragment -> least version
    versions: list[Claim] = field(default_factory=lambda: [Claim(0, 16 * "0")] * FRAGMENTS)
    crashed: bool = False
    may_offer: bool = False  # with rounds=async: it has a pseudo-gradient
    ended: int = 0  # rounds that have ended for it
    commits: list[int] = field(default_factory=list)  # rounds that it has applied


#: Types whose instances never change; _copied() adds the frozen dataclasses.
_NOT_COPIED: set[type] = {str, bytes, int, float, bool, type(None), tuple, frozenset}


class Wrong(AssertionError):
    """A property that must hold does not."""


class World:
    """A coordinator, its jobs, and the network between them."""

    def __init__(self, scene: Scene):
        self.scene = scene
        self.now = START
        self.coordinator = Coordinator(self.now, policies=(LockStepRounds, RollingRounds))
        self.coordinator.state._secret = (
            b"equal in all worlds"  # so that their states can be compared
        )
        self.jobs = {name: ModelJob(name) for name in scene.names}
        self.ticks = 0
        self.early_ticks = 0
        self.noticed = False  # the coordinator knows of the crash
        #: (round, fragment) -> data of which the aggregate was made, by the first job that has applied it.
        self.aggregates: dict[tuple[int, int], tuple] = {}
        settings = {"outer": {"grace": 3.0, "limit": 0.0, "weight": "equal"}}
        for name, job in self.jobs.items():
            hello = Hello(
                settings, {"all": (0, 8, 0)}, ("a:1",), tuple(job.versions), min=1, timeout=TIMEOUT
            )
            self.coordinator.hello(name, "1", hello, self.now)
        for name in self.jobs:
            self.coordinator.enter(name, self.now)

    def copy(self) -> World:
        return _copied(self, {})

    # Events

    def poll(self, name: str) -> None:
        """Let a job send its request, and do what the reply says.

        If the request is a report that changes something at the coordinator, the reply comes later: the job
        polls again for it. So other events can happen between a decision and each job's reply, also that of
        the job whose report was the last one.
        """
        job = self.jobs[name]
        if job.step == "take":
            self._take(job)
            return
        reply = self._reply(job)
        self.coordinator.state.events.clear()
        if reply is not None:
            self._follow(job, reply)

    def tick(self) -> None:
        """Let a timeout pass; all jobs that have not crashed send heartbeats."""
        self.ticks += 1
        self.now += TIMEOUT + 1
        for name, job in self.jobs.items():
            if job.step == "take":  # the donor has not answered in time
                self._end_round(job, job.round)
            if not job.crashed:
                self.coordinator.heartbeat(name, "1", {}, self.now)
            request_times = self.coordinator.policies["next"]._request_times
            if not job.crashed and job.step == "ask" and name in request_times:
                # A job with rounds=async that has nothing to do polls several times a second.
                request_times[name] = self.now
        self.coordinator.look(self.now)

    def train(self, name: str) -> None:
        """Let a job take the steps after which it offers a pseudo-gradient (rounds=async)."""
        self.jobs[name].may_offer = True

    def crash(self) -> None:
        self.jobs[self.scene.crash].crashed = True

    def notice(self) -> None:
        """Let the coordinator see that the connection of the crashed job is closed."""
        self.noticed = True
        self.coordinator.gone(self.scene.crash, "1", "closed")

    # What a job does

    def _reply(self, job: ModelJob) -> dict[str, Any] | None:
        coordinator = self.coordinator
        lies = job.name == self.scene.liar
        try:
            if job.step == "ask":
                return coordinator.next_round(
                    self.scene.policy, job.name, self._request(job), self.now
                )
            if lies and self.scene.lie == "vanishes":
                return None
            before = self._progress_of_settlement(job)
            reply = self._reply_to_report(job)
            has_changed = self._progress_of_settlement(job) != before
            return None if has_changed else reply
        except NotInRun:
            if not lies:
                raise Wrong(f"{job.name} was given up, though it lives") from None
            return None

    def _reply_to_report(self, job: ModelJob) -> dict[str, Any] | None:
        """Return the coordinator's reply to a report `done` or `checked`."""
        if job.step == "done":
            if job.unreached is None:
                self._exchange(job)
            done = DoneReport(job.round, job.attempt, job.unreached)
            return self.coordinator.done(job.name, done, self.now)
        factors = {name: 1.0 for name in job.contributors if name not in job.excluded}
        checked = CheckedReport(job.round, job.attempt, job.check, self._digests(job), factors)
        return self.coordinator.checked(job.name, checked, self.now)

    def _progress_of_settlement(self, job: ModelJob) -> tuple:
        """Return everything in the state of a job's round that a report of this job can change."""
        round_state = self.coordinator.state.rounds[job.round]
        has_done = job.name in round_state.done_reports
        has_checked = job.name in round_state.checked_reports
        decisions = (round_state.attempt, round_state.check_number, round_state.outcome)
        return has_done, has_checked, decisions

    def _request(self, job: ModelJob) -> ReadyReport | NextReport:
        fragment = (job.round - 1) % FRAGMENTS
        claims = tuple(job.versions)
        if self.scene.policy == "ready":
            return ReadyReport(fragment, claims, job.round, tokens=1.0, norm=1.0)
        offer = Offer(fragment, tokens=1.0, norm=1.0)
        return NextReport(claims, {fragment: offer} if job.may_offer else {})

    def can_exchange(self, first: str, second: str, is_relayed: bool) -> bool:
        """Return whether data passes between two jobs."""
        scene = self.scene
        if self.jobs[first].crashed or self.jobs[second].crashed:
            return False
        if {first, second} == set(scene.cut):
            return is_relayed and scene.relay
        if scene.liar in (first, second):
            other = second if first == scene.liar else first
            if scene.lie == "vanishes" or scene.lie == "fails with all":
                return False
            return not (scene.lie == "fails with one" and other == scene.victim)
        return True

    def can_take(self, taker: str, donor: str) -> bool:
        """Return whether a job can take weights from another one.

        If the direct connection fails, the taker uses the relay, without an order of the coordinator.
        """
        return self.can_exchange(taker, donor, is_relayed=True)

    def _exchange(self, job: ModelJob) -> None:
        """Exchange data with the other members, as far as the network lets it."""
        lie = self.scene.lie if job.name == self.scene.liar else ""
        unreached = []
        job.received = {}
        for other in job.members:
            pair = tuple(sorted((job.name, other)))
            if other != job.name and not self.can_exchange(job.name, other, pair in job.relayed):
                unreached.append(other)
            elif other in job.contributors:
                job.received[other] = self._data(other, job)
        if lie.startswith("fails"):
            unreached = []
        elif lie == "accuses one" and self.scene.victim in job.members:
            unreached.append(self.scene.victim)
        elif lie == "accuses all":
            unreached = [other for other in job.members if other != job.name]
        job.unreached = tuple(sorted(set(unreached)))

    def _data(self, sender: str, receiver: ModelJob) -> str:
        """Return what a job sends to another one in the current round."""
        has_two_faces = sender == self.scene.liar and self.scene.lie == "two faces"
        face = "other" if has_two_faces and receiver.name == self.scene.victim else "same"
        return f"{sender} {receiver.round} {face}"

    def _digests(self, job: ModelJob) -> dict[str, str]:
        salt = job.salt
        if job.name == self.scene.liar and self.scene.lie == "false digests":
            salt += "false"
        return {
            sender: hashlib.sha256(f"{salt} {data}".encode()).hexdigest()[:16]
            for sender, data in job.received.items()
        }

    def _follow(self, job: ModelJob, reply: dict[str, Any]) -> None:
        verdict = reply["verdict"]
        if verdict == "go":
            members = reply["members"]
            job.step, job.unreached = "done", None
            job.round, job.attempt = reply["round"], reply["attempt"]
            job.members = tuple(members)
            job.contributors = tuple(name for name, share in members.items() if share > 0)
            job.relayed = tuple(map(tuple, reply["relayed"]))
            contributes = job.name in job.contributors
            if self.scene.policy == "next" and contributes and not job.may_offer:
                raise Wrong(f"{job.name} must send a pseudo-gradient that it has sent before")
        elif verdict == "check":
            job.step, job.check, job.salt = "checked", reply["check"], reply["salt"]
            job.excluded = tuple(reply["excluded"])
        elif verdict == "commit":
            self._apply(job, reply)
            self._end_round(job, reply["round"])
        elif verdict == "behind":
            job.step, job.round, job.donor = "take", reply["round"], reply["from"]
            job.wanted = dict(zip(reply["fragments"], reply["versions"]))
        else:
            self._end_round(job, reply["round"])

    def _apply(self, job: ModelJob, reply: dict[str, Any]) -> None:
        """Apply a committed round; all jobs must apply the same data to the same weights."""
        number = reply["round"]
        fragment = self.coordinator.state.rounds[number].fragment
        if missing := [name for name in reply["factors"] if name not in job.received]:
            raise Wrong(f"{job.name} must apply data of {missing} that it has not got")
        data = tuple(sorted((name, job.received[name]) for name in reply["factors"]))
        aggregate = (job.versions[fragment], data)
        if job.name != self.scene.liar:
            known = self.aggregates.setdefault((number, fragment), aggregate)
            if known != aggregate:
                raise Wrong(f"round {number}: {job.name} applies {aggregate}, another {known}")
            job.commits.append(number)
        text = repr(self.aggregates.get((number, fragment), aggregate))
        checksum = hashlib.sha256(text.encode()).hexdigest()[:16]
        job.versions[fragment] = Claim(number, checksum)

    def _take(self, job: ModelJob) -> None:
        """Take fragments from another job, once it has them and if there is a connection to it."""
        donor = self.jobs[job.donor]
        has_all = all(
            donor.versions[fragment].version >= version for fragment, version in job.wanted.items()
        )
        # Otherwise it waits until a timeout has passed: the donor has not heard of the commit yet, or there
        # is no connection to it.
        if self.can_take(job.name, donor.name) and has_all:
            for fragment in job.wanted:
                job.versions[fragment] = donor.versions[fragment]
            self._end_round(job, job.round)

    def _end_round(self, job: ModelJob, number: int) -> None:
        job.step, job.round, job.attempt, job.check = "ask", number + 1, 0, 0
        job.unreached, job.received = None, {}
        job.members = job.contributors = job.excluded = job.relayed = ()
        job.donor, job.wanted = "", {}
        job.ended += 1
        job.may_offer = False

    # What a test sees

    @property
    def honest(self) -> list[ModelJob]:
        """Return the jobs that neither lie nor have crashed."""
        return [
            job for job in self.jobs.values() if job.name != self.scene.liar and not job.crashed
        ]

    def play(self, rounds: int, most_ticks: int = 1000) -> None:
        """Let all jobs poll in turn until each honest job is `rounds` further than the first one is now.

        With rounds=async, jobs do not wait for each other: until the run has made so many rounds. Time passes
        if all jobs wait.

        Raises:
            Wrong: A job waits after `most_ticks` timeouts.
        """
        is_rolling = self.scene.policy == "next"
        last_round = self.coordinator.state.number + rounds
        goal = max(job.round for job in self.honest) + rounds
        ticks = self.ticks

        def is_ahead(job: ModelJob) -> bool:
            is_at_goal = job.step == "ask" and job.round >= goal
            return is_at_goal and not is_rolling and job in self.honest

        def is_over() -> bool:
            if is_rolling:
                return self.coordinator.state.number > last_round
            return all(map(is_ahead, self.honest))

        while not is_over():
            before = self._progress()
            for name, job in self.jobs.items():
                # Who is ahead waits for the others, as between two rounds of real jobs.
                if not job.crashed and not is_ahead(job):
                    self.poll(name)
            if self._progress() != before:
                continue
            if is_rolling and not all(job.may_offer for job in self.honest):
                for name in self.jobs:
                    self.train(name)
                continue
            if self.ticks - ticks >= most_ticks:
                raise Wrong(f"jobs wait for ever: {self.jobs}")
            self.tick()

    def _progress(self) -> tuple:
        rounds = self.coordinator.state.rounds
        last = rounds.get(self.coordinator.state.number)
        reports: tuple = ()
        if last is not None:
            counts = map(len, (last.ready_reports, last.done_reports, last.checked_reports))
            reports = (*counts, last.attempt, last.check_number, last.outcome)
        jobs = [(job.step, job.round, job.attempt, job.check, job.ended) for job in self.honest]
        return (*reports, *jobs)

    def committed_together(self, names: Iterable[str]) -> set[int]:
        """Return the rounds that all these jobs have applied."""
        return set.intersection(*(set(self.jobs[name].commits) for name in names))


@functools.cache
def _is_frozen(cls: type) -> bool:
    return is_dataclass(cls) and cls.__dataclass_params__.frozen


def _copied(value: Any, copies: dict[int, Any]) -> Any:
    """Return a copy of a value in a world, several times as fast as copy.deepcopy() and pickle.

    Instances of frozen dataclasses and tuples are not copied: no rule changes their contents.

    Args:
        value: The value.
        copies: Copies of the objects that were met before, by id(): shared objects stay shared.
    """
    cls = type(value)
    if cls in _NOT_COPIED:
        return value
    if id(value) in copies:
        return copies[id(value)]
    copy: Any
    if cls is dict:
        copy = copies[id(value)] = {}
        for key, item in value.items():
            copy[key] = item if type(item) in _NOT_COPIED else _copied(item, copies)
    elif cls is list:
        copy = copies[id(value)] = [_copied(item, copies) for item in value]
    elif cls is set:
        copy = copies[id(value)] = set(value)
    elif _is_frozen(cls):
        _NOT_COPIED.add(cls)
        return value
    else:
        copy = copies[id(value)] = object.__new__(cls)
        attributes = vars(copy)
        for name, item in vars(value).items():
            attributes[name] = item if type(item) in _NOT_COPIED else _copied(item, copies)
    return copy
