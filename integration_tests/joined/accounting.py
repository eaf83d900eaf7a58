"""Account of all rounds of joined jobs: what became of each, and why each job took part in it or not.

It is made from the lines that the coordinators printed, in order. A round ends as committed or void, with a
reason. A round without an end is abandoned, because its jobs died; or it had no coordinator: the coordinator
was killed while it was open, or it was void for its jobs while no coordinator answered.

A job that is not a member of a committed round is

    gone            not in the run, or not begun yet
    late            the others went on without it
    sitting out     it was late too often
    left out        its data could not be used, or it was lost during the exchange
    taking weights  it came back in the meantime, or has weights of another round
    revoked         its certificates are refused

The account also lists the lines that break a promise of SECURITY.md:

    stay or return after a revocation    A revoked job is in the run, or in a committed round. It may be again
                                         when it has got a certificate for a new invitation.
    vote more than once                  Two names of a holder are in the run at the same time, or in one
                                         committed round. Only jobs in the run vote.
    exclude a job by an accusation alone A majority excludes a job, but the accusers are not at least two
                                         holders.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

_ENDED = re.compile(r"round (\d+): (commit|void)(?:: (.*)| \((.*)\))")
_STATES = (  # what a line says of a job -> its state from then on
    (re.compile(r"job (\S+) is here \(.*, in\)"), "in"),
    (re.compile(r"job (\S+) is here \(.*, late\)"), "late"),
    (re.compile(r"job (\S+) is here"), "gone"),  # it has not begun yet
    (re.compile(r"job (\S+) begins"), "in"),
    (re.compile(r"job (\S+) is back"), "in"),
    (re.compile(r"job (\S+) is gone: "), "gone"),
    (re.compile(r"goes on without job ([^\s,]+), which is late"), "late"),
)
_SITS_OUT = re.compile(r"job (\S+) was waited for .* it sits out until round (\d+)")
_NOT_COUNTED = re.compile(r"round (\d+): job (\S+) is (?:left out|lost on the way)")
_ARRIVED = re.compile(r"^job (\S+) is here")
_RECONNECTED = re.compile(r" is here \(.*, in\)")
_GONE = re.compile(r"^job (\S+) is gone: ")
#: Line of the coordinator, and line of the soak test (revoked_line()).
_REVOKED = re.compile(r"^job (\S+) is (?:gone: it was revoked|revoked)$")
_CERTIFIED = re.compile(r"^job (\S+) has got its certificate$")
_VOTED_OUT = re.compile(r"job \S+ is left out: jobs (.+?) accuse it: ")
_NUMBERED = re.compile(r"-\d+$")
#: Fewest holders whose accusations exclude a job without its accusers.
_LEAST_ACCUSERS = 2


def holder_of(name: str) -> str:
    """Return the holder of a job's certificate: the jobs NAME, NAME-2, NAME-3, ... have the same holder."""
    return _NUMBERED.sub("", name)


def revoked_line(name: str) -> str:
    """Return the line which says that the coordinator refuses a job's certificates from now on."""
    return f"job {name} is revoked"


def members_of(line: str) -> set[str]:
    """Return the members of the committed round whose end a line of the coordinator says; else none."""
    ended = _ENDED.search(line)
    if not ended or ended[2] == "void":
        return set()
    return {part.split()[0] for part in ended[4].split(", ")}


@dataclass
class Account:
    """Numbers of rounds, and of jobs in them, by what became of them."""

    rounds: Counter[str] = field(
        default_factory=Counter
    )  # "committed", "void: reason", "abandoned", "without a coordinator"
    jobs: Counter[str] = field(default_factory=Counter)  # "east: member", "east: late", ...
    unexplained: list[str] = field(default_factory=list)  # lines of void rounds without a reason
    broken_promises: list[str] = field(default_factory=list)  # "promise: line"

    @property
    def lines(self) -> list[str]:
        """Return the numbers as lines, the largest first."""
        return [
            f"{count:6} {name}"
            for counts in (self.rounds, self.jobs)
            for name, count in counts.most_common()
        ]


def account_of(coordinators: Iterable[list[str]], names: Iterable[str]) -> Account:
    """Return the account of all rounds.

    Args:
        coordinators: Lines of each coordinator, in order.
        names: Names of the jobs. Jobs with the same holder (holder_of()) are counted together.
    """
    account = Account()
    names = list(names)
    promises = _Promises()
    gaps = _Gaps(account)
    for lines in coordinators:
        promises.forget_presence()
        jobs = _Jobs(names, set(promises.revoked))
        gaps.begin_sequence()
        _add_lines(account, lines, jobs, gaps)
        for line in lines:
            account.broken_promises += [
                f"{promise}: {line}" for promise in promises.broken_by(line)
            ]
    return account


