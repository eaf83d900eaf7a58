"""Explains failures of communication in one line, and watches this node's NICs and NCCL communicators.

The message names the rank, the bucket of gradients, the network and the lost node, and the NICs that may
be the cause.

    1. A rank dies. Its neighbours in the ring see their connections close, and end.
    2. The neighbours of these ranks see the same, and so on. Only the first failure helps the user.
    3. So each rank puts its message into the job's key-value store, unless it has a message already. Every
    later rank prints the first message, too.
    4. The cause is looked for in the kernel (nics.py): links and error counters of this node's NICs, and
       connections to the neighbours.

Each step has a timeout, so the message is printed within seconds.

NicWatch polls this node's NICs and the NCCL communicators of this rank once a second.

NICs: A collective over a NIC without a link hangs for a long time. TCP retries for a quarter of an hour, and
the default timeout of a process group is half an hour. So holmes polls the NICs that the job uses:

    a NIC fails             A warning is printed.
    the NIC recovers        A second message is printed, and the job goes on.
    the NIC stays failed    After --holmes-link-timeout seconds (20 by default) the process exits with status
                            2, if a process group of this rank uses the NIC's network. The launcher may then
                            start the job again: torchrun --max-restarts does, without that NIC.

A NIC that has already failed at the first poll is ignored.

NCCL: When NCCL fails, torch aborts the process. A message that names the failed process group is printed
before that. nccl_errors.py detects the failures.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from holmes_ext.errors import HolmesError
from holmes_ext.runtime import session
from holmes_ext.runtime.backend import backend_of
from holmes_ext.runtime.deadline import within
from holmes_ext.runtime.watch import nccl_errors, nics
from holmes_ext.runtime.watch import nccl_errors as flight_recorder
from holmes_ext.runtime.watch.nccl_errors import nccl_failures
from holmes_ext.words import some_of

if TYPE_CHECKING:
    from holmes_ext.cluster.fabric import Fabric
    from holmes_ext.cluster.site import Port

_KEY = "first_failure"
#: Beginning of a message about bad input, in the job's store. The message alone is enough for the user.
INPUT = "holmes: "
_STORE_S = 5.0  # seconds to wait for the job's store; its host may be the node that was lost
#: Words in errors of collectives, from gloo, NCCL or torch's store.
_OF_COMMUNICATION = re.compile(
    r"gloo|NCCL|Connection (closed|reset|refused)|Timed out waiting|timed out|Broken pipe|Socket(Timeout| )"
    r"|[Nn]o route to host|unreachable|ProcessGroup"
)
#: How torch.save ends when nothing more can be written (the second while it closes the file after the first);
#: it drops the kernel's reason.
_WRITE_FAILED = re.compile(
    r"PytorchStreamWriter failed writing file|inline_container.* unexpected pos"
)
_ADDRESS = re.compile(r"\[?([0-9]+(?:\.[0-9]+){3}|[0-9a-fA-F]*(?::[0-9a-fA-F]*){2,})\]?:[0-9]+")


def describe_failure(
    gradients: str, ranks: Sequence[int], fabric: Fabric | None, error: str
) -> str:
    """Return a message (one line) about a failed reduction of gradients.

    The message names:
        - this rank and its node
        - the gradients, the network and the ranks of the group
        - the node that was lost, if `error` contains its address
        - the error of the transport

    If another rank has ended before because of bad input, the message of that rank is returned instead,
    since it is the cause of this failure.

    Args:
        gradients: The gradients that were reduced, e.g. "bucket 0 of 8".
        ranks: The members of the process group.
        fabric: The network of the group, or None if holmes has not planned it.
        error: The message of the transport (gloo or NCCL).
    """
    import torch.distributed as dist

    current = session.active()  # the state of holmes in this process, or None
    reporter = me(current) if current else f"rank {dist.get_rank()}"
    where = f"fabric {fabric.name}" if fabric else f"backend {backend_of()}"
    lost_node = _lost_node(error, ranks)  # "" if `error` contains no address of a node
    failure = (
        f"the reduction of {gradients} failed over {where} in the group of ranks {some_of(ranks)}"
        f"{lost_node}: {_first_text_line(error)}"
    )
    # If another rank has reported bad input before, its message is returned. It begins with INPUT
    # ("holmes: "). The prefix is removed: the caller's exception is printed with it.
    return _with_first_failure(reporter, failure).removeprefix(INPUT)


def explain(error: BaseException) -> str | None:
    """Return a one-line message to print instead of the traceback of an error that ends this rank.

    For every error, this function also stores a text in the job's store, unless another rank has
    done so before. When this rank ends, the other ranks only see closed connections. They then read
    the text from the store and print it as the cause.

    Returns:
        Communication failed: a message with the probable cause. If another rank has ended before
        because of bad input of the user: that rank's message, with the prefix INPUT ("holmes: ").
        The disk is full: a message that says so.
        Any other error: None. The caller then prints the traceback.
    """
    import torch.distributed as dist

    current = session.active()
    if current is None:
        return None
    text = str(error)
    is_of_communication = isinstance(error, RuntimeError) and _OF_COMMUNICATION.search(text)
    if is_of_communication or isinstance(error, dist.DistError):
        return broken("communication", text)  # finds the probable cause; also stores its message
    mine = f"{me(current)}: {type(error).__name__}: {_first_text_line(text)}"
    _store_first_message(
        mine
    )  # for the other ranks; an earlier message in the store does not matter here

    # ENOSPC: no space is left. EDQUOT: the user's quota is used up.
    is_disk_full = (
        isinstance(error, OSError)
        and error.errno in (errno.ENOSPC, errno.EDQUOT)
        or _WRITE_FAILED.search(text)
    )
    return f"{mine}; is the disk full?" if is_disk_full else None


def broken(operation: str, error: str) -> str:
    """Return a one-line message for the user after `operation` has failed.

    It names this rank, the lost node and the error. If another rank has reported a failure before, the
    message ends with the first such report. There is an exception: if that rank ended because of bad
    input of the user (a wrong flag or file), its report is the whole message, as it is the cause. Such
    a report begins with INPUT ("holmes: ").

    Args:
        operation: The failed operation in words, e.g. "communication".
        error: The message of the transport (gloo or NCCL).
    """
    current = session.active()
    assert current is not None
    # It is "" if the error contains no address of a node.
    lost_node = _lost_node(error, range(current.plan.world_size))
    failure = f"{operation} failed{lost_node}: {_first_text_line(error)}"
    return _with_first_failure(me(current), failure)


def describe_nccl_failure() -> str | None:
    """Return a one-line message if NCCL has failed in a process group of this rank, else None.

    The message names NCCL's error and the other members of the group: any of them may be lost. torch aborts
    the process after a failure of NCCL, without a Python exception, so no traceback names the group.
    """
    current = session.active()  # the state of holmes in this process
    failures = nccl_failures()
    if current is None or not failures:
        return None

    # A lost rank may make several groups fail. The smallest group has the fewest candidates for it.
    ranks, error = min(failures, key=lambda failure: len(failure.ranks))
    others = [rank for rank in ranks if rank != current.rank]
    distinct_nodes = dict.fromkeys(current.plan.node_of(rank) for rank in others)
    nodes = some_of(list(distinct_nodes))
    one_of = "one of " if len(others) > 1 else ""
    if error == "TIMEOUT":
        cause = "the timeout has passed"
    else:
        cause = f"{one_of}node {nodes} (rank {some_of(others)}) is lost"
    text = f"communication failed; {cause}: NCCL's {error} in the group of ranks {some_of(ranks)}"

    # me() names this rank and its node. _with_first_failure() adds the job's first failure, as some
    # rank has stored it, as the probable cause. If that failure was bad input of the user, it
    # returns only its message, with the prefix INPUT ("holmes: "). The prefix is removed: the
    # caller adds it.
    return _with_first_failure(me(current), text).removeprefix(INPUT)


def me(current: session.Session) -> str:
    """Describe this rank and its node in words, for messages about it."""
    return f"rank {current.rank} on node {current.node.name}"


def _with_first_failure(reporter: str, failure: str) -> str:
    """Return a message about a failure on this rank, with the job's first failure, its probable cause.

    The first rank of the job that fails puts its message into the store. If it ended because of bad input
    of the user (its message begins with INPUT), only that message is returned.

    Args:
        reporter: This rank and its node, in words.
        failure: The failure, in words.
    """
    mine = f"{reporter}: {failure}{_describe_suspects()}"  # with the state of NICs
    # The message of the first rank that saw a failure; `mine` if that is this rank.
    first = _store_first_message(mine)
    if first.startswith(INPUT):  # bad input of another rank
        return f"{first} ({reporter} ends with it)"
    return _both(mine, first)


def note(mine: str) -> None:
    """Store this rank's error message about bad input (a wrong flag or file), for other ranks to print."""
    _store_first_message(INPUT + mine)


