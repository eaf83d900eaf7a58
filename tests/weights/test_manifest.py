"""A manifest from another process: what is refused before anything is written."""

import pytest

from holmes_ext.errors import HolmesError
from holmes_ext.weights.manifest import (
    LEAST_CHUNK_BYTES,
    MOST_CHUNK_BYTES,
    VersionManifest,
    chunk_bytes_of,
)

DIGEST = "0" * 64


def document(**changes):
    """Return a manifest of one file of 3 bytes."""
    file = {"name": "a", "size": 3, "chunks": [DIGEST]}
    return {"version": 2, "files": [file], "parent": None, "format": 1, **changes}


def file(name="a", size=3, chunks=(DIGEST,)):
    return {"name": name, "size": size, "chunks": list(chunks)}


def test_a_valid_one_and_its_chunks():
    files = [file("a/b", LEAST_CHUNK_BYTES + 1, [DIGEST] * 2), file("c", 0, [])]
    manifest = VersionManifest.of_document(document(files=files), "east")
    assert manifest.bytes == LEAST_CHUNK_BYTES + 1
    assert [(chunk.file, chunk.offset, chunk.length) for chunk in manifest.chunks] == [
        (0, 0, LEAST_CHUNK_BYTES),
        (0, LEAST_CHUNK_BYTES, 1),
    ]


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd",
        "..",
        "../a",
        "a/../../b",
        "a//b",
        "./a",
        "a/",
        "",
        "a\nb",
        "a\\b",
        "\x1b[2J",
        "x" * 256,
        "a/" * 600 + "a",
    ],
)
def test_names_that_lead_elsewhere(name):
    with pytest.raises(HolmesError, match="east: .*name of a file"):
        VersionManifest.of_document(document(files=[file(name)]), "east")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"version": -1}, "version -1 is not"),
        ({"version": 10**12}, "is not a whole number"),
        ({"version": True}, "version"),
        ({"parent": 2}, "a parent is older"),
        ({"parent": -1}, "version -1"),
        ({"chunk_bytes": LEAST_CHUNK_BYTES - 1}, "a chunk cannot have"),
        ({"chunk_bytes": 3 * LEAST_CHUNK_BYTES}, "a chunk cannot have"),
        ({"chunk_bytes": 2 * MOST_CHUNK_BYTES}, "a chunk cannot have"),
        ({"format": 2}, "install the same holmes_ext"),
        ({"files": []}, "1 to 10000 files"),
        ({"files": [file()] * 2}, "occurs twice"),
        ({"files": [file("a"), file("a/b")]}, "both a file and a folder"),
        ({"files": [file(size=-1)]}, "cannot have -1 bytes"),
        ({"files": [file(size=2**62)]}, "cannot have"),
        ({"files": [file(size=LEAST_CHUNK_BYTES + 1)]}, "needs 2 chunks, but has 1"),
        ({"files": [file(chunks=["x" * 64])]}, "is not a SHA-256"),
        ({"files": [file(f"f{number}") for number in range(10_001)]}, "1 to 10000 files"),
        ({"files": "a"}, "files"),
        ({"more": 1}, "more"),
    ],
)
def test_other_invalid_ones(changes, message):
    with pytest.raises(HolmesError, match=message):
        VersionManifest.of_document(document(**changes), "east")


@pytest.mark.parametrize(
    "size, expected",
    [
        (0, LEAST_CHUNK_BYTES),
        (512 * LEAST_CHUNK_BYTES, LEAST_CHUNK_BYTES),
        (512 * LEAST_CHUNK_BYTES + 1, 2 * LEAST_CHUNK_BYTES),
        (10**12, MOST_CHUNK_BYTES),
    ],
)
def test_chunks_grow_with_the_version(size, expected):
    assert chunk_bytes_of(size) == expected
