"""Clones the git repositories of Megatron-LM, Megatron-DeepSpeed and NCCL, and finds the clones.

The tests and benchmarks run the unmodified training scripts of both Megatrons, and compile NCCL's source.

    python tests/checkouts.py        clone each repository that is missing (`make checkouts`)

PINNED lists the repositories and the commits at which they are checked out. The folder of the Megatrons is
$HOLMES_CHECKOUTS, by default ~/.cache/holmes_ext/checkouts. An existing checkout is never changed. If a clone
fails, the program prints where to put a checkout instead, and exits with status 1.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "HOLMES_CHECKOUTS"
REACHABLE_S = 20  # seconds after which a server counts as unreachable
CLONE_S = 900  # seconds after which a clone is given up


def checkouts_folder() -> Path:
    """Return the folder for the checkouts of Megatron-LM and Megatron-DeepSpeed. It need not exist."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get(VARIABLE) or cache / "holmes_ext" / "checkouts").absolute()


def find_checkout(name: str) -> Path | None:
    """Return the folder of the checkout "Megatron-LM" or "Megatron-DeepSpeed".

    Returns:
        None if the checkout does not exist, or does not contain the script pretrain_gpt.py.
    """
    folder = checkouts_folder() / name
    return folder if (folder / "pretrain_gpt.py").is_file() else None


def why_missing(name: str) -> str:
    """Return a message: that there is no checkout of this repository, and which command makes one."""
    return f"no checkout of {name} in {checkouts_folder()}: make checkouts"


def checkout_or_skip(name: str) -> Path:
    """Return the folder of the checkout "Megatron-LM" or "Megatron-DeepSpeed".

    If the checkout does not exist, skip the test that is running.
    """
    import pytest  # the benchmarks use this module without pytest

    folder = find_checkout(name)
    if folder is None:
        pytest.skip(why_missing(name))
    return folder


@dataclass(frozen=True)
class Source:
    """Git repository that the tests need, and the commit at which they need it."""

    name: str
    url: str
    commit: str  # the full hash: a tag can be moved
    known_as: str  # the commit in words, such as a tag or a date
    expected_file: str  # relative path of a file that every checkout contains
    nccl_version: str | None = None  # set if holmes_ext looks for this NCCL in a folder of its own

    def folder(self) -> Path:
        """Return the folder in which the tests look for a checkout of this repository."""
        if self.name.startswith("NCCL"):
            return _nccl_folder(self.nccl_version)
        return checkouts_folder() / self.name


#: The commits that the tests were last run with.
PINNED = (
    Source(
        name="Megatron-LM",
        url="https://github.com/NVIDIA/Megatron-LM",
        commit="d98e8a64ddf34856e74b24714e3bedb2f5a39553",
        known_as="main of 2026-08-22",
        expected_file="pretrain_gpt.py",
    ),
    Source(
        name="Megatron-DeepSpeed",
        url="https://github.com/deepspeedai/Megatron-DeepSpeed",
        commit="4efb479d5317ce9b86096b9d8e3e8030b0b5263b",
        known_as="main of 2025-07-16",
        expected_file="pretrain_gpt.py",
    ),
    Source(
        name="NCCL",
        url="https://github.com/NVIDIA/nccl",
        commit="b91894bd5b190c874d98a017f93f5daa515b65d0",
        known_as="v2.29.7-1",
        expected_file="src/init.cc",
    ),
    Source(  # for torch 2.15, with which `make gpu-next` runs
        name="NCCL 2.30.7",
        url="https://github.com/NVIDIA/nccl",
        commit="73cf112295c33aee2b895f329f592f2a9b4b0f97",
        known_as="v2.30.7-1",
        expected_file="src/init.cc",
        nccl_version="2.30.7",
    ),
)


def main() -> int:
    """Clone the repositories that are missing, and print one line for each repository.

    Returns:
        Exit status of the program: 0, or 1 if a repository could not be cloned.
    """
    status = 0
    for source in PINNED:  # repositories, each with the commit that the tests need
        folder = source.folder()
        if (folder / source.expected_file).exists():
            print(f"{source.name}: {_describe_existing(source, folder)}")
            continue
        error = _clone(source, folder)
        if error:
            print(
                f"{source.name}: MISSING ({error}): put a checkout of {source.url} at commit {source.commit} "
                f"({source.known_as}) into {folder}"
            )
            status = 1
        else:
            print(f"{source.name}: cloned {source.known_as} into {folder}")
    return status


def _describe_existing(source: Source, folder: Path) -> str:
    """Return a sentence on an existing checkout: its folder, and its commit unless that is the pinned one."""
    command = ["git", "-c", "safe.directory=*", "-C", str(folder), "rev-parse", "HEAD"]
    result = subprocess.run(command, capture_output=True, text=True)
    commit = result.stdout.strip()
    if result.returncode != 0 or not (folder / ".git").exists() or commit == source.commit:
        return f"found in {folder}"
    return f"found in {folder}, at commit {commit[:10]} (the tests were last run with {source.commit[:10]})"


def _clone(source: Source, folder: Path) -> str:
    """Clone a git repository into a new folder, and check out its pinned commit.

    The clone has all commits, because benchmarks need old versions, too. Of the files, it has only those of
    the pinned commit; git fetches others when they are needed. If an error occurs, no folder is created.

    Returns:
        The error in words, or "" for success.
    """
    if folder.exists():
        return f"{folder} exists, but contains no {source.expected_file}"
    # A clone may take minutes. This short request finds out sooner whether the server can be reached.
    error = _git("ls-remote", "--quiet", source.url, "HEAD", timeout_s=REACHABLE_S)
    if error:
        return error
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".cloning-", dir=folder.parent) as draft:
        copy = Path(draft) / folder.name
        clone = ("clone", "--quiet", "--no-checkout", "--filter=blob:none", source.url, str(copy))
        check_out = ("-C", str(copy), "checkout", "--quiet", "--detach", source.commit)
        for command in (clone, check_out):
            error = _git(*command, timeout_s=CLONE_S)  # "" for success
            if error:
                return error
        shutil.move(copy, folder)  # the folder appears only when the clone is complete
    return ""


def _git(*arguments: str, timeout_s: float) -> str:
    """Run a git command, and return its error in words, or "" for success.

    git does not ask for passwords. After `timeout_s` seconds it is killed, which counts as an error.
    """
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    try:
        result = subprocess.run(
            ["git", *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout_s:g} s"
    except FileNotFoundError:
        return "there is no git: apt-get install git"
    if result.returncode == 0:
        return ""
    error_lines = result.stderr.strip().splitlines()
    if not error_lines:
        return f"git ended with status {result.returncode}"
    _, _, reason = error_lines[-1].rpartition("': ")  # without "fatal: unable to access 'URL': "
    return reason


def _nccl_folder(version: str | None) -> Path:
    """Return the folder of NCCL's source. holmes_ext compiles it to run NCCL on emulated GPUs.

    Args:
        version: The folder that holmes_ext uses for this version only. None: the folder for any version,
            which the environment variable HOLMES_NCCL_SOURCE may name.
    """
    # CI runs this program before it installs holmes_ext and holmes_lab.
    repository = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(repository), str(repository / "lab")]
    from holmes_lab.gpu import nccl_source

    given = os.environ.get(nccl_source.VARIABLE)
    if given and version is None:
        return Path(given).absolute()
    return nccl_source.default_nccl_folder(version)


if __name__ == "__main__":
    sys.exit(main())
