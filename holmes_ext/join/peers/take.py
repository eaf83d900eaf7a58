"""Transfer of whole fragments (parts of the model) between jobs, from a donor to a taker.

A taker is a job with outdated weights: it is new, late, or restarted from an older checkpoint. The donor is a
job with the valid weights. Each rank of the taker takes the elements that it exchanges from the donor's ranks
that exchange the same elements:

1. Taker: send a request to the donor's rank, over one of two connections. They take turns with the fragments,
   so that the donor sends one fragment while the request for the next one is under way
       {"fragment": 2, "version": 57, "start": first element, "stop": element after the last,
        "tensors": ["anchor", "momentum"]}
2. Donor: wait until the fragment has this version. The taker may hear of a commit from the coordinator before
   the donor's own rank 0 does.
3. Donor: send {"version": 57, "anchor": number of bytes, "momentum": number of bytes}, then these bytes. A
   tensor that was not requested has 0 bytes.
4. Taker: all ranks compare the versions they got. If they differ, the donor took an outer step in between,
   and they begin again. Otherwise each rank stores the fragment.

The donor goes on training: a thread answers from its host memory. No thread waits for ever: each request,
each wait for a version and each turn has a deadline, and a taker gives up after a few attempts. Wrong weights
of a donor show in the taker's next round, when all jobs report checksums with a new salt
(coordinator/versions.py).
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from holmes_ext.document import Table
from holmes_ext.errors import HolmesError
from holmes_ext.join.peers.routes import Peer, Routes
from holmes_ext.join.shards.job_ranks import JobRanks
from holmes_ext.join.shards.ownership import RankRange, SharedRange, shared_ranges
from holmes_ext.join.shards.state import Fragment, OuterState
from holmes_ext.join.shards.weights import bytes_of
from holmes_ext.join.sockets.channel import Channel
from holmes_ext.runtime.deadline import Deadline

#: Tensors of a fragment, as a request names them.
ANCHOR = "anchor"
MOMENTUM = "momentum"
#: Function that stores a taken fragment: (fragment, version, anchor, momentum).
Store = Callable[[Fragment, int, "torch.Tensor | None", "torch.Tensor | None"], None]
#: Threads of a rank that take turns in reading fragments from the donor.
_READERS = 2
#: Attempts to take a fragment that the donor steps in between.
_TRIES = 5
#: Seconds that a taker may let pass between two requests, and that it may wait for its turn.
_REQUEST_TIMEOUT_S = 600.0
#: Bytes of a request, at most. Takers that wait for their turn keep their requests in memory.
_LONGEST_REQUEST = 4096
#: Seconds between two checks whether the requested version is there.
_LOOK_S = 0.02
#: Seconds between two checks whether a taker that waits for its turn is still connected.
_TURN_CHECK_S = 1.0
#: Requests that are answered at a time, because each answer is a copy of weights.
_MOST_TAKERS = 4
#: Requests of a single job that are answered at a time, because its ranks may read the answers slowly.
_MOST_TAKERS_OF_ONE_JOB = 2


class Giver:
    """Server of a rank that sends fragments to ranks of other jobs that have outdated weights.

    A fragment is a part of the model. It is sent as its anchor (weights after the last outer step) and
    outer momentum.
    """

    def __init__(self, state: OuterState):
        self._state = state
        self._changed = threading.Condition()
        # Job -> number of its requests that are answered now. _wait_for_turn() adds 1, give() subtracts it.
        self._served_takers = Counter[str]()

    def give(self, channel: Channel, purpose: Mapping[str, Any]) -> None:
        """Serve a rank of another job that copies fragments, until it closes the connection.

        An invalid request ends the connection, too. Only a few requests are answered at a time; others
        wait for their turn. A turn lasts for one request. If it lasted for the whole connection, the
        ranks of a taker could block each other: between two fragments, a fast rank waits for the slow
        ranks of its job, and these would wait for its turn to end.

        Args:
            channel: The connection; it is closed at the end.
            purpose: Document of the other rank's handshake; its key "job" is used.
        """
        job = str(purpose.get("job"))
        try:
            while True:  # until one of these calls raises
                deadline = Deadline(_REQUEST_TIMEOUT_S, "a question")
                document = channel.receive(deadline, _LONGEST_REQUEST)
                self._wait_for_turn(channel, job)  # counts this request in _served_takers
                try:
                    self._answer(channel, document)
                finally:
                    with self._changed:
                        self._served_takers[job] -= 1
                        self._changed.notify_all()
        except (OSError, HolmesError):
            pass
        finally:
            channel.close()

    def _wait_for_turn(self, channel: Channel, job: str) -> None:
        """Wait until few enough requests are being answered, then count this request among them.

        A taker is a rank of another job that copies weights from this rank. Few requests are answered
        at a time, because each answer is a copy in memory. Of a single job, even fewer are answered, so
        that it cannot keep all others waiting.

        Args:
            channel: The taker's connection.
            job: The taker's job.

        Raises:
            ConnectionError: The taker has closed the connection in the meantime.
            TimeoutError: Its turn did not come in time.
        """
        deadline = Deadline(_REQUEST_TIMEOUT_S, "a taker's turn")
        with self._changed:
            while (
                self._served_takers.total() >= _MOST_TAKERS
                or self._served_takers[job] >= _MOST_TAKERS_OF_ONE_JOB
            ):
                self._changed.wait(_TURN_CHECK_S)
                deadline.check()  # raises TimeoutError
                if not channel.lives():
                    raise ConnectionError("the taker is gone")
            self._served_takers[job] += 1

    def _answer(self, channel: Channel, document: dict[str, Any]) -> None:
        """Wait for the version that a request names, and send the weights.

        The request names a fragment, a range of its elements, and the least version that the taker
        needs (the round of the fragment's last outer step). If this rank does not reach that
        version in time, it sends its older weights; the taker sees their version in the answer.

        Args:
            channel: Connection to the taker, a rank of another job.
            document: The request.

        Raises:
            HolmesError: The request is invalid.
            OSError: The connection is lost, or the taker does not wait for the answer.
        """
        state = self._state
        request = Table(document, "a taker's question")
        index = request.take("fragment", int)
        version = request.take("version", int)
        start = request.take("start", int)
        stop = request.take("stop", int)
        tensors = request.take("tensors", list, [ANCHOR, MOMENTUM])
        if not 0 <= index < len(state.fragments):
            raise HolmesError(f"there is no fragment {index}")
        fragment = state.fragments[index]
        # The taker may learn of a commit from the coordinator before this job does. Wait half a timeout: the
        # taker gives up after a whole timeout, and the answer itself needs time.
        deadline = Deadline(state.settings.timeout / 2, "a version that is asked for")
        # copy_version: round of the last outer step that a copy would contain, with steps of committed rounds
        # that training has not taken yet.
        while fragment.copy_version < version and not deadline.passed:
            if not channel.idle():  # closed, or with another request before the answer
                raise ConnectionError("the taker does not wait")
            time.sleep(_LOOK_S)
        try:
            copied = state.copy_of(fragment, start, stop)
        except KeyError:
            raise HolmesError(f"elements {start} to {stop} are not this rank's") from None
        anchor = memoryview(b"")
        if ANCHOR in tensors:
            anchor = bytes_of(copied.anchor)
        momentum = memoryview(b"")
        if MOMENTUM in tensors and copied.momentum is not None:
            momentum = bytes_of(copied.momentum)
        deadline = Deadline.for_bytes(
            state.settings.timeout, len(anchor) + len(momentum), "giving weights"
        )
        sizes = {"anchor": len(anchor), "momentum": len(momentum)}
        channel.send({"version": copied.version, **sizes}, deadline)
        channel.send_bytes([anchor, momentum], deadline)


@dataclass(frozen=True)
class Donor:
    """Up-to-date job from which this job copies parts of the model: its ranks, and their elements.

    Only ranks at the same position of the model-parallel grid as this rank are included.
    """

    mine: Sequence[RankRange]  # elements that each rank of this job exchanges
    theirs: Sequence[RankRange]  # elements that each rank of the donor exchanges
    peers: Mapping[int, Peer]  # rank of the donor -> its identity and address
    routes: Routes  # opens connections to these ranks


class DonorConnections:
    """Connections of this rank to ranks of the job (donor) from which it copies weights.

    Each is opened at its first use, and kept: over a WAN, to open one takes as long as to read a small
    fragment (part of the model).

    Args:
        donor: The job from which fragments are copied.
        patience_s: Seconds to open a connection, or for an answer (more for many bytes).
    """

    def __init__(self, donor: Donor, patience_s: float):
        self.patience_s = patience_s
        self._donor = donor
        self._channels: dict[int, Channel] = {}  # by rank of the donor
        self._is_over = False  # cut() was called

    def cut(self) -> None:
        """Shut all connections down from another thread, so that the thread that reads gets an error."""
        self._is_over = True
        for channel in list(self._channels.values()):
            channel.cut()

    def close(self) -> None:
        """Close all connections; called in the thread that reads from them."""
        for channel in self._channels.values():
            channel.close()

    def to(self, rank: int) -> Channel:
        """Return a connection to a rank of the donor: the stored connection if it can still be used.

        A stored connection can be used if it is open and has no unread bytes, so that the next received
        bytes are the answer to the next request. Otherwise a new connection is opened.

        Raises:
            OSError: The rank cannot be reached.
        """
        if self._is_over:
            raise ConnectionError("nothing is taken from the donor any more")
        channel = self._channels.get(rank)
        if channel is not None and channel.idle():
            return channel
        if channel is not None:  # closed by the donor, or with bytes that this rank did not request
            channel.close()
        deadline = Deadline(self.patience_s, "calling the donor")
        peer = self._donor.peers[rank]
        channel = self._donor.routes.dial(peer, {"purpose": "fetch"}, deadline, or_relay=True)
        self._channels[rank] = channel
        if self._is_over:  # since the connection was being opened
            channel.cut()
        return channel


class FragmentRequest(NamedTuple):
    """Fragment to take from another job (the donor), with the version and the tensors to take."""

    fragment: Fragment
    number: int  # of the fragment
    least_version: int  # round of the last outer step that it must contain, or a later one
    tensors: tuple[str, ...]  # ANCHOR, MOMENTUM or both


class ReadFragment(NamedTuple):
    """This rank's elements of a part of the model, copied from another job, or why that failed."""

    tensors: dict[str, torch.Tensor]
    versions: set[int] = set()  # several if the donor took an outer step in between
    why: str = ""


class FragmentReader:
    """Thread that copies parts of the model (fragments) from the ranks of another job, the donor.

    The thread has connections of its own. A rank has two such threads, so that the donor always has a
    request to answer: a single one would wait for a round trip over the WAN after each fragment.

    Args:
        donor: The job from which fragments are copied.
        rank: This rank.
        patience_s: Seconds for a connection to the donor, or for its answer (more for many bytes).
    """

    def __init__(self, donor: Donor, rank: int, patience_s: float):
        self._donor = donor
        self._rank = rank
        self._connections = DonorConnections(donor, patience_s)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="holmes-take")

    def read(self, request: FragmentRequest) -> Future[ReadFragment]:
        """Queue a request to copy a part of the model from the donor; the future gets the elements."""
        return self._thread.submit(self._read, request)

    def close(self) -> None:
        """End the thread, even if it waits for data, and close its connections."""
        self._connections.cut()
        self._thread.submit(self._connections.close)
        self._thread.shutdown(wait=False)

    def _read(self, request: FragmentRequest) -> ReadFragment:
        fragment = request.fragment
        tensors: dict[str, torch.Tensor] = {}  # to fill with this rank's elements
        if ANCHOR in request.tensors:
            tensors[ANCHOR] = torch.empty_like(fragment.anchor)
        if MOMENTUM in request.tensors and fragment.momentum is not None:
            tensors[MOMENTUM] = torch.empty_like(fragment.momentum)
        try:
            versions = _fetch(request, tensors, self._donor, self._connections, self._rank)
        except (OSError, HolmesError) as error:
            return ReadFragment({}, why=str(error) or type(error).__name__)
        return ReadFragment(tensors, versions)


