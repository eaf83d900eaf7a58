"""Programs whose numbers are wrong if a kernel starts late; planted.py runs them."""

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

SIZE = 1 << 14  # elements
#: Name of a fault -> its function. The argument is True for the corrected program.
FAULTS: dict[str, Callable[[bool], None]] = {}


def fault(function: Callable[[bool], None]) -> Callable[[bool], None]:
    FAULTS[function.__name__] = function
    return function


def check(found: torch.Tensor, expected: float, fault: str = "") -> None:
    """Wait for all streams, and print whether all numbers are as expected.

    Args:
        fault: Name to print; by default the name of the calling function.
    """
    torch.cuda.synchronize()
    wrong = (found.float().cpu() != expected).sum().item()
    fault = fault or sys._getframe(1).f_code.co_name
    verdict = "right" if wrong == 0 else f"wrong: {wrong} of {found.numel()} numbers"
    print(f"{fault}: {verdict}", flush=True)


def slow(value: float, size: int = SIZE) -> torch.Tensor:
    """Return a tensor that the GPU fills slowly, in memory that held other numbers before."""
    made = torch.full((size,), -7.0, device="cuda")
    torch.cuda.synchronize()
    made.zero_()
    for _ in range(10):
        made += value / 10
    return made.round_()


def check_doubled(made: torch.Tensor, side: torch.cuda.Stream) -> None:
    """Double a tensor of tens on a side stream, and check the result."""
    with torch.cuda.stream(side):
        doubled = made * 2
    check(doubled, 20.0, sys._getframe(1).f_code.co_name)


def side_stream() -> torch.cuda.Stream:
    """Return a stream with memory in torch's cache, since allocating would wait for the device."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.empty(SIZE, device="cuda")
    return side


@fault
def consumer_does_not_wait(right: bool) -> None:
    """Read on a side stream while the main stream still writes."""
    side = side_stream()
    torch.cuda.synchronize()
    made = slow(10.0)
    if right:
        side.wait_stream(torch.cuda.current_stream())
    check_doubled(made, side)


@fault
def collective_does_not_wait(right: bool) -> None:
    """Call all-reduce on a side stream for a tensor that the main stream still writes."""
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
    """Read the result of an asynchronous all-reduce before waiting for its work."""
    made = torch.full((SIZE,), 1.0, device="cuda")
    work = dist.all_reduce(made, async_op=True)
    if right:
        work.wait()
    doubled = made * 2
    work.wait()
    check(doubled, 2.0 * dist.get_world_size())


@fault
def sum_is_copied_too_early(right: bool) -> None:
    """Copy a tensor while its all-reduce runs (torch skips the copy of a tensor to itself)."""
    made = torch.full((SIZE,), 1.0, device="cuda")
    copied = made.view(-1) if right else torch.empty(SIZE, device="cuda")
    torch.cuda.synchronize()
    work = dist.all_reduce(made, async_op=True)
    copied.copy_(made)
    work.wait()
    check(copied, float(dist.get_world_size()))


@fault
def buffer_is_reused_too_early(right: bool) -> None:
    """Free a tensor that a side stream reads; the next tensor of the main stream takes its memory."""
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
    """Read a copy in pinned memory on the host before it is complete."""
    on_host = torch.zeros(SIZE, pin_memory=True)
    on_host.copy_(slow(10.0), non_blocking=True)
    if right:
        torch.cuda.synchronize()
    read = on_host.clone()
    check(read, 10.0)


@fault
def pinned_source_is_changed_too_early(right: bool) -> None:
    """Refill a pinned batch while its copy to the GPU waits behind a kernel."""
    batch = torch.full((SIZE,), 1.0).pin_memory()
    on_gpu = torch.empty(SIZE, device="cuda")
    torch.cuda._sleep(20_000_000)
    on_gpu.copy_(batch, non_blocking=True)
    if right:
        torch.cuda.synchronize()
    batch.fill_(7.0)
    check(on_gpu, 1.0)


@fault
def event_is_recorded_too_early(right: bool) -> None:
    """Wait on a side stream for an event that was recorded before the kernels it should cover."""
    side = side_stream()
    event = torch.cuda.Event()
    torch.cuda.synchronize()
    event.record()
    made = slow(10.0)
    if right:
        event.record()
    side.wait_event(event)
    check_doubled(made, side)
