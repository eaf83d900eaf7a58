"""Comparison of the fragment versions that jobs report, and correction of jobs with other weights.

The version of a fragment (part of the model) is the round of its last outer step. The version that most
of the current jobs have is valid (consensus.py). A job with another version takes the fragment from a
job with the valid version, for whatever reason it differs (it is late or new, loaded an older checkpoint,
missed a message, lied). The jobs hold all of this state, so the coordinator may be restarted at any time.
Pure: no clock, no network.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holmes_ext.errors import HolmesError
from holmes_ext.join.coordinator.consensus import agreed_claim, is_compatible
from holmes_ext.join.coordinator.replies import Reply
from holmes_ext.join.coordinator.reports import Claim
from holmes_ext.join.coordinator.state import Member, RunState


class Versions:
    """Comparison of the fragment versions that jobs report: the valid version, and jobs without it.

    A fragment is a part of the model; its version is the round of its last outer step. Jobs report
    versions and checksums (claims). valid_claim() returns the claim that most of them support.
    behind_reply() names the fragments that a job with outdated weights must take, and the job that gives
    them.
    """

    def __init__(self, state: RunState):
        self._state = state

    def valid_claim(self, fragment: int, members: Sequence[Member] | None = None) -> Claim | None:
        """Return the valid version of a part of the model (fragment), by majority of the jobs' claims.

        A claim is the version and the checksum that a job reports for its copy of the fragment.
        Only members that are up to date vote, or all members if none is up to date.

        Args:
            fragment: Index of the fragment, a part of the model.
            members: Jobs whose claims count; None: all jobs that take part.

        Returns:
            The version (the round of the fragment's last outer step), with a checksum if a job reported
            it. None if every claimed version is later than the fragment's last outer step that the
            coordinator saw: no job can have such a version. (If it saw none, because it was
            restarted, versions up to the last round of the run are possible.)
        """
        if members is None:
            voters = self._state.participants()
        else:
            voters = [member for member in members if member.takes_part]
            voters.sort(key=lambda member: member.order)
        up_to_date = [member for member in voters if member.is_up_to_date]
        claims = [member.claims[fragment] for member in up_to_date or voters]
        return agreed_claim(claims, self._state.committed.get(fragment), self._state.number)

    def behind_reply(self, member: Member) -> Reply | None:
        """Return the verdict "behind" for a job whose weights are older than those of the other jobs.

        The reply names the fragments (parts of the model) that the job must take, and a donor: the job
        that it takes them from. The donor's name is stored in the member's `unchecked_donors`: its weights
        are checked when the member reports the next time. Donors are compared by these criteria; a later
        one counts only between donors that are equal by all earlier ones:

            1. It has not given this job wrong weights before.
            2. This job has not failed to take weights from it before.
            3. Its exchanges with this job have not failed.
            4. It has most of the fragments.
            5. It joined first.

        Returns:
            None if the job has the valid version of every fragment that another job could give it.
        """
        donors = self._donors(member)  # job -> fragments that it could give
        if not donors:
            return None

        def preference(name: str) -> tuple[bool, bool, bool, int, int]:
            return (
                name in member.distrusted_donors,
                name in member.failed_donors,
                self._state.failed_pairs.has_failed(name, member.name),
                -len(donors[name]),  # most fragments first
                self._state.members[name].order,  # the earliest one
            )

        donor_name = min(donors, key=preference)
        donor = self._state.members[donor_name]
        fragments = donors[donor_name]
        member.unchecked_donors.update(dict.fromkeys(fragments, donor_name))
        return {
            "verdict": "behind",
            "round": self._state.number,
            "from": donor_name,
            "incarnation": donor.incarnation,
            "fragments": fragments,
            "versions": [donor.claims[fragment].version for fragment in fragments],
        }

    def order_to_take(self, member: Member, now: float) -> Reply | None:
        """Return behind_reply(): the weights to take, and a donor with which this has not failed before.

        The reply is recorded, because it is sent to the job now. If the job's versions are those with which
        it got the last reply, it could not take weights from the donor of that reply: the connection may be
        broken. Then another donor is named, if there is one.

        Args:
            member: The job.
            now: Current time, in seconds.
        """
        versions = [claim.version for claim in member.claims]
        if versions != member.versions_when_ordered:
            member.failed_donors.clear()
        elif member.ordered_donor:
            member.failed_donors.add(member.ordered_donor)
        reply = self.behind_reply(member)
        member.ordered_donor = "" if reply is None else str(reply["from"])
        member.versions_when_ordered = versions
        if member.ordered_donor in member.failed_donors:  # all have failed: begin again
            member.failed_donors.clear()
        if reply is not None:
            member.orders_in_a_row += 1
            member.taking_since = now
        return reply

    def accept_claims(self, member: Member, claims: Iterable[Claim]) -> None:
        """Store the fragment versions that a job reports, and reject versions that cannot exist.

        A version is the round of a fragment's last outer step. If the job took weights from another
        job (a donor) and they were wrong, the donor is recorded and avoided from then on.

        A job that reconnects from another run may have later versions than this run. Its first
        report is accepted: it is told to take this run's weights. If it then still reports later
        versions, it is rejected.

        Args:
            member: The job.
            claims: Version and checksum of each fragment.

        Raises:
            HolmesError: The job claims an outer step that the run has not taken.
        """
        member.claims = list(claims)
        # An up-to-date job has this run's versions. So has a job that got "behind" and took weights.
        can_have_no_later_version = member.is_up_to_date or member.was_told_to_take_weights
        for fragment, claim in enumerate(member.claims):
            # A restarted coordinator has seen no step of the fragment: any version is possible.
            last_step = self._state.committed.get(fragment, claim.version)
            if can_have_no_later_version and claim.version > last_step:
                raise HolmesError(
                    f"fragment {fragment} cannot be of round {claim.version}: "
                    f"it was last stepped in round {last_step}"
                )
        self._record_lying_donors(member)
        # Without a reply "behind" there is no fragment that the job must take from another job.
        if not member.is_up_to_date and self.behind_reply(member) is None:
            member.is_up_to_date = True

    def _donors(self, member: Member) -> dict[str, list[int]]:
        """Return the jobs (donors) from which a job with outdated weights can take parts of the model.

        Args:
            member: The job that needs weights.

        Returns:
            Donor -> its fragments with the valid version, among those that `member` must take. Empty
            if all fragments of `member` are valid.
        """
        others = [other for other in self._state.participants() if other is not member]
        donors: dict[str, list[int]] = {}
        for fragment, claim in enumerate(member.claims):
            valid = self.valid_claim(fragment)
            if valid is None or is_compatible(claim, valid):
                continue
            for other in others:
                if is_compatible(other.claims[fragment], valid):
                    donors.setdefault(other.name, []).append(fragment)
        return donors

    def _record_lying_donors(self, member: Member) -> None:
        """Find donors that have sent wrong weights, and distrust them from now on.

        A donor is a job from which the member took a fragment of the valid version. If the member then
        reports that version with a wrong checksum, the donor is distrusted.

        Args:
            member: The job that took weights; its `distrusted_donors` gets the names.
        """
        for fragment, donor in list(member.unchecked_donors.items()):
            valid = self.valid_claim(fragment)
            if valid is None or member.claims[fragment].version != valid.version:
                continue  # the member has not taken the fragment yet, or a later step has changed it
            del member.unchecked_donors[fragment]
            if not is_compatible(member.claims[fragment], valid):
                member.distrusted_donors.add(donor)
                self._state.events.append(
                    f"job {donor} gave job {member.name} other weights than it has"
                )
