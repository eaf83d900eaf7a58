"""A device that starts kernels only from the heads of its hardware queues.

The host waits for the device now and then.

    program of a rank   Kernel(stream, what)      what: a message's name ("sent" and "received"
                                                  together are its end), or None for computing
                        Join(stream, other)       `stream` waits for all that `other` has so far
                        SYNCHRONIZE               the host waits until the device has done all so far

    queue 0   [F 0: compute][a 0: comm 1][g 0: comm 2]...     a queue's head that cannot
                                                              start holds up all behind it
    queue 1   [a 1: comm 3]...

What starts never keeps another from starting, so the order in which queues are looked at changes nothing:
stuck once is stuck always.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kernel:
    """message: (name, which end), of a rendezvous; None: it computes."""

    stream: Hashable
    message: tuple[Hashable, str] | None = None


@dataclass(frozen=True)
class Join:
    stream: Hashable
    other: Hashable


SYNCHRONIZE = "the host waits for the device"


class Device:
    def __init__(self, program: Sequence[Any], queue_of: Callable[[Hashable], int]):
        self.program, self.queue_of = deque(program), queue_of
        self.queues: dict[int, deque] = {}
        self.launched: dict[Hashable, int] = {}  # kernels of each stream
        self.over: dict[Hashable, int] = {}
        self.running: dict[tuple[Hashable, str], Hashable] = {}  # message's end -> its stream

    def step(self, begun: set[tuple[Hashable, str]]) -> bool:
        """Whether anything moved. begun: ends of messages whose kernels run or have run, on all devices."""
        moved = False
        while self.program and (self.program[0] != SYNCHRONIZE or self.over == self.launched):
            self._launch(self.program.popleft())
            moved = True
        for queue in self.queues.values():
            while queue and self._starts(queue[0], begun):
                queue.popleft()
                moved = True
        for (name, end), stream in list(self.running.items()):
            if {(name, "send"), (name, "receive")} <= begun:
                del self.running[name, end]
                self.over[stream] += 1
                moved = True
        return moved

    def _launch(self, item: Any) -> None:
        if item == SYNCHRONIZE:
            return
        stream = item.stream
        number = self.launched.setdefault(stream, 0)
        self.over.setdefault(stream, 0)
        waits_for = self.launched.get(item.other, 0) if isinstance(item, Join) else number
        self.queues.setdefault(self.queue_of(stream), deque()).append((item, waits_for))
        if isinstance(item, Kernel):
            self.launched[stream] += 1

    def _starts(self, head: tuple[Any, int], begun: set[tuple[Hashable, str]]) -> bool:
        item, waits_for = head
        if self.over.get(item.other if isinstance(item, Join) else item.stream, 0) < waits_for:
            return False
        if isinstance(item, Kernel) and item.message is None:
            self.over[item.stream] += 1
        elif isinstance(item, Kernel):
            self.running[item.message] = item.stream
            begun.add(item.message)
        return True

    @property
    def done(self) -> bool:
        return not self.program and not self.running and not any(self.queues.values())


def stuck(
    programs: Mapping[int, Sequence[Any]], queue_of: Callable[[int, Hashable], int]
) -> list[int]:
    """Ranks that never end. queue_of(rank, stream): the number of its hardware queue."""
    devices = {
        rank: Device(program, lambda stream, rank=rank: queue_of(rank, stream))
        for rank, program in programs.items()
    }
    begun: set[tuple[Hashable, str]] = set()
    while sum(device.step(begun) for device in devices.values()):  # each of them, every time
        pass
    return [rank for rank, device in devices.items() if not device.done]
