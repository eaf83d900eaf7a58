"""Collects a report of every rank on the launcher's rank 0 and distributes its verdict, at a job's start.

The verdict is the decision of rank 0 for all ranks: a document with the plan, or an error that ends the job.
Messages go through the job's key-value store (torch's TCPStore). PREFIX is "holmes/N" at the N-th start:

    1. rank 0      adds 1 to holmes/round and thereby gets N
    2. all ranks   send their reports: their node, local rank, flags and versions, and from
                   local rank 0 the NICs of its node          -> PREFIX/reports
    3. rank 0      reads all reports at once as soon as all ranks are counted, compares them, makes the plan
    4. rank 0      stores the plan as a document, or a one-line error  -> PREFIX/verdict
    5. all ranks   wait for PREFIX/verdict; an error ends the job on every rank

A rank that fails before it can report sends its error as the report. Every wait has a deadline.

Local rank 0 of a node, the leader, combines the reports of its node. The store serves a node like one rank:

    1. leader        listens on an abstract Unix socket: the kernel removes it when the process ends
    2. other ranks   send their reports to the leader, and get an acknowledgement
    3. leader        reports for itself and all ranks that it acknowledged, and waits for the verdict
    4. leader        sends the verdict to these ranks; its document goes as the descriptor of a memory file

A rank that gets no acknowledgement within HEARD_SECONDS sends its report to the store itself: its leader was
started without holmes or too late, or is in another network namespace or job, or belongs to another user.
Every acknowledged report has been counted, so no rank is counted twice.

The key holmes/round exists because torchrun's agents keep the same store over all restarts of a
job, and may disagree on TORCHELASTIC_RESTART_COUNT. A verdict that exists before a rank has
reported is of an earlier start: the rank waits for the next round. The next round's rank 0 also
sets PREFIX/over of the round before, for ranks whose rank 0 died without a verdict.

Thousands of ranks may wait for the same key. A wait that times out costs the store milliseconds (torch
formats the C++ stack) and delays all other ranks. So waits use all the time that is left and do not poll.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import struct
import time
import zlib
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from holmes_ext.cluster.node_report import NodeReport
from holmes_ext.errors import HolmesError, RemoteError
from holmes_ext.runtime.deadline import Deadline
from holmes_ext.runtime.start.launcher import Process
from holmes_ext.runtime.start.store import append_entry, collect_entries, wait_for_value
from holmes_ext.words import counted, some_of

#: Makes the content of the verdict from the reports of all ranks (in rank order) and of all nodes.
Decide = Callable[[list[dict[str, Any]], list[NodeReport]], dict[str, Any]]

#: Seconds that the ranks of a node wait for each other before the leader reports without the missing ones.
HEARD_SECONDS = 10.0
_ACKNOWLEDGED = b"heard"
_MOST_MESSAGE_BYTES = 1 << 17  # of a report, or of a verdict without its document
_MOST_WAITING_RANKS = 1024  # in the queue of the leader's socket
_RETRY_S = 0.02  # seconds until the next try to connect to the leader
_LEAST_WAIT_S = 0.1
_PEER_CREDENTIALS = struct.Struct("3i")  # process id, user id, group id: struct ucred of unix(7)

_ROUND_KEY = "holmes/round"
_GOOD = b"+"  # first byte of a verdict with a document
_BAD = b"!"  # first byte of a verdict with an error message
_OVER = b"over"  # value of a verdict's key if the next round began before there was a verdict
#: Seconds that a rank waits for the next round if the current round has a verdict without the rank's report.
#: After that, an error counts: rank 0 gave this rank up because its report came too late.
_LEFTOVER_SECONDS = 10.0
#: Seconds that other ranks wait longer than rank 0: it may use all its time before it names missing ranks.
_EXTRA_WAIT_S = 15.0


@dataclass(frozen=True)
class Verdict:
    """Decision of rank 0, e.g. the plan, that every rank of the job follows."""

    key_prefix: str  # of the keys of this start of the job in the store, such as "holmes/1"
    packed: bytes  # the document, as compressed JSON

    def content(self) -> dict[str, Any]:
        """Parse the document that rank 0 has sent to all ranks, such as the plan."""
        content: dict[str, Any] = json.loads(zlib.decompress(self.packed))
        return content


class _StoredVerdict(NamedTuple):
    """Decision of rank 0 as the job's store contains it."""

    key_prefix: str  # of the start of the job whose decision it is
    value: bytes  # _GOOD and a compressed document, or _BAD and an error message


