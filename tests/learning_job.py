"""A whole job of four ranks that learns: real threads and votes, simulated steps.

Tests and benchmarks/adapt_simulated.py use it.
"""

import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import torch.distributed as dist
from clusters import site
from simulated_steps import step_of
from stores import Client

from holmes_ext.adapt.learning import Replanner
from holmes_ext.options import Options, options_from
from holmes_ext.plan import maker
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.sizes import Sizes
from holmes_ext.runtime.measure.stage import Stage
from holmes_ext.runtime.session import Session
from holmes_ext.runtime.start.launcher import Process

MICRO_BATCHES = 8
#: That a patient step waits at most.
PATIENT_S = 5.0


def step_s(passes):
    """Seconds of a step of step_of."""
    return 0.01 + max(span.end for of in passes.values() for span, _ in of.values())


def options_with(**values: str) -> Options:
    """Return options as if none of them was set on purpose."""
    return replace(options_from(**values), given=frozenset())


class SimulatedJob:
    """Job of simulated steps, whose ranks learn by real threads and votes.

    Subclasses have step_told().

    lines: messages of rank 0; documents: what rank 0 kept; patient: a step lasts until the ranks'
    threads have nothing to do, as a step of a second does; gone: seconds that the next step takes
    longer.
    """

    def __init__(self, where, sizes, stage_of, patient=False, **options):
        self.patient, self.clock, self.gone = patient, 0.0, 0.0
        self.lines, self.documents, self.ranks, store = [], [], [], dist.HashStore()
        plan, world = build_plan(where, sizes, options=options_with(**options)), where.world_size
        for rank in range(world):
            process = Process(rank, world, 0, 1, "host", 1, "test")
            current = Session(
                options_with(**options),
                process,
                where,
                plan,
                rank,
                store=Client(store),
                maker=maker,
            )
            recorder = SimpleNamespace(
                rank=rank, kind=lambda op: "pipeline", step=0, spans_on_device=False
            )
            self.ranks.append(
                Replanner(
                    current,
                    plan.sizes,
                    "sockets",
                    stage_of(rank),
                    recorder,
                    lambda store=store: Client(store),
                    self.lines.append,
                    self.documents.append,
                )
            )

    def each(self, what):
        """Of every rank's plan, which are one."""
        found = [what(one.current.plan_for(one.sizes).traffic_of("sockets")) for one in self.ranks]
        assert all(one == found[0] for one in found), "two plans at once"
        return found[0]

    def step(self):
        for one in self.ranks:
            one.begin_step()
        length, told = self.step_told()
        length, self.gone = length + self.gone, 0.0
        for one in self.ranks:
            one.recorder.step += 1
            one.on_step(0, self.clock, self.clock + length, 0, *told(one))
        self.clock += length
        if not self.patient:
            time.sleep(0.01)
            return
        end, idle = time.monotonic() + PATIENT_S, 0
        while idle < 3 and time.monotonic() < end:
            time.sleep(0.001)
            idle = idle + 1 if self._idle() else 0

    def _idle(self):
        """Whether every rank's thread waits for a step."""
        frames = sys._current_frames()
        return all(
            one._steps.empty() and frames[one._thread.ident].f_code.co_name == "_measure"
            for one in self.ranks
        )

    def until(self, condition, steps=400):
        for _ in range(steps):
            if condition():
                return
            self.step()
        raise AssertionError((self.lines, self.each(vars)))

    def end(self):
        for one in self.ranks:
            one.join()


class LearningJob(SimulatedJob):
    """Of two stages, of two ranks each. case: see step_of; it may be changed."""

    def __init__(self, case, micro_batches=MICRO_BATCHES, patient=False, **options):
        self.case, self.slower, self.micro_batches = case, 1 / 1.3, micro_batches

        def stage_of(rank):
            stage, pipeline = rank // 2, (rank % 2, rank % 2 + 2)
            blocks = dict.fromkeys(range(3 * stage, 3 * stage + 3), 10000.0)
            return Stage("test 1", stage, 1, micro_batches, blocks, dict(zip(pipeline, range(2))))

        super().__init__(site(ethernet=f"{case[2]}Mb/s"), Sizes(2), stage_of, patient, **options)

    def held(self):
        """Of each stage."""
        return self.each(lambda traffic: traffic.in_flight)

    def step_told(self):
        """Return the seconds of a step, and the report of it that a rank gets."""
        passes = step_of(self.case, self.held(), self.micro_batches, self.slower)
        return step_s(passes), lambda one: (*self._told(one, passes), None)

    def _told(self, one, passes):
        """(operations, spans) of its step; nodes' clocks are 100 s apart."""
        stage, rank, ops, spans = one.stage.stage, one.current.rank, [], []
        (peer,) = one.stage.neighbours
        zero = self.clock + 100 * rank
        for (letter, index), (span, waited) in passes[stage].items():
            spans.append(
                ({"f": "forward", "b": "backward"}[letter], zero + span.start, zero + span.end)
            )
            sends, group = (letter == "f") == (stage == 0), SimpleNamespace(name=letter)
            start, end = (span.end, span.end) if sends else (-1e6, span.start)
            ops.append(
                SimpleNamespace(
                    name="send" if sends else "receive",
                    peer=peer,
                    group=group,
                    number=index,
                    payload=32768,
                    start=zero + start,
                    end=zero + end,
                    waited=0.01 * (waited and not sends),
                )
            )
        return ops, spans
