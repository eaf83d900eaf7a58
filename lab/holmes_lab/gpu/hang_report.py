"""Formats the report of a stalled job on emulated GPUs.

The report lists the cycle of the wait-for graph, collectives that differ between ranks, and the pending work
and Python stacks of each rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from holmes_lab.gpu.hang import RankHost, Vertex, WaitForGraph
from holmes_lab.gpu.state import RankState, StreamWork

_MAX_FRAMES = 12  # of each thread's Python stack


def explain(
    graph: WaitForGraph, nodes: Mapping[int, str], stacks: Mapping[int, str] | None = None
) -> list[str]:
    """Return the lines of the report about a stalled job.

    Args:
        graph: Wait-for graph of the job.
        nodes: Name of each rank's node.
        stacks: Python stacks of each rank, in the format of faulthandler.
    """
    lines = []
    cycle = graph.find_cycle()
    if cycle:
        lines.append("deadlock: each of these waits for the next, and the last for the first:")
        for wait in cycle:
            waiter = describe(graph, wait.waiter)
            target = describe(graph, wait.target)
            lines.append(f"  {waiter} {wait.reason} {target}")
    else:
        lines.append(
            "all ranks are stalled, but CUDA calls and kernels form no cycle: a host waits elsewhere"
        )
    for mismatch in graph.find_mismatches():
        communicator = graph.describe_communicator(mismatch.communicator)
        collectives = [
            f"{collective} on {_format_ranks(ranks)}"
            for collective, ranks in mismatch.ranks_of.items()
        ]
        lines.append(f"mismatched collectives in {communicator}: {'; '.join(collectives)}")
    lines.append("where each rank is:")
    for rank, state in sorted(graph.states.items()):
        lines.extend(_describe_rank(graph, state, node=nodes.get(rank, state.node)))
        stack = stacks.get(rank, "") if stacks else ""
        lines.extend(f"      {line}" for line in _shorten_stacks(stack))
    return lines


def describe(graph: WaitForGraph, vertex: Vertex) -> str:
    """Return a host or pending work in words: "rank 1: stream 7: kernel AllReduce of 4 (...)"."""
    if isinstance(vertex, RankHost):
        return f"rank {vertex.rank}: its host"
    work = graph.work.get(vertex)
    if work is None:  # a rank reports only the first work of a long stream
        return f"rank {vertex.rank}: stream {vertex.stream}: work {vertex.sequence}"
    return f"rank {vertex.rank}: stream {vertex.stream}: {describe_work(work)}"


def describe_work(work: StreamWork) -> str:
    """Return work in words: "kernel AllReduce of 4 (communicator 0x12ab, operation 7)"."""
    if not work.communicator:
        return f"{work.kind} {work.name}"
    group = f"group {work.group}, " if work.group else ""
    origin = f"{group}communicator {work.communicator}, operation {work.operation_number}"
    return f"kernel {work.operation} ({origin})"


def _describe_rank(graph: WaitForGraph, state: RankState, node: str) -> Iterator[str]:
    """Yield a line about the host of a rank, and a line about each of its streams with work."""
    calls = [f"its host waits in {host.call}" for host in state.host_waits]
    if not calls:
        calls = ["its host is in no CUDA call"]
    yield f"  rank {state.rank} ({node}): {'; '.join(calls)}"
    for stream, works in state.streams.items():
        head = works[0]
        waits = graph.waits[head.work_id]
        if waits:
            status = f"{waits[0].reason} {describe(graph, waits[0].target)}"
        elif head.started:
            status = "runs"
        else:
            status = "is about to start"
        behind = f"; behind it {len(works) - 1} more" if len(works) > 1 else ""
        name = f"stream {stream.stream} (hardware queue {stream.queue})"
        yield f"    {name}: {describe_work(head)} {status}{behind}"


def _shorten_stacks(text: str) -> Iterator[str]:
    """Yield the header and the innermost frames of each thread from the output of faulthandler."""
    lines_of_thread = 0
    for line in text.splitlines():
        is_header = not line.startswith("  ")
        if is_header:
            lines_of_thread = 0
        lines_of_thread += 1
        if line.strip() and lines_of_thread <= _MAX_FRAMES + 1:  # the header is a line, too
            yield line


def _format_ranks(ranks: Sequence[int]) -> str:
    distinct = sorted(set(ranks))
    numbers = ", ".join(map(str, distinct))
    return f"rank {numbers}" if len(distinct) == 1 else f"ranks {numbers}"
