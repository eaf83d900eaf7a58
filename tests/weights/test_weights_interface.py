"""Functions of holmes_ext.weights that look for versions in the folder of a receiving host."""

import pytest

from holmes_ext import weights
from holmes_ext.errors import HolmesError
from holmes_ext.weights.publishing import publish_folder
from holmes_ext.weights.store import VersionStore


def test_a_version_that_does_not_arrive(tmp_path):
    with pytest.raises(HolmesError, match="version 3 has not arrived within 0.1 s; is `holmes"):
        weights.wait_for_version(tmp_path, 3, timeout_s=0.1)


def test_a_version_that_is_removed_while_it_is_looked_up(tmp_path, monkeypatch):
    """A receiver commits version 2 and removes version 1 after `current` was read."""
    made = tmp_path / "made"
    made.mkdir()
    (made / "a").write_text("a")
    store = VersionStore(tmp_path / "site")
    for version in (1, 2):
        publish_folder(made, store, version)
    store.commit(1)
    chain = VersionStore.chain

    def commit_first(self, version):
        monkeypatch.setattr(VersionStore, "chain", chain)
        store.commit(2)
        store.want(2)
        store.remove_old(keep=1)
        return chain(self, version)

    monkeypatch.setattr(VersionStore, "chain", commit_first)
    assert weights.current_folders(store.path) == [store.path / "2"]
    (store.path / ".holmes" / "manifests" / "2.json").unlink()  # by a user
    with pytest.raises(HolmesError, match="there is no version 2"):
        weights.current_folders(store.path)
