"""Processes for tests of weights: `holmes join serve`, `holmes weights receive`, and a link to cut.

Commands that end at once run in the test's process, which saves the start of another one.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

from holmes_ext.cli.main import main

_CODE = "import sys; from holmes_ext.cli.main import main; sys.exit(main(sys.argv[1:]))"


class Process:
    """A command of holmes that runs until the test ends or kills it."""

    def __init__(self, *arguments: object, home: Path, preexec=None, **variables: str):
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CODE, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**environment(home), **variables},
            preexec_fn=preexec,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._process.stdout:
            self.lines.append(line.rstrip())

    def kill(self) -> None:
        """Kill the process at once (SIGKILL)."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
        self.wait()

    def wait(self, seconds: float = 60.0) -> int:
        """Return the exit status."""
        status = self._process.wait(seconds)
        self._reader.join(5)
        self._process.stdout.close()
        return status

    @property
    def events(self) -> list[dict]:
        """Return the events of `holmes weights receive --json`."""
        return [json.loads(line) for line in list(self.lines) if line.startswith("{")]


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "XDG_STATE_HOME": str(home), "PYTHONPATH": ":".join(sys.path)}


def holmes(home: Path, *arguments: object) -> subprocess.CompletedProcess:
    """Run a command of holmes to its end, in this process."""
    command = list(map(str, arguments))
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, environment(home)),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        status = main(command)
    return subprocess.CompletedProcess(command, status, out.getvalue(), err.getvalue())


def until(condition, seconds: float = 120.0):
    """Wait until a condition holds, and return its value."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)
    return value


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


class Link:
    """Port on loopback that forwards to another one, slowly if wanted, until it is cut."""

    def __init__(self, port: int, bytes_per_second: float = 0.0):
        self._target = port
        self._rate = bytes_per_second
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._ends: list[socket.socket] = []
        self.passed = 0  # bytes towards the receiver
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._socket.accept()
            except OSError:
                return
            try:
                target = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                caller.close()
                continue
            self._ends += [caller, target]
            for pair in ((caller, target, False), (target, caller, True)):
                threading.Thread(target=self._forward, args=pair, daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, is_counted: bool) -> None:
        try:
            while data := source.recv(2**16):
                if is_counted:
                    self.passed += len(data)
                    if self._rate:
                        time.sleep(len(data) / self._rate)
                target.sendall(data)
        except OSError:
            pass
        _shut(source, target)

    def cut(self) -> None:
        """Break all connections; new ones are possible."""
        ends, self._ends = self._ends, []
        _shut(*ends)

    def close(self) -> None:
        self._socket.close()
        self.cut()


def _shut(*ends: socket.socket) -> None:
    """End connections, also for threads that wait for their bytes."""
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
