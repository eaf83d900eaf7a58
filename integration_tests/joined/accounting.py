"""Account of all rounds of joined jobs: what became of each, and why each job took part in it or not.

It is made from the lines that the coordinators printed, in order. A round ends as committed or void, with a
reason. A round without an end is abandoned: its jobs died, or the coordinator was killed, while it was open.
A job that is not a member of a committed round is

    gone            not in the run, or not begun yet
    late            the others went on without it
    sitting out     it was late too often
    left out        its data could not be used, or it was lost during the exchange
    taking weights  it came back in the meantime, or has weights of another round
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


@dataclass
class Account:
    """Numbers of rounds, and of jobs in them, by what became of them."""

    rounds: Counter[str] = field(
        default_factory=Counter
    )  # "committed", "void: reason", "abandoned"
    jobs: Counter[str] = field(default_factory=Counter)  # "east: member", "east: late", ...
    unexplained: list[str] = field(default_factory=list)  # lines of void rounds without a reason

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
        names: Names of the jobs.
    """
    account = Account()
    for lines in coordinators:
        _add_lines(account, lines, list(names))
    return account


class _Jobs:
    """States of all jobs, as the lines of one coordinator describe them up to now."""

    def __init__(self, names: list[str]):
        self._state_of = dict.fromkeys(names, "gone")
        self._sits_out_until = dict.fromkeys(names, 0)
        self._not_counted: set[tuple[int, str]] = set()  # (round, job)

    def follow(self, line: str) -> None:
        """Update the states by a line."""
        for pattern, state in _STATES:
            if found := pattern.search(line):
                self._state_of[found[1]] = state
                break
        if found := _SITS_OUT.search(line):
            self._sits_out_until[found[1]] = int(found[2])
        if found := _NOT_COUNTED.search(line):
            self._not_counted.add((int(found[1]), found[2]))

    def why_no_member(self, name: str, number: int) -> str:
        """Return why a job is no member of the committed round of this number."""
        if (number, name) in self._not_counted:
            return "left out"
        if self._state_of[name] == "in" and number < self._sits_out_until[name]:
            return "sitting out"
        return "taking weights" if self._state_of[name] == "in" else self._state_of[name]


def _add_lines(account: Account, lines: list[str], names: list[str]) -> None:
    """Add the rounds of one coordinator to the account."""
    jobs = _Jobs(names)
    numbers: list[int] = []  # of rounds that ended
    for line in lines:
        jobs.follow(line)
        ended = _ENDED.search(line)
        if not ended:
            continue
        number = int(ended[1])
        numbers.append(number)
        if ended[2] == "void":
            account.rounds[f"void: {_without_names(ended[3] or '', names)}"] += 1
            if not ended[3]:
                account.unexplained.append(line)
            continue
        account.rounds["committed"] += 1
        members = {part.split()[0] for part in ended[4].split(", ")}
        for name in names:
            why = "member" if name in members else jobs.why_no_member(name, number)
            account.jobs[f"{name}: {why}"] += 1
    if numbers:
        account.rounds["abandoned"] += max(numbers) - min(numbers) + 1 - len(set(numbers))


def _without_names(reason: str, names: list[str]) -> str:
    """Return a reason in which names of jobs and numbers are replaced, so that equal reasons are counted."""
    for name in names:
        reason = re.sub(rf"\b{name}\b", "JOB", reason)
    return re.sub(r"\d+(\.\d+)?(e[+-]\d+)?", "N", reason)[:120]
