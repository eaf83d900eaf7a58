"""What the coordinator remembers of a run, of each job and of each round. Pure: no clock, no network."""

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
    """One job of a run."""

    name: str
    incarnation: str  # identifies this start of the job
    hello: Hello
    claims: list[Claim]  # by fragment: the version that the job reported last
    order: int  # jobs that came earlier have lower numbers
    since: float  # when it said hello
    heard: float  # when its last heartbeat came
    # "waiting" (for others, at its start), "in", "late" (not waited for until heard again), "gone"
    state: str = "waiting"
    # It has been in every round since it last had what most have: its claims count.
    current: bool = False
    # The first round in which it is waited for.
    expected_from: int = 0
    # The round whose end it waits for, to take what it is behind, and since when.
    awaits: int | None = None
    awaits_from: float = 0.0
    # It was told what to take from another job.
    corrected: bool = False
    # Jobs that gave it other weights than they said, by fragment what it took and from whom.
    avoids: set[str] = field(default_factory=set)
    took: dict[int, str] = field(default_factory=dict)
    rounds: int = 0  # that were committed with it
    missed: int = 0  # times that others waited for it in vain
    # Rounds in a row in which the others waited for it in vain; the first one that it may be in again.
    in_vain: int = 0
    rests_until: int = 0
    lag_s: float = 0.0  # seconds from the begin of its last round until it was ready
    telemetry: dict[str, float] = field(default_factory=dict)
    # When another incarnation asked for its name first.
    rivals: dict[str, float] = field(default_factory=dict)

    @property
    def takes_part(self) -> bool:
        return self.state in ("in", "late")


@dataclass
class RoundState:
    """One exchange of one fragment. Its times are those of the caller's clock, in seconds."""

    number: int
    fragment: int
    opened: float
    ready_reports: dict[str, ReadyReport] = field(default_factory=dict)  # by job
    half_ready: float | None = None  # when half of the jobs that are waited for were ready
    attempt: int = 0  # times that the exchange was begun; 0: not yet
    members: dict[str, float] = field(
        default_factory=dict
    )  # jobs that exchange -> share of the sum
    behind: set[str] = field(
        default_factory=set
    )  # jobs whose fragment is another version than most have
    left_out: dict[str, str] = field(
        default_factory=dict
    )  # job -> why its pseudo-gradient does not count
    done_reports: dict[str, DoneReport] = field(default_factory=dict)  # by job, of this attempt
    check: int = 0  # times that received data was compared in this attempt; 0: not yet
    excluded: dict[str, str] = field(
        default_factory=dict
    )  # job -> why it does not count in this attempt
    checked_reports: dict[str, CheckedReport] = field(default_factory=dict)  # by job, of this check
    last_report: float = 0.0
    outcome: str = ""  # "commit" or "void" once it is over
    why: str = ""  # reason of a void round
    # Of rounds=async: members that were told that the round is void.
    informed: set[str] = field(default_factory=set)
    factors: dict[str, float] = field(
        default_factory=dict
    )  # of each pseudo-gradient in the committed sum
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
        """Return the jobs that have begun to train and are not gone, in the order in which they came."""
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
    """Return the seconds that these jobs wait for each other: a median, so that no single job decides."""
    return statistics.median_high(member.hello.timeout for member in members)


def outer_settings(members: Sequence[Member]) -> Mapping[str, Any]:
    """Return the --holmes-outer settings, which are the same in all jobs; empty without jobs."""
    if not members:
        return {}
    settings: Mapping[str, Any] = members[0].hello.agreed.get("outer", {})
    return settings
