"""Tests the networks of process groups that lose a rank in a running job over NCCL.

The jobs run the cases of shrink.py on four nodes with one rank each, in two clusters: ranks 0 and 1 on nodes
with InfiniBand, ranks 2 and 3 on nodes with RoCE. Groups with ranks in both clusters use Ethernet ("Socket").
"""

from pathlib import Path

import pytest
import torch.distributed as dist

from integration_tests.gpu.conftest import TOML

SCRIPT = str(Path(__file__).with_name("shrink.py"))
needs_reconfigure = pytest.mark.skipif(
    not hasattr(dist, "_reconfigure"), reason="torch 2.14 or newer"
)


def run_case(lab, tmp_path, case):
    """Run a case of shrink.py under holmes.

    Args:
        lab: The fixture `lab`: emulated nodes with emulated GPUs.
        tmp_path: A folder for the job's cluster.toml.
        case: The name of the case.

    Returns:
        The job that has ended, and the JSON object that each rank printed, by rank.
    """
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(TOML.replace("processes = 2", "processes = 1"))
    flags = ("--holmes", "--holmes-cluster", str(cluster))
    # The launcher alternates between the clusters; holmes renumbers the ranks, so that each has two in a row.
    job = lab.run(SCRIPT, case, *flags, order="a0,b0,a1,b1", processes=1)
    return job, sorted(job.json, key=lambda printed: printed["rank"])


def test_a_shrunk_group_gets_the_network_of_its_ranks(lab, tmp_path):
    """Ranks 0, 1 and 3 share only Ethernet. Without rank 3, the group uses InfiniBand."""
    job, printed_by_rank = run_case(lab, tmp_path, "shrink_group")
    for printed in printed_by_rank[:2]:
        _default_group, former, shrunk = printed["groups"]
        _name, *former_ranks_and_network = former
        shrunk_name, *shrunk_ranks_and_network = shrunk
        assert printed["sums"] == [0 + 1 + 3, 0 + 1], printed
        assert former_ranks_and_network == [[0, 1, 3], "Socket"], printed
        assert shrunk_name.endswith(":shrunk"), printed
        assert shrunk_ranks_and_network == [[0, 1], "IB"], printed
    # The networks that NCCL itself reports for communicators of two nodes
    assert [group.network for group in job.groups if group.nodes == 2] == ["IB"]
    assert job.sent["a0"]["ib0"] > 100_000  # bytes: the all-reduce of 400 kB used InfiniBand


@pytest.mark.parametrize(
    "case, name",
    [
        ("shrink_default_group", "default_pg:shrunk"),
        pytest.param("reconfigure", "default_pg:reconfigured", marks=needs_reconfigure),
    ],
)
def test_the_default_group_is_recorded_without_its_excluded_rank(lab, tmp_path, case, name):
    """The remaining ranks 0, 1 and 2 are in both clusters, so the group still uses Ethernet."""
    _job, printed_by_rank = run_case(lab, tmp_path, case)
    assert len(printed_by_rank) == 4
    *remaining, excluded = printed_by_rank
    assert excluded["sums"] == [0 + 1 + 2 + 3]
    for printed in remaining:
        assert printed["sums"] == [0 + 1 + 2 + 3, 0 + 1 + 2], printed
        _default_group, *changed_groups = printed["groups"]
        assert changed_groups == [[name, [0, 1, 2], "Socket"]], printed
