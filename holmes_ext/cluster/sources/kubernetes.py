"""Reader of Kubernetes nodes: the labels and resources in `kubectl get nodes -o json`.

GPUs      label nvidia.com/gpu.count (GPU feature discovery), or resource nvidia.com/gpu or amd.com/gpu
kind      label backend.coreweave.cloud/flavor, or names of resources and labels with the name of
          a kind ("rdma/ib", "nvidia.com/roce"). The labels feature.node.kubernetes.io/rdma.capable
          and pci-15b3 only show an NVIDIA NIC with RDMA, InfiniBand or RoCE, so the user must name
          the kind
rate      label ib.coreweave.cloud/speed or backend.coreweave.cloud/speed
fabric    the first label of FABRICS that the node has
GPU       the first label of _PRODUCTS, otherwise the instance type of a cloud
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from holmes_ext.cluster.gpus import accelerator_of, gpu_name
from holmes_ext.cluster.sources.found import FoundNode, kind_of
from holmes_ext.document import parse_json_value, read_standard_input, read_text
from holmes_ext.errors import HolmesError


class FabricLabel(NamedTuple):
    """Label of Kubernetes nodes that identifies their RDMA network: nodes with equal values share it."""

    name: str  # of the label
    source: str  # public documentation of the label


#: Labels that name the network of a node, the most reliable first: networks themselves, then blocks and
#: islands of clouds (their RDMA networks end there), then the topmost switch above the node, then
#: sets of machines. The first label with a value counts. Labels of lower switches (leaf, block, rack,
#: layer 2, tier 0 below tier 1, ...) do not tell networks apart, and are not read.
FABRICS = (
    FabricLabel("backend.coreweave.cloud/fabric", "docs.coreweave.com: InfiniBand and RoCE labels"),
    FabricLabel("ib.coreweave.cloud/fabric", "docs.coreweave.com: InfiniBand and RoCE labels"),
    FabricLabel(
        "topology.nebius.com/gpu-cluster-id",
        "docs.nebius.com: GPU clusters with InfiniBand; a cluster is one fabric",
    ),
    FabricLabel(
        "crusoe.ai/ib.partition.id",
        "docs.nvidia.com/topograph/providers/crusoe: the isolated InfiniBand partition",
    ),
    FabricLabel(
        "oci.oraclecloud.com/rdma.hpc_island_id",
        "oracle-quickstart/oci-hpc-oke: host, local block, network block, HPC island",
    ),
    FabricLabel(
        "cloud.google.com/gce-topology-block",
        "cloud.google.com/kubernetes-engine: host, subblock, block of A3 Ultra, A4 and A4X",
    ),
    FabricLabel(
        "network.topology.nvidia.com/core",
        "NVIDIA/topograph docs/engines/k8s.md: leaf, spine, core",
    ),
    FabricLabel(
        "network.topology.nvidia.com/datacenter",
        "NVIDIA/topograph docs/engines/k8s.md: block, spine, datacenter",
    ),
    FabricLabel(
        "network.topology.nvidia.com/spine", "NVIDIA/topograph: the top where there is no core"
    ),
    FabricLabel(
        "topology.kubernetes.io/network-level-3", "NVIDIA/topograph, first release: levels 1, 2, 3"
    ),
    FabricLabel(
        "topology.k8s.aws/network-node-layer-1",
        "Amazon EKS user guide: layers 1 to 3 or 4, the last is the closest to the node",
    ),
    FabricLabel(
        "kubernetes.azure.com/agentpool",
        "learn.microsoft.com: InfiniBand connects the machines of one scale set, an AKS node pool",
    ),
    FabricLabel("topology.kubernetes.io/zone", "kubernetes.io: well-known labels"),
)
#: Labels of topograph that number the switches above a node: the highest number is the topmost switch
#: (NVIDIA/topograph CHANGELOG: "variable, closest-first tiers"). They count before those of FABRICS that
#: begin at `_AFTER_TIERS`.
_TIER = re.compile(r"(?:fabric\.topograph\.run|network\.topology\.nvidia\.com)/tier-(\d+)")
_AFTER_TIERS = "network.topology.nvidia.com/core"
#: Labels with the name of the GPU, the most exact first: GPU feature discovery, CoreWeave, AMD's labeller,
#: GKE, Karpenter.
_PRODUCTS = (
    "nvidia.com/gpu.product",
    "gpu.nvidia.com/model",
    "amd.com/gpu.product-name",
    "beta.amd.com/gpu.product-name",
    "cloud.google.com/gke-accelerator",
    "karpenter.k8s.aws/instance-gpu-name",
)
#: Name of a GPU in such labels that leaves its memory out -> the GPU.
_PRODUCT_NAMES = {"nvidia-tesla-a100": "A100-SXM4-40GB"}  # GKE; 80 GB are "nvidia-a100-80gb"
#: Instance type of a cloud, or its beginning -> the GPU, for nodes without such a label.
_INSTANCE_GPUS = {
    "p4d.": "A100-SXM4-40GB",
    "p4de.": "A100",
    "p5.": "H100",
    "p5e.": "H200",
    "p5en.": "H200",
    "p6-b200.": "B200",
    "p6-b300.": "B300",
    "p6e-gb200.": "GB200",
    "p6e-gb300.": "GB300",
    "a2-highgpu-": "A100-SXM4-40GB",
    "a2-megagpu-": "A100-SXM4-40GB",
    "a2-ultragpu-": "A100",
    "a3-highgpu-": "H100",
    "a3-megagpu-": "H100",
    "a3-ultragpu-": "H200",
    "a4-highgpu-": "B200",
    "a4x-highgpu-": "GB200",
    "Standard_ND96asr_v4": "A100-SXM4-40GB",
    "Standard_ND96amsr_A100_v4": "A100",
    "Standard_ND96isr_H100_v5": "H100",
    "Standard_ND96isr_H200_v5": "H200",
    "Standard_ND128isr_NDR_GB200_v6": "GB200",
    "BM.GPU4.8": "A100-SXM4-40GB",
    "BM.GPU.A100-v2.8": "A100",
    "BM.GPU.H100.8": "H100",
    "BM.GPU.H200.8": "H200",
    "BM.GPU.B200.8": "B200",
    "BM.GPU.GB200.4": "GB200",
    "BM.GPU.MI300X.8": "MI300X",
}
#: Labels with the rate of the fast NICs.
_SPEEDS = (
    "backend.coreweave.cloud/speed",
    "ib.coreweave.cloud/speed",
    "ib.coreweave.cloud/speed.expected",
)
#: Labels with the kind of the fast NICs.
_FLAVORS = ("backend.coreweave.cloud/flavor",)
#: Labels whose values may name a cluster.
_GROUPS = (
    "node.kubernetes.io/instance-type",
    "cloud.google.com/gke-nodepool",
    "eks.amazonaws.com/nodegroup",
    "kubernetes.azure.com/agentpool",
    "topology.kubernetes.io/zone",
)
#: Label with the memory of a GPU in MiB (GPU feature discovery).
_MEMORY = "nvidia.com/gpu.memory"
_INSTANCE_TYPE = "node.kubernetes.io/instance-type"
_GPU_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu")
_SPEED = re.compile(r"(\d+)\s*(?:G|Gb/s|Gbps|gbps)?")
_ADVICE = "write it with: kubectl get nodes -o json > nodes.json"


def read_nodes(path: str) -> list[FoundNode]:
    """Return the nodes that have GPUs.

    Args:
        path: File with the output of `kubectl get nodes -o json`; "-" for standard input.

    Raises:
        HolmesError: the file is something else, or no node has a GPU.
    """
    text = read_standard_input(_ADVICE) if path == "-" else read_text(path, _ADVICE)
    document = parse_json_value(text, path, _ADVICE)
    # kubectl prints a list for several nodes, and the node itself for a single node.
    items = document.get("items", [document]) if isinstance(document, dict) else None
    if not isinstance(items, list) or not all(_is_node(item, document) for item in items):
        raise HolmesError(f"{path}: not Kubernetes nodes; {_ADVICE}")
    nodes = [_parse_node(item, path) for item in items]
    with_gpus = [node for node in nodes if node is not None]
    if not with_gpus:
        raise HolmesError(
            f"{path}: no node has a GPU (label nvidia.com/gpu.count or resource "
            f"{' or '.join(_GPU_RESOURCES)}): is the vendor's GPU operator or device plugin installed?"
        )
    return with_gpus


def _is_node(item: object, document: Mapping[str, Any]) -> bool:
    """Return whether an item of a document is a Kubernetes node.

    Each item of kubectl's "List" has a kind. The items of the API server's "NodeList" have none: all of
    them are nodes.
    """
    if not isinstance(item, dict):
        return False
    kind = item.get("kind")
    if document.get("kind") == "NodeList" and kind is None:
        return True
    return bool(kind == "Node")


def _parse_node(item: Mapping[str, Any], path: str) -> FoundNode | None:
    """Return the description of a Kubernetes node, None for a node without GPUs.

    Args:
        item: The node as JSON.
        path: File with the node, for the error message.

    Raises:
        HolmesError: the node has no name.
    """
    metadata = _object_at(item, "metadata")
    spec = _object_at(item, "spec")
    status = _object_at(item, "status")
    name = metadata.get("name")
    if not isinstance(name, str) or not name:
        raise HolmesError(f"{path}: a node has no name; {_ADVICE}")
    labels = {str(label): str(value) for label, value in _object_at(metadata, "labels").items()}
    resources = {**_object_at(status, "capacity"), **_object_at(status, "allocatable")}
    gpu_counts = [_parse_count(resources.get(resource)) for resource in _GPU_RESOURCES]
    gpu_counts.append(_parse_count(labels.get("nvidia.com/gpu.count")))
    if not any(gpu_counts):
        return None
    return FoundNode(
        name,
        # With time slicing, the resource counts each GPU several times.
        processes=min(filter(None, gpu_counts)),
        kind=_kind_of_fast_nics(labels, resources),
        gpu=_gpu_of(labels),
        fabric=_fabric_of(labels),
        rate_bps=_rate_bps(labels),
        labels=tuple(labels[label] for label in _GROUPS if label in labels),
        why_not=_reason_unusable(spec, status) or _reason_no_gpus(labels, resources),
    )


def _object_at(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the JSON object of a key, {} if the key is missing or holds another value."""
    value = values.get(key)
    return value if isinstance(value, dict) else {}


