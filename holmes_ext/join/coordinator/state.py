"""State of a run, of its jobs and of its rounds. Pure: no clock, no network."""

from __future__ import annotations

import hmac
import secrets
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holmes_ext.join.coordinator.reports import CheckedReport, Claim, DoneReport, Hello, ReadyReport

#: Seconds between two heartbeats of a job.
HEARTBEAT_S = 2.0
#: Jobs in a run at a time, and gone ones that are remembered.
MOST_JOBS = 64


class NotInRun(Exception):
    """The coordinator does not know the job, which has to say hello (again)."""


@dataclass
class Member:
    """One job of a run. Times are those of the coordinator's caller, in seconds."""

    name: str
    incarnation: str  # identifies this start of the job
    hello: Hello
    claims: list[Claim]  # by fragment: the version that the job reported last
    order: int  # jobs that came earlier have lower numbers
    since: float  # when the job said hello
    heard: float  # when the last heartbeat came
    # "waiting" (for others, at its start), "in", "late" (not waited for until heard again), "gone"
    state: str = "waiting"
    # The job was in every round since it last had what most have: its claims decide.
    current: bool = False
    expected_from: int = 0  # the first round in which others wait for the job
    # The round whose end the job waits for before it takes what it is behind, and since when.
    awaits: int | None = None
    awaits_from: float = 0.0
    corrected: bool = False  # the job was told what to take from another one
    avoids: set[str] = field(default_factory=set)  # jobs that gave it other weights than they claim
    took: dict[int, str] = field(default_factory=dict)  # fragment -> job that gives it
    rounds: int = 0  # committed rounds with this job
    missed: int = 0  # rounds in which others waited for the job in vain
    in_vain: int = 0  # the same, since its last committed round
    rests_until: int = 0  # the first round in which the job may be again
    lag_s: float = 0.0  # seconds from the opening of its last round until the job was ready
    telemetry: dict[str, float] = field(default_factory=dict)
    # Other incarnations that asked for the job's name -> when they did first.
    rivals: dict[str, float] = field(default_factory=dict)

    @property
    def takes_part(self) -> bool:
        return self.state in ("in", "late")


@dataclass
class RoundState:
    """One exchange of one fragment. Times are those of the coordinator's caller, in seconds."""

    number: int
    fragment: int
    opened: float
    # Reports by job; the last two are those of the current attempt and check.
    ready_reports: dict[str, ReadyReport] = field(default_factory=dict)
    done_reports: dict[str, DoneReport] = field(default_factory=dict)
    checked_reports: dict[str, CheckedReport] = field(default_factory=dict)
    last_report: float = 0.0
    half_ready: float | None = None  # when half of the expected jobs were ready
    # Jobs that exchange, with their shares of the sum; 0: the job only receives.
    members: dict[str, float] = field(default_factory=dict)
    # Jobs that have another version of the fragment than most.
    behind: set[str] = field(default_factory=set)
    # Jobs whose pseudo-gradients do not count, with the reasons: for good, and in this attempt.
    left_out: dict[str, str] = field(default_factory=dict)
    excluded: dict[str, str] = field(default_factory=dict)
    attempt: int = 0  # number of exchanges that were begun
    check: int = 0  # number of comparisons of received data in this attempt
    outcome: str = ""  # "commit" or "void" once the round is over
    why: str = ""  # reason of a void round
    informed: set[str] = field(default_factory=set)  # rounds=async: members that know of the void
    # Of the committed sum: factor of each pseudo-gradient, and the gap that the outer step takes.
    factors: dict[str, float] = field(default_factory=dict)
    gap: float = 1.0


@dataclass
class RunState:
    """A run: its jobs and its rounds. All parts of a coordinator share one."""

    started: float  # when the coordinator began, in seconds of the caller's clock
    members: dict[str, Member] = field(default_factory=dict)  # by name; also jobs that are gone
    rounds: dict[int, RoundState] = field(default_factory=dict)  # by number
    number: int = 0  # the round that was opened last
    # By fragment: the last round in which it was stepped; unknown for rounds before a restart.
    committed: dict[int, int] = field(default_factory=dict)
    has_joint_commit: bool = False  # a round of several jobs was committed
    events: list[str] = field(default_factory=list)  # lines for the log, in order
    _secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    def member(self, name: str) -> Member:
        """Return the job of this name.

        Raises:
            NotInRun: No such job said hello, or it is gone.
        """
        member = self.members.get(name)
        if member is None or member.state == "gone":
            raise NotInRun(name)
        return member

    def present(self) -> list[Member]:
        """Return all jobs that are not gone."""
        return [member for member in self.members.values() if member.state != "gone"]

    def participants(self) -> list[Member]:
        """Return the jobs that have begun to train and are not gone, in order of arrival."""
        participants = [member for member in self.members.values() if member.takes_part]
        return sorted(participants, key=lambda member: member.order)

    def least_jobs(self, members: Iterable[Member]) -> int:
        """Return how many jobs a round of these members needs.

        That is what most of them ask for (`min`), and at least half of all jobs that take part.
        """
        median_min = statistics.median_high(member.hello.min for member in members)
        half = -(-len(self.participants()) // 2)
        return max(median_min, half)

    def salt(self, *parts: object) -> str:
        """Return 16 hexadecimal digits that no job can compute before it is told them."""
        text = "salt " + " ".join(map(str, parts))
        return hmac.new(self._secret, text.encode(), "sha256").hexdigest()[:16]


def patience_s(members: Iterable[Member]) -> float:
    """Return the seconds that these jobs wait for each other.

    That is the median of their timeouts, so that no single job decides.
    """
    return statistics.median_high(member.hello.timeout for member in members)


def outer_settings(members: Sequence[Member]) -> Mapping[str, Any]:
    """Return the --holmes-outer settings, which are the same in all jobs; empty without jobs."""
    if not members:
        return {}
    settings: Mapping[str, Any] = members[0].hello.agreed.get("outer", {})
    return settings
