"""Prints a summary of several runs of pytest: tested entries of README's table, skips and slowest tests.

    python tests/summary.py build/results/integration.xml ...

Each file is the JUnit XML of one run of pytest, here called a part, whose name is that of the file. README's
table "your job" lists launchers and frameworks, its entries. A test with the mark row(NAME) tests the entry
NAME. The summary prints one of these states for each entry:

    passed            in at least one part, all its tests ran and passed
    PARTLY SKIPPED    some of its tests were skipped in every part that ran any
    SKIPPED           all of them were skipped
    NOT RUN           no part has a test of it
    FAILED            a test of it failed
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEADING = "| your job | add |\n"  # of README's table
LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")
SLOWEST = 30  # tests that the summary lists
WIDTH = 120  # columns


class Outcome(Enum):
    PASSED = "passed"
    SKIPPED = "skipped"
    FAILED = "failed"


@dataclass(frozen=True)
class Result:
    """Result of one test in one part."""

    part: str
    name: str  # the test's node id
    outcome: Outcome
    seconds: float
    reason: str  # why it was skipped, or ""
    rows: tuple[str, ...]  # the names in its marks row(NAME)


@dataclass(frozen=True)
class Part:
    """One run of pytest."""

    name: str
    tests: tuple[Result, ...]
    left_out: int = 0  # exhaustive tests that make nightly runs
    seed: str = ""  # which tenth of the exhaustive tests ran, or the value of HOLMES_TEST_FULL
    has_results: bool = True  # False: pytest ended before it wrote any


@dataclass(frozen=True)
class Entry:
    """A line of the table that the summary prints."""

    name: str
    state: str
    detail: str


def readme_rows(readme: str) -> list[tuple[str, ...]]:
    """Return the entries of each row of README's table "your job".

    A row can have several: "any script: torchrun, srun" has torchrun and srun.
    """
    _, found, table = readme.partition(HEADING)
    if not found:
        raise ValueError(f"README has no table with the heading {HEADING.strip()!r}")
    _, *lines = table.split("\n\n", maxsplit=1)[0].splitlines()  # the first line separates the heading
    rows = []
    for line in lines:
        first_cell = line.split("|")[1]
        text = LINK.sub(r"\1", first_cell).replace("`", "").strip()
        entries = text.rpartition(": ")[2]
        rows.append(tuple(entries.split(", ")))
    return rows


def entries_of(mark: str, rows: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the entries of README's table that a mark row(NAME) names.

    NAME is an entry, a part of the text of a single entry, or a whole cell of README, which stands for
    all its entries.

    Raises:
        ValueError: NAME is in no entry or in several.
    """
    entries = [entry for row in rows for entry in row]
    if mark in entries:
        return (mark,)
    for row in rows:
        if mark.rpartition(": ")[2] == ", ".join(row):
            return row
    containing = [entry for entry in entries if mark in entry]
    if len(containing) != 1:
        raise ValueError(
            f"row({mark!r}) names {len(containing)} entries of README's table 'your job'"
        )
    return (containing[0],)


def read_part(file: Path) -> Part:
    """Return the results of one run of pytest; has_results is False if there is no file."""
    if not file.exists():
        return Part(file.stem, tests=(), has_results=False)
    suite = ElementTree.parse(file).getroot().find("testsuite")
    assert suite is not None, file
    properties = _properties(suite)
    tests: dict[str, Result] = {}
    for case in suite.iter("testcase"):
        test = _read_test(file.stem, case)
        tests[test.name] = test  # the last try of a test that pytest --reruns repeated
    return Part(
        name=file.stem,
        tests=tuple(tests.values()),
        left_out=sum(int(value) for name, value in properties if name == "left_out"),
        seed=next((value for name, value in properties if name == "seed"), ""),
    )


def _read_test(part: str, case: ElementTree.Element) -> Result:
    skipped = case.find("skipped")
    outcome, reason = Outcome.PASSED, ""
    if case.find("failure") is not None or case.find("error") is not None:
        outcome = Outcome.FAILED
    elif skipped is not None:
        outcome, reason = Outcome.SKIPPED, _reason(skipped)
    file = case.get("file") or case.get("classname", "")
    return Result(
        part=part,
        name=f"{file}::{case.get('name', '')}",
        outcome=outcome,
        seconds=float(case.get("time", 0)),
        reason=reason,
        rows=tuple(value for name, value in _properties(case) if name == "row"),
    )