def take_fragments(
    state: OuterState,
    wanted: Mapping[int, int],
    donor: Donor,
    job_ranks: JobRanks,
    patience_s: float,
    store: Store,
    tensors: Sequence[str] = (ANCHOR, MOMENTUM),
) -> str:
    """Copy parts of the model (fragments) from another job, the donor, on all ranks; collective.

    Each rank reads its elements of the weights after the last outer step (anchor) and of the outer momentum.
    All ranks must get the same version: if the donor takes an outer step in between, they read again.

    Args:
        state: Outer state of this rank.
        wanted: Index of each fragment to take -> least version (round of its last outer step).
        donor: The job that has these fragments.
        job_ranks: Collectives over the ranks of this job.
        patience_s: Seconds for a connection to the donor, or for its answer (more for many bytes).
        store: Called for each fragment with its version, anchor and momentum; None for a tensor that is
            not taken.
        tensors: The tensors to take: ANCHOR, MOMENTUM or both.

    Returns:
        "" if all were taken. Otherwise the reason why a fragment could not be taken; fragments before
        it may have been stored.
    """
    requests = [
        FragmentRequest(state.fragments[index], index, least_version, tuple(tensors))
        for index, least_version in wanted.items()
    ]
    readers = [FragmentReader(donor, job_ranks.rank, patience_s) for _ in range(_READERS)]
    try:
        under_way = [reader.read(request) for reader, request in zip(readers, requests)]
        for number, request in enumerate(requests):
            reader = readers[number % _READERS]
            why = _take_fragment(request, under_way[number], reader, job_ranks, store)
            if why:
                return why
            if number + _READERS < len(requests):
                under_way.append(reader.read(requests[number + _READERS]))
        return ""
    finally:
        for reader in readers:
            reader.close()


