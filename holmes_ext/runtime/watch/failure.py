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

from holmes_ext.cluster.site import Fabric
from holmes_ext.errors import HolmesError
from holmes_ext.runtime import session
from holmes_ext.runtime.groups.backend import backend_of, nccl_errors
from holmes_ext.runtime.sockets.deadline import within
from holmes_ext.runtime.watch import nics
from holmes_ext.words import some_of

_KEY = "first_failure"
#: How a line begins that is enough for the user: bad input, not a failure of something.
INPUT = "holmes: "
_STORE_S = 5.0  # its host may be what was lost
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
    # The bad input that another rank has reported, or else this failure. INPUT ("holmes: ") marks bad input;
    # the caller's exception gets the same prefix again when it is printed.
    return _bad_input_or(reporter, failure).removeprefix(INPUT)


def explain(error: BaseException) -> str | None:
    """One line on an error of a framework's communication, or a full disk; else None, but the others will say
    what it was. It begins with INPUT where another rank refused bad input."""
    import torch.distributed as dist

    current, text = session.active(), str(error)
    if current is None:
        return None
    of_torch = isinstance(error, RuntimeError) and _OF_COMMUNICATION.search(text)
    if of_torch or isinstance(error, dist.DistError):
        return broken("communication", text)
    mine = f"{me(current)}: {type(error).__name__}: {_last_line(text)}"
    _first(mine)
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC,
                                                          errno.EDQUOT) or _WRITE_FAILED.search(text)
    return f"{mine}; is the disk full?" if full else None


def broken(what: str, error: str) -> str:
    """One line: who sees that `what` failed, what the transport says, which node that means; or, behind
    INPUT, what another rank refused."""
    current = session.active()
    assert current is not None
    lost = _lost_node(error, range(current.plan.world_size))
    return _bad_input_or(me(current), f"{what} failed{lost}: {_last_line(error)}")


def describe_nccl_failure() -> str | None:
    """Return a one-line message if NCCL has failed in a process group of this rank, else None.

    The message names the other members of the group, one of which may be lost. After a failure of NCCL,
    torch's watchdog ends the process without an exception in Python, so this message is the only one.
    """
    current = session.active()  # the state of holmes in this process
    failures = nccl_errors()  # (ranks of a group, error)
    if current is None or not failures:
        return None
    # The error of the smallest group is reported: few of its ranks can be the lost ones.
    ranks, error = min(failures, key=lambda failure: len(failure[0]))
    others = [rank for rank in ranks if rank != current.rank]
    distinct_nodes = dict.fromkeys(current.plan.node_of(rank) for rank in others)
    nodes = some_of(list(distinct_nodes))
    one_of = "one of " if len(others) > 1 else ""
    if error == "TIMEOUT":
        cause = "the timeout has passed"
    else:
        cause = f"{one_of}node {nodes} (rank {some_of(others)}) is lost"
    text = f"communication failed; {cause}: NCCL's {error} in the group of ranks {some_of(ranks)}"
    # If another rank has ended before because of bad input, its message is returned instead. INPUT
    # ("holmes: ") marks bad input; the caller adds the same prefix again.
    return _bad_input_or(me(current), text).removeprefix(INPUT)


def me(current: session.Session) -> str:
    """This process, for lines about it."""
    return f"rank {current.rank} on node {current.node.name}"


def _bad_input_or(me: str, failed: str) -> str:
    mine = f"{me}: {failed}{_blamed()}"
    first = _first(mine)
    return f"{first} ({me} ends with it)" if first.startswith(INPUT) else _both(mine, first)


def note(mine: str) -> None:
    """What this rank refuses and ends with, for those that only see it go."""
    _first(INPUT + mine)


def with_first(mine: str) -> str:
    """`mine`, and what the first rank that saw trouble said, where that was another."""
    return _both(mine, _first(mine))


def _both(mine: str, first: str) -> str:
    return mine if first == mine else f"{mine}; first seen as: {first}"


def _blamed() -> str:
    """What the kernel says of this node's NICs and its neighbours': "; NIC roce0 (mlx5_0:1) of node b1
    ..."."""
    current = session.active()
    if current is None or not current.groups:
        return ""
    ports = nics.in_use(current)
    now, problems = nics.counters(ports), {port: nics.trouble(port) for port in ports}
    findings = []
    for port, problem in problems.items():
        grew = nics.grown(now, port)
        if problem or grew:
            since = f" ({grew} since the start)" if grew else ""
            findings.append(f"{nics.say(current.node, port)} {problem or 'has a link'}{since}")
    if not any(problems.values()):
        findings += nics.unreachable(current)
    return "".join(f"; {text}" for text in findings)


def _lost_node(error: str, ranks: Sequence[int]) -> str:
    """ "; node b1 (rank 3) is lost at its roce0 (mlx5_0:1)" where the message names an address of one."""
    current, match = session.active(), _ADDRESS.search(error)
    if current is None or match is None:
        return ""
    for node in current.site.nodes:
        port = next((port for port in node.ports if port.address.partition("/")[0] == match[1]), None)
        if port is not None:
            there = [rank for rank in ranks if current.plan.node_of(rank) == node.name]
            return f"; node {node.name} (rank {some_of(there, separator=' or ')}) is lost at its {port.name}"
    return ""


def _last_line(error: str) -> str:
    line = next((line.strip() for line in error.splitlines() if line.strip()), "no message")
    return line.partition(". This is typically caused")[0]  # gloo's advice


def _first(mine: str) -> str:
    """What the first rank that saw it said; `mine` on that one, or where the store is gone."""
    import torch.distributed as dist

    def first() -> str:
        current, store = session.active(), dist.distributed_c10d._get_default_store()
        key = f"{current.round if current else 'holmes'}/{_KEY}"
        return store.compare_set(key, "", mine).decode()

    try:
        return str(within(_STORE_S, "the store does not answer", first))
    except (HolmesError, RuntimeError, ValueError):  # no store any more, or there never was one
        return mine
