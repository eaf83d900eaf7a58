"""What the coordinator decides before a round: who is in it, and who is behind. Pure: no clock, no network.

    ready    -> go: members and their shares, or behind (take these
             fragments from that job), skip (it is over), void
                then settlement.py

A round is one exchange of one fragment. Methods return None while nothing is decided yet: ask again when
something has happened or time has passed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.join.coordinator.consensus import same
from holmes_ext.join.coordinator.membership import Reply
from holmes_ext.join.coordinator.reports import Claim, ReadyReport
from holmes_ext.join.coordinator.settlement import Settlement
from holmes_ext.join.coordinator.state import Member, RoundState, counted

#: Rounds that are remembered, for jobs that ask late.
_REMEMBERED = 64


class Coordinator(Settlement):
    """The state of one run."""

    def __init__(self, now: float):
        super().__init__(now)
        self._usual: dict[int, list[float]] = {}

    def ready(self, name: str, report: ReadyReport, now: float) -> Reply | None:
        """HolmesError where the report cannot be true."""
        member, number = self.member(name), report.round
        if self.gathering(now):
            return None
        self.claim(member, report.claims)
        if self.rests(member, number):
            return {"verdict": "skip", "round": self.number}
        if member.state == "late":
            self.events.append(f"job {name} is back")
        member.state = "in"
        if number > self.number + 1:  # it went on counting while it was away
            return {"verdict": "skip", "round": self.number}
        known = self.rounds.get(number)
        if known is None or name not in known.ready:
            late = number < self.number or (known is not None and bool(known.attempt or known.outcome))
            if member.awaits is not None or late or self.behind(member):
                return self._catch_up(member, number, now)
            if known is None:
                known = self.open_round(number, report.fragment, now)
            if report.fragment != known.fragment:
                raise HolmesError(
                    f"round {number} exchanges fragment {known.fragment}, not {report.fragment}"
                )
            known.ready[name] = report
            member.lag_s = now - known.opened
        if not known.attempt and not known.outcome:
            self._decide(known, now)
        return self.verdict(known, name, now)

    def due(self, known: RoundState) -> float:
        """When the round waits no longer for those who are late: a patience after half of them were ready."""
        patience_s = self.patience_s([self.members[name] for name in known.ready])
        begin = known.half_ready if known.half_ready is not None else known.opened + patience_s
        return begin + patience_s

    def usual_of(self, fragment: int) -> list[float]:
        """Lengths of pseudo-gradients in its last rounds."""
        return self._usual.setdefault(fragment, [])

    def open_round(self, number: int, fragment: int, now: float) -> RoundState:
        known = self.rounds[number] = RoundState(number, fragment, now)
        self.number = number
        for old in [past for past in self.rounds if past <= number - _REMEMBERED]:
            del self.rounds[old]
        return known

    def _catch_up(self, member: Member, number: int, now: float) -> Reply | None:
        """What a job takes that is behind, at its round `number`: once the round has ended that goes on
        without it, or the next one where that has not begun. Taken before, that round's fragment would be old
        again by then, and the job behind for ever."""
        if member.awaits is None:
            member.awaits, member.awaits_from = self.number + (number > self.number), now
            member.expected_from = max(self.number, number) + 1
        if not self._over(member, member.awaits, now):
            return None
        ended, member.awaits = member.awaits, None
        behind = self.behind(member)
        member.corrected = behind is not None
        return {**(behind or {"verdict": "skip"}), "round": ended}

    def _over(self, member: Member, number: int, now: float) -> bool:
        """Whether the round that it awaits has ended, or nobody is left to begin or to end it."""
        if known := self.rounds.get(number):
            members = [self.members[name] for name in known.ready if name in self.members]
            waited = known.outcome or all(m.state == "gone" for m in members)
            return bool(waited) or now > known.opened + 2 * self.patience_s(members)
        others = [
            m for m in self.members.values() if m is not member and m.state == "in" and m.awaits is None
        ]
        return number <= self.number or not others or now > member.awaits_from + 2 * member.hello.timeout

    def _decide(self, known: RoundState, now: float) -> None:
        """Members of the round, once all that are waited for have reported."""
        present = [m for m in self.members.values() if m.state == "in" and m.expected_from <= known.number]
        missing = [m for m in present if m.name not in known.ready]
        if known.half_ready is None and 2 * len(missing) <= len(present):
            known.half_ready = now
        if (missing or self.awaits_peers(now)) and now < self.due(known):
            return
        for member in missing:
            self.events.append(f"round {known.number} goes on without job {member.name}, which is late")
            self._is_late(member, known)
        here = [self.members[name] for name in known.ready if self.members[name].state == "in"]
        here.sort(key=lambda member: member.order)
        claims = {m.name: self._salted_claim(known, m) for m in here}
        truth = self._truth_of_round(known, here, claims)
        known.behind = {m.name for m in here if truth is not None and not same(claims[m.name], truth)}
        able = [m for m in here if m.name not in known.behind]
        ranks = {m.name: len(m.hello.addresses) for m in able}
        counts = counted(known, ranks, outer_settings(able), self.usual_of(known.fragment))
        if self.begin_exchange(known, able, counts, self.least(here) if here else 1, now):
            for name, why in known.left_out.items():
                self.events.append(f"round {known.number}: job {name} is left out: {why}")

    def begin_exchange(
        self, known: RoundState, able: list[Member], counts: Mapping[str, float], least: int, now: float
    ) -> bool:
        """Between those who are able, with their shares by what counts; void where less than `least` do."""
        total = sum(counts.values())
        known.members = {m.name: counts.get(m.name, 0.0) / (total or 1.0) for m in able}
        if counts and len(counts) >= least:
            known.attempt, known.last_report = 1, now
            return True
        left_out = "".join(f"; {name} is left out: {why}" for name, why in known.left_out.items())
        self.end(known, "void", f"{len(counts)} of min={least} jobs" + left_out)
        return False

    def _salted_claim(self, known: RoundState, member: Member) -> Claim:
        """What it claims of the round's fragment, with the sum that it could not know before."""
        report, claim = known.ready[member.name], member.claims[known.fragment]
        return Claim(claim.version, report.salted if report.salt_round == known.number else "")

    def _truth_of_round(
        self, known: RoundState, here: list[Member], claims: dict[str, Claim]
    ) -> Claim | None:
        """Of the current ones' claims; of all where none is current. Claims without salt count as well."""
        trusted = [m for m in here if m.current] or here
        plain = self.truth(known.fragment, trusted)
        if plain is None:
            return None
        holders = [m for m in trusted if same(m.claims[known.fragment], plain)]
        salted = [claims[m.name].checksum for m in holders if claims[m.name].checksum]
        return Claim(plain.version, max(salted, key=salted.count) if salted else "")

    def verdict(self, known: RoundState, name: str, now: float) -> Reply | None:
        if known.outcome == "void":
            return self._lost(known)
        if name in known.behind:
            return self._catch_up(self.members[name], known.number, now)
        if known.attempt and name not in known.members:
            return {"verdict": "skip", "round": known.number}
        if not known.attempt:
            return None
        exchange = {
            "attempt": known.attempt,
            "members": known.members,
            "fragment": known.fragment,
            "norms": {name: report.norm for name, report in known.ready.items() if name in known.members},
            "incarnations": {member: self.members[member].incarnation for member in known.members},
            "left_out": known.left_out,
        }
        return {"verdict": "go", "round": known.number, **exchange}


def outer_settings(members: Sequence[Member]) -> Mapping[str, Any]:
    """What --holmes-outer says, alike in all of them."""
    settings: Mapping[str, Any] = members[0].hello.agreed.get("outer", {}) if members else {}
    return settings
