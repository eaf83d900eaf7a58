"""Every rank reports, the launcher's rank 0 decides, every rank learns the verdict: all by the store.

    rank 0:   holmes/round           + 1: this start of the job; holmes/BEFORE/over,
                                     for those that wait in the last one
    a node:   holmes/ROUND/reports   + who its ranks are, what they were given (and its NICs), by one
                                     that speaks for it (neighbours.py); once all ranks are counted
                                     rank 0 reads them at once (store.py)
    rank 0:   compares, makes the plan
    rank 0:   holmes/ROUND/verdict   = "+" and {"site": ..., "plan": ...}, or "!" and one line of an error
    a node:   waits for the verdict, tells its other ranks; an error ends it

A rank that fails before it can report sends its error instead, so that nobody waits for it in vain.

Why rounds: torchrun's agents keep one store over the restarts of a job, and do not agree on
TORCHELASTIC_RESTART_COUNT (an agent that restarts because another one did does not count it). So a rank may
find what the job left there before. A verdict that is there before the rank has reported is such a leftover,
since none is made without its report: it waits for the next round. So does one that reported in a round whose
rank 0 did not live to its verdict.

Thousands wait for one key: a wait that times out costs milliseconds (torch writes down the C++ stack), and
stands in the way of all others. So nobody waits for less than it has left.
"""

from __future__ import annotations

import json
import socket
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from holmes_ext.cluster.node_report import NodeReport
from holmes_ext.errors import HolmesError, RemoteError
from holmes_ext.runtime.deadline import Deadline
from holmes_ext.runtime.start.launcher import Process
from holmes_ext.runtime.start.preflight import (
    HEARD_SECONDS,
    Neighbours,
    name_of,
    speaker_hears,
    told,
)
from holmes_ext.runtime.start.store import awaited, gathered, put_in
from holmes_ext.words import some_of

#: What rank 0 makes of all reports: the verdict's content.
Decide = Callable[[list[dict[str, Any]], list[NodeReport]], dict[str, Any]]
_ROUND = "holmes/round"
#: How a verdict begins that is a document, one that is an error; and that of a round that the next one
#: overtook.
_GOOD, _BAD, _OVER = b"+", b"!", b"over"
#: How long a verdict that does not count this rank's report may stand until it is taken for one that gave the
#: rank up, in seconds.
_LEFTOVER_SECONDS = 10.0
#: How much longer than rank 0, which may itself use up the time and then says who was missing, the others
#: wait.
_LONGER_SECONDS = 15.0


