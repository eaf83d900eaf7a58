"""Taking of fragments from another job with newer weights, on all ranks of this job at once.

The coordinator's verdict "behind" names the other job (the donor), the fragments (parts of the model), and
their versions (rounds of the last outer steps). A fragment has an anchor (weights after the last outer step)
and mostly a momentum, as long as the anchor:

    at the start of a job    take_to_begin()     the main thread takes the anchors; training begins with them
                             take_momenta()      the rounds thread takes the momenta while the first inner
                                                 steps run. No outer step needs them earlier
    later                    take()              anchors and momenta together

So a restarted job trains again after half of the bytes. If the donor takes an outer step in between, the
momentum does not belong to the anchor: the fragment gets version 0, and the job takes it again in its first
round.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from holmes_ext.join.peers.routes import Routes
from holmes_ext.join.peers.take import ANCHOR, MOMENTUM, Donor, Store, take_fragments
from holmes_ext.join.rounds.coordinator_link import Claims, RemoteJobs, Verdict
from holmes_ext.join.rounds.in_flight import RoundResult
from holmes_ext.join.settings import OuterSettings
from holmes_ext.join.shards.job_ranks import JobRanks
from holmes_ext.join.shards.ownership import RankRange
from holmes_ext.join.shards.state import OuterState


class WeightTaker:
    """Replaces this rank's outdated parts of the model (fragments) by those of another job.

    A fragment consists of its anchor (weights after the last outer step) and the outer momentum.
    All ranks of the job call a method together, when the coordinator has found the job's weights outdated:
    when the job starts, or later if it has missed outer steps.
    """

    def __init__(
        self,
        settings: OuterSettings,
        state: OuterState,
        ranges: list[RankRange],
        job_ranks: JobRanks,
        routes: Routes,
        remote: RemoteJobs,
        claims: Claims,
    ):
        """Prepare for transfers; no fragment is replaced yet.

        Args:
            settings: The --holmes-outer settings.
            state: Outer state of this rank; its fragments are replaced.
            ranges: Elements that each rank of this job exchanges.
            job_ranks: Collectives over the ranks of this job.
            routes: Opens connections to ranks of other jobs.
            remote: Ranks of the other jobs.
            claims: Checksums of this job's fragments; they are outdated after a replacement.
        """
        self._settings = settings
        self._state = state
        self._ranges = ranges
        self._job_ranks = job_ranks
        self._routes = routes
        self._remote = remote
        self._claims = claims
        # Verdict "behind" by which take_to_begin() took anchors, until take_momenta() takes their momenta.
        self._verdict_of_anchors: Verdict | None = None
        # Is complete when no momentum is missing; gets the error of take_momenta(), if any.
        self._momenta_taken: Future[None] = Future()
        self._momenta_taken.set_result(None)  # no momentum is missing at first

    def take(
        self, verdict: Verdict, store: Store, tensors: Sequence[str] = (ANCHOR, MOMENTUM)
    ) -> RoundResult:
        """Take parts of the model (fragments) from a job with newer weights; collective.

        Args:
            verdict: The coordinator's verdict "behind": name and start of the other job ("from" and
                "incarnation"), and the fragments with their versions.
            store: Called for each fragment that was taken, with its version, anchor (weights after the last
                outer step) and momentum; a method of OuterState.
            tensors: The tensors to take: ANCHOR, MOMENTUM or both.

        Returns:
            A result with verdict "taken", or "void" with the reason.
        """
        name = str(verdict["from"])
        number = int(verdict["round"])
        fragments = map(int, verdict["fragments"])
        versions = map(int, verdict["versions"])
        wanted = dict(zip(fragments, versions))  # fragment -> least version
        found = self._remote.find({name: str(verdict["incarnation"])})
        if found.missing:  # the job has ended or restarted since the verdict
            why = f"job {name}, which has newer weights, is gone again"
            return RoundResult("void", number, why)
        donor_job = found.jobs[name]
        donor = Donor(self._ranges, donor_job.ranges, donor_job.peers, self._routes)
        patience_s = self._settings.timeout
        why = take_fragments(
            self._state, wanted, donor, self._job_ranks, patience_s, store, tensors
        )
        # The checksums that were computed of the replaced fragments are outdated. This is so even after a
        # failure, because some fragments may have been taken before it.
        for fragment in wanted:
            self._claims.forget(fragment)
        if why:
            self._remote.forget([name])
            why = f"the weights of job {name} could not be taken: {why}"
            return RoundResult("void", number, why)
        return RoundResult("taken", number, source=name, fragments=list(wanted))

    def take_to_begin(self, verdict: Verdict) -> RoundResult:
        """Take the weights that the job needs to begin training from another job; collective.

        These are the anchors (weights after the last outer step) of the parts of the model in a verdict
        "behind". The outer momenta are not needed before the first outer step: take_momenta() takes them
        while training runs, if the outer algorithm has momenta.

        Returns:
            A result with verdict "taken", or "void" with the reason.
        """
        if not self._settings.outer_algorithm().keeps_momentum:
            return self.take(verdict, self._state.replace)
        # replace_anchor() also marks a fragment as lacking its momentum.
        result = self.take(verdict, self._state.replace_anchor, [ANCHOR])
        if result.verdict == "taken":
            self._verdict_of_anchors = verdict
            self._momenta_taken = Future()
        return result

    def take_momenta(self) -> None:
        """Take the outer momenta that belong to the weights of take_to_begin(), if any; collective.

        A part of the model (fragment) whose momentum cannot be taken gets version 0, which is outdated. So
        the coordinator lets the job take it again in its first round. Errors are raised later, by
        wait_for_momenta().
        """
        verdict = self._verdict_of_anchors
        self._verdict_of_anchors = None
        if verdict is None:
            # Training has not begun with another job's anchors. But a failed attempt to take anchors may
            # have replaced some.
            self._state.give_up_incomplete()
            return
        fragments = [int(index) for index in verdict["fragments"]]
        versions = [self._state.fragments[index].version for index in fragments]
        try:
            self.take({**verdict, "versions": versions}, self._state.add_momentum, [MOMENTUM])
            self._state.give_up_incomplete()
        except BaseException as error:  # noqa: BLE001 - raised by wait_for_momenta()
            self._momenta_taken.set_exception(error)
        else:
            self._momenta_taken.set_result(None)

    def wait_for_momenta(self) -> None:
        """Wait until take_momenta() has ended, if take_to_begin() has taken weights without momenta.

        Raises:
            BaseException: The error that ended take_momenta(), such as a failed collective.
        """
        self._momenta_taken.result()
