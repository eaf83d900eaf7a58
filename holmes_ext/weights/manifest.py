"""Manifest of a version of the weights: names and sizes of its files, and the SHA-256 of each chunk of them.

A version of a model's weights is a numbered folder of files that never changes. Its files are transferred in
chunks, and the receiver checks the SHA-256 of each chunk as soon as it arrives. A version may be a delta: it
only has changes to an older version, its parent.

Chunks are small in small versions, because a host sends a chunk on only when it is complete. They are larger
in large versions, whose manifests would become long otherwise.

A manifest that came over a network is checked before anything is written: numbers and sizes have limits,
and no name can lead out of the version's folder.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from holmes_ext.document import Table
from holmes_ext.errors import HolmesError

#: Bytes of a chunk, the unit of transfer: a power of two from the first number to the second.
LEAST_CHUNK_BYTES = 2**18
MOST_CHUNK_BYTES = 8 * 2**20
#: Up to this number of chunks, a version has chunks of the least size. One chunk is then so small a share of
#: the version that waiting for a complete chunk before it is sent on costs little time.
_CHUNKS_BEFORE_GROWTH = 512
#: Most files of a version.
MOST_FILES = 10_000
#: Most chunks of a version: 4 TB.
MOST_CHUNKS = 500_000
#: Largest number of a version, plus 1.
MOST_VERSIONS = 10**12
#: Most bytes of a file's name with its folders, and of each part of it.
_LONGEST_NAME = 1024
_LONGEST_PART = 255
#: Number of the format of a manifest.
_FORMAT = 1
_DIGEST = re.compile(r"[0-9a-f]{64}")


class VersionChunk(NamedTuple):
    """Part of a file, at most 8 MiB: the unit for sending and checking versions of the weights."""

    file: int  # index in the manifest's files
    offset: int  # in the file, in bytes
    length: int  # in bytes
    digest: str  # SHA-256, in hexadecimal digits


@dataclass(frozen=True)
class VersionFile:
    """Name, size and digests of a file of a version of the weights."""

    name: str  # relative to the version's folder, with "/" between folders
    size: int  # in bytes
    chunks: tuple[str, ...]  # SHA-256 of each chunk, in hexadecimal digits

    def __post_init__(self) -> None:
        check_file_name(self.name)
        if not 0 <= self.size <= MOST_CHUNKS * MOST_CHUNK_BYTES:
            raise HolmesError(f"file {self.name!r} cannot have {self.size} bytes")
        for digest in self.chunks:
            if not _DIGEST.fullmatch(digest):
                raise HolmesError(f"file {self.name!r}: {digest!r:.80} is not a SHA-256")


@dataclass(frozen=True)
class VersionManifest:
    """List of the files of a version of the weights, with its number and the SHA-256 of each chunk."""

    version: int
    files: tuple[VersionFile, ...]
    parent: int | None = None  # version to which this delta is applied; None: a full version
    chunk_bytes: int = LEAST_CHUNK_BYTES  # of each chunk but the last one of a file
    format: int = _FORMAT  # of this document

    def __post_init__(self) -> None:
        if self.format != _FORMAT:
            raise HolmesError(
                f"format {self.format} is not {_FORMAT}; install the same holmes_ext everywhere"
            )
        check_version(self.version)
        if self.parent is not None:
            check_parent(self.version, self.parent)
        if not 0 < len(self.files) <= MOST_FILES:
            raise HolmesError(f"a version has 1 to {MOST_FILES} files, not {len(self.files)}")
        if sum(len(file.chunks) for file in self.files) > MOST_CHUNKS:
            raise HolmesError(f"a version has at most {MOST_CHUNKS * MOST_CHUNK_BYTES} bytes")
        _check_paths([file.name for file in self.files])
        self._check_chunk_counts()

    def _check_chunk_counts(self) -> None:
        """Raise HolmesError if the size of a chunk is not valid, or a file has a wrong number of chunks.

        A valid size is a power of two from LEAST_CHUNK_BYTES to MOST_CHUNK_BYTES.
        """
        is_in_limits = LEAST_CHUNK_BYTES <= self.chunk_bytes <= MOST_CHUNK_BYTES
        is_power_of_two = self.chunk_bytes & (self.chunk_bytes - 1) == 0
        if not is_in_limits or not is_power_of_two:
            raise HolmesError(f"a chunk cannot have {self.chunk_bytes} bytes")
        for file in self.files:
            count = len(file.chunks)
            required_count = -(-file.size // self.chunk_bytes)  # rounded up
            if count != required_count:
                raise HolmesError(
                    f"file {file.name!r} of {file.size} bytes needs {required_count} chunks, but has {count}"
                )

    @property
    def bytes(self) -> int:
        """Return the size of the version, in bytes: the sum over all of its files."""
        return sum(file.size for file in self.files)

    @cached_property
    def chunks(self) -> tuple[VersionChunk, ...]:
        """Return the chunks of all files, in the order of the files.

        The index of a chunk in this tuple identifies the chunk in requests and on the disk.
        """
        chunks = []
        for file_index, file in enumerate(self.files):
            for number, digest in enumerate(file.chunks):
                offset = number * self.chunk_bytes
                length = min(self.chunk_bytes, file.size - offset)  # the last one may be shorter
                chunks.append(VersionChunk(file_index, offset, length, digest))
        return tuple(chunks)

    @cached_property
    def digest(self) -> str:
        """Return the SHA-256 of the manifest: it identifies the content of the version."""
        return hashlib.sha256(self.text().encode()).hexdigest()

    def document(self) -> dict[str, Any]:
        """Return this manifest as a dictionary that json.dumps() accepts."""
        return asdict(self)

    def text(self) -> str:
        """Return this manifest as JSON text; equal manifests have equal texts."""
        return json.dumps(self.document(), separators=(",", ":"))

    @classmethod
    def of_document(cls, document: dict[str, Any], source: str) -> VersionManifest:
        """Return the manifest that a parsed JSON document describes, after checking it.

        Args:
            document: The manifest as document() returns it.
            source: Name of the sender or file, for error messages.

        Raises:
            HolmesError: The document is no valid manifest.
        """
        return Table(document, source).into(cls)


def check_version(version: int) -> None:
    """Raise HolmesError if a number is not a valid version number: 0 to MOST_VERSIONS - 1."""
    if not 0 <= version < MOST_VERSIONS:
        raise HolmesError(f"version {version} is not a whole number from 0 to {MOST_VERSIONS - 1}")


def check_parent(version: int, parent: int) -> None:
    """Raise HolmesError unless the parent of a delta is a valid version number below that of the delta."""
    check_version(parent)
    if parent >= version:
        raise HolmesError(f"version {version} cannot be a delta to {parent}; a parent is older")


def chunk_bytes_of(size: int) -> int:
    """Return the size of a chunk, in bytes, for a version of `size` bytes in all.

    It is the least power of two that makes at most 512 chunks of the version, but not below
    LEAST_CHUNK_BYTES and not above MOST_CHUNK_BYTES.
    """
    chunk_bytes = LEAST_CHUNK_BYTES
    while size > chunk_bytes * _CHUNKS_BEFORE_GROWTH and chunk_bytes < MOST_CHUNK_BYTES:
        chunk_bytes *= 2
    return chunk_bytes


def check_file_name(name: str) -> None:
    """Raise HolmesError if a file name is not valid, or could lead out of the version's folder, as "../a"."""
    parts = name.split("/")
    is_text = name.isprintable() and "\\" not in name
    if not is_text or len(name.encode()) > _LONGEST_NAME:
        raise HolmesError(
            f"{name!r:.200} is no name of a file: printable characters without '\\',"
            f" at most {_LONGEST_NAME} bytes"
        )
    for part in parts:
        if part in ("", ".", "..") or len(part.encode()) > _LONGEST_PART:
            raise HolmesError(f"{name!r:.200} is not the name of a file inside a version's folder")


def _check_paths(names: Iterable[str]) -> None:
    """Raise HolmesError if two files have the same name, or a file is also the folder of another file."""
    files: set[str] = set()
    for name in names:
        if name in files:
            raise HolmesError(f"file {name!r} occurs twice")
        files.add(name)
    for name in files:
        for folder in PurePosixPath(name).parents:
            if str(folder) in files:
                raise HolmesError(f"{str(folder)!r} is both a file and a folder")
