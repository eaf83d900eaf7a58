"""Faults after which numbers are wrong where a kernel starts late; planted.py runs them."""

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

SIZE = 1 << 14
FAULTS: dict[str, Callable[[bool], None]] = {}


def fault(function: Callable[[bool], None]) -> Callable[[bool], None]:
    FAULTS[function.__name__] = function
    return function


def check(found: torch.Tensor, expected: float, fault: str = "") -> None:
    """Once all streams are done. fault: the caller, unless it is given."""
    torch.cuda.synchronize()
    bad = (found.float().cpu() != expected).sum().item()
    fault = fault or sys._getframe(1).f_code.co_name
    print(
        f"{fault}: right" if bad == 0 else f"{fault}: wrong: {bad} of {found.numel()} numbers",
        flush=True,
    )


def slow(value: float, size: int = SIZE) -> torch.Tensor:
    """A tensor that takes the GPU a while to make, where another number was before."""
    made = torch.full((size,), -7.0, device="cuda")
    torch.cuda.synchronize()
    made.zero_()
    for _ in range(10):
        made += value / 10
    return made.round_()


def check_doubled(made: torch.Tensor, side: torch.cuda.Stream) -> None:
    """That a side stream reads tens."""
    with torch.cuda.stream(side):
        doubled = made * 2
    check(doubled, 20.0, sys._getframe(1).f_code.co_name)


def side_stream() -> torch.cuda.Stream:
    """A stream with memory of its own at hand: asking CUDA for it waits for the device."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.empty(SIZE, device="cuda")
    return side


@fault
def consumer_does_not_wait(right: bool) -> None:
    """A side stream reads what the main stream still writes."""
    side = side_stream()
    torch.cuda.synchronize()
    made = slow(10.0)
    if right:
        side.wait_stream(torch.cuda.current_stream())
    check_doubled(made, side)


@fault
def collective_does_not_wait(right: bool) -> None:
    """An all-reduce on a side stream sends what the main stream still writes."""
    side = side_stream()
    dist.all_reduce(torch.zeros(1, device="cuda"))
    torch.cuda.synchronize()
    made = slow(10.0)
    if right:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        dist.all_reduce(made)
    check(made, 10.0 * dist.get_world_size())


@fault
def work_is_not_waited_for(right: bool) -> None:
    """The result of an asynchronous all-reduce is read before its work is waited for."""
    made = torch.full((SIZE,), 1.0, device="cuda")
    work = dist.all_reduce(made, async_op=True)
    if right:
        work.wait()
    doubled = made * 2
    work.wait()
    check(doubled, 2.0 * dist.get_world_size())


@fault
def sum_is_copied_too_early(right: bool) -> None:
    """A tensor is copied while its all-reduce runs. torch skips the copy of a tensor to itself."""
    made = torch.full((SIZE,), 1.0, device="cuda")
    copied = made.view(-1) if right else torch.empty(SIZE, device="cuda")
    torch.cuda.synchronize()
    work = dist.all_reduce(made, async_op=True)
    copied.copy_(made)
    work.wait()
    check(copied, float(dist.get_world_size()))


@fault
def buffer_is_reused_too_early(right: bool) -> None:
    """A tensor that a side stream reads is freed on the main stream, whose next tensor takes its memory."""
    side = side_stream()
    made = torch.full((SIZE,), 3.0, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        doubled = made * 2
    if right:
        made.record_stream(side)
    del made
    torch.full((SIZE,), 50.0, device="cuda")
    check(doubled, 6.0)


@fault
def pinned_result_is_read_too_early(right: bool) -> None:
    """A copy to pinned memory is read by the host before it has come."""
    there = torch.zeros(SIZE, pin_memory=True)
    there.copy_(slow(10.0), non_blocking=True)
    if right:
        torch.cuda.synchronize()
    seen = there.clone()
    check(seen, 10.0)


@fault
def pinned_source_is_changed_too_early(right: bool) -> None:
    """A pinned batch is filled anew while its copy to the GPU waits behind a kernel."""
    batch, there = torch.full((SIZE,), 1.0).pin_memory(), torch.empty(SIZE, device="cuda")
    torch.cuda._sleep(20_000_000)
    there.copy_(batch, non_blocking=True)
    if right:
        torch.cuda.synchronize()
    batch.fill_(7.0)
    check(there, 1.0)


@fault
def event_is_recorded_too_early(right: bool) -> None:
    """A side stream waits for an event that was recorded before the kernels whose result it reads."""
    side, event = side_stream(), torch.cuda.Event()
    torch.cuda.synchronize()
    event.record()
    made = slow(10.0)
    if right:
        event.record()
    side.wait_event(event)
    check_doubled(made, side)
