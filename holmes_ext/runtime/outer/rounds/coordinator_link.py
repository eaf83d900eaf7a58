"""What a job says to the coordinator, and hears from it, on all of its ranks at once: rank 0 asks, all get
the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.runtime.outer.coordinator.client import CoordinatorClient
from holmes_ext.runtime.outer.shards.job_ranks import JobRanks
from holmes_ext.runtime.sockets.deadline import Deadline

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

    def on_all_ranks(self, well: bool) -> bool:
        """Whether it is well on all of them. Collective."""
        return self._job_ranks.least([int(well)])[0] == 1

    def salt_of(self, number: int) -> str:
        """For summing up a fragment in this round, or ""; rank 0's, on all ranks."""
        known = self.client.salt if self.client is not None else (0, "")
        known = self._job_ranks.from_first(list(known))
        return str(known[1]) if known[0] == number else ""

    def _answer(self, op: str, document: Mapping[str, Any]) -> Verdict:
        assert self.client is not None
        seconds = _AWAY_S if self._away else 2 * self._patience_s + 10
        number = int(document.get("round", 0))
        try:
            answer = self.client.ask(op, document, Deadline(seconds, "the coordinator"))
            self._away = False
            if isinstance(answer.get("verdict"), str):
                return answer
            return {"verdict": "void", "round": number, "why": "the coordinator's answer cannot be read"}
        except HolmesError as error:
            if not self.entered:
                return {"refused": str(error)}
            return {"verdict": "void", "round": number, "why": str(error)}
        except TimeoutError as error:
            self._away = True
            return {"verdict": "void", "round": number, "why": str(error)}
