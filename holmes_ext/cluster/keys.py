"""List of the keys of cluster.toml with their types, defaults and meanings.

The order is that of a typical file.
docs/cluster_toml.md is generated from this list. spec.py and wan.py read the keys;
tests/cluster/test_keys.py compares the list with the keys that the two modules read.
"""

from __future__ import annotations

from typing import NamedTuple

from holmes_ext.cluster.gpus import KNOWN_GPUS
from holmes_ext.cluster.nic import CLUSTER_KINDS, KINDS
from holmes_ext.units import format_seconds


class Key(NamedTuple):
    """Key that a cluster.toml may have."""

    table: str  # TOML header of its table, "" for keys before the first table
    name: str
    value_type: str
    default: str  # "" if the key is required
    meaning: str


_RATE = 'a rate, `"25Gb/s"`'
_TIME = 'a time, `"30us"`'
_LIST = "a list of texts"
_DEFAULT_LATENCIES = ", ".join(
    f"{format_seconds(KINDS[name].latency_s)} for {name}" for name in CLUSTER_KINDS
)
_PLUGIN_KINDS = ", ".join(name for name, kind in KINDS.items() if kind.plugin)

KEYS = (
    Key("", "version", "a number", "", "version of the file format: 2"),
    Key("", "name", "a text", "the file's name", "name of the whole site"),
    Key(
        "[ethernet]",
        "rate",
        _RATE,
        "",
        "rate of one node, each way, on the network that reaches every node",
    ),
    Key(
        "[ethernet]",
        "latency",
        _TIME,
        format_seconds(KINDS["ethernet"].latency_s),
        "latency of a message from node to node",
    ),
    Key(
        "[ethernet]",
        "interface",
        "a text",
        "the one that reaches the master",
        "network device, the same on all nodes",
    ),
    Key("[[cluster]]", "name", "a text", "", "name of the cluster in messages and tables"),
    Key(
        "[[cluster]]",
        "kind",
        "a text",
        "",
        f"kind of the fast NICs: {', '.join(CLUSTER_KINDS)} (plugin: any other NIC of an NCCL plugin; "
        "ethernet: no fast NIC)",
    ),
    Key(
        "[[cluster]]",
        "nodes",
        _LIST,
        "",
        'host names; `"gpu[00-15]"` stands for sixteen hosts, `"gpu[1,4-6]"` for four, `"a1,b1"` for two',
    ),
    Key(
        "[[cluster]]",
        "rate",
        _RATE,
        "none with kind ethernet",
        'rate of all fast NICs of one node together, each way: eight HCAs of 200 Gb/s are `"1600Gb/s"`',
    ),
    Key(
        "[[cluster]]",
        "rails",
        "a number",
        "1",
        "for `holmes lab`: fast NICs of a node, which share its rate; real nodes' NICs are detected",
    ),
    Key("[[cluster]]", "processes", "a number", "1", "processes of each node, one for each GPU"),
    Key(
        "[[cluster]]",
        "fabric",
        "a text",
        "the cluster's name",
        "clusters that name the same fabric can communicate over it",
    ),
    Key("[[cluster]]", "latency", _TIME, _DEFAULT_LATENCIES, "latency of a message on the fabric"),
    Key(
        "[[cluster]]",
        "include",
        _LIST,
        "all",
        "patterns of NICs for training: `mlx5_0`, `mlx5_*`, `mlx5_0:1`, `ens1f0`",
    ),
    Key(
        "[[cluster]]",
        "exclude",
        _LIST,
        "none",
        "patterns of NICs that are not for training (storage)",
    ),
    Key(
        "[[cluster]]",
        "net",
        "a text",
        "IB, or read from the plugin",
        "NCCL's name of the network that a plugin provides for the fast NICs: "
        '`"Libfabric"` (NCCL_DEBUG=INFO prints `Using network NAME`), or `"auto"`: NCCL chooses. '
        f"The name is read from the installed plugin for the kinds {_PLUGIN_KINDS}",
    ),
    Key(
        "[[cluster]]",
        "uplink",
        _RATE,
        "no limit",
        "rate of all nodes together to other clusters, each way",
    ),
    Key(
        "[[cluster]]",
        "gpu",
        "a text",
        "none",
        f"for `holmes plan`: {', '.join(KNOWN_GPUS)}, also inside a longer name, set the next three keys",
    ),
    Key(
        "[[cluster]]",
        "gpu_flops",
        "a number",
        "of `gpu`",
        "FLOP/s of the kernels of a training step on one GPU, without waits; not the data sheet's",
    ),
    Key(
        "[[cluster]]",
        "gpu_model_flops",
        "a number",
        "none",
        "in place of `gpu_flops`: FLOP/s of whole steps on one GPU, as Megatron-LM's logs print them: the "
        "model's FLOPs without recomputation / GPUs / seconds of a step",
    ),
    Key(
        "[[cluster]]",
        "gpu_hardware_flops",
        "a number",
        "none",
        "in place of `gpu_flops`: the same with recomputation, as Megatron-DeepSpeed's logs print them",
    ),
    Key("[[cluster]]", "gpu_memory_bytes", "a number", "of `gpu`", "memory of one GPU"),
    Key(
        "[[cluster]]",
        "nvlink",
        _RATE,
        "of `gpu`",
        "rate of one GPU to the others of its node, each way",
    ),
    Key(
        "[[between]]",
        "clusters",
        "two names",
        "",
        "a pair of clusters; if one pair is given, every pair must be",
    ),
    Key(
        "[[between]]",
        "rate",
        _RATE,
        "no limit of its own",
        "rate that all traffic between the two clusters shares, each way",
    ),
    Key("[[between]]", "latency", _TIME, "[ethernet]'s", "latency from node to node, one way"),
    Key(
        "[node.HOST]",
        "include",
        _LIST,
        "the cluster's",
        'patterns for one host that differs, or for several: `[node."gpu[01-04]"]`',
    ),
    Key("[node.HOST]", "exclude", _LIST, "the cluster's", "patterns for one host that differs"),
    Key(
        "[node.HOST]",
        "ethernet",
        "a text",
        "[ethernet]'s interface",
        "network device on the network that reaches every node",
    ),
    Key(
        "[link.FABRIC]",
        "send",
        "pairs of numbers",
        "from rate and latency",
        "written by `holmes probe`: [bytes of a message, seconds from node to node]",
    ),
    Key(
        "[link.FABRIC]",
        "ring",
        "pairs of numbers",
        "from rate and latency",
        "written by `holmes probe`: [bytes, seconds] of one step of a ring all-reduce",
    ),
    Key(
        "[[measured]]",
        "clusters",
        "two names",
        "",
        "written by `holmes probe`; plans use it instead of `[[between]]`",
    ),
    Key("[[measured]]", "rate", _RATE, "", "rate of several nodes at once, each way"),
    Key("[[measured]]", "stream", _RATE, "not known", "rate of one TCP stream"),
    Key("[[measured]]", "latency", _TIME, "", "half a round trip, from node to node"),
)
