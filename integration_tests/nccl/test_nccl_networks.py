"""Which network NCCL itself says that each communicator chose: several ranks on ONE GPU, each a host of its own to
NCCL.

Nothing here runs without CUDA, and it has not been run yet. NCCL reads its socket interface once for each process, so
two socket interfaces cannot stand for two NICs of one rank: the choice between networks shows only where there is an
RDMA device too.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import clusters
import pytest
import ranks

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.skipif(
    not torch.version.cuda or not torch.cuda.is_available(),
    reason="needs a CUDA device and a torch built for CUDA: here NCCL cannot be run for real",
)

ROOT = Path(__file__).resolve().parents[2]
RANKS = 4
CLUSTER = clusters.toml("a ib 100Gb/s a0,a1", "b ib 100Gb/s b0,b1", ethernet="10Gb/s")


def launch(tmp_path, *, holmes: bool, **environment):
    """JSON line of every rank, and each rank's NCCL debug output."""
    names = ["a0", "b0", "a1", "b1"]  # in turn, as a scheduler that knows nothing launches them
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    store, environ = ranks.hosted_store()
    processes = []
    for rank, name in enumerate(names):
        env = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
            **environ, "NCCL_HOSTID": name, "HOLMES_NODE": name,
            "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV,GRAPH", "NCCL_P2P_DISABLE": "1",
            "NCCL_SHM_DISABLE": "1", **environment,
        }
        flags = ["--holmes", "--holmes-cluster", str(tmp_path / "cluster.toml"), "--holmes-verbose",
                 "on"] if holmes else []
        command = [sys.executable, str(ROOT / "integration_tests" / "nccl" / "groups_on_one_gpu.py"), *flags]
        processes.append(
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    outputs = []
    for process in processes:
        try:
            outputs.append(process.communicate(timeout=180)[0])
        except subprocess.TimeoutExpired:
            for other in processes:
                other.kill()
            raise
    assert all(process.returncode == 0 for process in processes), "\n".join(outputs)
    del store
    lines = [next(json.loads(line) for line in output.splitlines() if line.startswith('{"rank"')) for output in outputs]
    return lines, outputs


def networks(output: str) -> list[str]:
    """The networks that NCCL says it uses, one for each communicator, in the order of their making."""
    return re.findall(r"Using network (\w+)", output)


def test_several_ranks_on_one_gpu_use_nccls_network(tmp_path):
    """NCCL takes ranks with different NCCL_HOSTID for different hosts: what the other test rests on."""
    lines, outputs = launch(tmp_path, holmes=False, NCCL_SOCKET_IFNAME="lo")
    assert [line["world"] for line in sorted(lines, key=lambda line: line["rank"])] == [6.0] * RANKS
    assert all("NET/Socket" in output for output in outputs)


@pytest.mark.skipif(not list(Path("/sys/class/infiniband").glob("*")),
                    reason="no RDMA device in /sys/class/infiniband: IB cannot be chosen here")
def test_groups_inside_a_cluster_use_ib_and_others_sockets(tmp_path):
    lines, outputs = launch(tmp_path, holmes=True)
    by_rank = sorted(lines, key=lambda line: line["rank"])
    assert [line["inside"] for line in by_rank] == [1.0, 1.0, 5.0, 5.0]
    assert all(line["hostid"][0] == ("a" if line["rank"] < 2 else "b") for line in by_rank)
    for output in outputs:
        assert {"IB", "Socket"} <= set(networks(output)), output
