"""Folder that holds the versions of a model's weights, at the publisher and at each receiving host.

    DIR/12/                         version 12, complete and checked
    DIR/current                     link to the version in use (the committed version)
    DIR/.holmes/manifests/12.json   manifest of version 12
    DIR/.holmes/staging/13/         version 13 while it arrives: manifest.json, files/, done
    DIR/.holmes/removed/            versions that are being removed, or copied by the publisher
    DIR/.holmes/commit              number of the version that the publisher wants to be committed
    DIR/.holmes/lock                locked while a process adds versions

When all bytes of a version are on the disk, its folder is renamed to DIR/12. So a reader of DIR/12 never sees
a part of a version, also after a crash. `current` is replaced by renaming, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from holmes_ext.document import load_json
from holmes_ext.errors import HolmesError
from holmes_ext.files import write_whole
from holmes_ext.weights.manifest import VersionManifest
from holmes_ext.weights.staging import StagedVersion, sync_folder
from holmes_ext.words import why

_PRIVATE = ".holmes"
_CURRENT = "current"
_DAMAGED = "remove the version's folder and this file"
#: Most digits of the number of a version: see MOST_VERSIONS.
_DIGITS = 12


class MissingVersion(HolmesError):
    """Error: the requested version of the weights is not in the store."""


class VersionStore:
    """Folder that holds versions of the weights: the publisher's, or that of a receiving host.

    Version 12 is complete as soon as the folder PATH/12 exists. PATH/current is a link to the committed
    version. The private folder PATH/.holmes has the manifests, and the versions that are still arriving.

    Args:
        path: The folder. It need not exist before make() is called.
    """

    def __init__(self, path: Path):
        self.path = path
        self._private = path / _PRIVATE
        self._manifests = self._private / "manifests"
        self._commit_file = self._private / "commit"
        # (version, inode of its manifest, time of its manifest in ns) -> parent; None: a full version.
        # A cache, so that chain() reads each manifest once.
        self._parents: dict[tuple[int, int, int], int | None] = {}

    def make(self) -> None:
        """Create the folder of the store and its private sub-folders unless they exist.

        Raises:
            HolmesError: A folder cannot be made.
        """
        try:
            for folder in (self._manifests, self._private / "staging", self._private / "removed"):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HolmesError(
                f"{self.path}: no versions can be kept there ({why(error)}); name another folder"
            ) from None

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Context manager that locks the store, so that no other process adds versions to it.

        First it removes folders that a killed process has left incomplete.

        Raises:
            HolmesError: Another process holds the lock.
        """
        descriptor = os.open(self._private / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise HolmesError(
                    f"{self.path}: another process adds versions there; wait until it ends"
                ) from None
            for leftover in (self._private / "removed").iterdir():
                shutil.rmtree(leftover, ignore_errors=True)
            yield
        finally:
            os.close(descriptor)

    def folder(self, version: int) -> Path:
        """Return the path of the folder of a version; the folder need not exist."""
        return self.path / str(version)

    def has(self, version: int) -> bool:
        """Return whether the store has all files of a version."""
        return self.folder(version).is_dir() and self._manifest_file(version).is_file()

    def versions(self) -> list[int]:
        """Return the numbers of all complete versions, in ascending order."""
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        numbers = [_parse_version(name) for name in names]
        return sorted(number for number in numbers if number is not None and self.has(number))

    def manifest(self, version: int) -> VersionManifest:
        """Return the manifest of a complete version.

        Raises:
            MissingVersion: There is no such version.
            HolmesError: The manifest is damaged.
        """
        if not self.has(version):
            raise MissingVersion(f"{self.path}: there is no version {version}")
        file = self._manifest_file(version)
        return load_json(file, _DAMAGED).into(VersionManifest)

    def chain(self, version: int) -> list[int]:
        """Return the versions that make up a version: a full version, then the deltas to apply to it.

        If 12 is a delta to 11, and 11 is a delta to the full version 10, the chain of 12 is [10, 11, 12].

        Raises:
            MissingVersion: A version of the chain is not in the store.
        """
        newest_first = [version]
        parent = self._parent_of(version)
        while parent is not None:
            newest_first.append(parent)
            parent = self._parent_of(parent)
        return newest_first[::-1]

    def check_chain(self, version: int) -> None:
        """Raise an error if a version of the chain of `version` is missing or damaged; see chain()."""
        self.chain(version)

    def _parent_of(self, version: int) -> int | None:
        """Return the parent of a complete version that is a delta; None: it is a full version."""
        try:
            state = self._manifest_file(version).stat()
        except FileNotFoundError:
            state = None
        if state is None or not self.folder(version).exists():
            raise MissingVersion(f"{self.path}: there is no version {version}")
        key = (version, state.st_ino, state.st_mtime_ns)
        if key not in self._parents:
            self._parents[key] = self.manifest(version).parent
        return self._parents[key]

    @property
    def current(self) -> int | None:
        """Return the version in use, the target of the link PATH/current; None: there is none yet."""
        try:
            target = os.readlink(self.path / _CURRENT)
        except OSError:
            return None
        return _parse_version(target)

    def commit(self, version: int) -> None:
        """Make a complete version the one in use: replace the link PATH/current by a link to it.

        Raises:
            MissingVersion: There is no such version.
            OSError: The link cannot be replaced.
        """
        if not self.has(version):
            raise MissingVersion(f"{self.path}: there is no version {version} to commit")
        link = self._private / f"current-{secrets.token_hex(8)}"
        os.symlink(str(version), link)
        try:
            os.rename(link, self.path / _CURRENT)
        except BaseException:
            link.unlink()
            raise
        sync_folder(self.path)

    @property
    def wanted(self) -> int | None:
        """Return the version that the publisher wants all sites to use; None: there is none.

        After they have switched, `wanted` and `current` are equal.
        """
        try:
            text = self._commit_file.read_text()
        except OSError:
            return None
        return _parse_version(text)

    def want(self, version: int) -> None:
        """Record that all sites should switch to a version as soon as their hosts have it completely."""
        write_whole(self._commit_file, str(version))

    def stage(self, manifest: VersionManifest) -> StagedVersion:
        """Prepare to receive a version: create its staging folder, or reuse that of an interrupted transfer.

        Args:
            manifest: Manifest of the version.

        Returns:
            The version, perhaps with chunks of an earlier transfer.

        Raises:
            HolmesError: The version is complete already.
            OSError: The folder cannot be made, or the disk has too little space.
        """
        final = self.folder(manifest.version)
        if os.path.lexists(final):
            raise HolmesError(f"{final}: exists already; a version never changes")
        folder = self._private / "staging" / str(manifest.version)
        return StagedVersion(manifest, folder, add_to_store=self.add_complete)

    def stamp(self) -> tuple[int, ...]:
        """Return a value that changes whenever a version is added, removed, committed or wanted.

        The value consists of the modification times of two folders, so computing it is cheap.
        """
        return tuple(os.stat(path).st_mtime_ns for path in (self.path, self._private))

    def new_partial_folder(self, version: int) -> Path:
        """Create and return an empty folder for the files of a new version that the publisher copies."""
        folder = self._private / "removed" / f"{version}-{secrets.token_hex(8)}"
        folder.mkdir()  # if this process is killed, the next use of lock() removes the folder
        return folder

    def add_complete(self, manifest: VersionManifest, files: Path) -> None:
        """Add a complete version to the store: write its manifest, and move its files to PATH/NUMBER.

        Readers see the version only after the last step, the renaming of the folder.

        Args:
            manifest: Manifest of the version.
            files: Folder with all files of the version, on the same disk. The caller has forced its files to
                the disk.

        Raises:
            OSError: A file cannot be written, or the folder cannot be renamed. The version was not added.
        """
        write_whole(self._manifest_file(manifest.version), manifest.text())
        sync_folder(self._manifests)
        os.rename(files, self.folder(manifest.version))
        sync_folder(self.path)

    def remove_old(self, keep: int, protected: Collection[int] = ()) -> list[int]:
        """Remove old versions and their staging folders.

        The newest `keep` versions stay, and the protected, current and wanted ones. If such a version is a
        delta, the other versions of its chain stay, too.

        Args:
            keep: Number of the newest versions that stay.
            protected: Further versions that stay, also those that are still arriving.

        Returns:
            The numbers of the versions that were removed, in ascending order.
        """
        versions = self.versions()
        needed = {*versions[-keep:], *protected, self.current, self.wanted}
        staying: set[int] = set()
        for version in set(versions) & needed:
            if version in staying:
                continue  # in the chain of another one, and so is its own chain
            staying.add(version)
            with contextlib.suppress(MissingVersion):  # a user has removed a version of the chain
                staying.update(self.chain(version))
        old = [version for version in versions if version not in staying]
        for version in old:
            removed = self._private / "removed" / f"{version}-{secrets.token_hex(8)}"
            # Renamed first, so that a reader of PATH/NUMBER never sees a version without some of its files.
            os.rename(self.folder(version), removed)
            self._manifest_file(version).unlink(missing_ok=True)
            shutil.rmtree(removed, ignore_errors=True)
        self._remove_old_staging(versions, protected)
        return old

    def _remove_old_staging(self, versions: list[int], protected: Collection[int]) -> None:
        """Remove the staging folders of the newest complete version, and of all older versions.

        That of the newest one is left over if a process was killed just after the version became complete.

        Args:
            versions: All complete versions, in ascending order.
            protected: Versions whose staging folders stay.
        """
        newest = max(versions, default=-1)
        for folder in (self._private / "staging").iterdir():
            if not folder.name.isdecimal():
                continue
            version = int(folder.name)
            is_protected = version in protected
            if version <= newest and not is_protected:
                shutil.rmtree(folder, ignore_errors=True)

    def _manifest_file(self, version: int) -> Path:
        return self._manifests / f"{version}.json"


def _parse_version(text: str) -> int | None:
    """Return the number of a version that a text such as "12" shows; None: the text is no such number."""
    is_version = text.isdecimal() and len(text) <= _DIGITS
    return int(text) if is_version else None


class ChunkReader:
    """Reader of single chunks of the files of complete versions. Not thread-safe."""

    def __init__(self, store: VersionStore):
        self._store = store
        self._manifest: VersionManifest | None = None  # of the version that was read last

    def read(self, version: int, index: int) -> bytes:
        """Read a chunk from the disk, and return its bytes.

        Args:
            version: Number of a complete version.
            index: Index of the chunk in the manifest of the version.

        Raises:
            HolmesError: There is no such version or chunk, or its file cannot be read.
        """
        if self._manifest is None or self._manifest.version != version:
            self._manifest = self._store.manifest(version)
        if not 0 <= index < len(self._manifest.chunks):
            raise HolmesError(f"version {version} has no chunk {index}")
        chunk = self._manifest.chunks[index]
        path = self._store.folder(version) / self._manifest.files[chunk.file].name
        # If a user has put something else there, a link is refused, and opening a pipe does not block.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags)
        except FileNotFoundError:
            raise MissingVersion(f"version {version} was removed meanwhile") from None
        except OSError as error:
            raise HolmesError(f"version {version} cannot be read ({why(error)})") from None
        try:
            data = os.pread(descriptor, chunk.length, chunk.offset)
        except OSError as error:
            raise HolmesError(f"version {version} cannot be read ({why(error)})") from None
        finally:
            os.close(descriptor)
        if len(data) != chunk.length:
            raise HolmesError(f"version {version}: {path.name} has become shorter")
        return data
