"""Reads and validates the files of a run's telemetry.

runtime/measure/telemetry_file.py writes them and describes their format: a file for each rank, with
a JSON object on each line. The first line describes the job. Other lines are a training step,
operations that ended after their step, an outer round of joined jobs, a change of the plan, and so
on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holmes_ext.document import Table, parse_json_value, read_text
from holmes_ext.errors import HolmesError
from holmes_ext.report.coverage import note_on_coverage
from holmes_ext.words import grouped, some_of

VERSION = 1
#: Steps at the start that do not count, because they load modules, connect ranks and fill
#: allocators.
WARM_UP = 2
_MOST_RANKS = 1 << 20
_MOST_SHOWN = 60  # characters of a bad line
_LARGEST_NUMBER = 1e300


@dataclass(frozen=True)
class FollowedPlan:
    """How a job has followed its plan in its first steps (runtime/watch/as_planned.py)."""

    #: (pipeline stage, whether its reduction was hierarchical, whether it overlapped the backward
    #: pass).
    reductions: tuple[tuple[int, bool, bool], ...] = ()
    #: Micro-batches in flight of each stage; () if the framework used its own schedule.
    in_flight: tuple[int, ...] = ()
    #: Differences from the plan, in words.
    differences: tuple[str, ...] = ()


@dataclass
class RankFile:
    """Content of the telemetry file of one rank, after parsing."""

    path: Path
    head: dict[str, Any]  # first line of the file
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)  # number of a step -> its line
    #: Offset from the clock of rank 0's node and its largest error, in seconds; None if unknown.
    clock: tuple[float, float] | None = None
    rounds: list[dict[str, Any]] = field(default_factory=list)  # with joined jobs (--holmes-join)
    plans: list[dict[str, Any]] = field(default_factory=list)  # changes of the plan, in order
    model: dict[str, Any] | None = None  # content of the last measured profile
    #: Stages whose link to the next stage is in this profile.
    stage_links: list[int] = field(default_factory=list)
    followed_plan: FollowedPlan = FollowedPlan()
    cut: bool = False  # whether the last line is incomplete
    closed: bool = False  # whether the job has closed the file

    @property
    def rank(self) -> int:
        """The rank that has written the file."""
        rank: int = self.head["rank"]
        return rank

    @property
    def node(self) -> str:
        """Name of the rank's node."""
        node: str = self.head["node"]
        return node


@dataclass
class Run:
    """Telemetry of all ranks of a run."""

    ranks: list[RankFile]  # in rank order
    notes: list[str]  # lines for the user

    @property
    def head(self) -> dict[str, Any]:
        """First line of the telemetry file of the first rank: it describes the job."""
        return self.ranks[0].head

    @property
    def steps(self) -> list[int]:
        """Numbers of the steps that all ranks have, without the warm-up if there are other steps."""
        common_steps = sorted(set.intersection(*(set(rank.steps) for rank in self.ranks)))
        measured_steps = [step for step in common_steps if step >= WARM_UP]
        return measured_steps or common_steps

    def took(self, steps: Iterable[int]) -> list[float]:
        """Return the seconds that each training step took on its slowest rank."""
        return [
            max(rank.steps[step]["end"] - rank.steps[step]["begin"] for rank in self.ranks)
            for step in steps
        ]

    def traced(self) -> list[int]:
        """Return the numbers of the steps that are traced: every rank lists its operations in them."""
        return [
            step for step in self.steps if all("ops" in rank.steps[step] for rank in self.ranks)
        ]

    @property
    def rounds(self) -> dict[int, list[dict[str, Any]]]:
        """Number of an outer round (an exchange of joined jobs) -> its line in each rank's file."""
        reports = grouped(
            (report["round"], report) for rank in self.ranks for report in rank.rounds
        )
        return dict(sorted(reports.items()))

    @property
    def followed_plan(self) -> FollowedPlan:
        """How the job has followed its plan, merged from the files of all ranks.

        A reduction, or a difference between job and plan, counts if any rank reports it. All ranks
        that report micro-batches in flight report the same ones; others report an empty tuple.
        """
        # (stage, whether it is a hierarchical all-reduce, whether it overlaps the backward pass)
        reductions: set[tuple[int, bool, bool]] = set()
        differences: list[str] = []
        for rank_file in self.ranks:
            reductions.update(rank_file.followed_plan.reductions)
            differences += rank_file.followed_plan.differences
        in_flight = max((rank.followed_plan.in_flight for rank in self.ranks), default=())
        distinct_differences = tuple(dict.fromkeys(differences))
        return FollowedPlan(tuple(sorted(reductions)), in_flight, distinct_differences)

    def offset(self, file: RankFile) -> float:
        """Return the seconds to add to the times of a file, so that they are on rank 0's clock.

        The first process of each node has measured the offset. It is 0 if the node has none.
        """
        for other in self.ranks:
            if other.node == file.node and other.clock:
                return other.clock[0]
        return 0.0


