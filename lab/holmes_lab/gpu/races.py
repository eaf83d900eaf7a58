"""Formats the missing waits that emulated GPUs found in a job with --gpu-order random.

A wait is missing if two streams access the same memory, at least one of them writes, and no event or other
synchronization orders them. csrc/runtime/races.h explains how the emulated GPUs find these.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

#: Frames of the Python stack that are shown.
_MAX_FRAMES = 3
_TORCH_FOLDER = "/site-packages/torch/"


def missing_waits(directory: Path) -> list[str]:
    """Return report lines about the data races of a job: missing waits between CUDA streams.

    A wait is missing if two streams access the same memory, at least one of them writes, and no
    event or other synchronization orders them. The emulated GPU of each rank finds these. A race
    that several ranks found is described once.

    Args:
        directory: Directory with the file rank<N>.races of each rank: a line of JSON for each race.

    Returns:
        For each race "a wait is missing (rank 0, 1): ...", and then lines with its Python stack.
    """
    # Lines that describe a race -> ranks that found it.
    ranks_of: dict[tuple[str, ...], set[int]] = defaultdict(set)
    paths = {int(path.stem.removeprefix("rank")): path for path in directory.glob("rank*.races")}
    for rank, path in sorted(paths.items()):
        for record in path.read_text(errors="replace").splitlines():
            description = _describe(json.loads(record))
            ranks_of[tuple(description)].add(rank)
    lines = []
    for (summary, *frames), ranks in ranks_of.items():
        numbers = ", ".join(map(str, sorted(ranks)))
        lines.append(f"a wait is missing (rank {numbers}): {summary}")
        lines.extend(frames)
    return lines


def _describe(race: Mapping[str, Any]) -> list[str]:
    """Return a summary line of a data race, and lines with the Python stack where it was found.

    Args:
        race: A record of rank<N>.races:
            "bytes": Size of the memory that both sides access.
            "first": The kernel or copy that was launched first: "kind", "name", "stream",
                "writes" (false: it reads).
            "second": The same for work of another stream that was launched later without waiting.
                Missing if the host (CPU) changed pinned memory before the copy "first" read it.
            "stack": Python stack, one line for each frame, innermost first.
    """
    first = race["first"]
    second = race.get("second")
    size = f"{race['bytes']} bytes"
    if second is None:
        summary = (
            f"{_label(first)} reads {size} of pinned memory that the host changed after the launch"
        )
    else:
        summary = (
            f"{_label(second)} {_verb(second)} {size} that {_label(first)} {_verb(first)}, and neither "
            f"waits for the other"
        )
    return [summary, *_innermost_frames(race["stack"].splitlines())]


def _verb(work: Mapping[str, Any]) -> str:
    return "writes" if work["writes"] else "reads"


def _label(work: Mapping[str, Any]) -> str:
    """Return work in words: "kernel AllReduce of 4 Float32 (group stage link, stream 7)"."""
    group = f"group {work['group']}, " if work.get("group") else ""
    name = work.get("what") or work["name"]
    return f"{work['kind']} {name} ({group}stream {work['stream']})"


def _innermost_frames(stack: Iterable[str]) -> list[str]:
    """Return the innermost frames of a Python stack, without frames inside torch if there are others."""
    frames = [f"    {line.strip()}" for line in stack]
    frames_of_program = [line for line in frames if _TORCH_FOLDER not in line]
    return (frames_of_program or frames)[:_MAX_FRAMES]
