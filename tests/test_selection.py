"""Tests the pytest plugin tests/selection.py, which decides how many of the slow tests run.

Slow tests have the mark `full`, or are recorded in a file with their seconds. By default, only a share of
them runs, which the variable HOLMES_TEST_SEED determines. The tests below run pytest with the plugin on a
file that contains TESTS.
"""

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from typing import NamedTuple

import pytest
import selection
import slow_tests
from summary import Outcome, Result

TESTS = """
import pytest

@pytest.mark.parametrize("number", range(200))
@pytest.mark.full
def test_full(number):
    pass

@pytest.mark.parametrize("number", range(50))
@pytest.mark.full(together="slow fixture")
def test_together(number):
    pass

@pytest.mark.parametrize("number", range(80))
@pytest.mark.full(share=4)
def test_share(number):
    pass

@pytest.mark.parametrize("number", range(30))
def test_turn(number):
    pass

TURNS = [pytest.param(turn, marks=pytest.mark.full(turn=turn, share=3)) for turn in range(9)]

@pytest.mark.parametrize("turn", TURNS)
def test_marked_turn(turn):
    pass

@pytest.mark.each_landing
def test_each_landing():
    pass

@pytest.mark.row("Lightning", "DDP")
def test_always():
    pass

def test_both(exhaustive):
    pass
"""
TOTAL = 373  # tests in TESTS
#: Seconds of slow tests in TESTS. Each has other seconds, so the order of their turns is that of the numbers.
RECORD = {f"test_it.py::test_turn[{number}]": 100.0 - number for number in range(30)}
RECORD["test_it.py::test_each_landing"] = 50.5
#: Makes the plugin read another record of slow tests than that of this repository.
CONFTEST = """
import pathlib
import selection
selection.RECORD = pathlib.Path("slow_tests.json")
"""
OPTIONS = (
    "-q",
    "-p",
    "no:cacheprovider",
    "-p",
    "selection",
    "-o",
    "junit_family=xunit1",
    "--junitxml=xml",
)