def exchange(
    store: Any, process: Process, report: dict[str, Any], decide: Decide, timeout_s: float
) -> Verdict:
    """Report this rank to the launcher's rank 0, and return rank 0's decision for all ranks, the verdict.

    All ranks call this function at a job's start. The leader of a node, local rank 0, sends all its reports.

    Args:
        store: The job's key-value store.
        process: This rank, as the launcher numbered it.
        report: Has the keys "node", "identity" (unique to a node), "local_rank", "agreed" (a flat dictionary
            that must be the same on all ranks) and, on local rank 0, "nics_of_node". Or it has "error": the
            message of a failure on this rank. It ends the job.
        decide: Makes the verdict's document. It is called on rank 0 only.
        timeout_s: Seconds that rank 0 waits for the reports.

    Raises:
        HolmesError: On rank 0: a rank did not report, the reports contradict each other, or `decide` failed.
            On other ranks: there was no verdict.
        RemoteError: On other ranks: rank 0 has decided that the job ends. Rank 0 prints the message.
    """
    if process.rank == 0:
        deadline = Deadline(timeout_s)
    else:
        deadline = Deadline(timeout_s + _EXTRA_WAIT_S)
    own_report = json.dumps({**report, "rank": process.rank}, separators=(",", ":")).encode()
    if process.local_world_size <= 1:  # 0: the launcher does not say how many ranks the node has
        return _exchange_through_store(store, process, [own_report], decide, deadline)

    node = f"{report['node']}/{report.get('identity', '')}"
    socket_name = leader_socket_name(node, process.master_addr, process.master_port)
    patience_s = min(HEARD_SECONDS, timeout_s / 4)
    if process.local_rank > 0:
        connection = report_to_leader(socket_name, own_report, patience_s)
        if connection is not None:
            return _verdict_from_leader(process, connection, deadline)
        return _exchange_through_store(store, process, [own_report], decide, deadline)

    leader = NodeLeader(socket_name)
    other_reports = leader.collect_reports(process.local_world_size - 1, patience_s)
    try:
        verdict = _exchange_through_store(
            store, process, [own_report, *other_reports], decide, deadline
        )
    except HolmesError as error:
        leader.send_to_all(_BAD + str(error).encode())
        raise
    leader.send_to_all(_GOOD + verdict.key_prefix.encode(), document=verdict.packed)
    return verdict


def leader_socket_name(node: str, master_addr: str, master_port: int) -> str:
    """Return the name of the abstract Unix socket of a node's leader (local rank 0).

    The name differs for each user, node and job. A job is identified by the address of its store.
    """
    identity = f"{os.geteuid()} {node} {master_addr}:{master_port}"
    return f"\0holmes-{hashlib.sha256(identity.encode()).hexdigest()[:32]}"


