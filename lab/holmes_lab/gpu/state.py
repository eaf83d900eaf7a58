"""Reads the state of every rank of a job on emulated GPUs: streams, pending work and blocked host threads.

Each rank keeps three files in the job's watch directory (written by csrc/runtime/watch.cc):

    rank<N>.watch   one memory-mapped page with four counters: progress, asked, answered, stacks
    rank<N>.json    the state of the streams and host threads, written on request
    rank<N>.stack   the Python stacks of all threads, written by faulthandler on request

Protocol between the process that watches the job (the watcher) and a rank, over the memory-mapped page:

    1. The rank increments `progress` with each kernel and each step of a collective.
    2. The watcher requests the state by writing a new number into `asked`. A thread of the rank writes
       rank<N>.json, and then copies the number into `answered`.
    3. The watcher requests the stacks by writing 1 into `stacks`. The rank writes rank<N>.stack, and then
       writes 2 into `stacks`.

The watcher polls for an answer until a timeout, so a rank that has died cannot block the watcher.
"""

from __future__ import annotations

import json
import mmap
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

_COUNTER = struct.Struct("=Q")
# Byte offsets of the counters in a rank's page.
_PROGRESS = 0
_ASKED = 8
_ANSWERED = 16
_STACKS = 24
# Values of the counter `stacks`.
_STACKS_REQUESTED = 1
_STACKS_WRITTEN = 2

_POLL_S = 0.02


class StreamKey(NamedTuple):
    """A CUDA stream of a rank."""

    device: int
    stream: int
    queue: int  # hardware queue that starts the work of the stream


@dataclass(frozen=True)
class WorkId:
    """Identifier of one kernel, copy or event in a CUDA stream."""

    rank: int
    device: int
    stream: int
    sequence: int  # number of the work in its stream


@dataclass(frozen=True)
class StreamWork:
    """A kernel, copy, host function, event record or event wait in a CUDA stream."""

    work_id: WorkId
    kind: str  # "kernel", "copy", "host function", "event record" or "event wait"
    name: str
    #: Number of the work in the hardware queue of its stream, from 1, in the order of the launches.
    #: 0 for event records and waits: they use no hardware queue.
    position: int
    started: bool
    sms: int  # multiprocessors that the kernel holds or needs

    # Why the work has not started; at most one of these is set. All are unset behind the first work
    # of a stream.
    after: WorkId | None = None  # an event wait: it waits for this work
    is_behind_in_queue: bool = False  # others in its stream's hardware queue must start first
    needs_sms: bool = False  # the kernel waits for free multiprocessors

    # The following fields describe kernels of NCCL.
    peer: int | None = None  # member of the communicator that the running kernel waits for
    direction: str = (
        ""  # "recv": waits for data from the peer; "send": for free buffers at the peer
    )
    communicator: str = ""
    group: str = ""  # name of the process group
    member: int = -1  # this rank's number in the communicator
    operation_number: int = -1  # of the operations of the communicator
    operation: str = ""  # "AllReduce of 4 Float32"


@dataclass(frozen=True)
class NcclLaunch:
    """A kernel of NCCL that a rank has launched; it may be running or finished."""

    communicator: str
    group: str
    collective_number: int  # counts the communicator's collectives; -1 for sends and receives
    operation: str  # "AllReduce of 4 Float32"


@dataclass(frozen=True)
class HostWait:
    """A blocked host (CPU) thread: in a CUDA call that waits for work, or in NCCL waiting for a peer."""

    call: str  # name of the CUDA call, or of the action of NCCL
    work_ids: tuple[WorkId, ...]  # the work that the CUDA call waits for; empty in NCCL
    communicator: str = ""  # of the peer
    peer: int | None = None  # member of the communicator that NCCL waits for; None in a CUDA call