def _take_fragment(
    request: FragmentRequest,
    first_read: Future[ReadFragment],
    reader: FragmentReader,
    job_ranks: JobRanks,
    store: Store,
) -> str:
    """Store a fragment, after checking that all ranks have read the same version of it; collective.

    Args:
        request: The fragment, and the least version that it must have.
        first_read: Gets this rank's elements of the fragment.
        reader: Reads the fragment again if the donor took an outer step while the ranks were reading.
        job_ranks: Collectives over the ranks of this job.
        store: Called with the fragment, its version, anchor and momentum (see take_fragments()).

    Returns:
        "" if the fragment was stored. Otherwise the reason why it could not be taken.
    """
    next_read = first_read
    for _ in range(_TRIES):
        read = next_read.result()
        report: dict[str, Any] = {"versions": sorted(read.versions)}
        if read.why:
            report = {"why": read.why}
        reports = job_ranks.all_gather(report)
        errors = [rank_report["why"] for rank_report in reports if "why" in rank_report]
        if errors:
            return errors[0]
        versions = {version for rank_report in reports for version in rank_report["versions"]}
        least_version = request.least_version
        if any(version < least_version for version in versions):
            # No reason to try again: the donor has already waited for this version.
            return f"it has fragment {request.number} of round {min(versions)}, not {least_version}"
        if len(versions) == 1:
            anchor = read.tensors.get(ANCHOR)
            momentum = read.tensors.get(MOMENTUM)
            store(request.fragment, versions.pop(), anchor, momentum)
            return ""
        next_read = reader.read(request)
    return f"fragment {request.number} was stepped each time while it was read"


