"""Finds the hosts that the deepspeed launcher starts processes on: its hostfile and its filters.

The rules are those of deepspeed/launcher/runner.py (fetch_hostfile, parse_inclusion_exclusion,
apply_num_nodes_and_gpus), which are stricter than mpirun's: each line is "HOST slots=N".
"""

from __future__ import annotations

import re

from holmes_ext.document import read_text
from holmes_ext.errors import HolmesError

_LINE = re.compile(r"(\S+)\s+slots=(\d+).*")


class ResourceError(HolmesError):
    """The deepspeed launcher would refuse the hostfile or a filter."""


def active_hosts(
    path: str, include: str, exclude: str, node_limit: int, processes: int
) -> dict[str, int]:
    """Return the hosts that deepspeed uses, each with its number of processes.

    Args:
        path: Path of the hostfile.
        include: Value of --include: "a@b:0,2" for all slots of a and two of b; "" for all.
        exclude: Value of --exclude, in the same form.
        node_limit: Value of --num_nodes: the first hosts only; 0 for all.
        processes: Value of --num_gpus: processes on each host; 0 for one in each slot.

    Raises:
        HolmesError: The hostfile cannot be read.
        ResourceError: deepspeed would refuse the hostfile or a filter.
    """
    slots = _read_slots(path)
    if include and exclude:
        raise ResourceError("--include and --exclude exclude each other")
    if (node_limit or processes) and (include or exclude):
        raise ResourceError("--num_nodes and --num_gpus cannot be used with --include or --exclude")
    chosen = {host: set(range(count)) for host, count in slots.items()}
    filtered = _read_filter(include or exclude, slots, path)
    if include:
        chosen = {host: filtered[host] for host in slots if host in filtered}
    else:
        chosen = {host: numbers - filtered.get(host, set()) for host, numbers in chosen.items()}
    hosts = {host: len(numbers) for host, numbers in chosen.items() if numbers}
    if node_limit:
        hosts = dict(list(hosts.items())[:node_limit])
    if processes:
        hosts = dict.fromkeys(hosts, processes)
    if not hosts:
        raise ResourceError(f"--exclude {exclude} leaves no host of {path}")
    return hosts


def _read_slots(path: str) -> dict[str, int]:
    """Return the hosts of a hostfile with their slots; raise ResourceError as deepspeed would."""
    slots: dict[str, int] = {}
    for number, text in enumerate(read_text(path, "name a hostfile").splitlines(), start=1):
        line = text.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise ResourceError(f"{path}: line {number}: {line!r:.80} is not like `gpu01 slots=8`")
        if match[1] in slots:
            raise ResourceError(f"{path}: line {number}: host {match[1]!r} is named twice")
        slots[match[1]] = int(match[2])
    if not slots:
        raise ResourceError(f"{path}: no host is named; lines are like `gpu01 slots=8`")
    return slots


def _read_filter(text: str, slots: dict[str, int], path: str) -> dict[str, set[int]]:
    """Return the slots that a filter names: host -> numbers of its slots.

    Args:
        text: Value of --include or --exclude, "" if there is none.
        slots: Host -> its slots in the hostfile.
        path: Path of the hostfile, for messages.

    Raises:
        ResourceError: The hostfile does not have a host or a slot of the filter.
    """
    named: dict[str, set[int]] = {}
    for item in filter(None, text.split("@")):
        host, colon, numbers_text = item.partition(":")
        if host not in slots:
            raise ResourceError(f"host {host!r} of the filter {text!r:.80} is not in {path}")
        numbers = set(range(slots[host]))
        if colon:
            words = numbers_text.split(",")
            wrong = [word for word in words if not word.isdecimal() or int(word) not in numbers]
            if wrong:
                raise ResourceError(
                    f"slot {wrong[0]!r} of the filter {text!r:.80} is not one of the {slots[host]} slots "
                    f"of {host}"
                )
            numbers = {int(word) for word in words}
        named.setdefault(host, set()).update(numbers)
    return named
