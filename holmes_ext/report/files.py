"""Reads and validates the files of a run's telemetry (runtime/measure/telemetry_file.py writes them)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holmes_ext.document import Table
from holmes_ext.errors import HolmesError
from holmes_ext.words import grouped, some_of

VERSION = 1
#: Steps at the start that do not count: imports, connections, allocators.
WARM_UP = 2


@dataclass(frozen=True)
class FollowedPlan:
    """What a job did in its first steps (runtime/watch/as_planned.py). reductions: (stage, hierarchically,
    under the backward pass); in_flight: micro-batches by stage (or ()); differences: from the plan."""

    reductions: tuple[tuple[int, bool, bool], ...] = ()
    in_flight: tuple[int, ...] = ()
    differences: tuple[str, ...] = ()


@dataclass
class RankFile:
    """Its head, its steps by number, its clock's offset to rank 0's and the error (seconds, if known)."""

    path: Path
    head: dict[str, Any]
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    clock: tuple[float, float] | None = None
    rounds: list[dict[str, Any]] = field(default_factory=list)  # with other jobs (--holmes-join)
    plans: list[dict[str, Any]] = field(default_factory=list)  # changes of the plan, in order
    model: dict[str, Any] | None = None  # the last one measured: a profile's content
    stage_links: list[int] = field(
        default_factory=list
    )  # stages whose stage link to the next one it has measured
    done: FollowedPlan = (
        FollowedPlan()
    )  # what it did of what the plan decides, and where that differs
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
        common = sorted(set.intersection(*(set(rank.steps) for rank in self.ranks)))
        return [step for step in common if step >= WARM_UP] or common

    def took(self, steps: Iterable[int]) -> list[float]:
        """Seconds of each of these steps on its slowest rank."""
        return [
            max(rank.steps[step]["end"] - rank.steps[step]["begin"] for rank in self.ranks)
            for step in steps
        ]

    def traced(self) -> list[int]:
        """Steps of which every rank lists its operations."""
        return [
            step for step in self.steps if all("ops" in rank.steps[step] for rank in self.ranks)
        ]

    @property
    def rounds(self) -> dict[int, list[dict[str, Any]]]:
        """What ranks tell of each round with other jobs (telemetry.outer_round), by its number, in order."""
        reports = grouped(
            (report["round"], report) for rank in self.ranks for report in rank.rounds
        )
        return dict(sorted(reports.items()))

    @property
    def done(self) -> FollowedPlan:
        """Of all ranks."""
        reductions, differences = set(), list[str]()
        for rank_file in self.ranks:
            reductions |= set(rank_file.done.reductions)
            differences += rank_file.done.differences
        held = max((rank.done.in_flight for rank in self.ranks), default=())
        return FollowedPlan(tuple(sorted(reductions)), held, tuple(dict.fromkeys(differences)))

    def offset(self, file: RankFile) -> float:
        """What makes the file's times rank 0's: a node's first process has measured it."""
        return next(
            (other.clock[0] for other in self.ranks if other.node == file.node and other.clock), 0.0
        )


