import pytest
from holmes_lab import Lab

from integration_tests.lab.processes import SPEC, TOML


@pytest.fixture(scope="session")
def lab():
    """a0 and a1 with InfiniBand, b0 with RoCE."""
    with Lab(SPEC) as lab:
        yield lab


@pytest.fixture
def toml(tmp_path):
    """Their cluster.toml."""
    path = tmp_path / "cluster.toml"
    path.write_text(TOML)
    return path
