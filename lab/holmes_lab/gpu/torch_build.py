"""Finds the torch that a command will import, without importing it.

The operators of the emulated GPU are compiled against this torch, and the major version of its CUDA is that
of the emulated libcudart.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holmes_ext.errors import HolmesError

#: Versions of torch that were tested with the emulated GPU -> major version of their CUDA.
TRIED = (("2.13", 13), ("2.15", 13))
#: Environment variable that allows other versions if it is "1".
UNTRIED = "HOLMES_GPU_UNTRIED"

#: Python code that prints the path of the interpreter and of torch's __init__.py (null without torch).
_FIND_SCRIPT = (
    "import importlib.util, json, sys; s = importlib.util.find_spec('torch'); "
    "print(json.dumps([sys.executable, s.origin if s else None]))"
)
_INSTALL_COMMAND = (
    "PIP_CONFIG_FILE=/dev/null pip install torch==2.13.0 (5 GB), or `make .venv-gpu` in a clone"
)
#: Bytes of a script that are searched for the interpreter in its first line.
_SHEBANG_BYTES = 256


@dataclass(frozen=True)
class TorchBuild:
    """An installed CUDA build of torch."""

    python: str  # the interpreter that imports it
    folder: Path  # of the package torch
    version: str
    cuda: tuple[int, int]  # (major, minor)
    digest: str  # identifies the build: version, CUDA version and git commit


def python_of(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return the Python interpreter that a command runs.

    It is the command's program if that is a Python, else the interpreter in the first line of the program
    (as in torchrun), else `python` or `python3` on PATH.

    Args:
        command: The command with its arguments.
        environ: The environment of the command.

    Raises:
        HolmesError: There is no such program, or no Python on PATH.
    """
    search_path = environ.get("PATH")
    path = shutil.which(command[0], path=search_path)
    if path is None:
        raise HolmesError(f"{command[0]}: no such command")
    if Path(path).name.startswith("python"):
        return path
    with open(path, "rb") as file:
        first_line = file.readline(_SHEBANG_BYTES).decode(errors="replace")
    if first_line.startswith("#!"):
        words = first_line.removeprefix("#!").split()
        if words and Path(words[0]).name.startswith("python"):
            return words[0]
    for name in ("python", "python3"):
        python = shutil.which(name, path=search_path)
        if python is not None:
            return python
    raise HolmesError(
        f"{command[0]} is no Python program, and there is no python in PATH whose torch it could use"
    )


def find_torch(python: str, environ: Mapping[str, str]) -> TorchBuild:
    """Return the torch that a Python interpreter imports.

    Args:
        python: The interpreter.
        environ: The environment of the interpreter.

    Raises:
        HolmesError: The interpreter cannot be run, has no torch or only a CPU build of it, or the emulated
            GPU was not tested with that version.
    """
    try:
        completed = subprocess.run(
            [python, "-c", _FIND_SCRIPT],
            env=dict(environ),
            capture_output=True,
            text=True,
            timeout=60,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise HolmesError(f"{python} cannot be run: {error}") from None
    if completed.returncode:
        raise HolmesError(f"{python} fails: {' '.join(completed.stderr.split())[-200:]}")
    executable, origin = json.loads(completed.stdout.splitlines()[-1])
    if origin is None:
        raise HolmesError(
            f"--gpu: {python} has no torch; install its CUDA build: {_INSTALL_COMMAND}"
        )
    folder = Path(origin).parent
    constants = _string_constants(folder / "version.py")
    if "cuda" not in constants:
        raise HolmesError(
            f"--gpu: the torch of {python} ({constants.get('__version__')}) is built for the CPU only; "
            f"install its CUDA build: {_INSTALL_COMMAND}"
        )
    version = constants["__version__"]
    cuda_version = constants["cuda"]
    cuda_major, cuda_minor = map(int, cuda_version.split(".")[:2])
    minor_version = ".".join(version.split(".")[:2])
    if (minor_version, cuda_major) not in TRIED and os.environ.get(UNTRIED) != "1":
        tried = " and ".join(f"{release} with CUDA {cuda}" for release, cuda in TRIED)
        raise HolmesError(
            f"--gpu: torch {version} with CUDA {cuda_version} was not tried, only {tried}. {UNTRIED}=1"
            " runs it all the same"
        )
    return TorchBuild(
        python=executable,
        folder=folder,
        version=version,
        cuda=(cuda_major, cuda_minor),
        digest=f"{version} {cuda_version} {constants.get('git_version')}",
    )


def _string_constants(file: Path) -> dict[str, str]:
    """Return the string constants that a Python file assigns, such as `cuda: str = '13.0'`, by name."""
    return dict(re.findall(r"^(\w+)(?:: .*?)? = '(.*?)'", file.read_text(), re.MULTILINE))
