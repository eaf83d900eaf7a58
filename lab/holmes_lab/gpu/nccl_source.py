"""Finds the source code of NCCL on this machine.

For emulated GPUs, holmes compiles NCCL's host code from source and runs it on an emulated CUDA runtime. The
source is a git checkout, or a .tar.gz archive of a checkout. An archive is unpacked into holmes's cache. The
first of these that is given or exists is used:

    1. the value of --nccl-source, an option of `holmes lab build` and `holmes lab run --gpu`
    2. the environment variable HOLMES_NCCL_SOURCE
    3. the folder ~/.cache/holmes_ext/nccl-VERSION, where VERSION is the NCCL that comes with the user's torch
    4. the folder ~/.cache/holmes_ext/nccl

`make checkouts` clones NCCL into folder 4, and a second version, for the newest torch, into folder 3.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from holmes_ext.errors import HolmesError
from holmes_lab.gpu.cache import make_cache, user_cache

VARIABLE = "HOLMES_NCCL_SOURCE"
REPOSITORY = "https://github.com/NVIDIA/nccl"
#: Releases that were tested with the emulated GPU. A minor version older than the first is rejected. A newer
#: version than the last is used with a warning: when it is built, its results are checked (csrc/check).
TRIED = ("2.27.7", "2.28.9", "2.29.7", "2.30.7")
#: The version that `make checkouts` clones into default_nccl_folder().
DEFAULT = "2.29.7"
_VERSION_PARTS = 3


@dataclass(frozen=True)
class NcclSource:
    """The source code of NCCL on this machine: its folder, its version and a digest of its files."""

    folder: Path  # contains src and makefiles
    version: tuple[int, int, int]
    digest: str  # of the files that are compiled

    @property
    def name(self) -> str:
        """The version as text, such as "2.29.7"."""
        return ".".join(map(str, self.version))

    @property
    def code(self) -> str:
        """NCCL_VERSION_CODE in nccl.h, such as "22907" for NCCL 2.29.7."""
        major, minor, patch = self.version
        return f"{major}{minor:02}{patch:02}"


def default_nccl_folder(version: str | None = None) -> Path:
    """Return a folder that is searched for NCCL's source if the user names no folder.

    The folder may not exist.

    Args:
        version: Version of NCCL in the folder, such as "2.30.7"; None for the folder of any version.
    """
    name = "nccl" if version is None else f"nccl-{version}"
    return Path(user_cache(), "holmes_ext", name).absolute()


def find_nccl(option: str | None, cache: Path, wanted: str = DEFAULT) -> NcclSource:
    """Find the source code of NCCL, and return its folder and version.

    The path is `option` if it is given, else the value of the environment variable HOLMES_NCCL_SOURCE, else
    the first default folder that exists.

    Args:
        option: Path of a checkout of NCCL or of its archive (the value of --nccl-source), or None.
        cache: Folder for the content of an archive.
        wanted: A version of NCCL. Its default folder is searched first, and the error message recommends it
            if no source is found.

    Raises:
        HolmesError: There is no source, or its version of NCCL is too old.
    """
    given = option or os.environ.get(VARIABLE)  # VARIABLE is "HOLMES_NCCL_SOURCE"
    if given:
        path = Path(given).resolve()  # a checkout or an archive
    elif default_nccl_folder(wanted).exists():
        path = default_nccl_folder(wanted)
    else:
        path = default_nccl_folder()
    if given and not path.exists():
        raise HolmesError(
            f"{given}: there is no such NCCL source; git clone -b v{wanted}-1 {REPOSITORY}"
        )
    if not path.exists():
        raise HolmesError(
            f"--gpu compiles NCCL's host code from its source: git clone -b v{wanted}-1 {REPOSITORY} {path}, "
            f"or name another folder with --nccl-source or {VARIABLE}"
        )
    folder = path if path.is_dir() else _unpack(path, cache)
    return _read_version(folder, given or str(path))


def _read_version(folder: Path, where: str) -> NcclSource:
    """Read the version of the NCCL checkout in `folder`, and check that the emulated GPUs support it.

    If the version is newer than all that were tried, a warning is printed to stderr.

    Args:
        where: The path that the user has given, for error messages.

    Raises:
        HolmesError: The folder is no checkout of NCCL, or its minor version is older than all in TRIED.
    """
    makefile = folder / "makefiles" / "version.mk"
    has_code = (folder / "src/init.cc").is_file()
    if has_code and makefile.is_file():
        text = makefile.read_text()
    else:
        text = ""  # contains no version, so the error below is raised
    # Lines like "NCCL_MAJOR   := 2".
    numbers = re.findall(r"^NCCL_(?:MAJOR|MINOR|PATCH)\s*:=\s*(\d+)", text, re.MULTILINE)
    if len(numbers) != _VERSION_PARTS:
        raise HolmesError(
            f"{where} is no checkout of NCCL (it lacks src/init.cc or makefiles/version.mk)"
        )
    major, minor, patch = map(int, numbers)
    name = f"{major}.{minor}.{patch}"
    # TRIED: the releases that were tested with the emulated GPU. The error message recommends one of them,
    # DEFAULT; v{DEFAULT}-1 is its git tag.
    if (major, minor) < _minor_version(TRIED[0]):
        raise HolmesError(
            f"{where} is NCCL {name}; the emulated GPU takes {TRIED[0]} and newer: git -C {where} checkout "
            f"v{DEFAULT}-1"
        )
    if (major, minor) > _minor_version(TRIED[-1]):
        # After each build of NCCL, csrc/check compares the results of its collectives.
        print(
            f"holmes: warning: {where} is NCCL {name}; the emulated GPU was never tried with a version newer "
            f"than {TRIED[-1]}. Its results are checked when it is built",
            file=sys.stderr,
        )
    return NcclSource(folder, (major, minor, patch), digest_of_tree(folder / "src"))


def _minor_version(release: str) -> tuple[int, int]:
    """Return (major, minor) of a release such as "2.29.7"."""
    major, minor, _ = release.split(".")
    return int(major), int(minor)


def digest_of_tree(folder: Path, *patterns: str) -> str:
    """Return the SHA-256 digest (hex) of the names and contents of the files below a folder.

    Args:
        folder: The folder.
        patterns: Glob patterns of the files. Without patterns, all files count.
    """
    files: set[Path] = set()
    for pattern in patterns or ("**/*",):
        files.update(path for path in folder.glob(pattern) if path.is_file())
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path.relative_to(folder)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _unpack(archive: Path, cache: Path) -> Path:
    """Unpack an archive of NCCL's source into the cache, unless it is there already, and return its folder.

    Raises:
        HolmesError: The file is no archive.
    """
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    target = cache / f"nccl-source-{digest[:16]}"
    if not target.is_dir():
        make_cache(cache)
        draft = Path(tempfile.mkdtemp(prefix="unpacking-", dir=cache))
        try:
            with tarfile.open(archive) as content:
                content.extractall(draft, filter="data")
            draft.rename(target)
        except (tarfile.TarError, EOFError) as error:
            raise HolmesError(
                f"{archive} is neither a folder nor an archive of NCCL's source: {error}"
            ) from None
        except OSError:
            # The rename fails if another process has unpacked the same archive first.
            if not target.is_dir():
                raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    if (target / "src").is_dir():
        return target
    # Most archives have a single folder at the top, such as nccl-2.29.7-1.
    folders = [path for path in target.iterdir() if path.is_dir()]
    return folders[0] if len(folders) == 1 else target


def write_generated_headers(source: NcclSource, folder: Path) -> None:
    """Write the headers that NCCL's Makefile generates: nccl.h and nccl_git_version.h."""
    include = folder / "include"
    include.mkdir(exist_ok=True)
    major, minor, patch = source.version
    values = {
        "Major": str(major),
        "Minor": str(minor),
        "Patch": str(patch),
        "Suffix": "",
        "Version": source.code,
    }
    header = (source.folder / "src" / "nccl.h.in").read_text()
    for name, value in values.items():
        header = header.replace(f"${{nccl:{name}}}", value)
    (include / "nccl.h").write_text(header)
    (include / "nccl_git_version.h").write_text(
        '#define NCCL_GIT_BRANCH ""\n#define NCCL_GIT_COMMIT_HASH ""\n'
    )
