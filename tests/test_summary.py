"""Tests tests/summary.py, which prints which supported frameworks several runs of pytest have tested.

run.md's table "your job" lists the frameworks and launchers, its entries. A test with the mark row(NAME)
tests the entry NAME. The summary reads marks and outcomes from the JUnit XML of the runs.
"""

import os
import subprocess
import sys

import pytest
import summary
from summary import Outcome, Part, Result, entries_of, read_part, readme_rows, table

#: The entries in each row of run.md's table.
README = readme_rows((summary.ROOT / "docs/run.md").read_text())
#: The entries in each row of a table for TESTS.
ROWS = [("torchrun", "srun"), ("Megatron-LM's pretrain_gpt.py",), ("DDP", "torch's pipelining")]
#: A file of tests: one for each state that the summary may print.
TESTS = """
import pytest
tries = []

@pytest.mark.row("torchrun")
def test_passes():
    pass

@pytest.mark.row("torchrun", "DDP")
def test_flaky():
    tries.append(1)
    assert len(tries) > 1

@pytest.mark.row("Megatron-LM")
@pytest.mark.skip(reason="no checkout")
def test_skipped():
    pass

@pytest.mark.row("srun")
def test_fails():
    assert False

@pytest.mark.skipif(True, reason="no GPU")
@pytest.mark.parametrize("number", range(3))
def test_other(number):
    pass

@pytest.mark.full
@pytest.mark.row("torch's pipelining")
def test_exhaustive():
    pass
"""


PYTEST_OPTIONS = (
    "-q",
    *("-p", "no:cacheprovider"),
    *("-p", "selection"),  # tests/selection.py, the plugin that writes the marks into the XML
    *("-o", "junit_family=xunit1"),
    *("--reruns", "1"),  # test_flaky passes in its second try
)


