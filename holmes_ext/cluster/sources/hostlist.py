"""Lists of hosts, as Slurm and cluster.toml write them: "gpu[003-005,012],login1", "rack[0-1]node[00-15]".

Brackets hold numbers and ranges. A number keeps the zeros in front of it. The last bracket counts fastest.
Slurm's manual of scontrol has the format under `show hostnames`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import product
from math import prod

from holmes_ext.errors import HolmesError

#: Hosts that one list may name.
MAX_NODES = 100_000
_ITEM = re.compile(r"(?:[^,\[\]\s]|\[[^\[\]]*\])+")
_PART = re.compile(r"\[([^\]]*)\]")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_NUMBERED = re.compile(r"(.*?)([0-9]+)([^0-9]*)")


def expand(text: str, where: str) -> list[str]:
    """Return the names of the hosts in a list, in the order of the list.

    Args:
        where: The file and key, option or variable that has the list, for the error message.

    Raises:
        HolmesError: `text` is not a list of hosts, or names more than MAX_NODES.
    """
    text = text.strip()
    items = _ITEM.findall(text)
    if ",".join(items) != text:
        raise HolmesError(f"{where}: {text!r:.80} is not a list of hosts such as gpu[01-04],x1")
    result: list[str] = []
    for item in items:
        pieces = _PART.split(item)  # text, inside of brackets, text, ...
        choices = [
            list(_numbers(piece, text, where)) if place % 2 else [piece]
            for place, piece in enumerate(pieces)
        ]
        if len(result) + prod(map(len, choices)) > MAX_NODES:
            raise HolmesError(f"{where}: {text!r:.80} names more than {MAX_NODES} hosts")
        result += map("".join, product(*choices))
    return result


def _numbers(inside: str, text: str, where: str) -> Iterator[str]:
    """Return the numbers that one bracket of `text` stands for, with their leading zeros."""
    for part in inside.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise HolmesError(
                f"{where}: [{inside:.40}] in {text!r:.80} is not numbers such as [01-04,7]"
            )
        first = int(match[1])
        last = int(match[2] or match[1])
        if last < first:
            raise HolmesError(f"{where}: range {part} in {text!r:.80} runs backwards")
        if last - first >= MAX_NODES:
            raise HolmesError(
                f"{where}: range {part} in {text!r:.80} names more than {MAX_NODES} hosts"
            )
        width = len(match[1])
        yield from (f"{number:0{width}d}" for number in range(first, last + 1))


def folded(names: Iterable[str]) -> str:
    """Return the shortest list that names the hosts, such as "a[0-2,5],b1".

    Hosts whose names differ only in the last number, with as many digits, share brackets. Numbers in brackets
    are sorted; brackets are in the order of their first hosts.
    """
    return ",".join(
        _written(*key, ",".join(parts), several) for key, parts, several in _grouped(names)
    )


def runs(names: Iterable[str]) -> list[str]:
    """Return the hosts as texts of at most one range each: "a[0-2]", "a5", "b1". The order is folded()'s."""
    return [
        _written(*key, part, "-" in part) for key, parts, _ in _grouped(names) for part in parts
    ]


_Key = tuple[str, str]


def _grouped(names: Iterable[str]) -> Iterator[tuple[_Key, list[str], bool]]:
    """((prefix, suffix), numbers and ranges, whether they are several hosts)."""
    groups: dict[tuple[str, str, int], list[int]] = {}
    for name in dict.fromkeys(names):
        match = _NUMBERED.fullmatch(name)
        prefix, digits, suffix = match.groups() if match else (name, "", "")
        groups.setdefault((prefix, suffix, len(digits)), []).append(int(digits or 0))
    for (prefix, suffix, width), numbers in groups.items():
        parts: list[list[int]] = []
        for number in sorted(numbers):
            if parts and number == parts[-1][-1] + 1:
                parts[-1].append(number)
            else:
                parts.append([number])
        shown = [
            "-".join(f"{end:0{width}d}" for end in dict.fromkeys((part[0], part[-1])))
            if width
            else ""
            for part in parts
        ]
        yield (prefix, suffix), shown, len(numbers) > 1


def _written(prefix: str, suffix: str, numbers: str, several: bool) -> str:
    return f"{prefix}[{numbers}]{suffix}" if several else f"{prefix}{numbers}{suffix}"
