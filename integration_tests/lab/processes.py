"""What the tests of the lab share: three nodes, commands on them, and looking at the machine's processes."""

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
    """Pids, in any namespace, of processes with `marker` in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker.encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def cli(*arguments, toml, **options):
    """`holmes lab` as a process of its own, which heeds Ctrl-C also where the tests themselves run in the
    background.
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
