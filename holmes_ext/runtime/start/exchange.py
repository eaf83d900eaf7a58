"""Every rank reports, the launcher's rank 0 decides, every rank learns the verdict - all through the job's store.

    rank 0:   holmes/round           + 1: this start of the job; holmes/BEFORE/over, for those that wait in the last one
    rank r:   holmes/ROUND/report/r  = who I am, what I was given  (NICs too, from local rank 0)
    rank 0:   waits for all, compares, makes the plan
    rank 0:   holmes/ROUND/verdict   = {"digest": of {"site": ..., "plan": ...}} or {"error": one line}
    rank r:   waits for the verdict, takes what it announces (handout.py); an error ends it

A rank that fails before it can report sends its error instead, so that nobody waits for it in vain.

Why rounds: torchrun's agents keep one store over the restarts of a job, and do not agree on TORCHELASTIC_RESTART_COUNT
(an agent that restarts because another one did does not count it). So a rank may find what the job left there before.
A verdict that is there before the rank has reported is such a leftover, since none is made without its report: it
waits for the next round. So does one that reported in a round whose rank 0 did not live to its verdict.

Thousands of ranks wait for one key: a wait that times out costs milliseconds (torch writes down the C++ stack), and
stands in the way of all others. So nobody waits for less than it has left.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from holmes_ext.cluster.node_report import NodeReport
from holmes_ext.errors import HolmesError, RemoteError
from holmes_ext.runtime.start import handout
from holmes_ext.runtime.start.launcher import Process
from holmes_ext.runtime.start.store import awaited
from holmes_ext.words import some_of

#: What rank 0 makes of all reports: the verdict's content.
Decide = Callable[[list[dict[str, Any]], list[NodeReport]], dict[str, Any]]
_CHUNK = 512
_ROUND = "holmes/round"
#: The verdict of a round that the next one overtook.
_OVER = b"over"
#: How long a verdict that does not count this rank's report may stand until it is taken for one that gave the rank up,
#: in seconds.
_LEFTOVER_SECONDS = 10.0


@dataclass(frozen=True)
class Verdict:
    """round: the prefix for what else this start puts into the store; packed: what rank 0 decided, for all ranks."""

    round: str
    packed: bytes

    def content(self) -> dict[str, Any]:
        return _unpack(self.packed)


def exchange(store: Any, process: Process, report: dict[str, Any], decide: Decide, timeout_s: float) -> Verdict:
    """The verdict on all ranks' reports.

    `report` holds at least node, identity, local_rank, `agreed` (a flat dict that must be the same everywhere) and,
    from local rank 0, `nics_of_node`; or only `error`. Raises HolmesError on rank 0 and RemoteError elsewhere.
    """
    packed, verdict = _pack({**report, "rank": process.rank}), None
    try:
        if process.rank == 0:
            return _take(store, process, report, _lead(store, process, packed, decide, timeout_s))
        verdict = _await_verdict(store, process, packed, timeout_s)
        if verdict is not None and "error" not in verdict:
            return _take(store, process, report, verdict)
    except RuntimeError:  # the store, or the host of it, is gone; torch.distributed.DistError is one
        verdict = None
    if verdict is None:
        raise HolmesError(
            f"rank {process.rank} on {report.get('node', '?')} got no verdict from rank 0 at"
            f" {process.master_addr}:{process.master_port}; was rank 0 started with --holmes, and is it alive?"
        )
    raise RemoteError(verdict["error"])


def _take(store: Any, process: Process, report: dict[str, Any], verdict: dict[str, Any]) -> Verdict:
    prefix, node = verdict["round"], _node(report)
    return Verdict(prefix, handout.take(store, prefix, node, process.local_rank, verdict["digest"]))


def _node(report: dict[str, Any]) -> str:
    return f"{report['node']}/{report['identity']}"


def _lead(store: Any, process: Process, packed: bytes, decide: Decide, timeout_s: float) -> dict[str, Any]:
    number = store.add(_ROUND, 1)
    prefix, before = f"holmes/{number}", f"holmes/{number - 1}"
    store.set(f"{prefix}/report/0", packed)
    if number > 1:
        store.set(f"{before}/over", b"1")
        store.compare_set(f"{before}/verdict", "", _OVER)
    try:
        decided = _pack(_decide(_collect(store, prefix, process, timeout_s), decide))
        verdict = {"digest": handout.give(store, prefix, decided), "round": prefix}
    except HolmesError as error:
        store.set(f"{prefix}/verdict", _pack({"error": str(error)}))
        raise
    store.set(f"{prefix}/verdict", _pack(verdict))
    return verdict


def _await_verdict(store: Any, process: Process, packed: bytes, timeout_s: float) -> dict[str, Any] | None:
    """Report in the round that is under way, or in the next where the one found is over; None when none came."""
    # Longer than rank 0, which may itself use up the time and then says who was missing.
    deadline = time.monotonic() + timeout_s + 15
    while (left := deadline - time.monotonic()) > 0 and (number := awaited(store, _ROUND, left)):
        prefix = f"holmes/{int(number)}"
        verdict = f"{prefix}/verdict"
        if store.check([verdict]):
            if not awaited(store, f"{prefix}/over", min(left, _LEFTOVER_SECONDS)):
                given_up = store.get(verdict)
                if given_up != _OVER and "error" in (said := _unpack(given_up)):
                    return said
            continue
        store.set(f"{prefix}/report/{process.rank}", packed)
        if (told := awaited(store, verdict, left)) != _OVER:
            return _unpack(told) if told else None
    return None


def _pack(document: dict[str, Any]) -> bytes:
    return zlib.compress(json.dumps(document, separators=(",", ":")).encode(), 1)


def _unpack(data: bytes) -> dict[str, Any]:
    return json.loads(zlib.decompress(data))


def _collect(store: Any, prefix: str, process: Process, timeout_s: float) -> list[dict[str, Any]]:
    """Reports of all ranks in rank order; HolmesError names the ranks that did not come within `timeout_s` seconds."""
    keys = [f"{prefix}/report/{rank}" for rank in range(process.world_size)]
    deadline = time.monotonic() + timeout_s
    reports: list[dict[str, Any]] = []
    for start in range(0, len(keys), _CHUNK):
        chunk = keys[start : start + _CHUNK]
        try:
            store.wait(chunk, timedelta(seconds=max(0.1, deadline - time.monotonic())))
        except RuntimeError:
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            count = f"{len(missing)} of {process.world_size} ranks"
            where = f"{process.master_addr}:{process.master_port}"
            raise HolmesError(
                f"{count} did not report within {timeout_s:g} s: rank {some_of(missing)};"
                f" were they started, with --holmes, and can they reach {where}?"
            ) from None
        reports += map(_unpack, store.multi_get(chunk))
    return reports


def _decide(reports: list[dict[str, Any]], decide: Decide) -> dict[str, Any]:
    for report in reports:
        if "error" in report:
            raise HolmesError(f"rank {report['rank']} on {report['node']}: {report['error']}")
    _compare(reports)
    return decide(reports, _nodes(reports))


def _compare(reports: list[dict[str, Any]]) -> None:
    first = reports[0]
    for report in (one for one in reports[1:] if one["agreed"] != first["agreed"]):
        for key in sorted({*first["agreed"], *report["agreed"]}):
            here, there = first["agreed"].get(key), report["agreed"].get(key)
            if here != there:
                raise HolmesError(
                    f"the ranks disagree on {key}: rank 0 on {first['node']} has {here!r}, rank {report['rank']} on"
                    f" {report['node']} has {there!r}; start all with the same"
                )


def _nodes(reports: list[dict[str, Any]]) -> list[NodeReport]:
    """One NodeReport for each node, in the order of its lowest rank, its processes counted."""
    by_identity: dict[str, list[dict[str, Any]]] = {}
    for report in reports:
        by_identity.setdefault(_node(report), []).append(report)
    nodes = []
    for members in by_identity.values():
        name, local = members[0]["node"], sorted(member["local_rank"] for member in members)
        if local != list(range(len(members))):
            count = len(members)
            raise HolmesError(f"node {name!r}: its {count} processes have local ranks {local}, not 0 to {count - 1}")
        leader = next(member for member in members if member["local_rank"] == 0)
        nodes.append(NodeReport.from_dict(leader["nics_of_node"], len(members)))
    return nodes
