"""The files of a run's telemetry: one for each rank, JSON lines, each written whole.

    DIR/RUN/rank3.jsonl, a line each:

    {"holmes_telemetry": 1, "run": RUN, "rank": 3, ...}    the head, once
    {"clock": [offset_s, error_s]}                         this node's clock + offset = rank 0's
    {"done": {"reductions", "in_flight", "differences"}}   what of the plan (as_planned.py)
    {"outer": {"round", "exposed", "bytes", ...}}          a round with other jobs (join)
    {"plan": {"step", "before", "in_flight", "now_s", "then_s", "back"}}        a change (rank 0)
    {"model": {...}, "stage links": [...]}                       what was measured: a profile
                                                                 (plan/profile.py), the
                                                           stages whose stage link to the next one is in it
    {"step": 7, "begin", "end", "tokens", "groups": [...], "reduction", "spans", "ops": [...]}

groups: [kind, fabric, "inside" or "across" clusters, operations, payload bytes, bytes sent, seconds with one
of them under way, exposed seconds]. between, where clusters differ: [from, to, bytes sent, exposed seconds];
the head's: [from, to, bits/s that all share (0: no limit), seconds one way]. spans and ops (on traced steps
only): [kind, start, end]; [kind, fabric, operation, group, number, peer or null, start, end or 0, waited,
bytes sent]. Seconds of the node's monotonic clock. A rank that is killed leaves whole lines, or one cut at
the end.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import permutations
from math import inf
from pathlib import Path
from typing import Any

from holmes_ext.cluster.node_report import lab_scale
from holmes_ext.runtime.measure.telemetry import Op, Recorder
from holmes_ext.runtime.session import Session
from holmes_ext.units import union_s
from holmes_ext.words import tell_user

VERSION = 1
#: Bytes of one rank's file; from half of it on no more steps are traced.
LIMIT_BYTES = 64 << 20
#: Operations listed of a traced step.
_LISTED = 5000
_FIRST_TRACED = (2, 5)
_TRACED_EVERY = 25
_AXES = ("pipeline", "tensor", "context", "expert", "data")


def traced(step: int) -> bool:
    """Whether every operation of this step is listed (on all ranks the same steps)."""
    return step in _FIRST_TRACED or (step > 0 and step % _TRACED_EVERY == 0)


class Writer:
    """Writes one rank's file (and a SummaryWriter of make_board()) from its own thread; what goes wrong is a
    line on stderr. path: None where take(document) alone gets the lines; head: of the first line;
    cluster_of(rank): its name."""

    def __init__(
        self,
        path: Path | None,
        head: dict[str, Any],
        recorder: Recorder,
        cluster_of: Callable[[int], str],
        make_board: Callable[[], Any] = lambda: None,
        limit: int = LIMIT_BYTES,
        take: Callable[[dict[str, Any]], None] = lambda document: None,
    ):
        self.path, self.recorder = path, recorder
        self.cluster_of, self.limit = cluster_of, limit
        self.take = take
        self.written, self._file = 0, -1
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._line({"holmes_telemetry": VERSION, **head})
        self._thread = threading.Thread(
            target=self._serve, args=(make_board,), name="holmes telemetry", daemon=True
        )
        self._thread.start()

    def on_step(self, *step: Any) -> None:
        """A Recorder's on_step: hands over, so that the training thread does not format."""
        self._queue.put(step)

    def put(self, document: dict[str, Any]) -> None:
        """Any other line."""
        self._queue.put(document)

    def close(self) -> None:
        """Write what is left, and what the last step left under way; at most some seconds."""
        if late := [op for op in self.recorder.behind if op.end]:
            self.put(
                {
                    "late": self.recorder.step - 1,
                    "groups": self.totals(late),
                    "between": self.between(late),
                }
            )
        self._queue.put(None)
        self._thread.join(10)

    def _serve(self, make_board: Callable[[], Any]) -> None:
        board, first = None, True
        while (item := self._queue.get()) is not None:
            document = item if isinstance(item, dict) else self._step(*item)
            self._line(document)
            self.take(document)
            if "step" in document:
                board, first = (make_board() if first else board), False
                _add_scalars(board, document)
        if self._file >= 0:
            self._line({"end": "closed"})
            os.close(self._file)
            self._file = -1
        if board is not None:
            board.close()

    def _line(self, document: dict[str, Any]) -> None:
        if self._file < 0:
            return
        data = (json.dumps(document, separators=(",", ":")) + "\n").encode()
        try:
            if self.written + len(data) > self.limit:
                raise OSError(0, f"the file has reached {self.limit >> 20} MiB")
            while data:
                count = os.write(self._file, data)
                self.written, data = self.written + count, data[count:]
        except OSError as error:
            message = f"telemetry of rank {self.recorder.rank} ends here ({error.strerror}); training goes on"
            tell_user(f"{self.path}: {message}")
            os.close(self._file)
            self._file = -1

    def _step(
        self,
        step: int,
        begin: float,
        end: float,
        tokens: int,
        done: list[Op],
        spans: list,
        reduction: dict | None,
    ) -> dict[str, Any]:
        document = {
            "step": step,
            "begin": begin,
            "end": end,
            "tokens": tokens,
            "groups": self.totals(done),
        }
        if crossed := self.between(done):
            document["between"] = crossed
        if reduction:
            document["reduction"] = reduction
        if self._file >= 0 and traced(step) and self.written < self.limit / 2:
            document["spans"] = spans[:_LISTED]
            document["ops"] = [self._op(op) for op in done[:_LISTED]]
        return document

    def totals(self, done: list[Op]) -> list[list[Any]]:
        """The "groups" of a step's line."""
        sums: dict[tuple[str, str, str], list[Op]] = {}
        for op in done:
            where = (
                "across" if len(set(map(self.cluster_of, self.recorder.ends(op)))) > 1 else "inside"
            )
            sums.setdefault((self.recorder.kind(op), op.group.transport.fabric, where), []).append(
                op
            )
        return [
            [
                *place,
                len(ops),
                sum(op.payload for op in ops),
                round(sum(op.sent for op in ops)),
                round(union_s([(op.start, op.end) for op in ops]), 7),
                round(sum(op.waited for op in ops), 7),
            ]
            for place, ops in sorted(sums.items())
        ]

    def between(self, done: list[Op]) -> list[list[Any]]:
        """The "between" of a step's line. A collective counts with what it sends to the group's next rank, if
        that is in another cluster; its exposed seconds count for the next other cluster."""
        sums: dict[tuple[str, str], list[float]] = {}
        cluster = self.cluster_of(self.recorder.rank)
        for op in done:
            if op.peer is not None and op.peer < 0:
                continue  # from whoever sends first
            if op.peer is not None:
                other, sent = self.cluster_of(op.peer), op.sent
            else:
                ranks = op.group.ranks
                at = ranks.index(self.recorder.rank) + 1
                following = [self.cluster_of(rank) for rank in (*ranks[at:], *ranks[:at])]
                other = next((name for name in following if name != cluster), cluster)
                sent = op.sent if following[0] == other else 0.0
            if other != cluster:
                received = op.peer is not None and not op.sent
                total = sums.setdefault(
                    (other, cluster) if received else (cluster, other), [0.0, 0.0]
                )
                total[:] = total[0] + sent, total[1] + op.waited
        return [
            [*pair, round(sent), round(waited, 7)] for pair, (sent, waited) in sorted(sums.items())
        ]

    def _op(self, op: Op) -> list[Any]:
        times = (round(op.start, 7), round(op.end, 7), round(op.waited, 7))
        place = (self.recorder.kind(op), op.group.transport.fabric)
        return [*place, op.name, op.group.name, op.number, op.peer, *times, round(op.sent)]


