"""Detects deadlocks of a job on emulated GPUs with a wait-for graph over all of its ranks.

The vertices of the graph are the host of each rank and all pending work in CUDA streams. An edge from one
vertex to another says that the first waits for the second. Example of a cycle: two ranks launch two
collectives in different orders.

    host of rank 0                   is in cudaDeviceSynchronize, and waits for
    kernel AllReduce A of rank 0     is running, and waits for rank 1 to launch AllReduce A
    host of rank 1                   is in cudaDeviceSynchronize, and waits for
    kernel AllReduce B of rank 1     is running, and waits for rank 0 to launch AllReduce B
    host of rank 0                   (the cycle closes)

A vertex can proceed if every vertex that it waits for can proceed. A host that is in no CUDA call may do
anything, so it has no edges and can proceed. The job is deadlocked if some vertices cannot proceed: each of
these waits for another of these, so following the edges leads around a cycle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from holmes_lab.gpu.state import NcclLaunch, RankState, StreamWork, WorkId


@dataclass(frozen=True)
class RankHost:
    """The host threads of a rank that launch work, as a single vertex of the wait-for graph."""

    rank: int


Vertex = RankHost | WorkId


@dataclass(frozen=True)
class Wait:
    """Edge of the wait-for graph: one vertex waits for another."""

    waiter: Vertex
    target: Vertex
    reason: (
        str  # the words between waiter and target in a report, such as "waits in cudaMemcpy for"
    )


class Mismatch(NamedTuple):
    """The first collective of a communicator that is not the same on all ranks."""

    communicator: str
    ranks_of: dict[str, list[int]]  # collective, such as "AllReduce of 4 Float32" -> its ranks


class WaitForGraph:
    """Graph of who waits for whom in a job on emulated GPUs, at one moment.

    Its vertices are the host of each rank and all pending work in CUDA streams. An edge from one
    vertex to another says that the first cannot proceed before the second. A cycle is a deadlock.
    """

    def __init__(self, states: Sequence[RankState], members: Mapping[str, Sequence[int | None]]):
        """Build the graph.

        Args:
            states: States of the ranks that answered. No edges begin at other ranks: they count as able to
                proceed.
            members: For each communicator, the job's rank of each member, or None if it is unknown.
        """
        self.states = {state.rank: state for state in states}
        self.members = members
        self.work: dict[WorkId, StreamWork] = {}
        for state in states:
            for work in state.works():
                self.work[work.work_id] = work
        self.waits: dict[Vertex, list[Wait]] = {}  # waiter -> outgoing edges
        for state in states:
            self.waits[RankHost(state.rank)] = list(self._waits_of_host(state))
            for stream, works in state.streams.items():
                for work in works:
                    waits = self._waits_of_work(
                        state, stream.queue, first_in_stream=works[0], work=work
                    )
                    self.waits[work.work_id] = list(waits)
        self.stuck = self._find_stuck()

    def find_cycle(self) -> list[Wait]:
        """Return the edges of a cycle of vertices that wait for each other.

        The target of each edge is the waiter of the next; the target of the last is the waiter of the first.
        The list is empty if every vertex can still proceed.
        """
        if not self.stuck:
            return []
        path: list[Wait] = []
        position_in_path: dict[Vertex, int] = {}
        # Hosts come first, because a report that begins with a host is easier to read.
        vertex = min(self.stuck, key=lambda vertex: (isinstance(vertex, WorkId), vertex.rank))
        while vertex not in position_in_path:
            position_in_path[vertex] = len(path)
            wait = next(wait for wait in self.waits[vertex] if wait.target in self.stuck)
            path.append(wait)
            vertex = wait.target
        return path[position_in_path[vertex] :]

    def find_mismatches(self) -> list[Mismatch]:
        """Return, for each communicator, the first collective that differs between its ranks.

        A collective that some ranks have not launched yet does not count as a difference.
        """
        # communicator -> number of the collective -> collective in words -> ranks
        launched: dict[str, dict[int, dict[str, list[int]]]] = {}
        for state in self.states.values():
            for launch in state.recent_launches:
                if launch.collective_number < 0:  # a send or receive
                    continue
                by_number = launched.setdefault(launch.communicator, {})
                ranks_of = by_number.setdefault(launch.collective_number, defaultdict(list))
                ranks_of[launch.operation].append(state.rank)
        mismatches = []
        for communicator, by_number in launched.items():
            mismatched = [number for number, ranks_of in by_number.items() if len(ranks_of) > 1]
            if mismatched:
                mismatches.append(Mismatch(communicator, by_number[min(mismatched)]))
        return mismatches

    def describe_communicator(self, communicator: str) -> str:
        """Return a communicator in words, such as "group stage link, communicator 0x12ab"."""
        kernels: list[NcclLaunch | StreamWork] = []
        for state in self.states.values():
            kernels.extend(state.recent_launches)
            kernels.extend(state.works())
        for kernel in kernels:
            if kernel.communicator == communicator and kernel.group:
                return f"group {kernel.group}, communicator {communicator}"
        return f"communicator {communicator}"

    def _waits_of_host(self, state: RankState) -> Iterator[Wait]:
        """Yield the edges from a rank's host to the work and to the peers that block its threads."""
        host = RankHost(state.rank)
        for blocked in state.host_waits:
            for work_id in blocked.work_ids:
                yield Wait(host, self._nearest_reported(work_id), f"waits in {blocked.call} for")
            peer_rank = self._answering_rank(blocked.communicator, blocked.peer)
            if peer_rank is not None:
                yield Wait(host, RankHost(peer_rank), f"waits in {blocked.call}")

    def _waits_of_work(
        self, state: RankState, queue: int, *, first_in_stream: StreamWork, work: StreamWork
    ) -> Iterator[Wait]:
        """Yield the edges of the wait-for graph from pending GPU work to all that it waits for.

        The `reason` of an edge is the words between both works in a report, such as "kernel A comes
        in its stream after kernel B".

        Args:
            state: The rank of the work.
            queue: Hardware queue that starts the work of the stream. Several streams may share it.
            first_in_stream: First pending work of the same stream.
            work: The work that waits.
        """
        if work is not first_in_stream:
            # A stream runs its work in order.
            yield Wait(work.work_id, first_in_stream.work_id, "comes in its stream after")
        elif work.started:
            # Of running work, only kernels of NCCL wait for others: for data or buffers of another
            # rank, the `peer`. Without one, the kernel computes, and waits for nothing.
            if work.peer is not None:
                yield from self._waits_of_nccl_kernel(work)
        elif work.after is not None:
            # An event wait depends on work in another stream.
            target = self._nearest_reported(work.after)
            yield Wait(work.work_id, target, f"waits ({work.name}) for")
        elif work.is_behind_in_queue:
            # Streams that share a hardware queue start their work in the order of the launches, so
            # work of another stream may be first.
            first = _first_in_queue(state, queue, before=work)
            if first is not None:
                reason = f"stands in hardware queue {queue} behind"
                yield Wait(work.work_id, first.work_id, reason)
        elif work.needs_sms:  # too few multiprocessors (SMs) are free
            reason = f"needs {work.sms} multiprocessors, of which this holds some:"
            for other in state.works():
                if other.started and other.sms:
                    yield Wait(work.work_id, other.work_id, reason)

    def _waits_of_nccl_kernel(self, kernel: StreamWork) -> Iterator[Wait]:
        """Yield the edge from a running NCCL kernel to the rank that it waits for, if there is one.

        The kernel waits for `kernel.peer`, the number of a member of its communicator. The edge
        leads to a kernel of that member's rank in the same communicator. If the rank has none
        pending, the edge leads to the rank's host.

        There is no edge if the transfer is in progress: only the network then delays it. There is
        none either if the member's rank is unknown or did not report its state.
        """
        rank = self._answering_rank(kernel.communicator, kernel.peer)
        if rank is None:
            return
        awaited = "data from" if kernel.direction == "recv" else "room at"
        peer_kernels = [
            work for work in self.states[rank].works() if work.communicator == kernel.communicator
        ]
        if not peer_kernels:
            reason = f"waits for {awaited} rank {rank}, which has launched no kernel for it:"
            yield Wait(kernel.work_id, RankHost(rank), reason)
            return
        running = [work for work in peer_kernels if work.started]
        peer_kernel = running[0] if running else peer_kernels[0]
        if not self._is_transfer_in_progress(kernel, peer_kernel):
            reason = f"waits for {awaited} rank {rank}, which is at"
            yield Wait(kernel.work_id, peer_kernel.work_id, reason)

    def _is_transfer_in_progress(self, kernel: StreamWork, peer_kernel: StreamWork) -> bool:
        """Return whether all ranks that an NCCL kernel exchanges data with run the same operation now.

        Args:
            kernel: The kernel, which runs.
            peer_kernel: Kernel of the rank that `kernel` waits for, of the same communicator. If one
                of the two sends and the other receives, only these two ranks exchange data.
        """
        if peer_kernel.started and {kernel.direction, peer_kernel.direction} == {"send", "recv"}:
            return peer_kernel.peer == kernel.member
        return all(self._runs_operation(rank, kernel) for rank in self.members[kernel.communicator])

    def _runs_operation(self, rank: int | None, kernel: StreamWork) -> bool:
        """Return whether a rank reported that it now runs the same NCCL operation as `kernel`.

        Args:
            rank: The job's rank of a member of the kernel's communicator; None if it is unknown.
            kernel: Running NCCL kernel of some rank.

        Returns:
            False also if the rank is None, or did not report its state.
        """
        if rank not in self.states:
            return False
        for work in self.states[rank].works():
            if (
                work.started
                and work.communicator == kernel.communicator
                and work.operation_number == kernel.operation_number
                and work.operation == kernel.operation
            ):
                return True
        return False

    def _answering_rank(self, communicator: str, member: int | None) -> int | None:
        """Return the job's rank of a communicator's member, if that rank reported its state.

        Args:
            communicator: Name of the communicator.
            member: Number of the member in the communicator; None: no member.

        Returns:
            None also if the communicator, the member or its rank in the job is unknown.
        """
        ranks = self.members.get(communicator, ())
        if member is None or member >= len(ranks):
            return None
        rank = ranks[member]
        return rank if rank in self.states else None

    def _nearest_reported(self, work_id: WorkId) -> WorkId:
        """Return the work that stands for `work_id` in the graph: itself, if its rank reported it.

        Of a stream with much pending work, a rank reports only the first items
        (csrc/runtime/state.cc). Work further back is replaced by the last reported item of its stream, since
        it waits for that.

        Returns:
            `work_id` unchanged also if no earlier work of its stream was reported.
        """
        if work_id in self.work:
            return work_id
        earlier = [
            reported
            for reported in self.work
            if reported.rank == work_id.rank
            and reported.stream == work_id.stream
            and reported.device == work_id.device
            and reported.sequence < work_id.sequence
        ]
        return max(earlier, key=lambda reported: reported.sequence, default=work_id)

    def _find_stuck(self) -> set[Vertex]:
        """Return the vertices that can never proceed.

        The set of vertices that can proceed grows until nothing is added: a vertex joins it when all
        vertices that it waits for are in it.
        """
        vertices: set[Vertex] = set(self.waits)
        for waits in self.waits.values():
            vertices.update(wait.target for wait in waits)
        can_proceed: set[Vertex] = set()
        while True:
            added = {
                vertex
                for vertex in vertices - can_proceed
                if all(wait.target in can_proceed for wait in self.waits.get(vertex, ()))
            }
            if not added:
                return vertices - can_proceed
            can_proceed |= added


def _first_in_queue(state: RankState, queue: int, before: StreamWork) -> StreamWork | None:
    """Return the first work in a hardware queue that has not started, if it is ahead of `before`."""
    ahead = []
    for stream, works in state.streams.items():
        if stream.queue != queue:
            continue
        for work in works:
            # Position 0 is work that uses no hardware queue.
            if not work.started and 0 < work.position < before.position:
                ahead.append(work)
    return min(ahead, key=lambda work: work.position, default=None)
