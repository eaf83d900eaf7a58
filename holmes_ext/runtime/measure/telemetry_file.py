"""The files of a run's telemetry: one for each rank, JSON lines, each written whole.

    DIR/RUN/rank3.jsonl     {"holmes_telemetry": 1, "run": RUN, "rank": 3, ...}     the head, once
                            {"clock": [offset_s, error_s]}                          this node's clock + offset = rank 0's clock
                            {"step": 7, "begin", "end", "tokens", "groups": [...], "reduction", "spans": [...], "ops": [...]}

groups: [kind, fabric, "inside" or "across" clusters, operations, payload bytes, bytes sent, seconds with one of them under way, exposed
seconds]. spans and ops (on traced steps only): [kind, start, end]; [kind, fabric, operation, group, number, peer or null, start,
end or 0, waited, bytes sent]. Seconds of the node's monotonic clock. A rank that is killed leaves whole lines, or one cut at the end.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from pathlib import Path
from typing import Any

from holmes_ext.runtime.measure.telemetry import Op, Recorder, union_s

VERSION = 1
#: Bytes of one rank's file; from half of it on no more steps are traced.
LIMIT_BYTES = 64 << 20
#: Operations listed of a traced step.
_LISTED = 5000
_FIRST_TRACED = (2, 5)
_TRACED_EVERY = 25


def traced(step: int) -> bool:
    """Whether every operation of this step is listed (on all ranks the same steps)."""
    return step in _FIRST_TRACED or (step > 0 and step % _TRACED_EVERY == 0)


class Writer:
    """Writes one rank's file from a thread of its own; HolmesError's place is taken by one line on stderr: training goes on.

    head: what the first line says besides the version. crosses(ranks): whether they are in more than one cluster.
    """

    def __init__(self, path: Path, head: dict[str, Any], crosses: Any, rank: int, limit: int = LIMIT_BYTES):
        self.path, self.crosses, self.rank, self.limit = path, crosses, rank, limit
        self.recorder: Recorder | None = None
        self.written = 0
        self._scalars: Any = None
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._line({"holmes_telemetry": VERSION, **head})
        self._thread = threading.Thread(target=self._serve, name="holmes telemetry", daemon=True)
        self._thread.start()

    def on_step(self, *step: Any) -> None:
        """A Recorder's on_step: hands over, so that the training thread does not format."""
        self._queue.put(step)

    def put(self, document: dict[str, Any]) -> None:
        """Any other line."""
        self._queue.put(document)

    def close(self) -> None:
        """Write what is left; at most some seconds."""
        self._queue.put(None)
        self._thread.join(10)

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            if self._file >= 0:
                self._line(item if isinstance(item, dict) else self._step(*item))
        if self._file >= 0:
            self._line({"end": "closed"})
            os.close(self._file)
            self._file = -1
        if self._scalars is not None:
            self._scalars.close()

    def _line(self, document: dict[str, Any]) -> None:
        data = (json.dumps(document, separators=(",", ":")) + "\n").encode()
        try:
            if self.written + len(data) > self.limit:
                raise OSError(0, f"the file has reached {self.limit >> 20} MiB")
            while data:
                count = os.write(self._file, data)
                self.written, data = self.written + count, data[count:]
        except OSError as error:
            print(f"holmes: {self.path}: telemetry of rank {self.rank} ends here ({error.strerror}); training goes on", file=sys.stderr, flush=True)
            os.close(self._file)
            self._file = -1

    def _step(self, step: int, begin: float, end: float, tokens: int, done: list[Op], spans: list, reduction: dict | None) -> dict[str, Any]:
        document = {"step": step, "begin": begin, "end": end, "tokens": tokens, "groups": self.totals(done)}
        if reduction:
            document["reduction"] = reduction
        if traced(step) and self.written < self.limit / 2:
            document["spans"] = spans[:_LISTED]
            document["ops"] = [self._op(op) for op in done[:_LISTED]]
        if self._scalars is not None:
            self._scalars.add(document)
        return document

    def _place(self, op: Op) -> tuple[str, str, str]:
        kind = op.group.kind(self.recorder.sizes, op.peer, self.rank)
        ends = op.group.ranks if op.peer is None or op.peer < 0 else (self.rank, op.peer)
        return kind, op.group.transport.fabric, "across" if self.crosses(ends) else "inside"

    def totals(self, done: list[Op]) -> list[list[Any]]:
        """The "groups" of a step's line."""
        sums: dict[tuple[str, str, str], list[Op]] = {}
        for op in done:
            sums.setdefault(self._place(op), []).append(op)
        return [
            [*place, len(ops), sum(op.payload for op in ops), round(sum(op.sent for op in ops)),
             round(union_s([(op.start, op.end) for op in ops]), 7), round(sum(op.waited for op in ops), 7)]
            for place, ops in sorted(sums.items())
        ]  # fmt: skip

    def _op(self, op: Op) -> list[Any]:
        kind, fabric, _ = self._place(op)
        times = (round(op.start, 7), round(op.end, 7), round(op.waited, 7))
        return [kind, fabric, op.name, op.group.name, op.number, op.peer, *times, round(op.sent)]

    def add_scalars(self, make: Any) -> None:
        """Give the scalars to TensorBoard too; `make` is called in the writer's thread."""
        self._scalars = Scalars(make)


class Scalars:
    """TensorBoard's copy of a rank's totals, where the user has it."""

    def __init__(self, make: Any):
        self._make, self._board = make, None

    def add(self, line: dict[str, Any]) -> None:
        if self._board is None and self._make is not None:
            make, self._make = self._make, None
            self._board = make()
        if self._board is None:
            return
        seconds = line["end"] - line["begin"]
        self._board.add_scalar("holmes/step_s", seconds, line["step"])
        for kind, fabric, where, _, _, sent, busy, exposed in line["groups"]:
            name = f"holmes/{kind} {where} ({fabric})"
            self._board.add_scalar(f"{name}/exposed_s", exposed, line["step"])
            self._board.add_scalar(f"{name}/MB_sent", sent / 1e6, line["step"])
            if busy:
                self._board.add_scalar(f"{name}/Gbps", sent * 8 / busy / 1e9, line["step"])

    def close(self) -> None:
        if self._board is not None:
            self._board.close()


def tensorboard_writer(directory: Path) -> Any:
    """A SummaryWriter, or None where tensorboard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(directory))
    except Exception:  # noqa: BLE001 - not installed, or broken: it is an extra
        return None
