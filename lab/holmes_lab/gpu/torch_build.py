"""Which torch a command will import, without importing it: the operators are compiled against it, and its
CUDA version decides which libcudart it links."""

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

#: (torch, CUDA) with which the emulated GPU was tried.
TRIED = (("2.13", 13), ("2.15", 13))
#: "1": run with others, too.
UNTRIED = "HOLMES_GPU_UNTRIED"

_FIND = (
    "import importlib.util, json, sys; s = importlib.util.find_spec('torch'); "
    "print(json.dumps([sys.executable, s.origin if s else None]))"
)
_ADVICE = (
    "PIP_CONFIG_FILE=/dev/null pip install torch==2.13.0 (5 GB), or `make .venv-gpu` in a clone"
)


@dataclass(frozen=True)
class TorchBuild:
    """python: the interpreter that imports it; folder: of the package; cuda: (major, minor); digest: which
    build of torch it is."""

    python: str
    folder: Path
    version: str
    cuda: tuple[int, int]
    digest: str


def python_of(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """The Python that a command runs: its first word, the one in its first line (torchrun), else `python` in
    PATH."""
    path = shutil.which(command[0], path=environ.get("PATH"))
    if path is None:
        raise HolmesError(f"{command[0]}: no such command")
    if Path(path).name.startswith("python"):
        return path
    with open(path, "rb") as file:
        first = file.readline(256).decode(errors="replace")
    interpreter = first[2:].split()[:1] if first.startswith("#!") else []
    if interpreter and Path(interpreter[0]).name.startswith("python"):
        return interpreter[0]
    python = shutil.which("python", path=environ.get("PATH")) or shutil.which(
        "python3", path=environ.get("PATH")
    )
    if python is None:
        raise HolmesError(
            f"{command[0]} is no Python program, and there is no python in PATH whose torch it could use"
        )
    return python


def find_torch(python: str, environ: Mapping[str, str]) -> TorchBuild:
    """HolmesError where that Python has none, one for the CPU, or one that was not tried."""
    try:
        done = subprocess.run(
            [python, "-c", _FIND], env=dict(environ), capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise HolmesError(f"{python} cannot be run: {error}") from None
    if done.returncode:
        raise HolmesError(f"{python} fails: {' '.join(done.stderr.split())[-200:]}")
    executable, origin = json.loads(done.stdout.splitlines()[-1])
    if origin is None:
        raise HolmesError(f"--gpu: {python} has no torch; install its CUDA build: {_ADVICE}")
    folder = Path(origin).parent
    text = (folder / "version.py").read_text()
    said = dict(re.findall(r"^(\w+)(?:: .*?)? = '(.*?)'", text, re.MULTILINE))
    if "cuda" not in said:
        raise HolmesError(
            f"--gpu: the torch of {python} ({said.get('__version__')}) is built for the CPU only; install"
            f" its CUDA build: {_ADVICE}"
        )
    major, minor = map(int, said["cuda"].split(".")[:2])
    version = said["__version__"]
    short = ".".join(version.split(".")[:2])
    if (short, major) not in TRIED and os.environ.get(UNTRIED) != "1":
        tried = " and ".join(f"{release} with CUDA {cuda}" for release, cuda in TRIED)
        raise HolmesError(
            f"--gpu: torch {version} with CUDA {said['cuda']} was not tried, only {tried}. {UNTRIED}=1"
            " runs it all the same"
        )
    digest = f"{version} {said['cuda']} {said.get('git_version')}"
    return TorchBuild(executable, folder, version, (major, minor), digest)
