import os
from pathlib import Path

import pytest
import ranks
from carriers import ON_GPUS, PHYSICAL
from holmes_lab import Lab
from holmes_lab.process.templates import Templates

from integration_tests.jobs import CLUSTER, FULL, lab_fixture

os.environ.setdefault("DS_ACCELERATOR", "cuda" if ON_GPUS else "cpu")
# The last two modules are imported at DeepSpeed's first use. On a physical GPU, importing them would begin to
# use the GPU before processes are forked.
if not PHYSICAL:
    ranks.preload(
        "deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.compile.backend"
    )


def pytest_collection_modifyitems(config, items):
    """Select the tests marked over_nccl if jobs train over NCCL, or all with HOLMES_TEST_FULL=1."""
    if not ON_GPUS or FULL:
        return
    folder = Path(__file__).parent
    deselected = [
        item
        for item in items
        if item.path.is_relative_to(folder) and item.get_closest_marker("over_nccl") is None
    ]
    config.hook.pytest_deselected(items=deselected)
    items[:] = [item for item in items if item not in deselected]


#: 2 nodes with InfiniBand, 2 with RoCE.
two_clusters = lab_fixture(CLUSTER, scope="session")


@pytest.fixture(scope="session", autouse=True)
def shared_templates():
    """Let all labs of this process fork their ranks from the same preloaded Pythons."""
    with Templates() as Lab.templates:
        yield
    Lab.templates = None
