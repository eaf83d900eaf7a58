"""Comparison of the fragment versions that jobs report, and correction of jobs with other weights.

The version of a fragment is the round of its last outer step. The version that most of the current
jobs have is the valid one (consensus.py). A job with another version, for whatever reason (it is late
or new, loaded an older checkpoint, missed a message, lied), takes the fragment from a job that has
the valid one. The jobs hold all of this state, so the coordinator may be restarted at any time.
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
    """Versions of the fragments of a run, as its jobs claim them."""

    def __init__(self, state: RunState):
        self._state = state

    def valid_claim(self, fragment: int, members: Sequence[Member] | None = None) -> Claim | None:
        """Return the valid version of a fragment, by majority of the members' claims.

        Only members that are up to date vote (`current`), or all members if none is.

        Args:
            fragment: Index of the fragment.
            members: Jobs whose claims count; None: all jobs that take part.

        Returns:
            The version (the round of the fragment's last outer step), with a checksum if a job reported
            it; None if no job claims a possible version.
        """
        if members is None:
            voters = self._state.participants()
        else:
            voters = [member for member in members if member.takes_part]
            voters.sort(key=lambda member: member.order)
        trusted = [member for member in voters if member.current] or voters
        claims = [member.claims[fragment] for member in trusted]
        return agreed_claim(claims, self._state.committed.get(fragment), self._state.number)

    def correction(self, member: Member) -> Reply | None:
        """Return the verdict "behind" with the fragments that a job must take, and from which job.

        The donor is the job that has most of these fragments, the earliest of several. Donors that
        gave this job wrong weights before are avoided, if there are others.

        Returns:
            None if the job has the valid version of every fragment that another job could give it.
        """
        donors = self._donors(member)  # job -> fragments that it could give
        trusted_donors = {name: donors[name] for name in donors if name not in member.avoids}
        if not trusted_donors:
            trusted_donors = donors
        if not trusted_donors:
            return None

        def preference(name: str) -> tuple[int, int]:
            # Most fragments first, then the smallest number in the order of arrival.
            return len(trusted_donors[name]), -self._state.members[name].order

        donor_name = max(trusted_donors, key=preference)
        donor = self._state.members[donor_name]
        fragments = trusted_donors[donor_name]
        member.took.update(dict.fromkeys(fragments, donor_name))
        return {
            "verdict": "behind",
            "round": self._state.number,
            "from": donor_name,
            "incarnation": donor.incarnation,
            "fragments": fragments,
            "versions": [donor.claims[fragment].version for fragment in fragments],
        }

    def accept_claims(self, member: Member, claims: Iterable[Claim]) -> None:
        """Store the versions that a job claims, and check the weights that it took from other jobs (donors).

        Args:
            member: The job.
            claims: Version and checksum of each fragment.

        Raises:
            HolmesError: A version cannot exist. A job that returns from another run is not refused
                the first time, but corrected: it takes the valid weights.
        """
        member.claims = list(claims)
        # A job that had the valid weights, or was told to take them, cannot have later ones.
        is_bound = member.current or member.corrected
        for fragment, claim in enumerate(member.claims):
            last = self._state.committed.get(fragment, claim.version)
            if is_bound and claim.version > last:
                raise HolmesError(
                    f"fragment {fragment} cannot be of round {claim.version}: "
                    f"it was last stepped in round {last}"
                )
        self._judge_donors(member)
        if not member.current and self.correction(member) is None:  # there is nothing to take
            member.current = True

    def _donors(self, member: Member) -> dict[str, list[int]]:
        """Return job -> fragments of which it has the valid version and this member has not."""
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

    def _judge_donors(self, member: Member) -> None:
        """Record the donors that gave this member other weights than they claimed to have.

        After taking a fragment from a donor, the member must claim the valid version with the valid checksum.
        """
        for fragment, donor in list(member.took.items()):
            valid = self.valid_claim(fragment)
            if valid is None or member.claims[fragment].version != valid.version:
                continue  # the member has not taken the fragment yet, or a later step has changed it
            del member.took[fragment]
            if not is_compatible(member.claims[fragment], valid):
                member.avoids.add(donor)
                self._state.events.append(
                    f"job {donor} gave job {member.name} other weights than it has"
                )