def _reason(skipped: ElementTree.Element) -> str:
    reason = skipped.get("message", "")
    if reason == "collection skipped":
        # The text is a tuple: file, line, reason.
        reason = str(ast.literal_eval(skipped.text or "('', 0, '')")[2])
    return reason.removeprefix("Skipped: ")


def _properties(element: ElementTree.Element) -> list[tuple[str, str]]:
    found = element.findall("properties/property")
    return [(each.get("name", ""), each.get("value", "")) for each in found]


def table(parts: Iterable[Part], rows: Sequence[tuple[str, ...]]) -> list[Entry]:
    """Return the state of each entry of README's table, in the table's order."""
    tests = [test for part in parts for test in part.tests]
    tests_of: dict[str, list[Result]] = {entry: [] for row in rows for entry in row}
    for test in tests:
        for mark in test.rows:
            for entry in entries_of(mark, rows):
                tests_of[entry].append(test)
    return [_judge(entry, found) for entry, found in tests_of.items()]


def _judge(entry: str, tests: Sequence[Result]) -> Entry:
    """Return the state of an entry that these tests, of all parts, test."""
    failed = [test.name for test in tests if test.outcome is Outcome.FAILED]
    passed = [test for test in tests if test.outcome is Outcome.PASSED]
    reasons = "; ".join(_count_reasons(tests))
    if not tests:
        return Entry(entry, "NOT RUN", "no part of this run has a test of it")
    if failed:
        return Entry(entry, "FAILED", ", ".join(failed))
    if not passed:
        return Entry(entry, "SKIPPED", reasons)
    skipping_parts = {test.part for test in tests if test.outcome is Outcome.SKIPPED}
    parts_without_skips = sorted({test.part for test in passed} - skipping_parts)
    if not parts_without_skips:
        return Entry(entry, "PARTLY SKIPPED", reasons)
    return Entry(entry, "passed", f"{len(passed)} tests ({', '.join(parts_without_skips)})")


def _count_reasons(tests: Iterable[Result]) -> list[str]:
    """Return each reason for a skip once, with the number of tests, most frequent first."""
    counts = Counter(test.reason for test in tests if test.outcome is Outcome.SKIPPED)
    return [f"{count} x {reason}" for reason, count in counts.most_common()]


def summary(parts: Sequence[Part], rows: Sequence[tuple[str, ...]]) -> str:
    """Return the text that is printed after all parts have run."""
    entries = table(parts, rows)
    tests = [test for part in parts for test in part.tests]
    name_width = max(len(entry.name) for entry in entries)
    lines = ["", 'README\'s table "your job":']
    for entry in entries:
        head = f"  {entry.name:{name_width}}  {entry.state:14}  "
        lines += textwrap.wrap(
            head + entry.detail,
            WIDTH,
            subsequent_indent=" " * len(head),
            break_long_words=False,
            break_on_hyphens=False,
        )

    lines += ["", "Skipped, other tests of all parts together:"]
    other = _count_reasons(test for test in tests if not test.rows)
    lines += [f"  {reason}" for reason in other] or ["  none"]

    left_out = sum(part.left_out for part in parts)
    seeds = sorted({part.seed for part in parts if part.seed})
    if left_out:
        lines += [
            "",
            f"Left to make nightly: {left_out} exhaustive tests (HOLMES_TEST_SEED={', '.join(seeds)})",
        ]

    lines += ["", f"Slowest of {len(tests)} tests:"]
    slowest = sorted(tests, key=lambda test: test.seconds, reverse=True)
    lines += [f"  {test.seconds:6.1f} s  {test.part}: {test.name}" for test in slowest[:SLOWEST]]

    lines += ["", "Parts:"]
    for part in parts:
        lines.append(f"  {part.name:17}  {_describe_part(part)}")
    return "\n".join(lines)


def _describe_part(part: Part) -> str:
    if not part.has_results:
        return "NO RESULTS: it was not run, or ended before its tests did"
    counts = Counter(test.outcome for test in part.tests)
    words = [f"{counts[outcome]} {outcome.value}" for outcome in Outcome]
    seconds = sum(test.seconds for test in part.tests)
    return f"{', '.join(words)}; {seconds:.0f} s of tests"


def main(files: Sequence[str]) -> None:
    rows = readme_rows((ROOT / "README.md").read_text())
    print(summary([read_part(Path(file)) for file in files], rows))


if __name__ == "__main__":
    main(sys.argv[1:])
