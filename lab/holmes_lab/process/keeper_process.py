"""Start of a lab's keeper, and requests to it, in the process that created the lab.

The keeper (process/keeper.py) is the process that owns all other processes of a lab.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import holmes_ext
import holmes_lab
from holmes_ext.errors import HolmesError
from holmes_lab.process import wire
from holmes_lab.rights import denied

_KEEPER_BOOT = """
import os
import sys
sys.path[:0] = sys.argv[1].split(os.pathsep)
from holmes_lab.process.keeper import main
main(sys.argv[2:])
"""
#: Folders with the packages holmes_lab and holmes_ext, for Pythons that the lab starts.
PACKAGE_FOLDERS = os.pathsep.join(
    str(Path(package.__file__ or "").parents[1]) for package in (holmes_lab, holmes_ext)
)


class KeeperProcess:
    """Running keeper of a lab, the process that owns all other processes of the lab."""

    def __init__(self, directory: Path):
        """Start the keeper, the process that owns all other processes of a lab (process/keeper.py).

        It ends, and the lab with it, when this process ends or calls close().

        Args:
            directory: Folder of the lab, for keeper.log. The keeper removes the folder at its end.
        """
        self.directory = directory
        self._control, theirs = wire.pair()
        caller = os.pidfd_open(os.getpid())  # by this, the keeper sees the end of this process
        with open(directory / "keeper.log", "w") as log:
            boot = [sys.executable, "-I", "-S", "-c", _KEEPER_BOOT, PACKAGE_FOLDERS]
            self._process = subprocess.Popen(
                [*boot, str(theirs.fileno()), str(caller), str(directory)],
                pass_fds=(theirs.fileno(), caller),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        theirs.close()
        os.close(caller)

    @property
    def pid(self) -> int:
        """PID of the keeper, the process that owns all other processes of the lab."""
        return self._process.pid

    def wait_until_ready(self) -> int:
        """Wait until the lab's PID namespace exists, and return the PID of its init process.

        The keeper, the process that owns all other processes of the lab, creates it.

        Raises:
            HolmesError: This machine lacks a right. The message names it.
        """
        answer = self._answer()
        if "denied" in answer:
            raise HolmesError(denied(answer["denied"]))
        return answer["init"]

    def ask(self, do: str, descriptors: Sequence[int] = (), **arguments: Any) -> dict[str, Any]:
        """Call a method Keeper.do_NAME in the keeper, the process that owns the lab.

        Args:
            do: NAME of the method.
            descriptors: File descriptors that are passed as its first arguments.
            arguments: Its keyword arguments.

        Returns:
            The result of the method.

        Raises:
            HolmesError: The method failed, or the keeper has ended.
        """
        # If the keeper has ended, _answer() raises an error with the reason.
        with suppress(BrokenPipeError, ConnectionResetError):
            wire.send(self._control, {"do": do, **arguments}, descriptors)
        answer = self._answer()
        # The request failed if there is an error without an exit status. With a status, "error" is
        # the stderr of the program that Keeper.do_tool has run.
        if "error" in answer and "status" not in answer:
            raise HolmesError(f"lab: {answer['error']}")
        return answer

    def close(self) -> None:
        """End all processes of the lab, and the keeper process that owns them; wait for their end."""
        self._control.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        """Return the next message of the keeper, the process that owns all processes of the lab.

        Raises:
            HolmesError: The keeper has ended. The message has the last line of its log, keeper.log.
        """
        message, _ = wire.receive(self._control)
        if message is None:
            log = self.directory / "keeper.log"
            lines = log.read_text().strip().splitlines() if log.exists() else []
            reason = lines[-1] if lines else "it was killed"
            raise HolmesError(f"the lab's keeper (pid {self.pid}) has ended: {reason}")
        return message
