"""tests/summary.py: the table that a run ends with, from the XML of real runs of pytest."""

import os
import subprocess
import sys

import pytest
import summary
from summary import Outcome, Part, Result, entries_of, read_part, readme_rows, table

README = readme_rows((summary.ROOT / "README.md").read_text())
ROWS = [("torchrun", "srun"), ("Megatron-LM's pretrain_gpt.py",), ("DDP", "torch's pipelining")]
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


def test_the_summary_of_a_real_run(tmp_path):
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "test_module.py").write_text(
        "import pytest\npytest.importorskip('not_installed')\n"
    )
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "selection",
        "-o",
        "junit_family=xunit1",
        "--reruns",
        "1",
    ]
    environment = {
        "PYTHONPATH": str(summary.ROOT / "tests"),
        "HOLMES_TEST_FULL": "0",
        "PATH": "/usr/bin",
    }
    command = [sys.executable, "-m", "pytest", *options, "--junitxml=part.xml"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr

    part = read_part(tmp_path / "part.xml")
    entries = {entry.name: (entry.state, entry.detail) for entry in table([part], ROWS)}
    assert entries == {
        "torchrun": ("passed", "2 tests (part)"),
        "srun": ("FAILED", "test_it.py::test_fails"),
        "Megatron-LM's pretrain_gpt.py": ("SKIPPED", "1 x no checkout"),
        "DDP": ("passed", "1 tests (part)"),
        "torch's pipelining": ("NOT RUN", "no part of this run has a test of it"),
    }
    text = summary.summary([part, read_part(tmp_path / "missing.xml")], ROWS)
    assert "\n  3 x no GPU\n" in text
    assert "could not import 'not_installed'" in text
    assert "Left to make nightly: 1 exhaustive tests (HOLMES_TEST_SEED=0)" in text
    assert "  part               2 passed, 5 skipped, 1 failed;" in text
    assert "  missing            NO RESULTS" in text


def result(part: str, name: str, outcome: Outcome, row: str = "DDP") -> Result:
    return Result(
        part=part, name=name, outcome=outcome, seconds=0.0, reason="over gloo only", rows=(row,)
    )


@pytest.mark.parametrize(
    "outcomes, state",
    [
        ({"gloo": [Outcome.PASSED, Outcome.PASSED], "nccl": [Outcome.SKIPPED]}, "passed"),
        ({"gloo": [Outcome.PASSED, Outcome.SKIPPED]}, "PARTLY SKIPPED"),
        ({"gloo": [Outcome.PASSED, Outcome.SKIPPED], "nccl": [Outcome.SKIPPED]}, "PARTLY SKIPPED"),
        ({"gloo": [Outcome.SKIPPED], "nccl": [Outcome.SKIPPED]}, "SKIPPED"),
        ({"gloo": [Outcome.PASSED], "nccl": [Outcome.FAILED]}, "FAILED"),
    ],
)
def test_an_entry_passes_where_a_part_runs_all_its_tests(outcomes, state):
    parts = [
        Part(
            name, tuple(result(name, str(number), outcome) for number, outcome in enumerate(found))
        )
        for name, found in outcomes.items()
    ]
    (entry,) = table(parts, [("DDP",)])
    assert entry.state == state


def test_the_entries_of_readmes_table():
    entries = [entry for row in README for entry in row]
    assert len(set(entries)) == len(entries) >= 21
    assert {"torchrun", "deepspeed", "Megatron-LM's pretrain_gpt.py", "torchtitan", "FSDP1"} <= set(
        entries
    )


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
    """Each entry has a test with its mark, which may be an exhaustive one of `make nightly`."""
    root = summary.ROOT
    files = [
        *root.glob("tests/patches/torch/test_*.py"),
        *root.glob("integration_tests/**/test_*.py"),
    ]
    marked = [str(path) for path in files if "mark.row(" in path.read_text()]
    command = [sys.executable, "-c", COLLECT, *marked]
    environment = {**os.environ, "HOLMES_TEST_FULL": "1"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    marks = {
        line.removeprefix("row ") for line in done.stdout.splitlines() if line.startswith("row ")
    }
    covered = {entry for mark in marks for entry in entries_of(mark, README)}
    missing = [entry for row in README for entry in row if entry not in covered]
    assert not missing, f"no test has the mark row(NAME) of {missing}"
