"""A hostfile of mpirun, deepspeed or pdsh: hosts and, where it says so, slots.

    gpu01 slots=8              Open MPI, deepspeed            gpu01:8       MPICH, Intel MPI
    gpu02 slots=8 max_slots=8                                 gpu01         a slot for each time it is named

It knows nothing of NICs, so hosts are told apart by their names up to the last number, and by their slots.
"""

from __future__ import annotations

import re

from holmes_ext.cluster.sources.found import FoundNode
from holmes_ext.document import read_text
from holmes_ext.errors import HolmesError

_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_NUMBERED = re.compile(r"(.*?)[-_.]?\d+\D*")


def read_hostfile(path: str) -> list[FoundNode]:
    """HolmesError names the line."""
    slots: dict[str, int] = {}
    for number, line in enumerate(read_text(path, "name a hostfile").splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        host, colon, count = words[0].partition(":")
        said = {key: value for key, _, value in (word.partition("=") for word in words[1:])}
        if not _HOST.fullmatch(host):
            raise HolmesError(
                f"{path}: line {number}: {words[0]!r:.80} is not a host; lines are like `gpu01 slots=8`"
            )
        stated = count if colon else said.get("slots", "")
        if stated and not (stated.isdecimal() and 0 < int(stated) <= 1024):
            raise HolmesError(f"{path}: line {number}: {stated!r:.20} slots; it must be 1 to 1024")
        if stated and host in slots:
            raise HolmesError(f"{path}: line {number}: host {host!r} is named twice")
        slots[host] = int(stated) if stated else slots.get(host, 0) + 1
    if not slots:
        raise HolmesError(f"{path}: no host is named; lines are like `gpu01 slots=8`")
    return [
        FoundNode(host, count, fabric=_family(host), group=(_family(host),))
        for host, count in slots.items()
    ]


def _family(host: str) -> str:
    """ "gpu" of gpu01, "rack1-ib" of rack1-ib-7.site.org."""
    match = _NUMBERED.fullmatch(host.partition(".")[0])
    return match[1] if match and match[1] else host.partition(".")[0]
