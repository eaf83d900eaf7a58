"""Finds and clones the frameworks whose unmodified scripts the tests and benchmarks run.

Their checkouts are in the folder $HOLMES_CHECKOUTS, by default ~/.cache/holmes_ext/checkouts:

    Megatron-LM           https://github.com/NVIDIA/Megatron-LM
    Megatron-DeepSpeed    https://github.com/deepspeedai/Megatron-DeepSpeed

`python tests/checkouts.py` (`make checkouts`) clones these, and the source of NCCL, at the commits of PINNED.
It does not change a checkout that exists. If a clone fails, it prints the folder in which to put a checkout,
and exits with status 1.
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
    """Return the folder that contains the checkouts. It need not exist."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get(VARIABLE) or cache / "holmes_ext" / "checkouts").absolute()


def find_checkout(name: str) -> Path | None:
    """Return the folder of the checkout `name`, or None if it contains no pretrain_gpt.py."""
    folder = checkouts_folder() / name
    return folder if (folder / "pretrain_gpt.py").is_file() else None


def why_missing(name: str) -> str:
    """Return the reason for skipping what needs the checkout `name`."""
    return f"no checkout of {name} in {checkouts_folder()}: make checkouts"


def checkout_or_skip(name: str) -> Path:
    """Return the folder of the checkout `name`; skip the running test if there is none."""
    import pytest  # the benchmarks use this module without pytest

    folder = find_checkout(name)
    if folder is None:
        pytest.skip(why_missing(name))
    return folder


@dataclass(frozen=True)
class Source:
    """A repository that `make checkouts` clones at one commit."""

    name: str
    url: str
    commit: str  # the full hash: a tag can be moved
    known_as: str  # the commit in words
    expected_file: str  # relative path of a file that every checkout contains

    def folder(self) -> Path:
        """Return the folder in which the tests look for the checkout."""
        if self.name == "NCCL":
            return _nccl_folder()
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
)


def main() -> int:
    """Clone what is missing. Return 1 if something is still missing at the end, else 0."""
    status = 0
    for source in PINNED:
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
    """Return where the checkout is, and its commit if that is not the pinned one."""
    command = ["git", "-c", "safe.directory=*", "-C", str(folder), "rev-parse", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True)
    commit = found.stdout.strip()
    if found.returncode != 0 or not (folder / ".git").exists() or commit == source.commit:
        return f"found in {folder}"
    return f"found in {folder}, at commit {commit[:10]} (the tests were last run with {source.commit[:10]})"


def _clone(source: Source, folder: Path) -> str:
    """Clone a repository into `folder`, which appears only when the clone is complete.

    The clone has all commits and tags, because benchmarks/matrix.py takes old versions from it, but
    only the files of the pinned commit: git fetches others when they are needed.

    Returns:
        The error in words, or "" for success.
    """
    if folder.exists():
        return f"{folder} exists, but contains no {source.expected_file}"
    error = _git("ls-remote", "--quiet", source.url, "HEAD", timeout_s=REACHABLE_S)
    if error:
        return error
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".cloning-", dir=folder.parent) as draft:
        copy = Path(draft) / folder.name
        clone = ("clone", "--quiet", "--no-checkout", "--filter=blob:none", source.url, str(copy))
        check_out = ("-C", str(copy), "checkout", "--quiet", "--detach", source.commit)
        error = _git(*clone, timeout_s=CLONE_S) or _git(*check_out, timeout_s=CLONE_S)
        if error:
            return error
        shutil.move(copy, folder)
    return ""


def _git(*arguments: str, timeout_s: float) -> str:
    """Run git without questions to the terminal. Return the last line of its error, or "" for success."""
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    try:
        done = subprocess.run(
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
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines() or [f"git ended with status {done.returncode}"]
    return lines[-1].rpartition("': ")[2]  # without "fatal: unable to access 'URL': "


def _nccl_folder() -> Path:
    """Return where emulated GPUs look for NCCL's source."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from holmes_ext.lab.gpu import nccl_source

    given = os.environ.get(nccl_source.VARIABLE)
    return Path(given).absolute() if given else nccl_source.default_nccl_folder()


if __name__ == "__main__":
    sys.exit(main())
