"""The keys of cluster.toml, in the order in which one would write them (docs/cluster_toml.md).

spec.py, wan.py and measured.py read them; tests/cluster/test_keys.py watches them read and compares.
"""

from __future__ import annotations

from typing import NamedTuple

from holmes_ext.cluster.nic import KINDS
from holmes_ext.cluster.spec import KNOWN
from holmes_ext.units import format_seconds


class Key(NamedTuple):
    """table: as in the file, "" above all tables; kind: of the value; default: "" where the key is needed."""

    table: str
    name: str
    kind: str
    default: str
    what: str


_RATE, _TIME, _LIST = 'a rate, `"25Gb/s"`', 'a time, `"30us"`', "a list of texts"
_WAITS = ", ".join(f"{format_seconds(kind.latency_s)} for {name}" for name, kind in KINDS.items())

KEYS = (
    Key("", "version", "a number", "", "of the file's format: 2"),
    Key("", "name", "a text", "the file's name", "of the whole"),
    Key(
        "[ethernet]",
        "rate",
        _RATE,
        "",
        "of one node, each way, on the network that reaches every node",
    ),
    Key(
        "[ethernet]",
        "latency",
        _TIME,
        format_seconds(KINDS["ethernet"].latency_s),
        "of a message from node to node",
    ),
    Key(
        "[ethernet]",
        "interface",
        "a text",
        "the one that reaches the master",
        "its net device, alike on all nodes",
    ),
    Key("[[cluster]]", "name", "a text", "", "of the cluster, in every message and table"),
    Key(
        "[[cluster]]",
        "kind",
        "a text",
        "",
        f"its fast NICs: {', '.join(KINDS)} (ethernet: it has none)",
    ),
    Key(
        "[[cluster]]",
        "nodes",
        _LIST,
        "",
        'host names; `"gpu[00-15]"` stands for sixteen, `"gpu[1,4-6]"` for four',
    ),
    Key(
        "[[cluster]]",
        "rate",
        _RATE,
        "none with kind ethernet",
        'of one node, all its fast NICs together, each way: eight HCAs of 200 Gb/s are `"1600Gb/s"`',
    ),
    Key(
        "[[cluster]]",
        "rails",
        "a number",
        "1",
        "for `holmes lab`: fast NICs of each node, which share its rate; a real node's are found",
    ),
    Key("[[cluster]]", "processes", "a number", "1", "of each node, one a GPU"),
    Key(
        "[[cluster]]",
        "fabric",
        "a text",
        "the cluster's name",
        "clusters that name the same fabric can talk over it",
    ),
    Key("[[cluster]]", "latency", _TIME, _WAITS, "of a message on its fabric"),
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
        "NCCL's own IB",
        'NCCL\'s name of the fast network where a plugin carries it: `"AWS Libfabric"` (NCCL_DEBUG=INFO '
        'tells: Using network NAME), or `"auto"`: NCCL chooses',
    ),
    Key(
        "[[cluster]]",
        "uplink",
        _RATE,
        "no limit",
        "what all its nodes together get to other clusters, each way",
    ),
    Key(
        "[[cluster]]",
        "gpu",
        "a text",
        "none",
        f"for `holmes plan`: {', '.join(KNOWN)}, also inside a driver's name, give the next three",
    ),
    Key(
        "[[cluster]]",
        "gpu_flops",
        "a number",
        "of `gpu`",
        "FLOP/s that training reaches on one GPU, not the data sheet's",
    ),
    Key("[[cluster]]", "gpu_memory_bytes", "a number", "of `gpu`", "of one GPU"),
    Key(
        "[[cluster]]", "nvlink", _RATE, "of `gpu`", "of one GPU to the others of its node, each way"
    ),
    Key(
        "[[between]]",
        "clusters",
        "two names",
        "",
        "a pair of clusters; where one pair is given, every pair must be",
    ),
    Key(
        "[[between]]",
        "rate",
        _RATE,
        "no limit of its own",
        "what all traffic between the two shares, each way",
    ),
    Key("[[between]]", "latency", _TIME, "[ethernet]'s", "one way, from node to node"),
    Key("[node.HOST]", "include", _LIST, "the cluster's", "for one host that differs"),
    Key("[node.HOST]", "exclude", _LIST, "the cluster's", "the same"),
    Key(
        "[node.HOST]",
        "ethernet",
        "a text",
        "[ethernet]'s interface",
        "its net device on the common network",
    ),
    Key(
        "[link.FABRIC]",
        "send",
        "pairs of numbers",
        "from rate and latency",
        "written by `holmes probe`: bytes of a message, seconds from node to node",
    ),
    Key(
        "[link.FABRIC]",
        "ring",
        "pairs of numbers",
        "from rate and latency",
        "written by `holmes probe`: bytes of a step of a ring, seconds",
    ),
    Key(
        "[[measured]]",
        "clusters",
        "two names",
        "",
        "written by `holmes probe`; plans take it in place of `[[between]]`",
    ),
    Key("[[measured]]", "rate", _RATE, "", "of several nodes at once, each way"),
    Key("[[measured]]", "stream", _RATE, "not known", "of one stream"),
    Key("[[measured]]", "latency", _TIME, "", "half a round trip, from node to node"),
)