class NodeLeader:
    """Local rank 0 of a node: takes the reports of the other ranks there, and passes rank 0's decision on."""

    def __init__(self, socket_name: str):
        """Listen on the abstract Unix socket `socket_name`, unless another process has that name."""
        self._connections: list[socket.socket] = []  # to the ranks whose reports were acknowledged
        self._listener: socket.socket | None = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(socket_name)
            self._listener.listen(_MOST_WAITING_RANKS)
        except OSError:  # the name is taken: every rank reports for itself
            self._stop_listening()

    def collect_reports(self, count: int, seconds: float) -> list[bytes]:
        """Return the reports of other ranks of this node.

        Each report is acknowledged. Ranks that connect later are refused, and report for themselves.

        Args:
            count: Number of reports to wait for.
            seconds: Seconds to wait. Then the reports that have arrived are returned.
        """
        reports: list[bytes] = []
        deadline = Deadline(seconds)
        while self._listener is not None and len(reports) < count:
            left_s = deadline.left
            if left_s == 0:
                break
            self._listener.settimeout(left_s)
            # OSError: no rank connected in time, or it ended before its report arrived.
            with suppress(OSError):
                connection, _ = self._listener.accept()
                if _user_at_other_end(connection) != os.geteuid():
                    connection.close()  # a process of another user
                    continue
                connection.settimeout(left_s)
                report = connection.recv(_MOST_MESSAGE_BYTES)
                connection.sendall(_ACKNOWLEDGED)
                self._connections.append(connection)
                reports.append(report)
        self._stop_listening()
        return reports

    def send_to_all(self, message: bytes, document: bytes = b"") -> None:
        """Send a message and a document to all acknowledged ranks, and close the connections to them."""
        self._stop_listening()
        descriptor = os.memfd_create("holmes-verdict")
        with open(descriptor, "wb", buffering=0) as file:
            file.write(document)
            for connection in self._connections:
                with connection, suppress(OSError):  # the rank has ended
                    socket.send_fds(connection, [message], [descriptor])
        self._connections.clear()

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def report_to_leader(socket_name: str, report: bytes, patience_s: float) -> socket.socket | None:
    """Send this rank's report (its flags, versions and node) to local rank 0 of its node, the leader.

    Args:
        socket_name: Name of the leader's abstract Unix socket.
        report: This rank's report.
        patience_s: Seconds to wait for a leader that does not listen yet.

    Returns:
        The connection to the leader. It has acknowledged the report and will send rank 0's decision on it.
        None if no leader accepts the report: then this rank must report for itself.
    """
    deadline = Deadline(patience_s)
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(2 * HEARD_SECONDS)  # the leader accepts reports for HEARD_SECONDS
        may_listen_later = False
        try:
            connection.connect(socket_name)
            if _user_at_other_end(connection) == os.geteuid():  # no other user's process
                connection.sendall(report)
                if connection.recv(len(_ACKNOWLEDGED)) == _ACKNOWLEDGED:
                    return connection
        except ConnectionRefusedError:  # nothing listens on this socket
            may_listen_later = True
        except OSError:  # the leader takes no more reports, or hangs
            pass
        connection.close()
        if not may_listen_later or deadline.passed:
            return None
        time.sleep(_RETRY_S)


class LeaderMessage(NamedTuple):
    """Rank 0's decision on the job's start, as a node's local rank 0 (its leader) passes it on."""

    text: bytes  # _GOOD and the prefix of the start's keys, or _BAD and an error; empty: none came
    document: bytes = b""  # the verdict's document


def receive_from_leader(connection: socket.socket, seconds: float) -> LeaderMessage:
    """Receive rank 0's decision on the job's start from local rank 0 of this node, the leader.

    The message has a text, and a document such as the plan: an open file, sent as its descriptor.
    Both are empty if the leader ends or sends nothing within `seconds`.
    """
    with connection:
        connection.settimeout(max(_LEAST_WAIT_S, seconds))
        try:
            text, descriptors, _, _ = socket.recv_fds(connection, _MOST_MESSAGE_BYTES, maxfds=1)
        except OSError:
            return LeaderMessage(b"")
    document = b""
    for descriptor in descriptors:
        # All ranks share the file's position, so pread() names the offset.
        document = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        os.close(descriptor)
    return LeaderMessage(text, document)


def _user_at_other_end(connection: socket.socket) -> int:
    """Return the user id of the process at the other end of a Unix socket."""
    ucred = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    _, user, _ = _PEER_CREDENTIALS.unpack(ucred)
    return int(user)


def _verdict_from_leader(
    process: Process, connection: socket.socket, deadline: Deadline
) -> Verdict:
    """Receive rank 0's decision from local rank 0 of this node, the leader: it reported for this rank.

    Raises:
        HolmesError: No decision came before the deadline, or the leader has ended.
        RemoteError: Rank 0 has decided that the job ends. Rank 0 prints the error.
    """
    message = receive_from_leader(connection, deadline.left)
    if not message.text:
        leader = f"rank {process.rank - process.local_rank}"
        raise HolmesError(
            f"the launcher's rank {process.rank} got no verdict from {leader} of its node; is it alive?"
        )
    if message.text.startswith(_BAD):
        raise RemoteError(message.text.removeprefix(_BAD).decode())
    # Otherwise the text is _GOOD and the prefix of this start's keys; the plan comes as a document beside it.
    key_prefix = message.text.removeprefix(_GOOD).decode()
    return Verdict(key_prefix=key_prefix, packed=message.document)


