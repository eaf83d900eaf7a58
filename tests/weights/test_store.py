"""The store of versions: publishing, staging, chains, removal, and what is never half there."""

import errno
import os
import threading

import pytest

from holmes_ext.errors import HolmesError
from holmes_ext.weights import current_folders, publishing
from holmes_ext.weights.manifest import LEAST_CHUNK_BYTES
from holmes_ext.weights.publishing import publish_folder
from holmes_ext.weights.store import ChunkReader, VersionStore


@pytest.fixture
def store(tmp_path):
    return VersionStore(tmp_path / "store")


@pytest.fixture
def folder(tmp_path):
    """Return a folder with a file of two chunks, and one in a sub-folder."""
    path = tmp_path / "folder"
    (path / "sub").mkdir(parents=True)
    (path / "model.bin").write_bytes(os.urandom(LEAST_CHUNK_BYTES + 5))
    (path / "sub" / "config.json").write_text("{}")
    return path


def test_published_and_staged(tmp_path, store, folder):
    manifest = publish_folder(folder, store, 3)
    assert store.versions() == [3] and store.wanted == 3 and store.manifest(3) == manifest
    site = VersionStore(tmp_path / "site")
    site.make()
    staged = site.stage(manifest)
    reader = ChunkReader(store)
    assert staged.missing == [0, 1, 2]
    assert not staged.write(
        0, memoryview(b"x" * LEAST_CHUNK_BYTES)
    )  # a wrong digest is not written
    assert staged.write(0, memoryview(reader.read(3, 0)))
    staged.close()
    assert site.versions() == []
    staged = site.stage(manifest)
    assert staged.missing == [1, 2]  # what is there stays
    for index in staged.missing:
        assert staged.write(index, memoryview(reader.read(3, index)))
    staged.finish()
    assert (site.folder(3) / "model.bin").read_bytes() == (folder / "model.bin").read_bytes()
    assert (site.folder(3) / "sub" / "config.json").read_text() == "{}"
    assert current_folders(site.path) == []
    site.commit(3)
    assert current_folders(site.path) == [site.folder(3)]
    assert (site.path / "current" / "sub" / "config.json").exists()
    with pytest.raises(HolmesError, match="exists already"):
        site.stage(manifest)


def test_a_chunk_that_a_crash_has_torn_is_missing(tmp_path, store, folder):
    manifest = publish_folder(folder, store, 1)
    site = VersionStore(tmp_path / "site")
    site.make()
    staged = site.stage(manifest)
    staged.write(0, memoryview(ChunkReader(store).read(1, 0)))
    with open(staged.files / "model.bin", "r+b") as file:
        file.seek(100)
        file.write(b"torn")
    staged.close()
    assert site.stage(manifest).missing == [0, 1, 2]


def test_numbers_and_parents(store, folder):
    publish_folder(folder, store, 1)
    for version, parent, message in (
        (1, None, "published already"),
        (0, None, "older than 1"),
        (3, 2, "delta to 2, which is not published"),
        (3, 3, "a parent is older"),
        (-1, None, "whole number"),
    ):
        with pytest.raises(HolmesError, match=message):
            publish_folder(folder, store, version, parent=parent)
    assert store.versions() == [1]


def test_old_versions_are_removed_but_chains_stay(store, folder):
    publish_folder(folder, store, 1, keep=2)
    publish_folder(folder, store, 2, parent=1, keep=2)
    publish_folder(folder, store, 3, parent=2, keep=2)
    publish_folder(folder, store, 4, parent=3, keep=2)
    assert store.versions() == [1, 2, 3, 4] and store.chain(4) == [1, 2, 3, 4]
    store.commit(4)
    publish_folder(folder, store, 5, keep=2)
    publish_folder(folder, store, 6, keep=2)
    assert store.versions() == [1, 2, 3, 4, 5, 6]  # version 4 is in use
    store.commit(5)
    publish_folder(folder, store, 7, keep=2)
    assert store.versions() == [5, 6, 7]


def test_partial_versions_stay_while_they_are_needed(tmp_path, store, folder):
    manifests = [publish_folder(folder, store, version, keep=9) for version in (1, 2, 3)]
    site = VersionStore(tmp_path / "site")
    site.make()
    for manifest in manifests[:2]:
        site.stage(manifest).close()
    staged = site.stage(manifests[2])
    for index in staged.missing:
        staged.write(index, memoryview(ChunkReader(store).read(3, index)))
    staged.finish()
    site.remove_old(keep=1, protected=[2, 3])
    assert os.listdir(site.path / ".holmes" / "staging") == ["2"]


@pytest.mark.parametrize("change", ["append", "replace", "remove", "add"])
def test_a_folder_that_changes(monkeypatch, store, folder, change):
    copy_file = publishing._copy_file

    def changing(*arguments):
        entry = copy_file(*arguments)
        model = folder / "model.bin"
        if change == "append":
            with open(model, "ab") as file:
                file.write(b"x")
        elif change == "replace":
            os.replace(folder / "sub" / "config.json", model)
        elif change == "remove":
            model.unlink(missing_ok=True)
        else:
            (folder / "new").write_text("x")
        return entry

    monkeypatch.setattr(publishing, "_copy_file", changing)
    with pytest.raises(HolmesError, match="changed while it was published"):
        publish_folder(folder, store, 1)
    assert store.versions() == [] and store.wanted is None
    assert not list((store.path / ".holmes" / "removed").iterdir())


def test_a_full_disk(monkeypatch, store, folder):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    publish_folder(folder, store, 1)
    monkeypatch.setattr(publishing, "_write_all", full)
    with pytest.raises(HolmesError, match="No space left on device.*make space, or set"):
        publish_folder(folder, store, 2)
    assert store.versions() == [1] and store.wanted == 1
    assert not list((store.path / ".holmes" / "removed").iterdir())


def test_folders_that_cannot_be_published(tmp_path, store, folder):
    for path, message in (
        (tmp_path / "none", "is no folder"),
        (tmp_path / "empty", "has no files"),
    ):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(HolmesError, match=message):
            publish_folder(path, store, 1)
    (folder / "link").symlink_to("/etc/passwd")
    with pytest.raises(HolmesError, match="link or no regular file"):
        publish_folder(folder, store, 1)
    (folder / "link").unlink()
    os.mkfifo(folder / "pipe")
    with pytest.raises(HolmesError, match="link or no regular file"):
        publish_folder(folder, store, 1)


def test_a_killed_publisher_leaves_nothing(store, folder):
    store.make()
    (store.new_partial_folder(1) / "model.bin").write_text("half")
    publish_folder(folder, store, 1)
    assert not list((store.path / ".holmes" / "removed").iterdir())


def test_one_process_adds_at_a_time(store, folder):
    store.make()
    with store.lock(), pytest.raises(HolmesError, match="another process adds versions"):
        publish_folder(folder, store, 1)


def test_threads_write_chunks_of_one_version(tmp_path, store, folder):
    manifest = publish_folder(folder, store, 1)
    site = VersionStore(tmp_path / "site")
    site.make()
    staged = site.stage(manifest)
    threads = [
        threading.Thread(
            target=lambda index=index: staged.write(
                index, memoryview(ChunkReader(store).read(1, index))
            )
        )
        for index in staged.missing
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    staged.finish()
    assert site.versions() == [1]
