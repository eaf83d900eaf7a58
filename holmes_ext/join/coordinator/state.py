"""State that the coordinator keeps of a run, its jobs and its rounds. Pure: no clock, no network.

All times are seconds on the clock of the coordinator's caller.
"""

from __future__ import annotations

import hmac
import secrets
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.join.coordinator.failed_pairs import (
    FailedPairs,
    Failures,
    Pair,
    fewest_to_drop,
    only_reporters,
)
from holmes_ext.join.coordinator.reports import CheckedReport, Claim, DoneReport, Hello, ReadyReport

#: Seconds between two heartbeats of a job.
HEARTBEAT_S = 2.0
#: Jobs in a run at a time; also the number of gone jobs that are remembered.
MOST_JOBS = 64
#: Bytes that the descriptions (hellos) of all jobs may take.
_MOST_HELLO_BYTES = 2**28
_MIB = 2**20


class NotInRun(Exception):
    """Error: a request came from a job that is not in the run. The job must send `hello` (again)."""


@dataclass
class Member:
    """State of a job of the run, as the coordinator keeps it."""

    name: str
    incarnation: str  # identifies this start of the job
    hello: Hello
    claims: list[Claim]  # of each fragment: the version that the job reported last
    order: int  # number of the job in the order of arrival
    since: float  # time of the job's hello
    last_heartbeat: float  # time
    #: "waiting" for other jobs at its start; "in" training; "late": the others do not wait for the job
    #: until it reports again; "gone".
    state: str = "waiting"
    #: The job's weights equal the majority's: True once it has no fragment to take from another job, False
    #: when a round is committed without it. Only the versions that such jobs claim count as votes.
    is_up_to_date: bool = False
    first_expected_round: int = 0  # first round for which the others wait for the job
    #: A job with outdated weights first lets this round end without it, then takes fragments from another
    #: job. None: the job is not catching up.
    catches_up_after: int | None = None
    catches_up_since: float = 0.0  # time at which `catches_up_after` was set
    #: The last verdict about the job's weights was "behind": it must take fragments from another job.
    was_told_to_take_weights: bool = False
    #: Donors that gave this job other weights than claimed; the job takes no weights from them again.
    distrusted_donors: set[str] = field(default_factory=set)
    #: Donor named in the last verdict "behind", and the versions that the job had then.
    ordered_donor: str = ""
    versions_when_ordered: list[int] = field(default_factory=list)
    #: Verdicts "behind" since the job's last committed round.
    orders_in_a_row: int = 0
    taking_since: float | None = None  # time of the last one; None: the job has asked again
    #: Donors from which the job could not take weights since it has these versions.
    failed_donors: set[str] = field(default_factory=set)
    #: Fragment -> donor named in "behind", until the job's next report shows whether the weights are right.
    unchecked_donors: dict[int, str] = field(default_factory=dict)
    rounds: int = 0  # committed rounds with this job
    missed: int = 0  # rounds in which the others waited for the job in vain
    delays_in_a_row: int = 0  # the same, since the job's last committed round
    sits_out_until: int = 0  # first round in which the job may take part again
    dropped_in: int = 0  # last round without the job because of a failed pair; 0: none
    lag_s: float = 0.0  # seconds from the opening of the job's last round until the job was ready
    telemetry: dict[str, float] = field(default_factory=dict)  # of the last heartbeat
    #: Other incarnations that asked for the job's name -> time of their first request.
    rivals: dict[str, float] = field(default_factory=dict)

    @property
    def takes_part(self) -> bool:
        """Return whether the job has begun to train and is not gone."""
        return self.state in ("in", "late")


