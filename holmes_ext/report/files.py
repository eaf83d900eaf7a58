"""Reads and validates the files of a run's telemetry (runtime/measure/telemetry_file.py writes them)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.words import some_of

VERSION = 1
#: Steps at the start that do not count: imports, connections, allocators.
WARM_UP = 2


@dataclass
class RankFile:
    """One rank's file: its head, its steps by number, and its clock's (offset to rank 0's, error) in seconds, None where not known."""

    path: Path
    head: dict[str, Any]
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    clock: tuple[float, float] | None = None
    cut: bool = False
    closed: bool = False

    @property
    def rank(self) -> int:
        return self.head["rank"]

    @property
    def node(self) -> str:
        return self.head["node"]


@dataclass
class Run:
    """All ranks' files of one run, in rank order; notes: lines for the user."""

    ranks: list[RankFile]
    notes: list[str]

    @property
    def head(self) -> dict[str, Any]:
        return self.ranks[0].head

    @property
    def steps(self) -> list[int]:
        """Steps that every file has, without the warm-up (unless there are no others)."""
        common = sorted(set.intersection(*(set(one.steps) for one in self.ranks)))
        return [step for step in common if step >= WARM_UP] or common

    def traced(self) -> list[int]:
        """Steps of which every rank lists its operations."""
        return [step for step in self.steps if all("ops" in one.steps[step] for one in self.ranks)]

    def offset(self, one: RankFile) -> float:
        """What to add to `one`'s times to have rank 0's; a node's first process has measured it for all of the node."""
        return next((other.clock[0] for other in self.ranks if other.node == one.node and other.clock), 0.0)


def load(directory: str | Path) -> Run:
    """The run in `directory`, or the newest of the runs in it. HolmesError names the file, the line and what is wrong."""
    place, notes = Path(directory), []
    if not place.is_dir():
        raise HolmesError(f"{place}: there is no such directory; give the one of --holmes-telemetry")
    try:
        runs = sorted({path.parent for path in place.glob("*/rank*.jsonl")})
        files = list(place.glob("rank*.jsonl"))
    except OSError as error:
        raise HolmesError(f"{place}: cannot be read ({error.strerror})") from None
    if not files:
        if not runs:
            raise HolmesError(f"{place}: holds no telemetry (rank0.jsonl, ...); start the job with --holmes-telemetry {place}")
        if len(runs) > 1:
            notes.append(f"{len(runs)} runs in {place}: this is the newest, {runs[-1].name}")
        files = list(runs[-1].glob("rank*.jsonl"))
    ranks = sorted((read(path) for path in files), key=lambda one: one.rank)
    _check_one_run(ranks)
    for one in ranks:
        if one.cut:
            notes.append(f"{one.path.name} ends in the middle of a line, which is left out: rank {one.rank} was killed, or still writes")
    absent = sorted(set(range(ranks[0].head["world"])) - {one.rank for one in ranks})
    if absent:
        shown = some_of(absent)
        notes.append(f"{len(absent)} of {ranks[0].head['world']} ranks have no file here (rank {shown}); copy the files of all nodes together")
    run = Run(ranks, notes)
    unaligned = sorted({one.node for one in ranks if not any(other.clock for other in ranks if other.node == one.node)})
    if unaligned:
        notes.append(f"clocks of {', '.join(unaligned)} were not compared with rank 0's: their times are not aligned")
    if not run.steps:
        raise HolmesError(f"{files[0].parent}: no step is finished on all of its {len(ranks)} ranks")
    return run


def read(path: Path) -> RankFile:
    """One file; a last line that is cut is left out and told, anything else that cannot be read is a HolmesError."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise HolmesError(f"{path}: cannot be read ({error.strerror})") from None
    *lines, tail = text.split("\n")
    if not lines:
        raise HolmesError(f"{path}: line 1 is not whole: not a file of holmes's telemetry, or nothing was written yet")
    one: RankFile | None = None
    for number, line in enumerate(lines, 1):
        try:
            document = json.loads(line)
            if not isinstance(document, dict):
                raise ValueError
        except ValueError:
            raise HolmesError(f"{path}: line {number} is not JSON: {line[:60]!r}") from None
        if one is None:
            one = _head(path, document)
        else:
            _take(one, document, number)
    one.cut = bool(tail)
    return one


def _head(path: Path, document: dict[str, Any]) -> RankFile:
    version = document.get("holmes_telemetry")
    if version != VERSION:
        state = "not a file of holmes's telemetry" if version is None else f"of version {version!r}, this holmes reads version {VERSION}"
        raise HolmesError(f"{path}: line 1: {state}")
    for key, kind in (("run", str), ("rank", int), ("world", int), ("node", str), ("cluster", str), ("fabrics", dict)):
        if not isinstance(document.get(key), kind) or isinstance(document.get(key), bool):
            raise HolmesError(f"{path}: line 1: key {key!r} is missing or of the wrong kind")
    if not 0 <= document["rank"] < document["world"] <= 1 << 20:
        raise HolmesError(f"{path}: line 1: rank {document['rank']} of world {document['world']}")
    for name, about in document["fabrics"].items():
        if not isinstance(about, list) or len(about) != 2 or not isinstance(about[0], str) or not is_number(about[1]):
            raise HolmesError(f"{path}: line 1: fabric {name!r} is not [kind, rate]")
    return RankFile(path, document)


def _take(one: RankFile, document: dict[str, Any], number: int) -> None:
    where = f"{one.path}: line {number}"
    if "clock" in document:
        if not _is_row(document["clock"], "nn"):
            raise HolmesError(f"{where}: 'clock' is not two numbers")
        one.clock = tuple(document["clock"])
    elif "step" in document:
        if not isinstance(document["step"], int) or not is_number(document.get("begin")) or not is_number(document.get("end")):
            raise HolmesError(f"{where}: a step needs a number, 'begin' and 'end'")
        if not _all_rows(document.get("groups"), "sssnnnnn"):
            raise HolmesError(f"{where}: step {document['step']}: 'groups' are not rows of 3 texts and 5 numbers")
        if not _all_rows(document.get("ops", []), "ssssnpnnnn") or not _all_rows(document.get("spans", []), "snn"):
            raise HolmesError(f"{where}: step {document['step']}: 'ops' or 'spans' are not as this version writes them")
        if not is_number(document.get("tokens", 0)):
            raise HolmesError(f"{where}: step {document['step']}: 'tokens' is not a number")
        one.steps[document["step"]] = document
    elif "end" in document:
        one.closed = True
    else:
        raise HolmesError(f"{where}: neither a step, nor 'clock', nor 'end'")


def is_number(value: Any) -> bool:
    """A finite number, and no truth value."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -1e300 < value < 1e300


def _is_row(row: Any, kinds: str) -> bool:
    """n: a number, s: a text, p: a number or null."""
    if not isinstance(row, list) or len(row) != len(kinds):
        return False
    return all(isinstance(v, str) if k == "s" else v is None and k == "p" or is_number(v) for v, k in zip(row, kinds))


def _all_rows(rows: Any, kinds: str) -> bool:
    return isinstance(rows, list) and all(_is_row(row, kinds) for row in rows)


def _check_one_run(ranks: list[RankFile]) -> None:
    first = ranks[0]
    for one in ranks[1:]:
        if (one.head["run"], one.head["world"]) != (first.head["run"], first.head["world"]):
            raise HolmesError(
                f"{one.path.parent}: files of two runs are mixed: {first.path.name} is of run {first.head['run']} (world {first.head['world']}),"
                f" {one.path.name} of run {one.head['run']} (world {one.head['world']}); put each run's files into a directory of its own"
            )
        if one.rank == first.rank:
            raise HolmesError(f"{first.path} and {one.path} are both of rank {one.rank}; keep one")
        first = one
