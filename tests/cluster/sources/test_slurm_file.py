"""Slurm's nodes from a file: the output of `scontrol show node`, or a slurm.conf."""

import pytest

from holmes_ext.cli.main import main
from holmes_ext.cluster.sources.slurm import nodes_of_file, parse_nodes
from holmes_ext.cluster.sources.topology import parse_topology
from holmes_ext.errors import HolmesError

LONG = """\
NodeName=gpu01 Arch=x86_64 CoresPerSocket=32
   CPUAlloc=0 CPUTot=64 CPULoad=0.01
   AvailableFeatures=ib,hdr
   ActiveFeatures=ib,hdr
   Gres=gpu:nvidia_a100-sxm4-40gb:4(S:0-1)
   NodeAddr=gpu01 NodeHostName=gpu01 Version=23.11.4
   OS=Linux 5.14.0-362.el9.x86_64 #1 SMP
   State=IDLE ThreadsPerCore=1 TmpDisk=0 Weight=1
   Partitions=gpu,all

NodeName=gpu02 Arch=x86_64 CoresPerSocket=32
   AvailableFeatures=ib,hdr
   Gres=gpu:nvidia_a100-sxm4-40gb:4(S:0-1)
   State=DOWN*+DRAIN ThreadsPerCore=1
   Partitions=gpu,all
"""
CONFIGURATION = """\
# nodes
NodeName=DEFAULT CPUs=64 RealMemory=512000 State=UNKNOWN
NodeName=a[01-02] Gres=gpu:h100:8 Feature=ib,ndr
NodeName=b[1-2],b4 \\
    Gres=gpu:2080ti:4 Features=roce
PartitionName=big Nodes=a[01-02] Default=YES
PartitionName=all Nodes=ALL
"""


def read(tmp_path, text):
    file = tmp_path / "nodes.txt"
    file.write_text(text)
    return nodes_of_file(str(file))


def test_the_long_form_of_scontrol(tmp_path):
    found = read(tmp_path, LONG)
    assert [(node.name, node.processes, node.gpu, node.kind, node.why_not) for node in found] == [
        ("gpu01", 4, "a100-sxm4-40gb", "ib", ""),
        ("gpu02", 4, "a100-sxm4-40gb", "ib", "down"),
    ]
    assert found[0].labels[:2] == ("gpu", "all")


def test_a_slurm_conf(tmp_path):
    found = read(tmp_path, CONFIGURATION)
    assert [(node.name, node.processes, node.gpu, node.kind, node.why_not) for node in found] == [
        ("a01", 8, "H100", "ib", ""),
        ("a02", 8, "H100", "ib", ""),
        ("b1", 4, "2080ti", "roce", ""),
        ("b2", 4, "2080ti", "roce", ""),
        ("b4", 4, "2080ti", "roce", ""),
    ]
    assert found[0].labels[:2] == ("big", "all") and found[2].labels[0] == "all"


@pytest.mark.parametrize(
    "gres, gpu, count",
    [
        ("gpu:2080ti:4", "2080ti", 4),
        ("gpu:1080ti:8(IDX:0-7)", "1080ti", 8),
        ("gpu:a100:2(S:0),gpu:a100_3g.20gb:4(S:1)", "A100", 6),
        ("gpu:h100_nvl:2", "h100_nvl", 2),
        ("gpu:mi300x:8,tmpdisk:1T", "MI300X", 8),
        ("gpu:gh200:4", "GH200", 4),
        ("gpu:b200:8(S:0-1)", "B200", 8),
    ],
)
def test_generic_resources(gres, gpu, count):
    (node,) = parse_nodes(f"NodeName=n1 Gres={gres} State=IDLE", parse_topology("", "t"))
    assert (node.gpu, node.processes) == (gpu, count)


def test_the_output_of_sinfo_is_refused_with_the_command_to_use(tmp_path):
    with pytest.raises(
        HolmesError, match="no line has NodeName=; write it with: scontrol show node"
    ):
        read(
            tmp_path,
            "PARTITION AVAIL TIMELIMIT NODES STATE NODELIST\ngpu* up infinite 2 idle a[1-2]\n",
        )


def test_the_command_takes_a_file(tmp_path, capsys):
    file = tmp_path / "nodes.txt"
    file.write_text(LONG)
    rates = ["--rate", "gpu=200Gb/s", "--rate", "ethernet=25Gb/s"]
    assert main(["discover", "--from", "slurm", str(file), *rates]) == 0
    printed = capsys.readouterr()
    assert 'nodes = ["gpu[01-02]"]' in printed.out and 'gpu = "a100-sxm4-40gb"' in printed.out
    assert "now down: gpu02" in printed.err


@pytest.mark.parametrize(
    "state, reason",
    [
        ("IDLE", ""),
        ("IDLE+PLANNED", ""),
        ("IDLE~", ""),
        ("IDLE*", "not responding"),
        ("IDLE*+DRAIN", "drain"),
        ("DOWN*+DRAIN", "down"),
        ("MIXED+MAINT", "mixed"),
        ("UNKNOWN", ""),
    ],
)
def test_states(state, reason):
    (node,) = parse_nodes(f"NodeName=n1 Gres=gpu:8 State={state}", parse_topology("", "t"))
    assert node.why_not == reason
