import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from holmes_ext.plan.sizes import Sizes
from holmes_ext.runtime.groups.transport import Transport
from holmes_ext.runtime.measure.operations import Op
from holmes_ext.runtime.measure.telemetry import Recorder
from holmes_ext.runtime.watch.watchdog import State, Waiting, Watchdog, blame

NODES = ("a0", "a1", "b0", "b1")
RATES = {"ib": 2_000_000_000, "ethernet": 250_000_000}


def waiting(
    ranks, number=5, peer=None, operation="all_reduce", kind="data", fabric="ib", interface="ib0"
):
    return Waiting(f"g{ranks}", kind, operation, tuple(ranks), number, peer, 9.0, fabric, interface)


def state(rank, *waits, reached=(), messages=None, **nics):
    """reached: groups whose operation 5 this rank has started."""
    return State(
        rank, NODES[rank], 14, 3, waits, {f"g{ranks}": 6 for ranks in reached}, messages or {}, nics
    )


def said(states, rank=0):
    by_rank = {one.rank: one for one in states}
    return blame(rank, by_rank.get, NODES.__getitem__, RATES)


def test_a_rank_that_does_not_answer():
    line = said([state(0, waiting([0, 1]), reached=[[0, 1]])])
    assert (
        line
        == "the data group of ranks 0, 1 (all_reduce on ib over ib0) waits for rank 1 on a1, which does not "
        "answer: stopped, dead, or cut off from the job's store"
    )


def test_a_rank_that_works():
    line = said([state(0, waiting([0, 1]), reached=[[0, 1]]), state(1)])
    assert (
        "waits for rank 1 on a1, which is in no operation: it computes, loads data or writes"
        in line
    )


def test_the_chain_is_followed():
    """0 waits for 1 in their data group, 1 for a message from 3, and 3 is silent."""
    pipe = waiting(
        [1, 3], peer=3, operation="receive", kind="pipeline", fabric="ethernet", interface="eth0"
    )
    line = said(
        [
            state(0, waiting([0, 1]), reached=[[0, 1]]),
            state(1, pipe, messages={"receive g[1, 3] 3": 6}),
        ]
    )
    assert line.startswith(
        "the pipeline group of ranks 1, 3 (receive on ethernet over eth0) waits for rank 3 on b1, which does "
        "not answer"
    )


def test_the_silent_one_of_several_is_named():
    line = said([state(0, waiting([0, 1, 2]), reached=[[0, 1, 2]]), state(1)])
    assert "rank 2 on b0, which does not answer" in line


def test_a_slow_network_is_told_with_what_it_carries():
    line = said(
        [
            state(0, waiting([0, 1]), reached=[[0, 1]], ib0=19e6),
            state(1, waiting([0, 1]), reached=[[0, 1]], ib0=20e6),
        ]
    )
    assert line == (
        "the data group of ranks 0, 1 (all_reduce on ib over ib0): all have arrived, the network is slow:"
        " rank 0 on a0 moves 19 Mb/s over ib0,"
        " rank 1 on a1 moves 20 Mb/s over ib0 of 2 Gb/s"
    )


def test_a_message_of_which_both_ends_are_there_is_slow():
    send = waiting(
        [0, 2], peer=2, operation="send", kind="pipeline", fabric="ethernet", interface="eth0"
    )
    receive = replace(send, peer=0, operation="receive")
    line = said(
        [
            state(0, send, messages={"send g[0, 2] 2": 6}),
            state(2, receive, messages={"receive g[0, 2] 0": 6}, eth0=1e6),
        ]
    )
    assert (
        "all have arrived, the network is slow: rank 2 on b0 moves 1 Mb/s over eth0 of 250 Mb/s"
        in line
    )


def test_a_circle():
    one = state(0, waiting([0, 1]), reached=[[0, 1]])
    two = state(1, waiting([1, 0], kind="tensor"), reached=[[1, 0]])
    assert "ranks 0, 1 wait for each other in a circle" in said([one, two])


def test_nobody_waits():
    assert said([state(0)]) == ""


def test_a_state_survives_the_store():
    one = state(1, waiting([0, 1]), reached=[[0, 1]], messages={"send g 2": 1}, ib0=1.5)
    assert State.load(one.dump()) == one


