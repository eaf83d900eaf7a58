"""The folder of the emulated GPU's build, for users without a home that can be written."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from holmes_lab.gpu import cache
from holmes_lab.gpu.build import build

from holmes_ext.errors import HolmesError


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for name in (cache.VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


def test_a_user_without_home_gets_a_folder_in_tmp(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(cache.tempfile, "gettempdir", lambda: "/scratch")
    assert cache.cache_folder() == Path("/scratch/holmes_ext/gpu")


def test_a_home_that_cannot_be_written_is_one_line(monkeypatch):
    monkeypatch.setenv("HOME", "/proc/self/no-such-home")
    with pytest.raises(HolmesError, match="cannot be built there .*HOLMES_GPU_CACHE") as error:
        cache.make_cache(cache.cache_folder())
    assert "\n" not in str(error.value)


def test_a_cache_that_everybody_may_change_is_refused(tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir()
    cache.make_cache(folder)
    folder.chmod(0o777)
    for use in (cache.make_cache, cache.require_own_cache):
        with pytest.raises(
            HolmesError, match="cache: .* can be changed by every user .*HOLMES_GPU_CACHE"
        ):
            use(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
@pytest.mark.parametrize("part", ["", "runtime-0123"])
def test_root_loads_no_libraries_of_other_users(tmp_path, part):
    """Root accepted a cache that another user had prepared, with libraries of that user."""
    folder = tmp_path / "cache"
    (folder / "runtime-0123").mkdir(parents=True)
    os.chown(folder / part, 65534, 65534)
    unit = SimpleNamespace(name="runtime", folder="runtime-0123")
    with pytest.raises(HolmesError, match="belongs to user 65534; name another folder"):
        build([unit], folder)
