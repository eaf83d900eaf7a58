"""Majority rules by which the coordinator decides between contradicting reports of jobs.

The coordinator trusts no single job. Versions, checksums and accusations come from all jobs, and only
values that a majority (or the median) supports take effect. Pure functions: no clock, no network.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from holmes_ext.join.coordinator.reports import Claim
from holmes_ext.words import some_of

#: Number of accusers that is too few, however few jobs vote: a single job is not trusted.
_TOO_FEW_ACCUSERS = 1


def agreed_claim(claims: Sequence[Claim], committed: int | None, last: int) -> Claim | None:
    """Return the version and checksum of a fragment that the jobs' claims support best.

    A claim is the version (round of the last outer step) and checksum that a job reports for its
    copy of the fragment (part of the model). Claims of impossible versions are ignored: those later
    than `committed`, or later than `last` if `committed` is None.

    1. If this coordinator saw the last step, the highest version among the remaining claims wins.
    2. If it did not (it was restarted), the most frequent version is chosen. On a tie it is the
       median of the tied versions (of two, the higher). So if three jobs claim three versions, a
       liar cannot win with an extreme version.
    3. The checksum is the most frequent among the claims of that version, the earliest on a tie.

    Args:
        claims: A claim of each job, in the order of the jobs' first hellos.
        committed: Round of the fragment's last outer step that this coordinator saw; None: it saw
            none.
        last: Last round of the run; the jobs report it to a restarted coordinator.

    Returns:
        The agreed claim; None if no claim is left.
    """
    highest = last if committed is None else committed
    possible = [claim for claim in claims if claim.version <= highest]
    if not possible:
        return None
    if committed is None:
        most_frequent = statistics.multimode(claim.version for claim in possible)
        version = statistics.median_high(most_frequent)
    else:
        version = max(claim.version for claim in possible)
    checksums = [
        claim.checksum for claim in possible if claim.version == version and claim.checksum
    ]
    if not checksums:
        return Claim(version, checksum="")
    [(checksum, _)] = Counter(checksums).most_common(1)  # the earliest on a tie
    return Claim(version, checksum)


def is_compatible(claim: Claim, other: Claim) -> bool:
    """Return whether two claims can describe the same weights.

    A claim is the version (round of the last outer step) and the checksum that a job reports for
    its copy of a fragment (part of the model). The versions must be equal. The checksums must be
    equal, too, unless a checksum is missing ("").
    """
    if claim.version != other.version:
        return False
    if not claim.checksum or not other.checksum:
        return True
    return claim.checksum == other.checksum


def voted_out(votes: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return the jobs whose pseudo-gradients must not count in a round, with the reasons.

    A job is voted out if more than half of the other jobs, and at least two, accuse it. With fewer
    accusers there is a conflict between the accuser and the accused: one of them lies. If exactly
    one of the two has conflicts with several jobs, it is voted out. Otherwise both are.

    Args:
        votes: Voter -> accused job -> reason. All members of the round are voters, also those that
            accuse nobody; accusations of other jobs are ignored.

    Returns:
        Job that is voted out -> reason.
    """
    accusations: dict[str, dict[str, str]] = defaultdict(dict)  # accused -> voter -> reason
    for voter, reasons_by_accused in votes.items():
        for accused, reason in reasons_by_accused.items():
            if accused in votes and accused != voter:
                accusations[accused][voter] = reason

    # First the jobs that a majority accuses.
    half_of_the_others = (len(votes) - 1) / 2
    excluded: dict[str, str] = {}
    for accused, reasons in accusations.items():
        if len(reasons) > max(_TOO_FEW_ACCUSERS, half_of_the_others):
            first_reason = next(iter(reasons.values()))
            excluded[accused] = f"jobs {some_of(reasons)} accuse it: {first_reason}"

    # Then the conflicts: accusations without a majority, between jobs that are not voted out yet.
    conflicts: list[tuple[str, str]] = []  # (voter, accused)
    for accused, reasons in accusations.items():
        for voter in reasons:
            if accused not in excluded and voter not in excluded:
                conflicts.append((voter, accused))
    number_of_conflicts = Counter(name for conflict in conflicts for name in conflict)
    for voter, accused in conflicts:
        # A liar gets into conflict with several honest jobs, an honest job only with the liar.
        suspects = [name for name in (voter, accused) if number_of_conflicts[name] > 1]
        if len(suspects) != 1:  # neither or both: nothing tells the liar from the other job
            suspects = [voter, accused]
        reason = accusations[accused][voter]
        for name in suspects:
            excluded.setdefault(name, f"jobs {voter} and {accused} contradict each other: {reason}")
    return excluded


def accusations_from_digests(
    digests: Mapping[str, Mapping[str, str]],
) -> dict[str, dict[str, str]]:
    """Return the votes for `voted_out` that follow from digests of the received data.

    All jobs should have received identical data from a sender. A receiver whose digest differs from
    the most frequent digest accuses the sender. If the sender's digest of its own data differs from
    it, all receivers accuse the sender.

    Args:
        digests: Receiver -> sender -> digest of the data; each sender also reports its own data.

    Returns:
        Voter -> accused job -> reason.
    """
    votes: dict[str, dict[str, str]] = {name: {} for name in digests}
    senders = {sender for digest_of in digests.values() for sender in digest_of}
    for sender in senders:
        digest_by_receiver = {
            receiver: digest_of[sender]
            for receiver, digest_of in digests.items()
            if sender in digest_of
        }
        [(usual_digest, _)] = Counter(digest_by_receiver.values()).most_common(1)
        for receiver, digest in digest_by_receiver.items():
            if digest == usual_digest:
                continue
            if receiver != sender:
                votes[receiver][sender] = "what it sent to one is not what it sent to others"
                continue
            # The sender's own digest is unusual, so every job that received its data accuses it.
            for other in digest_by_receiver:
                votes[other][sender] = "what it sent is not what it says"
    return votes


def medians_by_key(documents: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each key's values, over the documents that contain the key.

    A single job cannot move a median far.
    """
    values: dict[str, list[float]] = defaultdict(list)
    for document in documents:
        for name, value in document.items():
            values[name].append(value)
    return {name: statistics.median_low(numbers) for name, numbers in values.items()}
