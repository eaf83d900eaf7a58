"""Which of the things that jobs say is so: no single job is believed. Pure."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from holmes_ext.join.coordinator.reports import Claim


def agreed_claim(claims: Sequence[Claim], committed: int | None, last: int) -> Claim | None:
    """What a fragment is, of the claims of jobs in the order in which they came; None where nobody has it.

    committed: the last round in which this coordinator saw it stepped; last: the last round of the run, also
    known where it saw no step (it was restarted). A higher version cannot exist. Where it saw no step the
    version that most claim is so; of several that equally many claim the middle one, which no single job of
    three can choose, and the higher one of two. Of those who claim that version, the checksum that most tell,
    the earliest of two.
    """
    most = last if committed is None else committed
    possible = [claim for claim in claims if claim.version <= most]
    if not possible:
        return None
    if committed is None:
        version = statistics.median_high(statistics.multimode(claim.version for claim in possible))
    else:
        version = max(claim.version for claim in possible)
    checksums = [
        claim.checksum for claim in possible if claim.version == version and claim.checksum
    ]
    return Claim(version, Counter(checksums).most_common(1)[0][0] if checksums else "")


def same(claim: Claim, other: Claim) -> bool:
    """Whether they can be the same bits; a checksum that is not told says nothing."""
    return claim.version == other.version and (
        not claim.checksum or claim.checksum == (other.checksum or claim.checksum)
    )


def voted_out(votes: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Jobs whose contribution does not count, with the reason. votes: by voter, the jobs that it accuses, and
    of what.

    Who is accused by more than half of the others, and by two at least, is out. Where fewer accuse him, one
    of the two lies, and which one cannot be known: out is who stands in several such conflicts, else both.
    """
    voters = set(votes)
    against: dict[str, dict[str, str]] = defaultdict(dict)
    for voter, faults in votes.items():
        for accused, reason in faults.items():
            if accused in voters and accused != voter:
                against[accused][voter] = reason
    out = {
        name: next(iter(reasons.values()))
        for name, reasons in against.items()
        if len(reasons) > max(1, (len(voters) - 1) / 2)
    }
    conflicts = [
        (voter, accused)
        for accused, reasons in against.items()
        for voter in reasons
        if accused not in out and voter not in out
    ]
    times = Counter(name for pair in conflicts for name in pair)
    for voter, accused in conflicts:
        several = [name for name in (voter, accused) if times[name] > 1]
        for name in several if len(several) == 1 else (voter, accused):
            out.setdefault(
                name, f"jobs {voter} and {accused} contradict each other: {against[accused][voter]}"
            )
    return out


def differing(digests: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """votes for voted_out(), from what each job got of each other one: who got something else accuses the
    sender."""
    votes: dict[str, dict[str, str]] = {name: {} for name in digests}
    for sender in {name for received in digests.values() for name in received}:
        values = {
            name: received[sender] for name, received in digests.items() if sender in received
        }
        usual = Counter(values.values()).most_common(1)[0][0]
        for name, value in values.items():
            if value != usual and name != sender:
                votes[name][sender] = "what it sent to one is not what it sent to others"
            elif (
                value != usual
            ):  # its own account of what it sent is another one than all others got
                for other in values:
                    votes[other][sender] = "what it sent is not what it says"
    return votes


def middle(documents: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Of each key the median of all documents that have it: one alone cannot move it far."""
    values: dict[str, list[float]] = defaultdict(list)
    for document in documents:
        for name, value in document.items():
            values[name].append(value)
    return {name: statistics.median_low(numbers) for name, numbers in values.items()}
