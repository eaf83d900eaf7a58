"""Writes the telemetry of a run: one file of JSON lines for each rank, DIR/RUN/rank3.jsonl.

    {"holmes_telemetry": 1, "run": RUN, "rank": 3, ...}    first line: describes the rank
    {"clock": [offset_s, error_s]}                         this node's clock + offset_s = the clock of rank 0
    {"done": {"reductions", "in_flight", "differences"}}   the job's reductions and schedule, compared with
                                                           its plan (watch/as_planned.py)
    {"outer": {"round", "exposed", "bytes", ...}}          an outer round: jobs that are joined by
                                                           --holmes-join exchange pseudo-gradients
    {"plan": {"step", "before", "in_flight", "now_s", ...}}    a change of the plan that --holmes-adapt made
                                                           while the job ran, in the file of rank 0
    {"model": {...}, "stage_links": [...]}                 a measured profile (plan/profile.py), and the
                                                           stages whose link to the next stage is in it
    {"step": 7, "begin", "end", "tokens", "groups", "between", "reduction", "spans", "ops"}
                                                           a training step

Parts of the line of a change of the plan:

    before, in_flight    micro-batches in flight of each stage, before and after the change
    now_s, then_s        seconds of a step: measured before the change, and predicted for after it
    back                 whether the change takes back an earlier change

Parts of the line of a training step:

    groups     for each kind of group and network: [kind, fabric, "inside" or "across" clusters, operations,
               payload bytes, bytes sent, seconds with operations under way, exposed seconds]
    between    for each pair of clusters, if there are several: [from, to, bytes sent, exposed seconds]
    spans      only in traced steps: [kind, start, end]
    ops        only in traced steps: [kind, fabric, operation, group, number, peer or null, start, end or 0,
               seconds of waiting, bytes sent]

"between" in the first line describes links: [from, to, bits/s that all share (0: no limit), seconds one
way]. All times are seconds of the node's monotonic clock. Each line is written as a whole. If a rank is
killed, at most its last line is cut.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import permutations
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from holmes_ext.cluster.node_report import lab_scale
from holmes_ext.runtime.measure.operations import Op
from holmes_ext.runtime.measure.telemetry import Recorder
from holmes_ext.runtime.session import Session
from holmes_ext.units import union_s
from holmes_ext.words import tell_user

VERSION = 1
#: Largest file of a rank, in bytes. After half of it, no more steps are traced.
LIMIT_BYTES = 64 << 20
_MOST_LISTED = 5000  # operations, and spans, of a traced step
_FIRST_TRACED = (2, 5)
_TRACED_EVERY = 25
_AXES = ("pipeline", "tensor", "context", "expert", "data")
_DIGITS = 7  # of seconds after the decimal point
_CLOSE_S = 10  # that close() waits for the thread
_FILE_MODE = 0o644


class _GroupKey(NamedTuple):
    """Kind, network and place of operations. The figures of operations with the same key are added up."""

    kind: str
    fabric: str
    where: str  # "inside" a cluster or "across" clusters


def _ignore(document: dict[str, Any]) -> None:
    """Ignore a line of the telemetry file, because no metrics need it."""


def _no_board() -> None:
    """Return no SummaryWriter, because this rank writes nothing for TensorBoard."""


def traced(step: int) -> bool:
    """Return whether the file lists every operation of a step. All ranks list those of the same steps."""
    return step in _FIRST_TRACED or (step > 0 and step % _TRACED_EVERY == 0)


class Writer:
    """Thread that writes the telemetry file of a rank, and scalars for TensorBoard.

    If the file cannot be written any more, a line for the user is printed, and the rest of the run
    is not written. Training goes on.
    """

    def __init__(
        self,
        path: Path | None,
        head: dict[str, Any],
        recorder: Recorder,
        cluster_of: Callable[[int], str],
        make_board: Callable[[], Any] = _no_board,
        limit: int = LIMIT_BYTES,
        take: Callable[[dict[str, Any]], None] = _ignore,
    ):
        """Create the telemetry file with its first line, and start the thread that writes it.

        Args:
            path: The file; None if only `take` gets the lines.
            head: Content of the first line.
            recorder: Records the operations of this rank.
            cluster_of: Returns the name of a rank's cluster.
            make_board: Returns a SummaryWriter of TensorBoard, or None. It is called after the first step.
            limit: Largest size of the file, in bytes. A line that would exceed it closes the file.
            take: Called with each line after the first, as a JSON document, even if no file is written:
                it updates the metrics.

        Raises:
            OSError: The file cannot be created.
        """
        self.path = path
        self.recorder = recorder
        self.cluster_of = cluster_of
        self.limit = limit
        self.take = take
        self.written = 0  # bytes
        self._file = -1  # file descriptor; -1 if no file is open
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            # O_EXCL: an error if the file exists, so that no earlier run is overwritten.
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
            self._file = os.open(path, flags, _FILE_MODE)
        #: Work of the writing thread: a line's document (dict), the measurements of a step (tuple,
        #: the arguments of on_step()), or None to end the thread.
        self._queue: queue.SimpleQueue[dict[str, Any] | tuple[Any, ...] | None]
        self._queue = queue.SimpleQueue()
        self._write_line({"holmes_telemetry": VERSION, **head})
        self._thread = threading.Thread(
            target=self._serve, args=(make_board,), name="holmes telemetry", daemon=True
        )
        self._thread.start()

    def on_step(self, *step: Any) -> None:
        """Queue a training step of the Recorder. The line is made by this writer's thread, to save time here.

        Args:
            step: The arguments of Recorder's on_step.
        """
        self._queue.put(step)

    def put(self, document: dict[str, Any]) -> None:
        """Queue a JSON document as a line of the telemetry file, such as the offset of the clock."""
        self._queue.put(document)

    def close(self) -> None:
        """Write all queued lines of telemetry, then close the file. This takes at most _CLOSE_S seconds.

        Operations that were under way at the end of the last step, and have ended since, are in no step's
        line. They get a further line, if there are any.
        """
        late = [op for op in self.recorder.unfinished if op.end]
        if late:
            document = {
                "late": self.recorder.step - 1,
                "groups": self.totals(late),
                "between": self.cluster_pair_totals(late),  # rows for pairs of clusters
            }
            self.put(document)
        self._queue.put(None)  # ends the thread
        self._thread.join(_CLOSE_S)

    def _serve(self, make_board: Callable[[], Any]) -> None:
        """Write the queued lines into the file until close() is called. This is the function of the thread.

        Each line also goes to the metrics (take), and a step's line to TensorBoard.

        Args:
            make_board: Returns a SummaryWriter of TensorBoard, or None.
        """
        board = None
        is_first_step = True
        while True:
            item = self._queue.get()
            if item is None:
                break
            # An item is a document, or the arguments of on_step(), to be converted in this thread.
            document = item if isinstance(item, dict) else self._step_document(*item)
            self._write_line(document)
            self.take(document)
            if "step" in document:
                if is_first_step:
                    # Only now, since importing TensorBoard takes long: not at the start of the job, and
                    # not at all in a job without training steps.
                    board = make_board()
                    is_first_step = False
                _add_scalars(board, document)
        if self._file >= 0:
            self._write_line({"end": "closed"})
            os.close(self._file)
            self._file = -1
        if board is not None:
            board.close()

    def _write_line(self, document: dict[str, Any]) -> None:
        """Write a JSON document as a line of the telemetry file.

        After an error, or when the file has reached its largest size, the user gets a message and the file is
        closed. Later calls do nothing.
        """
        if self._file < 0:
            return
        data = (json.dumps(document, separators=(",", ":")) + "\n").encode()
        try:
            if self.written + len(data) > self.limit:
                raise OSError(0, f"the file has reached {self.limit >> 20} MiB")
            while data:
                count = os.write(self._file, data)
                self.written += count
                data = data[count:]
        except OSError as error:
            message = f"telemetry of rank {self.recorder.rank} ends here ({error.strerror}); training goes on"
            tell_user(f"{self.path}: {message}")
            os.close(self._file)
            self._file = -1

    def _step_document(
        self,
        step: int,
        begin: float,
        end: float,
        tokens: int,
        done: list[Op],
        spans: list[tuple[str, float, float]],
        reduction: dict[str, Any] | None,
    ) -> dict[str, Any]:
        """Return the JSON document of a training step: a line of the file.

        Args:
            step: Number of the step.
            begin: Begin of the step, in seconds.
            end: End of the step, in seconds.
            tokens: Tokens of the step, over all ranks together.
            done: Operations that ended in the step.
            spans: Parts of the step, as (kind, begin, end) in seconds.
            reduction: Measurements of the GradientReducer; None without a GradientReducer.
        """
        document = {
            "step": step,
            "begin": begin,
            "end": end,
            "tokens": tokens,
            "groups": self.totals(done),
        }
        pair_totals = self.cluster_pair_totals(done)
        if pair_totals:  # some operations crossed clusters
            document["between"] = pair_totals
        if reduction:
            document["reduction"] = reduction

        # A few steps (the same on all ranks) are traced: their lines list single operations. The second half
        # of the file's largest size is kept for lines without traces.
        if self._file >= 0 and traced(step) and self.written < self.limit / 2:
            document["spans"] = spans[:_MOST_LISTED]
            document["ops"] = [self._op_entry(op) for op in done[:_MOST_LISTED]]
        return document

    def totals(self, done: list[Op]) -> list[list[Any]]:
        """Return sums over operations of the same kind and network: the "groups" of a step's line.

        Args:
            done: Operations that have ended.

        Returns:
            Rows of [kind, network, "inside" or "across" clusters, number of operations, bytes of their
            tensors, sent bytes, seconds with operations under way, seconds the program waited].
        """
        ops_of: dict[_GroupKey, list[Op]] = defaultdict(list)
        for op in done:
            clusters = {self.cluster_of(rank) for rank in self.recorder.participants(op)}
            where = "across" if len(clusters) > 1 else "inside"
            key = _GroupKey(self.recorder.kind(op), op.group.transport.fabric, where)
            ops_of[key].append(op)
        rows = []
        for key, ops in sorted(ops_of.items()):
            payload_bytes = sum(op.payload for op in ops)
            sent_bytes = round(sum(op.sent for op in ops))
            busy_s = round(union_s([(op.start, op.end) for op in ops]), _DIGITS)
            exposed_s = round(sum(op.waited for op in ops), _DIGITS)
            rows.append([*key, len(ops), payload_bytes, sent_bytes, busy_s, exposed_s])
        return rows

    def cluster_pair_totals(self, done: list[Op]) -> list[list[Any]]:
        """Return the bytes and exposed seconds for each pair of clusters: the "between" of a step's line.

        A message counts for the clusters of its two ranks. A collective is taken to run around a
        ring of the group's ranks, where each rank sends to the next:

            bytes      Only a rank whose next rank is in another cluster sends bytes there.
            seconds    Every rank counts its seconds, because all ranks wait for the slowest link.
                       The pair is this rank's cluster and the first other cluster along the ring.

        Args:
            done: Operations that have ended.

        Returns:
            Rows of [from cluster, to cluster, bytes sent by this rank, seconds that the program waited].
        """
        own_cluster = self.cluster_of(self.recorder.rank)
        sent_of: dict[tuple[str, str], float] = defaultdict(float)  # (from, to) -> bytes
        waited_of: dict[tuple[str, str], float] = defaultdict(float)  # (from, to) -> seconds
        for op in done:
            if op.peer is not None and op.peer < 0:
                continue  # a message from any rank
            if op.peer is not None:  # a message between two ranks
                other = self.cluster_of(op.peer)
                sent = op.sent
            else:  # a collective, taken as a ring
                next_clusters = self._clusters_around_ring(op)
                others = [cluster for cluster in next_clusters if cluster != own_cluster]
                other = others[0] if others else own_cluster
                sends_to_other = next_clusters[0] == other
                sent = op.sent if sends_to_other else 0.0
            if other == own_cluster:
                continue  # nothing crosses clusters
            # op.sent is this rank's sent bytes, so it is 0 for a receive. Then the other cluster is
            # the source.
            is_received = op.peer is not None and not op.sent
            direction = (other, own_cluster) if is_received else (own_cluster, other)
            sent_of[direction] += sent
            waited_of[direction] += op.waited
        return [
            [*direction, round(sent_of[direction]), round(waited_of[direction], _DIGITS)]
            for direction in sorted(sent_of)
        ]

    def _clusters_around_ring(self, op: Op) -> list[str]:
        """Return the clusters of a collective's ranks around a ring, from the next rank to this rank.

        In a ring collective each rank sends to the next rank of the group, the last to the first.
        """
        position = op.group.ranks.index(self.recorder.rank)
        next_ranks = op.group.ranks[position + 1 :] + op.group.ranks[: position + 1]
        return [self.cluster_of(rank) for rank in next_ranks]

    def _op_entry(self, op: Op) -> list[Any]:
        """Return a collective, send or receive as a JSON list, for the line of its training step.

        In some steps, the traced ones, the telemetry file lists every operation: [kind of group,
        fabric, operation, group, number, peer or null, start, end, waited, bytes sent]. Times are
        in seconds; an end of 0 means that the operation is under way.
        """
        return [
            self.recorder.kind(op),  # purpose of its group, such as "data"
            op.group.transport.fabric,  # the group's network
            op.name,  # such as "all_reduce"
            op.group.name,  # torch's name of the group
            op.number,  # among the group's collectives, or among the messages of this direction and peer
            op.peer,  # rank of the other end of a message; None for a collective
            round(op.start, _DIGITS),
            round(op.end, _DIGITS),
            round(op.waited, _DIGITS),  # that the program stood still
            round(op.sent),  # bytes that this rank sent
        ]


def open_writer(
    current: Session, run: str, recorder: Recorder, take: Callable[[dict[str, Any]], None]
) -> Writer:
    """Return the telemetry writer of this rank, and connect it to a Recorder.

    The recorder calls the writer after each training step. It also gives the writer the documents (lines of
    the telemetry file) of outer rounds (--holmes-join) and of changes of the plan (--holmes-adapt).

    Args:
        current: The session of this process.
        run: Name of the run's folder in that of --holmes-telemetry; "" if no file is written.
        recorder: Records the operations of this rank.
        take: Function that updates the metrics. The writer calls it with each line of the telemetry file
            but the first, as a JSON document.

    Raises:
        OSError: The file cannot be created.
    """

    def cluster_of(rank: int) -> str:
        return current.site.node_by_name[current.plan.node_of(rank)].cluster

    folder = Path(current.options.telemetry).absolute() / run
    path = None
    make_board: Callable[[], Any] = _no_board
    if run:
        path = folder / f"rank{current.rank}.jsonl"
        if current.rank == 0:
            make_board = partial(tensorboard_writer, folder / "tensorboard")
    writer = Writer(
        path,
        head=_head(current, run),  # content of the first line
        recorder=recorder,
        cluster_of=cluster_of,
        make_board=make_board,
        take=take,
    )
    recorder.on_step.append(writer.on_step)
    recorder.write_document = writer.put
    return writer


def _head(current: Session, run: str) -> dict[str, Any]:
    """Return the content of a telemetry file's first line: this rank, its node and the networks.

    The lab emulates networks that are slower than the described ones by a factor, its scale. All
    rates are multiplied by this scale, so they are the emulated ones. Keys of the result:

        "wall"       Unix time now
        "fabrics"    network -> [its kind, bits/s]
        "between"    [from cluster, to cluster, bits/s, one-way latency in seconds] for each WAN
                     link; 0 bits/s if the link has no limit
    """
    node = current.node
    sizes = current.plan.sizes
    scale = lab_scale(os.environ)  # 1 outside of the lab
    head = {
        "run": run,
        "rank": current.rank,
        "world": current.process.world_size,
        "node": node.name,
        "cluster": node.cluster,
        "wall": time.time(),
        "sizes": {axis: getattr(sizes, axis) for axis in _AXES} if sizes else None,
    }
    if scale != 1:
        head["scale"] = scale
    head["fabrics"] = {
        fabric.name: [fabric.kind, round(fabric.rate_bps * scale)]
        for fabric in current.site.fabrics
    }

    # The links between clusters. The slowest hop of a link limits its rate.
    links = []
    for source, target in permutations(current.site.clusters, 2):
        hops = current.plan.wan.hops(source, target)
        if hops:
            limits_bps = [hop.rate_bps for hop in hops if hop.rate_bps < inf]
            latency_s = sum(hop.latency_s for hop in hops)
            links.append([source, target, min(limits_bps, default=0) * scale, latency_s])
    head["between"] = links
    return head


def tensorboard_writer(directory: Path) -> Any:
    """Return a SummaryWriter of TensorBoard; None if TensorBoard is not installed or broken."""
    try:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(directory))
    except Exception:  # noqa: BLE001 - any error: TensorBoard is optional
        return None


def _add_scalars(board: Any, line: dict[str, Any]) -> None:
    """Write exposed time, bytes and rate of each kind of process group for TensorBoard.

    Args:
        board: A SummaryWriter of TensorBoard, or None.
        line: The line of the step in the telemetry file.
    """
    if board is None:
        return
    step = line["step"]
    board.add_scalar("holmes/step_s", line["end"] - line["begin"], step)
    # A row of "groups" also has the number of operations and the bytes of their tensors. `where` is "inside"
    # or "across" clusters.
    for kind, fabric, where, _, _, sent_bytes, busy_s, exposed_s in line["groups"]:
        name = f"holmes/{kind} {where} ({fabric})"
        board.add_scalar(f"{name}/exposed_s", exposed_s, step)
        board.add_scalar(f"{name}/MB_sent", sent_bytes / 1e6, step)
        if busy_s:
            board.add_scalar(f"{name}/Gbps", sent_bytes * 8 / busy_s / 1e9, step)
