"""Versions of the weights that are still arriving at a host: their chunks are written in any order.

A chunk can be read as soon as it is written, so that the host can send it on to other hosts.

    DIR/.holmes/staging/13/manifest.json   manifest of the version that arrives
    DIR/.holmes/staging/13/files/          its files, at their full size; missing chunks are zeros
    DIR/.holmes/staging/13/done            one byte for each chunk: 1 if it was written

After an interruption, only the missing chunks are transferred. After a crash of the machine, `done` may be on
the disk while the chunks are not. So the SHA-256 of each chunk that it lists is checked again.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from holmes_ext.files import write_whole
from holmes_ext.weights.manifest import VersionManifest

#: Entry of the file `done` for a chunk that was written.
_WRITTEN = b"\x01"
#: Bytes that are written before they are forced to the disk, so that little is left to do at the end.
_SYNC_BYTES = 32 * 2**20
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class StagedVersion:
    """Version of the weights that is arriving at this host: some of its chunks may still be missing.

    Several threads may write different chunks at the same time.

    Args:
        manifest: Manifest of the version.
        folder: Staging folder of the version. If an earlier transfer of the same manifest was interrupted,
            its chunks are used again.
        add_to_store: Moves the folder with the files of the complete version to its final name;
            VersionStore.add_complete.
    """

    def __init__(
        self,
        manifest: VersionManifest,
        folder: Path,
        add_to_store: Callable[[VersionManifest, Path], None],
    ):
        self.manifest = manifest
        self.files = folder / "files"
        self._add_to_store = add_to_store
        self._folder = folder
        self._done_file = folder / "done"
        # Notified after each chunk and by close(). Also the lock of _missing and of the three fields below.
        self._condition = threading.Condition()
        self._is_closed = False
        self._unsynced_bytes = 0  # written since the last fdatasync()
        self._busy_threads = 0  # number of threads that read or write a chunk now
        self._prepare()
        self._done_descriptor = os.open(
            self._done_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        self._descriptors: list[int] = []  # open files, in the order of the manifest
        try:
            self._open_files()
            self._missing = self._unwritten_chunks()  # indices of chunks
        except OSError as error:
            self.close()
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                self.drop()  # gives the space back
            raise

    def _prepare(self) -> None:
        """Create the staging folder, without the files of an earlier transfer of another manifest."""
        manifest_file = self._folder / "manifest.json"
        try:
            is_same = manifest_file.read_text() == self.manifest.text()
        except OSError:
            is_same = False
        if not is_same:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(parents=True)
            write_whole(manifest_file, self.manifest.text())
        self.files.mkdir(exist_ok=True)

    def _open_files(self) -> None:
        """Open all files, and reserve their space on the disk.

        Raises:
            OSError: There is too little space, for example.
        """
        for file in self.manifest.files:
            path = self.files / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(path, flags, 0o644)
            self._descriptors.append(descriptor)
            if file.size:
                os.posix_fallocate(descriptor, 0, file.size)
            os.ftruncate(descriptor, file.size)

    def _unwritten_chunks(self) -> set[int]:
        """Return the indices of the chunks that no earlier transfer has written, or whose digest is wrong."""
        done = os.pread(self._done_descriptor, len(self.manifest.chunks), 0)
        missing = set()
        for index, chunk in enumerate(self.manifest.chunks):
            was_written = done[index : index + 1] == _WRITTEN  # the file may be too short, or empty
            if not was_written or self._digest_of(index) != chunk.digest:
                missing.add(index)
        return missing

    def _digest_of(self, index: int) -> str:
        return hashlib.sha256(self._read(index)).hexdigest()

    def _read(self, index: int) -> bytes:
        chunk = self.manifest.chunks[index]
        return os.pread(self._descriptors[chunk.file], chunk.length, chunk.offset)

    @property
    def is_closed(self) -> bool:
        """Return whether close() was called: the version is complete, or its transfer has ended."""
        with self._condition:
            return self._is_closed

    @property
    def missing(self) -> list[int]:
        """Return the indices of the chunks that are not written, in ascending order."""
        with self._condition:
            return sorted(self._missing)

    @property
    def missing_bytes(self) -> int:
        """Return the sum of the lengths of the chunks that are not written, in bytes."""
        return sum(self.manifest.chunks[index].length for index in self.missing)

    def wait_for(self, index: int, seconds: float) -> bytes | None:
        """Wait until a chunk is written, and return its bytes.

        Args:
            index: Index of the chunk in the manifest.
            seconds: Longest wait.

        Returns:
            The bytes; None: the chunk was not written in time, or close() was called.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._is_closed or index not in self._missing, seconds)
            if self._is_closed or index in self._missing:
                return None
            self._busy_threads += 1
        try:
            return self._read(index)
        finally:
            self._end_access()

    def write(self, index: int, data: memoryview) -> bool:
        """Write a chunk if its bytes have the SHA-256 of the manifest.

        Args:
            index: Index of the chunk in the manifest.
            data: Bytes of the chunk.

        Returns:
            Whether the SHA-256 is right. If not, nothing was written.

        Raises:
            OSError: The chunk cannot be written, or close() was called.
        """
        chunk = self.manifest.chunks[index]
        if hashlib.sha256(data).hexdigest() != chunk.digest:
            return False
        with self._condition:
            if self._is_closed:
                raise OSError(errno.EBADF, "the files were closed")
            self._busy_threads += 1
        try:
            _write_at(self._descriptors[chunk.file], data, chunk.offset)
            # The file `done` has one byte for each chunk.
            os.pwrite(self._done_descriptor, _WRITTEN, index)
            with self._condition:
                self._missing.discard(index)
                self._condition.notify_all()
            self._sync_sometimes(self._descriptors[chunk.file], chunk.length)
        finally:
            self._end_access()
        return True

    def _sync_sometimes(self, descriptor: int, count: int) -> None:
        """Add to the number of written bytes; force a file to the disk after every _SYNC_BYTES of them."""
        with self._condition:
            self._unsynced_bytes += count
            if self._unsynced_bytes < _SYNC_BYTES:
                return
            self._unsynced_bytes = 0
        # Without the lock: other threads go on writing meanwhile.
        os.fdatasync(descriptor)

    def _end_access(self) -> None:
        """Record that this thread no longer reads or writes a chunk; close() waits for that."""
        with self._condition:
            self._busy_threads -= 1
            self._condition.notify_all()

    def finish(self) -> None:
        """Force the complete version to the disk, and move it to its final folder, where readers see it.

        All chunks must have been written.

        Raises:
            OSError: The files cannot be forced to the disk, or cannot be moved.
        """
        for descriptor in self._descriptors:
            os.fsync(descriptor)
        sync_folders(self.files)
        self._add_to_store(self.manifest, self.files)
        self.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """Close the files. The written chunks stay in the staging folder for another transfer."""
        with self._condition:
            if self._is_closed:
                return
            self._is_closed = True
            self._condition.notify_all()
            # A thread must not use a closed descriptor: its number may soon be that of another file.
            self._condition.wait_for(lambda: self._busy_threads == 0)
            for descriptor in (*self._descriptors, self._done_descriptor):
                os.close(descriptor)

    def drop(self) -> None:
        """Close the files, and remove the staging folder with all written chunks."""
        self.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class ArrivingVersions:
    """Table of the versions of the weights that are arriving at this host, by number. Thread-safe.

    The host sends chunks of these versions on to other hosts of its site before the versions are complete.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._staged: dict[int, StagedVersion] = {}

    def add(self, staged: StagedVersion) -> None:
        """Add a version before its first chunk arrives."""
        with self._condition:
            self._staged[staged.manifest.version] = staged
            self._condition.notify_all()

    def remove(self, staged: StagedVersion) -> None:
        """Remove a version that is complete, or whose transfer has ended."""
        with self._condition:
            if self._staged.get(staged.manifest.version) is staged:
                del self._staged[staged.manifest.version]

    def get(self, version: int) -> StagedVersion | None:
        """Return a version that is arriving; None: the version is not arriving now."""
        with self._condition:
            return self._staged.get(version)

    def wait_for(self, version: int, seconds: float) -> StagedVersion | None:
        """Wait until a version begins to arrive, and return it; None: it did not within `seconds`."""
        with self._condition:
            self._condition.wait_for(lambda: version in self._staged, seconds)
            return self._staged.get(version)


def sync_folder(path: Path) -> None:
    """Force a folder's list of names to the disk (fsync), so that new and renamed files survive a crash."""
    descriptor = os.open(path, _FOLDER_FLAGS)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folders(path: Path) -> None:
    """Force the lists of names of a folder and of all of its sub-folders to the disk; see sync_folder()."""
    sync_folder(path)
    for entry in path.rglob("*"):
        if entry.is_dir():
            sync_folder(entry)


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, offset)
        data = data[count:]
        offset += count