def load(directory: str | Path) -> Run:
    """Read the telemetry of a run.

    Args:
        directory: Folder of a run, or a folder of several runs: the newest is read.

    Raises:
        HolmesError: There is no telemetry, or a file is bad. The message names the file and the
            line.
    """
    folder = Path(directory)
    notes: list[str] = []
    if not folder.is_dir():
        raise HolmesError(
            f"{folder}: there is no such directory; give the one of --holmes-telemetry"
        )
    try:
        # The name of a run begins with its start time, so the last in the order is the newest.
        runs = sorted({path.parent for path in folder.glob("*/rank*.jsonl")})
        files = list(folder.glob("rank*.jsonl"))
    except OSError as error:
        raise HolmesError(f"{folder}: cannot be read ({error.strerror})") from None
    if not files:
        if not runs:
            raise HolmesError(
                f"{folder}: holds no telemetry (rank0.jsonl, ...); start the job with "
                f"--holmes-telemetry {folder}"
            )
        if len(runs) > 1:
            notes.append(f"{len(runs)} runs in {folder}: this is the newest, {runs[-1].name}")
        files = list(runs[-1].glob("rank*.jsonl"))
    ranks = sorted((read(path) for path in files), key=lambda file: file.rank)
    _check_one_run(ranks)
    run = Run(ranks, [*notes, *_notes_on(ranks)])
    run.notes += note_on_coverage(run.steps, ranks)
    if not run.steps:
        raise HolmesError(f"{files[0].parent}: no step is finished on all of its ranks")
    return run


def _notes_on(ranks: list[RankFile]) -> list[str]:
    """Return lines for the user about incomplete files, absent ranks, clocks, and emulated NICs.

    Args:
        ranks: The files of the ranks, sorted by rank.
    """
    notes = []
    for file in ranks:
        if file.cut:
            notes.append(
                f"{file.path.name} ends in the middle of a line, which is left out:"
                f" rank {file.rank} was killed, or still writes"
            )
    head = ranks[0].head
    world = head["world"]
    absent = sorted(set(range(world)) - {file.rank for file in ranks})
    if absent:
        notes.append(
            f"{len(absent)} of {world} ranks have no file here (rank {some_of(absent)});"
            " copy the files of all nodes together"
        )
    nodes_with_clock = {file.node for file in ranks if file.clock}
    unaligned = sorted({file.node for file in ranks} - nodes_with_clock)
    if unaligned:
        notes.append(
            f"clocks of {', '.join(unaligned)} were not compared with rank 0's: their times are not aligned"
        )

    # `holmes lab` runs a job on emulated NICs. They may carry only a part (--scale) of the rates
    # that they announce. The column "of" of the report's tables has the rates that they carried.
    scale = Table(head, f"{ranks[0].path}: line 1").take("scale", float, 1.0)
    if scale != 1:
        notes.append(
            f"NICs were emulated (holmes lab) and carried {scale:g} x their rates (--scale); `of` "
            "says what they carried"
        )
    return notes


def read(path: Path) -> RankFile:
    """Read the telemetry of a rank. A last line that is incomplete is left out.

    Raises:
        HolmesError: The file is bad. The message names the line.
    """
    text = read_text(path, "give the folder of --holmes-telemetry", errors="replace")
    # One by one, because a list of all lines may take much more memory than the text.
    lines = (match[0].rstrip("\n") for match in re.finditer(".*\n", text))
    first_line = next(lines, None)
    if first_line is None:
        raise HolmesError(
            f"{path}: line 1 is not whole: not a file of holmes's telemetry, or nothing was written yet"
        )
    rank_file = _read_head(path, _parse_line(f"{path}: line 1", first_line))
    for number, line in enumerate(lines, 2):
        where = f"{path}: line {number}"
        _add_line(rank_file, _parse_line(where, line), where)
    rank_file.cut = not text.endswith("\n")  # the last line was not written to its end
    return rank_file


def _parse_line(where: str, line: str) -> dict[str, Any]:
    """Return the JSON object in a line; raise HolmesError, which begins with `where`, if there is none."""
    try:
        document = parse_json_value(line, where, advice="", parse_constant=float)
    except HolmesError:
        document = None
    if not isinstance(document, dict):
        raise HolmesError(f"{where} is not JSON: {line[:_MOST_SHOWN]!r}")
    return document


