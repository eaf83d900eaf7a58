"""Programs with a synchronization error that rarely shows on a quiet machine.

    python planted.py FAULT... [--right]

torchrun's environment variables must be set. Each function marked as `fault` has an error as people make
it; with --right it is corrected. A fault prints a line, "FAULT: right" or "FAULT: wrong: ..." for its
numbers; a fault that hangs prints nothing.
"""

import argparse
import os

import torch
import torch.distributed as dist
from planted_numbers import FAULTS, SIZE, check, fault, side_stream


def pairs(streams_between: int = 0) -> list:
    """Return two groups of both ranks, whose communicators are already made.

    Args:
        streams_between: Number of CUDA streams that the program makes between the two groups.
    """
    groups = [dist.new_group([0, 1], group_desc=name) for name in ("first", "second")]
    for number, group in enumerate(groups):
        streams = [torch.cuda.Stream() for _ in range(streams_between * number)]
        assert len(streams) == streams_between * number
        dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
        peer = 1 - dist.get_rank()
        ops = [
            dist.P2POp(dist.isend, torch.zeros(1, device="cuda"), peer, group),
            dist.P2POp(dist.irecv, torch.zeros(1, device="cuda"), peer, group),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    torch.cuda.synchronize()
    return groups


def send_or_receive(tensor: torch.Tensor, sends: bool, group) -> list:
    """Start sending a tensor to the other rank, or receiving it, and return the pending operations."""
    direction = dist.isend if sends else dist.irecv
    return dist.batch_isend_irecv([dist.P2POp(direction, tensor, 1 - dist.get_rank(), group)])


@fault
def communicators_in_other_orders(right: bool) -> None:
    """Use two groups in opposite orders on two ranks, and wait for the device after each."""
    groups = pairs()
    ordered = groups if right or dist.get_rank() == 0 else groups[::-1]
    value = torch.ones(SIZE, device="cuda")
    for group in ordered:
        dist.all_reduce(value, group=group)
        torch.cuda.synchronize()
    check(value, 4.0)


@fault
def receive_before_a_device_wait(right: bool) -> None:
    """Post a receive in advance, and wait for the device before its sender can have sent."""
    early, late = pairs()
    value = torch.full((SIZE,), 5.0, device="cuda")
    total = torch.ones(SIZE, device="cuda")
    if dist.get_rank() == 0:
        works = [] if right else send_or_receive(value, sends=False, group=early)
        torch.cuda.synchronize()
        dist.all_reduce(total, group=late)
        works = works or send_or_receive(value, sends=False, group=early)
    else:
        dist.all_reduce(total, group=late)
        torch.cuda.synchronize()
        works = send_or_receive(value, sends=True, group=early)
    for work in works:
        work.wait()
    check(value, 5.0)


@fault
def both_send_first(right: bool) -> None:
    """Send a large message and wait for it before receiving, on both ranks."""
    group = pairs()[0]
    mine = torch.full((1 << 22,), 5.0, device="cuda")
    other = torch.empty(1 << 22, device="cuda")
    operations = [(mine, True), (other, False)]  # (tensor, whether it is sent)
    if right and dist.get_rank() == 1:
        operations.reverse()
    for tensor, sends in operations:
        for work in send_or_receive(tensor, sends, group):
            work.wait()
        torch.cuda.synchronize()
    check(other, 5.0)


@fault
def another_collective(right: bool) -> None:
    """Call an all-reduce on one rank and a broadcast on the other, in the same group."""
    value = torch.ones(1 << 22, device="cuda")
    dist.all_reduce(torch.zeros(1, device="cuda"))
    torch.cuda.synchronize()
    if right or dist.get_rank() == 0:
        dist.all_reduce(value)
    else:
        dist.broadcast(value, 1)
    torch.cuda.synchronize()
    dist.all_reduce(value)
    check(value, 4.0)


@fault
def one_hardware_queue(right: bool) -> None:
    """Post a second receive before kernels whose result its sender needs.

    The receive waits for the first one. With CUDA_DEVICE_MAX_CONNECTIONS=1 the kernels stand in the same
    hardware queue behind it.
    """
    first, second = pairs()
    value = torch.full((SIZE,), 5.0, device="cuda")
    answers = torch.empty(2, SIZE, device="cuda")

    def receives():
        works = []
        for answer in answers:
            works += send_or_receive(answer, sends=False, group=second)
        return works

    if dist.get_rank() == 0:
        works = [] if right else receives()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            works += send_or_receive(value * 2, sends=True, group=first)
        if right:
            works += receives()
    else:
        for work in send_or_receive(answers[0], sends=False, group=first):
            work.wait()
        works = []
        for _ in answers:
            works += send_or_receive(answers[0] + 1, sends=True, group=second)
    for work in works:
        work.wait()
    check(answers[0], 11.0 if dist.get_rank() == 0 else 10.0)


@fault
def sizes_differ(right: bool) -> None:
    """Reduce a longer tensor on one rank than on the other."""
    dist.all_reduce(torch.zeros(1, device="cuda"))
    value = torch.ones(1 << 20 if right or dist.get_rank() == 0 else 1 << 10, device="cuda")
    dist.all_reduce(value)
    torch.cuda.synchronize()
    dist.all_reduce(value)
    check(value, 4.0)


@fault
def rank_waits_elsewhere(right: bool) -> None:
    """Wait in the store for a key that the other rank sets after a collective of both ranks."""
    store = dist.distributed_c10d._get_default_store()
    value = torch.ones(SIZE, device="cuda")
    dist.all_reduce(torch.zeros(1, device="cuda"))
    torch.cuda.synchronize()
    if dist.get_rank() == 0:
        dist.all_reduce(value)
        torch.cuda.synchronize()
        store.set("rank_waits_elsewhere", "1")
    else:
        if not right:
            store.wait(["rank_waits_elsewhere"])
        dist.all_reduce(value)
        torch.cuda.synchronize()
        store.wait(["rank_waits_elsewhere"])
    check(value, 2.0)


@fault
def side_by_side(right: bool) -> None:
    """Launch collectives of two groups in opposite orders on two ranks.

    They complete if both run at once, and deadlock if the device has no multiprocessor left
    (HOLMES_GPU_SMS=1).
    """
    groups = pairs()
    values = [torch.ones(SIZE, device="cuda") for _ in groups]
    torch.cuda.synchronize()
    order = (0, 1) if right or dist.get_rank() == 0 else (1, 0)
    for number in order:
        dist.all_reduce(values[number], group=groups[number], async_op=True)
    torch.cuda.synchronize()
    check(torch.stack(values), 2.0)


@fault
def launched_in_order(right: bool) -> None:
    """Launch a reduction behind a receive whose sender needs another group's reduction first.

    This deadlocks if NCCL begins kernels in the order of their launches (NCCL_LAUNCH_ORDER_IMPLICIT=1),
    since the other reduction is launched later.
    """
    first, second = pairs()
    dist.all_reduce(torch.zeros(1, device="cuda"))
    value = torch.ones(SIZE, device="cuda")
    answer = torch.ones(SIZE, device="cuda")
    torch.cuda.synchronize()
    if dist.get_rank() == 0:
        if right:
            dist.all_reduce(value, group=second, async_op=True)
        with torch.cuda.stream(side_stream()):
            for work in send_or_receive(answer, sends=False, group=first):
                work.wait()
            dist.all_reduce(answer, async_op=True)
        if not right:
            dist.all_reduce(value, group=second, async_op=True)
    else:
        dist.all_reduce(value, group=second)
        for work in send_or_receive(value, sends=True, group=first):
            work.wait()
        dist.all_reduce(answer)
    check(answer, 3.0)


@fault
def pooled_streams(right: bool) -> None:
    """Make so many streams that two groups share one of the 32 streams in torch's pool.

    After 31 more streams, the second group gets the first group's stream. A receive on it waits for a
    message that the other rank sends after it has received from the second group.
    """
    first, second = pairs(0 if right else 31)
    value = torch.full((SIZE,), 5.0, device="cuda")
    answer = torch.empty(SIZE, device="cuda")
    if dist.get_rank() == 0:
        works = send_or_receive(answer, sends=False, group=first)
        works += send_or_receive(value, sends=True, group=second)
    else:
        for work in send_or_receive(value, sends=False, group=second):
            work.wait()
        works = send_or_receive(value + 1, sends=True, group=first)
    for work in works:
        work.wait()
    if dist.get_rank() == 0:
        check(answer, 6.0)
    else:
        check(value, 5.0)


@fault
def both_receive_first(right: bool) -> None:
    """Wait on the host for the other rank's message before sending, on both ranks.

    The host waits because of TORCH_NCCL_BLOCKING_WAIT=1.
    """
    group = pairs()[0]
    mine = torch.full((SIZE,), 5.0, device="cuda")
    other = torch.empty(SIZE, device="cuda")
    operations = [(other, False), (mine, True)]  # (tensor, whether it is sent)
    if right and dist.get_rank() == 1:
        operations.reverse()
    for tensor, sends in operations:
        for work in send_or_receive(tensor, sends, group):
            work.wait()
    check(other, 5.0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("faults", choices=FAULTS, nargs="+")
    parser.add_argument("--right", action="store_true")
    parser.add_argument("--repeat", type=int, default=1)
    arguments = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    for name in arguments.faults * arguments.repeat:
        FAULTS[name](arguments.right)
    dist.destroy_process_group()
