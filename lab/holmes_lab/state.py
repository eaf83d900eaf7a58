"""Folder of each lab on this machine, with which `holmes lab down` removes the remains of a crash.

The folder TMPDIR/holmes-lab-UID-OWNER-xxxxxxxx has files of the nodes, and state.json with these keys:

    owner     [pid, start time] of the process that created the lab
    keeper    [pid, start time] of the lab's keeper (process/keeper.py)
    source    path of the cluster.toml
    nodes     names of the nodes
    hosts     name of a host -> [[pid, start time] of the process that holds its namespaces, variables]

The PID of a process that has ended may belong to another one. Together with the start time (clock ticks since
boot), it is unique.
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

#: Seconds in which a killed keeper must end.
_END_S = 10


def new_directory() -> Path:
    """Create and return a folder for a lab of this process."""
    return Path(tempfile.mkdtemp(prefix=f"holmes-lab-{os.getuid()}-{os.getpid()}-"))


def directories() -> list[Path]:
    """Return the folders of all labs of this user."""
    labs = Path(tempfile.gettempdir()).glob(f"holmes-lab-{os.getuid()}-*-*")
    return sorted(path for path in labs if _mine(path))


def _mine(path: Path) -> bool:
    """Return whether a path is a folder of this user."""
    try:
        status = path.lstat()
    except FileNotFoundError:  # a lab that ended meanwhile
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def identity(pid: int) -> list[int]:
    """Return [PID, start time] of a process. The start time is 0 if the process has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return [pid, 0]
    # Behind the name in parentheses come the state (Z, X: has ended) and, as the 20th field, the start time.
    return [pid, 0 if fields[0] in "ZX" else int(fields[19])]


def record(directory: Path, **content: object) -> None:
    """Write state.json so that readers never see a part of it."""
    write_whole(directory / "state.json", json.dumps(content))


@dataclass(frozen=True)
class Found:
    """Lab whose folder was found."""

    directory: str
    source: str  # path of the cluster.toml
    owner: int  # PID of the process that started the lab
    owner_alive: bool
    keeper: int  # PID of the lab's keeper
    keeper_alive: bool
    cleared: bool = False  # `clear` has ended the lab and removed its folder


def clear(running_too: bool = False) -> list[Found]:
    """End labs whose owner has ended, remove their folders, and return all labs that were found.

    Args:
        running_too: End all other labs as well.
    """
    return [_clear_one(directory, running_too) for directory in directories()]


def _clear_one(directory: Path, running_too: bool) -> Found:
    """End the lab of a folder and remove the folder if its owner has ended or `running_too`."""
    try:
        state = json.loads((directory / "state.json").read_text())
    except FileNotFoundError:  # the owner has not written the file yet, or has ended before
        pid = int(directory.name.split("-")[3])
        state = {"owner": identity(pid), "keeper": [0, 0], "source": "unknown"}
    owner = state["owner"]
    keeper = state["keeper"]
    owner_alive = _alive(owner)
    keeper_alive = _alive(keeper)
    cleared = running_too or not owner_alive
    if cleared:
        if keeper_alive:
            _end(keeper, directory)
        shutil.rmtree(directory, ignore_errors=True)
    return Found(
        directory=str(directory),
        source=state["source"],
        owner=owner[0],
        owner_alive=owner_alive,
        keeper=keeper[0],
        keeper_alive=keeper_alive,
        cleared=cleared,
    )


def _alive(process: list[int]) -> bool:
    """Return whether the process with this [PID, start time] is running."""
    return process[1] != 0 and identity(process[0]) == process


def _end(keeper: list[int], directory: Path) -> None:
    """Kill the keeper of a lab and wait for its end. The kernel then ends its PID namespace.

    Raises:
        HolmesError: the keeper does not end within _END_S seconds.
    """
    os.kill(keeper[0], signal.SIGKILL)
    deadline = time.monotonic() + _END_S
    while _alive(keeper):
        if time.monotonic() > deadline:
            raise HolmesError(
                f"{directory}: the lab's keeper (pid {keeper[0]}) does not end: blocked in the kernel?"
            )
        time.sleep(0.02)
