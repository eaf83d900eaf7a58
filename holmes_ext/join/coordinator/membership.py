"""Which jobs are in the run. Pure: no clock, no network.

    hello   -> accepted, or an error: models, shards and settings must agree; a name is taken once
    enter   -> in, or behind (take these fragments first), when `min` jobs are there

A job is gone when its connection is closed, or when it has been silent for its timeout.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.join.coordinator.awaited import AwaitedPeers
from holmes_ext.join.coordinator.replies import Reply
from holmes_ext.join.coordinator.reports import Hello
from holmes_ext.join.coordinator.rounds import Rounds
from holmes_ext.join.coordinator.state import HEARTBEAT_S, MOST_JOBS, Member, RunState, patience_s
from holmes_ext.join.coordinator.versions import Versions

#: Rounds that a job may be ahead of most: more than a run makes. Without it one that says
#: reports.MOST would leave no numbers for the next rounds.
_AHEAD = 2**32
#: Other jobs that ask for the name of one job, and are remembered.
_MOST_RIVALS = 8


class Membership:
    """Accepts jobs into the run, and notes when they are gone."""

    def __init__(self, state: RunState, rounds: Rounds, versions: Versions, awaited: AwaitedPeers):
        self._state = state
        self._rounds = rounds
        self._versions = versions
        self._awaited = awaited
        self._last_order = 0

    def hello(self, name: str, incarnation: str, hello: Hello, now: float) -> Reply | None:
        """Accept a job that is new, or whose connection or coordinator was lost.

        Returns:
            The round and the job's state. None while another job of this name may only seem to be
            there (no power, a cut link): a heartbeat shows within HEARTBEAT_S that it lives, look()
            that it is gone.

        Raises:
            HolmesError: The name is taken, the run is full, or the job differs from the others.
        """
        state = self._state
        predecessor = state.members.get(name)
        if (
            predecessor is not None
            and predecessor.state != "gone"
            and predecessor.incarnation != incarnation
        ):
            self._wait_for_rival(predecessor, incarnation, now)
            return None
        self._refuse_if_different(name, hello)
        if hello.entered and hello.round > state.number and self._may_be_restarted(name, now):
            self._rounds.forget()
        member = self._new_member(name, incarnation, hello, predecessor, now)
        state.members[name] = member
        self._forget_gone()
        self._awaited.arrived(name)
        if not state.committed:
            rounds = [other.hello.round for other in state.present()]
            state.number = min(max(state.number, *rounds), statistics.median_low(rounds) + _AHEAD)
        self._awaited.expect(hello.peers, now)
        state.events.append(f"job {name} is here ({len(hello.addresses)} ranks, {member.state})")
        return {"verdict": "hello", "round": state.number, "state": member.state}

    def enter(self, name: str, now: float) -> Reply | None:
        """Let a job begin once enough jobs are there.

        Returns:
            The round after which the job begins, and what it takes from another job before. None:
            it waits.

        Raises:
            HolmesError: Fewer than the job's `min` jobs came within its timeout.
        """
        state = self._state
        member = state.member(name)
        present = state.present()
        if len(present) < member.hello.min:
            if now - member.since > member.hello.timeout:
                raise HolmesError(_too_few_jobs(member, [other.name for other in present]))
            return None
        is_first = not any(other.current for other in present)
        for other in present:  # all that wait begin together, whoever asks first
            if other.state == "waiting":
                other.state = "in"
                other.expected_from = state.number + 1
                other.current = is_first
        correction = self._versions.correction(member)
        donor = f", with the weights of {correction['from']}" if correction else ""
        state.events.append(f"job {name} begins" + donor)
        # Another that began with it may have opened the next round already, and waits there.
        return {**(correction or {"verdict": "in"}), "round": member.expected_from - 1}

    def gone(self, name: str, incarnation: str, why: str) -> None:
        """Note that a job's connection was closed, or that the job says that it ends."""
        member = self._state.members.get(name)
        if member is not None and member.incarnation == incarnation and member.state != "gone":
            member.state = "gone"
            self._state.events.append(f"job {name} is gone: {why}")

    def heartbeat(
        self, name: str, incarnation: str, telemetry: dict[str, float], now: float
    ) -> None:
        """Note that a job lives, with the figures that it reports."""
        member = self._state.members.get(name)
        if member is not None and member.incarnation == incarnation:
            member.heard = now
            member.telemetry = telemetry

    def look(self, now: float) -> None:
        """Give up each job that has been silent for its timeout."""
        for member in self._state.members.values():
            silent_s = now - member.heard
            if member.state != "gone" and silent_s > max(member.hello.timeout, 3 * HEARTBEAT_S):
                self.gone(member.name, member.incarnation, f"nothing heard for {silent_s:.0f} s")

    def maps_of(self, asking: str, name: str) -> Reply:
        """Return what job `asking` needs to exchange with job `name`: its shares and addresses.

        Raises:
            NotInRun: Job `asking` is not in the run.
        """
        self._state.member(asking)
        member = self._state.members.get(name)
        if member is None:
            return {"verdict": "void", "why": f"there is no job {name} any more"}
        return {
            "verdict": "maps",
            "incarnation": member.incarnation,
            "maps": member.hello.maps,
            "addresses": member.hello.addresses,
        }

    def _new_member(
        self, name: str, incarnation: str, hello: Hello, predecessor: Member | None, now: float
    ) -> Member:
        """Return a job that has just said hello, with what is remembered of its predecessor."""
        self._last_order += 1
        member = Member(
            name=name,
            incarnation=incarnation,
            hello=hello,
            claims=list(hello.claims),
            order=self._last_order,
            since=now,
            heard=now,
        )
        if hello.entered:  # it lost the connection, or the coordinator was restarted
            member.state = "in"
            member.current = not self._state.committed
        if predecessor is None:
            return member
        if hello.entered and predecessor.incarnation == incarnation:
            member.state = "late"
            member.order = predecessor.order
            member.rounds = predecessor.rounds
            member.missed = predecessor.missed
            member.current = predecessor.current
        member.in_vain = predecessor.in_vain
        member.rests_until = predecessor.rests_until
        return member

    def _may_be_restarted(self, name: str, now: float) -> bool:
        """Return whether the run of the job `name` takes the place of this one.

        That is so after a restart if the others are new, and began alone before the run's jobs
        came.
        """
        state = self._state
        others = [other for other in state.present() if other.name != name]
        if not others or state.has_joint_commit:
            return False
        return now - state.started < patience_s(others)

    def _wait_for_rival(self, member: Member, incarnation: str, now: float) -> None:
        """Note that another incarnation asks for the name of a job.

        Raises:
            HolmesError: The job has been heard since, so the name is taken.
        """
        if incarnation not in member.rivals:
            remembered = list(member.rivals.items())[1 - _MOST_RIVALS :]
            member.rivals = {**dict(remembered), incarnation: now}
            heard_ago = now - member.heard
            self._state.events.append(
                f"another job asks for the name {member.name}, heard {heard_ago:.0f} s ago: waiting"
            )
        if member.heard > member.rivals[incarnation]:
            raise HolmesError(
                f"there is a job named {member.name!r} in this run already; join by another name"
            )

    def _refuse_if_different(self, name: str, hello: Hello) -> None:
        """Raise HolmesError if the run is full, or the job differs from the others."""
        others = [other for other in self._state.present() if other.name != name]
        if len(others) >= MOST_JOBS:
            raise HolmesError(f"job {name!r} cannot join: there are {len(others)} jobs already")
        for other in others:
            if text := difference(hello.agreed, other.hello.agreed, other.name):
                raise HolmesError(
                    f"job {name!r} cannot join: it differs from job {other.name!r} in {text}"
                )
            if hello.totals != other.hello.totals or len(hello.claims) != len(other.claims):
                raise HolmesError(
                    f"job {name!r} cannot join: it has other numbers of elements than job "
                    f"{other.name!r}"
                )

    def _forget_gone(self) -> None:
        """Forget the earliest of the jobs that are gone, except those of an open round."""
        members = self._state.members
        open_rounds = [each for each in self._state.rounds.values() if not each.outcome]
        needed = {name for round_state in open_rounds for name in round_state.ready_reports}
        gone = [m for m in members.values() if m.state == "gone" and m.name not in needed]
        for member in sorted(gone, key=lambda member: member.order)[:-MOST_JOBS]:
            del members[member.name]


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any], name: str) -> str:
    """Return in which settings a new job differs from job `name`; "": in none.

    Settings that are tables themselves are compared key by key.
    """
    differences = []
    for key in sorted({*ours, *theirs}):
        our_value, their_value = ours.get(key), theirs.get(key)
        if our_value == their_value:
            continue
        if isinstance(our_value, Mapping) and isinstance(their_value, Mapping):
            for part in sorted({*our_value, *their_value}):
                if our_value.get(part) != their_value.get(part):
                    our_text, their_text = _short(our_value, part), _short(their_value, part)
                    differences.append(f"{key} {part} ({our_text} here, {their_text} in {name})")
        else:
            differences.append(f"{key} ({our_value!r:.80} here, {their_value!r:.80} in {name})")
    more = f" and {len(differences) - 4} more" if len(differences) > 4 else ""
    return ", ".join(differences[:4]) + more


def _short(table: Mapping[str, Any], key: str) -> str:
    return str(table.get(key, "none"))[:200]


def _too_few_jobs(member: Member, names: list[str]) -> str:
    """Return the error of a job that has waited for others in vain; names: the jobs that came."""
    verb = "is" if len(names) == 1 else "are"
    return (
        f"job {member.name!r} has waited {member.hello.timeout:.0f} s for min={member.hello.min} "
        f"jobs, but there {verb} only {', '.join(names)}; start the others, or give"
        f" --holmes-outer min={len(names)}"
    )
