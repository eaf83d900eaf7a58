"""Reader of hostfiles: hosts and the number of processes that each of them runs.

    gpu01 slots=8                     Open MPI, deepspeed; also slots = 8, and user@gpu01
    gpu02 slots=8 max_slots=8         Open MPI
    gpu[03-04] slots=8                ranges of hosts, as Slurm and pdsh write them
    gpu01:8                           MPICH, Intel MPI
    gpu01:8,gpu02:8                   horovodrun -H
    gpu01                             PBS, LSF: a slot for each line with the host
    gpu01 8 gpu02 8                   LSF, LSB_MCPU_HOSTS
    gpu01/0*8+gpu02/0*8               PBS, exec_host
    gpu01 8 gpu.q@gpu01 UNDEFINED     SGE, PE_HOSTFILE
    rank 0=gpu01 slot=0-3             Open MPI, rankfile: a process for each line

A hostfile says nothing about NICs. Hosts form a cluster if they have the same number of slots and
the same name up to the last number: such hosts mostly were bought and cabled together. HPE Cray
names nodes by their place (x1000c0s0b0n0: cabinet, chassis, slot, board, node); all such nodes are
on one network.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from holmes_ext.cluster.sources.found import FoundNode
from holmes_ext.cluster.sources.hostlist import expand, split_items
from holmes_ext.document import read_text
from holmes_ext.errors import HolmesError

_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_NUMBERED = re.compile(r"(.*?)[-_.]?\d+\D*")
#: Place of a node in an HPE Cray EX system: cabinet, chassis, slot, board, node.
_XNAME = re.compile(r"x\d+c\d+s\d+b\d+n\d+")
#: Name of the cluster of all nodes with such names.
_XNAME_SERIES = "x"
#: Role of a pod or node in a job, at the end of a name without its number.
_ROLE = re.compile(r"(?:^|[-_.])(?:master|launcher|head|chief|leader|worker)$", re.IGNORECASE)
_RANK = re.compile(r"rank\s+\d+\s*=\s*(\S+)(?:\s+slots?\s*=\s*\S+)?", re.IGNORECASE)
#: Line of a rankfile that names a host by its position in the job.
_RELATIVE_RANK = re.compile(r"rank\s+\d+\s*=\s*\+n(\d{1,6})\b", re.IGNORECASE)
#: Item of PBS's exec_host: "gpu01/0*8", "gpu01/0-7", "gpu01/3".
_PBS_ITEM = re.compile(r"([^/+\s]+)/(\d+)(?:\*(\d+)|-(\d+))?")
#: Keys of a line that give the number of processes.
_SLOT_KEYS = ("slots", "cpus", "cpu", "count")
#: Keys of a line that do not change how many processes a host runs.
_OTHER_KEYS = (
    "max_slots",
    "max-slots",
    "slots_max",
    "username",
    "user",
    "user_name",
    "port",
    "binding",
    "bindings",
    "ifname",
    "boards",
    "sockets",
    "num_cores",
)
#: Columns of SGE's PE_HOSTFILE: host, number, queue, processors.
_SGE_COLUMNS = 4
_MOST_SLOTS = 1024
_EXAMPLE = "lines are like `gpu01 slots=8`"


class _Entry(NamedTuple):
    """Host that a line names, with the number of processes that the line gives the host."""

    host: str
    slots: str  # the number as it is written, such as "8"; "" for none, which means one process
    #: Whether the notation lets the host occur again with a number, as PBS, LSF and SGE do. The numbers
    #: then are added: "gpu01/0*4+gpu01/4*4" gives gpu01 eight processes.
    may_repeat: bool = False


def read_hostfile(path: str) -> list[FoundNode]:
    """Return the hosts of a hostfile as nodes, for a cluster.toml.

    Raises:
        HolmesError: the file cannot be read, a line is wrong, or a host is an IP address.
    """
    nodes = []
    for host, slot_count in read_slots(path).items():
        if _is_address(host):
            raise HolmesError(
                f"{path}: {host} is an IP address, but nodes report their host names, and cluster.toml "
                "must have the same: write the name that `hostname` prints on it"
            )
        if host == "localhost":
            raise HolmesError(
                f"{path}: every node calls itself localhost: write the name that `hostname` prints"
            )
        # A hostfile says nothing about networks. But hosts that were cabled together are mostly
        # numbered in a series (gpu01, gpu02, ...): its name stands for their fabric.
        series = series_of(host)
        nodes.append(FoundNode(host, processes=slot_count, fabric=series, labels=(series,)))
    return nodes


def read_slots(path: str) -> dict[str, int]:
    """Return the hosts of a hostfile with the number of processes of each, in the file's order.

    The processes of a host that occurs several times are added. That is allowed if none of its entries
    has a number (each then means one process), or if all are in a notation of PBS, LSF or SGE.

    Raises:
        HolmesError: the file cannot be read, a line is wrong, or a host occurs again in another way.
    """
    slots: dict[str, int] = {}
    hosts_without_number: set[str] = set()  # their entries have no number of slots
    for number, line in enumerate(read_text(path, "name a hostfile").splitlines(), start=1):
        where = f"{path}: line {number}"
        for entry in _parse_line(line.partition("#")[0].strip(), where):
            count = _parse_slots(entry.slots, where)
            has_number = bool(entry.slots)
            if entry.host in slots:
                if has_number and not entry.may_repeat:
                    raise HolmesError(f"{where}: host {entry.host!r} is named twice")
                had_number = entry.host not in hosts_without_number
                if has_number != had_number:
                    raise HolmesError(
                        f"{where}: host {entry.host!r} is named with and without a number of slots"
                    )
            if not has_number:
                hosts_without_number.add(entry.host)
            slots[entry.host] = slots.get(entry.host, 0) + count
    if not slots:
        raise HolmesError(f"{path}: no host is named; {_EXAMPLE}")
    return slots


def read_rankfile(path: str, hosts: Sequence[str] = ()) -> dict[str, int]:
    """Return the hosts of a rankfile of Open MPI with the number of ranks on each, in the file's order.

    Args:
        path: Path of the file.
        hosts: Hosts of the job in their order, for lines such as "rank 0=+n1 slot=0" (this line names the
            second host). If they are not known and a line needs them, the result is {}.

    Raises:
        HolmesError: the file cannot be read, or a line is no line of a rankfile.
    """
    ranks: dict[str, int] = {}
    for number, line in enumerate(read_text(path, "name a rankfile").splitlines(), start=1):
        where = f"{path}: line {number}"
        text = line.partition("#")[0].strip()
        if not text:
            continue
        relative = _RELATIVE_RANK.match(text)
        if relative is None:
            host = _parse_rank(text, where).host
        elif not hosts:
            return {}
        elif int(relative[1]) >= len(hosts):
            raise HolmesError(
                f"{where}: +n{relative[1]} is no host: the job has {len(hosts)} hosts"
            )
        else:
            host = hosts[int(relative[1])]
        ranks[host] = ranks.get(host, 0) + 1
    return ranks


def _parse_slots(text: str, where: str) -> int:
    """Return the number of processes that a line gives, 1 if it gives none.

    Raises:
        HolmesError: the text is not a number from 1 to _MOST_SLOTS.
    """
    if not text:
        return 1
    if not text.isdecimal() or not 0 < int(text) <= _MOST_SLOTS:
        raise HolmesError(f"{where}: {text!r:.20} slots; it must be 1 to {_MOST_SLOTS}")
    return int(text)


def _parse_line(line: str, where: str) -> Iterator[_Entry]:
    """Yield the hosts of a line of a hostfile, in any notation that the docstring of this module lists.

    Args:
        line: The line without its comment.
        where: File and line, for error messages.

    Raises:
        HolmesError: the line has another form.
    """
    if not line:
        return
    if line.lower().startswith("rank ") and "=" in line:
        yield _parse_rank(line, where)
        return
    if "/" in line.split()[0]:  # only PBS writes a slash in the first word: "gpu01/0*8"
        yield from _parse_pbs(line, where)
        return
    # "slots = 8" is one setting, as "slots=8" is.
    words = re.sub(r"\s*=\s*", "=", line).split()
    if len(words) > 1 and words[1].isdecimal():
        yield from _parse_numbers(words, where)
        return
    slots = _slots_among(words[1:], where)
    for item in split_items(words[0]):
        host, colon, count = item.rpartition(":")
        # An IPv6 address, such as fe80::1, has several colons; none of them is before a number of slots.
        is_numbered = bool(colon) and ":" not in host
        text = count if is_numbered else slots
        if is_numbered and not count:
            raise HolmesError(f"{where}: {item!r:.80} has no number after the colon; {_EXAMPLE}")
        for name in _expand_host(host if is_numbered else item, where):
            yield _Entry(name, text)


def _parse_rank(line: str, where: str) -> _Entry:
    """Return the host of a line of Open MPI's rankfile, such as "rank 0=gpu01 slot=0-3".

    Such a line is about one process, so the entry has no number of slots.

    Raises:
        HolmesError: the line has another form, or names the host by its position ("+n0").
    """
    match = _RANK.fullmatch(line)
    if match is None or not (_HOST.fullmatch(match[1]) or _is_address(match[1])):
        raise HolmesError(
            f"{where}: {line!r:.80} names no host; lines of a rankfile are like `rank 0=gpu01 slot=0-3`"
        )
    return _Entry(match[1], slots="")


def _parse_pbs(line: str, where: str) -> Iterator[_Entry]:
    """Yield the hosts of PBS's exec_host, such as "gpu01/0*8+gpu02/0*8".

    After the slash is the index of a slot with a number of CPUs, a range of slots, or a single slot:
    "gpu01/0*8" and "gpu01/0-7" mean 8 processes, "gpu01/3" means 1. A host may occur several times.

    Raises:
        HolmesError: the line has another form.
    """
    for item in line.split("+"):
        match = _PBS_ITEM.fullmatch(item)
        if match is None or not _HOST.fullmatch(match[1]):
            raise HolmesError(f"{where}: {item!r:.80} is not a host; {_EXAMPLE}")
        host, first_slot, cpus, last_slot = match.groups()
        count = cpus or "1"
        if last_slot:
            count = str(int(last_slot) - int(first_slot) + 1)
        yield _Entry(host, count, may_repeat=True)


def _parse_numbers(words: Sequence[str], where: str) -> Iterator[_Entry]:
    """Yield the hosts of a line with numbers after them.

    LSF writes pairs of host and number: "gpu01 8 gpu02 8". SGE writes a host, its number, the queue, and
    processors: "gpu01 8 gpu.q@gpu01 UNDEFINED". In both, a host may occur again with more processes.

    Raises:
        HolmesError: the line is neither pairs nor a line of SGE.
    """
    numbers = words[1::2]
    if len(words) % 2 == 0 and all(number.isdecimal() for number in numbers):
        pairs = list(zip(words[::2], numbers))
    elif len(words) <= _SGE_COLUMNS:  # the queue is no number, and later columns may be missing
        pairs = [(words[0], words[1])]
    else:
        raise HolmesError(f"{where}: {' '.join(words)!r:.80} is not hosts with numbers; {_EXAMPLE}")
    for host, count in pairs:
        for name in _expand_host(host, where):
            yield _Entry(name, count, may_repeat=True)


def _slots_among(words: Sequence[str], where: str) -> str:
    """Return the number of processes among the settings of a host in a hostfile, "" if there is none.

    In "gpu01 slots=8 max_slots=8" the settings are the words after the host, and the result is "8".

    Args:
        words: The settings.
        where: File and line, for the error message.

    Raises:
        HolmesError: a word is no known setting.
    """
    slots = ""
    limit = ""
    for word in words:
        key, equals, value = word.partition("=")
        if equals and key.lower() in _SLOT_KEYS:
            if not value:
                raise HolmesError(f"{where}: {word!r:.80} has no number; {_EXAMPLE}")
            if slots:
                raise HolmesError(f"{where}: the number of slots is given twice; {_EXAMPLE}")
            slots = value
        elif equals and key.lower() in _OTHER_KEYS:
            if "slots" in key.lower():
                limit = value
        else:
            raise HolmesError(f"{where}: {word!r:.80} is not known in a hostfile; {_EXAMPLE}")
    if limit and not slots:
        raise HolmesError(f"{where}: max_slots without slots leaves the number open; {_EXAMPLE}")
    if limit.isdecimal() and slots.isdecimal() and 0 < int(limit) < int(slots):
        raise HolmesError(f"{where}: {slots} slots are more than max_slots={limit}")
    return slots


def _expand_host(text: str, where: str) -> list[str]:
    """Return the hosts that a word of a hostfile names: a single host, or those of a range.

    A user before "@" is left out: "root@gpu01" gives "gpu01".

    Raises:
        HolmesError: the word does not name a host.
    """
    name = text.rpartition("@")[2]
    hosts = [name] if _is_address(name) else expand(name, where)
    for host in hosts or [name]:
        if not _HOST.fullmatch(host) and not _is_address(host):
            raise HolmesError(f"{where}: {text!r:.80} is not a host; {_EXAMPLE}")
    return hosts


def _is_address(host: str) -> bool:
    """Return whether a text is an IP address, such as "10.21.0.11"."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def series_of(host: str) -> str:
    """Return the part of a host's name that it shares with similar hosts, which form a cluster.

    Usually that is the name without its domain and its last number:

        "gpu01", "rack1-ib-7.site.org"         "gpu", "rack1-ib"
        "job-master-0", "job-worker-1"         "job": the role of a Kubernetes pod is removed, too
        "master-0", "worker-1"                 "pods": nothing but a role
        "x1000c0s0b0n0", any HPE Cray node     "x": the numbers are the place of the node
    """
    short_name = host.partition(".")[0]
    if _XNAME.fullmatch(short_name):
        return _XNAME_SERIES
    match = _NUMBERED.fullmatch(short_name)
    if match is None or not match[1]:
        return short_name
    return _ROLE.sub("", match[1]) or "pods"