class Job:
    """Simulated job: a telemetry recorder and a watchdog per rank, with a fake clock and a store in memory.

    The watchdogs have no threads and never sleep. The test moves the clock and calls poll_watchdogs().
    """

    def __init__(self, count, answering=None):
        """Create a job that has not started its first step.

        Args:
            count: Number of ranks.
            answering: Ranks whose watchdog works; None for all. The others are stopped or dead.
        """
        self.now = 0.0  # the fake clock, in seconds
        self.lines = []  # messages that the watchdogs print
        self.store = dist.HashStore()
        self.connected = 0  # number of connections to the store
        self.watchdogs = [self._new_watchdog(rank, count) for rank in range(count)]  # by rank
        self.answering = set(range(count) if answering is None else answering)

    def _new_watchdog(self, rank, count):
        recorder = Recorder(rank, Sizes().complete(count), clock=lambda: self.now)
        return Watchdog(
            recorder,
            factor=5,
            floor_s=10,
            connect=self._connect,
            prefix="w",
            node_of=NODES.__getitem__,
            rates=RATES,
            carried=lambda: {"ib0": int(self.now * 1e6)},  # 1 MB/s
            host=None,
            say=self.lines.append,
            clock=lambda: self.now,
            sleep=self._sleep,
        )

    def _connect(self):
        self.connected += 1
        return self.store

    def _sleep(self, seconds):
        """Move the clock, and let all ranks that answer put their state into the store meanwhile."""
        self.now += seconds
        for watchdog in self.watchdogs:
            if watchdog.recorder.rank in self.answering:
                watchdog.tell(watchdog.state())

    def run_steps(self, count, seconds=2.0):
        """Run training steps of the same duration on all ranks, and start the next step."""
        for _ in range(count):
            for watchdog in self.watchdogs:
                watchdog.recorder.step_begins()
            self.now += seconds
            for watchdog in self.watchdogs:
                watchdog.recorder.step_done("engine")
        for watchdog in self.watchdogs:
            watchdog.recorder.step_begins()

    def start_all_reduce(self, *ranks, members=None):
        """Start an all-reduce on some ranks.

        Args:
            ranks: The ranks that start the all-reduce.
            members: All ranks of the process group; None for all ranks of the job.
        """
        members = members or tuple(range(len(self.watchdogs)))
        for rank in ranks:
            group = self.watchdogs[rank].recorder.groups.setdefault(7, group_of(members))
            group.collectives += 1
            self.watchdogs[rank].recorder.open[rank] = operation(group, self.now)

    def poll_watchdogs(self):
        """Let the watchdogs of all ranks that answer check once whether a step is late."""
        for watchdog in self.watchdogs:
            if watchdog.recorder.rank in self.answering:
                watchdog.check()


def group_of(ranks):
    return SimpleNamespace(
        name="3",
        ranks=ranks,
        kind=lambda *_: "data",
        transport=Transport("ib", "ib", "ib0", ""),
        collectives=0,
        messages={},
        backend="gloo",
        on_device=[],
        is_on_device=False,
        is_nccl2=False,
    )


def operation(group, start):
    return Op(group, "all_reduce", 0, 0, None, 0, start)


def test_a_healthy_job_never_touches_the_store():
    job = Job(2)
    job.run_steps(5)
    job.start_all_reduce(0)
    job.now += 9.9
    job.poll_watchdogs()
    assert job.lines == [] and job.connected == 0


def test_one_line_while_a_rank_is_stopped():
    job = Job(3, answering=(0, 2))
    job.run_steps(5)
    job.start_all_reduce(0, 2)
    job.now += 20
    job.poll_watchdogs()
    job.poll_watchdogs()
    (line,) = job.lines
    assert (
        line.startswith("step 5 takes 2")
        and "the median is 2.00 s: the data group of ranks 0, 1, 2 (all_reduce on ib over ib0) waits for "
        "rank 1 on a1,"
        in line
    )
    assert "which does not answer" in line and line.endswith("(seen by rank 0)")