class PytestRun(NamedTuple):
    """Outcome of a run of pytest on TESTS."""

    xml: ElementTree.ElementTree  # the JUnit XML
    names: list[str]  # sorted, of the tests that ran


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that runs pytest on a file with TESTS, and returns a PytestRun."""
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "slow_tests.json").write_text(json.dumps(RECORD))
    monkeypatch.setenv("PYTHONPATH", str(selection.ROOT / "tests"))
    monkeypatch.setenv("HOLMES_TEST_SEED", "1")  # determines which share of the slow tests runs
    monkeypatch.delenv("HOLMES_TEST_FULL", raising=False)  # which selects all slow tests, or none

    def run_pytest(*arguments, status=0, **environment):
        """Run pytest with environment variables, and check its exit status."""
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        command = [sys.executable, "-m", "pytest", *OPTIONS, *(arguments or ["test_it.py"])]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == status, result.stdout + result.stderr
        xml = ElementTree.parse(tmp_path / "xml")  # the JUnit XML: OPTIONS has --junitxml=xml
        names = sorted(case.get("name") for case in xml.iter("testcase"))
        return PytestRun(xml, names)

    return run_pytest


def properties(element) -> list[tuple[str, str]]:
    found = element.findall("properties/property")
    return [(each.get("name"), each.get("value")) for each in found]


def count(names, prefix):
    return sum(name.startswith(prefix) for name in names)


def test_a_landing_runs_a_share_that_the_seed_chooses(run):
    xml, names = run()
    assert 1 <= count(names, "test_full") <= 20  # of 200, about one of 30
    assert 10 <= count(names, "test_share") <= 35  # of 80, about one of 4
    assert {"test_always", "test_both[sample]"} <= set(names)
    left_out = TOTAL - len(names)
    assert properties(xml.find("testsuite")) == [("left_out", str(left_out)), ("seed", "1")]

    in_two_processes = run("-n", "2", "test_it.py")  # by pytest-xdist
    assert in_two_processes.names == names
    assert properties(in_two_processes.xml.find("testsuite")) == properties(xml.find("testsuite"))
    assert run(HOLMES_TEST_SEED="2").names != names


def test_tests_with_a_slow_fixture_are_chosen_together(run):
    seed_by_choice = {}  # a seed that selects the 50 tests, and one that does not
    for seed in map(str, range(500)):
        seed_by_choice[selection.is_in_selected_share("slow fixture", seed)] = seed
    for is_chosen, seed in seed_by_choice.items():
        names = run(HOLMES_TEST_SEED=seed).names
        assert count(names, "test_together") == (50 if is_chosen else 0)
    assert len(seed_by_choice) == 2


def test_all_or_none(run):
    assert len(run(HOLMES_TEST_FULL="1").names) == TOTAL
    names = run(HOLMES_TEST_FULL="0").names  # all but those with the mark `full`
    assert [name for name in names if not name.startswith("test_turn")] == [
        "test_always",
        "test_both[sample]",
        "test_each_landing",
    ]
    assert count(names, "test_turn") == 30


def test_slow_tests_take_turns(run):
    """Each slow test runs with one seed of three kinds, and each seed runs a third of them."""
    names_by_kind = {}  # of seeds that run different tests
    for seed in map(str, range(20)):
        kind = next(turn for turn in range(3) if selection.is_its_turn(turn, seed, share=3))
        if kind not in names_by_kind:
            names_by_kind[kind] = run(HOLMES_TEST_SEED=seed).names
    for prefix, number_of_tests in (("test_turn", 30), ("test_marked_turn", 9)):
        ran = [
            name for names in names_by_kind.values() for name in names if name.startswith(prefix)
        ]
        assert len(ran) == len(set(ran)) == number_of_tests
        for names in names_by_kind.values():
            assert count(names, prefix) == number_of_tests / 3
    for names in names_by_kind.values():
        assert "test_each_landing" in names


def test_the_record_follows_the_last_run():
    """A slow test is added, one that has become quick is removed, and one that did not run stays."""
    file = "tests/test_selection.py"
    record = {f"{file}::stays": 7.0, f"{file}::became_quick": 8.0, "tests/test_gone.py::test": 9.0}
    results = [
        result_of(f"{file}::became_quick", 1.0),
        result_of(f"{file}::is_new", 6.04),
        result_of(f"{file}::is_new", 5.0),  # over NCCL
        result_of(f"{file}::failed", 60.0, Outcome.FAILED),
    ]
    assert slow_tests.updated(record, results) == {f"{file}::is_new": 6.0, f"{file}::stays": 7.0}


def result_of(name, seconds, outcome=Outcome.PASSED):
    return Result("part", name, outcome, seconds, reason="", rows=())


def test_a_test_that_the_command_line_names_runs(run):
    assert run("test_it.py::test_full[3]", HOLMES_TEST_FULL="0").names == ["test_full[3]"]
    assert len(run("test_it.py::test_together", HOLMES_TEST_FULL="0").names) == 50
    run("test_it.py::test_ful", HOLMES_TEST_FULL="0", status=4)  # pytest's status for: no such test


def test_the_xml_names_the_rows_of_a_test(run):
    xml, _ = run("test_it.py::test_always")
    (case,) = xml.iter("testcase")
    assert properties(case) == [("row", "Lightning"), ("row", "DDP")]
    assert case.get("file") == "test_it.py" and float(case.get("time")) >= 0


def test_the_seed_is_the_commit(monkeypatch):
    monkeypatch.delenv("HOLMES_TEST_SEED", raising=False)
    selection.seed.cache_clear()
    command = ["git", "-C", str(selection.ROOT), "rev-parse", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True)
    commit = found.stdout.strip() or "0"
    assert commit.startswith(selection.seed())
    selection.seed.cache_clear()
