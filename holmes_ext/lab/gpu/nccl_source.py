"""NCCL's source, from which its host code is compiled: a checkout, or an archive of one (.tar.gz), unpacked
into the cache."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from holmes_ext.document import write_whole
from holmes_ext.errors import HolmesError

VARIABLE = "HOLMES_NCCL_SOURCE"
REPOSITORY = "https://github.com/NVIDIA/nccl"
#: The releases whose numbers were tried; others of the same minor versions are taken, and tried when they are
#: built.
TRIED = ("2.27.7", "2.28.9", "2.29.7", "2.30.7")
#: In the cache: which source was taken last.
_LAST = "nccl_source"


@dataclass(frozen=True)
class NcclSource:
    """folder: of the checkout, with src and makefiles; digest: of what is compiled."""

    folder: Path
    version: tuple[int, int, int]
    digest: str

    @property
    def name(self) -> str:
        return ".".join(map(str, self.version))

    @property
    def code(self) -> str:
        """NCCL_VERSION_CODE."""
        return "{}{:02}{:02}".format(*self.version)


def find_nccl(option: str | None, cache: Path, wanted: str = TRIED[2]) -> NcclSource:
    """option: of --nccl-source; without it HOLMES_NCCL_SOURCE counts, else the source that was taken last.
    wanted: the version that an error advises. HolmesError where there is none, or it is not emulated."""
    last = cache / _LAST
    where = option or os.environ.get(VARIABLE) or (last.read_text().strip() if last.exists() else "")
    if not where:
        raise HolmesError(
            f"--gpu builds NCCL's host code from its source: git clone -b v{wanted}-1 {REPOSITORY}, then"
                          f" give the folder to --nccl-source or {VARIABLE}")
    path = Path(where).resolve()
    if not path.exists():
        raise HolmesError(f"{where}: there is no such NCCL source; git clone -b v{wanted}-1 {REPOSITORY}")
    source = _read(path if path.is_dir() else _unpacked(path, cache), where)
    cache.mkdir(parents=True, exist_ok=True)
    write_whole(last, f"{path}\n")
    return source


def _read(folder: Path, where: str) -> NcclSource:
    makefile = folder / "makefiles" / "version.mk"
    text = makefile.read_text() if makefile.is_file() and (folder / "src/init.cc").is_file() else ""
    numbers = re.findall(r"^NCCL_(?:MAJOR|MINOR|PATCH)\s*:=\s*(\d+)", text, re.MULTILINE)
    if len(numbers) != 3:
        raise HolmesError(f"{where} is no checkout of NCCL (it lacks src/init.cc or makefiles/version.mk)")
    major, minor, patch = map(int, numbers)
    tried = [tuple(map(int, release.split("."))) for release in TRIED]
    if (major, minor) not in [version[:2] for version in tried]:
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
