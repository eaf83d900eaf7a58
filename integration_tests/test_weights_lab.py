"""examples/weights/lab.py: a trainer and two sites over emulated links, one of them killed and restarted."""

import os
import subprocess
import sys

import pytest

from integration_tests.jobs import ROOT

pytest.importorskip("transformers")
VERSIONS = 5
HOSTS = ("east0", "east1", "west0", "west1")


def test_all_sites_end_at_the_same_version_bit_for_bit(tmp_path):
    command = [sys.executable, ROOT / "examples" / "weights" / "lab.py"]
    command += ["--versions", str(VERSIONS), "--folder", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert "example: the receivers of west are killed while version 4 arrives" in lines
    assert lines[-1] == f"example: all hosts have version {VERSIONS}, bit for bit; same tokens"

    published = tmp_path / "published" / str(VERSIONS)
    names = sorted(os.listdir(published))
    assert names
    for host in HOSTS:
        directory = tmp_path / host / "weights"
        assert os.readlink(directory / "current") == str(VERSIONS)
        assert sorted(os.listdir(directory / "current")) == names
        for name in names:
            copy = directory / "current" / name
            assert copy.read_bytes() == (published / name).read_bytes()
