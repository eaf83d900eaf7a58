"""Requests of a joined job to the coordinator, on all its ranks at once, and facts about other jobs.

All functions that send requests are collective: rank 0 sends the request, and broadcasts the reply to the
other ranks of the job. So all ranks get the same verdict.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from holmes_ext.errors import HolmesError
from holmes_ext.join.coordinator.client import CoordinatorClient, RoundSalt
from holmes_ext.join.peers.routes import Peer
from holmes_ext.join.shards.job_ranks import JobRanks
from holmes_ext.join.shards.ownership import RankRange
from holmes_ext.join.shards.state import OuterState
from holmes_ext.join.sockets.handshake import Credentials
from holmes_ext.runtime.deadline import Deadline

#: Seconds to wait for a coordinator that did not answer the last request, and can be reached again.
_AWAY_S = 2.0
#: Seconds to wait for the coordinator beyond two timeouts of the job.
_EXTRA_S = 10.0
#: Reply of the coordinator: its key "verdict" names the next step of the job.
Verdict = dict[str, Any]


class CoordinatorLink:
    """Requests of a job to the coordinator: rank 0 sends them and broadcasts the replies.

    Until the job has entered the run (the coordinator has let it begin training), a refusal ends the
    job with the coordinator's message. Afterwards neither a refusal nor silence ends training: the
    reply is then "void", with the reason.
    """

    def __init__(
        self,
        client: CoordinatorClient | None,
        job_ranks: JobRanks,
        patience_s: float,
        credentials: Credentials,
    ):
        """Prepare for requests; nothing is sent yet.

        Args:
            client: Connection of rank 0 to the coordinator; None on the other ranks.
            job_ranks: Collectives over the ranks of the job.
            patience_s: Seconds that the job waits for other jobs (its setting `timeout`). A reply may
                take twice as long, because the coordinator itself waits for the other jobs.
            credentials: Certificate and CA of this rank, with its list of revoked certificates. Replies
                update that list.
        """
        self.client = client
        self._credentials = credentials
        self._job_ranks = job_ranks
        self._patience_s = patience_s
        #: Whether the coordinator has let the job begin training; set by RoundRunner.
        self.entered = False
        self._is_away = False  # the coordinator did not answer the last request

    def ask(self, op: str, document: Mapping[str, Any]) -> Verdict:
        """Send a request from rank 0, and return the coordinator's reply on all ranks; collective.

        Args:
            op: Type of the request, such as "ready".
            document: The other keys of the request; only that of rank 0 is sent.

        Raises:
            HolmesError: The coordinator refuses the job before it has begun to train in the run.
        """
        answer: Verdict = {}
        if self._job_ranks.rank == 0:
            answer = self._ask_on_rank_0(op, document)
        answer = self._job_ranks.broadcast_from_rank_0(answer)
        if "revoked" in answer:
            self._credentials.revoke(map(str, answer["revoked"]))
        if "refused" in answer:
            self._job_ranks.refuse(answer["refused"])
        return answer

    def salt_of(self, number: int) -> str:
        """Return the coordinator's salt for a round, "" if rank 0 does not have it; collective.

        The salt is a random text that goes into the checksum of the job's weights, so that no job
        can report a checksum that it has copied from another job. It came with the reply to an
        earlier request.
        """
        latest = self.client.salt if self.client is not None else RoundSalt(0, "")
        round_number, salt = self._job_ranks.broadcast_from_rank_0(list(latest))
        return str(salt) if round_number == number else ""

    def _ask_on_rank_0(self, op: str, document: Mapping[str, Any]) -> Verdict:
        """Send a request from rank 0; return the coordinator's verdict, or a result for an error.

        Rank 0 must not raise errors here, because the other ranks wait for its broadcast.

        Returns:
            The coordinator's reply. Without a usable reply: {"refused": reason} if the coordinator
            refuses the job before it has entered the run (all ranks then raise the reason);
            otherwise the verdict "void" with the reason, so that training goes on without the
            round.
        """
        assert self.client is not None
        void = {"verdict": "void", "round": int(document.get("round", 0))}
        if self._is_away and self.client.is_away:
            # The last request had no answer, and the heartbeat thread has not reached the coordinator
            # since then. So do not delay training with another request.
            why = "the coordinator did not answer, and cannot be reached yet"
            return {**void, "why": why, "is_away": True}
        # A round for which few jobs are ready begins after two timeouts (lock_step.py).
        seconds = 2 * self._patience_s + _EXTRA_S
        if self._is_away:
            seconds = _AWAY_S
        try:
            answer = self.client.ask(op, document, Deadline(seconds, "the coordinator"))
            self._is_away = False
            if isinstance(answer.get("verdict"), str):
                return answer
            why = "the coordinator's answer cannot be read"
        except HolmesError as error:
            why = str(error)
            if not self.entered:
                return {"refused": why}
        except TimeoutError as error:
            # A coordinator that answers "wait" is not away: it waits for other jobs.
            self._is_away = not self.client.answers
            if self._is_away:
                self.client.look_again()
            why = str(error)
        return {**void, "why": why}


class _CachedChecksum(NamedTuple):
    """Checksum of the outer state of a part of the model, and the version (last outer step) of the state."""

    version: int
    checksum: int


class Claims:
    """Versions and checksums of a job's fragments, as it reports them to the coordinator.

    The version of a fragment (part of the model) is the round of its last outer step. The checksum covers the
    fragment's anchor (weights after that step) and momentum, on all ranks of the job. It is computed once for
    each version.
    """

    def __init__(self, state: OuterState, job_ranks: JobRanks):
        self._state = state
        self._job_ranks = job_ranks
        self._cache: dict[int, _CachedChecksum] = {}  # by fragment
        #: Latest report, sent again if the job must reconnect: "versions" and "checksums" ("": unknown)
        #: of all fragments.
        self.latest_report: dict[str, list] = {
            "versions": [fragment.version_after_pending for fragment in state.fragments],
            "checksums": [""] * len(state.fragments),
        }

    def renew(self, submitted_versions: Sequence[int]) -> dict[str, list]:
        """Return versions and checksums of all fragments (parts of the model), to report; collective.

        The version of a fragment is the round of its last outer step. Outer steps of committed rounds
        that training has not applied yet (pending steps) count as taken. A fragment with such a step
        has no checksum: it can be computed only after the step.

        Args:
            submitted_versions: Version of each fragment, without pending steps, when training submitted
                its latest pseudo-gradient; equal on all ranks of the job. (The current versions are not,
                because training applies a step on one rank sooner than on another.)

        Returns:
            "versions" and "checksums", lists with an entry for each fragment. A checksum is "" if the
            fragment had a pending step at that submission.
        """
        with self._state.lock:
            reported_versions = [
                fragment.version_after_pending for fragment in self._state.fragments
            ]
        without_pending_step = [
            index
            for index, submitted_version in enumerate(submitted_versions)
            if submitted_version == reported_versions[index]
        ]
        without_cached_checksum = []
        for index in without_pending_step:
            cached = self._cache.get(index)
            if cached is None or cached.version != reported_versions[index]:
                without_cached_checksum.append(index)
        new_checksums = self._checksums(without_cached_checksum, salt="")
        for index, checksum in zip(without_cached_checksum, new_checksums):
            self._cache[index] = _CachedChecksum(reported_versions[index], checksum)
        checksums = [""] * len(reported_versions)
        for index in without_pending_step:
            checksums[index] = hexadecimal(self._cache[index].checksum)
        self.latest_report = {"versions": reported_versions, "checksums": checksums}
        return self.latest_report

    def salted(self, fragment: int, salt: str) -> str:
        """Return the checksum of a part of the model and a salt, a random text; collective.

        The salt is new in each round. So only a job that has the weights can compute the checksum.
        """
        return hexadecimal(self._checksums([fragment], salt)[0])

    def forget(self, fragment: int) -> None:
        """Forget the checksum of a part of the model that was replaced by another job's weights."""
        self._cache.pop(fragment, None)

    def _checksums(self, fragments: Sequence[int], salt: str) -> list[int]:
        """Return checksums of parts of the model over all ranks; collective unless `fragments` is empty."""
        position = self._state.weights.position
        of_this_rank = [
            self._state.fragments[index].checksum(position, salt) for index in fragments
        ]
        if not of_this_rank:
            return []
        return self._job_ranks.all_reduce_checksums(of_this_rank)


