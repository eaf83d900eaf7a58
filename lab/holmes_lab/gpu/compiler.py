"""Finds the C++ compiler that builds the emulated GPU."""

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

#: Oldest major version of g++ that compiles torch's headers (C++20).
OLDEST = 10


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler."""

    command: tuple[str, ...]  # program and arguments, such as ("ccache", "g++")
    version: str  # first line of --version
    #: Digest of the macros that -march=native defines. With it, a cache on a shared disk serves machines with
    #: different processors.
    processor: str


def find_compiler() -> Compiler:
    """Return the compiler that the environment variable CXX names, or g++.

    Its version and the instruction sets of this machine's processor become parts of the digests
    that identify built libraries in the cache. Other processors then get builds of their own.

    Raises:
        HolmesError: The compiler is missing, fails or is too old.
    """
    command = tuple(shlex.split(os.environ.get("CXX") or "g++"))
    if shutil.which(command[0]) is None:
        raise HolmesError(
            f"the emulated GPU is built with {command[0]}, which is missing: apt-get install g++ (Red"
            " Hat: dnf install gcc-c++), or name a compiler in CXX"
        )
    version = _run(command, "--version").splitlines()[0]
    major_version = re.search(r"(\d+)\.\d+", version)
    if "clang" not in version and major_version and int(major_version[1]) < OLDEST:
        raise HolmesError(
            f"{command[0]} is {version}: the emulated GPU needs g++ {OLDEST} or newer; name one in CXX"
        )
    # -march=native defines a macro for each instruction set of this machine's processor.
    macros = _run(command, "-march=native", "-dM", "-E", "-x", "c++", "-")
    processor = hashlib.sha256(macros.encode()).hexdigest()
    return Compiler(command, version, processor)


def _run(command: Sequence[str], *arguments: str) -> str:
    """Run the compiler with empty standard input, and return its standard output.

    Raises:
        HolmesError: The compiler cannot be run or fails.
    """
    try:
        completed = subprocess.run(
            [*command, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
    except OSError as error:
        raise HolmesError(f"the compiler {command[0]} cannot be run: {error}") from None
    if completed.returncode:
        message = " ".join(completed.stderr.split())
        raise HolmesError(f"the compiler {command[0]} fails: {message[-200:]}")
    return completed.stdout