class _Promises:
    """Promises of SECURITY.md about members, checked line by line."""

    def __init__(self) -> None:
        self._present: set[str] = set()  # jobs in the run
        self.revoked: set[str] = set()  # jobs

    def forget_presence(self) -> None:
        """Forget which jobs are in the run, because the next lines are of another coordinator."""
        self._present.clear()

    def broken_by(self, line: str) -> list[str]:
        """Return the promises that a line shows to be broken, and remember what the line says."""
        if revoked := _REVOKED.search(line):
            self.revoked.add(revoked[1])
        if certified := _CERTIFIED.search(line):
            self.revoked.discard(certified[1])
        if gone := _GONE.search(line):
            self._present.discard(gone[1])
        broken = []
        if arrived := _ARRIVED.search(line):
            self._present.add(arrived[1])
            broken += self._broken_in(self._present)
        broken += self._broken_in(members_of(line))
        if (voted_out := _VOTED_OUT.search(line)) and "more" not in voted_out[1].split():
            accusers = {holder_of(name) for name in voted_out[1].split(", ")}
            if len(accusers) < _LEAST_ACCUSERS:
                broken.append("a holder excludes a job alone")
        return broken

    def _broken_in(self, together: set[str]) -> list[str]:
        """Return the promises that are broken if these jobs are in the run, or in a round, together."""
        broken = [f"job {name} was revoked" for name in sorted(together & self.revoked)]
        holders = Counter(holder_of(name) for name in together)
        broken += [
            f"holder {name} has {count} votes" for name, count in holders.items() if count > 1
        ]
        return broken


class _Jobs:
    """States of all jobs, as the lines of one coordinator describe them up to now.

    Args:
        names: All jobs.
        revoked: Those that were revoked before the first line.
    """

    def __init__(self, names: list[str], revoked: set[str]):
        self.names = names
        self._state_of = {name: "revoked" if name in revoked else "gone" for name in names}
        self._sits_out_until = dict.fromkeys(names, 0)
        self._not_counted: set[tuple[int, str]] = set()  # (round, job)

    def follow(self, line: str) -> None:
        """Update the states by a line."""
        for pattern, state in _STATES:
            if found := pattern.search(line):
                self._state_of[found[1]] = state
                break
        if found := _REVOKED.search(line):
            self._state_of[found[1]] = "revoked"
        if found := _SITS_OUT.search(line):
            self._sits_out_until[found[1]] = int(found[2])
        if found := _NOT_COUNTED.search(line):
            self._not_counted.add((int(found[1]), found[2]))

    def why_no_member(self, names: Iterable[str], number: int) -> str:
        """Return why none of a holder's jobs is a member of the committed round of this number."""
        reasons = {self._why_no_member(name, number) for name in names}
        # At most one of the jobs is in the run, and the others are gone.
        return next(iter(reasons - {"gone", "revoked"} or reasons - {"gone"} or reasons))

    def _why_no_member(self, name: str, number: int) -> str:
        if (number, name) in self._not_counted:
            return "left out"
        if self._state_of[name] == "in" and number < self._sits_out_until[name]:
            return "sitting out"
        return "taking weights" if self._state_of[name] == "in" else self._state_of[name]


class _Gaps:
    """Counts the rounds without an end, from the numbers of the rounds that ended.

    A new coordinator learns the number of the last round from the jobs that reconnect. If newly started jobs
    come first, they begin another run at round 1, which the reconnecting jobs replace. So the numbers form
    sequences.
    """

    def __init__(self, account: Account):
        self._account = account
        self._numbers: set[int] = set()  # of the current sequence
        self._end_before = 0  # highest number of the sequence before
        self._highest = 0  # of all sequences before

    def begin_sequence(self) -> None:
        """Note that the number of the next round may come from a job."""
        if self._numbers:
            self._end_before = max(self._numbers)
            self._highest = max(self._highest, self._end_before)
        self._numbers = set()

    def add(self, number: int) -> None:
        """Count the rounds without an end before a round that has ended."""
        missing = 0
        why = "abandoned"
        if self._numbers:
            # Rounds of asynchronous jobs, and of jobs that were away, may end in another order.
            missing = number - max(self._numbers) - 1
        elif self._highest:
            why = "without a coordinator"
            missing = number - 1 - self._highest
            if missing < 0:  # of another run
                missing = number - 1 - self._end_before
        self._numbers.add(number)
        if missing > 0:
            self._account.rounds[why] += missing


def _add_lines(account: Account, lines: list[str], jobs: _Jobs, gaps: _Gaps) -> None:
    """Add the rounds of one coordinator to the account."""
    names_of_holder: dict[str, list[str]] = {}
    for name in jobs.names:
        names_of_holder.setdefault(holder_of(name), []).append(name)
    arrived: set[str] = set()  # jobs that this coordinator has seen
    for line in lines:
        jobs.follow(line)
        if (found := _ARRIVED.search(line)) and found[1] not in arrived:
            arrived.add(found[1])
            if _RECONNECTED.search(line):
                gaps.begin_sequence()
        ended = _ENDED.search(line)
        if not ended:
            continue
        number = int(ended[1])
        gaps.add(number)
        if ended[2] == "void":
            account.rounds[f"void: {_without_names(ended[3] or '', jobs.names)}"] += 1
            if not ended[3]:
                account.unexplained.append(line)
            continue
        account.rounds["committed"] += 1
        members = members_of(line)
        for holder, its_names in names_of_holder.items():
            is_member = not members.isdisjoint(its_names)
            why = "member" if is_member else jobs.why_no_member(its_names, number)
            account.jobs[f"{holder}: {why}"] += 1


def _without_names(reason: str, names: list[str]) -> str:
    """Return a reason in which names of jobs and numbers are replaced, so that equal reasons are counted."""
    for name in sorted(names, key=len, reverse=True):
        reason = re.sub(rf"\b{name}\b", "JOB", reason)
    return re.sub(r"\d+(\.\d+)?(e[+-]\d+)?", "N", reason)[:120]
