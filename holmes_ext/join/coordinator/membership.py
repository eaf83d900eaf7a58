"""Membership of a run: whether a job may join, when it begins, and when it is gone.

    request   answer
    hello     accepted, or an error: models, shards and settings must be equal; each name exists once
    enter     "in" when `min` jobs are there. "behind" if the others have trained already: the answer names
              the parts of the model (fragments) whose weights the job must first take from another job

A job is gone when its connection closes, or when it has been silent for its timeout.
Pure: no clock, no network.
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
from holmes_ext.words import counted

#: Rounds by which a job's round may exceed the median job's, more than any run makes. Otherwise a job
#: that reports reports.MOST would leave no numbers for the next rounds.
_AHEAD = 2**32
#: Incarnations that are remembered per job because they asked for the same name.
_MOST_RIVALS = 8
#: Differences between two jobs that one error message lists.
_MOST_DIFFERENCES = 4
#: Heartbeats that a job may miss whatever its timeout.
_FREE_HEARTBEATS = 3


class Membership:
    """The coordinator's replies to jobs that join, reconnect or leave, and its list of jobs.

    A job first describes itself (hello), then asks to begin training (enter), and sends heartbeats.
    """

    def __init__(self, state: RunState, rounds: Rounds, versions: Versions, awaited: AwaitedPeers):
        self._state = state
        self._rounds = rounds
        self._versions = versions
        # Peers of the connected jobs that have not reconnected since a restart of the coordinator.
        self._awaited_peers = awaited
        self._last_order = 0  # jobs are numbered in the order of their first hello

    def hello(self, name: str, incarnation: str, hello: Hello, now: float) -> Reply | None:
        """Accept a job that is new, or that reconnects after it or the coordinator was lost.

        A coordinator that was restarted has lost the number of the last round. It learns this number from
        the hellos of the jobs that reconnect (`hello.entered`: the job has begun to train already).

        Args:
            name: Name of the job.
            incarnation: Identifies this start of the job.
            hello: The job's description of itself.
            now: Current time, in seconds.

        Returns:
            The last round and the job's state. None while it is unclear whether another job of this
            name still runs: its next heartbeat (within HEARTBEAT_S) or its timeout will show it.

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
            self._record_or_refuse_rival(predecessor, incarnation, now)
            return None
        self._refuse_if_different(name, hello)
        hello = state.make_room(name, hello)
        # Only the hello of a job that this coordinator has not seen yet may change the number of the round.
        # Otherwise a job could void rounds by leaving and returning again and again.
        is_unknown = predecessor is None
        # If a job of an interrupted run reconnects late, new jobs may have begun another run in the meantime,
        # still in an earlier round. The interrupted run then goes on in place of the new run. forget()
        # deletes the new run's outer steps (commits): they decide which versions of the weights are valid.
        is_ahead = hello.entered and hello.round > state.number
        if is_unknown and is_ahead and self._replaces_current_run(name, now):
            self._rounds.forget()
        member = self._new_member(name, incarnation, hello, predecessor, now)
        state.members[name] = member
        self._forget_gone()
        self._awaited_peers.arrived(name)
        if is_unknown and not state.committed:
            # This coordinator is new: the run is in the latest round that a job reports, unless that is
            # implausibly far beyond the median job's (a single job may report anything).
            rounds = [other.hello.round for other in state.present()]
            most_plausible = statistics.median_low(rounds) + _AHEAD
            state.number = min(max(state.number, *rounds), most_plausible)
        # hello.peers: jobs with which this job has exchanged data. After a restart of the coordinator,
        # decisions by majority wait for those that have not reconnected yet.
        self._awaited_peers.expect(hello.peers, now)
        state.events.append(
            f"job {name} is here ({counted(len(hello.addresses), 'rank')}, {member.state})"
        )
        return {"verdict": "hello", "round": state.number, "state": member.state}

    def enter(self, name: str, now: float) -> Reply | None:
        """Let a job begin to train as soon as enough jobs have joined.

        Returns:
            The verdict "in" (begin with its own weights), or "behind" with the fragments that the job
            must first take from another job; also the last round before it begins. None while the job
            must wait for others.

        Raises:
            HolmesError: Fewer than the job's `min` jobs joined within its timeout.
        """
        state = self._state
        member = state.member(name)
        present = state.present()
        if len(present) < member.hello.min:
            if now - member.since > member.hello.timeout:
                raise HolmesError(_too_few_jobs(member, [other.name for other in present]))
            return None
        # The first jobs of a run define its weights; later jobs first have to take them.
        starts_run = not any(other.is_up_to_date for other in present)
        for (
            other
        ) in present:  # all waiting jobs begin together, with the first "enter" of any of them
            if other.state == "waiting":
                other.state = "in"
                other.first_expected_round = state.number + 1
                other.is_up_to_date = starts_run
        behind_reply = self._versions.order_to_take(member, now)
        event = f"job {name} begins"
        if behind_reply is not None:
            event += f", with the weights of {behind_reply['from']}"
        state.events.append(event)
        verdict = behind_reply or {"verdict": "in"}
        # Not state.number: a job that began at the same time may have opened the next round already.
        return {**verdict, "round": member.first_expected_round - 1}

    def gone(self, name: str, incarnation: str, why: str) -> None:
        """Record that a job has ended or lost its connection.

        Args:
            name: The job.
            incarnation: The start of the job that has ended. If the job has been started again since,
                nothing is recorded.
            why: The reason, for the log.
        """
        member = self._state.members.get(name)
        if member is not None and member.incarnation == incarnation and member.state != "gone":
            member.state = "gone"
            self._state.events.append(f"job {name} is gone: {why}")

    def heartbeat(
        self, name: str, incarnation: str, telemetry: dict[str, float], now: float
    ) -> None:
        """Record that a job is alive, with its telemetry.

        Args:
            name: The job.
            incarnation: The start of the job that has sent the heartbeat. An older start's is ignored.
            telemetry: Measured values of the job, by name.
            now: Current time, in seconds.
        """
        member = self._state.members.get(name)
        if member is not None and member.incarnation == incarnation:
            member.last_heartbeat = now
            member.telemetry = telemetry

    def look(self, now: float) -> None:
        """Mark the jobs as gone that have sent no heartbeat for longer than their timeout.

        A job sets its timeout itself, so the median of all jobs' timeouts counts if that is shorter. A
        timeout shorter than three heartbeats counts as three heartbeats.
        """
        present = self._state.present()
        if not present:
            return
        median_timeout_s = patience_s(present)
        for member in present:
            silent_s = now - member.last_heartbeat
            timeout_s = min(member.hello.timeout, median_timeout_s)
            timeout_s = max(timeout_s, _FREE_HEARTBEATS * HEARTBEAT_S)
            if member.state != "gone" and silent_s > timeout_s:
                self.gone(member.name, member.incarnation, f"nothing heard for {silent_s:.0f} s")

    def maps_of(self, asking: str, name: str) -> Reply:
        """Return the shards and addresses of job `name`, with which job `asking` wants to connect.

        Returns:
            {"verdict": "maps", "incarnation": ..., "maps": ..., "addresses": ...}; or
            {"verdict": "void", "why": ...} if there is no job `name`.

        Raises:
            NotInRun: Job `asking` is not in the run.
        """
        self._state.member(asking)  # raises NotInRun
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
        """Return the state of a job that has just said hello.

        A job that only lost its connection keeps all its counters. A new start of a job with the
        same name keeps only the penalty for delays: a job that let the others wait too often must
        sit out some rounds, also if it is restarted.

        Args:
            name: Name of the job.
            incarnation: Identifies this start of the job.
            hello: The job's description of itself.
            predecessor: Last job of this name; None: there was none.
            now: Current time, in seconds.
        """
        self._last_order += 1
        member = Member(
            name=name,
            incarnation=incarnation,
            hello=hello,
            claims=list(hello.claims),  # version and checksum of each fragment
            order=self._last_order,
            since=now,  # time of the hello
            last_heartbeat=now,
        )
        if hello.entered:  # it lost the connection, or the coordinator was restarted
            member.state = "in"
            # A new coordinator has seen no commit: all jobs that trained before vote about the weights.
            # Later, the job's reports must first show that it has the valid weights.
            member.is_up_to_date = not self._state.committed
        if predecessor is None:
            return member
        if hello.entered and predecessor.incarnation == incarnation:
            # The same start of the job. The others do not wait for it until it reports for a round.
            member.state = "late"
            member.order = predecessor.order
            member.rounds = predecessor.rounds
            member.missed = predecessor.missed
            member.is_up_to_date = predecessor.is_up_to_date
        member.delays_in_a_row = predecessor.delays_in_a_row
        member.sits_out_until = predecessor.sits_out_until
        return member

    def _replaces_current_run(self, name: str, now: float) -> bool:
        """Return whether a reconnecting job's older run replaces the run that began since.

        After a restart of the coordinator, new jobs may join before the jobs of the interrupted run
        reconnect. The new jobs then start a run of their own, from their initial weights. The
        interrupted run replaces that run, unless the new jobs have already taken an outer step
        together, or the coordinator has been up for longer than their median timeout.

        Args:
            name: The job that reconnects.
            now: Current time, in seconds.
        """
        state = self._state
        others = [other for other in state.present() if other.name != name]
        if not others or state.has_joint_commit:
            return False
        return now - state.started < patience_s(others)

    def _record_or_refuse_rival(self, member: Member, incarnation: str, now: float) -> None:
        """Record that a second process (rival) wants to join by a job's name, or refuse the rival.

        The rival's first request is recorded with its time; the rival then repeats the request. The
        rival is refused as soon as the job has sent a heartbeat after that time. If the job sends
        no heartbeat, it may be dead. As soon as it is declared gone, the rival's next request is not
        passed to this function any more, and the rival gets the name.

        Args:
            member: The job that has the name.
            incarnation: Random text that identifies the rival: each start of a job has its own.
            now: Current time, in seconds.

        Raises:
            HolmesError: The job is alive, so the name is taken.
        """
        if incarnation not in member.rivals:
            # Keep the latest rivals, so that with the new rival there are at most _MOST_RIVALS.
            latest_rivals = list(member.rivals.items())[1 - _MOST_RIVALS :]
            member.rivals = {**dict(latest_rivals), incarnation: now}
            heard_ago = now - member.last_heartbeat
            self._state.events.append(
                f"another job asks for the name {member.name}, heard {heard_ago:.0f} s ago: waiting"
            )
        if member.last_heartbeat > member.rivals[incarnation]:
            raise HolmesError(
                f"there is a job named {member.name!r} in this run already; join by another name"
            )

    def _refuse_if_different(self, name: str, hello: Hello) -> None:
        """Raise HolmesError if the run is full, or the job's model, shards or settings differ.

        The settings are compared, and the number of elements at each position of the model-parallel
        grid. So is the number of fragments into which the model is divided.

        Args:
            name: Name of the job that joins.
            hello: Its description of itself. `totals`: position -> number of elements; `claims`:
                one entry for each fragment.
        """
        others = [other for other in self._state.present() if other.name != name]
        if len(others) >= MOST_JOBS:
            raise HolmesError(f"job {name!r} cannot join: there are {len(others)} jobs already")
        for other in others:
            if text := difference(hello.agreed, other.hello.agreed, other.name):
                raise HolmesError(
                    f"job {name!r} cannot join: it differs from job {other.name!r} in {text}"
                )
            # A job has a claim for each fragment. If the numbers of fragments differ, then so do the
            # numbers of elements of a fragment. So the same message serves both cases.
            if hello.totals != other.hello.totals or len(hello.claims) != len(other.claims):
                raise HolmesError(
                    f"job {name!r} cannot join: it has other numbers of elements than job "
                    f"{other.name!r}"
                )

    def _forget_gone(self) -> None:
        """Delete disconnected ("gone") jobs from the list, except for the latest MOST_JOBS.

        Jobs in a round that has not ended are kept, because the round still needs their reports.
        """
        members = self._state.members
        in_open_round: set[str] = set()
        for round_state in self._state.rounds.values():
            if not round_state.outcome:
                in_open_round.update(round_state.ready_reports)
        gone = [
            member
            for member in members.values()
            if member.state == "gone" and member.name not in in_open_round
        ]
        gone.sort(key=lambda member: member.order)
        for member in gone[:-MOST_JOBS]:  # all but the latest
            del members[member.name]


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any], name: str) -> str:
    """Return the differences between the settings of a new job and of job `name`, as a text.

    Settings that are tables themselves are compared key by key.

    Args:
        ours: Settings of the new job.
        theirs: Settings of job `name`.
        name: A job of the run.

    Returns:
        "" if there is no difference.
    """
    differences = []
    for key in sorted({*ours, *theirs}):
        our_value = ours.get(key)
        their_value = theirs.get(key)
        if our_value == their_value:
            continue
        if isinstance(our_value, Mapping) and isinstance(their_value, Mapping):
            for part in sorted({*our_value, *their_value}):
                if our_value.get(part) != their_value.get(part):
                    our_text = _short(our_value, part)
                    their_text = _short(their_value, part)
                    differences.append(f"{key} {part} ({our_text} here, {their_text} in {name})")
        else:
            differences.append(f"{key} ({our_value!r:.80} here, {their_value!r:.80} in {name})")
    text = ", ".join(differences[:_MOST_DIFFERENCES])
    hidden = len(differences) - _MOST_DIFFERENCES
    if hidden > 0:
        text += f" and {hidden} more"
    return text


def _short(table: Mapping[str, Any], key: str) -> str:
    return str(table.get(key, "none"))[:200]


def _too_few_jobs(member: Member, names: list[str]) -> str:
    """Return the error message for a job that has waited too long for enough other jobs to join.

    Args:
        member: The job.
        names: All jobs that have joined.
    """
    verb = "is" if len(names) == 1 else "are"
    return (
        f"job {member.name!r} has waited {member.hello.timeout:.0f} s for min={member.hello.min} "
        f"jobs, but there {verb} only {', '.join(names)}; start the others, or give"
        f" --holmes-outer min={len(names)}"
    )