def with_first(mine: str) -> str:
    """Append the message of the first rank of the job that failed to the message `mine`, if they differ."""
    return _both(mine, _store_first_message(mine))


def _both(mine: str, first: str) -> str:
    """Join this rank's failure message and the job's first, if they differ."""
    return mine if first == mine else f"{mine}; first seen as: {first}"


def _describe_suspects() -> str:
    """Return NICs that may have caused a failure, e.g. "; NIC roce0 of node b1 has no link".

    These are the NICs of this node without a link, and those with more errors than at the start of
    the job. If all of them have a link, neighbouring nodes that do not answer are named, too. "" if
    nothing is suspect.
    """
    current = session.active()
    if current is None or not current.groups:
        return ""
    ports = nics.in_use(current)

    # The error counters of the NICs, and for each NIC its problem in words ("" if it has none).
    counters_now = nics.counters(ports)
    problems = {port: nics.trouble(port) for port in ports}
    findings = []
    for port, problem in problems.items():
        grown_counters = nics.grown(counters_now, port)  # in words: errors since the job's start
        if problem or grown_counters:
            since_start = f" ({grown_counters} since the start)" if grown_counters else ""
            findings.append(
                f"{nics.describe_port(current.node, port)} {problem or 'has a link'}{since_start}"
            )
    if not any(problems.values()):  # this node's NICs work: the cause is elsewhere
        findings += nics.unreachable(current)
    return "".join(f"; {text}" for text in findings)