@dataclass(frozen=True)
class RankState:
    """Pending work and blocked host threads of one rank."""

    rank: int
    node: str
    #: Pending work of each stream, in stream order.
    streams: dict[StreamKey, tuple[StreamWork, ...]] = field(default_factory=dict)
    host_waits: tuple[HostWait, ...] = ()  # blocked host threads
    #: The last launches of NCCL kernels, oldest first. With them, collectives that differ between
    #: ranks are found.
    recent_launches: tuple[NcclLaunch, ...] = ()

    def works(self) -> Iterator[StreamWork]:
        """Iterate over the pending work of all streams."""
        for works in self.streams.values():
            yield from works


class Watch:
    """Reader of the state that the ranks of a job on emulated GPUs record in files."""

    def __init__(self, directory: Path):
        """Begin to read the watch files of a job.

        Args:
            directory: Folder of the files. Each rank keeps rank<N>.watch (counters in shared
                memory), and writes rank<N>.json (its streams and blocked threads) and rank<N>.stack
                (its Python stacks) on request.
        """
        self.directory = directory
        self._pages: dict[int, mmap.mmap] = {}  # rank -> page of counters
        self._requests = 0  # number of the latest request for the states

    def progress(self) -> dict[int, int]:
        """Return the progress counter of each rank that has created a CUDA stream."""
        self._map_pages()
        return {rank: _read_counter(page, _PROGRESS) for rank, page in self._pages.items()}

    def _map_pages(self) -> None:
        """Map the page of counters of each rank that has started since the last call.

        A rank that has started writes its file rank<N>.watch, one page of shared memory.
        """
        for path in self.directory.glob("rank*.watch"):
            rank = int(path.stem.removeprefix("rank"))
            if rank not in self._pages and path.stat().st_size >= mmap.PAGESIZE:
                with open(path, "r+b") as file:
                    self._pages[rank] = mmap.mmap(file.fileno(), mmap.PAGESIZE)

    def request_states(self, timeout_s: float = 2.0) -> list[RankState]:
        """Return the states of the ranks that answer within `timeout_s` seconds.

        A rank answers a new number in its counter `asked`: it writes its state into rank<N>.json,
        and then copies the number into its counter `answered`.
        """
        self._map_pages()
        self._requests += 1
        answered = self._request(
            _ASKED,
            self._requests,
            answer_offset=_ANSWERED,
            expected=self._requests,
            timeout_s=timeout_s,
        )
        states = []
        for rank in answered:
            document = json.loads((self.directory / f"rank{rank}.json").read_text())
            states.append(parse(rank, document))
        return states

    def stacks(self, timeout_s: float = 2.0) -> dict[int, str]:
        """Return the Python stacks of each rank's threads, as text.

        A rank that finds 1 in its counter `stacks` writes its stacks into rank<N>.stack, and then 2
        into the same counter. Stacks that are not written within `timeout_s` seconds may be missing
        or incomplete.
        """
        self._request(
            _STACKS,
            _STACKS_REQUESTED,
            answer_offset=_STACKS,  # a single counter has the request and the answer
            expected=_STACKS_WRITTEN,
            timeout_s=timeout_s,
        )
        stacks = {}
        for path in self.directory.glob("rank*.stack"):
            rank = int(path.stem.removeprefix("rank"))
            stacks[rank] = path.read_text(errors="replace")
        return dict(sorted(stacks.items()))

    def _request(
        self, offset: int, value: int, *, answer_offset: int, expected: int, timeout_s: float
    ) -> list[int]:
        """Write a number into a counter of every rank, and return the ranks that answer in time.

        Each rank shares a memory-mapped page of 8-byte counters with this process, the file
        rank<N>.watch. A rank answers by writing a number into a counter of its page.

        Args:
            offset: Byte offset in the page of the counter to write.
            value: The number to write.
            answer_offset: Byte offset of the counter with the answer.
            expected: Number in that counter that counts as the answer.
            timeout_s: Seconds to wait for the answers.
        """
        for page in self._pages.values():
            page[offset : offset + _COUNTER.size] = _COUNTER.pack(value)
        deadline = time.monotonic() + timeout_s
        unanswered = set(self._pages)
        while unanswered and time.monotonic() < deadline:
            unanswered = {
                rank
                for rank in unanswered
                if _read_counter(self._pages[rank], answer_offset) != expected
            }
            time.sleep(_POLL_S)
        return sorted(self._pages.keys() - unanswered)