def load(directory: str | Path) -> Run:
    """In `directory`, or the newest run in it. HolmesError names file, line and what is wrong."""
    place, notes = Path(directory), []
    if not place.is_dir():
        raise HolmesError(
            f"{place}: there is no such directory; give the one of --holmes-telemetry"
        )
    try:
        runs = sorted({path.parent for path in place.glob("*/rank*.jsonl")})
        files = list(place.glob("rank*.jsonl"))
    except OSError as error:
        raise HolmesError(f"{place}: cannot be read ({error.strerror})") from None
    if not files:
        if not runs:
            raise HolmesError(
                f"{place}: holds no telemetry (rank0.jsonl, ...); start the job with "
                f"--holmes-telemetry {place}"
            )
        if len(runs) > 1:
            notes.append(f"{len(runs)} runs in {place}: this is the newest, {runs[-1].name}")
        files = list(runs[-1].glob("rank*.jsonl"))
    ranks = sorted((read(path) for path in files), key=lambda file: file.rank)
    _check_one_run(ranks)
    notes += [
        f"{file.path.name} ends in the middle of a line, which is left out:"
        f" rank {file.rank} was killed, or still writes"
        for file in ranks
        if file.cut
    ]
    world = ranks[0].head["world"]
    absent = sorted(set(range(world)) - {rank_file.rank for rank_file in ranks})
    if absent:
        notes.append(
            f"{len(absent)} of {world} ranks have no file here (rank {some_of(absent)});"
            " copy the files of all nodes together"
        )
    unaligned = sorted({rank.node for rank in ranks} - {file.node for file in ranks if file.clock})
    if unaligned:
        notes.append(
            f"clocks of {', '.join(unaligned)} were not compared with rank 0's: their times are not aligned"
        )
    if (scale := Table(ranks[0].head, f"{ranks[0].path}: line 1").take("scale", float, 1.0)) != 1:
        notes.append(
            f"NICs were emulated (holmes lab) and carried {scale:g} x their rates (--scale); `of` "
            "says what they carried"
        )
    run = Run(ranks, notes)
    if not run.steps:
        raise HolmesError(
            f"{files[0].parent}: no step is finished on all of its {len(ranks)} ranks"
        )
    return run


def read(path: Path) -> RankFile:
    """One file; a last line that is cut is left out and told, anything else is a HolmesError."""
    try:
        *lines, tail = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise HolmesError(f"{path}: cannot be read ({error.strerror})") from None
    if not lines:
        raise HolmesError(
            f"{path}: line 1 is not whole: not a file of holmes's telemetry, or nothing was written yet"
        )
    rank_file = _head(path, _parsed(f"{path}: line 1", lines[0]))
    for number, line in enumerate(lines[1:], 2):
        _take(rank_file, _parsed(f"{path}: line {number}", line), f"{path}: line {number}")
    rank_file.cut = bool(tail)
    return rank_file


def _parsed(where: str, line: str) -> dict[str, Any]:
    try:
        document = json.loads(line)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise HolmesError(f"{where} is not JSON: {line[:60]!r}")
    return document


def _head(path: Path, document: dict[str, Any]) -> RankFile:
    where, version = f"{path}: line 1", document.get("holmes_telemetry")
    if version is None:
        raise HolmesError(f"{where}: not a file of holmes's telemetry")
    if version != VERSION:
        raise HolmesError(f"{where}: of version {version!r}, this holmes reads version {VERSION}")
    table = Table(document, where)
    for key, kind in (("run", str), ("rank", int), ("world", int), ("node", str), ("cluster", str)):
        table.take(key, kind)
    for name, about in table.table("fabrics").values.items():
        if not _is_row(about, "sn"):
            raise HolmesError(f"{where}: fabric {name!r} is not [kind, rate]")
    if not all(_is_row(row, "ssnn") for row in table.list("between", list, ())):
        raise HolmesError(f"{where}: 'between' are not rows of [from, to, rate, seconds]")
    if not 0 <= document["rank"] < document["world"] <= 1 << 20:
        raise HolmesError(f"{where}: rank {document['rank']} of world {document['world']}")
    return RankFile(path, document)


def _merge(rows: list[list], more: list[list], names: int) -> list[list]:
    """Rows that begin with as many names: numbers of those with the same ones are added up."""
    sums = {tuple(row[:names]): row[names:] for row in rows}
    for row in more:
        known = sums.get(tuple(row[:names]), [0] * (len(row) - names))
        sums[tuple(row[:names])] = [a + b for a, b in zip(known, row[names:])]
    return [[*key, *numbers] for key, numbers in sorted(sums.items())]


#: What a step's line lists, and of what its rows are made (see _is_row).
_LISTS = {"groups": "sssnnnnn", "between": "ssnn", "ops": "ssssnpnnnn", "spans": "snn"}