@dataclass
class RoundState:
    """State of a round: an exchange of a fragment's pseudo-gradients, and the outer step after it.

    A fragment is a part of the model's parameters. A round has one or more attempts of its exchange; after an
    attempt, one or more checks compare the received data (settlement.py).
    """

    number: int
    fragment: int
    opening_time: float  # time
    ready_reports: dict[str, ReadyReport] = field(default_factory=dict)  # by job
    done_reports: dict[str, DoneReport] = field(default_factory=dict)  # by job, in this attempt
    checked_reports: dict[str, CheckedReport] = field(default_factory=dict)  # by job, in this check
    last_report: float = 0.0  # time of the last report of a member
    #: Time at which half of the expected jobs were ready: the others' deadline counts from it. None: not yet.
    half_ready_time: float | None = None
    #: Jobs that exchange -> share of their pseudo-gradients in the sum; 0: the job only receives.
    members: dict[str, float] = field(default_factory=dict)
    #: Jobs whose version of the fragment differs from the majority's.
    behind: set[str] = field(default_factory=set)
    #: Jobs whose pseudo-gradients do not count in this round -> reason.
    left_out: dict[str, str] = field(default_factory=dict)
    #: Members that contradict the others in the current attempt -> reason.
    excluded: dict[str, str] = field(default_factory=dict)
    #: Jobs that were ready, without those lost since; at least half of these jobs must count.
    electorate: set[str] = field(default_factory=set)
    attempt: int = 0  # number of exchanges that were begun; 0: the round has not begun
    exchange_begin: float = 0.0  # time at which the first attempt began
    attempt_begin: float = 0.0  # time at which the current attempt began
    #: Pairs of members that exchange over the coordinator's relay in the current attempt.
    relayed: set[Pair] = field(default_factory=set)
    has_tried_relay: bool = False  # an attempt was repeated with the failed pairs over the relay
    #: Number of the current comparison of received data in this attempt; 0: the jobs are still exchanging.
    check_number: int = 0
    outcome: str = ""  # "commit" or "void" once the round is over
    why: str = ""  # reason of a void round
    #: With rounds=async, the members that got the verdict void.
    informed: set[str] = field(default_factory=set)
    #: Job -> factor of its pseudo-gradient in the committed sum.
    factors: dict[str, float] = field(default_factory=dict)
    gap: float = 1.0  # divisor of the sum because it is stale (CO2); 1: it counts in full

    @property
    def is_exchanging(self) -> bool:
        """Return whether members exchange data now: the comparison of this data has not begun."""
        return self.attempt > 0 and self.check_number == 0 and not self.outcome


