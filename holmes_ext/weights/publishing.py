"""Publishes a folder as a version of the weights: copies it into the store of `holmes join serve`.

`holmes join serve` sends the versions in its store, a folder, to the sites. The published folder is read
once, and its chunks are hashed while they are copied. So the manifest describes exactly the bytes that
receivers get. A folder that changes during the copy is refused. After an error, the store is as before.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from holmes_ext.errors import HolmesError
from holmes_ext.join.identity.run_folder import RunFolder
from holmes_ext.weights.manifest import (
    MOST_FILES,
    VersionFile,
    VersionManifest,
    check_file_name,
    check_parent,
    check_version,
    chunk_bytes_of,
)
from holmes_ext.weights.staging import sync_folders
from holmes_ext.weights.store import VersionStore
from holmes_ext.words import why

#: Variable with the folder for published versions.
STORE_VARIABLE = "HOLMES_WEIGHTS_STORE"
#: Number of the newest versions that the store keeps by default.
KEEP = 8


class _Stamp(NamedTuple):
    """Size, time and inode of a file; one of them changes if the file is written to or replaced."""

    size: int  # in bytes
    modified_ns: int
    inode: int


def store_of_run(environ: Mapping[str, str], port: int) -> VersionStore:
    """Return the folder of published versions of the `holmes join serve` that listens on a port of this host.

    Raises:
        HolmesError: This user has not started `holmes join serve` with this port here.
    """
    run = RunFolder.of_port(environ, port)
    if not run.path.is_dir():
        raise HolmesError(
            f"{run.path}: there is no run; start `holmes join serve` on this host first, with the same"
            " port and as the same user"
        )
    named_folder = environ.get(STORE_VARIABLE)
    return VersionStore(Path(named_folder) if named_folder else run.path / "weights")


def publish_folder(
    folder: Path,
    store: VersionStore,
    version: int,
    parent: int | None = None,
    commits: bool = True,
    keep: int = KEEP,
) -> VersionManifest:
    """Copy a folder into a store as a new version.

    Args:
        folder: The folder. Nothing may change it during this call.
        store: Store of `holmes join serve`.
        version: Number of the version, greater than those of all versions before.
        parent: Version to which the folder is a delta; None: it is a full version.
        commits: Whether all sites switch to the version as soon as their hosts have received it. False: they
            switch only after `holmes weights commit`.
        keep: Number of the newest versions that stay in the store.

    Raises:
        HolmesError: The folder, a number or the store cannot be used, or the folder changes.
    """
    store.make()
    with store.lock():
        _check_numbers(store, version, parent)
        stamps = _stamps_of(folder)
        try:
            manifest = _copy(folder, stamps, store, version, parent)
        except OSError as error:
            raise HolmesError(
                f"version {version} cannot be written to {store.path} ({why(error)}); make space, or set"
                f" {STORE_VARIABLE} to another folder"
            ) from None
        if commits:
            store.want(version)
        store.remove_old(keep)
    return manifest


def _check_numbers(store: VersionStore, version: int, parent: int | None) -> None:
    """Raise HolmesError if a version with this number and this parent cannot be added to the store."""
    check_version(version)
    versions = store.versions()
    if version in versions:
        raise HolmesError(f"version {version} is published already; a version never changes")
    if versions and version < versions[-1]:
        raise HolmesError(
            f"version {version} is older than {versions[-1]}, which is published; numbers must grow"
        )
    if parent is not None:
        check_parent(version, parent)
        if parent not in versions:
            raise HolmesError(
                f"version {version} is a delta to {parent}, which is not published; publish a full version"
            )
        store.check_chain(parent)


def _stamps_of(folder: Path) -> dict[str, _Stamp]:
    """Return the stamp of each file of a folder, by the file's name relative to the folder.

    Two calls return the same if nothing has changed the folder in between.

    Raises:
        HolmesError: The folder has no files, too many, or links; or it cannot be read.
    """
    if not folder.is_dir():
        raise HolmesError(f"{folder}: is no folder; name the folder with the version's files")
    stamps: dict[str, _Stamp] = {}
    try:
        _add_stamps(folder, "", stamps)
    except OSError as error:
        raise HolmesError(f"{folder}: cannot be read ({why(error)})") from None
    if not stamps:
        raise HolmesError(f"{folder}: has no files")
    return dict(sorted(stamps.items()))


def _add_stamps(folder: Path, prefix: str, stamps: dict[str, _Stamp]) -> None:
    """Add a stamp to `stamps` for each file of a folder and its sub-folders.

    Args:
        folder: The folder.
        prefix: Beginning of the names of its files in `stamps`: "" or "SUBFOLDER/".
        stamps: Name -> stamp.
    """
    for entry in os.scandir(folder):
        name = prefix + entry.name
        check_file_name(name)
        state = entry.stat(follow_symlinks=False)
        if stat.S_ISDIR(state.st_mode):
            _add_stamps(Path(entry.path), f"{name}/", stamps)
        elif stat.S_ISREG(state.st_mode):
            stamps[name] = _stamp(state)
        else:
            raise HolmesError(
                f"{entry.path}: is a link or no regular file; publish a folder of regular files"
            )
        if len(stamps) > MOST_FILES:
            raise HolmesError(f"{folder}: has more than {MOST_FILES} files; pack them")


def _stamp(state: os.stat_result) -> _Stamp:
    return _Stamp(state.st_size, state.st_mtime_ns, state.st_ino)


def _copy(
    folder: Path, stamps: dict[str, _Stamp], store: VersionStore, version: int, parent: int | None
) -> VersionManifest:
    """Copy the files of a folder into a store as a version, and return the version's manifest.

    Readers of the store do not see the version before all of its files are complete.

    Args:
        folder: The folder.
        stamps: Stamp of each of its files when publishing began.
        store: The store.
        version: Number of the version.
        parent: Version to which the folder is a delta; None: it is a full version.

    Raises:
        HolmesError: The folder has changed since the stamps were taken.
        OSError: The files cannot be written.
    """
    partial = store.new_partial_folder(version)
    try:
        files = []
        chunk_bytes = chunk_bytes_of(sum(stamp.size for stamp in stamps.values()))
        for name, stamp in stamps.items():
            files.append(_copy_file(folder, name, stamp, partial, chunk_bytes))
        if _stamps_of(folder) != stamps:
            raise _changed_error(folder)
        sync_folders(partial)
        manifest = VersionManifest(version, tuple(files), parent, chunk_bytes)
        store.add_complete(manifest, partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return manifest


def _copy_file(
    folder: Path, name: str, stamp: _Stamp, target_folder: Path, chunk_bytes: int
) -> VersionFile:
    """Copy a file of a new version, and return the entry of the manifest for it.

    Args:
        folder: Folder that is published.
        name: Name of the file, relative to the folder.
        stamp: Stamp of the file when publishing began.
        target_folder: Folder of the copies.
        chunk_bytes: Bytes of each chunk of the version.

    Raises:
        HolmesError: The file has changed since the stamp was taken.
        OSError: The file cannot be copied.
    """
    target = target_folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        raise _changed_error(folder) from None
    digests = []
    size = 0
    with open(descriptor, "rb", buffering=0) as source, open(target, "xb", buffering=0) as copy:
        while chunk := source.read(chunk_bytes):
            digests.append(hashlib.sha256(chunk).hexdigest())
            size += len(chunk)
            _write_all(copy.fileno(), chunk)
            if size > stamp.size:
                break  # another process appends to the file, perhaps without end
        if size != stamp.size or _stamp(os.fstat(descriptor)) != stamp:
            raise _changed_error(folder)
        os.fsync(copy.fileno())
    return VersionFile(name, size, tuple(digests))


def _write_all(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def _changed_error(folder: Path) -> HolmesError:
    return HolmesError(
        f"{folder}: changed while it was published; publish a folder that nothing writes to any more"
    )
