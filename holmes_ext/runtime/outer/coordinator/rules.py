"""What the coordinator decides: who is in, who is waited for, what becomes of a round. Pure: no clock, no network.

    hello   -> accepted, or an error          (models, shards and settings must agree; a name is taken once)
    enter   -> in or behind, when `min` jobs are there
    ready   -> go: members and their shares, or behind (take these fragments from that job), skip (it is over), void
    done    -> commit, go again without those who failed, or void

A round is one exchange of one fragment. What counts is the version of a fragment: the round in which it was last
stepped. The highest version that a job here has is the truth; a job that has less, whatever the reason (late, new, an
older checkpoint, a message lost), takes the fragment from one that has it. So the coordinator keeps nothing that
its jobs do not know, and may be restarted.

A round is committed when every member has all its sums; then, and only then, they step. One that cannot be completed
changes nothing: the pseudo-gradients stay, and count in the fragment's next round.

Methods return None while nothing is decided yet: ask again when something has happened or `now` has passed `due`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.runtime.outer.coordinator.member import (
    HEARTBEAT_S,
    Member,
    State,
    difference,
    member_from,
    states,
)
from holmes_ext.runtime.outer.coordinator.round import RoundState, counted

Reply = dict[str, Any]


class NotHere(Exception):
    """The job has to say hello (again)."""


def _differ(one: State, other: State) -> bool:
    """Whether two jobs have different anchors; a checksum that is not told yet says nothing."""
    return one[0] != other[0] or (None not in (one[1], other[1]) and one[1] != other[1])


class Coordinator:
    """The state of one run. `events` are lines for the log: what was decided, in order."""

    def __init__(self, now: float):
        self.members: dict[str, Member] = {}
        self.rounds: dict[int, RoundState] = {}
        self.number = 0
        # After a restart: jobs that others know of, and until when they are waited for.
        self.awaited: dict[str, float] = {}
        self.usual: dict[int, list[float]] = {}
        self.events: list[str] = []
        self.started = now
        self._order = 0

    # Who is in

    def hello(self, document: Mapping[str, Any], now: float) -> Reply | None:
        """None while another job of this name may only seem to be there: its host has lost power, or the link is cut. A
        heartbeat of it tells that it lives, HEARTBEAT_S from now at the latest; look() finds out that it is gone."""
        self._order += 1
        new = member_from(document, self._order, now)
        old = self.members.get(new.name)
        if old is not None and old.state != "gone" and old.incarnation != new.incarnation:
            if new.incarnation not in old.claims:
                old.claims[new.incarnation] = now
                ago = now - old.heard
                self.events.append(f"another job asks for the name {new.name}, heard {ago:.0f} s ago: waiting")
            if old.heard > old.claims[new.incarnation]:
                raise HolmesError(f"there is a job named {new.name!r} in this run already; join by another name")
            return None
        for other in self.members.values():
            if other.name == new.name or other.state == "gone":
                continue
            if text := difference(new.agreed, other.agreed, other.name):
                raise HolmesError(f"job {new.name!r} cannot join: it differs from job {other.name!r} in {text}")
        if document.get("entered"):  # it lost the connection, or the coordinator was restarted
            new.state = "in"
            if old is not None and old.incarnation == new.incarnation:
                new.state, new.order, new.rounds, new.missed = "late", old.order, old.rounds, old.missed
        self.members[new.name] = new
        self.awaited.pop(new.name, None)
        self.number = max(self.number, int(document.get("round", 0)))
        for name in document.get("peers", ()):
            if name not in self.members:
                self.awaited.setdefault(str(name), now + new.timeout_s)
        self.events.append(f"job {new.name} is here ({len(new.addresses)} ranks, {new.state})")
        return {"round": self.number, "state": new.state}

    def enter(self, name: str, now: float) -> Reply | None:
        """Whether the job may begin, and with whose weights. HolmesError when fewer than its `min` jobs came in
        time."""
        member = self._member(name)
        others = [other for other in self.members.values() if other.state != "gone"]
        if len(others) < member.least:
            if now - member.since > member.timeout_s:
                have = ", ".join(other.name for other in others)
                raise HolmesError(
                    f"job {name!r} has waited {member.timeout_s:.0f} s for min={member.least} jobs, but there"
                    f" {'is' if len(others) == 1 else 'are'} only {have}; start the others, or give"
                    f" --holmes-outer min={len(others)}"
                )
            return None
        for other in others:  # all that wait begin together, whoever asks first
            if other.state == "waiting":
                other.state, other.expected_from = "in", self.number + 1
        behind = self._behind(member)
        self.events.append(f"job {name} begins" + (f", with the weights of {behind['from']}" if behind else ""))
        # Another that began with it may have opened the next round already, and waits there.
        return {**(behind or {"verdict": "in"}), "round": member.expected_from - 1}

    def gone(self, name: str, incarnation: str, why: str, now: float) -> None:
        """Its connection was closed, or it says that it ends."""
        member = self.members.get(name)
        if member is not None and member.incarnation == incarnation and member.state != "gone":
            member.state = "gone"
            self.events.append(f"job {name} is gone: {why}")

    def heartbeat(self, name: str, incarnation: str, told: Mapping[str, Any], now: float) -> None:
        member = self.members.get(name)
        if member is not None and member.incarnation == incarnation:
            member.heard, member.told = now, dict(told)

    def look(self, now: float) -> None:
        """Whoever has been silent for its timeout is gone."""
        for member in self.members.values():
            if member.state != "gone" and now - member.heard > max(member.timeout_s, 3 * HEARTBEAT_S):
                self.gone(member.name, member.incarnation, f"nothing heard for {now - member.heard:.0f} s", now)

    # Rounds

    def ready(self, name: str, report: Mapping[str, Any], now: float) -> Reply | None:
        """report: round, fragment, fragments (the versions and checksums of all), norm (of the pseudo-gradient; None:
        not finite), tokens."""
        member, number = self._member(name), int(report["round"])
        member.fragments = states(report["fragments"])
        if member.state == "late":
            self.events.append(f"job {name} is back")
        member.state = "in"
        known = self.rounds.get(number)
        if known is None or name not in known.ready:
            late = number < self.number or (known is not None and bool(known.attempt or known.outcome))
            if member.awaits is not None or late or self._behind(member):
                return self._catch_up(member, number, now)
            if known is None:
                known = self.rounds[number] = RoundState(number, now)
                self.number = number
                self.rounds.pop(number - 64, None)
            known.ready[name] = dict(report)
            member.lag_s = now - known.opened
        if not known.attempt and not known.outcome:
            self._decide(known, now)
        return self._verdict(known, name, now)

    def _catch_up(self, member: Member, number: int, now: float) -> Reply | None:
        """What a job takes that is behind, at its round `number`: once the round has ended that is under way without
        it, or the next one where that has not begun. Taken before, that round's fragment would be old again by then,
        and the job behind for ever."""
        if member.awaits is None:
            member.awaits, member.awaits_from = self.number + (number > self.number), now
            member.expected_from = max(self.number, number) + 1
        if not self._over(member, member.awaits, now):
            return None
        ended, member.awaits = member.awaits, None
        return {**(self._behind(member) or {"verdict": "skip"}), "round": ended}

    def _over(self, member: Member, number: int, now: float) -> bool:
        """Whether the round that it awaits has ended, or nobody is left to begin or to end it."""
        if known := self.rounds.get(number):
            members = [self.members[name] for name in known.ready]
            patience_s = 2 * max(member.timeout_s for member in members)
            return bool(known.outcome) or all(m.state == "gone" for m in members) or now > known.opened + patience_s
        others = [m for m in self.members.values() if m is not member and m.state == "in" and m.awaits is None]
        return number <= self.number or not others or now > member.awaits_from + 2 * member.timeout_s

    def due(self, number: int) -> float:
        """When the round waits no longer for those who are late."""
        known = self.rounds[number]
        return known.opened + max(self.members[name].timeout_s for name in known.ready)

    def done(self, name: str, report: Mapping[str, Any], now: float) -> Reply | None:
        """report: round, attempt, ok, accused (jobs that this one could not exchange with), factors."""
        known = self.rounds.get(int(report["round"]))
        if known is None:
            return {"verdict": "void", "round": self.number, "why": "the coordinator was restarted"}
        if int(report["attempt"]) == known.attempt and not known.outcome and name not in known.done:
            known.done[name] = dict(report)
            known.last_done = now
        if not known.outcome and int(report["attempt"]) == known.attempt:
            self._conclude(known, now)
        if known.outcome == "commit":
            return (
                {"verdict": "commit", "round": known.number, "factors": known.factors}
                if name in known.members
                else self._lost(known)
            )
        if known.outcome or name not in known.members:
            return self._lost(known)
        return self._verdict(known, name, now) if int(report["attempt"]) != known.attempt else None

    def _lost(self, known: RoundState) -> Reply:
        return {
            "verdict": "void",
            "round": known.number,
            "why": known.why or "the round went on without this job",
        }

    def _decide(self, known: RoundState, now: float) -> None:
        """Members of the round, once all that are waited for have reported."""
        present = [m for m in self.members.values() if m.state == "in" and m.expected_from <= known.number]
        missing = [m for m in present if m.name not in known.ready]
        awaited = [name for name, until in self.awaited.items() if now < until]
        if (missing or awaited) and now < self.due(known.number):
            return
        for member in missing:
            member.state = "late"
            member.missed += 1
            self.events.append(f"round {known.number} goes on without job {member.name}, which is late")
        here = [self.members[name] for name in known.ready if self.members[name].state == "in"]
        here.sort(key=lambda member: member.order)
        fragment = int(known.ready[here[0].name]["fragment"]) if here else 0
        truth = max(here, key=lambda m: (m.fragments[fragment][0], -m.order), default=None)
        if truth is not None:
            known.reference = truth.name
            known.behind = {m.name for m in here if _differ(m.fragments[fragment], truth.fragments[fragment])}
        able = [m for m in here if m.name not in known.behind]
        able_settings = able[0].agreed.get("outer", {}) if able else {}
        counts = counted(known, [m.name for m in able], able_settings, self.usual.setdefault(fragment, []))
        least = max((m.least for m in here), default=1)
        if len(counts) < least or not counts:
            kept_out = "".join(f"; {name} is left out: {why}" for name, why in known.left_out.items())
            self._end(known, "void", f"{len(counts)} of min={least} jobs" + kept_out)
            return
        total = sum(counts.values())
        known.members = {m.name: counts.get(m.name, 0.0) / total for m in able}
        known.attempt, known.last_done = 1, now
        for name, why in known.left_out.items():
            self.events.append(f"round {known.number}: job {name} is left out: {why}")

    def _conclude(self, known: RoundState, now: float) -> None:
        """Commit, the next attempt, or void: when all members here have told, or those who have not are given up."""
        members = [self.members[name] for name in known.members]
        silent = [m for m in members if m.name not in known.done and m.state != "gone"]
        if silent and now - known.last_done < max(m.timeout_s for m in members):
            return
        lost = {m.name for m in members if m.state == "gone"} | {m.name for m in silent}
        if not lost and all(report["ok"] for report in known.done.values()):
            known.factors = known.done[members[0].name]["factors"]
            self._end(known, "commit")
            for member in members:
                member.fragments[int(known.ready[member.name]["fragment"])] = (known.number, None)
                member.rounds += 1
            return
        rest = [m for m in members if m.name not in lost]
        if not lost:
            accused = [name for report in known.done.values() for name in report["accused"]]
            worst = max(rest, key=lambda m: accused.count(m.name))
            if len(rest) > 2 and 2 * accused.count(worst.name) >= len(rest) - 1:
                lost = {worst.name}
                rest.remove(worst)
            else:
                self._end(
                    known,
                    "void",
                    "its jobs are here, but could not exchange: " + ", ".join(sorted({*accused})),
                )
                return
        for name in lost:
            self.events.append(f"round {known.number}: job {name} is lost on the way")
            if self.members[name].state == "in":
                self.members[name].state = "late"
                self.members[name].missed += 1
        total = sum(known.members[m.name] for m in rest)
        if len(rest) < max((m.least for m in rest), default=1) or total <= 0:
            self._end(known, "void", f"job {', '.join(sorted(lost))} was lost on the way")
            return
        known.members = {m.name: known.members[m.name] / total for m in rest}
        known.attempt, known.done, known.last_done = known.attempt + 1, {}, now

    def _end(self, known: RoundState, outcome: str, why: str = "") -> None:
        known.outcome, known.why = outcome, why
        who = ", ".join(f"{name} {share:.2f}" for name, share in known.members.items())
        self.events.append(f"round {known.number}: {outcome}" + (f" ({who})" if outcome == "commit" else f": {why}"))

    def _verdict(self, known: RoundState, name: str, now: float) -> Reply | None:
        if known.outcome == "void":
            return {"verdict": "void", "round": known.number, "why": known.why, "left_out": known.left_out}
        if name in known.behind:
            return self._catch_up(self.members[name], known.number, now)
        if known.attempt and name not in known.members:
            return {"verdict": "skip", "round": known.number}
        if not known.attempt:
            return None
        incarnations = {member: self.members[member].incarnation for member in known.members}
        told = {
            "attempt": known.attempt,
            "members": known.members,
            "incarnations": incarnations,
            "left_out": known.left_out,
        }
        return {"verdict": "go", "round": known.number, **told}

    # Versions

    def _behind(self, member: Member) -> Reply | None:
        """What to take, and from whom, when another job has newer fragments (or others of the same version)."""
        others = sorted((m for m in self.members.values() if m.here and m is not member), key=lambda m: m.order)
        if not others:
            return None
        donor = max(others, key=lambda m: (sum(version for version, _ in m.fragments), -m.order))
        stale = [
            number
            for number, (mine, theirs) in enumerate(zip(member.fragments, donor.fragments))
            if self._older(mine, theirs, member, donor)
        ]
        return self._take(donor, stale) if stale else None

    @staticmethod
    def _older(mine: tuple, theirs: tuple, member: Member, donor: Member) -> bool:
        if mine[0] != theirs[0]:
            return mine[0] < theirs[0]
        return None not in (mine[1], theirs[1]) and mine[1] != theirs[1] and donor.order < member.order

    def _take(self, donor: Member, fragments: list[int]) -> Reply:
        told: Reply = {"from": donor.name, "incarnation": donor.incarnation, "fragments": fragments}
        told["versions"] = [donor.fragments[number][0] for number in fragments]
        return {"verdict": "behind", "round": self.number, **told}

    def _member(self, name: str) -> Member:
        member = self.members.get(name)
        if member is None or member.state == "gone":
            raise NotHere(name)
        return member
