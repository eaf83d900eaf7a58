"""Reader and writer of host lists: "gpu[003-005,012],login1", "rack[0-1]node[00-15]".

Slurm, pdsh, hostfiles, cluster.toml and --nodelist use them. Brackets hold numbers and ranges. A
number keeps its leading zeros. With several brackets, the last bracket counts fastest. The format
is documented in Slurm's manual of scontrol, under `show hostnames`. Two additions: blanks may
follow a comma, and a range may have a step as in ClusterShell ("n[0-6/2]" is n0, n2, n4, n6).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import product
from math import prod
from typing import NamedTuple

from holmes_ext.errors import HolmesError

#: Largest number of hosts in a list.
MAX_NODES = 100_000
_ITEM = re.compile(r"(?:[^,\[\]\s]|\[[^\[\]]*\])+")
_BRACKETS = re.compile(r"\[([^\]]*)\]")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18})(?:/([1-9][0-9]{0,8}))?)?")
_NUMBERED = re.compile(r"(.*?)([0-9]+)([^0-9]*)")


def expand(text: str, where: str) -> list[str]:
    """Return the names of the hosts in a list, in the order of the list.

    Args:
        text: A host list, such as "gpu[01-04],x1".
        where: The file and key, option or variable that has the list, for the error message.

    Raises:
        HolmesError: `text` is not a list of hosts, or names more than MAX_NODES.
    """
    text = re.sub(r"\s*,\s*", ",", text.strip())
    items = _ITEM.findall(text)
    if ",".join(items) != text:
        raise HolmesError(f"{where}: {text!r:.80} is not a list of hosts such as gpu[01-04],x1")
    hosts: list[str] = []
    for item in items:
        choices: list[list[str]] = []  # for each piece of the item, its possible texts
        # The split alternates: text outside of brackets, text inside of brackets, text outside, ...
        for position, piece in enumerate(_BRACKETS.split(item)):
            is_inside = position % 2 == 1
            choices.append(list(_expand_bracket(piece, text, where)) if is_inside else [piece])
        count = prod(len(choice) for choice in choices)
        if len(hosts) + count > MAX_NODES:
            raise HolmesError(f"{where}: {text!r:.80} names more than {MAX_NODES} hosts")
        hosts += ["".join(pieces) for pieces in product(*choices)]
    return hosts


def split_items(text: str) -> list[str]:
    """Return the parts of a text between commas outside of brackets: "a[1,3]:8,b1" has two."""
    return re.split(r",(?![^\[]*\])", text)


def _expand_bracket(inside: str, text: str, where: str) -> Iterator[str]:
    """Yield the numbers that a bracket stands for, with their leading zeros.

    Args:
        inside: Content of the bracket: numbers and ranges, such as "01-04,7". A range may have a step
            after a slash: "1-9/2" means 1, 3, 5, 7 and 9.
        text: The list with the bracket, for error messages.
        where: The file and key, option or variable that has the list, for error messages.

    Raises:
        HolmesError: the content is not numbers and ranges, or a range is too long.
    """
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
        step = int(match[3] or 1)
        width = len(match[1])
        for number in range(first, last + 1, step):
            yield f"{number:0{width}d}"


def folded(names: Iterable[str]) -> str:
    """Return the shortest list that names the hosts, such as "a[0-2,5],b1".

    Hosts whose names differ only in the last number, with as many digits, share brackets. Numbers
    in brackets are sorted; brackets are in the order of their first hosts.
    """
    items = []
    for group in _group_hosts(names):
        numbers = ",".join(group.ranges)
        if group.hosts > 1:
            numbers = f"[{numbers}]"
        items.append(f"{group.prefix}{numbers}{group.suffix}")
    return ",".join(items)


def runs(names: Iterable[str]) -> list[str]:
    """Return the hosts as short texts, each one host or one range: ["a[0-2]", "a5", "b1"].

    Hosts whose names differ only in the last number form a group, sorted by the number. Groups stay
    in the order of their first hosts.
    """
    texts = []
    for group in _group_hosts(names):
        for numbers in group.ranges:
            if "-" in numbers:
                numbers = f"[{numbers}]"
            texts.append(f"{group.prefix}{numbers}{group.suffix}")
    return texts


class _HostGroup(NamedTuple):
    """Hosts whose names differ only in their last number, such as "gpu01.lan" and "gpu02.lan"."""

    prefix: str  # text before the number: "gpu"
    suffix: str  # text after the number: ".lan"
    ranges: list[str]  # their numbers: "0-2", "5"; [""] for a host without a number
    hosts: int  # how many


def _group_hosts(names: Iterable[str]) -> Iterator[_HostGroup]:
    """Yield groups of hosts whose names differ only in their last number, with as many digits."""
    # (text before the number, text after it, digits of the number) -> numbers
    groups: dict[tuple[str, str, int], list[int]] = {}
    for name in dict.fromkeys(names):
        match = _NUMBERED.fullmatch(name)
        prefix, digits, suffix = match.groups() if match else (name, "", "")
        groups.setdefault((prefix, suffix, len(digits)), []).append(int(digits or 0))
    for (prefix, suffix, width), numbers in groups.items():
        ranges = _fold_numbers(numbers, width) if width else [""]
        yield _HostGroup(prefix, suffix, ranges, hosts=len(numbers))


def _fold_numbers(numbers: Iterable[int], width: int) -> list[str]:
    """Return numbers as texts, with a range for numbers in a row: "00-02", "05".

    Args:
        numbers: Different numbers in any order.
        width: Digits of each number, filled up with zeros.
    """
    rows: list[list[int]] = []  # numbers that follow each other
    for number in sorted(numbers):
        if rows and number == rows[-1][-1] + 1:
            rows[-1].append(number)
        else:
            rows.append([number])
    texts = []
    for row in rows:
        text = f"{row[0]:0{width}d}"
        if len(row) > 1:
            text += f"-{row[-1]:0{width}d}"
        texts.append(text)
    return texts
