"""Runs a planner in a process with a limit of CPU seconds: other work on the machine does not shorten it.

numpy, torch and OpenMP get one thread each, so that a CPU second is a second of an idle core. A process
that waits without computing ends after IDLE times the limit. Its memory is limited, too, because some
searches keep every plan.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from holmes_ext.errors import HolmesError

IDLE, MEMORY_GIB = 10, 12
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def run(command: Sequence[object], limit: float, root: Path, log: Path) -> None:
    """Run a planner's program until it ends by itself or has used its limit of CPU seconds.

    Args:
        command: Program and arguments.
        limit: CPU seconds. A program that only waits is ended after ten times as many seconds.
        root: Working directory.
        log: File for its output.

    Raises:
        HolmesError: The program has used the limit, or its exit status is not 0. The message has
            the reason.
    """

    def limits() -> None:
        """Limit CPU seconds (first SIGXCPU, 5 s later SIGKILL) and memory of the child process."""
        resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit) + 5))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_GIB << 30, MEMORY_GIB << 30))

    with log.open("w") as out:
        try:
            done = subprocess.run(
                [*map(str, command)],
                stdout=out,
                stderr=out,
                cwd=root,
                preexec_fn=limits,
                env={**os.environ, **THREADS},
                timeout=IDLE * limit,
            )
        except subprocess.TimeoutExpired:
            late = f"no plan within {limit:g} CPU s, and none after {IDLE} times as long"
            raise HolmesError(late) from None
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise HolmesError(f"no plan within {limit:g} CPU s")
    if done.returncode:
        raise HolmesError(f"its process ended with: {last_line(log)}")


def last_line(log: Path) -> str:
    """Return the last line of a log, at most 160 characters, or "nothing"."""
    return (log.read_text(errors="replace").strip().splitlines() or ["nothing"])[-1][:160]
