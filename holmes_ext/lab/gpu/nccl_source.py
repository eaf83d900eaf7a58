"""Finds the source code of NCCL on this machine.

Emulated GPUs need it: holmes compiles NCCL's host code from source, and runs it on an emulated CUDA runtime.
The source is a git checkout, or a .tar.gz archive of one, which is unpacked into holmes's cache. It is taken
from the first of these that is given or exists:

    1. the value of --nccl-source, an option of `holmes lab build` and `holmes lab run --gpu`
    2. the environment variable HOLMES_NCCL_SOURCE
    3. the folder ~/.cache/holmes_ext/nccl, into which `make checkouts` clones NCCL
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from holmes_ext.errors import HolmesError

VARIABLE = "HOLMES_NCCL_SOURCE"
REPOSITORY = "https://github.com/NVIDIA/nccl"
#: The releases whose numbers were tried; others of the same minor versions are taken, and tried when they are
#: built.
TRIED = ("2.27.7", "2.28.9", "2.29.7", "2.30.7")


@dataclass(frozen=True)
class NcclSource:
    """The source code of NCCL on this machine: its folder, its version and a digest of its files."""

    folder: Path  # contains src and makefiles
    version: tuple[int, int, int]
    digest: str  # of the files that are compiled

    @property
    def name(self) -> str:
        return ".".join(map(str, self.version))

    @property
    def code(self) -> str:
        """NCCL_VERSION_CODE."""
        return "{}{:02}{:02}".format(*self.version)


def default_nccl_folder() -> Path:
    """Return the folder in which NCCL's source is searched if the user names no other. It may not exist."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "holmes_ext", "nccl").absolute()


def find_nccl(option: str | None, cache: Path, wanted: str = TRIED[2]) -> NcclSource:
    """Find the source code of NCCL, and return its folder and version.

    It is searched in `option`, in the environment variable HOLMES_NCCL_SOURCE, and in a default folder.

    Args:
        option: A checkout of NCCL or an archive of one (the value of --nccl-source), or None.
        cache: The folder into which an archive is unpacked.
        wanted: The version of NCCL that the error message recommends if no source is found.

    Raises:
        HolmesError: There is no source, or the emulated GPUs do not support its version of NCCL.
    """
    given = option or os.environ.get(VARIABLE)  # VARIABLE is "HOLMES_NCCL_SOURCE"
    path = Path(given).resolve() if given else default_nccl_folder()  # a checkout or an archive
    if given and not path.exists():
        raise HolmesError(f"{given}: there is no such NCCL source; git clone -b v{wanted}-1 {REPOSITORY}")
    if not path.exists():
        raise HolmesError(
            f"--gpu compiles NCCL's host code from its source: git clone -b v{wanted}-1 {REPOSITORY} {path}, "
            f"or name another folder with --nccl-source or {VARIABLE}"
        )
    folder = path if path.is_dir() else _unpacked(path, cache)
    return _read_version(folder, given or str(path))


def _read_version(folder: Path, where: str) -> NcclSource:
    """Read the version of the NCCL checkout in `folder`, and check that the emulated GPUs support it.

    Args:
        where: The path that the user has given, for error messages.

    Raises:
        HolmesError: The folder is no checkout of NCCL, or has another minor version than those in TRIED.
    """
    makefile = folder / "makefiles" / "version.mk"
    has_code = (folder / "src/init.cc").is_file()
    if has_code and makefile.is_file():
        text = makefile.read_text()
    else:
        text = ""  # in which no version is found
    # Lines like "NCCL_MAJOR   := 2".
    numbers = re.findall(r"^NCCL_(?:MAJOR|MINOR|PATCH)\s*:=\s*(\d+)", text, re.MULTILINE)
    if len(numbers) != 3:
        raise HolmesError(f"{where} is no checkout of NCCL (it lacks src/init.cc or makefiles/version.mk)")
    major, minor, patch = map(int, numbers)
    tried = [tuple(map(int, release.split("."))) for release in TRIED]  # (major, minor, patch)
    supported_minor_versions = [version[:2] for version in tried]
    if (major, minor) not in supported_minor_versions:
        raise HolmesError(
            f"{where} is NCCL {major}.{minor}.{patch}; the emulated GPU takes {', '.join(TRIED)}: git -C"
                          f" {where} checkout v{TRIED[2]}-1")
    return NcclSource(folder, (major, minor, patch), digest_of_tree(folder / "src"))


def digest_of_tree(folder: Path, *patterns: str) -> str:
    """sha256 (hex) of the names and contents of all files below `folder` (or of those that match)."""
    files = {path for pattern in patterns or ("**/*",) for path in folder.glob(pattern) if path.is_file()}
    total = hashlib.sha256()
    for path in sorted(files):
        total.update(f"{path.relative_to(folder)}\0".encode())
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def _unpacked(archive: Path, cache: Path) -> Path:
    """The folder in the cache that holds the archive's content; unpacked when it is not there."""
    target = cache / f"nccl-source-{hashlib.sha256(archive.read_bytes()).hexdigest()[:16]}"
    if not target.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix="unpacking-", dir=cache))
        try:
            with tarfile.open(archive) as content:
                content.extractall(draft, filter="data")
            draft.rename(target)
        except (tarfile.TarError, EOFError) as error:
            raise HolmesError(
                f"{archive} is neither a folder nor an archive of NCCL's source: {error}") from None
        except OSError:
            if not target.is_dir():  # else another process was first
                raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    inner = [path for path in target.iterdir() if path.is_dir()]
    return inner[0] if len(inner) == 1 and not (target / "src").is_dir() else target
