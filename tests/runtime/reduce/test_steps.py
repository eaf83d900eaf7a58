"""A process that ends, well or badly, while something is on its way over gloo in another thread.

It ends with its own status.
"""

import os
import subprocess
import sys

import pytest

from integration_tests.jobs import full

JOB = """
import datetime, sys, time, torch, torch.distributed as dist
from holmes_ext.runtime.reduce.owned import ReduceToOwners
from holmes_ext.runtime.reduce.hierarchical import HierarchicalAllReduce
rank, kind, error = int(sys.argv[1]), sys.argv[3], sys.argv[4]
limit = datetime.timedelta(seconds=60)
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2, timeout=limit)
if kind == "owners":
    reduction = ReduceToOwners(dist.group.WORLD)
    start = lambda: reduction.reduce(torch.ones(10), [(5, 0), (5, 1)])
else:
    reduction = HierarchicalAllReduce([[0], [1]])
    start = lambda: reduction.all_reduce(torch.ones(10))
if rank == 1:
    time.sleep(1)
work = start()
if error:
    raise ValueError(error)
"""


@pytest.mark.parametrize(
    "kind, error",
    [pytest.param("owners", "", marks=full), ("a hierarchical all-reduce", "wrong data")],
)
def test_a_process_ends_with_its_own_status(kind, error, tmp_path):
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    ends = [
        subprocess.Popen(
            [sys.executable, "-c", JOB, str(rank), str(tmp_path / "store"), kind, error],
            env=environ,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [one.communicate(timeout=90)[1] for one in ends]
    assert [one.returncode for one in ends] == [1 if error else 0] * 2, said
    assert all(error in text for text in said)
