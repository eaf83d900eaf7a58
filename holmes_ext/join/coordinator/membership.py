"""Which jobs are in the run, and which of them are behind. Pure: no clock, no network.

    hello   -> accepted, or an error          (models, shards and settings must agree; a name is taken once)
    enter   -> in, or behind, when `min` jobs are there

What counts is the version of a fragment: the round in which it was last stepped. What most of the current
jobs have is the truth (consensus.py); a job that has something else, whatever the reason (late, new, an older
checkpoint, a message lost, a lie), takes the fragment from one that has it. So the coordinator keeps nothing
that its jobs do not know, and may be restarted.
"""

from __future__ import annotations

import hmac
import secrets
import statistics
from collections.abc import Iterable
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.join.coordinator.consensus import agreed_claim, same
from holmes_ext.join.coordinator.reports import Claim, Hello
from holmes_ext.join.coordinator.state import HEARTBEAT_S, Member, RoundState, difference

Reply = dict[str, Any]
#: Jobs in a run at a time, and gone ones that are remembered.
MOST_JOBS = 64
#: Rounds that a job may be ahead of most: more than a run makes. Without it one that says reports.MOST would
#: leave no numbers for the next rounds.
_AHEAD = 2**32


class NotHere(Exception):
    """The job has to say hello (again)."""


