"""Which version of each fragment is true, and which jobs do not have it. Pure.

The version of a fragment is the round in which it was last stepped. What most of the current jobs
have is the truth (consensus.py); a job that has something else, whatever the reason (late, new, an
older checkpoint, a message lost, a lie), takes the fragment from one that has it. So the
coordinator keeps nothing that its jobs do not know, and may be restarted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holmes_ext.errors import HolmesError
from holmes_ext.join.coordinator.consensus import agreed_claim, is_compatible
from holmes_ext.join.coordinator.replies import Reply
from holmes_ext.join.coordinator.reports import Claim
from holmes_ext.join.coordinator.state import Member, RunState


class Versions:
    """Compares the versions that the jobs of a run claim to have."""

    def __init__(self, state: RunState):
        self._state = state

    def truth(self, fragment: int, members: Sequence[Member] | None = None) -> Claim | None:
        """Return the version that a fragment has, by the claims of members.

        Claims of current members decide, or those of all members if none is current.

        Args:
            members: The members whose claims count; None: all jobs that take part.

        Returns:
            The version, with a checksum if one is known. None: no member claims one that can exist.
        """
        if members is None:
            members = self._state.participants()
        else:
            members = sorted((m for m in members if m.takes_part), key=lambda member: member.order)
        trusted = [member for member in members if member.current] or members
        claims = [member.claims[fragment] for member in trusted]
        return agreed_claim(claims, self._state.committed.get(fragment), self._state.number)

    def correction(self, member: Member) -> Reply | None:
        """Return which fragments the job must take, and from whom; None: it has what is true.

        The donor is the job that has most of these fragments, the earliest of several, and if
        possible none that gave this job other weights before.
        """
        donors = self._donors(member)
        trusted = {name: donors[name] for name in donors if name not in member.avoids} or donors
        if not trusted:
            return None
        name = max(trusted, key=lambda name: (len(trusted[name]), -self._state.members[name].order))
        donor = self._state.members[name]
        fragments = trusted[name]
        member.took.update(dict.fromkeys(fragments, name))
        return {
            "verdict": "behind",
            "round": self._state.number,
            "from": name,
            "incarnation": donor.incarnation,
            "fragments": fragments,
            "versions": [donor.claims[fragment].version for fragment in fragments],
        }

    def accept_claims(self, member: Member, claims: Iterable[Claim]) -> None:
        """Store what a job says that it has, and judge the donors of what it took.

        Raises:
            HolmesError: A version cannot exist. A job that comes from a run that is over is not
                refused the first time: it is told to take what is true.
        """
        member.claims = list(claims)
        is_bound = member.current or member.corrected
        for fragment, claim in enumerate(member.claims):
            last = self._state.committed.get(fragment, claim.version)
            if is_bound and claim.version > last:
                raise HolmesError(
                    f"fragment {fragment} cannot be of round {claim.version}: "
                    f"it was last stepped in round {last}"
                )
        self._judge_donors(member)
        if not member.current and self.correction(member) is None:
            member.current = True

    def _donors(self, member: Member) -> dict[str, list[int]]:
        """Return the fragments that each other job has and this job has not."""
        others = [other for other in self._state.participants() if other is not member]
        donors: dict[str, list[int]] = {}
        for fragment, claim in enumerate(member.claims):
            truth = self.truth(fragment)
            if truth is None or is_compatible(claim, truth):
                continue
            for other in others:
                if is_compatible(other.claims[fragment], truth):
                    donors.setdefault(other.name, []).append(fragment)
        return donors

    def _judge_donors(self, member: Member) -> None:
        """Avoid the donors whose fragments turned out to be other weights than they claimed."""
        for fragment, donor in list(member.took.items()):
            truth = self.truth(fragment)
            if truth is None or member.claims[fragment].version != truth.version:
                continue
            del member.took[fragment]
            if not is_compatible(member.claims[fragment], truth):
                member.avoids.add(donor)
                self._state.events.append(
                    f"job {donor} gave job {member.name} other weights than it has"
                )
