"""What the ranks of this job know of other jobs' ranks: who exchanges what, where they are called, and what
shows them whose call it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from holmes_ext.runtime.outer.peers.routes import Peer
from holmes_ext.runtime.outer.rounds.coordinator_link import CoordinatorLink
from holmes_ext.runtime.outer.rounds.in_flight import RemoteJob
from holmes_ext.runtime.outer.shards.ownership import RankRange


class RemoteJobs:
    """position: of this rank in the model-parallel grid; total: elements that it has there."""

    def __init__(self, coordinator: CoordinatorLink, position: str, total: int):
        self._coordinator, self._position, self._total = coordinator, position, total
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
                if not self._coordinator.on_all_ranks(made is not None):
                    continue
                assert made is not None
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
    return RemoteJob(ranges, {rank: Peer(name, incarnation, rank, addresses[rank], ticket) for rank in ranks})