def _lost_node(error: str, ranks: Sequence[int]) -> str:
    """Return the lost node in words, e.g. "; node b1 (rank 3) is lost at its roce0".

    "" is returned if the error contains no address of a node.

    Args:
        error: The message of the transport (gloo or NCCL). It may contain "ADDRESS:PORT" of the lost peer.
        ranks: The ranks that may be lost.
    """
    current = session.active()
    match = _ADDRESS.search(error)
    if current is None or match is None:
        return ""
    for node in current.site.nodes:
        # match[1] is the address in the message. A NIC's address has a prefix length: "10.0.0.1/24".
        nic = next(
            (port for port in node.ports if port.address.partition("/")[0] == match[1]), None
        )
        if nic is not None:
            node_ranks = [rank for rank in ranks if current.plan.node_of(rank) == node.name]
            words = some_of(node_ranks, separator=" or ")
            return f"; node {node.name} (rank {words}) is lost at its {nic.name}"
    return ""


def _first_text_line(error: str) -> str:
    """Return the first line of an error that is not empty, without the advice that gloo adds."""
    line = next((line.strip() for line in error.splitlines() if line.strip()), "no message")
    return line.partition(". This is typically caused")[0]  # gloo's advice


def _store_first_message(mine: str) -> str:
    """Return the message of the first rank of the job that saw a failure.

    If this rank is the first, or the job's store does not answer, `mine` is returned.

    Args:
        mine: The message of this rank. It is put into the store if the store has no message yet.
    """
    import torch.distributed as dist

    def first_message() -> str:
        """Put `mine` into the store if there is no message yet, and return the store's message."""
        current = session.active()
        store = dist.distributed_c10d._get_default_store()
        key = f"{current.key_prefix if current else 'holmes'}/{_KEY}"  # differs for each start
        return store.compare_set(key, "", mine).decode()

    try:
        # within() raises HolmesError with this text if the function has not returned after _STORE_S seconds.
        return str(within(_STORE_S, "the store does not answer", first_message))
    except (HolmesError, RuntimeError, ValueError):  # the store is lost, or there was none
        return mine


INTERVAL_S = 1.0  # seconds between two polls


