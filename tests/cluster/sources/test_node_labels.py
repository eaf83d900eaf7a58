"""Labels with which clouds say what GPUs a Kubernetes node has, and on which network it is."""

import json
from pathlib import Path

import pytest

from holmes_ext.cluster.gpus import accelerator_of
from holmes_ext.cluster.sources.found import clusters_of
from holmes_ext.cluster.sources.kubernetes import read_nodes

INPUTS = Path(__file__).parents[2] / "inputs"


def node(name, labels, **resources):
    """Return a ready Kubernetes node with eight GPUs; `resources` with "_" for "/" replace these."""
    capacity = {key.replace("_", "/"): value for key, value in resources.items()}
    return {
        "kind": "Node",
        "metadata": {"name": name, "labels": labels},
        "spec": {},
        "status": {
            "capacity": {"nvidia.com/gpu": "8", **capacity},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def read(tmp_path, *nodes, kind="List"):
    """Return the nodes that `holmes discover --from kubernetes` finds in the JSON of the nodes."""
    file = tmp_path / "nodes.json"
    file.write_text(json.dumps({"kind": kind, "items": nodes}))
    return read_nodes(str(file))


def test_an_a100_with_40_gb_stays_one():
    (found,) = read_nodes(str(INPUTS / "k8s_a100_40gb" / "nodes.json"))
    assert found.gpu == "A100-SXM4-40GB" and accelerator_of(found.gpu).memory_bytes == 40e9


@pytest.mark.parametrize(
    "file, clusters", [("topograph.json", 1), ("topograph_1.json", 1), ("nebius.json", 2)]
)
def test_reported_labels(file, clusters):
    assert len(clusters_of(read_nodes(str(INPUTS / "k8s_labels" / file)))) == clusters


#: Labels of a node, and the value that names its network.
NETWORKS = [
    ({"backend.coreweave.cloud/fabric": "f", "backend.coreweave.cloud/leafgroup": "3"}, "f"),
    ({"backend.coreweave.cloud/fabric": "", "ib.coreweave.cloud/fabric": "f"}, "f"),
    ({"topology.nebius.com/gpu-cluster-id": "f", "topology.nebius.com/tier-1": "leaf"}, "f"),
    ({"crusoe.ai/ib.partition.id": "f", "crusoe.ai/pod.id": "pod"}, "f"),
    (
        {
            "oci.oraclecloud.com/rdma.hpc_island_id": "f",
            "oci.oraclecloud.com/rdma.network_block_id": "n",
            "oci.oraclecloud.com/rdma.local_block_id": "l",
        },
        "f",
    ),
    (
        {"cloud.google.com/gce-topology-block": "f", "cloud.google.com/gce-topology-subblock": "s"},
        "f",
    ),
    (
        {
            "network.topology.nvidia.com/leaf": "l",
            "network.topology.nvidia.com/spine": "s",
            "network.topology.nvidia.com/core": "f",
        },
        "f",
    ),
    (
        {
            "network.topology.nvidia.com/block": "b",
            "network.topology.nvidia.com/spine": "s",
            "network.topology.nvidia.com/datacenter": "f",
        },
        "f",
    ),
    ({"network.topology.nvidia.com/leaf": "l", "network.topology.nvidia.com/spine": "f"}, "f"),
    ({"fabric.topograph.run/tier-0": "l", "fabric.topograph.run/tier-1": "f"}, "f"),
    ({f"fabric.topograph.run/tier-{tier}": f"t{tier}" for tier in range(11)}, "t10"),
    ({"network.topology.nvidia.com/tier-0": "l", "network.topology.nvidia.com/tier-2": "f"}, "f"),
    (
        {
            "topology.k8s.aws/network-node-layer-1": "f",
            "topology.k8s.aws/network-node-layer-2": "m",
            "topology.k8s.aws/network-node-layer-3": "l",
            "topology.kubernetes.io/zone": "z",
        },
        "f",
    ),
    ({"kubernetes.azure.com/agentpool": "f", "topology.kubernetes.io/zone": "z"}, "f"),
    ({"topology.kubernetes.io/zone": "f", "kubernetes.io/hostname": "n0"}, "f"),
    ({"kubernetes.io/hostname": "n0"}, ""),
]


@pytest.mark.parametrize("labels, fabric", NETWORKS)
def test_the_label_of_the_whole_network_counts(tmp_path, labels, fabric):
    (found,) = read(tmp_path, node("n0", labels))
    assert found.fabric == fabric


@pytest.mark.parametrize(
    "labels, gpu",
    [
        ({"nvidia.com/gpu.product": "NVIDIA-H100-NVL"}, "H100-NVL"),
        ({"gpu.nvidia.com/model": "H100_NVLINK_80GB"}, "H100"),
        ({"cloud.google.com/gke-accelerator": "nvidia-tesla-a100"}, "A100-SXM4-40GB"),
        ({"cloud.google.com/gke-accelerator": "nvidia-a100-80gb"}, "A100"),
        ({"cloud.google.com/gke-accelerator": "nvidia-b200"}, "B200"),
        ({"karpenter.k8s.aws/instance-gpu-name": "l40s"}, "L40S"),
        ({"node.kubernetes.io/instance-type": "p4d.24xlarge"}, "A100-SXM4-40GB"),
        ({"node.kubernetes.io/instance-type": "p4de.24xlarge"}, "A100"),
        ({"node.kubernetes.io/instance-type": "p5en.48xlarge"}, "H200"),
        ({"node.kubernetes.io/instance-type": "Standard_ND96asr_v4"}, "A100-SXM4-40GB"),
        ({"node.kubernetes.io/instance-type": "BM.GPU.A100-v2.8"}, "A100"),
        ({"node.kubernetes.io/instance-type": "gd-8xh100ib-i128"}, ""),
        # The memory of the label counts where the name leaves it out.
        ({"nvidia.com/gpu.product": "Tesla-V100", "nvidia.com/gpu.memory": "32510"}, "V100-32GB"),
        ({"nvidia.com/gpu.product": "NVIDIA-A100", "nvidia.com/gpu.memory": "40960"}, "A100-40GB"),
        ({"nvidia.com/gpu.product": "NVIDIA-L40S", "nvidia.com/gpu.memory": "46068"}, "L40S"),
        (
            {"nvidia.com/gpu.product": "NVIDIA-B300-SXM6-AC", "nvidia.com/gpu.memory": "275040"},
            "B300",
        ),
    ],
)
def test_the_gpu_of_a_node(tmp_path, labels, gpu):
    (found,) = read(tmp_path, node("n0", labels))
    assert found.gpu == gpu


def test_gpus_of_amd_are_counted(tmp_path):
    item = node("n0", {"amd.com/gpu.product-name": "AMD_Instinct_MI300X_OAM"})
    item["status"]["capacity"] = {"amd.com/gpu": "8"}
    (found,) = read(tmp_path, item)
    assert (found.gpu, found.processes) == ("MI300X", 8)


def test_nodes_without_gpus_to_give_are_named(tmp_path):
    labels = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "nvidia.com/gpu.count": "8"}
    broken = node("broken", labels)
    broken["status"]["allocatable"] = {"nvidia.com/gpu": "0"}
    sliced = node("sliced", labels)
    sliced["status"]["capacity"] = {"nvidia.com/gpu": "0", "nvidia.com/mig-1g.10gb": "56"}
    reasons = [found.why_not for found in read(tmp_path, broken, sliced, node("good", labels))]
    assert reasons == [
        "without a GPU that can be allocated",
        "divided into MIG slices, which NCCL cannot join",
        "",
    ]


def test_the_list_of_the_api_server_has_no_kinds(tmp_path):
    item = node("n0", {})
    del item["kind"]
    (found,) = read(tmp_path, item, kind="NodeList")
    assert found.name == "n0"


def test_a_byte_order_mark_is_ignored(tmp_path):
    file = tmp_path / "nodes.json"
    for encoding in ("utf-8-sig", "utf-16"):  # Windows editors and PowerShell
        file.write_text(json.dumps({"kind": "List", "items": [node("n0", {})]}), encoding=encoding)
        assert [found.name for found in read_nodes(str(file))] == ["n0"]
