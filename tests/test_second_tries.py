"""conftest.py: what needed a second try is printed at the very end."""

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
    pytest.importorskip("pytest_rerunfailures")
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "test_it.py").write_text(FLAKY)
    plugins = ["-p", "no:cacheprovider", "-o", f"pythonpath={ROOT / 'tests'}"]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, "--reruns", "1", "test_it.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    *_, head, last = done.stdout.splitlines()
    assert (head.startswith("1 needed a second try") and "test_it.py::test_flaky" in last
            and "only the first" in last)
    command[-3:-1] = []
    assert "second try" not in subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