class NicWatch:
    """Thread that polls this node's NICs and this rank's NCCL communicators, and reports failures."""

    def __init__(
        self,
        patience_s: float,
        trouble: Callable[[Port], str] = nics.trouble,
        end: Callable[[str], None] | None = None,
    ):
        """Create the watch over this rank's NICs and NCCL communicators; start no thread yet.

        The thread polls once a second, and reports NICs that fail or recover, and failures of NCCL.

        Args:
            patience_s: Seconds that a NIC may stay failed before the process ends. 0: for ever.
            trouble: Returns the problem of a NIC in words; "" if it works. Tests pass a stand-in.
            end: Called with a message to end the process. None: print the message and exit with status 2.
        """
        self.patience_s = patience_s
        self._trouble = trouble
        self._end = end or _end_process
        self.ended = threading.Event()  # tells the thread to end
        #: Name of a failed NIC -> time of the first poll that saw it fail.
        self._since: dict[str, float] = {}
        #: Names of NICs that had failed at the first poll. They are never reported, since they may
        #: be virtual devices. None before the first poll.
        self._ignored: set[str] | None = None
        self._has_reported_failure = False  # whether a failure of NCCL has been printed
        self._report_lock = threading.Lock()  # held while a failure of NCCL is printed

    def start(self) -> None:
        """Poll once, start the thread, and let torch's abort hooks report failures of NCCL."""
        nccl_errors.set_failure_callback(self.report_nccl_failure)
        self.poll(time.monotonic())
        threading.Thread(target=self.run, name="holmes NICs", daemon=True).start()

    def stop(self) -> None:
        """Signal the thread to end, and stop the reports of torch's abort hooks.

        This does not block. The waiting thread ends at once. If a poll is running, it is completed first.
        """
        self.ended.set()
        nccl_errors.set_failure_callback(None)

    def run(self) -> None:
        """Poll once a second until stop() is called or a failed NIC ends the job."""
        while not self.ended.wait(INTERVAL_S):
            try:
                self.poll(time.monotonic())
            except Exception as error:  # an error of this watch must not end the job
                _tell(f"NICs are not watched any more ({type(error).__name__}: {error})")
                return

    def poll(self, now: float) -> None:
        """Check this rank's NCCL communicators and the NICs that the job uses, once.

        Failures of NCCL, and NICs that fail or recover, are reported. The job ends if a NIC that this rank
        needs has failed for too long.

        Args:
            now: Time of this poll, in seconds of a monotonic clock.
        """
        current = session.active()
        if current is None:
            return
        self.report_nccl_failure()

        troubled = {}  # name of a NIC -> the NIC, and its problem in words
        for port in nics.in_use(current):
            problem = self._trouble(port)
            if problem:
                troubled[port.name] = (port, problem)
        if self._ignored is None:
            # A NIC that fails at the first poll is ignored: it may be a virtual device, or the sysfs that
            # HOLMES_SYSFS names may describe another machine.
            self._ignored = set(troubled)

        for name in [name for name in self._since if name not in troubled]:
            away = now - self._since.pop(name)
            self._tell_once(
                current, f"NIC {name} of node {current.node.name} is back after {away:.0f} s"
            )
        for name, (port, problem) in troubled.items():
            if name in self._ignored:
                continue
            fault = f"{nics.describe_port(current.node, port)} {problem}"
            if name not in self._since:  # a new problem
                self._since[name] = now
                line = fault
                if self.patience_s:
                    way_out = "unless it comes back (--holmes-link-timeout)"
                    line += f"; the job ends in {self.patience_s:g} s {way_out}"
                self._tell_once(current, line)
                continue
            away = now - self._since[name]
            is_patience_over = 0 < self.patience_s <= away  # with 0 the job is never ended
            is_needed = any(group.transport.fabric == port.fabric for group in current.groups)
            if is_patience_over and is_needed:
                self.ended.set()  # ends run()
                self._end(
                    f"{me(current)}: {fault} for {away:.0f} s, and groups of this rank need it; "
                    "the job ends here"
                )
                return

    def report_nccl_failure(self) -> None:
        """Print a message if NCCL has failed in a process group of this rank.

        A second message names the dump file of torch's flight recorder, if torch writes one. Only the first
        failure of the process is printed.

        The thread of this watch and torch's abort hooks may call this method at the same time. Each call
        returns only when both messages are printed: torch aborts the process when an abort hook returns.
        """
        with self._report_lock:
            if self._has_reported_failure:
                return
            # None if no process group has failed.
            message = describe_nccl_failure()
            if message:
                self._has_reported_failure = True
                _tell(message)
                self._print_dump_hint()

    def _print_dump_hint(self) -> None:
        """Print where torch's flight recorder dumps this rank's last operations, if torch writes a dump."""
        current = session.active()
        if current is None:
            return
        hint = flight_recorder.dump_hint(current.rank)
        if hint:
            _tell(hint)

    def _tell_once(self, current: session.Session, line: str) -> None:
        """Print a message on a single rank of this node: local rank 0."""
        if current.process.local_rank == 0:
            _tell(line)


def _tell(line: str) -> None:
    """Print a message to standard error."""
    os.write(2, f"holmes: {line}\n".encode())


def _end_process(line: str) -> None:
    """Print a message and exit with status 2, without waiting for other threads of this process.

    If another rank has reported a failure before, its message is printed, too.
    """
    _tell(with_first(line))
    sys.stdout.flush()
    os._exit(2)
