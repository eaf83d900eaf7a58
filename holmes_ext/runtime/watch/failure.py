"""What a failed communication means: which rank, bucket, fabric, lost node, and which NIC is to blame.

When a rank dies its neighbours in the ring see the connection close; then they end, and theirs see that. Only
the first sight is of use, so it is left in the job's store, and whoever comes later repeats it. The NIC is
found by asking the kernel (nics.py): this node's links and error counters, and whether the neighbours still
answer. All of it is over in seconds, whatever is broken.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from holmes_ext.errors import HolmesError
from holmes_ext.runtime import session
from holmes_ext.runtime.backend import backend_of
from holmes_ext.runtime.deadline import within
from holmes_ext.runtime.watch import nics
from holmes_ext.runtime.watch.nccl_errors import nccl_failures
from holmes_ext.words import some_of

if TYPE_CHECKING:
    from holmes_ext.cluster.fabric import Fabric

_KEY = "first_failure"
#: Beginning of a message about bad input, in the job's store. The message alone is enough for the user.
INPUT = "holmes: "
_STORE_S = 5.0  # seconds to wait for the job's store; its host may be the node that was lost
#: What an error of a collective says, whoever raised it (gloo, NCCL, torch's store).
_OF_COMMUNICATION = re.compile(
    r"gloo|NCCL|Connection (closed|reset|refused)|Timed out waiting|timed out|Broken pipe|Socket(Timeout| )"
    r"|[Nn]o route to host|unreachable|ProcessGroup"
)
#: How torch.save ends when nothing more can be written (the second while it closes the file after the first);
#: it drops the kernel's reason.
_WRITE_FAILED = re.compile(r"PytorchStreamWriter failed writing file|inline_container.* unexpected pos")
_ADDRESS = re.compile(r"\[?([0-9]+(?:\.[0-9]+){3}|[0-9a-fA-F]*(?::[0-9a-fA-F]*){2,})\]?:[0-9]+")


def describe_failure(what: str, ranks: Sequence[int], fabric: Fabric | None, error: str) -> str:
    """Return a one-line message about a failed reduction of gradients.

    The message names:
        - this rank and its node
        - the gradients, the network and the ranks of the group
        - the node that was lost, if `error` contains its address
        - the error of the transport

    If another rank has ended before because of bad input, the message of that rank is returned instead,
    since it is the cause of this failure.

    Args:
        what: The gradients that were reduced, e.g. "bucket 0 of 8".
        ranks: The members of the process group.
        fabric: The network of the group, or None if holmes has not planned one for it.
        error: The message of the transport (gloo or NCCL).
    """
    import torch.distributed as dist

    current = session.active()  # the state of holmes in this process, or None
    reporter = me(current) if current else f"rank {dist.get_rank()}"
    where = f"fabric {fabric.name}" if fabric else f"backend {backend_of()}"
    lost_node = _lost_node(error, ranks)  # "" if `error` contains no address of a node
    failure = (f"the reduction of {what} failed over {where} in the group of ranks {some_of(ranks)}"
               f"{lost_node}: {_last_line(error)}")
    # _bad_input_or() returns this failure, or the bad input that another rank has reported before.
    # Such a message begins with INPUT ("holmes: "). It is removed: the caller's exception is printed with it.
    return _bad_input_or(reporter, failure).removeprefix(INPUT)


def explain(error: BaseException) -> str | None:
    """Return a one-line message about an error of a framework if communication or a full disk caused it.

    For any other error None is returned: Python prints the error itself. It is also put into the job's store,
    so that other ranks, which only see this rank end, can print the cause.

    The message begins with INPUT if another rank has ended before because of bad input.
    """
    import torch.distributed as dist

    current, text = session.active(), str(error)
    if current is None:
        return None
    is_of_communication = isinstance(error, RuntimeError) and _OF_COMMUNICATION.search(text)
    if is_of_communication or isinstance(error, dist.DistError):
        return broken("communication", text)
    mine = f"{me(current)}: {type(error).__name__}: {_last_line(text)}"
    _first(mine)  # puts the message into the job's store, for ranks that see a failure later
    # ENOSPC: no space is left. EDQUOT: the user's quota is used up.
    is_disk_full = isinstance(error, OSError) and error.errno in (
        errno.ENOSPC, errno.EDQUOT) or _WRITE_FAILED.search(text)
    return f"{mine}; is the disk full?" if is_disk_full else None


def broken(what: str, error: str) -> str:
    """Return a one-line message that `what` failed: who saw it, the lost node, and the transport's error.

    If another rank has ended before because of bad input, the message of that rank is returned instead. It
    begins with INPUT.

    Args:
        what: What failed, e.g. "communication".
        error: The message of the transport (gloo or NCCL).
    """
    current = session.active()
    assert current is not None
    lost_node = _lost_node(error, range(current.plan.world_size))  # "" if the error names no node's address
    return _bad_input_or(me(current), f"{what} failed{lost_node}: {_last_line(error)}")


def describe_nccl_failure() -> str | None:
    """Return a one-line message if NCCL has failed in a process group of this rank, else None.

    The message names NCCL's error and the other members of the group, one of which may be lost. torch aborts
    the process after a failure of NCCL, without a Python exception, so no traceback names the group.
    """
    current = session.active()  # the state of holmes in this process
    failures = nccl_failures()
    if current is None or not failures:
        return None
    # A lost rank may make several groups fail. The smallest one has the fewest candidates for it.
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
    # _bad_input_or() returns `text`, or the message of a rank that has ended before because of bad input.
    # Such a message begins with INPUT ("holmes: "). The caller adds this prefix, so it is removed here.
    return _bad_input_or(me(current), text).removeprefix(INPUT)


def me(current: session.Session) -> str:
    """Return this rank and its node in words, for messages about it."""
    return f"rank {current.rank} on node {current.node.name}"


def _bad_input_or(reporter: str, failure: str) -> str:
    """Return the message of a rank that has ended before because of bad input; else one about `failure`.

    The first message that a rank of the job has put into the store is the cause of all later failures.

    Args:
        reporter: This rank and its node, in words.
        failure: What failed, in words.
    """
    mine = f"{reporter}: {failure}{_blamed()}"  # with what the kernel says of NICs
    first = _first(mine)
    return f"{first} ({reporter} ends with it)" if first.startswith(INPUT) else _both(mine, first)


def note(mine: str) -> None:
    """Put a message about bad input, with which this rank ends, into the job's store for the other ranks."""
    _first(INPUT + mine)


