import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from holmes_ext.patches import registry
from holmes_ext.plan.sizes import Sizes
from holmes_ext.runtime import session
from holmes_ext.runtime.groups.transport import Transport
from holmes_ext.runtime.measure import telemetry
from holmes_ext.units import union_s


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def fake_session(rank, world):
    """As much of a session as groups need: every group on one fabric."""
    return SimpleNamespace(
        rank=rank,
        groups=[],
        plan=SimpleNamespace(world_size=world),
        transport=lambda ranks, backend: Transport("ib", "ib", "ib0", ""),
    )


def test_steps_and_their_median(clock):
    steps = []
    recorder = telemetry.Recorder(0, None, lambda *step: steps.append(step), clock)
    for seconds in (50, 2, 1, 3, 1):  # the first one does not count
        clock.now += seconds
        recorder.step_done("optimizer")
    assert recorder.median_s() == 1.5 and [step[0] for step in steps] == [0, 1, 2, 3, 4]
    assert [end - begin for _, begin, end, *_ in steps] == [50, 2, 1, 3, 1]


def test_who_ends_a_step(clock):
    recorder = telemetry.Recorder(0, None, clock=clock)
    recorder.step_done("optimizer")
    recorder.step_done("engine")
    recorder.step_done("optimizer")  # the engine's own optimizer: not a step
    recorder.step_done("reducer")
    assert recorder.step == 2
    recorder.step_done("program")
    recorder.step_done("engine")
    assert recorder.step == 3


def test_an_engine_that_says_where_a_step_begins_also_ends_it(clock):
    recorder = telemetry.Recorder(0, None, clock=clock)
    recorder.step_begins()
    recorder.step_done("optimizer")  # the engine's own, inside its first step
    assert recorder.step == 0


def test_saving_between_steps_does_not_count(clock):
    recorder = telemetry.Recorder(0, None, clock=clock)
    for _ in range(4):
        recorder.step_begins()
        clock.now += 2
        recorder.step_done("engine")
        assert not recorder.is_in_step
        clock.now += 100
    assert recorder.median_s() == 2
    recorder.step_begins(exactly=False)  # much lies between: the step begins here
    assert recorder.step_began == clock.now
    recorder.step_done("engine")
    clock.now += 1
    recorder.step_begins(exactly=False)  # little: where the last one ended
    assert recorder.step_began == clock.now - 1 and recorder.step_entered == clock.now


def test_union():
    assert union_s([(0, 2), (1, 3), (5, 6), (5.5, 5.6)]) == 4


def _operations(rank, keeps):
    steps = []
    session.set_active(fake_session(rank, 2))
    registry().enable(["telemetry"])
    sizes = Sizes(pipeline=2).complete(2)
    recorder = telemetry.Recorder(
        rank, sizes, (lambda *step: steps.append(step)) if keeps else None
    )
    telemetry.set_recorder(recorder)
    try:
        work = dist.all_reduce(torch.ones(1000), async_op=True)
        work.wait()
        if rank == 0:
            dist.send(torch.ones(10), 1)
        else:
            dist.recv(torch.ones(10), 0)
        dist.all_gather_into_tensor(torch.ones(200), torch.ones(100))
        shard = torch.ones(50)
        dist.reduce_scatter_tensor(shard, torch.ones(100))
        dist.broadcast(torch.ones(10), 0)
        parts = [None, None]
        dist.all_gather_object(parts, rank)
        dist.barrier()
        del work
        open_ = [op.name for op in recorder.open.values()]
        (group,) = recorder.groups.values()
        recorder.step_done("program")
    finally:
        telemetry.set_recorder(None)
        registry().undo()
        session.set_active(None)
    ops = (
        [
            (
                op.name,
                op.payload,
                op.sent,
                op.number,
                op.peer,
                op.end >= op.start > 0,
                op.waited > 0,
            )
            for op in steps[0][4]
        ]
        if keeps
        else []
    )
    left = type(vars(dist.ProcessGroup)["allreduce"]).__name__
    dist.all_reduce(torch.ones(4))  # as before
    return ops, open_, group.collectives, group.messages, left


@pytest.mark.parametrize("keeps", [True, False])
def test_what_torch_does_is_seen(keeps):
    for rank, (ops, open_, count, messages, left) in enumerate(run_ranks(_operations, 2, keeps)):
        assert open_ == [] and left == "instancemethod"
        assert messages == ({("send", 1): 1} if rank == 0 else {("receive", 0): 1})
        if not keeps:
            continue
        assert count == len(ops) - 1  # all but the message
        by_name = {name: rest for name, *rest in ops if name != "all_gather"}
        assert by_name["all_reduce"] == [4000, 4000, 0, None, True, True]
        assert by_name["send" if rank == 0 else "receive"] == [
            40,
            40 if rank == 0 else 0,
            0,
            1 - rank,
            True,
            True,
        ]
        assert by_name["reduce_scatter"][:2] == [200, 400]  # over gloo
        assert by_name["broadcast"][:2] == [40, 20.0] and by_name["barrier"][:2] == [0, 0]
        assert [size for name, size, *_ in ops if name == "all_gather"][0] == 400


def _fails(rank):
    session.set_active(fake_session(rank, 1))
    registry().enable(["telemetry"])
    recorder = telemetry.Recorder(rank, None, lambda *step: None)
    telemetry.set_recorder(recorder)
    try:
        dist.group.WORLD.allreduce(["not a tensor"], dist.AllreduceOptions())
    except (TypeError, AttributeError):
        return len(recorder.open)
    finally:
        telemetry.set_recorder(None)
        registry().undo()
        session.set_active(None)


def test_an_operation_that_cannot_start_is_not_under_way():
    assert run_ranks(_fails, 1) == [0]


def test_an_exception_ends_the_job_with_python_s_own_status(tmp_path):
    """It ended by abort (134), which hid the exception."""
    script = tmp_path / "train.py"
    script.write_text("import torch.distributed, nosuchthing\n")
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    command = [
        "-m",
        "holmes_ext",
        str(script),
        "--holmes",
        "--holmes-telemetry",
        str(tmp_path / "t"),
    ]
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **alone},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1 and "nosuchthing" in done.stderr, done.stderr
