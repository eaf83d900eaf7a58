"""Measurements of NCCL's operations, on a GPU that a test moves on.

There are events and Works that own tensors, but no CUDA.
"""

import gc
import weakref
from collections import deque
from types import SimpleNamespace

import pytest
import torch

from holmes_ext.runtime.measure import telemetry
from holmes_ext.runtime.measure.on_device import DeviceClock
from holmes_ext.runtime.watch.watchdog import Watchdog
from holmes_ext.units import union_s
from integration_tests.jobs import some


class Gpu:
    """GPU with one stream, which the test moves on.

    A recorded event is over when the test sets the GPU's progress past it, at that time.
    """

    def __init__(self):
        self.now = 100.0
        self.recorded, self.capturing, self.stream = [], False, "compute"

    def __call__(self):
        return self.now

    def event(self):
        return Event(self)

    def comes_by(self, at=None, but=0):
        """End all recorded events but the last ones.

        Device time runs a second ahead of the host's.
        """
        for event in self.recorded[: len(self.recorded) - but]:
            event.device = event.device or (at or self.now) + 1.0
        self.recorded = self.recorded[len(self.recorded) - but :] if but else []


class Event:
    def __init__(self, gpu):
        self.gpu = gpu

    def record(self, stream):
        self.device = 0.0
        self.gpu.recorded.append(self)

    def query(self):
        return self.device > 0

    def elapsed_time(self, other):
        assert self.device and other.device, "both events must have ended"
        return (other.device - self.device) * 1e3


class Work:
    """As much of NCCL's as is looked at: it owns what the operation writes."""

    ended, duration = False, None

    def __init__(self):
        self.outputs = torch.zeros(4)

    def is_completed(self):
        return self.ended

    def _get_duration(self):
        if self.duration is None:
            raise RuntimeError("set TORCH_NCCL_ENABLE_TIMING=1")
        return self.duration * 1e3


@pytest.fixture
def gpu(monkeypatch):
    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: gpu.event())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: gpu.stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpu.capturing)
    return gpu


class Job:
    """A recorder and one NCCL group; `done`: operations of finished steps."""

    def __init__(self, gpu, keeps=True):
        self.gpu, self.done = gpu, []
        on_step = (lambda *step: self.done.extend(step[4])) if keeps else None
        self.recorder = telemetry.Recorder(0, None, on_step, gpu)
        self.process_group = SimpleNamespace()
        self.group = SimpleNamespace(
            name="g",
            backend="nccl",
            ranks=(0, 1),
            collectives=0,
            messages={},
            on_device=deque(),
            last_end=0.0,
            is_on_device=True,
            is_nccl2=False,
        )
        self.recorder.groups[id(self.process_group)] = self.group

    def launch(self, work=None, name="all_reduce", to=None, is_synchronous=False):
        op = self.recorder.launch(self.process_group, name, 8, to)
        self.recorder.launched(op, work, self.process_group, is_synchronous)
        return op

    def step(self):
        self.recorder.step_done("program")


@pytest.mark.parametrize("keeps", some([True, False], False))
def test_what_a_work_owns_is_freed_once_the_program_lets_go_of_it(gpu, keeps):
    """FSDP's and ZeRO 3's gathered weights; no step is ever done in an evaluation loop."""
    job = Job(gpu, keeps)
    for _ in range(12):
        work = Work()
        owned = weakref.ref(work.outputs)
        op = job.launch(work)
        job.recorder.wait(op, lambda: None)
        del work
        gc.collect()
        assert owned() is None
        gpu.now += 0.1
        gpu.comes_by()
    # the last one
    assert len(job.recorder.open) == len(job.group.on_device) == 1 and not job.recorder.by_work
    assert len(job.recorder.device._clock._free) <= 8


def test_what_the_last_step_left_under_way_is_waited_for(gpu):
    job = Job(gpu)
    job.launch(work := Work(), "send", to=1)
    job.step()
    assert not job.done and len(job.recorder.unfinished) == 1
    work.ended = True
    gpu.comes_by()
    job.recorder.settle(10.0)
    assert job.recorder.unfinished[0].end and not job.recorder.open


