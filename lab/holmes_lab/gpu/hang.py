"""Why a job hangs: who waits for whom, over all ranks, and the circle that never ends.

    host of rank 0 -> kernel Recv (group "stage link 0-1") -> rank 1 has not launched its Send -> host
    of rank 1
          ^                                                                                      |
          `---- waits for a kernel of rank 0 <---- kernel AllReduce <---- cudaDeviceSynchronize -'

Something moves on if all that it waits for does. What can never move on is the rest: the greatest set of
hosts and work of which each waits for another one in it. A host that is in no CUDA call may do anything, so
it moves on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from holmes_lab.gpu.state import NcclLaunch, RankState, StreamWork, WorkPlace


@dataclass(frozen=True)
class RankHost:
    """The host of a rank: all its threads that launch work."""

    rank: int


Node = RankHost | WorkPlace


@dataclass(frozen=True)
class Wait:
    """`node` waits for `target`. why: what a person reads, "host waits in cudaDeviceSynchronize"."""

    node: Node
    target: Node
    why: str


class Hang:
    """The waits of a job at one moment. ranks: communicator -> ranks of the job, in its order."""

    def __init__(self, states: Sequence[RankState], ranks: Mapping[str, Sequence[int | None]]):
        self.states, self.ranks = {state.rank: state for state in states}, ranks
        self.work = {work.place: work for state in states for work in state.works()}
        self.waits: dict[Node, list[Wait]] = {}
        for state in states:
            self._add(RankHost(state.rank), self._of_host(state))
            for (_, _, queue), works in state.streams.items():
                for work in works:
                    self._add(work.place, self._of_work(state, queue, works[0], work))
        self.stuck = self._stuck()

    def circle(self) -> list[Wait]:
        """Waits that close a circle: each one's target is the next one's node. Empty: something can still
        move on."""
        if not self.stuck:
            return []
        path: list[Wait] = []
        seen: dict[Node, int] = {}
        node = min(self.stuck, key=lambda node: (not isinstance(node, RankHost), node.rank))
        while node not in seen:
            seen[node] = len(path)
            wait = next(wait for wait in self.waits[node] if wait.target in self.stuck)
            path.append(wait)
            node = wait.target
        return path[seen[node] :]

    def differences(self) -> list[tuple[str, dict[str, list[int]]]]:
        """(communicator, ranks by what they launched) where ranks launch different collectives: the first
        that differs. (A collective that only some ranks have reached yet is no difference.)"""
        launched: dict[str, dict[int, dict[str, list[int]]]] = {}
        for state in self.states.values():
            for launch in state.recent:
                if launch.collective >= 0:
                    numbers = launched.setdefault(launch.communicator, {})
                    by_what = numbers.setdefault(launch.collective, {})
                    by_what.setdefault(launch.what, []).append(state.rank)
        firsts = []
        for communicator, numbers in launched.items():
            differing = [number for number, by_what in numbers.items() if len(by_what) > 1]
            if differing:
                firsts.append((communicator, numbers[min(differing)]))
        return firsts

    def group_of(self, communicator: str) -> str:
        """ "group stage link, communicator 0x12ab", as far as it is known."""
        works: list[NcclLaunch | StreamWork] = []
        for state in self.states.values():
            works += [*state.recent, *state.works()]
        group = next(
            (work.group for work in works if work.communicator == communicator and work.group), ""
        )
        return (
            f"group {group}, communicator {communicator}"
            if group
            else f"communicator {communicator}"
        )

    def _add(self, node: Node, waits: Iterable[Wait]) -> None:
        self.waits[node] = list(waits)

    def _of_host(self, state: RankState) -> Iterable[Wait]:
        for host in state.hosts:
            for place in host.places:
                yield Wait(RankHost(state.rank), self._shown(place), f"waits in {host.call} for")
            if (rank := self._rank_of(host.communicator, host.peer)) is not None:
                yield Wait(RankHost(state.rank), RankHost(rank), f"waits in {host.call}")

    def _of_work(
        self, state: RankState, queue: int, head: StreamWork, work: StreamWork
    ) -> Iterable[Wait]:
        if work is not head:
            yield Wait(work.place, head.place, "comes in its stream after")
        elif work.started:
            if work.peer is not None:
                yield from self._of_collective(work)
        elif work.after is not None:
            yield Wait(work.place, self._shown(work.after), f"waits ({work.name}) for")
        elif work.queue is not None:
            ahead = [
                other
                for (_, _, number), works in state.streams.items()
                if number == queue
                for other in works
                if not other.started and 0 < other.position < work.position
            ]
            if ahead:
                first = min(ahead, key=lambda other: other.position)
                yield Wait(work.place, first.place, f"stands in hardware queue {queue} behind")
        elif work.needs_sms:
            for other in state.works():
                if other.started and other.sms:
                    yield Wait(
                        work.place,
                        other.place,
                        f"needs {work.sms} multiprocessors, of which this holds some:",
                    )

    def _of_collective(self, work: StreamWork) -> Iterable[Wait]:
        """A running kernel of NCCL waits for its peer's kernel, or for the peer's host to launch one; for
        neither if only the network can keep it waiting."""
        awaited = "data from" if work.direction == "recv" else "room at"
        rank = self._rank_of(work.communicator, work.peer)
        if rank is None:
            return
        of_peer = [
            other for other in self.states[rank].works() if other.communicator == work.communicator
        ]
        if of_peer:
            first = next((other for other in of_peer if other.started), of_peer[0])
            if not self._under_way(work, first):
                yield Wait(work.place, first.place, f"waits for {awaited} rank {rank}, which is at")
        else:
            yield Wait(
                work.place,
                RankHost(rank),
                f"waits for {awaited} rank {rank}, which has launched no kernel for it:",
            )

    def _under_way(self, work: StreamWork, of_peer: StreamWork) -> bool:
        """Whether one kernel sends what the other receives, or all ranks run the same collective."""
        if of_peer.started and {work.direction, of_peer.direction} == {"send", "recv"}:
            return of_peer.peer == work.member
        operation = work.communicator, work.number, work.what
        return all(
            rank in self.states
            and any(
                other.started and (other.communicator, other.number, other.what) == operation
                for other in self.states[rank].works()
            )
            for rank in self.ranks[work.communicator]
        )

    def _rank_of(self, communicator: str, peer: int | None) -> int | None:
        """The rank of the job; None where it has not answered, so may do anything."""
        members = self.ranks.get(communicator, ())
        rank = members[peer] if peer is not None and peer < len(members) else None
        return rank if rank in self.states else None

    def _shown(self, place: WorkPlace) -> WorkPlace:
        """The work itself, or what its rank has shown of its stream last before it."""
        if place in self.work:
            return place
        same = [
            known
            for known in self.work
            if known.rank == place.rank
            and known.stream == place.stream
            and known.device == place.device
            and known.sequence < place.sequence
        ]
        return max(same, key=lambda known: known.sequence, default=place)

    def _stuck(self) -> set[Node]:
        moving: set[Node] = set()
        nodes = set(self.waits) | {wait.target for waits in self.waits.values() for wait in waits}
        while True:
            more = {
                node
                for node in nodes - moving
                if all(wait.target in moving for wait in self.waits.get(node, ()))
            }
            if not more:
                return nodes - moving
            moving |= more