def _take(file: RankFile, document: dict[str, Any], where: str) -> None:
    if "clock" in document:
        if not _is_row(document["clock"], "nn"):
            raise HolmesError(f"{where}: 'clock' is not two numbers")
        file.clock = tuple(document["clock"])
    elif "step" in document:
        table = Table(document, where)
        step, *_ = table.take("step", int), table.take("begin", float), table.take("end", float)
        table.take("tokens", float, 0)
        table.table("reduction", {}).take("exposed", float, 0)
        for key, kinds in _LISTS.items():
            rows = document.get(key, None if key == "groups" else [])
            if not isinstance(rows, list) or not all(_is_row(row, kinds) for row in rows):
                raise HolmesError(
                    f"{where}: step {step}: {key!r} are not rows as this version writes them"
                )
        file.steps[step] = document
    elif "late" in document:  # what was under way when the last step ended
        if (step := Table(document, where).take("late", int)) not in file.steps:
            raise HolmesError(f"{where}: 'late' is of step {step}, which the file does not have")
        for key, names in (("groups", 3), ("between", 2)):
            rows, last = document.get(key), file.steps[step]
            if not isinstance(rows, list) or not all(_is_row(row, _LISTS[key]) for row in rows):
                raise HolmesError(f"{where}: {key!r} are not rows as this version writes them")
            last[key] = _merge(last.get(key, []), rows, names)
    elif "done" in document:
        table = Table(document, where).table("done")
        rows, held, texts = (
            table.list("reductions", list),
            table.list("in_flight", int),
            table.list("differences", str),
        )
        if not all(_is_row(row, "nbb") for row in rows):
            raise HolmesError(
                f"{where}: 'reductions' are not rows of [stage, a hierarchical all-reduce, overlap]"
            )
        file.done = FollowedPlan(tuple(map(tuple, rows)), tuple(held), tuple(texts))
    elif "outer" in document:
        table = Table(document, where).table("outer")
        table.take("round", int)
        table.take("verdict", str)
        for key in ("bytes", "seconds", "exposed"):
            table.take(key, float)
        file.rounds.append(document["outer"])
    elif "plan" in document:
        table = Table(document, where).table("plan")
        table.take("step", int)
        for key in ("now_s", "then_s"):
            table.take(key, float)
        rows = [document["plan"].get(key) for key in ("before", "in_flight")]
        if not all(isinstance(row, list) and _is_row(row, "n" * len(row)) for row in rows):
            raise HolmesError(
                f"{where}: 'before' and 'in_flight' of 'plan' are not lists of numbers"
            )
        table.take("sums", str, "")
        file.plans.append(document["plan"])
    elif "model" in document:
        file.model, file.stage_links = (
            Table(document, where).table("model").values,
            document.get("stage_links", []),
        )
    elif "end" in document:
        file.closed = True
    else:
        raise HolmesError(
            f"{where}: neither a step, nor 'clock', 'done', 'outer', 'plan', 'model' or 'end'"
        )


def _is_row(row: Any, kinds: str) -> bool:
    """n: a finite number, s: a text, p: a number or null, b: true or false."""
    return (
        isinstance(row, list)
        and len(row) == len(kinds)
        and all(
            isinstance(value, {"s": str, "b": bool}[kind])
            if kind in "sb"
            else value is None
            and kind == "p"
            or isinstance(value, (int, float))
            and not isinstance(value, bool)
            and -1e300 < value < 1e300
            for value, kind in zip(row, kinds)
        )
    )


def _check_one_run(ranks: list[RankFile]) -> None:
    for first, rank in zip(ranks, ranks[1:]):
        of = [
            f"{file.path.name} is of run {file.head['run']} (world {file.head['world']})"
            for file in (first, rank)
        ]
        if of[0].partition(" ")[2] != of[1].partition(" ")[2]:
            raise HolmesError(
                f"{rank.path.parent}: files of two runs are mixed: {', '.join(of)}; split them"
            )
        if rank.rank == first.rank:
            raise HolmesError(
                f"{first.path} and {rank.path} are both of rank {rank.rank}; keep one"
            )