def _exchange_through_store(
    store: Any, process: Process, reports: list[bytes], decide: Decide, deadline: Deadline
) -> Verdict:
    """Send reports of this node's ranks through the job's store, and return rank 0's decision, the verdict.

    Args:
        store: The job's key-value store.
        process: This rank.
        reports: This rank's report first, then those of other ranks of the node, if this rank reports for
            them.
        decide: Makes the decision, a JSON document such as the plan, from all reports. Only rank 0 calls it.
        deadline: Ends all waiting.

    Raises:
        HolmesError: Rank 0 found missing or contradictory reports; another rank got no verdict in time.
        RemoteError: On other ranks: rank 0 has decided that the job ends.
    """
    stored: _StoredVerdict | None = None
    try:
        if process.rank == 0:  # it makes the verdict; all other ranks wait for it
            return _decide_verdict(store, process, reports, decide, deadline)
        stored = _await_verdict(store, process, reports, deadline)
    except RuntimeError:  # the store is lost, e.g. with its host (torch.distributed.DistError)
        pass
    if stored is None:
        node = json.loads(reports[0]).get("node", "?")
        raise HolmesError(
            f"the launcher's rank {process.rank} on {node} got no verdict from its rank 0 at"
            f" {process.master_addr}:{process.master_port}; was it started with --holmes, and is it alive?"
        )
    if stored.value.startswith(_BAD):  # an error; otherwise _GOOD and a compressed document
        raise RemoteError(stored.value.removeprefix(_BAD).decode())
    return Verdict(stored.key_prefix, stored.value.removeprefix(_GOOD))


def _decide_verdict(
    store: Any, process: Process, reports: list[bytes], decide: Decide, deadline: Deadline
) -> Verdict:
    """Collect all ranks' reports, decide how the job starts, and store the decision for all ranks.

    Only rank 0 calls this function. It begins a new round: the number of this start of the job.

    Args:
        reports: Reports that this rank sends itself: its own, and those of other ranks of its node.
        decide: Makes the verdict, a JSON document such as the plan, from the reports of all ranks.

    Raises:
        HolmesError: Reports are missing or contradictory, or `decide` failed. All ranks get it.
    """
    round_number = store.add(_ROUND_KEY, 1)
    prefix = f"holmes/{round_number}"
    if round_number > 1:
        # Rank 0 may have ended before it stored the verdict of the previous round. Ranks that still
        # wait for it get _OVER if its key is empty. They then take part in this round.
        previous = f"holmes/{round_number - 1}"
        store.set(f"{previous}/over", b"1")
        store.compare_set(f"{previous}/verdict", "", _OVER)
    try:
        append_entry(store, f"{prefix}/reports", _pack(reports), len(reports), process.world_size)
        all_reports = _collect_reports(store, prefix, process, deadline)
        document = _make_document(all_reports, decide)  # checks the reports
    except HolmesError as error:
        store.set(f"{prefix}/verdict", _BAD + str(error).encode())
        raise
    packed = zlib.compress(json.dumps(document, separators=(",", ":")).encode(), level=1)
    store.set(f"{prefix}/verdict", _GOOD + packed)
    return Verdict(prefix, packed)


def _await_verdict(
    store: Any, process: Process, reports: list[bytes], deadline: Deadline
) -> _StoredVerdict | None:
    """Send reports to rank 0 through the job's store, and wait for rank 0's decision on the start.

    All ranks but rank 0 call this function once in each start of the job (round). A decision begins
    with _BAD if it is an error. _OVER: none was made. The decision of an earlier round is ignored.

    Args:
        reports: This rank's report, and those of other ranks of its node, if it reports for them.

    Returns:
        The decision; None if there is none before the deadline.
    """
    while True:
        left_s = deadline.left
        if left_s == 0:
            return None
        round_number = wait_for_value(store, _ROUND_KEY, left_s)
        if not round_number:
            return None
        prefix = f"holmes/{int(round_number)}"
        verdict_key = f"{prefix}/verdict"
        # A decision without this rank's report: of an earlier start, or rank 0 gave up waiting.
        if store.check([verdict_key]):
            patience_s = min(left_s, _LEFTOVER_SECONDS)  # for a next round to begin
            if wait_for_value(store, f"{prefix}/over", patience_s):  # the next round has begun
                continue
            value = store.get(verdict_key)
            if value.startswith(_BAD):  # an error: rank 0 gave up waiting for this rank
                return _StoredVerdict(prefix, value)
            continue  # a plan needs this rank's report, so this plan is of an earlier start: wait on
        append_entry(store, f"{prefix}/reports", _pack(reports), len(reports), process.world_size)
        value = wait_for_value(store, verdict_key, left_s)
        if not value:
            return None
        # _OVER: rank 0 ended without a verdict, and was started again. Then report again.
        if value != _OVER:
            return _StoredVerdict(prefix, value)


