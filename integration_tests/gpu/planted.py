"""Faults that hide on a quiet machine:

    python planted.py FAULT... [--right]        torchrun's variables say which rank

Each is a few lines of what people write, wrong; with --right the same lines, mended. A run prints a line for
each, "FAULT: right" or "FAULT: wrong: ..." for its numbers; a fault that hangs prints nothing.
"""

import argparse
import os

import torch
import torch.distributed as dist
from planted_numbers import FAULTS, SIZE, check, fault, side_stream


def pairs(streams_between: int = 0) -> list:
    """Two groups of the same ranks, with their communicators made, and streams of the program between
    them."""
    groups = [dist.new_group([0, 1], group_desc=name) for name in ("first", "second")]
    for number, group in enumerate(groups):
        made = [torch.cuda.Stream() for _ in range(streams_between * number)]
        assert len(made) == streams_between * number
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
    direction = dist.isend if sends else dist.irecv
    return dist.batch_isend_irecv([dist.P2POp(direction, tensor, 1 - dist.get_rank(), group)])


@fault
def communicators_in_other_orders(right: bool) -> None:
    """Two ranks use two groups in opposite orders, and wait for the device after each."""
    groups = pairs()
    ordered = groups if right or dist.get_rank() == 0 else groups[::-1]
    value = torch.ones(SIZE, device="cuda")
    for group in ordered:
        dist.all_reduce(value, group=group)
        torch.cuda.synchronize()
    check(value, 4.0)


@fault
def receive_before_a_device_wait(right: bool) -> None:
    """A receive is posted in advance, and the device is waited for before its sender can have come so far."""
    early, late = pairs()
    value, total = torch.full((SIZE,), 5.0, device="cuda"), torch.ones(SIZE, device="cuda")
    if dist.get_rank() == 0:
        works = [] if right else send_or_receive(value, False, early)
        torch.cuda.synchronize()
        dist.all_reduce(total, group=late)
        works = works or send_or_receive(value, False, early)
    else:
        dist.all_reduce(total, group=late)
        torch.cuda.synchronize()
        works = send_or_receive(value, True, early)
    for work in works:
        work.wait()
    check(value, 5.0)


@fault
def both_send_first(right: bool) -> None:
    """Both ranks send a large message and wait for it before they receive."""
    group = pairs()[0]
    mine, other = torch.full((1 << 22,), 5.0, device="cuda"), torch.empty(1 << 22, device="cuda")
    order = [(mine, True), (other, False)]
    for tensor, sends in order[::-1] if right and dist.get_rank() else order:
        for work in send_or_receive(tensor, sends, group):
            work.wait()
        torch.cuda.synchronize()
    check(other, 5.0)


@fault
def another_collective(right: bool) -> None:
    """One rank reduces where the other gathers, on the same group."""
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
    """With CUDA_DEVICE_MAX_CONNECTIONS=1 a second posted receive, which waits for the first, stands before
    the kernels whose result its sender needs."""
    first, second = pairs()
    value = torch.full((SIZE,), 5.0, device="cuda")
    answers = torch.empty(2, SIZE, device="cuda")

    def receives():
        return [work for answer in answers for work in send_or_receive(answer, False, second)]

    if dist.get_rank() == 0:
        works = [] if right else receives()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            works += send_or_receive(value * 2, True, first)
        works += receives() if right else []
    else:
        for work in send_or_receive(answers[0], False, first):
            work.wait()
        works = [work for _ in answers for work in send_or_receive(answers[0] + 1, True, second)]
    for work in works:
        work.wait()
    check(answers[0], 11.0 if dist.get_rank() == 0 else 10.0)


@fault
def sizes_differ(right: bool) -> None:
    """One rank reduces a longer tensor than the other."""
    dist.all_reduce(torch.zeros(1, device="cuda"))
    value = torch.ones(1 << 20 if right or dist.get_rank() == 0 else 1 << 10, device="cuda")
    dist.all_reduce(value)
    torch.cuda.synchronize()
    dist.all_reduce(value)
    check(value, 4.0)


@fault
def rank_waits_elsewhere(right: bool) -> None:
    """A rank waits in the store for what the other does after a collective that both must call."""
    store, value = dist.distributed_c10d._get_default_store(), torch.ones(SIZE, device="cuda")
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
    """Two ranks launch two groups' collectives in opposite orders: well where both run at once, a circle
    where the device has no multiprocessor left (HOLMES_GPU_SMS=1)."""
    groups = pairs()
    values = [torch.ones(SIZE, device="cuda") for _ in groups]
    torch.cuda.synchronize()
    for number in (0, 1) if right or dist.get_rank() == 0 else (1, 0):
        dist.all_reduce(values[number], group=groups[number], async_op=True)
    torch.cuda.synchronize()
    check(torch.stack(values), 2.0)


@fault
def launched_in_order(right: bool) -> None:
    """A reduction stands behind a receive whose sender needs another group's reduction first: a circle where
    NCCL begins kernels in the order of their launches (NCCL_LAUNCH_ORDER_IMPLICIT=1), as that one was
    launched later."""
    first, second = pairs()
    dist.all_reduce(torch.zeros(1, device="cuda"))
    value, answer = torch.ones(SIZE, device="cuda"), torch.ones(SIZE, device="cuda")
    torch.cuda.synchronize()
    if dist.get_rank() == 0:
        if right:
            dist.all_reduce(value, group=second, async_op=True)
        with torch.cuda.stream(side_stream()):
            for work in send_or_receive(answer, False, first):
                work.wait()
            dist.all_reduce(answer, async_op=True)
        if not right:
            dist.all_reduce(value, group=second, async_op=True)
    else:
        dist.all_reduce(value, group=second)
        for work in send_or_receive(value, True, first):
            work.wait()
        dist.all_reduce(answer)
    check(answer, 3.0)


@fault
def pooled_streams(right: bool) -> None:
    """torch has 32 streams in its pool: after 31 more the second group's is the first one's, on which a
    receive waits for what the other rank sends once it has heard from the second group."""
    first, second = pairs(0 if right else 31)
    value, answer = torch.full((SIZE,), 5.0, device="cuda"), torch.empty(SIZE, device="cuda")
    if dist.get_rank() == 0:
        works = send_or_receive(answer, False, first) + send_or_receive(value, True, second)
    else:
        for work in send_or_receive(value, False, second):
            work.wait()
        works = send_or_receive(value + 1, True, first)
    for work in works:
        work.wait()
    check(answer if dist.get_rank() == 0 else value, 6.0 if dist.get_rank() == 0 else 5.0)


@fault
def both_receive_first(right: bool) -> None:
    """Both ranks wait on the host (TORCH_NCCL_BLOCKING_WAIT=1) for the other's message before they send
    theirs."""
    group = pairs()[0]
    mine, other = torch.full((SIZE,), 5.0, device="cuda"), torch.empty(SIZE, device="cuda")
    order = [(other, False), (mine, True)]
    for tensor, sends in order[::-1] if right and dist.get_rank() else order:
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
