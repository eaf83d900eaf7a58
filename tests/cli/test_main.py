"""cli/main.py: how any command ends when nobody reads it, when the disk is full, and when its name is misspelt."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holmes_ext.cli import main as module
from holmes_ext.cli.main import COMMANDS, main

CLUSTER = str(Path(__file__).parents[2] / "examples/clusters/two_clusters_4.toml")
PRINTING = [
    ["--help"], *([name, "--help"] for name in COMMANDS), ["discover"], ["discover", "--json"], ["doctor"], ["patches"],
    ["patches", "--json"], ["plan", "--cluster", CLUSTER, "--sizes", "pipeline=2"],
    ["plan", "--cluster", CLUSTER, "--sizes", "pipeline=2", "--json"],
]


@pytest.mark.parametrize("arguments", PRINTING, ids=lambda words: " ".join(map(os.path.basename, words)))
def test_a_closed_pipe_is_no_error(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "holmes_ext.cli.main", *arguments]
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writer)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("arguments", [["discover"], ["plan", "--cluster", CLUSTER, "--sizes", "pipeline=2", "--json"]])
def test_a_full_disk_is_one_line(arguments):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "holmes_ext.cli.main", *arguments]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert result.returncode == 2
    assert result.stderr == "holmes: the output cannot be written: No space left on device\n"


def test_a_socket_that_breaks_is_no_closed_pipe(monkeypatch):
    def parse(argv):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(module, "_parse", parse)
    with pytest.raises(BrokenPipeError):
        main([])


def test_a_misspelt_command_is_named(capsys):
    assert main(["discovr"]) == 2
    assert capsys.readouterr().err == "holmes: there is no command 'discovr'; did you mean 'discover'?\n"
    assert main(["zzz"]) == 2
    assert "known: discover, doctor" in capsys.readouterr().err
