"""A job that is new, late or older takes fragments from another one: each rank from those that exchange the same
elements there.

    taker   {"fragment": 2, "version": 57, "start": a, "stop": b}      on a line of its own to the donor's rank
    donor   {"version": 57, "anchor": bytes, "momentum": bytes}, then these bytes

The donor trains on meanwhile: it answers from a thread, from its host memory, once it has that version: the coordinator
point may have told the taker of a commit before the donor has heard of it. Should it step the fragment in between,
the ranks of the taker see different versions, and ask again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from holmes_ext.errors import HolmesError
from holmes_ext.runtime.outer.coordinator.wire import Line
from holmes_ext.runtime.outer.job_ranks import JobRanks
from holmes_ext.runtime.outer.ownership import RankRange, shard_pairs
from holmes_ext.runtime.outer.peers.links import Peer, reach
from holmes_ext.runtime.outer.state import Fragment, OuterState

#: How often a fragment is asked for again, because it was stepped in between.
_TRIES = 5
_ASKED_S = 600.0
#: Seconds between two looks at whether the version that was asked for is there.
_LOOK_S = 0.02


def give(state: OuterState, line: Line) -> None:
    """The donor's side: answer until the taker closes the line. OSError when it does."""
    while True:
        asked = line.receive(_ASKED_S)
        fragment = state.fragments[int(asked["fragment"])]
        until = time.monotonic() + state.settings.timeout / 2
        while fragment.promised < int(asked["version"]) and time.monotonic() < until:
            time.sleep(_LOOK_S)
        version, anchor, momentum = state.copy_of(fragment, int(asked["start"]), int(asked["stop"]))
        data = [_bytes(one) for one in (anchor, momentum) if one is not None]
        line.send(
            {"version": version, "anchor": len(data[0]), "momentum": len(data[1]) if len(data) > 1 else 0}
        )
        line.socket.settimeout(_ASKED_S)
        for one in data:
            line.socket.sendall(one)


def take(
    state: OuterState,
    wanted: Mapping[int, int],
    mine: Sequence[RankRange],
    theirs: Sequence[RankRange],
    rank: int,
    peers: Mapping[int, Peer],
    job_ranks: JobRanks,
    token: str,
    patience_s: float,
) -> str:
    """Fragments (`wanted`: with the versions that they have there) from the ranks of the donor, on all ranks of this
    job. "" when all is well, else why not: nothing has changed then.

    mine, theirs: owners of this position in both jobs; peers: the donor's ranks.
    """
    for number, least in wanted.items():
        fragment = state.fragments[number]
        for _ in range(_TRIES):
            anchor, told = torch.empty_like(fragment.anchor), dict[str, Any]()
            momentum = None if fragment.momentum is None else torch.empty_like(fragment.momentum)
            try:
                told["versions"] = sorted(
                    _fetch(
                        fragment,
                        number,
                        least,
                        anchor,
                        momentum,
                        mine,
                        theirs,
                        rank,
                        peers,
                        token,
                        patience_s,
                    )
                )
            except (OSError, HolmesError) as error:
                told["why"] = str(error) or type(error).__name__
            everyone = job_ranks.from_all(told)
            if whys := [one["why"] for one in everyone if "why" in one]:
                return whys[0]
            versions = {version for one in everyone for version in one["versions"]}
            if len(versions) == 1:
                state.replace(fragment, versions.pop(), anchor, momentum)
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
    mine: Sequence[RankRange],
    theirs: Sequence[RankRange],
    rank: int,
    peers: Mapping[int, Peer],
    token: str,
    patience_s: float,
) -> set[int]:
    """The versions of what was read into `anchor` and `momentum`: one, unless the donor stepped in between; none for
    a rank without elements."""
    cut = shard_pairs({"mine": mine, "theirs": theirs}, fragment.start, fragment.stop)
    by_donor: dict[int, list] = {}
    for piece in cut:
        if piece.owners["mine"] == rank:
            by_donor.setdefault(piece.owners["theirs"], []).append(piece)
    versions: set[int] = set()
    for donor, wanted in by_donor.items():
        peer = peers[donor]
        line = reach(peer.address, token, {"purpose": "fetch", "to": peer.incarnation}, patience_s)
        try:
            for piece in wanted:
                place = fragment.places(piece.start, piece.stop)
                line.send({"fragment": number, "version": least, "start": piece.start, "stop": piece.stop})
                told = line.receive(patience_s)
                versions.add(int(told["version"]))
                _read(line, _bytes(anchor[place]), told["anchor"], patience_s)
                _read(
                    line,
                    _bytes(momentum[place]) if momentum is not None else memoryview(b""),
                    told["momentum"],
                    patience_s,
                )
        finally:
            line.close()
    return versions


def _read(line: Line, into: memoryview, count: int, patience_s: float) -> None:
    if count != len(into):
        raise ConnectionError(f"{count} bytes came instead of {len(into)}")
    deadline = time.monotonic() + patience_s
    while into:
        line.socket.settimeout(max(0.1, deadline - time.monotonic()))
        got = line.socket.recv_into(into)
        if got == 0:
            raise ConnectionResetError("the other job closed the connection")
        into, deadline = into[got:], time.monotonic() + patience_s


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data
