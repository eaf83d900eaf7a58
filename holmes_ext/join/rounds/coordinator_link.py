"""What a job says to the coordinator, and hears from it (of other jobs, too), on all of its ranks at once:
rank 0 asks, all get the answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.join.coordinator.client import CoordinatorClient
from holmes_ext.join.peers.routes import Peer
from holmes_ext.join.shards.job_ranks import JobRanks
from holmes_ext.join.shards.ownership import RankRange
from holmes_ext.join.shards.state import OuterState
from holmes_ext.runtime.deadline import Deadline

#: Seconds for a coordinator that did not answer the last time.
_AWAY_S = 2.0
Verdict = dict[str, Any]


class CoordinatorLink:
    """client: rank 0's, None on the others. patience_s: of the job's settings.

    Until the job has entered, what the coordinator refuses ends it, with the coordinator's line. Afterwards
    nothing that it says, and nothing that it does not say, ends training: the round comes to nothing, with
    the reason.
    """

    def __init__(self, client: CoordinatorClient | None, job_ranks: JobRanks, patience_s: float):
        self.client, self._job_ranks, self._patience_s = client, job_ranks, patience_s
        self.entered = self._away = False

    def ask(self, op: str, document: Mapping[str, Any]) -> Verdict:
        """Collective. Of what is not a verdict, a void one is made."""
        answer: Verdict = {}
        if self._job_ranks.rank == 0:
            answer = self._answer(op, document)
        answer = self._job_ranks.from_first(answer)
        if "refused" in answer:
            self._job_ranks.refuse(answer["refused"])
        return answer

    def salt_of(self, number: int) -> str:
        """For summing up a fragment in this round, or ""; rank 0's, on all ranks."""
        known = self.client.salt if self.client is not None else (0, "")
        known = self._job_ranks.from_first(list(known))
        return str(known[1]) if known[0] == number else ""

    def _answer(self, op: str, document: Mapping[str, Any]) -> Verdict:
        assert self.client is not None
        seconds = _AWAY_S if self._away else 2 * self._patience_s + 10
        try:
            answer = self.client.ask(op, document, Deadline(seconds, "the coordinator"))
            self._away = False
            if isinstance(answer.get("verdict"), str):
                return answer
            why = "the coordinator's answer cannot be read"
        except HolmesError as error:
            why = str(error)
            if not self.entered:
                return {"refused": why}
        except TimeoutError as error:
            self._away, why = True, str(error)
        return {"verdict": "void", "round": int(document.get("round", 0)), "why": why}


class Claims:
    """What a job says that it has: of each fragment the version and a checksum of its anchor and momentum. Of
    one rank. told: versions and checksums as last computed, for the coordinator."""

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
        checksums = [
            hexadecimal(self._sums[k][1]) if k in still else "" for k in range(len(promised))
        ]
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


@dataclass(frozen=True)
class RemoteJob:
    """What this rank knows of an incarnation of another job: who exchanges what at this position, and
    where."""

    ranges: list[RankRange]
    peers: dict[int, Peer]


class RemoteJobs:
    """What the ranks of this job know of other jobs' ranks: who exchanges what, where they are called, and
    what shows them whose call it is. position: of this rank in the model-parallel grid; total: elements that
    it has there."""

    def __init__(
        self, coordinator: CoordinatorLink, job_ranks: JobRanks, position: str, total: int
    ):
        self._coordinator, self._job_ranks = coordinator, job_ranks
        self._position, self._total = position, total
        self._known: dict[tuple[str, str], RemoteJob] = {}

    def names(self) -> list[str]:
        return sorted({name for name, _ in self._known})

    def learn(self, incarnations: Mapping[str, str]) -> tuple[dict[str, RemoteJob], frozenset[str]]:
        """Of each of these jobs; and those of whom nothing can be learnt any more. Collective."""
        jobs: dict[str, RemoteJob] = {}
        for name, incarnation in incarnations.items():
            if (name, incarnation) not in self._known:
                answer = self._coordinator.ask("maps", {"of": name})
                if answer.get("incarnation") != incarnation:
                    continue
                made = remote_job(name, answer, self._position, self._total)
                fits = self._job_ranks.from_all(made is not None)
                if made is None or not all(fits):
                    continue
                self.forget([name])
                self._known[name, incarnation] = made
            jobs[name] = self._known[name, incarnation]
        return jobs, frozenset(incarnations) - frozenset(jobs)

    def forget(self, names: Iterable[str]) -> None:
        """They are learnt anew: they could not be reached."""
        gone = set(names)
        self._known = {key: job for key, job in self._known.items() if key[0] not in gone}


def remote_job(name: str, answer: Mapping[str, Any], position: str, total: int) -> RemoteJob | None:
    """Of the coordinator's answer to "maps"; None where it does not fit this job."""
    flat, addresses = answer["maps"].get(position, ()), answer["addresses"]
    ranges = [RankRange(*numbers) for numbers in zip(flat[::3], flat[1::3], flat[2::3])]
    if not ranges or ranges[-1].stop != total:
        return None
    ranks = {span.rank for span in ranges}
    incarnation, ticket = str(answer["incarnation"]), str(answer.get("ticket", ""))
    return RemoteJob(
        ranges, {rank: Peer(name, incarnation, rank, addresses[rank], ticket) for rank in ranks}
    )
