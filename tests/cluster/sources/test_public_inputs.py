"""Hostfiles, Slurm's nodes and Kubernetes labels from public repositories, cut to what matters.

docs/inputs.md lists where each comes from. Names and shapes are theirs.
"""

import json

import pytest

from holmes_ext.cluster.sources.found import clusters_of
from holmes_ext.cluster.sources.hostfile import read_hostfile
from holmes_ext.cluster.sources.kubernetes import read_nodes
from holmes_ext.cluster.sources.slurm import nodes_of_file
from holmes_ext.errors import HolmesError


def clusters(read, tmp_path, text):
    """Return (name, number of nodes, processes, GPU) of the clusters that a text describes."""
    file = tmp_path / "input"
    file.write_text(text)
    found = clusters_of(read(str(file)))
    return [(c.name, len(c.nodes), c.processes, c.gpu) for c in found]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("worker-1 slots=4\nworker-2 slots=4\n", [("pods", 2, 4, "")]),
        (
            "\n    worker-1 slots=2\n    worker-2 slots=2\n\n    #worker-1 slots=3\n",
            [("pods", 2, 2, "")],
        ),
        ("master-1 slots=4\nworker-1 slots=4\n", [("pods", 2, 4, "")]),
        (
            " yethiraj30 slots=8 max_slots=8\n yethiraj31 slots=8 max_slots=8\n",
            [("yethiraj", 2, 8, "")],
        ),
        (
            "notebookv2-5755710f7b7b-1637033279-worker-0 slots=8\n"
            "notebookv2-5755710f7b7b-1637033279-worker-1 slots=8\n",
            [("notebookv2-5755710f7b7b-1637033279", 2, 8, "")],
        ),
        (
            "compute-12 16 all.q@compute-12 UNDEFINED\ncompute-13 16 all.q@compute-13 UNDEFINED\n"
            "compute-12 4 short.q@compute-12 UNDEFINED\n",
            [("compute", 1, 20, ""), ("cluster2", 1, 16, "")],
        ),
        ("hostA 2 hostB 1\n", [("hostA", 1, 2, ""), ("hostB", 1, 1, "")]),
    ],
)
def test_hostfiles(tmp_path, text, expected):
    assert clusters(read_hostfile, tmp_path, text) == expected


@pytest.mark.parametrize(
    "text, message",
    [
        ("192.168.1.10 slots=8 max_slots=16\n", "192.168.1.10 is an IP address"),
        ("worker-1 slots=2\nlocalhost slots=1\n123.23.12.10 slots=2\n", "calls itself localhost"),
        ("hostA slots=many\n", "'many' slots"),
        ("hostA slots=-1\n", "'-1' slots"),
        ("hostA slots=2 slots=4\n", "given twice"),
        ("hostA slots=8 max_slots=2\n", "8 slots are more than max_slots=2"),
        ("hostA foo\n", "'foo' is not known"),
        ("hostA hostB\n", "'hostB' is not known"),
        ("10.100.0.227 slots=8max_slots=8\n", "slots"),
    ],
)
def test_refused_hostfiles(tmp_path, text, message):
    with pytest.raises(HolmesError, match=message):
        clusters(read_hostfile, tmp_path, text)


@pytest.mark.parametrize(
    "text, expected",
    [
        (
            "NodeName=gpu[01-04] CPUs=16 RealMemory=64000 Gres=gpu:l4:1 State=UNKNOWN\n"
            "# the market: how nodes are SOLD\n"
            "PartitionName=gpu Nodes=gpu[01-04] Default=YES MaxTime=24:00:00 State=UP\n",
            [("gpu", 4, 1, "L4")],
        ),
        (
            "ClusterName=mycluster\nNodeName=compute[001-010] CPUs=64 RealMemory=256000 State=IDLE\n"
            "NodeName=gpu[01-04] CPUs=32 RealMemory=512000 Gres=gpu:4\n"
            "PartitionName=batch Nodes=compute[001-010] Default=YES MaxTime=1-00:00:00\n"
            "PartitionName=gpu Nodes=gpu[01-04] MaxTime=12:00:00\n",
            [("gpu", 4, 4, "")],
        ),
        (
            "NodeName=DEFAULT CPUs=32 Sockets=2 RealMemory=128000 State=UNKNOWN\n"
            "NodeName=compute[001-100]\nNodeName=gpu[001-010] Gres=gpu:nvidia:4 RealMemory=256000\n"
            "PartitionName=DEFAULT MaxTime=1-00:00:00 State=UP\n"
            "PartitionName=gpu Nodes=gpu[001-010] MaxTime=7-00:00:00\n",
            [("gpu", 10, 4, "nvidia")],
        ),
        (
            "NodeName=gpu[01-16] CPUs=128 RealMemory=1000000 Gres=gpu:8 State=UNKNOWN\n"
            "PartitionName=short Nodes=gpu[01-04] MaxTime=04:00:00 Default=YES\n"
            "PartitionName=train Nodes=gpu[05-16] MaxTime=72:00:00 AllowGroups=ml\n",
            [("cluster1", 16, 8, "")],
        ),
        (
            "NodeName=gpu[001-004] CPUs=96 RealMemory=1044480 Gres=gpu:a100:8 State=UNKNOWN\n",
            [("a100", 4, 8, "A100")],
        ),
        ("NodeName=gpu[01-50] Gres=gpu:a100:8\n", [("a100", 50, 8, "A100")]),
    ],
)
def test_configurations_of_slurm(tmp_path, text, expected):
    assert clusters(nodes_of_file, tmp_path, text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "NodeName=gpu[01-08] Name=gpu File=/dev/nvidia[0-3] Cores=0-11,12-23,24-35,36-47\n",
        "NodeName=largemem[1-2] AutoBasePath=true BasePath=/a NodeName=gpu[1-10] BasePath=/b\n",
    ],
)
def test_other_files_of_slurm_are_refused(tmp_path, text):
    with pytest.raises(
        HolmesError, match="do not describe hardware: not slurm.conf; write it with"
    ):
        clusters(nodes_of_file, tmp_path, text)