def test_a_synchronous_operation_has_no_work_and_lasts_as_long_as_on_the_gpu(gpu):
    """A synchronous operation runs on the compute stream (torch >= 2.8), and has no Work.

    The stream stands still meanwhile, and the host has long gone on.
    """
    job = Job(gpu)
    job.launch()
    gpu.comes_by()
    job.step()
    job.done.clear()
    ops = [job.launch() for _ in range(2)]  # within no time
    assert not any(op.end for op in ops)
    gpu.comes_by(but=3)
    gpu.now += 0.25  # the first has begun and takes 250 ms
    gpu.comes_by(but=2)
    gpu.comes_by(but=1)
    gpu.now += 0.5
    gpu.comes_by()
    job.step()
    assert job.done == ops and [round(op.waited, 6) for op in ops] == [0.25, 0.5]
    assert ops[0].end == pytest.approx(ops[1].start) and ops[1].end == pytest.approx(gpu.now)
    assert union_s([(op.start, op.end) for op in ops]) == pytest.approx(0.75)


def test_a_synchronous_operation_of_nccl2_is_timed_on_the_stream(gpu):
    """A synchronous operation of nccl2 is exposed as long as it runs on the program's stream, here 250 ms.

    torch 2.15 returns a Work for it, whose wait() returns at once. So wait() says nothing about the time.
    """
    job = Job(gpu)
    job.group.is_nccl2 = True
    work = Work()
    op = job.launch(work, is_synchronous=True)
    assert job.recorder.by_work == {}  # Work.wait of `work` finds no operation
    gpu.comes_by(but=1)
    gpu.now += 0.25
    gpu.comes_by()
    job.step()
    assert job.done == [op]
    assert op.waited == pytest.approx(0.25)


@pytest.mark.parametrize("are_synchronous", [(True, True), (True, False)])
def test_a_block_is_synchronous_if_all_its_operations_are(gpu, are_synchronous):
    job = Job(gpu)
    job.group.is_nccl2 = True
    job.recorder.coalescing[id(job.process_group)] = []
    for is_synchronous in are_synchronous:
        job.launch(None, is_synchronous=is_synchronous)
    work = Work()
    job.recorder.coalesced_launched(job.process_group, work)
    work_is_timed = bool(job.recorder.by_work)
    assert work_is_timed is not all(are_synchronous)


def test_an_asynchronous_one_is_exposed_as_long_as_the_stream_stood_still(gpu):
    job = Job(gpu)
    work = Work()
    op = job.launch(work)
    gpu.comes_by()
    gpu.now += 1.0  # the backward pass
    job.recorder.wait(op, lambda: None)
    gpu.comes_by(but=1)
    gpu.now += 0.3
    gpu.comes_by()
    job.step()
    assert job.done == [op] and op.waited == pytest.approx(0.3) and op.end == pytest.approx(gpu.now)
    assert op.start == pytest.approx(100.0)


def test_what_runs_on_another_stream_is_not_exposed(gpu):
    """FSDP2's reduce-scatters, a hierarchical all-reduce: synchronous calls on streams of their own."""
    job = Job(gpu)
    job.launch()
    gpu.comes_by()
    job.step()
    job.done.clear()
    gpu.stream = "side"
    op, work = job.launch(), Work()
    other = job.launch(work)
    gpu.comes_by(but=2)
    job.recorder.wait(other, lambda: None)
    gpu.now += 0.4
    gpu.comes_by()
    gpu.stream = "compute"
    job.step()
    assert (
        job.done == [op, other]
        and op.end - op.start == pytest.approx(0.4)
        and op.waited == other.waited == 0
    )


def test_its_own_duration_counts_where_torch_tells_it(gpu):
    """The second of two operations of one communicator begins when the first is over.

    It does not matter when the second was launched.
    """
    job = Job(gpu)
    first, second = Work(), Work()
    ops = [job.launch(first), job.launch(second)]
    gpu.comes_by()
    first.duration, second.duration = 0.2, 0.4
    gpu.now += 0.7
    first.ended = second.ended = True
    job.step()
    assert [(round(op.start, 6), round(op.end, 6)) for op in ops] == [
        (100.0, 100.2),
        (100.2, 100.6),
    ]
    assert job.done == ops


