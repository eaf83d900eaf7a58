"""doctor/no_file.py: jobs that would end at start-up because there is no cluster.toml."""

from dataclasses import replace

import pytest
from nics import ETHERNET, IB, ROCE

from holmes_ext.cluster.node_report import NodeReport
from holmes_ext.doctor.command.check import check_command
from holmes_ext.doctor.no_file import check_without_file

DEFAULT = replace(IB, subnet_prefix="fe80:0000:0000:0000")


def node(name, *nics):
    return NodeReport(name, f"boot/{name}", "eth0", (*nics, ETHERNET))


@pytest.mark.parametrize(
    "nnodes, nic, count",
    [
        ("2", DEFAULT, 1),
        ("1", DEFAULT, 0),
        ("2", IB, 0),
        ("2", ROCE, 0),
        ("2", replace(DEFAULT, state="down"), 0),
    ],
)
def test_a_command_on_several_nodes_with_the_default_prefix(tmp_path, nnodes, nic, count):
    script = tmp_path / "train.py"
    script.touch()
    command = ["torchrun", "--nnodes", nnodes, str(script), "--holmes"]
    found = [f for f in check_command(command, None, {}, node("n1", nic)) if f.about == nic.name]
    assert [f.level for f in found] == ["problem"] * count
    assert all("starts 2 nodes without a cluster.toml" in f.what for f in found)


@pytest.mark.parametrize(
    "nics, words",
    [
        ((DEFAULT, DEFAULT), "which does not tell one fabric from two"),
        (
            (
                replace(ROCE, addresses=("10.0.0.1/31",)),
                replace(ROCE, addresses=("10.0.0.3/31",)),
            ),
            "which does not tell routed RoCE, one fabric, from several",
        ),
        ((replace(ROCE, addresses=()), ROCE), "has no IPv4 address with a subnet"),
        ((IB, IB), ""),
        ((ROCE, ROCE), ""),
    ],
)
def test_nodes_that_their_subnets_do_not_tell_apart(nics, words):
    nodes = [node(f"n{number}", nic) for number, nic in enumerate(nics)]
    found = list(check_without_file(nodes, is_job=True))
    assert [f.level for f in found] == (["problem"] if words else [])
    assert all(words in f.what for f in found)
    assert all(f.level == "note" for f in check_without_file(nodes, is_job=False))
