import pytest
from weights_sites import Sites


@pytest.fixture
def sites(tmp_path, monkeypatch):
    running = Sites(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(running.home))
    monkeypatch.setenv("WEIGHTS_PORT", str(running.port))
    monkeypatch.setenv("RANK", "0")
    yield running
    running.close()