def _parse_count(value: object) -> int:
    """Return the whole number in the text of a label or resource; 0 if the value is anything else."""
    return int(str(value)) if str(value).isdecimal() else 0


def _gpu_of(labels: Mapping[str, str]) -> str:
    """Return the GPU model of a node by its labels, "" if they do not name it."""
    for label in _PRODUCTS:
        product = labels.get(label)
        if product:
            name = gpu_name(_PRODUCT_NAMES.get(product, product))
            return _with_memory(name, _parse_count(labels.get(_MEMORY)))
    instance_type = labels.get(_INSTANCE_TYPE, "")
    for beginning, gpu in _INSTANCE_GPUS.items():
        if instance_type.startswith(beginning):
            return gpu
    return ""


def _with_memory(gpu: str, memory_mib: int) -> str:
    """Return the name of a GPU, with its memory size if GPUs of this name usually have another size.

    Args:
        gpu: Name of the GPU, such as "V100".
        memory_mib: Memory size in MiB from a label of the node, 0 if no label gives it. For a V100,
            which usually has 16 GB, 32510 gives "V100-32GB".
    """
    accelerator = accelerator_of(gpu)
    if accelerator is None or not memory_mib:
        return gpu
    # A driver counts memory in GiB (2^30 bytes), and reports up to 8 % less than the GPU has. The GB of a
    # data sheet mean GiB, too: a V100 of "32 GB" has 32 GiB. So both numbers are compared without a
    # conversion of units.
    memory_gib = memory_mib / 1024
    sheet_gb = accelerator.memory_bytes / 1e9
    if abs(memory_gib - sheet_gb) <= 0.08 * memory_gib:
        return gpu
    return f"{gpu}-{round(memory_gib)}GB"


