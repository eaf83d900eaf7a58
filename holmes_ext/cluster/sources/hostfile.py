"""Reader of hostfiles as mpirun, deepspeed and pdsh use them: hosts and their slots.

    gpu01 slots=8                Open MPI, deepspeed
    gpu02 slots=8 max_slots=8    Open MPI
    gpu01:8                      MPICH, Intel MPI
    gpu01                        a slot for each line with the host

A hostfile says nothing about NICs. Hosts form a cluster if they have the same number of slots and
the same name up to the last number: such hosts mostly were bought and cabled together.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from holmes_ext.cluster.sources.found import FoundNode
from holmes_ext.document import read_text
from holmes_ext.errors import HolmesError

_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_NUMBERED = re.compile(r"(.*?)[-_.]?\d+\D*")
_MOST_SLOTS = 1024


def read_hostfile(path: str) -> list[FoundNode]:
    """Return the hosts of a hostfile.

    Raises:
        HolmesError: the file cannot be read, or a line is wrong.
    """
    slots: dict[str, int] = {}  # host -> number
    for number, line in enumerate(read_text(path, "name a hostfile").splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        host, colon, count = words[0].partition(":")
        if not _HOST.fullmatch(host):
            raise HolmesError(
                f"{path}: line {number}: {words[0]!r:.80} is not a host; lines are like `gpu01 slots=8`"
            )
        stated = count if colon else _value_among(words[1:], "slots")
        if not stated:  # each line without a number is one more slot of the host
            slots[host] = slots.get(host, 0) + 1
            continue
        if not stated.isdecimal() or not 0 < int(stated) <= _MOST_SLOTS:
            raise HolmesError(
                f"{path}: line {number}: {stated!r:.20} slots; it must be 1 to {_MOST_SLOTS}"
            )
        if host in slots:
            raise HolmesError(f"{path}: line {number}: host {host!r} is named twice")
        slots[host] = int(stated)
    if not slots:
        raise HolmesError(f"{path}: no host is named; lines are like `gpu01 slots=8`")
    nodes = []
    for host, slot_count in slots.items():
        # A hostfile says nothing about networks. But hosts that were cabled together are mostly
        # numbered in one series (gpu01, gpu02, ...): its name stands for their fabric.
        series = _name_without_number(host)
        nodes.append(FoundNode(host, processes=slot_count, fabric=series, labels=(series,)))
    return nodes


def _value_among(words: Sequence[str], name: str) -> str:
    """Return the value of NAME=VALUE among the words of a line, "" if no word sets the name."""
    value = ""
    for word in words:
        key, _, text = word.partition("=")
        if key == name:
            value = text
    return value


def _name_without_number(host: str) -> str:
    """Return the name of a host up to its last number.

    "gpu01" gives "gpu", and "rack1-ib-7.site.org" gives "rack1-ib".
    """
    short_name = host.partition(".")[0]
    match = _NUMBERED.fullmatch(short_name)
    if match is None or not match[1]:
        return short_name
    return match[1]
