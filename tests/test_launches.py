"""The checker of launches finds what hangs under NCCL, and nothing else."""

import pytest
import torch
import torch.distributed as dist
from launches import Launch, Wait, faults, recorded
from ranks import run_ranks


def log(*entries):
    """("group", ranks, operation, ...) or a number to wait for -> a rank's log."""
    made = []
    for entry in entries:
        if isinstance(entry, int):
            made.append(Wait(entry))
        else:
            group, ranks, operation, *more = entry
            options = more[0] if more else {}
            made.append(
                Launch(len(made) + 1, group, ranks, operation, options.pop("bytes", 4), **options)
            )
    return made


def message(way, peer, ranks=(0, 1), group="p", **more):
    return (group, ranks, way, {"peer": peer, **more})


SUM = ("g", (0, 1), "all_reduce")
OTHER = ("h", (0, 1), "all_reduce")


def asynchronous(entry):
    return (*entry[:3], {"stays": False})


def test_what_is_the_same_everywhere_is_right():
    assert faults({rank: log(SUM, asynchronous(OTHER), SUM, 2) for rank in (0, 1)}) == []


@pytest.mark.parametrize(
    "other", [("g", (0, 1), "broadcast"), ("g", (0, 1), "all_reduce", {"bytes": 8})]
)
def test_another_operation_or_size(other):
    (line,) = faults({0: log(SUM, SUM), 1: log(SUM, other)})
    assert "operation 1" in line


def test_fewer_operations():
    assert any("1 operations on rank 1" in line for line in faults({0: log(SUM, SUM), 1: log(SUM)}))


def test_two_communicators_in_unlike_order():
    (line,) = faults({0: log(SUM, OTHER), 1: log(OTHER, SUM)})
    assert line.startswith("a circle of waits")
    assert (
        faults(
            {0: log(asynchronous(SUM), OTHER, 1), 1: log(asynchronous(OTHER), SUM, 1)}, bound=True
        )
        == []
    )


def test_making_a_communicator_holds_the_host_up():
    """Asynchronous or not: rank 0 makes g first, rank 1 h."""
    logs = {
        0: log(asynchronous(SUM), asynchronous(OTHER), 1, 2),
        1: log(asynchronous(OTHER), asynchronous(SUM), 1, 2),
    }
    (line,) = faults(logs)
    assert "circle" in line and faults(logs, bound=True) == []


def test_three_ranks_in_a_ring():
    ring = {
        rank: log((f"{rank}", pair, "all_reduce"), (f"{(rank + 1) % 3}", other, "all_reduce"))
        for rank, pair, other in ((0, (0, 2), (0, 1)), (1, (0, 1), (1, 2)), (2, (1, 2), (0, 2)))
    }
    assert any("circle" in line for line in faults(ring))


def test_both_send_first():
    both = {rank: log(message("send", 1 - rank), message("receive", 1 - rank)) for rank in (0, 1)}
    assert any("circle" in line for line in faults(both))
    turns = {0: both[0], 1: log(message("receive", 0), message("send", 0))}
    assert faults(turns) == []
    once = {"batch": 1, "stays": False}
    batch = {
        rank: log(message("send", 1 - rank, **once), message("receive", 1 - rank, **once), 1)
        for rank in (0, 1)
    }
    assert faults(batch) == []


def test_messages_of_unlike_sizes():
    (line,) = faults({0: log(message("send", 1)), 1: log(message("receive", 0, bytes=8))})
    assert "rank 0 sends [4] to 1, which receives [8]" in line


def test_a_batch_needs_all_of_its_group_once():
    """megatron-core's batched p2p, stages 0,1 | 2,3: ranks 0 and 3 have groups of pairs only."""
    four = (0, 1, 2, 3)
    logs = {rank: [] for rank in four}
    logs[1] = log(message("send", 2, four, batch=1))
    logs[2] = log(message("receive", 1, four, batch=1))
    assert any("is never used by [0, 3]" in line for line in faults(logs))
    assert faults(logs, bound=True) == []
    logs[1], logs[2] = log(message("send", 2, four)), log(message("receive", 1, four))
    assert faults(logs) == []  # a single message needs its two ends


def of_a_job(rank):
    group = dist.new_group([0, 1])
    with recorded() as found:
        work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
        dist.broadcast(torch.ones(2), 0)
        work.wait()
        ops = [
            dist.P2POp(dist.isend, torch.ones(3), 1 - rank),
            dist.P2POp(dist.irecv, torch.ones(3), 1 - rank),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        dist.reduce_scatter_tensor(torch.ones(2), torch.ones(4))
    dist.all_reduce(torch.ones(1))
    return found


def test_what_a_job_launches_is_recorded():
    logs = dict(enumerate(run_ranks(of_a_job, 2)))
    first, second, wait, send, receive, *_, last = logs[0]
    assert (first.operation, first.bytes, first.stays, first.ranks) == (
        "all_reduce",
        16,
        False,
        (0, 1),
    )
    assert (second.operation, second.stays, wait) == ("broadcast", True, Wait(1))
    assert (send.operation, send.peer, receive.batch) == (
        "send",
        1,
        send.batch,
    ) and send.batch == send.number
    assert (last.operation, last.bytes) == ("reduce_scatter", 8)
    assert faults(logs) == [] and faults(logs, bound=True) == []
