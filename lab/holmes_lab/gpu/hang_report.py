"""What a person reads about a job that stands still: the circle, what differs between ranks, and where each
rank is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from holmes_lab.gpu.hang import Hang, Node, RankHost
from holmes_lab.gpu.state import RankState, StreamWork

_FRAMES = 12  # of a thread's Python stack that are shown


def explain(
    hang: Hang, nodes: Mapping[int, str], stacks: Mapping[int, str] | None = None
) -> list[str]:
    """Lines for a person. nodes: rank -> where it runs; stacks: rank -> what Python's faulthandler wrote."""
    lines = []
    circle = hang.circle()
    if circle:
        lines.append("deadlock: each of these waits for the next, and the last for the first:")
        lines += [
            f"  {describe(hang, wait.node)} {wait.why} {describe(hang, wait.target)}"
            for wait in circle
        ]
    else:
        lines.append(
            "all ranks are stalled, but CUDA calls and kernels form no cycle: a host waits elsewhere"
        )
    for communicator, by_what in hang.differences():
        parts = [f"{what} on {_ranks(ranks)}" for what, ranks in by_what.items()]
        lines.append(f"mismatched collectives in {hang.group_of(communicator)}: {'; '.join(parts)}")
    lines.append("where each rank is:")
    for rank, state in sorted(hang.states.items()):
        lines += _of_rank(hang, state, nodes.get(rank, state.node))
        lines += [f"      {line}" for line in _frames((stacks or {}).get(rank, ""))]
    return lines


def describe(hang: Hang, node: Node) -> str:
    """ "rank 1: stream 7: kernel AllReduce of 4 (group stage link 0-1)"."""
    if isinstance(node, RankHost):
        return f"rank {node.rank}: its host"
    work = hang.work.get(node)
    if work is None:  # not among the first ones that the rank has shown
        return f"rank {node.rank}: stream {node.stream}: work {node.sequence}"
    return f"rank {node.rank}: stream {node.stream}: {label(work)}"


def label(work: StreamWork) -> str:
    """ "kernel AllReduce of 4 (communicator 0x12ab, operation 7)"."""
    if not work.communicator:
        return f"{work.kind} {work.name}"
    group = f"group {work.group}, " if work.group else ""
    return f"kernel {work.what} ({group}communicator {work.communicator}, operation {work.number})"


def _of_rank(hang: Hang, state: RankState, node: str) -> Iterator[str]:
    calls = [f"its host waits in {host.call}" for host in state.hosts] or [
        "its host is in no CUDA call"
    ]
    yield f"  rank {state.rank} ({node}): {'; '.join(calls)}"
    for (_, number, queue), works in state.streams.items():
        waits = [f"{wait.why} {describe(hang, wait.target)}" for wait in hang.waits[works[0].place]]
        behind = f"; behind it {len(works) - 1} more" if len(works) > 1 else ""
        doing = waits[0] if waits else "runs" if works[0].started else "is about to start"
        yield f"    stream {number} (hardware queue {queue}): {label(works[0])} {doing}{behind}"


def _frames(text: str) -> Iterator[str]:
    """The stack of each thread, the innermost call first, shortened."""
    shown = 0
    for line in text.splitlines():
        if not line.startswith("  "):
            shown = 0
        shown += 1
        if line.strip() and shown <= _FRAMES + 1:
            yield line


def _ranks(ranks: Sequence[int]) -> str:
    numbers = ", ".join(map(str, sorted(set(ranks))))
    return f"rank {numbers}" if len(set(ranks)) == 1 else f"ranks {numbers}"
