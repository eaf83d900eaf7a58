"""Re-plans a running job: ranks measure steps, rank 0 chooses a change, all adopt it together.

On each rank, in the training thread (T) or in a thread of its own (L):

    1  L  _measure()          collects the measurements of a few steps; on_step() (T) queues them
    2  L  Vote.run_ballot()   rank 0 proposes a change (Deciding.propose), and all ranks vote on it
    3  L  StepBoundary        holds the change until this rank reaches the first step with it
    4  T  begin_step()        adopts the change at the beginning of that step

The first step is not measured, because it also sets up the engine. A change begins some steps after
rank 0 has proposed it (deciding.py). After an error in thread L, the plan stays as it is, and a
line is printed.

No rank waits for ever: the training thread waits for no other rank, and the votes have a time limit
(vote.py).
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from holmes_ext.adapt import restart
from holmes_ext.adapt.deciding import Deciding, change_of
from holmes_ext.adapt.pipeline import Change, Restart
from holmes_ext.adapt.reductions import ReductionChange
from holmes_ext.adapt.sums import ReductionWindow, fits
from holmes_ext.adapt.vote import ADOPT_CHANGE, KEEP_PLAN, StepBoundary, Stopped, Vote
from holmes_ext.adapt.window import StepWindow
from holmes_ext.plan.sizes import Sizes
from holmes_ext.plan.traffic import VERBS
from holmes_ext.runtime.measure import telemetry
from holmes_ext.runtime.measure.stage import Stage
from holmes_ext.runtime.session import Session
from holmes_ext.runtime.start.store import ENDED_S, STORE_S, connect, leave_layers
from holmes_ext.words import tell_user

#: First step that is measured. The step before loads modules and connects ranks.
FIRST_MEASURED_STEP = 2
#: Number of steps that are measured before each proposal; their medians count.
STEPS_PER_WINDOW = 2
#: How often re-planning may start again in a job whose sizes or micro-batches change (a growing
#: batch). Then it stays off.
MOST_STARTS = 50


class Replanner:
    """Thread that measures the steps of this rank, and votes with the other ranks on a new plan."""

    def __init__(
        self,
        current: Session,
        sizes: Sizes,
        network_api: str,
        stage: Stage,
        recorder: telemetry.Recorder,
        open_store: Callable[[], Any],
        tell: Callable[[str], None],
        put: Callable[[dict[str, Any]], None],
        start: int = 1,
    ):
        """Start a thread that measures steps and votes on changes, beside the training thread.

        Args:
            current: State of holmes in this process.
            sizes: Complete parallel sizes of the job.
            network_api: VERBS for NCCL, SOCKETS for gloo: of the pipeline's groups, or of the
                data-parallel groups if there is no pipeline.
            stage: Pipeline stage of this rank.
            recorder: Reports the measurements of each step.
            open_store: Returns a new client of the job's store, for the thread.
            tell: Prints a line for the user; called on rank 0.
            put: Writes a document to the telemetry file.
            start: How often re-planning has started in this job, now included (it starts again
                when the batch size changes). The keys in the store contain this number, so that a
                new start does not read old keys.
        """
        self.current = current
        self.sizes = sizes
        self.network_api = network_api
        self.stage = stage
        self.recorder = recorder
        self.tell = tell
        self.put = put
        self.stopped = threading.Event()
        self._start = start
        self.deciding = Deciding(current, sizes, network_api, tell, put)
        self.boundary = StepBoundary(self._verdict_now)
        self._open_store = open_store
        self._steps: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._vote: Vote | None = None
        #: Number of checkpoints after which the job restarts; None without an agreed restart.
        self._restart_after: int | None = None
        self._thread = threading.Thread(target=self._serve, name="holmes adapt", daemon=True)
        self._thread.start()

    # The training thread

    def begin_step(self) -> None:
        """Begin a training step, and adopt a change that all ranks have agreed to begin with it.

        All ranks call this method before each step. If all ranks have agreed on a restart of the
        job, they still train until the next checkpoint is complete. Then this method ends the
        process, and torchrun starts it again.
        """
        if self._restart_after is not None and restart.checkpoints() > self._restart_after:
            # A checkpoint is complete since all ranks agreed on a restart, so no step is lost.
            # leave() waits for the other ranks and ends the process; it does not return.
            restart.leave(
                self.current.store, self.current.key_prefix, self.current.process.world_size
            )
        # The boundary counts steps and keeps the change that the ranks have agreed on. Here it
        # returns the change that all ranks adopt with this step, or None.
        change = self.boundary.begin()
        if isinstance(change, Restart):
            # The job goes on until another checkpoint is complete.
            self._restart_after = restart.checkpoints()
            if self.current.rank == 0:  # store the layers for the next start of the job
                leave_layers(self.current.store, change.partition, self.sizes)
                self.tell(
                    f"the job starts again after its next checkpoint: {change.text} {change.effect_text}"
                )
        elif change is not None:
            self._adopt(change)

    def _adopt(self, change: Change | ReductionChange) -> None:
        """Use the changed plan on this rank from now on; rank 0 also writes it to the telemetry.

        Args:
            change: Change of the micro-batches in flight, or of the algorithms that reduce
                gradients. It may take back an earlier change (`takes_back`).
        """
        changes_sums = isinstance(change, ReductionChange)
        plan = self.current.plan_for(self.sizes)
        in_flight = list(plan.traffic_of(self.network_api).in_flight)
        self.current.adopt(self.sizes, change.adapted(plan, self.network_api), changes_sums)
        if self.current.rank != 0:
            return
        document: dict[str, Any] = {"step": self.recorder.step}
        # "before", "in_flight": micro-batches in flight by stage, before and after the change. They
        # are equal if the reductions change.
        if isinstance(change, ReductionChange):
            document |= {"before": in_flight, "in_flight": in_flight, "sums": change.text}
        else:
            document |= {"before": change.before, "in_flight": change.in_flight}
        document |= {"now_s": change.now_s, "then_s": change.then_s, "back": change.takes_back}
        self.put({"plan": document})

    def on_step(
        self,
        step: int,
        begin: float,
        end: float,
        tokens: int,
        done: Any,
        spans: Any,
        reduction: Any,
    ) -> None:
        """Pass the measurements of a step to the thread that measures steps and changes the plan.

        The telemetry recorder calls this method after each step, with all its measurements.

        Args:
            step: Not used: the recorder counts from the start of the job. `self.boundary` counts
                from the start of this thread instead; the ranks agree on these numbers.
            begin: Begin of the step, in seconds.
            end: End of the step, in seconds.
            tokens: Not used.
            done: Operations of the step, as `Op` objects: messages and all-reduces.
            spans: (kind, begin, end in seconds) of the parts of the step.
            reduction: Measurements of the gradient reducer in the step; None without a reducer.
        """
        self._steps.put((self.boundary.step, begin, end, done, spans, reduction))

    def stop(self) -> None:
        """Order the thread to end, and return without waiting for its end."""
        self.stopped.set()
        self._steps.put(None)  # wakes the thread if it waits for a step

    def join(self) -> None:
        """End the thread, and wait for its end for at most ENDED_S seconds."""
        self.stop()
        self._thread.join(ENDED_S)

    def _verdict_now(self, number: int) -> str:
        """Return the verdict on a change; set it to KEEP_PLAN if no rank has set it yet.

        Called when the training thread reaches the first step with the change. That thread cannot
        wait for votes. So if no rank has stored a verdict by then, no rank adopts the change.

        Args:
            number: Number of the ballot on the change.

        Returns:
            ADOPT_CHANGE or KEEP_PLAN, the same on all ranks.
        """
        assert self._vote is not None
        # A verdict that is set already stays, and is returned instead of KEEP_PLAN.
        return self._vote.set_verdict(self.current.store, number, KEEP_PLAN)

    # The re-planning thread

    def _serve(self) -> None:
        """Measure steps and vote on changes of the plan, again and again until the job ends.

        Each ballot has four parts: this rank measures some steps, rank 0 proposes a change (or
        none), all ranks vote on it, and the change is adopted if all votes are yes.
        """
        world = self.current.process.world_size

        def propose(reports: list[dict[str, Any] | None]) -> dict[str, Any]:
            """Return a proposal for a change of the plan, for the ballot; called on rank 0 only.

            Args:
                reports: Results of _measure() on all ranks.

            Returns:
                Result of Deciding.propose(). Its key "at" is the first step with the change, or 0 if
                no change is proposed.
            """
            # boundary.step: number of the step that the training thread runs now.
            return self.deciding.propose(self.boundary.step, reports)

        try:
            store = self._open_store()
            # Keys differ for each restart of the job (`key_prefix`), and each start of re-planning.
            prefix = f"{self.current.key_prefix}/adapt/{self._start}"
            self._vote = Vote(store, prefix, self.current.rank, world, self.stopped)
            number = 0  # of the ballot
            first_step = FIRST_MEASURED_STEP  # first step that this rank measures
            while True:
                report = self._measure(first_step)
                proposal, verdict = self._vote.run_ballot(number, report, propose, self._agree)
                if verdict:  # ADOPT_CHANGE or KEEP_PLAN; "" if no change was proposed
                    # Store the verdict for the training thread. That thread follows it when it
                    # reaches the first step of the change.
                    self.boundary.settle(number, verdict)
                    if verdict == ADOPT_CHANGE and self.current.rank == 0:
                        self.deciding.taken()  # measures the effect of the change from now on
                first_step = proposal["next"]  # all ranks measure again from this step on
                number += 1
        except Stopped:
            return
        except Exception as error:  # noqa: BLE001 - no error here may end the training
            from torch.distributed import DistError

            store_is_closed = isinstance(error, DistError)  # the job is ending
            if not self.stopped.is_set() and not store_is_closed:
                tell_user(
                    f"--holmes-adapt: rank {self.current.rank}: the plan stays as it is from here on "
                    f"({type(error).__name__}: {error})"
                )

    def _measure(self, first_step: int) -> dict[str, Any]:
        """Wait for STEPS_PER_WINDOW (2) steps from `first_step` on, and return their measurements.

        Returns:
            A report for rank 0: times of passes and messages, and memory (StepWindow.report). The
            key "sums" has the times of the gradient all-reduces (ReductionWindow.report).

        Raises:
            Stopped: The job ends.
        """
        planned = self.current.plan_for(self.sizes).traffic_of(self.network_api).in_flight
        in_flight = planned[self.stage.stage] if planned else 0  # 0: the engine's own schedule
        window = StepWindow(self.stage, self.recorder, in_flight)
        sums = ReductionWindow(self.current, self.recorder)  # sums: the gradient all-reduces
        count = 0
        while count < STEPS_PER_WINDOW:
            measured_step = self._steps.get()
            if measured_step is None:  # stop() has put None: the job ends
                raise Stopped
            # on_step() has put this tuple into the queue, in the training thread.
            step, begin, end, done, spans, reduction = measured_step
            if step >= first_step:
                sums.step(done, spans, reduction)
                window.step(begin, end, done, spans, reduction)
                count += 1
        return {**window.report(), "sums": sums.report()}

    def _agree(self, number: int, proposal: dict[str, Any]) -> bool:
        """Return whether this rank can adopt a proposed change of the plan; if so, prepare for it.

        The result is the vote of this rank. It is False if the GPU has too little memory, if the
        job cannot be restarted, or if the first step with the change has begun already. A rank that
        returns True promises to adopt the change at that step, if all other ranks return True, too.

        Args:
            number: Number of the ballot on the change.
            proposal: Result of Deciding.propose() on rank 0.
        """
        change = change_of(proposal)
        current = self.current
        # fits(): whether the GPU has the memory for larger buckets of gradients.
        if isinstance(change, ReductionChange) and not fits(change, self.recorder):
            return False
        if isinstance(change, Restart):
            # Reason why the launcher or the framework cannot restart the job with other layers; ""
            # if it can be restarted.
            obstacle = restart.why_not(current.process, current.options, current.engine, os.environ)
            if obstacle:
                return False
        # Store the change for the training thread. False if this rank has already begun the first
        # step of the change.
        return self.boundary.agree(number, proposal["at"], change)


class _Running:
    """Global state of re-planning in this process, which the hook functions of this module share."""

    replanner: Replanner | None = None  # None before the first step
    #: Parallel sizes and micro-batches a step for which `replanner` was started.
    started_for: tuple[Sizes, int] | None = None
    #: GradientReducer whose begin counts as the begin of a step, in a job without a pipeline
    #: engine.
    reducer: weakref.ref[Any] | None = None
    #: How often `started_for` has changed.
    starts = 0


def begin_step(
    current: Session,
    sizes: Sizes,
    micro_batches: int,
    network_api: str,
    describe: Callable[[], Stage],
) -> None:
    """Begin to measure a pipeline's training step; adopt a change of the plan that begins with it.

    Pipeline engines call this hook on all ranks, before each step. The first call starts a thread
    that measures steps and lets all ranks vote on changes of the running job's plan. If the ranks
    have voted for a change from this step on, this call adopts it. Without several pipeline stages,
    it does nothing: then begin_sums() has this task.

    Args:
        current: State of holmes in this process.
        sizes: Complete parallel sizes of the job.
        micro_batches: Micro-batches of the step.
        network_api: VERBS if the pipeline's process groups use NCCL, SOCKETS if they use gloo.
        describe: Returns a description of this rank's pipeline stage.
    """
    if sizes.pipeline > 1:
        _begin_step(current, sizes, micro_batches, network_api, describe)


def _begin_step(
    current: Session,
    sizes: Sizes,
    micro_batches: int,
    network_api: str,
    describe: Callable[[], Stage],
) -> None:
    """Start re-planning if it does not run yet; adopt a change of the plan that begins with this step.

    Re-planning is a thread that measures steps and proposes changes of the plan. Measurements of
    steps with other sizes or micro-batches are not comparable. So the first step with new sizes or
    micro-batches starts a new thread, but at most MOST_STARTS times in a job.

    Args:
        current: State of holmes in this process.
        sizes: Complete parallel sizes of the job.
        micro_batches: Micro-batches of the step.
        network_api: VERBS for NCCL, SOCKETS for gloo.
        describe: Returns a description of this rank's pipeline stage.
    """
    recorder = telemetry.recorder
    if recorder is None:  # nothing is measured
        return
    if _Running.started_for != (sizes, micro_batches):
        if _Running.replanner is None:
            recorder.on_step.append(_on_step)  # called with the measurements of each step
        else:
            _Running.replanner.stop()
        _Running.started_for = (sizes, micro_batches)
        _Running.starts += 1
        if _Running.starts > MOST_STARTS:  # they change too often: re-planning stays off
            return
        is_nccl = network_api == VERBS
        recorder.on_gpu(is_nccl)  # with NCCL, passes are timed on the GPU, otherwise on the host
        write_to_telemetry_file = recorder.write_document or _ignore  # None: there is no file
        _Running.replanner = Replanner(
            current,
            sizes,
            network_api,
            stage=describe(),
            recorder=recorder,
            open_store=partial(connect, current.process, STORE_S),
            tell=tell_user,
            put=write_to_telemetry_file,
            start=_Running.starts,
        )
    assert _Running.replanner is not None
    if _Running.starts <= MOST_STARTS:
        _Running.replanner.begin_step()


def begin_sums(current: Session, ranks: tuple[int, ...], network_api: str, reducer: object) -> None:
    """Begin to measure a data-parallel training step; adopt a change of the plan that begins with it.

    A GradientReducer of a purely data-parallel job calls this hook before it sums the gradients of
    a step: hence "sums". This call marks the begin of the step, because no engine does. In a job
    with a pipeline, the engine calls begin_step() instead, and this hook does nothing. It also does
    nothing if a second reducer calls it: a step must begin only once.

    Args:
        current: State of holmes in this process.
        ranks: Global ranks of the reducer's group.
        network_api: VERBS for NCCL, SOCKETS for gloo.
        reducer: The reducer that calls.
    """
    world = current.plan.world_size
    data_parallel_sizes = Sizes().complete(world)  # all ranks data-parallel
    sizes = current.plan.sizes or data_parallel_sizes
    if len(ranks) != world or sizes != data_parallel_sizes:
        return
    # Only the calls of the first reducer mark the begin of steps, as long as it exists (weakref).
    if _Running.reducer is None or _Running.reducer() is None:
        _Running.reducer = weakref.ref(reducer)
    if _Running.reducer() is reducer:

        def describe() -> Stage:
            """Describe a pipeline of a single stage that has the whole model.

            Its layers are not described, so only whole steps are measured.
            """
            return Stage(
                framework="torch",
                stage=0,
                tensor=1,
                micro_batches=1,
                gradient_bytes={},
                stages={current.rank: 0},
            )

        _begin_step(current, sizes, micro_batches=1, network_api=network_api, describe=describe)


def on_stop(reason: str) -> None:
    """End the thread that measures steps and changes the plan, because holmes stops.

    The state becomes that of a new process, so that re-planning can start again later.

    Args:
        reason: Why holmes stops. Not used, but every on_stop hook gets it.
    """
    if _Running.replanner is not None:
        _Running.replanner.join()  # waits for the end of the thread, for at most ENDED_S seconds
    _Running.replanner = None
    _Running.started_for = None
    _Running.reducer = None
    _Running.starts = 0


def _ignore(document: dict[str, Any]) -> None:
    """Ignore a document, because the job writes no telemetry file."""


def _on_step(*step: Any) -> None:
    """Pass the recorder's measurements of a step to re-planning, if it runs."""
    if _Running.replanner is not None:
        _Running.replanner.on_step(*step)