def _pack(reports: list[bytes]) -> bytes:
    """Compress reports (JSON objects) into a single message: a compressed JSON list."""
    return zlib.compress(b"[" + b",".join(reports) + b"]", 1)


def _collect_reports(
    store: Any, prefix: str, process: Process, deadline: Deadline
) -> list[dict[str, Any]]:
    """Wait for the reports of all ranks, and return them in rank order.

    Raises:
        HolmesError: A rank did not report before the deadline, or two processes have the same rank.
    """
    world = process.world_size
    reports: dict[int, dict[str, Any]] = {}  # rank -> its report
    # An entry has the reports of one or more ranks of a node, compressed.
    for entry in collect_entries(store, f"{prefix}/reports", deadline.left):
        for report in json.loads(zlib.decompress(entry)):
            rank = report["rank"]
            if rank in reports:
                nodes = f"on {reports[rank]['node']} and {report['node']}"
                raise HolmesError(f"rank {rank} reported twice, {nodes}: how were they started?")
            reports[rank] = report
    missing = [rank for rank in range(world) if rank not in reports]
    if missing:
        raise HolmesError(
            f"{len(missing)} of {world} ranks did not report within {deadline.seconds:g} s: rank "
            f"{some_of(missing)} (launcher's ranks); were they started, with --holmes, and can "
            f"they reach {process.master_addr}:{process.master_port}?"
        )
    return [reports[rank] for rank in range(world)]


def _make_document(reports: list[dict[str, Any]], decide: Decide) -> dict[str, Any]:
    """Return the JSON document for all ranks, such as the plan, that `decide` makes of all ranks' reports.

    Raises:
        HolmesError: A rank has reported an error, or the reports contradict each other.
    """
    for report in reports:
        if "error" in report:
            reporter = f"the launcher's rank {report['rank']} on {report['node']}"
            raise HolmesError(f"{reporter}: {report['error']}")
    _check_agreement(reports)
    return decide(reports, _nodes(reports))


def _check_agreement(reports: list[dict[str, Any]]) -> None:
    """Raise HolmesError if flags, files or versions of a rank differ from those of rank 0."""
    first = reports[0]
    for report in reports[1:]:
        for key in sorted({*first["agreed"], *report["agreed"]}):
            first_value = first["agreed"].get(key)
            value = report["agreed"].get(key)
            if value != first_value:
                raise HolmesError(
                    f"the launcher's ranks disagree on {key}: rank 0 on {first['node']} has {first_value!r}, "
                    f"rank {report['rank']} on {report['node']} has {value!r}; start all with the same"
                )


def _nodes(reports: list[dict[str, Any]]) -> list[NodeReport]:
    """Group the reports of all ranks by node: NICs and number of processes, in the order of lowest ranks.

    Raises:
        HolmesError: The local ranks of a node are not 0, 1, 2 and so on.
    """
    members_of: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)  # node -> reports
    for report in reports:
        # The identity (boot id and network namespace) tells two nodes of the same name apart.
        members_of[report["node"], report["identity"]].append(report)
    nodes = []
    for members in members_of.values():
        name = members[0]["node"]
        count = len(members)
        local_ranks = sorted(member["local_rank"] for member in members)
        if local_ranks != list(range(count)):
            problem = f"its {counted(count, 'process', 'have')} local ranks {local_ranks}"
            raise HolmesError(f"node {name!r}: {problem}, not 0 to {count - 1}")
        leader = next(member for member in members if member["local_rank"] == 0)
        nodes.append(NodeReport.from_dict(leader["nics_of_node"], count))
    return nodes