def with_first(mine: str) -> str:
    """Return the message `mine`, with the message of the first rank that saw a failure, if it differs."""
    return _both(mine, _first(mine))


def _both(mine: str, first: str) -> str:
    return mine if first == mine else f"{mine}; first seen as: {first}"


def _blamed() -> str:
    """Return what the kernel says of NICs that may have caused the failure, e.g. "; NIC roce0 of node b1".

    These are the links and error counters of this node's NICs. If they have no problem, neighbours that do
    not answer are named. "" is returned if nothing is known.
    """
    current = session.active()
    if current is None or not current.groups:
        return ""
    ports = nics.in_use(current)
    # The error counters of the NICs, and for each NIC its problem in words ("" if it has none).
    counters_now, problems = nics.counters(ports), {port: nics.trouble(port) for port in ports}
    findings = []
    for port, problem in problems.items():
        grown_counters = nics.grown(counters_now, port)  # in words: errors since the job's start
        if problem or grown_counters:
            since_start = f" ({grown_counters} since the start)" if grown_counters else ""
            findings.append(f"{nics.say(current.node, port)} {problem or 'has a link'}{since_start}")
    if not any(problems.values()):  # this node's NICs work: the cause is elsewhere
        findings += nics.unreachable(current)
    return "".join(f"; {text}" for text in findings)


def _lost_node(error: str, ranks: Sequence[int]) -> str:
    """Return which node was lost, in words, e.g. "; node b1 (rank 3) is lost at its roce0".

    "" is returned if the error contains no address of a node.

    Args:
        error: The message of the transport (gloo or NCCL). It may contain "ADDRESS:PORT" of the lost peer.
        ranks: The ranks that may be lost.
    """
    current, match = session.active(), _ADDRESS.search(error)
    if current is None or match is None:
        return ""
    for node in current.site.nodes:
        # match[1] is the address in the message. A NIC's address has a prefix length: "10.0.0.1/24".
        nic = next((port for port in node.ports if port.address.partition("/")[0] == match[1]), None)
        if nic is not None:
            node_ranks = [rank for rank in ranks if current.plan.node_of(rank) == node.name]
            words = some_of(node_ranks, separator=" or ")
            return f"; node {node.name} (rank {words}) is lost at its {nic.name}"
    return ""


def _last_line(error: str) -> str:
    """Return the first line of an error that is not empty, without the advice that gloo adds."""
    line = next((line.strip() for line in error.splitlines() if line.strip()), "no message")
    return line.partition(". This is typically caused")[0]  # gloo's advice


def _first(mine: str) -> str:
    """Return the message of the first rank of the job that saw a failure.

    If this rank is the first, or the job's store does not answer, `mine` is returned.

    Args:
        mine: The message of this rank. It is put into the store if no rank has put one there before.
    """
    import torch.distributed as dist

    def first_message() -> str:
        """Put `mine` into the store if there is no message yet, and return the store's message."""
        current, store = session.active(), dist.distributed_c10d._get_default_store()
        key = f"{current.round if current else 'holmes'}/{_KEY}"  # `round` differs for each start of the job
        return store.compare_set(key, "", mine).decode()

    try:
        # within() raises HolmesError with this text if the function has not returned after _STORE_S seconds.
        return str(within(_STORE_S, "the store does not answer", first_message))
    except (HolmesError, RuntimeError, ValueError):  # the store is lost, or there was none
        return mine
