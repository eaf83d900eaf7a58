"""Rounds without a barrier (rounds=async): a job contributes when it is ready, and gets every round's sum.
Pure.

    next     -> go: members and their shares (0: it only receives),
             or behind (take these fragments from that job), idle
                then settlement.py

After Decoupled DiLoCo (arXiv 2604.21428): a round of a fragment is opened once half of the jobs that are
there offer a pseudo-gradient of it (the quorum), and a grace has passed in which others may; who was not
ready contributes to a later one. There is one round at a time, of the fragment that was offered first.
"""

from __future__ import annotations

from holmes_ext.join.coordinator.membership import Reply
from holmes_ext.join.coordinator.reports import NextReport, ReadyReport
from holmes_ext.join.coordinator.rules import Coordinator, outer_settings
from holmes_ext.join.coordinator.state import Member, counted

#: Seconds since its last question in which a job counts as one that is there.
_THERE_S = 5.0
#: What of the time until the first sum is needed is spent waiting for others.
_GRACE = 0.5


class RollingCoordinator(Coordinator):
    """The state of one run, whose jobs may be of either kind: all of them agree on one."""

    def __init__(self, now: float):
        super().__init__(now)
        self._asked: dict[str, float] = {}
        self._offers: dict[str, NextReport] = {}
        # By fragment: when it was offered first, and when by a quorum.
        self._since: dict[int, float] = {}
        self._quorum: dict[int, float] = {}

    def next(self, name: str, report: NextReport, now: float) -> Reply | None:
        """HolmesError where the report cannot be true."""
        member = self.member(name)
        if self.gathering(now):
            return None
        self.claim(member, report.claims)
        if self.rests(member, self.number + 1):
            return None
        member.state = "in"
        self._asked[name], self._offers[name] = now, report
        if reply := self._told(name, now):
            return reply
        known = self.rounds.get(self.number)
        if known is not None and not known.outcome:
            return None
        if behind := self.behind(member):
            member.corrected = True
            return behind
        unusable = [offer.why or "its pseudo-gradient is not finite" for offer in report.offers.values()
                    if offer.norm is None]  # fmt: skip
        if unusable:
            return {
                "verdict": "void",
                "round": self.number,
                "why": unusable[0],
                "left_out": {name: unusable[0]},
            }
        self._open_one(now)
        return self._told(name, now)

    def _told(self, name: str, now: float) -> Reply | None:
        """What a job must know of the last round: that it goes, or is void."""
        known = self.rounds.get(self.number)
        if known is None or name not in known.members or known.outcome == "commit":
            return None
        if known.outcome:
            if name in known.heard:
                return None
            known.heard.add(name)
        return self.verdict(known, name, now)

    def _open_one(self, now: float) -> None:
        there = [
            m
            for m in self.members.values()
            if m.state == "in" and now - self._asked.get(m.name, -1e9) < _THERE_S
        ]
        able = sorted((m for m in there if m.current), key=lambda m: m.order)
        if not able:
            return
        needed = self.least(there)
        offered = {fragment for m in able for fragment in self._offers[m.name].offers}
        self._since = {fragment: self._since.get(fragment, now) for fragment in offered}
        self._quorum = {fragment: at for fragment, at in self._quorum.items() if fragment in offered}
        for fragment in sorted(offered, key=lambda fragment: self._since[fragment]):
            contributors = [m for m in able if fragment in self._offers[m.name].offers]
            if len(contributors) < needed:
                continue
            reached = self._quorum.setdefault(fragment, now)
            if len(contributors) == len(able) or now >= reached + self._grace_s(fragment, contributors):
                self._begin(fragment, contributors, able, now)
                return

    def _grace_s(self, fragment: int, contributors: list[Member]) -> float:
        """Seconds from the quorum on: as agreed, or so that who needs the sum first hardly waits."""
        agreed = outer_settings(contributors).get("grace", "auto")
        if isinstance(agreed, (int, float)):
            return float(agreed)
        return _GRACE * min(self._offers[m.name].offers[fragment].slack_s for m in contributors)

    def _begin(self, fragment: int, contributors: list[Member], able: list[Member], now: float) -> None:
        known = self.open_round(self.number + 1, fragment, now)
        for member in contributors:
            offer = self._offers[member.name].offers[fragment]
            claims = self._offers[member.name].claims
            known.ready[member.name] = ReadyReport(
                fragment, claims, known.number, offer.tokens, offer.norm, offer.why
            )
        ranks = {m.name: len(m.hello.addresses) for m in contributors}
        counts = counted(known, ranks, outer_settings(contributors), self.usual_of(fragment))
        if self.begin_exchange(known, able, counts, self.least(able), now):
            self._since.pop(fragment, None)
            self._quorum.pop(fragment, None)
