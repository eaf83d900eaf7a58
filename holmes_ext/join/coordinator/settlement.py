"""What becomes of a round once its members exchange: who is lost, who contradicts the others, commit or void.
Pure.

    done     -> check: compare what came, or go again without those who could not be reached
    checked  -> commit, check again without those who contradict the others, or void

It is committed when every member has the same sums of all that counts; then, and only then, they step. A
round that cannot be completed changes nothing: the pseudo-gradients stay, and count in the fragment's next
round.
"""

from __future__ import annotations

from abc import abstractmethod

from holmes_ext.join.coordinator.consensus import differing, middle, voted_out
from holmes_ext.join.coordinator.membership import Membership, Reply
from holmes_ext.join.coordinator.reports import CheckedReport, Claim, DoneReport
from holmes_ext.join.coordinator.state import Member, RoundState

#: Times in a row that a job is waited for in vain without consequence; rounds that it sits out at most.
_IN_VAIN, _LONGEST_REST = 2, 31


class Settlement(Membership):
    """Of a run's rounds."""

    @abstractmethod
    def verdict(self, known: RoundState, name: str, now: float) -> Reply | None:
        """What a job is told of a round in which it is ready."""

    def done(self, name: str, report: DoneReport, now: float) -> Reply | None:
        known, early = self._in_progress(name, report.round, report.attempt, now)
        if known is None:
            return early
        if not known.check:
            if name not in known.done:
                known.done[name], known.last_report = report, now
            self._conclude(known, now)
        return self._next(known, name, now, report.attempt, 0)

    def checked(self, name: str, report: CheckedReport, now: float) -> Reply | None:
        known, early = self._in_progress(name, report.round, report.attempt, now)
        if known is None:
            return early
        if report.check == known.check:
            if name not in known.checked:
                known.checked[name], known.last_report = report, now
            self._compare(known, now)
        return self._next(known, name, now, report.attempt, report.check)

    def forget_rounds(self) -> None:
        super().forget_rounds()
        for known in self.rounds.values():
            if not known.outcome:
                self.end(known, "void", "the run is in a later round")

    def _in_progress(
        self, name: str, number: int, attempt: int, now: float
    ) -> tuple[RoundState | None, Reply | None]:
        """The round, where this job is in its attempt and it is not over; else what the job is told."""
        known = self.rounds.get(number)
        if known is None:
            return None, {"verdict": "void", "round": self.number, "why": "the coordinator was restarted"}
        if known.outcome == "commit" and name in known.members:
            return None, self._committed(known)
        if known.outcome or name not in known.members:
            return None, self._lost(known)
        if attempt != known.attempt:
            return None, self.verdict(known, name, now)
        return known, None

    def _next(self, known: RoundState, name: str, now: float, attempt: int, check: int) -> Reply | None:
        """What a job is told that has reported."""
        if known.outcome == "commit" and name in known.members:
            return self._committed(known)
        if known.outcome or name not in known.members:
            return self._lost(known)
        if attempt != known.attempt:
            return self.verdict(known, name, now)
        if known.check > check:
            salt = self.salt("check", known.number, known.attempt, known.check)
            task = {"attempt": known.attempt, "check": known.check, "salt": salt, "excluded": known.excluded}
            return {"verdict": "check", "round": known.number, **task}
        return None

    def _conclude(self, known: RoundState, now: float) -> None:
        """The check, the next attempt, or void: when all members have told or are given up."""
        lost = self._given_up(known, set(known.done), now)
        if lost is None:
            return
        unreached = {name: report.unreached for name, report in known.done.items() if report.unreached}
        if not lost and not unreached:
            known.excluded = voted_out({name: report.faults for name, report in known.done.items()})
            self._begin_check(known, now)
            return
        if not lost:
            accused = [name for names in unreached.values() for name in names if name in known.members]
            worst = max(known.members, key=lambda name: (accused.count(name), name in unreached))
            others = len(known.members) - 1
            if others < 2 or 2 * accused.count(worst) < others:
                who = ", ".join(sorted({*accused, *unreached}))
                self.end(known, "void", f"its jobs are here, but could not exchange: {who}")
                return
            lost = {worst}
        self._go_again(known, lost, now)

    def _compare(self, known: RoundState, now: float) -> None:
        """Commit, when all members have got the same; else again, without those who are in conflict."""
        lost = self._given_up(known, set(known.checked), now)
        if lost is None:
            return
        if lost:
            self._go_again(known, lost, now)
            return
        counting = {name for name, share in known.members.items() if share > 0} - known.excluded.keys()
        digests = {
            name: {sender: digest for sender, digest in report.digests.items() if sender in counting}
            for name, report in known.checked.items()
            if name not in known.excluded  # who is found out already does not begin it again
        }
        if excluded := voted_out(differing(digests)):
            known.excluded |= excluded
            self._begin_check(known, now)
            return
        factors = middle(report.factors for report in known.checked.values())
        known.factors = {name: factors.get(name, 0.0) for name in known.members if name in counting}
        known.gap = middle({"gap": report.gap} for report in known.checked.values())["gap"]
        known.left_out |= known.excluded
        self.end(known, "commit")

    def _begin_check(self, known: RoundState, now: float) -> None:
        known.check, known.checked, known.last_report = known.check + 1, {}, now
        members = [self.members[name] for name in known.members]
        counting = [name for name, share in known.members.items() if share > 0 and name not in known.excluded]
        for name, why in known.excluded.items():
            self.events.append(f"round {known.number}: job {name} is left out: {why}")
        if len(counting) < self.least(members) or not counting:
            why = "; ".join(f"{name} is left out: {why}" for name, why in known.excluded.items())
            known.left_out |= known.excluded
            self.end(known, "void", why or "no job counts")

    def _given_up(self, known: RoundState, reported: set[str], now: float) -> set[str] | None:
        """Members that are gone, or have been silent for too long; None while others may still report."""
        members = [self.members[name] for name in known.members]
        silent = {m.name for m in members if m.name not in reported and m.state != "gone"}
        if silent and now - known.last_report < self.patience_s(members):
            return None
        return silent | {m.name for m in members if m.state == "gone"}

    def _go_again(self, known: RoundState, lost: set[str], now: float) -> None:
        """The next attempt, without these; void where too few are left."""
        for name in lost:
            self.events.append(f"round {known.number}: job {name} is lost on the way")
            if self.members[name].state == "in":
                self._is_late(self.members[name], known)
        rest = {name: share for name, share in known.members.items() if name not in lost}
        counting = [name for name, share in rest.items() if share > 0]
        if not counting or len(counting) < self.least([self.members[name] for name in rest]):
            self.end(known, "void", f"job {', '.join(sorted(lost))} was lost on the way")
            return
        total = sum(rest.values())
        known.members = {name: share / total for name, share in rest.items()}
        known.attempt, known.done, known.last_report = known.attempt + 1, {}, now
        known.check, known.checked, known.excluded = 0, {}, {}

    def _is_late(self, member: Member, known: RoundState) -> None:
        """Others have waited for it. Who lets them wait round after round sits out: once, three times, seven
        times, ..."""
        member.state = "late"
        member.missed += 1
        member.in_vain += 1
        rest = min(2 ** max(0, min(member.in_vain - _IN_VAIN, 30)) - 1, _LONGEST_REST)
        if rest:
            member.rests_until = known.number + 1 + rest
            self.events.append(
                f"job {member.name} was waited for {member.in_vain} times in vain: it sits out until round "
                f"{member.rests_until}"
            )

    def rests(self, member: Member, number: int) -> bool:
        """Whether it sits round `number`, or the one under way, out, while there are others."""
        others = (m for m in self.members.values() if m is not member and m.state == "in")
        return max(number, self.number) < member.rests_until and any(others)

    def end(self, known: RoundState, outcome: str, why: str = "") -> None:
        known.outcome, known.why = outcome, why
        if outcome == "void":
            self.events.append(f"round {known.number}: void: {why}")
            return
        self.committed[known.fragment] = known.number
        self.together = self.together or len(known.members) > 1
        for member in self.members.values():
            if member.name in known.members:
                member.claims[known.fragment] = Claim(known.number)
                member.rounds, member.in_vain = member.rounds + 1, 0
            else:
                member.current = False
        shares = {name: known.members[name] for name in known.members if name not in known.excluded}
        total = sum(shares.values())
        who = ", ".join(f"{name} {share / total:.2f}" for name, share in shares.items())
        self.events.append(f"round {known.number}: commit ({who})")

    def _committed(self, known: RoundState) -> Reply:
        sums = {"factors": known.factors, "gap": known.gap, "left_out": known.left_out}
        return {"verdict": "commit", "round": known.number, **sums}

    def _lost(self, known: RoundState) -> Reply:
        why = known.why or "the round went on without this job"
        return {"verdict": "void", "round": known.number, "why": why, "left_out": known.left_out}