class Membership:
    """`events` are lines for the log: what was decided, in order."""

    def __init__(self, now: float):
        self.members: dict[str, Member] = {}
        self.number = 0
        self.rounds: dict[int, RoundState] = {}  # by number
        # Of each fragment, the last round in which it was stepped; not known for those from before a restart.
        self.committed: dict[int, int] = {}
        # Whether a round of several jobs was one of them.
        self.together = False
        # After a restart: jobs that others know of, and since when they are waited for.
        self._awaited: dict[str, float] = {}
        self.events: list[str] = []
        self.started = now
        self._order = 0
        self._secret = secrets.token_bytes(32)

    def hello(self, name: str, incarnation: str, hello: Hello, now: float) -> Reply | None:
        """None while another job of this name may only seem to be there (no power, a cut link): a heartbeat
        tells within HEARTBEAT_S that it lives, look() that it is gone."""
        old = self.members.get(name)
        if old is not None and old.state != "gone" and old.incarnation != incarnation:
            self._wait_for_rival(old, incarnation, now)
            return None
        self._refuse_what_differs(name, hello)
        if hello.entered and hello.round > self.number and self._may_be_restarted(name, now):
            self.forget_rounds()
        self._order += 1
        new = Member(name, incarnation, hello, list(hello.claims), self._order, now, now)
        if hello.entered:  # it lost the connection, or the coordinator was restarted
            new.state, new.current = "in", not self.committed
            if old is not None and old.incarnation == incarnation:
                new.state, new.order, new.rounds, new.missed = "late", old.order, old.rounds, old.missed
                new.current = old.current
        if old is not None:
            new.in_vain, new.rests_until = old.in_vain, old.rests_until
        self.members[name] = new
        self._forget_gone()
        self._awaited.pop(name, None)
        if not self.committed:
            rounds = [member.hello.round for member in self._present()]
            self.number = min(max(self.number, *rounds), statistics.median_low(rounds) + _AHEAD)
        if now - self.started < self._patience_for_peers_s():
            for peer in hello.peers:
                if peer not in self.members and len(self._awaited) < MOST_JOBS**2:
                    self._awaited.setdefault(peer, now)
        self.events.append(f"job {name} is here ({len(hello.addresses)} ranks, {new.state})")
        return {"verdict": "hello", "round": self.number, "state": new.state}

    def _may_be_restarted(self, name: str, now: float) -> bool:
        """Whether there is but a new job, which began alone before those that are in the run."""
        others = [other for other in self._present() if other.name != name]
        return bool(others) and not self.together and now - self.started < self.patience_s(others)

    def forget_rounds(self) -> None:
        """What was committed here is not the run's."""
        self.committed.clear()

    def enter(self, name: str, now: float) -> Reply | None:
        """Whether the job may begin, and with whose weights. HolmesError: fewer than its `min` jobs came."""
        member = self.member(name)
        others = self._present()
        if len(others) < member.hello.min:
            if now - member.since > member.hello.timeout:
                have = ", ".join(other.name for other in others)
                raise HolmesError(
                    f"job {name!r} has waited {member.hello.timeout:.0f} s for min={member.hello.min} jobs, "
                    f"but there {'is' if len(others) == 1 else 'are'} only {have}; start the others, or give"
                    f" --holmes-outer min={len(others)}"
                )
            return None
        first = not any(other.current for other in others)
        for other in others:  # all that wait begin together, whoever asks first
            if other.state == "waiting":
                other.state, other.expected_from, other.current = "in", self.number + 1, first
        behind = self.behind(member)
        self.events.append(
            f"job {name} begins" + (f", with the weights of {behind['from']}" if behind else "")
        )
        # Another that began with it may have opened the next round already, and waits there.
        return {**(behind or {"verdict": "in"}), "round": member.expected_from - 1}

    def gone(self, name: str, incarnation: str, why: str) -> None:
        """Its connection was closed, or it says that it ends."""
        member = self.members.get(name)
        if member is not None and member.incarnation == incarnation and member.state != "gone":
            member.state = "gone"
            self.events.append(f"job {name} is gone: {why}")

    def heartbeat(self, name: str, incarnation: str, telemetry: dict[str, float], now: float) -> None:
        member = self.members.get(name)
        if member is not None and member.incarnation == incarnation:
            member.heard, member.telemetry = now, telemetry

    def look(self, now: float) -> None:
        """Whoever has been silent for its timeout is gone."""
        for member in self.members.values():
            silent = now - member.heard
            if member.state != "gone" and silent > max(member.hello.timeout, 3 * HEARTBEAT_S):
                self.gone(member.name, member.incarnation, f"nothing heard for {silent:.0f} s")

    def member(self, name: str) -> Member:
        """NotHere where the job is not, or no more."""
        member = self.members.get(name)
        if member is None or member.state == "gone":
            raise NotHere(name)
        return member

    def maps_of(self, asks: str, name: str) -> Reply:
        """What job `asks` must know of job `name` to exchange with it."""
        self.member(asks)
        member = self.members.get(name)
        if member is None:
            return {"verdict": "void", "why": f"there is no job {name} any more"}
        hello = member.hello
        return {"verdict": "maps", "incarnation": member.incarnation, "maps": hello.maps,
                "addresses": hello.addresses}

    def salt(self, *of: object) -> str:
        """What nobody can know before it is told."""
        text = "salt " + " ".join(map(str, of))
        return hmac.new(self._secret, text.encode(), "sha256").hexdigest()[:16]

    # Who has what

    def truth(self, fragment: int, among: Iterable[Member] | None = None) -> Claim | None:
        """What a fragment is, of what the current jobs claim; of what all do where none is current."""
        here = sorted((m for m in (among or self.members.values()) if m.here), key=lambda m: m.order)
        trusted = [m for m in here if m.current] or here
        claims = [m.claims[fragment] for m in trusted]
        return agreed_claim(claims, self.committed.get(fragment), self.number)

    def behind(self, member: Member) -> Reply | None:
        """What to take, and from whom, where others have what is true and this job has not."""
        others = sorted(
            (m for m in self.members.values() if m.here and m is not member), key=lambda m: m.order
        )
        donors: dict[str, list[int]] = {}
        for fragment, claim in enumerate(member.claims):
            truth = self.truth(fragment)
            if truth is None or same(claim, truth):
                continue
            for other in others:
                if same(other.claims[fragment], truth):
                    donors.setdefault(other.name, []).append(fragment)
        trusted = {name: donors[name] for name in donors if name not in member.avoids} or donors
        if not trusted:
            return None
        name = max(trusted, key=lambda name: (len(trusted[name]), -self.members[name].order))
        donor, fragments = self.members[name], trusted[name]
        member.took.update(dict.fromkeys(fragments, name))
        reply: Reply = {"from": name, "incarnation": donor.incarnation, "fragments": fragments}
        reply["versions"] = [donor.claims[fragment].version for fragment in fragments]
        return {"verdict": "behind", "round": self.number, **reply}

    def claim(self, member: Member, claims: Iterable[Claim]) -> None:
        """What a job says that it has. HolmesError: a version that cannot exist, unless from a run that is
        over (then it is told, once, to take what is true)."""
        member.claims = list(claims)
        for fragment, claim in enumerate(member.claims):
            known = member.current or member.corrected
            if known and claim.version > self.committed.get(fragment, claim.version):
                last = self.committed[fragment]
                raise HolmesError(
                    f"fragment {fragment} cannot be of round {claim.version}: it was last stepped in round "
                    f"{last}"
                )
        for fragment, donor in list(member.took.items()):
            truth = self.truth(fragment)
            if truth is not None and member.claims[fragment].version == truth.version:
                del member.took[fragment]
                if not same(member.claims[fragment], truth):
                    member.avoids.add(donor)
                    self.events.append(f"job {donor} gave job {member.name} other weights than it has")
        if not member.current and self.behind(member) is None:
            member.current = True

    def gathering(self, now: float) -> bool:
        """After a restart: whether jobs are awaited without whom it cannot be known what most have."""
        return not self.committed and self.awaits_peers(now)

    def awaits_peers(self, now: float) -> bool:
        """After a restart: whether jobs that others know of may still come."""
        patience_s = self._patience_for_peers_s()
        return any(now < since + patience_s for since in self._awaited.values())

    def _patience_for_peers_s(self) -> float:
        """Not what one job says, which may know of jobs that are none."""
        return statistics.median_low(member.hello.timeout for member in self._present())

    def patience_s(self, members: Iterable[Member]) -> float:
        """How long these wait for each other: no single job decides."""
        return statistics.median_high(member.hello.timeout for member in members)

    def least(self, members: Iterable[Member]) -> int:
        """Jobs that a round of these needs: what most of them ask for, and half of those that are there."""
        asked = statistics.median_high(member.hello.min for member in members)
        return max(asked, -(-len([m for m in self.members.values() if m.here]) // 2))

    def _present(self) -> list[Member]:
        return [member for member in self.members.values() if member.state != "gone"]

    def _wait_for_rival(self, old: Member, incarnation: str, now: float) -> None:
        if incarnation not in old.rivals:
            old.rivals = {**dict(list(old.rivals.items())[-7:]), incarnation: now}
            ago = now - old.heard
            self.events.append(f"another job asks for the name {old.name}, heard {ago:.0f} s ago: waiting")
        if old.heard > old.rivals[incarnation]:
            raise HolmesError(f"there is a job named {old.name!r} in this run already; join by another name")

    def _refuse_what_differs(self, name: str, hello: Hello) -> None:
        others = [other for other in self._present() if other.name != name]
        if len(others) >= MOST_JOBS:
            raise HolmesError(f"job {name!r} cannot join: there are {len(others)} jobs already")
        for other in others:
            if text := difference(hello.agreed, other.hello.agreed, other.name):
                raise HolmesError(f"job {name!r} cannot join: it differs from job {other.name!r} in {text}")
            if hello.totals != other.hello.totals or len(hello.claims) != len(other.claims):
                raise HolmesError(
                    f"job {name!r} cannot join: it has other numbers of elements than job {other.name!r}"
                )

    def _forget_gone(self) -> None:
        needed = {name for known in self.rounds.values() if not known.outcome for name in known.ready}
        gone = [m for m in self.members.values() if m.state == "gone" and m.name not in needed]
        for member in sorted(gone, key=lambda member: member.order)[:-MOST_JOBS]:
            del self.members[member.name]
