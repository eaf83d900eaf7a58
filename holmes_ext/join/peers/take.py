"""A job that is new, late or older takes fragments from another one: each rank from those that exchange the
same elements there.

    taker   {"fragment": 2, "version": 57, "start": a, "stop": b}      on a connection of its
                                                                       own to the donor's rank
    donor   {"version": 57, "anchor": bytes, "momentum": bytes}, then these bytes

The donor trains on meanwhile: it answers from a thread, from its host memory, once it has that version: the
coordinator may have told the taker of a commit before the donor has heard of it. Should it step the fragment
in between, the ranks of the taker see different versions, and ask again. That the donor gave what it said
that it has shows at the taker's next round, when all tell sums that nobody could know before
(coordinator/versions.py).
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holmes_ext.document import Table
from holmes_ext.errors import HolmesError
from holmes_ext.join.peers.routes import Peer, Routes
from holmes_ext.join.shards.job_ranks import JobRanks
from holmes_ext.join.shards.ownership import RankRange, shard_pairs
from holmes_ext.join.shards.state import Fragment, OuterState
from holmes_ext.join.shards.weights import bytes_of
from holmes_ext.join.sockets.channel import Channel
from holmes_ext.runtime.deadline import Deadline

#: How often a fragment is asked for again, because it was stepped in between.
_TRIES = 5
#: Seconds between two questions of a taker.
_ASKED_S = 600.0
#: Seconds between two looks at whether the version that was asked for is there.
_LOOK_S = 0.02
#: Seconds between two looks at whether a taker that waits for its turn is still there.
_TURN_LOOK_S = 1.0
#: Takers at a time, and of one job, which may ask for nothing; each gets copies.
_TAKERS, _OF_ONE_JOB = 4, 2


class Giver:
    """The donor's side, of one rank."""

    def __init__(self, state: OuterState):
        self._state = state
        self._changed, self._taking = threading.Condition(), Counter[str]()

    def give(self, channel: Channel, purpose: Mapping[str, Any]) -> None:
        """Answer until the taker closes the connection, or asks for what is not there."""
        job = str(purpose.get("job"))
        try:
            self._wait_for_turn(channel, job)
            try:
                while True:
                    self._answer(channel)
            finally:
                with self._changed:
                    self._taking[job] -= 1
                    self._changed.notify_all()
        except (OSError, HolmesError):
            pass
        finally:
            channel.close()

    def _wait_for_turn(self, channel: Channel, job: str) -> None:
        """ConnectionError where the taker is gone meanwhile."""
        until = Deadline(_ASKED_S, "a taker's turn")
        with self._changed:
            while self._taking.total() >= _TAKERS or self._taking[job] >= _OF_ONE_JOB:
                self._changed.wait(_TURN_LOOK_S)
                until.check()
                if not channel.lives():  # its first question may have come
                    raise ConnectionError("the taker is gone")
            self._taking[job] += 1

    def _answer(self, channel: Channel) -> None:
        state = self._state
        asked = Table(channel.receive(Deadline(_ASKED_S, "a question")), "a taker's question")
        index, version, start, stop = (
            asked.take(key, int) for key in ("fragment", "version", "start", "stop")
        )
        if not 0 <= index < len(state.fragments):
            raise HolmesError(f"there is no fragment {index}")
        fragment = state.fragments[index]
        until = Deadline(state.settings.timeout / 2, "a version that is asked for")
        while fragment.given < version and not until.passed:
            if not channel.idle():
                raise ConnectionError("the taker does not wait")
            time.sleep(_LOOK_S)
        try:
            has, anchor, momentum = state.copy_of(fragment, start, stop)
        except KeyError:
            raise HolmesError(f"elements {start} to {stop} are not this rank's") from None
        data = [bytes_of(tensor) for tensor in (anchor, momentum) if tensor is not None]
        sizes = {"anchor": len(data[0]), "momentum": len(data[1]) if len(data) > 1 else 0}
        deadline = Deadline.for_bytes(state.settings.timeout, sum(map(len, data)), "giving weights")
        channel.send({"version": has, **sizes}, deadline)
        channel.send_bytes(data, deadline)