def _fetch(
    request: FragmentRequest,
    taken: Mapping[str, torch.Tensor],
    donor: Donor,
    connections: DonorConnections,
    rank: int,
) -> set[int]:
    """Copy this rank's elements of a fragment's anchor, momentum or both from an up-to-date job.

    Args:
        request: The fragment, which is not changed. The donor waits until it has the requested version. If
            that takes too long, it answers with an older one.
        taken: ANCHOR, MOMENTUM or both -> tensor to fill.
        donor: The up-to-date job.
        connections: Connections to its ranks.
        rank: This rank.

    Returns:
        Versions of the elements that were read: several if the donor took a step in between, none
        if this rank has no elements.

    Raises:
        OSError: The donor cannot be reached, or does not answer in time.
        HolmesError: The donor's answer is malformed.
    """
    fragment = request.fragment
    pieces_of: dict[int, list[SharedRange]] = {}  # rank of the donor -> elements to read from it
    maps = {"mine": donor.mine, "theirs": donor.theirs}
    for piece in shared_ranges(maps, fragment.start, fragment.stop):
        if piece.owners["mine"] == rank:
            pieces_of.setdefault(piece.owners["theirs"], []).append(piece)
    versions: set[int] = set()
    for donor_rank, pieces in pieces_of.items():
        channel = connections.to(donor_rank)
        for piece in pieces:
            place = fragment.places(piece.start, piece.stop)  # slice of this rank's elements
            parts = {name: tensor[place] for name, tensor in taken.items()}
            version = _read(
                channel,
                request.number,
                request.least_version,
                start=piece.start,
                stop=piece.stop,
                parts=parts,
                patience_s=connections.patience_s,
            )
            versions.add(version)
            is_too_old = version < request.least_version  # although the donor has waited
            if is_too_old:
                return versions
    return versions


