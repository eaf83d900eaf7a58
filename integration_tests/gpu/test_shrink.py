"""Tests process groups that lose a rank while the job runs, over NCCL on four nodes of two clusters."""

from pathlib import Path

import pytest
import torch.distributed as dist

from integration_tests.gpu.conftest import TOML

SHRINK = str(Path(__file__).with_name("shrink.py"))
needs_reconfigure = pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="torch 2.14 or newer")


def run(lab, tmp_path, scene):
    """Run a scene of shrink.py with holmes, and return the run and the lines of its ranks, in their order."""
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(TOML.replace("processes = 2", "processes = 1"))
    flags = ("--holmes", "--holmes-cluster", str(cluster))
    ran = lab.run(SHRINK, scene, *flags, order="a0,b0,a1,b1", processes=1)
    return ran, sorted(ran.json, key=lambda line: line["rank"])


def test_a_shrunk_group_gets_the_network_of_its_ranks(lab, tmp_path):
    """Without the rank in the other cluster, the group uses InfiniBand."""
    ran, lines = run(lab, tmp_path, "shrink_group")
    for line in lines[:2]:
        former, shrunk = line["groups"][1:]
        assert line["sums"] == [4.0, 1.0] and former[1:] == [[0, 1, 3], "Socket"], line
        assert shrunk[0].endswith(":shrunk") and shrunk[1:] == [[0, 1], "IB"], line
    assert [group.network for group in ran.groups if group.nodes == 2] == ["IB"]  # what NCCL itself says
    assert ran.sent["a0"]["ib0"] > 100_000


@pytest.mark.parametrize("scene, name", [
    ("shrink_default_group", "default_pg:shrunk"),
    pytest.param("reconfigure", "default_pg:reconfigured", marks=needs_reconfigure),
])  # fmt: skip
def test_the_default_group_without_its_last_rank(lab, tmp_path, scene, name):
    _ran, lines = run(lab, tmp_path, scene)
    assert [line["sums"] for line in lines] == [[6.0, 3.0]] * 3 + [[6.0]]
    assert all(line["groups"][1:] == [[name, [0, 1, 2], "Socket"]] for line in lines[:3]), lines
