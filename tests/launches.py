"""Predicts how NCCL would execute the operations that a job launches: hangs and mixed-up messages.

    with recorded() as log: ...          in each rank, over gloo: every operation
                                         of torch's process groups, in order
    faults({rank: log}, bound) -> lines  none: under NCCL no operation hangs or mixes with another

NCCL differs from gloo in three ways, and each is a rule here:

    order      a communicator executes its operations in the order of their launch, the same operations on
               every rank; messages between two ranks are matched in their order
    circles    an operation waits for those before it on its communicator and, unless it is asynchronous,
               on the stream; wait() blocks the stream. These waits must never form a circle. It is assumed
               that the host waits as well (as it does if a loss is read), which is stricter than NCCL
    members    a communicator is made when its first operation is launched, and all its ranks must come there,
               while their hosts wait: for collectives and batches of messages all ranks of the group, for
               single messages the two ends. With a bound device (init_process_group(device_id=...)) the
               communicator of the group is used for all operations and exists from the beginning

And a fourth, with blocking=True: every operation waits for the one launched before it on its rank, on any
communicator. CUDA_LAUNCH_BLOCKING=1 has this effect. One hardware queue, streams that share a queue, and a
wait for the device between two launches have a part of it. Operations without a circle under this rule have
none in those cases (NCCL's user guide, "Using multiple NCCL communicators concurrently", requires the
same).
"""

from __future__ import annotations

import graphlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch.distributed as dist

from holmes_ext.patches.torch.telemetry import METHODS, RENAMED, _size_in_bytes


@dataclass(frozen=True)
class Launch:
    """An operation that a rank has launched."""

    number: int  # position in the log, from 1
    group: str
    ranks: tuple[int, ...]  # of the group
    operation: str
    bytes: int
    peer: int | None = None  # global rank of the other end of a "send" or "receive"
    batch: int = 0  # number of the batch of messages; 0: not in a batch
    stays: bool = True  # the stream waits for the end of the operation


@dataclass(frozen=True)
class Wait:
    """The stream waits for the launch of this number."""

    number: int


Log = list[Launch | Wait]


@contextmanager
def recorded() -> Iterator[Log]:
    """Record every operation that Python code starts on a process group of this process, in a list."""
    log: Log = []
    works: dict[int, tuple[int, Any]] = {}  # the work is kept: its id must not come back
    batch = [0]

    def note(group: Any, operation: str, size: int, to: int | None, stays: bool) -> int:
        ranks = tuple(dist.get_process_group_ranks(group))
        peer = None if to is None else ranks[to]
        log.append(
            Launch(len(log) + 1, group.group_name, ranks, operation, size, peer, batch[0], stays)
        )
        return len(log)

    def noting(original: Any, name: str, payload: int | None, to: int | None = None) -> Any:
        """Return a method that calls a method of ProcessGroup, and notes the operation that it starts.

        Args:
            original: The method of ProcessGroup.
            name: The operation's name in the log.
            payload: Position of the argument that is sent or received; None if the operation has none.
            to: Position of the argument with the other rank, of a send or receive.
        """

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            size = 0
            if payload is not None:
                size = _size_in_bytes(args[payload])
            peer = None
            if to is not None:
                peer = args[to]
            # The last argument of a collective is an object with its options.
            arguments = [*args, *kwargs.values()]
            is_asynchronous = bool(arguments) and getattr(arguments[-1], "asyncOp", False)
            is_collective = to is None
            # note() appends the operation to the log, and returns its number there. The stream stays at a
            # synchronous collective until it is over.
            number = note(self, name, size, peer, stays=is_collective and not is_asynchronous)
            work = original(self, *args, **kwargs)
            if work is not None:
                # A later wait() finds its operation here. The tuple keeps `work`, so its id stays unique.
                works[id(work)] = number, work
            return work

        return call

    wait_of, batch_of = dist.Work.wait, dist.batch_isend_irecv

    def wait(self: Any, *args: Any) -> Any:
        result = wait_of(self, *args)
        if (number := works.get(id(self), (0, None))[0]) and not getattr(
            log[number - 1], "stays", False
        ):
            log.append(Wait(number))
        return result

    def batched(ops: Sequence[Any]) -> Any:
        batch[0] = len(log) + 1
        try:
            return batch_of(ops)
        finally:
            batch[0] = 0

    of_one = {new if hasattr(dist.ProcessGroup, new) else old: about for new, old, about in RENAMED}
    with ExitStack() as stack:
        for method, about in {**METHODS, **of_one}.items():
            method_with_note = noting(getattr(dist.ProcessGroup, method), *about)
            stack.enter_context(mock.patch.object(dist.ProcessGroup, method, method_with_note))
        stack.enter_context(mock.patch.object(dist.Work, "wait", wait))
        stack.enter_context(mock.patch.object(dist, "batch_isend_irecv", batched))
        yield log


