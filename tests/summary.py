"""Prints which of the supported frameworks several pytest runs have tested, and the slowest tests.

    python tests/summary.py build/results/integration.xml ...

    part     one run of pytest; its results are in one JUnit XML file on the command line
    entry    a framework or launcher that run.md's table "your job" lists; a test with the mark row(NAME)
             tests the entry NAME

The summary prints a state for each entry:

    passed            in at least one part, all tests of the entry ran and passed
    PARTLY SKIPPED    each part that ran tests of the entry skipped others of them
    SKIPPED           all tests of the entry were skipped
    NOT RUN           no part ran a test of the entry: its tests are slow, and this run left them out
    FAILED            at least one test of the entry failed
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
HEADING = "| your job | add |\n"  # of run.md's table
LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")  # of Markdown: [text](address)
SLOWEST = 30  # tests that the summary lists
WIDTH = 120  # columns


class Outcome(Enum):
    PASSED = "passed"
    SKIPPED = "skipped"
    FAILED = "failed"


@dataclass(frozen=True)
class Result:
    """Result of one test in one run of pytest."""

    part: str  # the run of pytest
    name: str  # the test's node id
    outcome: Outcome
    seconds: float
    reason: str  # why it was skipped, or ""
    rows: tuple[str, ...]  # the names in its marks row(NAME)


@dataclass(frozen=True)
class Part:
    """Results of one run of pytest, read from its JUnit XML file."""

    name: str  # of the file
    tests: tuple[Result, ...]
    left_out: int = 0  # slow tests that other runs execute
    seed: str = ""  # which share of the slow tests ran, or the value of HOLMES_TEST_FULL
    has_results: bool = True  # False: pytest ended before it wrote any
    tried_again: tuple[
        str, ...
    ] = ()  # node ids of tests that failed first, and ran again (--reruns)


@dataclass(frozen=True)
class Entry:
    """Test state of one framework or launcher of run.md's table, as the summary prints it in one line."""

    name: str
    state: str  # such as "passed" or "PARTLY SKIPPED"
    detail: str  # the failed tests, the reasons for skips, or the number of passed tests


def readme_rows(readme: str) -> list[tuple[str, ...]]:
    """Return the frameworks and launchers that run.md's table "your job" lists, one tuple for each row.

    The first cell of a row contains one or more names, sometimes after a label. For example, the cell
    "any script: torchrun, srun" becomes ("torchrun", "srun").
    """
    _, heading, text_after_heading = readme.partition(HEADING)
    if not heading:
        raise ValueError(f"docs/run.md has no table with the heading {HEADING.strip()!r}")
    table = text_after_heading.split("\n\n", maxsplit=1)[0]
    _, *lines = table.splitlines()  # the first line is the rule below the heading: | --- | --- |
    rows = []
    for line in lines:
        first_cell = line.split("|")[1]
        text = LINK.sub(r"\1", first_cell).replace("`", "").strip()  # without Markdown's markup
        names = text.rpartition(": ")[2]  # without a label
        rows.append(tuple(names.split(", ")))  # one framework or launcher for each name
    return rows