def hexadecimal(value: int) -> str:
    """Return a checksum (modulo 2^64) as 16 hexadecimal digits."""
    return f"{value:016x}"


@dataclass(frozen=True)
class RemoteJob:
    """Ranks of another job with which this rank may exchange elements, and the elements of each.

    Only ranks at this rank's position in the model-parallel grid are included.
    """

    ranges: list[RankRange]  # elements that each rank exchanges
    peers: dict[int, Peer]  # rank -> its identity and address


class FoundJobs(NamedTuple):
    """Result of RemoteJobs.find(): ranks of the jobs that were found, and names of the other jobs."""

    jobs: dict[str, RemoteJob]  # by name
    missing: frozenset[str]  # names of jobs whose ranks cannot be found any more


class RemoteJobs:
    """Cache of the ranks of other jobs: the elements that they exchange, and their addresses.

    Args:
        coordinator: Sends requests to the coordinator, which lists the ranks of all jobs.
        job_ranks: Collectives over the ranks of this job.
        position: Position of this rank in the model-parallel grid.
        total: Number of elements at this position.
    """

    def __init__(
        self, coordinator: CoordinatorLink, job_ranks: JobRanks, position: str, total: int
    ):
        self._coordinator = coordinator
        self._job_ranks = job_ranks
        self._position = position
        self._total = total
        self._cache: dict[tuple[str, str], RemoteJob] = {}  # (job, incarnation) -> its ranks

    def names(self) -> list[str]:
        """Return the names of all jobs in the cache."""
        return sorted({name for name, _ in self._cache})

    def find(self, incarnations: Mapping[str, str]) -> FoundJobs:
        """Return the ranks of the given jobs, looked up at the coordinator if necessary; collective.

        A job is missing in the result if it is gone or was restarted, or if its elements at some
        position of the model-parallel grid differ in number from those of this job.

        The caches of this job's ranks have the same jobs, because all ranks decide by the same
        replies. So all ranks take part in the same lookups.

        Args:
            incarnations: Job -> incarnation (random text that identifies a start of the job).
        """
        jobs: dict[str, RemoteJob] = {}
        for name, incarnation in incarnations.items():
            if (name, incarnation) not in self._cache:
                answer = self._coordinator.ask("maps", {"of": name})
                if answer.get("incarnation") != incarnation:
                    continue  # the job is gone, or was restarted
                # None: the job has another number of elements at the position of this rank.
                job = remote_job(name, answer, self._position, self._total)
                fits_on_ranks = self._job_ranks.all_gather(job is not None)
                if job is None or not all(fits_on_ranks):
                    continue
                self.forget([name])  # earlier starts of the job
                self._cache[name, incarnation] = job
            jobs[name] = self._cache[name, incarnation]
        return FoundJobs(jobs, missing=frozenset(incarnations) - frozenset(jobs))

    def forget(self, names: Iterable[str]) -> None:
        """Remove jobs from the cache, because they could not be reached."""
        forgotten = set(names)
        self._cache = {
            (name, incarnation): job
            for (name, incarnation), job in self._cache.items()
            if name not in forgotten
        }


def remote_job(name: str, answer: Mapping[str, Any], position: str, total: int) -> RemoteJob | None:
    """Parse the coordinator's reply about the ranks of another job.

    Args:
        name: The other job.
        answer: The reply to the request "maps". It has the elements and address of each rank, and
            the incarnation (start) of the job.
        position: Position of this rank in the model-parallel grid.
        total: Number of elements at this position.

    Returns:
        The other job's ranks at this position; None if they do not have `total` elements.
    """
    flat = answer["maps"].get(position, ())  # start, stop, rank, start, stop, rank, ...
    addresses = answer["addresses"]
    ranges = [
        RankRange(start, stop, rank) for start, stop, rank in zip(flat[::3], flat[1::3], flat[2::3])
    ]
    # The ranges are in order and without holes, so the last range ends at the number of elements.
    if not ranges or ranges[-1].stop != total:
        return None
    incarnation = str(answer["incarnation"])
    peers = {
        rank: Peer(name, incarnation, rank, addresses[rank])
        for rank in {span.rank for span in ranges}
    }
    return RemoteJob(ranges, peers)