def _read_head(path: Path, document: dict[str, Any]) -> RankFile:
    """Check the first line of a file, and return a RankFile that has only this line.

    Args:
        path: The file.
        document: The line.

    Raises:
        HolmesError: The line is not as this version writes it.
    """
    where = f"{path}: line 1"
    version = document.get("holmes_telemetry")
    if version is None:
        raise HolmesError(f"{where}: not a file of holmes's telemetry")
    if version != VERSION:
        raise HolmesError(f"{where}: of version {version!r}, this holmes reads version {VERSION}")
    table = Table(document, where)
    for key, kind in (("run", str), ("rank", int), ("world", int), ("node", str), ("cluster", str)):
        table.take(key, kind)
    for name, kind_and_rate in table.table("fabrics").values.items():
        if not _is_row(kind_and_rate, "sn"):  # a text and a number
            raise HolmesError(f"{where}: fabric {name!r} is not [kind, rate]")
    if not all(_is_row(row, "ssnn") for row in table.list("between", list, ())):
        raise HolmesError(f"{where}: 'between' are not rows of [from, to, rate, seconds]")
    if not 0 <= document["rank"] < document["world"] <= _MOST_RANKS:
        raise HolmesError(f"{where}: rank {document['rank']} of world {document['world']}")
    return RankFile(path, document)


def _add_rows(rows: list[list[Any]], new_rows: list[list[Any]], key_length: int) -> list[list[Any]]:
    """Merge two tables: rows with the same key become one row with the sums of their numbers.

    Args:
        rows: Rows of texts (the key), followed by numbers.
        new_rows: The rows to add.
        key_length: Number of texts at the beginning of a row.
    """
    numbers_of = {tuple(row[:key_length]): row[key_length:] for row in rows}
    for row in new_rows:
        key = tuple(row[:key_length])
        numbers = row[key_length:]
        if key in numbers_of:
            numbers = [old + new for old, new in zip(numbers_of[key], numbers)]
        numbers_of[key] = numbers
    return [[*key, *numbers] for key, numbers in sorted(numbers_of.items())]


#: Lists in the line of a step -> types of a row's values (see _is_row).
_ROW_TYPES = {"groups": "sssnnnnn", "between": "ssnn", "ops": "ssssnpnnnn", "spans": "snn"}
#: Lists that may get rows after the step -> number of texts at the beginning of a row.
_KEY_LENGTHS = {"groups": 3, "between": 2}


def _add_line(file: RankFile, document: dict[str, Any], where: str) -> None:
    """Check a line after the first, and add it to the RankFile.

    Args:
        file: Gets the content of the line.
        document: The line.
        where: File and line, for messages.

    Raises:
        HolmesError: The line is not as this version writes it.
    """
    for key, add in _READERS.items():
        if key in document:
            add(file, document, where)
            return
    raise HolmesError(
        f"{where}: neither a step, nor 'clock', 'done', 'outer', 'plan', 'model' or 'end'"
    )


def _add_clock(file: RankFile, document: dict[str, Any], where: str) -> None:
    if not _is_row(document["clock"], "nn"):
        raise HolmesError(f"{where}: 'clock' is not two numbers")
    file.clock = tuple(document["clock"])


def _add_step(file: RankFile, document: dict[str, Any], where: str) -> None:
    """Check the line of a training step, and store it in file.steps by the number of the step.

    `document` is the line, `where` its position for messages. Raise HolmesError if a value is
    missing or of a wrong type.
    """
    table = Table(document, where)
    # take() raises HolmesError if the key is missing (unless it has a default) or of another type.
    step = table.take("step", int)
    table.take("begin", float)
    table.take("end", float)
    table.take("tokens", float, 0)
    table.table("reduction", {}).take("exposed", float, 0)
    for key, types in _ROW_TYPES.items():
        rows = document.get(key, None if key == "groups" else [])  # only "groups" is required
        if not isinstance(rows, list) or not all(_is_row(row, types) for row in rows):
            raise HolmesError(
                f"{where}: step {step}: {key!r} are not rows as this version writes them"
            )
    file.steps[step] = document


def _add_late_operations(file: RankFile, document: dict[str, Any], where: str) -> None:
    """Add the figures of late operations to the line of their step in file.steps.

    Late operations were still under way when their step ended; `document` is their line, `where`
    its position for messages. Raise HolmesError if it is malformed or its step is not in the file.
    """
    step = Table(document, where).take("late", int)
    if step not in file.steps:
        raise HolmesError(f"{where}: 'late' is of step {step}, which the file does not have")
    line = file.steps[step]
    # key: a table of the step ("groups", "between"). key_length: number of columns at the begin of
    # a row that identify it. Numbers of rows with the same identity are added.
    for key, key_length in _KEY_LENGTHS.items():
        rows = document.get(key)
        if not isinstance(rows, list) or not all(_is_row(row, _ROW_TYPES[key]) for row in rows):
            raise HolmesError(f"{where}: {key!r} are not rows as this version writes them")
        line[key] = _add_rows(line.get(key, []), rows, key_length)


