"""The folder of the emulated GPU's build, for users without a home that can be written."""

from pathlib import Path

import pytest
from holmes_lab.gpu import cache

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