def test_one_that_the_program_dropped_is_over_when_a_later_one_is(gpu):
    job = Job(gpu)
    dropped = job.launch(Work())
    gpu.comes_by()
    job.step()
    assert list(job.recorder.open.values()) == [dropped]
    later = job.launch()
    gpu.now += 0.2
    gpu.comes_by()
    job.step()
    assert job.done == [dropped, later] and not job.recorder.open


def test_operations_of_a_block_end_together(gpu):
    job = Job(gpu)
    job.recorder.coalescing[id(job.process_group)] = []
    ops = [job.launch(name="send", to=1), job.launch(name="receive", to=1)]
    work = Work()
    job.recorder.coalesced_launched(job.process_group, work)
    assert list(job.recorder.open.values()) == ops
    job.recorder.wait(ops[-1], lambda: None)
    gpu.now += 0.2
    gpu.comes_by()
    job.step()
    assert (
        sorted(op.name for op in job.done) == ["receive", "send"]
        and len({op.end for op in ops}) == 1
    )


def test_what_goes_into_a_graph_is_not_seen(gpu):
    job = Job(gpu)
    gpu.capturing = True
    assert job.recorder.launch(job.process_group, "all_reduce", 8, None) is None
    assert job.group.collectives == 0 and not gpu.recorded


def test_the_watchdog_tells_waiting_from_computing(gpu):
    """The host is ahead: what the GPU has not come to is not waited for, and has not arrived at."""
    job = Job(gpu)
    dog = Watchdog(
        job.recorder, 3, 1, lambda: None, "", lambda rank: f"n{rank}", {}, dict, clock=gpu
    )
    job.group.transport = SimpleNamespace(fabric="ib", interface="ib0")
    job.group.kind = lambda *_: "data"
    job.launch()
    gpu.comes_by(but=2)  # a kernel before it does not end
    state = dog.state()
    assert state.waiting == () and state.started == {"g": 0}
    gpu.comes_by(but=1)  # it has begun, and does not end
    state = dog.state()
    assert [wait.operation for wait in state.waiting] == ["all_reduce"] and state.started == {
        "g": 1
    }
    gpu.comes_by()
    assert dog.state().waiting == ()


def test_clocks_are_compared_by_bounds(gpu):
    """Clocks are compared by bounds: a mark is never before it was recorded nor after it was seen.

    Hours of float32 milliseconds lose nothing.
    """
    clock = DeviceClock(gpu)
    clock.mark()
    gpu.now += 3.0
    gpu.comes_by(at=101.0)  # the base: the GPU had other things to do for a second
    for _ in range(2000):
        gpu.now += 10.0
        mark = clock.mark()
        gpu.comes_by()
        gpu.now += 0.5
        assert clock.has_passed(mark) and mark.at <= clock.time_of(mark) <= mark.at + 1e-3
        clock.step_done()
        clock.recycle(mark)
    assert clock._reference.at > gpu.now - 30 and len(clock._free) < 5


def test_spans_are_the_gpus_where_it_computes_them(gpu, monkeypatch):
    """Spans of passes are the GPU's, which carries them out long after the host launched them.

    A pass that the GPU has not carried out is reported a step later.
    """
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: len(spans) * 10)
    spans, job = [], Job(gpu)
    job.recorder.on_step = [lambda *step: spans.append(step[5])]
    job.recorder.spans_on_device = True
    monkeypatch.setattr(telemetry, "recorder", job.recorder)
    job.recorder.device.mark()
    gpu.comes_by()
    with telemetry.span("forward"):
        gpu.comes_by(200.0)
    gpu.comes_by(200.5)
    with telemetry.span("backward"):
        pass
    gpu.comes_by(but=2)
    job.step()
    assert [(kind, pytest.approx(0.5)) for kind in ("forward",)] == [
        (kind, b - a) for kind, a, b in spans[0]
    ]
    gpu.comes_by(300.0)
    job.step()
    assert [kind for kind, *_ in spans[1]] == ["backward"]
