import os

import pytest
import ranks

from holmes_ext.cluster.spec import load_spec
from holmes_ext.lab import Lab
from integration_tests.jobs import CLUSTER, LabOf

os.environ.setdefault("DS_ACCELERATOR", "cpu")
ranks.preload("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer")  # which ZeRO imports later


@pytest.fixture(scope="session")
def two_clusters():
    """2 nodes with InfiniBand, 2 with RoCE."""
    with Lab(load_spec(CLUSTER)) as lab:
        yield LabOf(CLUSTER, lab)