def _read_counter(page: mmap.mmap, offset: int) -> int:
    return _COUNTER.unpack_from(page, offset)[0]


def parse(rank: int, document: dict[str, Any]) -> RankState:
    """Return the state of a rank from the content of its file rank<N>.json.

    Args:
        rank: The rank.
        document: The content, with these keys:
            "node": Name of the node.
            "streams": CUDA streams with pending work: "device", "stream" (its number), "queue"
                (hardware queue that starts its work), "work".
            "hosts": Host (CPU) threads that are blocked: "call" (in CUDA or NCCL), "for" (the work
                that the call waits for), "communicator" and "peer" (the rank that NCCL waits for).
            "recent": The last launches of NCCL kernels: "communicator", "group" (name of
                the process group), "collective" (its number, -1 for sends and receives), "what" (in
                words).
    """
    streams = {}
    for stream in document["streams"]:
        key = StreamKey(stream["device"], stream["stream"], stream["queue"])
        streams[key] = tuple(_parse_work(rank, key, work) for work in stream["work"])
    host_waits = []
    for blocked_thread in document["hosts"]:
        wait = HostWait(
            call=blocked_thread["call"],
            work_ids=tuple(_parse_work_id(rank, work) for work in blocked_thread["for"]),
            communicator=blocked_thread.get("communicator", ""),
            peer=blocked_thread.get("peer"),
        )
        host_waits.append(wait)
    launches = []
    for launch in document.get("recent", ()):
        launches.append(
            NcclLaunch(
                communicator=launch["communicator"],
                group=launch["group"],
                collective_number=launch["collective"],
                operation=launch["what"],
            )
        )
    return RankState(
        rank,
        node=document.get("node", ""),
        streams=streams,
        host_waits=tuple(host_waits),
        recent_launches=tuple(launches),
    )


def _parse_work_id(rank: int, record: dict[str, int]) -> WorkId:
    return WorkId(rank, record["device"], record["stream"], record["sequence"])


def _parse_work(rank: int, stream: StreamKey, record: dict[str, Any]) -> StreamWork:
    """Return pending work of a CUDA stream from its record in rank<N>.json.

    Args:
        rank: The rank that wrote the record.
        stream: The stream of the work.
        record: "kind" ("kernel", "copy", ...), "name", "sequence" (number in its stream),
            "position" (number in its hardware queue), "started", "sms" (multiprocessors), and
            "waits_for". Kernels of NCCL also have "communicator", "group" (name of the process
            group), "rank" (in the communicator), "number" and "what" (of the operation).

            "waits_for" has at most one of these: "after" (work that an event wait waits for),
            "queue" (others in the hardware queue are first), "sms" (too few are free), or, of a
            running kernel of NCCL, "peer" and "direction".
    """
    waits = record["waits_for"]
    after = None
    if waits.get("after"):
        after = _parse_work_id(rank, waits["after"])
    return StreamWork(
        work_id=WorkId(rank, stream.device, stream.stream, record["sequence"]),
        kind=record["kind"],
        name=record["name"],
        position=record["position"],
        started=record["started"],
        sms=record["sms"],
        after=after,
        is_behind_in_queue="queue" in waits,  # its value is the queue of the stream
        needs_sms="sms" in waits,  # its value is the number that the kernel needs
        peer=waits.get("peer"),
        direction=waits.get("direction", ""),
        communicator=record.get("communicator", ""),
        group=record.get("group", ""),
        member=record.get("rank", -1),  # in the communicator
        operation_number=record.get("number", -1),
        operation=record.get("what", ""),
    )
