import os
from pathlib import Path

import pytest
import ranks
from carriers import ON_GPUS, PHYSICAL

from holmes_ext.cluster.spec import load_spec
from holmes_ext.lab import Lab
from integration_tests.jobs import CLUSTER, FULL, LabOf

os.environ.setdefault("DS_ACCELERATOR", "cuda" if ON_GPUS else "cpu")
# two of them at DeepSpeed's first use; on a physical GPU it would begin to use it
if not PHYSICAL:
    ranks.preload("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.compile.backend")


def pytest_configure(config):
    config.addinivalue_line("markers", "over_nccl: of the short run over NCCL (HOLMES_TEST_CARRIER=nccl)")


def pytest_collection_modifyitems(config, items):
    """Over NCCL: the tests marked over_nccl; with HOLMES_TEST_FULL=1 all."""
    if ON_GPUS and not FULL:
        here = Path(__file__).parent
        left = [item for item in items
                if item.path.is_relative_to(here) and item.get_closest_marker("over_nccl") is None]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]


@pytest.fixture(scope="session")
def two_clusters():
    """2 nodes with InfiniBand, 2 with RoCE."""
    with Lab(load_spec(CLUSTER)) as lab:
        yield LabOf(CLUSTER, lab)