@dataclass(frozen=True)
class Donor:
    """Of a fragment: who exchanges what in both jobs, the donor's ranks, and how they are reached."""

    mine: Sequence[RankRange]
    theirs: Sequence[RankRange]
    peers: Mapping[int, Peer]
    routes: Routes


def take(
    state: OuterState,
    wanted: Mapping[int, int],
    donor: Donor,
    job_ranks: JobRanks,
    patience_s: float,
    store: Callable[[Fragment, int, torch.Tensor, torch.Tensor | None], None],
) -> str:
    """Fragments (`wanted`: with their versions) from the donor's ranks, on all of this job's; store(fragment,
    version, anchor, momentum) for each. "" or why not: then nothing of it was stored."""
    for number, least in wanted.items():
        fragment = state.fragments[number]
        for _ in range(_TRIES):
            anchor, report = torch.empty_like(fragment.anchor), dict[str, Any]()
            momentum = None if fragment.momentum is None else torch.empty_like(fragment.momentum)
            try:
                came = _fetch(
                    fragment, number, least, anchor, momentum, donor, job_ranks.rank, patience_s
                )
                report["versions"] = sorted(came)
            except (OSError, HolmesError) as error:
                report["why"] = str(error) or type(error).__name__
            everyone = job_ranks.all_gather(report)
            if whys := [rank_report["why"] for rank_report in everyone if "why" in rank_report]:
                return whys[0]
            versions = {version for rank_report in everyone for version in rank_report["versions"]}
            if any(version < least for version in versions):  # the donor has waited for it already
                return f"it has fragment {number} of round {min(versions)}, not {least}"
            if len(versions) == 1:
                store(fragment, versions.pop(), anchor, momentum)
                break
        else:
            return f"fragment {number} was stepped each time while it was read"
    return ""


def _fetch(
    fragment: Fragment,
    number: int,
    least: int,
    anchor: torch.Tensor,
    momentum: torch.Tensor | None,
    donor: Donor,
    rank: int,
    patience_s: float,
) -> set[int]:
    """The versions of what was read into `anchor` and `momentum`: one, unless the donor stepped in between;
    none for a rank without elements. OSError; HolmesError where what came cannot be weights."""
    by_rank: dict[int, list] = {}
    for piece in shard_pairs(
        {"mine": donor.mine, "theirs": donor.theirs}, fragment.start, fragment.stop
    ):
        if piece.owners["mine"] == rank:
            by_rank.setdefault(piece.owners["theirs"], []).append(piece)
    versions: set[int] = set()
    for donor_rank, wanted in by_rank.items():
        deadline = Deadline(patience_s, "calling the donor")
        channel = donor.routes.dial(donor.peers[donor_rank], {"purpose": "fetch"}, deadline)
        try:
            for piece in wanted:
                place = fragment.places(piece.start, piece.stop)
                parts = [anchor[place]] if momentum is None else [anchor[place], momentum[place]]
                versions.add(
                    _read(channel, number, least, piece.start, piece.stop, parts, patience_s)
                )
                if min(versions) < least:
                    return versions
        finally:
            channel.close()
    return versions


def _read(
    channel: Channel,
    number: int,
    least: int,
    start: int,
    stop: int,
    parts: Sequence[torch.Tensor],
    patience_s: float,
) -> int:
    """Anchor and momentum of some elements, into `parts`; their version."""
    buffers = [bytes_of(part) for part in parts]
    deadline = Deadline.for_bytes(patience_s, sum(map(len, buffers)), "taking weights")
    channel.send({"fragment": number, "version": least, "start": start, "stop": stop}, deadline)
    answer = Table(channel.receive(deadline), "what a donor gives")
    sizes = [answer.take(name, int) for name in ("anchor", "momentum")]
    if sizes[: len(buffers)] != list(map(len, buffers)) or any(sizes[len(buffers) :]):
        raise ConnectionError(f"{sizes} bytes came instead of {list(map(len, buffers))}")
    channel.receive_bytes(buffers, deadline)
    if not all(bool(part.isfinite().all()) for part in parts):
        raise ConnectionError("its weights are not finite")
    return answer.take("version", int)
