"""Tests that the output of pytest ends with a list of the tests that failed first and passed when repeated.

pytest-rerunfailures repeats failed tests (--reruns). The conftest.py of the repository adds the list.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FLAKY = """
tries = []


def test_good():
    pass


def test_flaky():
    tries.append(1)
    assert len(tries) > 1, "only the first time"
"""


def test_second_tries_are_named_last(tmp_path):
    """With --reruns, the last line of pytest's output names a repeated test and its first error.

    Without --reruns there is no such line.
    """
    pytest.importorskip("pytest_rerunfailures")
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "test_it.py").write_text(FLAKY)  # test_flaky fails only at its first try
    # conftest.py imports from tests/.
    settings = ["-p", "no:cacheprovider", "-o", f"pythonpath={ROOT / 'tests'}"]

    def run_pytest(*flags):
        command = [sys.executable, "-m", "pytest", "-q", *settings, *flags, "test_it.py"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    with_reruns = run_pytest("--reruns", "1")
    assert with_reruns.returncode == 0, with_reruns.stdout
    *_, heading, last_line = with_reruns.stdout.splitlines()  # conftest.py prints both
    assert heading.startswith("1 needed a second try")
    assert "test_it.py::test_flaky" in last_line
    assert "only the first" in last_line  # the message of the error in FLAKY

    without_reruns = run_pytest()
    assert "second try" not in without_reruns.stdout
