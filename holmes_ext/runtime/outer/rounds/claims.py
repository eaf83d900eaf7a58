"""What a job says that it has: of each fragment the version and a checksum of its anchor and momentum."""

from __future__ import annotations

from collections.abc import Sequence

from holmes_ext.runtime.outer.shards.job_ranks import JobRanks
from holmes_ext.runtime.outer.shards.state import OuterState


class Claims:
    """Of one rank. told: versions and checksums as last computed, for the coordinator."""

    def __init__(self, state: OuterState, job_ranks: JobRanks):
        self._state, self._job_ranks = state, job_ranks
        self._sums: dict[int, tuple[int, int]] = {}
        count = len(state.fragments)
        self.told: dict[str, list] = {
            "versions": [f.promised for f in state.fragments],
            "checksums": [""] * count,
        }

    def renew(self, versions: Sequence[int]) -> dict[str, list]:
        """Collective. versions: those that training had when it submitted. What it had not applied then, and
        may be applying now, is promised, without a checksum; the others' anchors do not change while this
        thread reads them."""
        with self._state.lock:
            promised = [f.promised for f in self._state.fragments]
        still = [k for k, version in enumerate(versions) if promised[k] == version]
        unknown = [k for k in still if self._sums.get(k, (-1, 0))[0] != versions[k]]
        for k, total in zip(unknown, self._checksums(unknown, "")):
            self._sums[k] = (versions[k], total)
        checksums = [hexadecimal(self._sums[k][1]) if k in still else "" for k in range(len(promised))]
        self.told = {"versions": promised, "checksums": checksums}
        return self.told

    def salted(self, fragment: int, salt: str) -> str:
        """Another checksum of a fragment, that nobody could know before the salt. Collective."""
        return hexadecimal(self._checksums([fragment], salt)[0])

    def forget(self, fragment: int) -> None:
        """The anchor is another one, though its version is not."""
        self._sums.pop(fragment, None)

    def _checksums(self, fragments: Sequence[int], salt: str) -> list[int]:
        position = self._state.weights.position
        mine = [self._state.fragments[k].checksum(position, salt) for k in fragments]
        return self._job_ranks.sum_modulo(mine) if mine else []


def hexadecimal(value: int) -> str:
    """Of a sum modulo 2^64, as it is told."""
    return f"{value:016x}"
