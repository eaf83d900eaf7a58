"""Helpers of the lab's tests: three nodes, commands on them, and processes of this machine."""

import os
import subprocess
import sys
from pathlib import Path

from clusters import toml
from waiting import await_

from holmes_ext.cluster.spec import parse_spec

TOML = toml("a ib 2Gb/s a0,a1", "b roce 1Gb/s b0", ethernet="400Mb/s")
SPEC = parse_spec(TOML)
PATIENCE = 60.0  # seconds that a busy machine may take; nothing here asserts how fast something is


def python(code, *arguments):
    return [sys.executable, "-c", code, *arguments]


def eventually(condition, what):
    await_(condition, PATIENCE, what)


def marked(marker):
    """Return the pids of all processes, in any namespace, with `marker` in their command line."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        pid = int(path.parent.name)
        try:
            if marker.encode() in path.read_bytes() and pid != os.getpid():
                pids.append(pid)
        except OSError:  # the process has ended
            continue
    return pids


def cli(*arguments, toml, **options):
    """Start `holmes lab` as a process, in which the word FILE stands for the cluster.toml.

    The process handles Ctrl-C even if the tests run in the background, where SIGINT is ignored.
    """
    words = [str(toml) if word == "FILE" else word for word in arguments]
    command = [
        "env",
        "--default-signal=INT",
        sys.executable,
        "-m",
        "holmes_ext.cli.main",
        "lab",
        *words,
    ]
    return subprocess.Popen(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    )
