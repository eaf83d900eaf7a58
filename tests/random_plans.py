"""Random sites, models and options for `holmes plan`, from clean ones to those on which no plan fits.

Clusters differ in their number of nodes, NICs, GPUs and memory. Some sites have links between clusters (a
WAN). Some models are too large for the GPUs of one cluster, of some stages, or of all clusters.
"""

from __future__ import annotations

import random
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from clusters import toml

FAST_RATES = ("50Gb/s", "200Gb/s", "800Gb/s")
SLOW_RATES = ("2Gb/s", "10Gb/s", "25Gb/s", "100Gb/s")
LATENCIES = ("100us", "5ms", "70ms")
#: Memory of a GPU in bytes. The first three hold only a few layers of the larger models.
MEMORIES = ("1e9", "4e9", "16e9", "40e9", "80e9")
FLOPS = ("20e12", "150e12", "400e12")


class RandomPlan(NamedTuple):
    """Input of one run of `holmes plan`."""

    cluster: str  # text of cluster.toml
    model: str  # text of the model file
    options: list[str]  # other arguments of the command
    command: list[str]  # arguments after "--"; empty if the model file is used

    def arguments(self, folder: Path) -> list[str]:
        """Write the two files into a folder, and return the arguments of the command `holmes`."""
        cluster_file = folder / "cluster.toml"
        cluster_file.write_text(self.cluster)
        given = ["--cluster", str(cluster_file)]
        if "--nodes" in self.options:
            given = ["--from-cluster", str(cluster_file)]
        if self.command:
            return ["plan", *given, *self.options, "--", *self.command]
        model_file = folder / "model.toml"
        model_file.write_text(self.model)
        return ["plan", *given, *self.options, "--model", str(model_file)]


def random_plan(seed: int) -> RandomPlan:
    """Return the input number `seed`; the same seed gives the same input."""
    pick = random.Random(seed)
    names = "abcde"[: pick.choice((1, 2, 2, 3, 4, 4, 5))]
    are_equal = pick.random() < 0.4  # all clusters have as many nodes
    processes = pick.choice((1, 2, 4, 8))
    nodes = {}
    for name in names:
        nodes[name] = nodes["a"] if are_equal and name != "a" else pick.randint(1, 6)
    world = processes * sum(nodes.values())
    cluster = _clusters(pick, nodes, processes)
    if len(names) > 1 and pick.random() < 0.6:
        cluster += _links(pick, names)
    global_batch = world * pick.choice((1, 2, 4, 8))
    options = []
    if len(names) > 1 and pick.random() < 0.4:
        options.append("--joined")
    elif pick.random() < 0.1:
        options += ["--nodes", str(pick.randint(1, sum(nodes.values())))]
    if pick.random() < 0.2:
        options += ["--limit", pick.choice(("tensor=1", "pipeline=2,4", "recompute=full"))]
    if pick.random() < 0.3:
        options.append("--json")
    command = _megatron_command(pick, world, global_batch) if pick.random() < 0.3 else []
    return RandomPlan(cluster, _model(pick, global_batch), options, command)


def _clusters(pick: random.Random, nodes: dict[str, int], processes: int) -> str:
    """Return the text of cluster.toml without links between clusters.

    Args:
        nodes: Cluster -> number of its nodes.
        processes: GPUs of a node.
    """
    lines = []
    for name, count in nodes.items():
        kind = pick.choice(("ib", "roce", "ethernet"))
        rate = "-" if kind == "ethernet" else pick.choice(FAST_RATES)
        gpu = f"gpu_flops={pick.choice(FLOPS)} gpu_memory_bytes={pick.choice(MEMORIES)}"
        lines.append(f"{name} {kind} {rate} {name}[0-{count - 1}] {gpu}")
    return toml(*lines, ethernet=pick.choice(SLOW_RATES), processes=processes)


def _links(pick: random.Random, names: str) -> str:
    """Return the tables of cluster.toml for the links between all pairs of clusters."""
    tables = []
    for pair in combinations(names, 2):
        tables.append(
            f'[[between]]\nclusters = ["{pair[0]}", "{pair[1]}"]\n'
            f'rate = "{pick.choice(SLOW_RATES)}"\nlatency = "{pick.choice(LATENCIES)}"\n'
        )
    return "".join(tables)


def _model(pick: random.Random, global_batch: int) -> str:
    """Return the text of a model file."""
    heads = pick.choice((4, 8, 16, 32))
    experts = pick.choice((0, 0, 0, 8))
    return f"""version = 1
name = "random"
layers = {pick.choice((1, 2, 6, 7, 12, 36))}
hidden = {64 * heads}
heads = {heads}
sequence = {pick.choice((128, 1024, 2048))}
vocabulary = {pick.choice((1000, 51200))}
tied = {pick.choice(("true", "false"))}
experts = {experts}
[training]
micro_batch = {pick.choice((1, 2))}
global_batch = {global_batch}
recompute = "{pick.choice(("none", "selective", "full"))}"
[gpu]
flops = 150e12
"""


def _megatron_command(pick: random.Random, world: int, global_batch: int) -> list[str]:
    """Return a command line of Megatron-LM with parallel sizes, which need not be possible."""
    tensor = pick.choice([size for size in (1, 2, 4, 8) if world % size == 0])
    pipeline = pick.choice([size for size in (1, 2, 3, 4) if world // tensor % size == 0])
    layers = pipeline * pick.choice((1, 2, 6))
    options = {
        "tensor-model-parallel-size": tensor,
        "pipeline-model-parallel-size": pipeline,
        "num-layers": layers,
        "hidden-size": pick.choice((512, 2048)),
        "num-attention-heads": 8,
        "seq-length": pick.choice((128, 2048)),
        "micro-batch-size": pick.choice((1, 2, 3)),
        "global-batch-size": global_batch,
        "vocab-size": 32000,
    }
    words = ["pretrain_gpt.py", "--bf16"]
    for name, value in options.items():
        words += [f"--{name}", str(value)]
    if pick.random() < 0.3:
        words.append("--use-distributed-optimizer")
    return words
