"""What the ranks of a job on emulated GPUs stand at: their watch files (csrc/runtime/watch.cc), read by the
lab.

    directory/rank<N>.watch   a page that the rank maps: progress, asked, answered, stacks (uint64 each)
    directory/rank<N>.json    its answer: streams with their work, host threads that wait
    directory/rank<N>.stack   the Python stacks of its threads (faulthandler)
"""

from __future__ import annotations

import json
import mmap
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_WORD = struct.Struct("=Q")
_PROGRESS, _ASKED, _ANSWERED, _STACKS = 0, 8, 16, 24
_WANTED, _WRITTEN = 1, 2  # of stacks


@dataclass(frozen=True)
class WorkPlace:
    """A piece of work: its rank, device, stream, and its number in that stream."""

    rank: int
    device: int
    stream: int
    sequence: int


@dataclass(frozen=True)
class StreamWork:
    """A kernel, copy, host function, event record or event wait in a stream.

    position: in its hardware queue, 0 for records and waits, which have none; sms: multiprocessors that it
    holds or asks for; after, queue, needs_sms: what keeps it from starting; peer: the rank of its
    communicator that it waits for, with direction "send" or "recv". communicator, group, member, number,
    what: of NCCL's kernels.
    """

    place: WorkPlace
    kind: str
    name: str
    position: int
    started: bool
    sms: int
    after: WorkPlace | None = None
    queue: int | None = None
    needs_sms: bool = False
    peer: int | None = None
    direction: str = ""
    communicator: str = ""
    group: str = ""
    member: int = -1
    number: int = -1
    what: str = ""


@dataclass(frozen=True)
class NcclLaunch:
    """A kernel of NCCL that a rank has launched, done or not. collective: the how-many-th with collectives of
    its communicator; -1: it only sends and receives."""

    communicator: str
    group: str
    collective: int
    what: str


@dataclass(frozen=True)
class HostWait:
    """A host thread that waits: in a CUDA call for pieces of work, or in NCCL for a peer of a
    communicator."""

    call: str
    places: tuple[WorkPlace, ...]
    communicator: str = ""
    peer: int | None = None


@dataclass(frozen=True)
class RankState:
    """Of one rank. streams: (device, stream, hardware queue) -> work in order, its head first; recent: its
    last launches."""

    rank: int
    node: str
    streams: dict[tuple[int, int, int], tuple[StreamWork, ...]] = field(default_factory=dict)
    hosts: tuple[HostWait, ...] = ()
    recent: tuple[NcclLaunch, ...] = ()

    def works(self) -> Iterator[StreamWork]:
        for works in self.streams.values():
            yield from works


class Watch:
    """The watch files of a job in `directory`."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._pages: dict[int, mmap.mmap] = {}
        self._asked = 0

    def progress(self) -> dict[int, int]:
        """Rank -> what it has counted. A rank is here from its first stream on."""
        for path in self.directory.glob("rank*.watch"):
            rank = int(path.stem[len("rank") :])
            if rank not in self._pages and path.stat().st_size >= mmap.PAGESIZE:
                with open(path, "r+b") as file:
                    self._pages[rank] = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        return {rank: self._read(page, _PROGRESS) for rank, page in self._pages.items()}

    def ask(self, seconds: float = 2.0) -> list[RankState]:
        """What each rank answers within `seconds`; a rank that does not answer is not in it."""
        self.progress()
        self._asked += 1
        answered = self._request(_ASKED, self._asked, _ANSWERED, self._asked, seconds)
        return [
            parse(rank, json.loads((self.directory / f"rank{rank}.json").read_text()))
            for rank in answered
        ]

    def stacks(self, seconds: float = 2.0) -> dict[int, str]:
        """Rank -> the Python stacks of its threads, as far as they are written within `seconds`."""
        self._request(_STACKS, _WANTED, _STACKS, _WRITTEN, seconds)
        files = {int(path.stem[len("rank") :]): path for path in self.directory.glob("rank*.stack")}
        return {rank: path.read_text(errors="replace") for rank, path in sorted(files.items())}

    def _request(
        self, word: int, value: int, answer: int, expected: int, seconds: float
    ) -> list[int]:
        """Writes a word into each page; the ranks in whose page the answer then is what is expected."""
        for page in self._pages.values():
            page[word : word + _WORD.size] = _WORD.pack(value)
        end = time.monotonic() + seconds
        missing = dict(self._pages)
        while missing and time.monotonic() < end:
            missing = {
                rank: page for rank, page in missing.items() if self._read(page, answer) != expected
            }
            time.sleep(0.02)
        return sorted(self._pages.keys() - missing.keys())

    @staticmethod
    def _read(page: mmap.mmap, offset: int) -> int:
        return _WORD.unpack_from(page, offset)[0]


def parse(rank: int, document: dict[str, Any]) -> RankState:
    """The answer of a rank."""
    streams = {}
    for stream in document["streams"]:
        key = stream["device"], stream["stream"], stream["queue"]
        streams[key] = tuple(_work(rank, key, item) for item in stream["work"])
    hosts = tuple(
        HostWait(
            host["call"],
            tuple(_place(rank, place) for place in host["for"]),
            host.get("communicator", ""),
            host.get("peer"),
        )
        for host in document["hosts"]
    )
    recent = tuple(
        NcclLaunch(item["communicator"], item["group"], item["collective"], item["what"])
        for item in document.get("recent", ())
    )
    return RankState(rank, document.get("node", ""), streams, hosts, recent)


def _place(rank: int, place: dict[str, int]) -> WorkPlace:
    return WorkPlace(rank, place["device"], place["stream"], place["sequence"])


def _work(rank: int, key: tuple[int, int, int], item: dict[str, Any]) -> StreamWork:
    waits = item["waits_for"]
    after = waits.get("after")
    return StreamWork(
        WorkPlace(rank, key[0], key[1], item["sequence"]),
        item["kind"],
        item["name"],
        item["position"],
        item["started"],
        item["sms"],
        after=_place(rank, after) if after else None,
        queue=waits.get("queue"),
        needs_sms="sms" in waits,
        peer=waits.get("peer"),
        direction=waits.get("direction", ""),
        communicator=item.get("communicator", ""),
        group=item.get("group", ""),
        member=item.get("rank", -1),
        number=item.get("number", -1),
        what=item.get("what", ""),
    )
