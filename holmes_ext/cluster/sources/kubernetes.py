"""Reader of Kubernetes nodes: the labels and resources in `kubectl get nodes -o json`.

GPUs      labels nvidia.com/gpu.product and .count (GPU feature discovery), or resource
          nvidia.com/gpu
kind      label backend.coreweave.cloud/flavor, or names of resources and labels with the name of
          a kind ("rdma/ib", "nvidia.com/roce"). The labels feature.node.kubernetes.io/rdma.capable
          and pci-15b3 only show an NVIDIA NIC with RDMA, InfiniBand or RoCE, so the user must name
          the kind
rate      label ib.coreweave.cloud/speed or backend.coreweave.cloud/speed
fabric    the first label of FABRICS that the node has
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

#: Labels with the same value on nodes of one network, the most reliable first: fabrics themselves,
#: then blocks and islands of clouds, which their RDMA networks do not leave, then the zone.
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
_GPU_RESOURCE = "nvidia.com/gpu"
_SPEED = re.compile(r"(\d+)\s*(?:G|Gb/s|Gbps|gbps)?")
_ADVICE = "write it with: kubectl get nodes -o json > nodes.json"


def read_nodes(path: str) -> list[FoundNode]:
    """Return the nodes that have GPUs.

    Args:
        path: File with the output of `kubectl get nodes -o json`; "-" for standard input.

    Raises:
        HolmesError: the file is something else, or no node has a GPU.
    """
    text = sys.stdin.read() if path == "-" else read_text(path, _ADVICE)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise HolmesError(f"{path}: not valid JSON: {str(error)[:100]}; {_ADVICE}") from None
    # kubectl prints a list for several nodes, and the node itself for a single one.
    items = document.get("items", [document]) if isinstance(document, dict) else None
    if not isinstance(items, list) or not all(_is_node(item) for item in items):
        raise HolmesError(f"{path}: not Kubernetes nodes; {_ADVICE}")
    nodes = [_parse_node(item, path) for item in items]
    with_gpus = [node for node in nodes if node is not None]
    if not with_gpus:
        raise HolmesError(
            f"{path}: no node has a GPU (label nvidia.com/gpu.count or resource "
            f"{_GPU_RESOURCE}): is NVIDIA's GPU operator or device plugin installed?"
        )
    return with_gpus


def _is_node(item: object) -> bool:
    return isinstance(item, dict) and item.get("kind") == "Node"


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
    gpu_counts = [
        _parse_count(resources.get(_GPU_RESOURCE)),
        _parse_count(labels.get("nvidia.com/gpu.count")),
    ]
    if not any(gpu_counts):
        return None
    product = labels.get("nvidia.com/gpu.product") or labels.get("gpu.nvidia.com/model") or ""
    return FoundNode(
        name,
        # With time slicing, the resource counts each GPU several times.
        processes=min(filter(None, gpu_counts)),
        kind=_kind_of_fast_nics(labels, resources),
        gpu=gpu_name(product),
        fabric=next((labels[label] for label in FABRICS if labels.get(label)), ""),
        rate_bps=_rate_bps(labels),
        labels=tuple(labels[label] for label in _GROUPS if label in labels),
        why_not=_reason_unusable(spec, status),
    )


def _object_at(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the JSON object of a key, {} if the key is missing or holds another value."""
    value = values.get(key)
    return value if isinstance(value, dict) else {}


def _parse_count(value: object) -> int:
    """Return a count that labels hold as text, 0 if the value is not a count."""
    return int(str(value)) if str(value).isdecimal() else 0


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
        prefixes = ("rdma/", "nvidia.com/", "openshift.io/")
        # Resources that device plugins announce, such as "rdma/ib" or "nvidia.com/roce".
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
