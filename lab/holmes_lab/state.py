"""Folder of each lab on this machine. `holmes lab down` uses it to remove the remains of a crash.

The folder TMPDIR/holmes-lab-UID-OWNER-xxxxxxxx has files of the nodes, and state.json with these keys:

    owner     [pid, start time] of the process that created the lab
    keeper    [pid, start time] of the keeper, the process that owns the lab (process/keeper.py);
              [0, 0] before it has started
    source    path of the cluster.toml
    nodes     names of the nodes
    hosts     name of a node -> [[pid, start time] of the process that keeps its namespaces alive, environment
              variables of its processes]

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

from holmes_ext.document import load_json
from holmes_ext.errors import HolmesError
from holmes_ext.files import write_whole

#: Seconds in which a killed keeper must end.
_END_S = 10


#: [PID, start time] where there is no process, such as for a keeper that has not started.
NO_PROCESS = [0, 0]


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
    """Write the file state.json of a lab's folder by one rename, so that readers never see a part of it.

    Args:
        directory: Folder of the lab.
        content: The keys of the file (see the head of this module), with their values.
    """
    write_whole(directory / "state.json", json.dumps(content))


@dataclass(frozen=True)
class Found:
    """Lab of this user that `clear` has found by its folder in the folder for temporary files."""

    directory: str  # its folder
    source: str  # path of the cluster.toml
    owner: int  # PID of the process that started the lab
    owner_alive: bool  # at the time of the search
    keeper: int  # PID of the keeper, the process that owns the lab's other processes
    keeper_alive: bool  # at the time of the search
    cleared: bool = False  # whether the lab was ended and its folder removed


def clear(running_too: bool = False) -> list[Found]:
    """End all labs of this user whose creator has ended, remove their folders, and return all labs.

    Args:
        running_too: End the labs whose creator still runs as well.

    Returns:
        All labs that were found, also those that were left alone (`cleared` is false).
    """
    return [_clear_one(directory, running_too) for directory in directories()]


def _clear_one(directory: Path, running_too: bool) -> Found:
    """End one lab and remove its folder, if the process that created the lab has ended.

    Args:
        directory: Folder of the lab.
        running_too: Do so also if the process that created the lab still runs.

    Returns:
        The lab. `cleared` is false if it was left alone. `owner_alive` and `keeper_alive` say whether these
        processes ran when this function was called.
    """
    try:
        state = load_json(directory / "state.json", advice="").values
    except HolmesError:  # the owner has not written the file yet, or has ended before
        # The name is holmes-lab-UID-OWNER-xxxxxxxx (new_directory).
        _, _, _, owner_pid, _ = directory.name.split("-", maxsplit=4)
        state = {"owner": identity(int(owner_pid)), "keeper": NO_PROCESS, "source": "unknown"}
    owner = state["owner"]  # [PID, start time]
    keeper = state["keeper"]  # the same for the process that owns the lab's other processes
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
    pid, start_time = process
    return start_time != 0 and identity(pid) == process


def _end(keeper: list[int], directory: Path) -> None:
    """Kill the keeper of a lab and wait for its end. The kernel then kills all other processes of the lab.

    Args:
        keeper: [PID, start time] of the keeper, the process that owns the lab.
        directory: Folder of the lab, for the message.

    Raises:
        HolmesError: The keeper does not end within _END_S seconds.
    """
    pid, _ = keeper
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + _END_S
    while _alive(keeper):
        if time.monotonic() > deadline:
            raise HolmesError(
                f"{directory}: the lab's keeper (pid {pid}) does not end: blocked in the kernel?"
            )
        time.sleep(0.02)