def _read(
    channel: Channel,
    index: int,
    least_version: int,
    start: int,
    stop: int,
    parts: Mapping[str, torch.Tensor],
    patience_s: float,
) -> int:
    """Copy a range of elements of a fragment from a rank of an up-to-date job (donor).

    Args:
        channel: Connection to that rank.
        index: Index of the fragment, a part of the model.
        least_version: Least version (round of the last outer step) that this job needs. The donor waits
            until it has this version. If that takes too long, it answers with an older version.
        start: First element.
        stop: Element after the last.
        parts: ANCHOR, MOMENTUM or both -> tensor to fill.
        patience_s: Seconds for the answer (more for many bytes).

    Returns:
        The version of the elements that were sent.

    Raises:
        ConnectionError: The answer has another size, or is not finite.
    """
    # The donor sends the anchor first.
    buffers = [bytes_of(parts[name]) for name in (ANCHOR, MOMENTUM) if name in parts]
    expected_sizes = [parts[name].nbytes if name in parts else 0 for name in (ANCHOR, MOMENTUM)]
    deadline = Deadline.for_bytes(patience_s, sum(expected_sizes), "taking weights")
    elements = {"fragment": index, "version": least_version, "start": start, "stop": stop}
    channel.send({**elements, "tensors": list(parts)}, deadline)
    answer = Table(channel.receive(deadline), "what a donor gives")
    sizes = [answer.take(ANCHOR, int), answer.take(MOMENTUM, int)]  # in bytes
    if sizes != expected_sizes:
        raise ConnectionError(f"{sizes} bytes came instead of {expected_sizes}")
    channel.receive_bytes(buffers, deadline)
    if not all(bool(part.isfinite().all()) for part in parts.values()):
        raise ConnectionError("its weights are not finite")
    return answer.take("version", int)