def faults(logs: Mapping[int, Log], bound: bool = False, blocking: bool = False) -> list[str]:
    """Return the faults that NCCL would have with the operations in these logs.

    Args:
        logs: Rank -> log.
        bound: The communicator of every group exists from the beginning.
        blocking: An operation begins when the one before it on its rank is over.
    """
    return [*_unlike(logs), *([] if bound else _absent(logs)), *_circles(logs, bound, blocking)]


def _launches(log: Log) -> list[Launch]:
    return [entry for entry in log if isinstance(entry, Launch)]


def _unlike(logs: Mapping[int, Log]) -> Iterator[str]:
    """Yield ranks of a communicator that launch different operations, or in another order."""
    collectives: dict[tuple, dict[int, list]] = defaultdict(lambda: defaultdict(list))
    messages: dict[tuple, dict[str, list]] = defaultdict(lambda: defaultdict(list))
    for rank, log in logs.items():
        for one in _launches(log):
            if one.peer is None:
                collectives[one.group, one.ranks][rank].append((one.operation, one.bytes))
            else:
                ends = (rank, one.peer) if one.operation == "send" else (one.peer, rank)
                messages[(one.group, one.ranks, *ends)][one.operation].append(one.bytes)
    for (group, ranks), of in collectives.items():
        first = next(iter(of))
        for rank in ranks:
            place = next((n for n, (a, b) in enumerate(zip(of[rank], of[first])) if a != b), None)
            if place is not None:
                mine, theirs = (of[one][place] for one in (rank, first))
                yield f"group {group}: operation {place} is {mine} on rank {rank}, {theirs} on rank {first}"
            elif len(of[rank]) != len(of[first]):
                yield (
                    f"group {group}: {len(of[rank])} operations on rank {rank}, {len(of[first])} on rank "
                    f"{first}"
                )
    for (group, _, source, target), ends in messages.items():
        if ends["send"] != ends["receive"]:
            yield (
                f"group {group}: rank {source} sends {ends['send']} to {target}, which receives "
                f"{ends['receive']}"
            )


def _communicator(one: Launch, rank: int, bound: bool) -> tuple[Any, tuple[int, ...]]:
    """Return the key of the communicator of an operation, and the ranks that make it together."""
    if one.peer is None or one.batch or bound:
        return (one.group, one.ranks), one.ranks
    ends = tuple(sorted((rank, one.peer)))
    return (one.group, one.ranks, ends), ends


def _absent(logs: Mapping[int, Log]) -> Iterator[str]:
    """Yield communicators that some of their ranks never use."""
    used: dict[Any, tuple[tuple[int, ...], set[int]]] = {}
    for rank, log in logs.items():
        for one in _launches(log):
            key, members = _communicator(one, rank, False)
            used.setdefault(key, (members, set()))[1].add(rank)
    for (group, *_), (members, seen) in used.items():
        if missing := set(members) - seen:
            yield (
                f"group {group} of ranks {members} is never used by {sorted(missing)}, for whom the others "
                f"wait"
            )


def _circles(logs: Mapping[int, Log], bound: bool, blocking: bool) -> Iterator[str]:
    """Yield a circle of waits between the operations of all ranks, if there is one."""
    after: dict[Any, set] = defaultdict(set)  # node -> what must be over before
    counts: dict[Any, int] = defaultdict(int)
    for rank, log in logs.items():
        stream: Any = None
        queue: dict[Any, Any] = {}  # communicator -> its last operation on this rank
        batches: dict[tuple, Any] = {}
        for entry in log:
            if isinstance(entry, Wait):
                mark = ("wait", rank, entry.number, len(after))
                one = log[entry.number - 1]
                assert isinstance(one, Launch)
                after[mark] |= {stream, ("end", rank, one.batch or one.number)} - {None}
                stream = mark
                continue
            key, members = _communicator(entry, rank, bound)
            number = entry.batch or entry.number
            begin, end = ("begin", rank, number), ("end", rank, number)
            if number not in batches:
                batches[number] = None
                if not bound and key not in queue:
                    after["made", key] |= {stream} - {None}
                    stream = ("made", key)  # the host stands still
                after[begin] |= {stream, queue.get(key)} - {None}
                queue[key] = end
            if entry.peer is None:
                what: Any = ("all", key, counts[rank, key])
                counts[rank, key] += 1
            else:
                ends = (rank, entry.peer) if entry.operation == "send" else (entry.peer, rank)
                what = (
                    "message",
                    entry.group,
                    entry.ranks,
                    ends,
                    counts[rank, entry.group, entry.ranks, ends],
                )
                counts[rank, entry.group, entry.ranks, ends] += 1
            after[what].add(begin)
            after[end].add(what)
            if entry.stays or blocking:
                stream = end
    try:
        graphlib.TopologicalSorter(after).prepare()
    except graphlib.CycleError as error:
        numbers = {
            (rank, one.batch or one.number): one
            for rank, log in logs.items()
            for one in _launches(log)
        }
        told = [
            f"rank {node[1]}: {numbers[node[1:]].operation} in group {numbers[node[1:]].group}"
            for node in error.args[1]
            if node[0] == "begin"
        ]
        yield f"a circle of waits: {' <- '.join(told)}"