def _fabric_of(labels: Mapping[str, str]) -> str:
    """Return the name of a node's network by its labels, "" if no label names it.

    The labels of FABRICS are tried in order. The labels of numbered switch tiers come just before
    _AFTER_TIERS. The tier with the highest number is the farthest from the node, so its switch stands
    for the whole network.
    """
    tiers: dict[int, str] = {}  # number of a tier -> its switch
    for label, value in labels.items():
        match = _TIER.fullmatch(label)
        if match and value:
            tiers[int(match[1])] = value
    for fabric_label in FABRICS:
        if fabric_label.name == _AFTER_TIERS and tiers:
            return tiers[max(tiers)]
        if labels.get(fabric_label.name):
            return labels[fabric_label.name]
    return ""


def _rate_bps(labels: Mapping[str, str]) -> int:
    """Return the rate of a node's fast NICs in bits/s that a label states, 0 if none does."""
    for label in _SPEEDS:
        match = _SPEED.fullmatch(labels.get(label, ""))
        if match:
            return int(match[1]) * 10**9
    return 0


def _kind_of_fast_nics(labels: Mapping[str, str], resources: Mapping[str, Any]) -> str:
    """Return the kind of a node's fast NICs, "" if neither labels nor resources name it.

    A label that states the kind counts alone. Otherwise, names of RDMA resources and labels count.

    Args:
        labels: Label -> value.
        resources: Resource -> number that the node has.
    """
    words = [labels[label] for label in _FLAVORS if label in labels]
    if not words:
        prefixes = ("rdma/", "nvidia.com/", "openshift.io/", "vpc.amazonaws.com/")
        # Resources that device plugins announce, such as "rdma/ib" or "nvidia.com/roce". kind_of() ignores
        # those that name no kind of NIC, such as "nvidia.com/gpu".
        words += [
            name
            for name, count in resources.items()
            if name.startswith(prefixes) and _parse_count(count)
        ]
        words += [label for label in labels if label.startswith("ib.coreweave.cloud/")]
    return kind_of(words)


def _reason_unusable(spec: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    """Return the reason why no job can use a node now, "" if one can.

    Args:
        spec: `spec` of the Kubernetes node.
        status: `status` of the Kubernetes node.
    """
    for condition in status.get("conditions") or ():
        if not isinstance(condition, dict) or condition.get("type") != "Ready":
            continue
        if condition.get("status") != "True":
            return "not ready"
    return "cordoned" if spec.get("unschedulable") else ""


def _reason_no_gpus(labels: Mapping[str, str], resources: Mapping[str, Any]) -> str:
    """Return the reason why a pod gets none of a node's GPUs, "" if pods do.

    Args:
        labels: Label -> value.
        resources: Resource -> number that the node has.
    """
    is_slice = "-MIG-" in labels.get("nvidia.com/gpu.product", "")
    slices = [name for name in resources if name.startswith("nvidia.com/mig-")]
    if is_slice or any(_parse_count(resources[name]) for name in slices):
        return "divided into MIG slices, which NCCL cannot join"
    if any(name in resources and not _parse_count(resources[name]) for name in _GPU_RESOURCES):
        return "without a GPU that can be allocated"
    return ""
