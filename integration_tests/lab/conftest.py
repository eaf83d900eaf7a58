import pytest
from holmes_lab import Lab

from integration_tests.lab.processes import SPEC, TOML


@pytest.fixture(scope="session")
def lab():
    """Start the emulated nodes: a0 and a1 with InfiniBand, b0 with RoCE."""
    with Lab(SPEC) as lab:
        yield lab


@pytest.fixture
def toml(tmp_path):
    """Return the path of the cluster.toml of the fixture `lab`."""
    path = tmp_path / "cluster.toml"
    path.write_text(TOML)
    return path