def open_writer(
    current: Session, run: str, recorder: Recorder, take: Callable[[dict[str, Any]], None]
) -> Writer:
    """This rank's, in the folder `run` of --holmes-telemetry ("": take(document) alone); OSError: no file."""
    site, node, sizes, scale = current.site, current.node, current.plan.sizes, lab_scale(os.environ)
    folder = Path(current.options.telemetry).absolute() / run
    head = {
        "run": run,
        "rank": current.rank,
        "world": current.process.world_size,
        "node": node.name,
        "cluster": node.cluster,
        "wall": time.time(),
        "sizes": {axis: getattr(sizes, axis) for axis in _AXES} if sizes else None,
        **({"scale": scale} if scale != 1 else {}),
        "fabrics": {
            fabric.name: [fabric.kind, round(fabric.rate_bps * scale)] for fabric in site.fabrics
        },
        "between": [
            [
                *pair,
                min((hop.rate_bps for hop in hops if hop.rate_bps < inf), default=0) * scale,
                sum(hop.latency_s for hop in hops),
            ]
            for pair in permutations(site.clusters, 2)
            if (hops := current.plan.wan.hops(*pair))
        ],
    }

    def cluster_of(rank: int) -> str:
        return site.node_by_name[current.plan.node_of(rank)].cluster

    make_board = (
        partial(tensorboard_writer, folder / "tensorboard")
        if run and current.rank == 0
        else lambda: None
    )
    path = folder / f"rank{current.rank}.jsonl" if run else None
    writer = Writer(path, head, recorder, cluster_of, make_board, take=take)
    recorder.on_step.append(writer.on_step)
    recorder.on_round = writer.put
    return writer


def tensorboard_writer(directory: Path) -> Any:
    """A SummaryWriter, or None where tensorboard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(directory))
    except Exception:  # noqa: BLE001 - not installed, or broken: it is an extra
        return None


def _add_scalars(board: Any, line: dict[str, Any]) -> None:
    """A step's totals to TensorBoard."""
    if board is None:
        return
    step = line["step"]
    board.add_scalar("holmes/step_s", line["end"] - line["begin"], step)
    for kind, fabric, where, _, _, sent, busy, exposed in line["groups"]:
        name = f"holmes/{kind} {where} ({fabric})"
        board.add_scalar(f"{name}/exposed_s", exposed, step)
        board.add_scalar(f"{name}/MB_sent", sent / 1e6, step)
        if busy:
            board.add_scalar(f"{name}/Gbps", sent * 8 / busy / 1e9, step)
