"""Line of a report on the steps that it covers; printed if the telemetry file of some rank ends early."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from holmes_ext.words import counted, some_of


class RankSteps(Protocol):
    """Part of files.RankFile that this module needs: the steps in the telemetry file of a rank."""

    steps: dict[int, dict[str, Any]]  # number of a step -> its line
    closed: bool  # whether the job has closed the file

    @property
    def rank(self) -> int:
        """The rank that has written the file."""


def note_on_coverage(covered: Sequence[int], files: Sequence[RankSteps]) -> list[str]:
    """Return [a line with the steps that a report covers] if a rank has not closed its file; else [].

    A rank does not close its file while the job runs, if it was killed, or if the disk was full.

    Args:
        covered: Numbers of the steps in the report.
        files: Telemetry of all ranks.
    """
    unclosed = [file.rank for file in files if not file.closed]
    if not unclosed or not covered:
        return []
    subject = "rank" if len(unclosed) == 1 else "ranks"
    note = (
        f"{subject} {some_of(unclosed)} did not close the file (the job still runs, was killed, or the "
        f"disk was full): the report covers {counted(len(covered), 'step')}, {covered[0]} to {covered[-1]}"
    )
    last_steps: Mapping[int, int] = {file.rank: max(file.steps, default=-1) for file in files}
    last_rank = max(last_steps, key=lambda rank: last_steps[rank])
    if last_steps[last_rank] > covered[-1]:
        note += f"; rank {last_rank} has steps up to {last_steps[last_rank]}"
    return [note]
