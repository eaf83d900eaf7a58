"""lab/state.py: what `holmes lab down` finds and clears."""

import os
import subprocess
import sys
import tempfile

import pytest
from holmes_lab import state


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def dead_process():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return [process.pid, 1]


def lab(owner, keeper):
    directory = state.new_directory()
    (directory / "sysfs/a0").mkdir(parents=True)
    state.record(directory, owner=owner, keeper=keeper, source="x.toml", nodes=["a0"])
    return directory


def test_nothing_to_clear():
    assert state.clear() == []


def test_a_lab_in_use_is_left_alone():
    directory = lab(state.identity(os.getpid()), [0, 0])
    (found,) = state.clear()
    assert (
        not found.cleared
        and found.owner_alive
        and found.owner == os.getpid()
        and directory.exists()
    )


def test_files_of_a_dead_lab_are_removed():
    directory = lab(dead_process(), dead_process())
    (found,) = state.clear()
    assert (
        found.cleared
        and not found.keeper_alive
        and found.source == "x.toml"
        and not directory.exists()
    )


def test_an_orphaned_keeper_is_ended(sleeper):
    directory = lab(dead_process(), state.identity(sleeper.pid))
    (found,) = state.clear()
    assert found.cleared and found.keeper_alive and not directory.exists()
    assert sleeper.wait(10) == -9


def test_a_pid_that_was_given_to_another_process_is_not_touched(sleeper):
    pid, start = state.identity(sleeper.pid)
    directory = lab(dead_process(), [pid, start - 1])
    (found,) = state.clear()
    assert found.cleared and not found.keeper_alive and not directory.exists()
    assert sleeper.poll() is None


def test_all_clears_labs_in_use(sleeper):
    directory = lab(state.identity(os.getpid()), state.identity(sleeper.pid))
    (found,) = state.clear(running_too=True)
    assert found.cleared and not directory.exists() and sleeper.wait(10) == -9


def test_a_directory_without_a_record_belongs_to_the_pid_in_its_name():
    directory = state.new_directory()
    (found,) = state.clear()
    assert not found.cleared and directory.exists()
    orphan = directory.with_name(f"holmes-lab-{os.getuid()}-{dead_process()[0]}-xyz")
    directory.rename(orphan)
    (found,) = state.clear()
    assert found.cleared and not orphan.exists()