def test_the_summary_of_a_real_run(tmp_path):
    """Run pytest on files with passing, skipped and failing tests, and check the summary of the run.

    The tests have marks row(NAME), which name the launchers and frameworks in ROWS.
    """
    (tmp_path / "test_it.py").write_text(TESTS)
    skipped_module = "import pytest\npytest.importorskip('not_installed')\n"
    (tmp_path / "test_module.py").write_text(skipped_module)
    environment = {
        "PYTHONPATH": str(summary.ROOT / "tests"),
        "HOLMES_TEST_FULL": "0",  # leaves out slow tests, such as test_exhaustive
        "PATH": "/usr/bin",
    }
    command = [sys.executable, "-m", "pytest", *PYTEST_OPTIONS, "--junitxml=part.xml"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    some_tests_failed = 1
    assert result.returncode == some_tests_failed, result.stdout + result.stderr

    part = read_part(tmp_path / "part.xml")  # the results of the run
    entries = {entry.name: (entry.state, entry.detail) for entry in table([part], ROWS)}
    assert entries == {
        "torchrun": ("passed", "2 tests (part)"),
        "srun": ("FAILED", "test_it.py::test_fails"),
        "Megatron-LM's pretrain_gpt.py": ("SKIPPED", "1 x no checkout"),
        "DDP": ("passed", "1 tests (part)"),
        "torch's pipelining": ("NOT RUN", "its tests are slow, and this run left them out"),
    }
    part_without_xml = read_part(tmp_path / "missing.xml")
    text = summary.summary([part, part_without_xml], ROWS)
    assert "\n  3 x no GPU\n" in text  # three tests were skipped for this reason
    assert "could not import 'not_installed'" in text
    # "0" is the value of HOLMES_TEST_FULL.
    assert "Left out, as they are slow: 1 tests (HOLMES_TEST_SEED=0)" in text
    assert "  part               2 passed, 5 skipped, 1 failed;" in text
    assert "  missing            NO RESULTS" in text


def test_the_summary_names_second_tries(tmp_path):
    pytest.importorskip("pytest_rerunfailures")
    flaky = "tries = []\ndef test_flaky():\n    tries.append(1)\n    assert len(tries) > 1\n"
    (tmp_path / "test_it.py").write_text(f"{flaky}def test_good():\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "--reruns=1", "-o", "junit_family=xunit1"]
    result = subprocess.run(
        [*command, "--junitxml=part.xml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout
    part = read_part(tmp_path / "part.xml")
    assert part.tried_again == ("test_it.py::test_flaky",)
    assert len(part.tests) == 2
    lines = summary.summary([part], ROWS).splitlines()
    heading = lines.index("Ran a second time after a failure (each is a defect to mend):")
    assert lines[heading + 1] == "  part: test_it.py::test_flaky"


def part_of(name: str, outcomes: list[Outcome]) -> Part:
    """Return the results of a run of pytest: one test of DDP with each of these outcomes."""
    results = []
    for number, outcome in enumerate(outcomes):
        result = Result(
            part=name,
            name=str(number),
            outcome=outcome,
            seconds=0.0,
            reason="over gloo only",
            rows=("DDP",),
        )
        results.append(result)
    return Part(name, tests=tuple(results))


@pytest.mark.parametrize(
    "outcomes_by_part, state",
    [
        ({"gloo": [Outcome.PASSED, Outcome.PASSED], "nccl": [Outcome.SKIPPED]}, "passed"),
        ({"gloo": [Outcome.PASSED, Outcome.SKIPPED]}, "PARTLY SKIPPED"),
        ({"gloo": [Outcome.PASSED, Outcome.SKIPPED], "nccl": [Outcome.SKIPPED]}, "PARTLY SKIPPED"),
        ({"gloo": [Outcome.SKIPPED], "nccl": [Outcome.SKIPPED]}, "SKIPPED"),
        ({"gloo": [Outcome.PASSED], "nccl": [Outcome.FAILED]}, "FAILED"),
    ],
)
def test_an_entry_passes_where_a_part_runs_all_its_tests(outcomes_by_part, state):
    parts = [part_of(name, outcomes) for name, outcomes in outcomes_by_part.items()]
    (entry,) = table(parts, [("DDP",)])
    assert entry.state == state


def test_the_entries_of_readmes_table():
    entries = [entry for row in README for entry in row]
    assert len(set(entries)) == len(entries) >= 21
    some_entries = {"torchrun", "deepspeed", "Megatron-LM's pretrain_gpt.py", "torchtitan", "FSDP1"}
    assert some_entries <= set(entries)


def test_what_a_mark_names():
    assert entries_of("DDP", README) == ("DDP",)
    assert entries_of("deepspeed", README) == ("deepspeed",)
    assert entries_of("Megatron-LM", README) == ("Megatron-LM's pretrain_gpt.py",)
    assert entries_of("DDP, torch's pipelining", README) == ("DDP", "torch's pipelining")
    assert entries_of("any script: torchrun, srun, mpirun, deepspeed", README)[1] == "srun"
    for ambiguous in ("Megatron", "TensorFlow"):
        with pytest.raises(ValueError, match="names . entries"):
            entries_of(ambiguous, README)


#: Prints "row NAME" for each mark row(NAME) of all tests of the files on its command line.
COLLECT = """
import sys, pytest

class Marks:
    def pytest_collection_finish(self, session):
        for item in session.items:
            for mark in item.iter_markers("row"):
                print(*(f"row {name}" for name in mark.args), sep="\\n")

options = ["--collect-only", "-q", "-p", "no:cacheprovider"]
sys.exit(pytest.main([*options, *sys.argv[1:]], plugins=[Marks()]))
"""


def test_each_entry_of_readmes_table_has_a_test():
    """Each framework and launcher in run.md's table "your job" has a test with its mark row(NAME)."""
    root = summary.ROOT
    files = [
        *root.glob("tests/patches/torch/test_*.py"),
        *root.glob("integration_tests/**/test_*.py"),
    ]
    files_with_marks = [str(path) for path in files if "mark.row(" in path.read_text()]
    environment = {**os.environ, "HOLMES_TEST_FULL": "1"}  # collect slow tests, too
    # COLLECT is a program that collects the tests, and prints "row NAME" for each mark row(NAME).
    command = [sys.executable, "-c", COLLECT, *files_with_marks]
    result = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    marks = {line[len("row ") :] for line in result.stdout.splitlines() if line.startswith("row ")}

    tested_entries = set()
    for mark in marks:
        tested_entries.update(entries_of(mark, README))
    # README: for each row of the table, a tuple of its entries.
    missing = [entry for row in README for entry in row if entry not in tested_entries]
    assert not missing, f"no test has the mark row(NAME) of {missing}"
