"""The directory of each lab on this machine, so that `holmes lab down` finds what a crash may have left.

    TMPDIR/holmes-lab-UID-OWNER-xxxxxxxx/state.json   {"owner": [pid, start], "keeper":
                                                      [pid, start], "source", "nodes",
                                                     "hosts": {name: [[pid, start] of its holder, variables]}}
                                         hosts, sysfs/NODE/...

A pid alone may have been given to another process since; with its start time (clock ticks since boot) it is
unique.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from holmes_ext.document import write_whole
from holmes_ext.errors import HolmesError


def new_directory() -> Path:
    return Path(tempfile.mkdtemp(prefix=f"holmes-lab-{os.getuid()}-{os.getpid()}-"))


def directories() -> list[Path]:
    labs = Path(tempfile.gettempdir()).glob(f"holmes-lab-{os.getuid()}-*-*")
    return sorted(path for path in labs if _mine(path))


def _mine(path: Path) -> bool:
    try:
        status = path.lstat()
    except FileNotFoundError:  # a lab that ended meanwhile
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def identity(pid: int) -> list[int]:
    """[pid, start time] of a process; the start time is 0 when it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return [pid, 0]
    return [pid, 0 if fields[0] in "ZX" else int(fields[19])]


def record(directory: Path, **content: object) -> None:
    """Write state.json in one step."""
    write_whole(directory / "state.json", json.dumps(content))


@dataclass(frozen=True)
class Found:
    """A lab's directory: whose, whether the owner and the keeper live, and what `clear` did."""

    directory: str
    source: str
    owner: int
    owner_alive: bool
    keeper: int
    keeper_alive: bool
    cleared: bool = False


def clear(running_too: bool = False) -> list[Found]:
    """End labs whose owner is gone (`running_too`: all) and remove their files; every lab that was found."""
    return [_clear_one(directory, running_too) for directory in directories()]


def _clear_one(directory: Path, running_too: bool) -> Found:
    try:
        state = json.loads((directory / "state.json").read_text())
    except FileNotFoundError:  # the owner was about to write it, or died just then
        pid = int(directory.name.split("-")[3])
        state = {"owner": identity(pid), "keeper": [0, 0], "source": "unknown"}
    owner, keeper = state["owner"], state["keeper"]
    owner_alive, keeper_alive = _alive(owner), _alive(keeper)
    cleared = running_too or not owner_alive
    if cleared:
        if keeper_alive:
            _end(keeper, directory)
        shutil.rmtree(directory, ignore_errors=True)
    return Found(
        str(directory), state["source"], owner[0], owner_alive, keeper[0], keeper_alive, cleared
    )


def _alive(process: list[int]) -> bool:
    return process[1] != 0 and identity(process[0]) == process


def _end(keeper: list[int], directory: Path) -> None:
    """SIGKILL, which a stopped process obeys too; the kernel then ends the keeper's PID namespace."""
    os.kill(keeper[0], signal.SIGKILL)
    deadline = time.monotonic() + 10
    while _alive(keeper):
        if time.monotonic() > deadline:
            raise HolmesError(
                f"{directory}: the lab's keeper (pid {keeper[0]}) does not end: blocked in the kernel?"
            )
        time.sleep(0.02)