def entries_of(mark: str, rows: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the entries (frameworks and launchers) of run.md's table that the mark row(NAME) names.

    Args:
        mark: NAME. It is an entry, a part of exactly one entry ("Megatron-LM"), or the list of all
            entries in one row ("DDP, torch's pipelining").
        rows: The entries in each row of the table.

    Raises:
        ValueError: NAME occurs in no entry, or in several.
    """
    entries = [entry for row in rows for entry in row]
    if mark in entries:
        return (mark,)
    without_label = mark.rpartition(": ")[2]  # the cell of a row in README may begin with a label
    for row in rows:
        if without_label == ", ".join(row):
            return row
    containing = [entry for entry in entries if mark in entry]
    if len(containing) != 1:
        raise ValueError(
            f"row({mark!r}) names {len(containing)} entries of run.md's table 'your job'"
        )
    return (containing[0],)


def read_part(file: Path) -> Part:
    """Return the results of one run of pytest from its JUnit XML file.

    If the file does not exist, because pytest ended early, the returned Part has has_results=False.
    """
    if not file.exists():
        return Part(file.stem, tests=(), has_results=False)
    suite = ElementTree.parse(file).getroot().find("testsuite")
    assert suite is not None, file
    properties = _properties(suite)  # (name, value); the pytest plugin selection.py writes them
    tests: dict[str, Result] = {}
    tried_again = []
    for case in suite.iter("testcase"):
        test = _read_test(file.stem, case)
        # With pytest --reruns, the file has a case for each try. The last one counts.
        if test.name in tests:
            tried_again.append(test.name)
        tests[test.name] = test
    left_out = [
        int(value) for name, value in properties if name == "left_out"
    ]  # numbers of slow tests
    seeds = [value for name, value in properties if name == "seed"]
    return Part(
        name=file.stem,
        tests=tuple(tests.values()),
        left_out=sum(left_out),
        seed=seeds[0] if seeds else "",
        tried_again=tuple(tried_again),
    )


def _read_test(part: str, case: ElementTree.Element) -> Result:
    """Return the result of a test from its element <testcase> in the XML of a pytest run."""
    skipped = case.find("skipped")
    outcome = Outcome.PASSED  # unless one of the elements <failure>, <error>, <skipped> is there
    skip_reason = ""
    if case.find("failure") is not None or case.find("error") is not None:
        outcome = Outcome.FAILED
    elif skipped is not None:
        outcome = Outcome.SKIPPED
        skip_reason = _skip_reason(skipped)
    file = case.get("file") or case.get("classname", "")
    names_in_marks = tuple(value for name, value in _properties(case) if name == "row")  # row(NAME)
    return Result(
        part=part,
        name=f"{file}::{case.get('name', '')}",
        outcome=outcome,
        seconds=float(case.get("time", 0)),
        reason=skip_reason,
        rows=names_in_marks,
    )


def _skip_reason(skipped: ElementTree.Element) -> str:
    reason = skipped.get("message", "")
    if reason == "collection skipped":
        # A whole module was skipped. The text is a tuple: file, line, reason.
        reason = str(ast.literal_eval(skipped.text or "('', 0, '')")[2])
    return reason.removeprefix("Skipped: ")


def _properties(element: ElementTree.Element) -> list[tuple[str, str]]:
    found = element.findall("properties/property")
    return [(each.get("name", ""), each.get("value", "")) for each in found]


def table(parts: Iterable[Part], rows: Sequence[tuple[str, ...]]) -> list[Entry]:
    """Return the test state of each framework and launcher, in the order of run.md's table.

    Args:
        parts: Results of several runs of pytest.
        rows: The frameworks and launchers in each row of run.md's table.
    """
    tests = [test for part in parts for test in part.tests]
    tests_of: dict[str, list[Result]] = {entry: [] for row in rows for entry in row}
    for test in tests:
        for mark in test.rows:  # names in its marks row(NAME); one may stand for several entries
            for entry in entries_of(mark, rows):
                tests_of[entry].append(test)
    return [_judge(entry, tests_of_entry) for entry, tests_of_entry in tests_of.items()]


def _judge(entry: str, tests: Sequence[Result]) -> Entry:
    """Return the test state of one framework or launcher.

    Args:
        entry: Name of the framework or launcher.
        tests: Results of its tests in all runs of pytest.
    """
    failed = [test.name for test in tests if test.outcome is Outcome.FAILED]
    passed = [test for test in tests if test.outcome is Outcome.PASSED]
    reasons = "; ".join(_count_reasons(tests))  # of skips, such as "2 x no GPU"
    if not tests:
        return Entry(entry, "NOT RUN", "its tests are slow, and this run left them out")
    if failed:
        return Entry(entry, "FAILED", ", ".join(failed))
    if not passed:
        return Entry(entry, "SKIPPED", reasons)
    # A part is one run of pytest. It is enough if one part, such as the one on CPUs, ran all tests.
    skipping_parts = {test.part for test in tests if test.outcome is Outcome.SKIPPED}
    parts_without_skips = sorted({test.part for test in passed} - skipping_parts)
    if not parts_without_skips:
        return Entry(entry, "PARTLY SKIPPED", reasons)
    return Entry(entry, "passed", f"{len(passed)} tests ({', '.join(parts_without_skips)})")


def _count_reasons(tests: Iterable[Result]) -> list[str]:
    """Return the reasons for skips in words, each with its number of tests, the most frequent first.

    For example: ["3 x no GPU", "1 x no checkout"].
    """
    counts = Counter(test.reason for test in tests if test.outcome is Outcome.SKIPPED)
    return [f"{count} x {reason}" for reason, count in counts.most_common()]


def summary(parts: Sequence[Part], rows: Sequence[tuple[str, ...]]) -> str:
    """Return the text of the summary, which is printed after several runs of pytest.

    Args:
        parts: Results of the runs.
        rows: The frameworks and launchers in each row of run.md's table.
    """
    entries = table(parts, rows)  # the test state of each framework and launcher
    tests = [test for part in parts for test in part.tests]
    name_width = max(len(entry.name) for entry in entries)
    lines = ["", 'run.md\'s table "your job":']
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
    reasons = _count_reasons(
        test for test in tests if not test.rows
    )  # tests without a mark row(NAME)
    if reasons:
        lines += [f"  {reason}" for reason in reasons]
    else:
        lines.append("  none")

    # Slow tests, of which most runs execute only a part. `make nightly` executes all of them.
    left_out = sum(part.left_out for part in parts)
    seeds = sorted({part.seed for part in parts if part.seed})
    if left_out:
        lines += [
            "",
            f"Left out, as they are slow: {left_out} tests (HOLMES_TEST_SEED={', '.join(seeds)})",
        ]

    tried_again = [f"  {part.name}: {name}" for part in parts for name in part.tried_again]
    if tried_again:
        lines += ["", "Ran a second time after a failure (each is a defect to mend):", *tried_again]

    lines += ["", f"Slowest of {len(tests)} tests:"]
    slowest = sorted(tests, key=lambda test: test.seconds, reverse=True)
    lines += [f"  {test.seconds:6.1f} s  {test.part}: {test.name}" for test in slowest[:SLOWEST]]

    lines += ["", "Parts:"]  # each is one run of pytest
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
    rows = readme_rows((ROOT / "docs/run.md").read_text())
    print(summary([read_part(Path(file)) for file in files], rows))


if __name__ == "__main__":
    main(sys.argv[1:])