def _add_followed_plan(file: RankFile, document: dict[str, Any], where: str) -> None:
    """Check the line that says how the job has followed its plan, and set file.followed_plan.

    `document` is the line, `where` its position for messages. Raise HolmesError if it is malformed.
    """
    table = Table(document, where).table("done")
    reductions = table.list("reductions", list)
    in_flight = table.list("in_flight", int)
    differences = table.list("differences", str)
    # A number (stage) and two booleans: the stage's gradients were reduced hierarchically, and
    # reductions overlapped the backward pass.
    if not all(_is_row(row, "nbb") for row in reductions):
        raise HolmesError(
            f"{where}: 'reductions' are not rows of [stage, a hierarchical all-reduce, overlap]"
        )
    file.followed_plan = FollowedPlan(
        tuple(tuple(row) for row in reductions), tuple(in_flight), tuple(differences)
    )


def _add_outer_round(file: RankFile, document: dict[str, Any], where: str) -> None:
    """Check the line of an outer round, and append its figures to file.rounds.

    In an outer round, jobs that train one model together exchange pseudo-gradients. `document` is
    the line, `where` its position for messages. Raise HolmesError if it is malformed.
    """
    table = Table(document, where).table("outer")
    table.take("round", int)
    table.take("verdict", str)
    for key in ("bytes", "seconds", "exposed"):
        table.take(key, float)
    file.rounds.append(document["outer"])


def _add_change_of_plan(file: RankFile, document: dict[str, Any], where: str) -> None:
    """Check the line of a change of the plan in the running job, and append it to file.plans.

    `document` is the line, `where` its position for messages. Raise HolmesError if it is malformed.
    """
    table = Table(document, where).table("plan")
    # take() only checks: it raises HolmesError if the key is missing or of another type.
    table.take("step", int)
    for key in ("now_s", "then_s"):
        table.take(key, float)
    # Micro-batches in flight by stage, before and after the change.
    for key in ("before", "in_flight"):
        row = document["plan"].get(key)
        # "n": a number.
        if not isinstance(row, list) or not _is_row(row, "n" * len(row)):
            raise HolmesError(
                f"{where}: 'before' and 'in_flight' of 'plan' are not lists of numbers"
            )
    table.take("sums", str, "")
    file.plans.append(document["plan"])


def _add_measured_model(file: RankFile, document: dict[str, Any], where: str) -> None:
    """Add a measured profile: the times of the pipeline's stages, and the stage links that were measured."""
    file.model = Table(document, where).table("model").values
    file.stage_links = document.get("stage_links", [])


def _mark_as_closed(file: RankFile, document: dict[str, Any], where: str) -> None:
    file.closed = True


#: Key that a line is recognized by -> function that checks the line and adds it to a RankFile.
_READERS: dict[str, Callable[[RankFile, dict[str, Any], str], None]] = {
    "clock": _add_clock,
    "step": _add_step,
    "late": _add_late_operations,
    "done": _add_followed_plan,
    "outer": _add_outer_round,
    "plan": _add_change_of_plan,
    "model": _add_measured_model,
    "end": _mark_as_closed,
}


def _is_row(row: Any, types: str) -> bool:
    """Return whether a JSON value is a list whose values have the given types.

    Args:
        row: The JSON value.
        types: One letter for each value: "n" a finite number, "s" a text, "p" a number or null, "b"
            a boolean.
    """
    if not isinstance(row, list) or len(row) != len(types):
        return False
    return all(_has_type(value, letter) for value, letter in zip(row, types))


def _has_type(value: Any, letter: str) -> bool:
    if letter == "s":
        return isinstance(value, str)
    if letter == "b":
        return isinstance(value, bool)
    if value is None:
        return letter == "p"
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and -_LARGEST_NUMBER < value < _LARGEST_NUMBER


def _check_one_run(ranks: list[RankFile]) -> None:
    """Raise HolmesError if files belong to different runs, or two files to the same rank.

    Args:
        ranks: The files of the ranks, sorted by rank, so that files of the same rank are
            neighbours.
    """
    for first, second in zip(ranks, ranks[1:]):
        first_run = _run_in_words(first)
        second_run = _run_in_words(second)
        if first_run != second_run:
            raise HolmesError(
                f"{second.path.parent}: files of two runs are mixed: {first.path.name} {first_run}, "
                f"{second.path.name} {second_run}; split them"
            )
        if second.rank == first.rank:
            raise HolmesError(
                f"{first.path} and {second.path} are both of rank {second.rank}; keep one"
            )


def _run_in_words(file: RankFile) -> str:
    return f"is of run {file.head['run']} (world {file.head['world']})"