@dataclass
class RunState:
    """Jobs and rounds of a run, as the coordinator knows them.

    All classes that decide about joining, rounds and versions share the same instance.
    """

    started: float  # time at which the coordinator started
    #: By name; also recent jobs that are gone.
    members: dict[str, Member] = field(default_factory=dict)
    rounds: dict[int, RoundState] = field(default_factory=dict)  # by number; only recent ones
    number: int = 0  # of the round that was opened last
    #: Fragment -> last round in which it was stepped; empty after a restart of the coordinator.
    committed: dict[int, int] = field(default_factory=dict)
    has_joint_commit: bool = False  # a round of several jobs was committed
    #: Pairs of jobs whose exchange failed lately.
    failed_pairs: FailedPairs = field(default_factory=FailedPairs)
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

    def make_room(self, name: str, hello: Hello) -> Hello:
        """Make room for the description (hello) of a job; return the description in the form to be kept.

        The descriptions of all jobs together have a limit of memory (_MOST_HELLO_BYTES). Two things save
        memory. Jobs of a run have equal settings (`agreed`), so all descriptions refer to the same copy. And
        if the limit would be exceeded, jobs that are gone lose their shard maps, addresses and claims,
        beginning with the job that joined first.

        Args:
            name: The job that says hello. Its earlier description is replaced.
            hello: The new description.

        Raises:
            HolmesError: The descriptions of the jobs that are present leave too little memory.
        """
        others = [member for member in self.members.values() if member.name != name]
        for other in others:
            if other.hello.agreed == hello.agreed:
                hello = replace(hello, agreed=other.hello.agreed, agreed_bytes=0)
                break
        hellos = [hello, *(other.hello for other in others)]
        kept_bytes = sum(each.memory_bytes + each.agreed_bytes for each in hellos)
        gone = [other for other in others if other.state == "gone"]
        for other in sorted(gone, key=lambda member: member.order):
            if kept_bytes <= _MOST_HELLO_BYTES:
                break
            kept_bytes -= other.hello.memory_bytes
            no_addresses = ("",) * len(other.hello.addresses)
            other.hello = replace(
                other.hello, maps={}, addresses=no_addresses, claims=(), memory_bytes=0
            )
        if kept_bytes > _MOST_HELLO_BYTES:
            raise HolmesError(
                f"job {name!r} cannot join: the descriptions of all jobs would take more than "
                f"{_MOST_HELLO_BYTES // _MIB} MiB; fewer ranges for each rank make them smaller"
            )
        return hello

    def present(self) -> list[Member]:
        """Return all jobs that are not gone."""
        return [member for member in self.members.values() if member.state != "gone"]

    def participants(self) -> list[Member]:
        """Return the jobs that have begun to train and are not gone, in order of arrival."""
        participants = [member for member in self.members.values() if member.takes_part]
        return sorted(participants, key=lambda member: member.order)

    def jobs_to_leave_out(self, members: Sequence[Member], now: float) -> set[str]:
        """Return the members that a round leaves out, so that all others can exchange data with each other.

        Two jobs whose exchange has failed must not be in the same round for a while (failed_pairs.py). Of
        each such pair, at least one job is left out. As few jobs as possible are left out; if there is a
        choice, it is another job's turn than the last time (drop_preference).
        """
        pairs = self.failed_pairs.apart([member.name for member in members], now)
        return fewest_to_drop(pairs, drop_preference(pairs, members))

    def salt(self, *parts: object) -> str:
        """Return a salt of 16 hexadecimal digits that no job can compute before it is published.

        Jobs report checksums of their weights, or of received data, that contain such a salt. So a
        job cannot report a checksum that it has copied from another job in an earlier report.

        Args:
            parts: Purpose of the salt; equal parts give the same salt.
        """
        text = "salt " + " ".join(map(str, parts))
        return hmac.new(self._secret, text.encode(), "sha256").hexdigest()[:16]


def patience_s(members: Iterable[Member]) -> float:
    """Return how long these jobs wait for each other, in seconds.

    It is the median of their timeouts, so that no single job can make the others wait longer; of two jobs,
    the smaller timeout.
    """
    return statistics.median_low(member.hello.timeout for member in members)


def least_jobs(electorate: Collection[Member]) -> int:
    """Return how many pseudo-gradients must count in a round.

    It is the median of the jobs' settings `min` (of two jobs, the smaller value, so that no single job can
    void all rounds), but at least half of the jobs.

    Args:
        electorate: Jobs that are ready for the round, without late and silent jobs. If these counted, many
            joined jobs that never contribute could make the active jobs less than half.
    """
    if not electorate:
        return 1
    median_min = statistics.median_low(member.hello.min for member in electorate)
    half = -(-len(electorate) // 2)
    return max(median_min, half)


def drop_preference(failures: Failures, members: Iterable[Member]) -> list[str]:
    """Return the members in the order in which a round should drop them, the first most readily.

    A round drops at least one job of each failed pair (two jobs that could not exchange data), and as few
    jobs as possible. Where this leaves a choice, the jobs that come first in this order are dropped:

    1. Jobs that report a failed pair whose other job reports no failure: a false report is costly.
    2. Jobs that were not dropped lately: if both jobs report the failure, they are dropped in turns.
    3. Jobs that have joined later.

    Args:
        failures: Failed pairs -> the jobs that have reported the failure.
        members: Members of the round.
    """
    accusers = only_reporters(failures)
    ordered = sorted(
        members, key=lambda member: (member.name not in accusers, member.dropped_in, -member.order)
    )
    return [member.name for member in ordered]


def outer_settings(members: Sequence[Member]) -> Mapping[str, Any]:
    """Return the --holmes-outer settings, equal in all jobs; an empty dict without jobs."""
    if not members:
        return {}
    settings: Mapping[str, Any] = members[0].hello.agreed.get("outer", {})
    return settings
