import os
from pathlib import Path

import pytest
import ranks
from carriers import ON_GPUS, PHYSICAL
from holmes_lab import Lab
from holmes_lab.process.templates import Templates

from integration_tests.jobs import CLUSTER, FULL, lab_fixture

os.environ.setdefault("DS_ACCELERATOR", "cuda" if ON_GPUS else "cpu")
# two of them at DeepSpeed's first use; on a physical GPU it would begin to use it
if not PHYSICAL:
    ranks.preload(
        "deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.compile.backend"
    )


def pytest_collection_modifyitems(config, items):
    """Over NCCL: the tests marked over_nccl; with HOLMES_TEST_FULL=1 all."""
    if ON_GPUS and not FULL:
        here = Path(__file__).parent
        left = [
            item
            for item in items
            if item.path.is_relative_to(here) and item.get_closest_marker("over_nccl") is None
        ]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]


#: 2 nodes with InfiniBand, 2 with RoCE.
two_clusters = lab_fixture(CLUSTER, scope="session")


@pytest.fixture(scope="session", autouse=True)
def shared_templates():
    """Let all labs of this process fork their ranks from the same preloaded Pythons."""
    with Templates() as Lab.templates:
        yield
    Lab.templates = None
