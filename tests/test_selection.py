"""Checks tests/selection.py: the exhaustive tests that a run contains, and the record in its JUnit XML."""

import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest
import selection

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

@pytest.mark.row("Lightning", "DDP")
def test_always():
    pass

def test_both(exhaustive):
    pass
"""
TOTAL = 253  # tests in TESTS
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


@pytest.fixture
def run(tmp_path, monkeypatch):
    (tmp_path / "test_it.py").write_text(TESTS)
    monkeypatch.setenv("PYTHONPATH", str(selection.ROOT / "tests"))
    monkeypatch.setenv("HOLMES_TEST_SEED", "1")
    monkeypatch.delenv("HOLMES_TEST_FULL", raising=False)

    def run(*arguments, status=0, **environment):
        """Return the XML and the names of the tests that ran."""
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        command = [sys.executable, "-m", "pytest", *OPTIONS, *(arguments or ["test_it.py"])]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == status, done.stdout + done.stderr
        xml = ElementTree.parse(tmp_path / "xml")
        return xml, sorted(case.get("name") for case in xml.iter("testcase"))

    return run


def properties(element) -> list[tuple[str, str]]:
    return [
        (each.get("name"), each.get("value")) for each in element.findall("properties/property")
    ]


def test_a_landing_runs_a_tenth_that_the_seed_chooses(run):
    xml, names = run()
    left_out = TOTAL - len(names)
    assert 5 <= sum(name.startswith("test_full") for name in names) <= 40
    assert {"test_always", "test_both[sample]"} <= set(names)
    assert properties(xml.find("testsuite")) == [("left_out", str(left_out)), ("seed", "1")]
    again, same_names = run("-n", "2", "test_it.py")
    assert same_names == names
    assert properties(again.find("testsuite")) == properties(xml.find("testsuite"))
    assert run(HOLMES_TEST_SEED="2")[1] != names


def test_tests_with_a_slow_fixture_are_chosen_together(run):
    chosen = {selection.in_the_tenth("slow fixture", str(seed)): str(seed) for seed in range(50)}
    for is_chosen, seed in chosen.items():
        _, names = run(HOLMES_TEST_SEED=seed)
        assert sum(name.startswith("test_together") for name in names) == 50 * is_chosen
    assert len(chosen) == 2


def test_all_or_none(run):
    assert len(run(HOLMES_TEST_FULL="1")[1]) == TOTAL
    assert run(HOLMES_TEST_FULL="0")[1] == ["test_always", "test_both[sample]"]


def test_a_test_that_the_command_line_names_runs(run):
    assert run("test_it.py::test_full[3]", HOLMES_TEST_FULL="0")[1] == ["test_full[3]"]
    assert len(run("test_it.py::test_together", HOLMES_TEST_FULL="0")[1]) == 50
    run("test_it.py::test_ful", HOLMES_TEST_FULL="0", status=4)  # no such test


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
