"""`kubectl get nodes -o json`: what operators and clouds write onto nodes, as labels and as resources.

GPUs      nvidia.com/gpu.product, .count (GPU feature discovery); resource nvidia.com/gpu
kind      backend.coreweave.cloud/flavor, resources rdma/... and labels that name it; an NVIDIA NIC that
          can RDMA (feature.node.kubernetes.io/rdma.capable, pci-15b3) may be either: asked for
rate      ib.coreweave.cloud/speed, backend.coreweave.cloud/speed
fabric    the first label of FABRICS that nodes have
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import Any

from holmes_ext.cluster.sources.found import FoundNode, gpu_name, kind_of
from holmes_ext.document import read_text
from holmes_ext.errors import HolmesError

#: Labels that say which nodes are on one network, the surest first: of fabrics themselves, then of blocks and
#: islands of clouds (whose RDMA networks end there), then the zone.
FABRICS = (
    "backend.coreweave.cloud/fabric",
    "ib.coreweave.cloud/fabric",
    "oci.oraclecloud.com/rdma.hpc_island_id",
    "cloud.google.com/gce-topology-block",
    "network.topology.nvidia.com/datacenter",
    "fabric.topograph.run/tier-2",
    "network.topology.nvidia.com/spine",
    "topology.k8s.aws/network-node-layer-1",
    "topology.kubernetes.io/zone",
)
_SPEEDS = (
    "backend.coreweave.cloud/speed",
    "ib.coreweave.cloud/speed",
    "ib.coreweave.cloud/speed.expected",
)
_FLAVORS = ("backend.coreweave.cloud/flavor",)
_GROUPS = (
    "node.kubernetes.io/instance-type",
    "cloud.google.com/gke-nodepool",
    "eks.amazonaws.com/nodegroup",
    "kubernetes.azure.com/agentpool",
    "topology.kubernetes.io/zone",
)
_GPU_RESOURCE = "nvidia.com/gpu"
_SPEED = re.compile(r"(\d+)\s*(?:G|Gb/s|Gbps|gbps)?")
_ADVICE = "write it with: kubectl get nodes -o json > nodes.json"


def read_nodes(path: str) -> list[FoundNode]:
    """Nodes with GPUs; path "-": standard input. HolmesError when it is not what kubectl prints."""
    text = sys.stdin.read() if path == "-" else read_text(path, _ADVICE)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise HolmesError(f"{path}: not valid JSON: {str(error)[:100]}; {_ADVICE}") from None
    items = document.get("items", [document]) if isinstance(document, dict) else None
    if not isinstance(items, list) or not all(
        isinstance(item, dict) and item.get("kind") == "Node" for item in items
    ):
        raise HolmesError(f"{path}: not Kubernetes nodes; {_ADVICE}")
    result = [node for item in items if (node := _node(item, path)) is not None]
    if not result:
        raise HolmesError(
            f"{path}: no node has a GPU (label nvidia.com/gpu.count or resource "
            f"{_GPU_RESOURCE}): is NVIDIA's GPU operator or device plugin installed?"
        )
    return result


def _node(item: Mapping[str, Any], path: str) -> FoundNode | None:
    """None without a GPU."""
    metadata, status, spec = (_table(item, key) for key in ("metadata", "status", "spec"))
    name, labels = (
        metadata.get("name"),
        {str(k): str(v) for k, v in _table(metadata, "labels").items()},
    )
    if not isinstance(name, str) or not name:
        raise HolmesError(f"{path}: a node has no name; {_ADVICE}")
    resources = {**_table(status, "capacity"), **_table(status, "allocatable")}
    counts = [_count(resources.get(_GPU_RESOURCE)), _count(labels.get("nvidia.com/gpu.count"))]
    if not any(counts):
        return None
    count = min(filter(None, counts))  # time slicing offers each GPU several times
    fabric = next((labels[label] for label in FABRICS if labels.get(label)), "")
    speed = next(
        (match for label in _SPEEDS if (match := _SPEED.fullmatch(labels.get(label, "")))), None
    )
    product = labels.get("nvidia.com/gpu.product") or labels.get("gpu.nvidia.com/model") or ""
    groups = tuple(labels[label] for label in _GROUPS if label in labels)
    return FoundNode(
        name,
        count,
        _kind(labels, resources),
        gpu_name(product),
        fabric,
        int(speed[1]) * 10**9 if speed else 0,
        groups,
        _why_not(spec, status),
    )


def _table(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = values.get(key)
    return value if isinstance(value, dict) else {}


def _count(value: object) -> int:
    return int(str(value)) if str(value).isdecimal() else 0


def _kind(labels: Mapping[str, str], resources: Mapping[str, Any]) -> str:
    """ "" where nothing tells InfiniBand from RoCE, or a NIC from none."""
    said = [labels[label] for label in _FLAVORS if label in labels]
    if not said:
        said = [
            name
            for name in resources
            if name.startswith(("rdma/", "nvidia.com/", "openshift.io/"))
            and _count(resources[name])
        ]
        said += [label for label in labels if label.startswith("ib.coreweave.cloud/")]
    return kind_of(said)


def _why_not(spec: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    conditions = {
        entry.get("type"): entry.get("status")
        for entry in status.get("conditions") or ()
        if isinstance(entry, dict)
    }
    if conditions.get("Ready", "True") != "True":
        return "not ready"
    return "cordoned" if spec.get("unschedulable") else ""
