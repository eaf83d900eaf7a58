"""The C++ compiler that builds the emulated GPU."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from holmes_ext.errors import HolmesError

#: The first g++ whose C++20 suffices for torch's headers.
OLDEST = 10


@dataclass(frozen=True)
class Compiler:
    """command: how it is called; version: its first line; processor: digest of what -march=native means here,
    so that a cache on a shared disk serves each kind of machine."""

    command: tuple[str, ...]
    version: str
    processor: str


def find_compiler() -> Compiler:
    """g++, or what CXX names; HolmesError where there is none, or one too old."""
    command = tuple(shlex.split(os.environ.get("CXX") or "g++"))
    if shutil.which(command[0]) is None:
        raise HolmesError(
            f"the emulated GPU is built with {command[0]}, which is missing: apt-get install g++ (Red"
            " Hat: dnf install gcc-c++), or name a compiler in CXX"
        )
    version = _ask(command, "--version").splitlines()[0]
    number = re.search(r"(\d+)\.\d+", version)
    if "clang" not in version and number and int(number[1]) < OLDEST:
        raise HolmesError(
            f"{command[0]} is {version}: the emulated GPU needs g++ {OLDEST} or newer; name one in CXX"
        )
    macros = _ask(command, "-march=native", "-dM", "-E", "-x", "c++", "-")
    return Compiler(command, version, hashlib.sha256(macros.encode()).hexdigest())


def _ask(command: Sequence[str], *arguments: str) -> str:
    """What it prints."""
    try:
        done = subprocess.run(
            [*command, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
    except OSError as error:
        raise HolmesError(f"the compiler {command[0]} cannot be run: {error}") from None
    if done.returncode:
        raise HolmesError(
            f"the compiler {command[0]} fails: {' '.join(done.stderr.split())[-200:]}"
        )
    return done.stdout