@pytest.mark.parametrize(
    "gres, gpu",
    [
        ("gpu:A100_80GB:1", "A100"),
        ("gpu:A100.80gb:1", "A100"),
        ("gpu:h100nvl:1", "h100nvl"),
        ("gpu:h100-47:2", "h100-47"),
        ("gpu:l40s:1", "L40S"),
        ("gpu:rtx4090:2", "RTX 4090"),
        ("gpu:rtx6000:1", "rtx6000"),
        ("gpu:h100mig:4", "h100mig"),
    ],
)
def test_names_of_gpus_at_sites(tmp_path, gres, gpu):
    ((_, _, _, found),) = clusters(nodes_of_file, tmp_path, f"NodeName=n1 Gres={gres}\n")
    assert found == gpu


@pytest.mark.parametrize(
    "labels, resources, expected, why_not",
    [
        (
            {
                "ibm-cloud.kubernetes.io/rdma": "enabled",
                "nvidia.com/gpu.count": "8",
                "nvidia.com/gpu.memory": "80GB",
                "nvidia.com/gpu.product": "H100-SXM5",
            },
            {},
            ("H100", 8, ""),
            "",
        ),
        (
            {
                "nvidia.com/gpu.count": "8",
                "nvidia.com/gpu.memory": "40536",
                "nvidia.com/gpu.product": "A100-SXM4-40GB-MIG-1g.5gb",
                "nvidia.com/mig.strategy": "mixed",
            },
            {},
            ("A100-SXM4-40GB-MIG-1g.5gb", 8, ""),
            "divided into MIG slices, which NCCL cannot join",
        ),
        (
            {
                "nvidia.com/gpu.count": "8",
                "nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB",
                "nvidia.com/gpu.memory": "40960",
            },
            {"cpu": "16"},
            ("A100-SXM4-40GB", 8, ""),
            "",
        ),
        (
            {
                "nvidia.com/gpu.count": "8",
                "nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB",
                "nvidia.com/gpu.memory": "81251",
            },
            {},
            ("A100", 8, ""),
            "",
        ),
        (
            {
                "topology.kubernetes.io/zone": "us-east-2a",
                "node.kubernetes.io/instance-type": "p6e-gb300.48xlarge",
                "nvidia.com/gpu.product": "NVIDIA-GB300",
            },
            {"nvidia.com/gpu": "4"},
            ("GB300", 4, "us-east-2a"),
            "",
        ),
        (
            {
                "backend.coreweave.cloud/fabric": "",
                "ib.coreweave.cloud/fabric": "",
                "topology.kubernetes.io/zone": "US-EAST-04A",
                "gpu.nvidia.com/model": "H100_NVLINK_80GB",
            },
            {"nvidia.com/gpu": "8"},
            ("H100", 8, "US-EAST-04A"),
            "",
        ),
        (
            {
                "topology.nebius.com/gpu-cluster-id": "computegpucluster-exact",
                "topology.nebius.com/tier-1": "leaf-a",
                "nvidia.com/gpu.product": "NVIDIA-B300-SXM6-AC",
            },
            {"nvidia.com/gpu": "8"},
            ("B300", 8, "computegpucluster-exact"),
            "",
        ),
    ],
)
def test_nodes_of_kubernetes(tmp_path, labels, resources, expected, why_not):
    item = {
        "kind": "Node",
        "metadata": {"name": "n0", "labels": labels},
        "status": {"allocatable": resources},
    }
    file = tmp_path / "nodes.json"
    file.write_text(json.dumps({"kind": "List", "items": [item]}))
    (found,) = read_nodes(str(file))
    assert (found.gpu, found.processes, found.fabric) == expected
    assert found.why_not == why_not
