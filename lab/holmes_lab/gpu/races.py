"""Missing waits that a job's emulated GPUs found with --gpu-order random (csrc/runtime/races.h)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

_FRAMES = 3  # of the Python stack that are shown
_TORCH = "/site-packages/torch/"


def missing_waits(directory: Path) -> list[str]:
    """Lines for a person, of what the ranks of the job wrote into `directory`: each missing wait once."""
    ranks_of: dict[tuple[str, ...], list[int]] = {}
    files = {int(path.stem[len("rank") :]): path for path in directory.glob("rank*.races")}
    for rank, path in sorted(files.items()):
        for line in path.read_text(errors="replace").splitlines():
            ranks_of.setdefault(tuple(_lines(json.loads(line))), []).append(rank)
    return [
        text
        for (first, *more), ranks in ranks_of.items()
        for text in (
            f"a wait is missing (rank {', '.join(map(str, sorted(set(ranks))))}): {first}",
            *more,
        )
    ]


def _lines(race: Mapping[str, Any]) -> Iterator[str]:
    first, size = race["first"], f"{race['bytes']} bytes"
    if (second := race.get("second")) is None:
        yield f"{_label(first)} reads {size} of pinned memory that the host changed after the launch"
    else:
        yield (
            f"{_label(second)} {_does(second)} {size} that {_label(first)} {_does(first)}, and neither "
            f"waits for the other"
        )
    yield from _frames(race["stack"].splitlines())


def _does(work: Mapping[str, Any]) -> str:
    return "writes" if work["writes"] else "reads"


def _label(work: Mapping[str, Any]) -> str:
    """ "kernel AllReduce of 4 Float32 (group stage link, stream 7)"."""
    group = f"group {work['group']}, " if work.get("group") else ""
    return f"{work['kind']} {work.get('what') or work['name']} ({group}stream {work['stream']})"


def _frames(stack: Iterable[str]) -> list[str]:
    """The innermost calls of the program that launched the second."""
    frames = [f"    {line.strip()}" for line in stack]
    return [line for line in frames if _TORCH not in line][:_FRAMES] or frames[:_FRAMES]
