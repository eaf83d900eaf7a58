"""One rank's plan that learns: a window of steps is measured, rank 0 decides again, all take it at one step's
boundary.

    training thread    begin_step() at each step's boundary: a look at what was agreed on; on_step: what it
                       took
    own thread         Window, SumWindow -> Vote.round -> Boundary; rank 0: Deciding

Windows are LENGTH steps long, the first begins once the engine's first steps are over; a change is adopted
some steps after the one in which rank 0 decided (deciding.py). What goes wrong in the thread is one line, and
the plan stays.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

from holmes_ext.adapt import restart
from holmes_ext.adapt.deciding import Deciding, change_of
from holmes_ext.adapt.pipeline import Restart
from holmes_ext.adapt.reductions import SumChange
from holmes_ext.adapt.sums import SumWindow, fits
from holmes_ext.adapt.vote import KEEP, TAKE, Boundary, Stopped, Vote
from holmes_ext.adapt.window import Window
from holmes_ext.plan.sizes import Sizes
from holmes_ext.plan.traffic import VERBS
from holmes_ext.runtime.measure import telemetry
from holmes_ext.runtime.measure.stage import Stage
from holmes_ext.runtime.session import Session
from holmes_ext.runtime.start.store import ENDED_S, STORE_S, connect, leave_layers
from holmes_ext.words import tell_user

#: Steps that are left out at the start, steps of a window.
FIRST, LENGTH = 2, 2
#: How often the learning begins anew in a job whose sizes or micro-batches change (a batch that grows); then
#: it is off.
MOST_STARTS = 50


class Learning:
    """Of one rank. network_api: of the pipeline's groups; of the data-parallel ones where there is no
    pipeline; tell: prints a line, on rank 0; put: keeps a document in the telemetry's file."""

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
        self.current, self.sizes = current, sizes
        self.network_api, self.stage = network_api, stage
        self.recorder = recorder
        self.tell, self.put, self.stopped, self._start = tell, put, threading.Event(), start
        self.deciding = Deciding(current, sizes, network_api, tell, put)
        self.boundary = Boundary(self._verdict_now)
        self._open_store = open_store
        self._steps: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._vote: Vote | None = None
        self._restart_after: int | None = (
            None  # of checkpoints, where all ranks wait for the next one
        )
        self._thread = threading.Thread(target=self._serve, name="holmes adapt", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------- the training thread

    def begin_step(self) -> None:
        """A training step begins, on all ranks of the job in the same order."""
        if self._restart_after is not None and restart.checkpoints() > self._restart_after:
            restart.leave(self.current.store, self.current.round, self.current.process.world_size)
        change = self.boundary.begin()
        if isinstance(change, Restart):
            self._restart_after = restart.checkpoints()
            if self.current.rank == 0:
                leave_layers(self.current.store, change.partition, self.sizes)
                self.tell(
                    f"the job starts again after its next checkpoint: {change.text} {change.brings}"
                )
        elif change is not None:
            sums = isinstance(change, SumChange)
            plan = self.current.plan_for(self.sizes)
            held = list(plan.traffic_of(self.network_api).in_flight)
            self.current.adopt(self.sizes, change.adapted(plan, self.network_api), sums)
            if self.current.rank == 0:
                after = (
                    {"before": held, "in_flight": held, "sums": change.text}
                    if sums
                    else {"before": change.before, "in_flight": change.in_flight}
                )
                taken = {name: getattr(change, name) for name in ("now_s", "then_s", "back")}
                self.put({"plan": {"step": self.recorder.step, **after, **taken}})

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
        """A Recorder's."""
        self._steps.put((self.boundary.step, begin, end, done, spans, reduction))

    def stop(self) -> None:
        """It ends by itself, soon: nobody waits for it here."""
        self.stopped.set()
        self._steps.put(None)

    def join(self) -> None:
        """stop(), and return when its thread has ended."""
        self.stop()
        self._thread.join(ENDED_S)

    def _verdict_now(self, number: int) -> str:
        """The training thread has come to the step before its own thread knows: the first one who sets it
        decides."""
        assert self._vote is not None
        return self._vote.set_verdict(self.current.store, number, KEEP)

    # ------------------------------------------------------------------- its own thread

    def _serve(self) -> None:
        world = self.current.process.world_size

        def propose(reports: list[dict[str, Any] | None]) -> dict[str, Any]:
            return self.deciding.propose(self.boundary.step, reports)

        try:
            store = self._open_store()
            prefix = f"{self.current.round}/adapt/{self._start}"
            self._vote = Vote(store, prefix, self.current.rank, world, self.stopped)
            number, first = 0, FIRST
            while True:
                report = self._measure(first)
                proposal, verdict = self._vote.round(number, report, propose, self._agree)
                if verdict:
                    self.boundary.settle(number, verdict)
                    if verdict == TAKE and self.current.rank == 0:
                        self.deciding.taken()
                first, number = proposal["next"], number + 1
        except Stopped:
            return
        except Exception as error:  # noqa: BLE001 - training goes on, whatever it is
            from torch.distributed import DistError

            if not self.stopped.is_set() and not isinstance(
                error, DistError
            ):  # the store goes with the job
                said = f"rank {self.current.rank}: the plan stays as it is from here on"
                tell_user(f"--holmes-adapt: {said} ({type(error).__name__}: {error})")

    def _measure(self, first: int) -> dict[str, Any]:
        """Of LENGTH steps from step `first` on."""
        held = self.current.plan_for(self.sizes).traffic_of(self.network_api).in_flight
        window, count = Window(self.stage, self.recorder, held[self.stage.stage] if held else 0), 0
        sums = SumWindow(self.current, self.recorder)
        while count < LENGTH:
            item = self._steps.get()
            if item is None:
                raise Stopped
            if item[0] >= first:
                sums.step(*item[3:])
                window.step(*item[1:])
                count += 1
        return {**window.report(), "sums": sums.report()}

    def _agree(self, number: int, proposal: dict[str, Any]) -> bool:
        change = change_of(proposal)
        current = self.current
        if isinstance(change, SumChange) and not fits(change, self.recorder):
            return False
        if isinstance(change, Restart) and restart.why_not(
            current.process, current.options, current.engine, os.environ
        ):
            return False
        return self.boundary.agree(number, proposal["at"], change)


# --------------------------------------------------------------------------- of this process


class _Running:
    """learning: what goes on; key: for which sizes and micro-batches; starts: how often that changed;
    reducer: whose steps are the job's, where no engine tells of them."""

    learning: Learning | None = None
    key: tuple[Sizes, int] | None = None
    reducer: weakref.ref[Any] | None = None
    starts = 0


def begin_step(
    current: Session,
    sizes: Sizes,
    micro_batches: int,
    network_api: str,
    describe: Callable[[], Stage],
) -> None:
    """A training step of a pipeline of complete `sizes` begins, the same on all ranks; the first one, and the
    first with other sizes or micro-batches, starts the learning where the options ask for it. describe: what
    its engine tells."""
    if sizes.pipeline > 1:
        _begin_step(current, sizes, micro_batches, network_api, describe)


def _begin_step(
    current: Session,
    sizes: Sizes,
    micro_batches: int,
    network_api: str,
    describe: Callable[[], Stage],
) -> None:
    recorder = telemetry.recorder
    if recorder is None:
        return
    if _Running.key != (sizes, micro_batches):
        if _Running.learning is None:
            recorder.on_step.append(_on_step)
        else:
            _Running.learning.stop()
        _Running.key, _Running.starts = (sizes, micro_batches), _Running.starts + 1
        if _Running.starts > MOST_STARTS:
            return
        recorder.on_gpu(network_api == VERBS)
        _Running.learning = Learning(
            current,
            sizes,
            network_api,
            describe(),
            recorder,
            lambda: connect(current.process, STORE_S),
            tell_user,
            recorder.on_round or (lambda document: None),
            _Running.starts,
        )
    assert _Running.learning is not None
    if _Running.starts <= MOST_STARTS:
        _Running.learning.begin_step()


def begin_sums(current: Session, ranks: tuple[int, ...], network_api: str, reducer: object) -> None:
    """A step of `reducer`'s begins, which sums over `ranks`: the job's, where it is data-parallel alone and
    this is its only reducer; in a pipeline its engine tells (begin_step)."""
    world = current.plan.world_size
    whole = Sizes().complete(world)
    sizes = current.plan.sizes or whole
    if len(ranks) != world or sizes != whole:
        return
    if _Running.reducer is None or _Running.reducer() is None:
        _Running.reducer = weakref.ref(reducer)
    if _Running.reducer() is reducer:
        _begin_step(
            current, sizes, 1, network_api, lambda: Stage("torch", 0, 1, 1, {}, {current.rank: 0})
        )


def on_stop(reason: str) -> None:
    """End the learning of this process, as a hook of the extension."""
    if _Running.learning is not None:
        _Running.learning.join()
    _Running.learning, _Running.key, _Running.reducer, _Running.starts = None, None, None, 0


def _on_step(*step: Any) -> None:
    if _Running.learning is not None:
        _Running.learning.on_step(*step)