def test_the_dump_file_of_the_flight_recorder_is_printed_once():
    """The watchdog prints the hint after its first message about a late step, and not after later ones."""
    job = Job(2, answering=(0,))  # rank 1 does not answer
    hint = "torch writes the last operations of rank 0 to trace_0"
    job.watchdogs[0].dump_hint = lambda: hint
    job.run_steps(5)
    for _ in range(2):  # two late steps, with steps of the usual duration between them
        job.start_all_reduce(0)  # waits for rank 1
        job.now += 20
        job.poll_watchdogs()
        job.run_steps(3)
    first_message, second_message, third_message = job.lines
    assert "which does not answer" in first_message
    assert second_message == hint
    assert "which does not answer" in third_message


def test_a_rank_that_computes_is_told_from_a_dead_one():
    job = Job(3)
    job.run_steps(5)
    job.start_all_reduce(0, 2)
    job.now += 20
    job.poll_watchdogs()
    assert "rank 1 on a1, which is in no operation" in job.lines[0]


def test_a_slow_network():
    job = Job(2)
    job.run_steps(5)
    job.start_all_reduce(0, 1)
    job.now += 20
    job.poll_watchdogs()
    assert (
        "all have arrived, the network is slow" in job.lines[0]
        and "8 Mb/s over ib0 of 2 Gb/s" in job.lines[0]
    )


def test_a_late_step_of_which_nothing_is_stuck_is_not_talked_about():
    """Evaluation between steps, or a saved checkpoint: no operation is old."""
    job = Job(2)
    job.run_steps(5)
    job.now += 30
    job.start_all_reduce(0, 1)
    job.poll_watchdogs()
    assert job.lines == []


@pytest.mark.parametrize("done", [0, 2])
def test_a_step_that_hangs_before_the_median_is_known(done):
    """A fault of the schedule shows in the first steps; what compiles may take twelve floors."""
    job = Job(2)
    job.run_steps(done)
    job.start_all_reduce(0)
    job.now += 119
    job.poll_watchdogs()
    assert job.lines == [] and job.connected == 0
    job.now += 1
    job.poll_watchdogs()
    (line,) = job.lines
    assert (
        line.startswith(f"step {done} takes 12")
        and "s so far, no step's time is known yet: the data group" in line
    )
    assert "waits for rank 1 on a1, which is in no operation" in line


def test_no_line_outside_a_step():
    job = Job(2)
    job.run_steps(5)
    job.start_all_reduce(0)
    for watchdog in job.watchdogs:
        watchdog.recorder.is_in_step = False
    job.now += 1000
    job.poll_watchdogs()
    assert job.lines == []


def test_a_store_that_does_not_answer():
    job = Job(2)
    job.run_steps(5)
    job.start_all_reduce(0, 1)
    job.now += 20
    for watchdog in job.watchdogs:
        watchdog.host = 0
        watchdog.say_alone()
        watchdog.say_alone()
    (line,) = job.lines
    assert (
        "is stuck, and the job's store does not answer; it is kept by rank 0 on a0 (seen by rank 1)"
    ) in line


@pytest.mark.parametrize(
    "text, limits", [("5", (5, 10)), ("3,2", (3, 2)), ("off", None), ("2.5, 60", (2.5, 60))]
)
def test_the_option(text, limits):
    from holmes_ext.options import Options

    assert Options(watchdog=text).watchdog_limits == limits


@pytest.mark.parametrize("text", ["", "on", "1", "5,0", "-5", "5,5,5", "nan", "1e9"])
def test_bad_options(text):
    from holmes_ext.errors import HolmesError
    from holmes_ext.options import Options

    with pytest.raises(HolmesError, match="--holmes-watchdog"):
        Options(watchdog=text)


def test_who_stops_it_waits_for_a_thread_that_waits_for_the_store():
    """It would abort the process if it came back while the interpreter ends."""
    job = Job(1)
    (watchdog,) = job.watchdogs
    asked, answered = threading.Event(), threading.Event()
    watchdog.pause_s, watchdog._late = 0.001, lambda: True
    watchdog.connect = lambda: (asked.set(), answered.wait(20)) and job.store
    watchdog.start()
    assert asked.wait(20)
    threading.Timer(1.5, answered.set).start()
    watchdog.stop()
    assert not watchdog._thread.is_alive()