@dataclass(frozen=True)
class Verdict:
    """round: prefix of what this start puts into the store; packed: what rank 0 decided, for all."""

    round: str
    packed: bytes

    def content(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(zlib.decompress(self.packed))
        return content


def exchange(
    store: Any, process: Process, report: dict[str, Any], decide: Decide, timeout_s: float
) -> Verdict:
    """The verdict on all ranks' reports, which hold at least node, identity, local_rank, `agreed` (a flat
    dict, the same everywhere) and, from local rank 0, `nics_of_node`; or only `error`. HolmesError on rank 0,
    RemoteError elsewhere."""
    limit = Deadline(timeout_s if process.rank == 0 else timeout_s + _LONGER_SECONDS)
    said = json.dumps({**report, "rank": process.rank}, separators=(",", ":")).encode()
    if process.local_world_size < 2:
        return _spoken(store, process, [said], decide, limit)
    node = f"{report['node']}/{report.get('identity', '')}"
    name, patience = (
        name_of(node, process.master_addr, process.master_port),
        min(HEARD_SECONDS, timeout_s / 4),
    )
    if process.local_rank:
        if speaker := speaker_hears(name, said, patience):
            return _learned(process, speaker, limit)
        return _spoken(store, process, [said], decide, limit)
    neighbours = Neighbours(name)
    reports = [said, *neighbours.hear(process.local_world_size - 1, patience)]
    try:
        verdict = _spoken(store, process, reports, decide, limit)
    except HolmesError as error:
        neighbours.tell(_BAD + str(error).encode())
        raise
    neighbours.tell(_GOOD + verdict.round.encode(), verdict.packed)
    return verdict


def _learned(process: Process, speaker: socket.socket, limit: Deadline) -> Verdict:
    """From the one that spoke for this rank too."""
    said, document = told(speaker, limit.left)
    if not said:
        who = f"rank {process.rank - process.local_rank}"
        raise HolmesError(
            f"rank {process.rank} got no verdict from {who}, which spoke for its node; is it alive?"
        )
    if said[:1] == _BAD:
        raise RemoteError(said[1:].decode())
    return Verdict(said[1:].decode(), document)


def _spoken(
    store: Any, process: Process, reports: list[bytes], decide: Decide, limit: Deadline
) -> Verdict:
    """The verdict for this rank, and for those of its node whose reports it has."""
    answer: tuple[str, bytes] | None = None
    try:
        if process.rank == 0:
            return _lead(store, process, reports, decide, limit)
        answer = _await_verdict(store, process, reports, limit)
    except (
        RuntimeError
    ):  # the store, or the host of it, is gone; torch.distributed.DistError is one
        pass
    if answer is None:
        raise HolmesError(
            f"rank {process.rank} on {json.loads(reports[0]).get('node', '?')} got no verdict from rank 0 at"
            f" {process.master_addr}:{process.master_port}; was rank 0 started with --holmes, and is it "
            f"alive?"
        )
    prefix, verdict = answer
    if verdict[:1] == _BAD:
        raise RemoteError(verdict[1:].decode())
    return Verdict(prefix, verdict[1:])


def _lead(
    store: Any, process: Process, reports: list[bytes], decide: Decide, limit: Deadline
) -> Verdict:
    number = store.add(_ROUND, 1)
    prefix, before = f"holmes/{number}", f"holmes/{number - 1}"
    if number > 1:
        store.set(f"{before}/over", b"1")
        store.compare_set(f"{before}/verdict", "", _OVER)
    try:
        put_in(store, f"{prefix}/reports", _pack(reports), len(reports), process.world_size)
        decided = _decide(_collect(store, prefix, process, limit), decide)
    except HolmesError as error:
        store.set(f"{prefix}/verdict", _BAD + str(error).encode())
        raise
    packed = zlib.compress(json.dumps(decided, separators=(",", ":")).encode(), 1)
    store.set(f"{prefix}/verdict", _GOOD + packed)
    return Verdict(prefix, packed)


def _await_verdict(
    store: Any, process: Process, reports: list[bytes], limit: Deadline
) -> tuple[str, bytes] | None:
    """Report in the round that is under way, or the next: its prefix and verdict; None when none came."""
    packed = _pack(reports)
    while (left := limit.left) > 0 and (number := awaited(store, _ROUND, left)):
        prefix = f"holmes/{int(number)}"
        key = f"{prefix}/verdict"
        if store.check([key]):
            if not awaited(store, f"{prefix}/over", min(left, _LEFTOVER_SECONDS)):
                given_up = store.get(key)
                if given_up[:1] == _BAD:
                    return prefix, given_up
            continue
        put_in(store, f"{prefix}/reports", packed, len(reports), process.world_size)
        if (verdict := awaited(store, key, left)) != _OVER:
            return (prefix, verdict) if verdict else None
    return None


def _pack(reports: list[bytes]) -> bytes:
    return zlib.compress(b"[" + b",".join(reports) + b"]", 1)


def _collect(store: Any, prefix: str, process: Process, limit: Deadline) -> list[dict[str, Any]]:
    """Reports of all ranks in rank order; HolmesError names those that did not come in time."""
    entries, world = gathered(store, f"{prefix}/reports", limit.left), process.world_size
    reports: dict[int, dict[str, Any]] = {}
    for report in (report for entry in entries for report in json.loads(zlib.decompress(entry))):
        if (other := reports.setdefault(report["rank"], report)) is not report:
            where = f"on {other['node']} and {report['node']}"
            raise HolmesError(
                f"rank {report['rank']} reported twice, {where}: how were they started?"
            )
    if missing := [rank for rank in range(world) if rank not in reports]:
        raise HolmesError(
            f"{len(missing)} of {world} ranks did not report within {limit.seconds:g} s: rank "
            f"{some_of(missing)}; were they started, with --holmes, and can they reach "
            f"{process.master_addr}:{process.master_port}?"
        )
    return [reports[rank] for rank in range(world)]


def _decide(reports: list[dict[str, Any]], decide: Decide) -> dict[str, Any]:
    for report in reports:
        if "error" in report:
            raise HolmesError(f"rank {report['rank']} on {report['node']}: {report['error']}")
    _compare(reports)
    return decide(reports, _nodes(reports))


def _compare(reports: list[dict[str, Any]]) -> None:
    first = reports[0]
    for report in (report for report in reports[1:] if report["agreed"] != first["agreed"]):
        for key in sorted({*first["agreed"], *report["agreed"]}):
            here, there = first["agreed"].get(key), report["agreed"].get(key)
            if here != there:
                raise HolmesError(
                    f"the ranks disagree on {key}: rank 0 on {first['node']} has {here!r}, rank "
                    f"{report['rank']} on {report['node']} has {there!r}; start all with the same"
                )


def _nodes(reports: list[dict[str, Any]]) -> list[NodeReport]:
    """One NodeReport for each node, in the order of its lowest rank, its processes counted."""
    by_identity: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for report in reports:
        by_identity.setdefault((report["node"], report["identity"]), []).append(report)
    nodes = []
    for members in by_identity.values():
        name, local = members[0]["node"], sorted(member["local_rank"] for member in members)
        if local != list(range(len(members))):
            count = len(members)
            raise HolmesError(
                f"node {name!r}: its {count} processes have local ranks {local}, not 0 to {count - 1}"
            )
        leader = next(member for member in members if member["local_rank"] == 0)
        nodes.append(NodeReport.from_dict(leader["nics_of_node"], len(members)))
    return nodes
