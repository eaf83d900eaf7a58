"""Makes the input files of Sailor's planners for a case (eth-easl/sailor: its own and the nine that it has).

A profile is a table with seconds and bytes of each layer, by GPU, tensor-parallel size and micro-batch.
Users of these planners measure it. Here it has the numbers of the case (plan/cost/model.py), so that all
planners, holmes too, get the same costs of the layers. Layer 0 is the embedding, and the last one is the
output layer. Sailor's code accepts only certain names of GPUs and zones, which therefore stand for those of
the case.

A planner sees a case in one of three ways, as in Sailor's own scripts:

    flat     Varuna, Piper, Galvatron: one type of GPU (the slowest), and one network (that reaches all)
    kinds    AMP, Metis, FlashFlex: at most two types of nodes. They are the clusters if there are two, else
             the types of GPUs
    zones    Sailor, DTFM, Atlas: a zone in a region of its own for each cluster, and a rate for each pair
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from holmes_ext.cluster.fabric import ETHERNET
from holmes_ext.plan.cost.model import Gpu
from holmes_ext.plan.sizes import divisors
from referee.cases import Case

GPUS = "A100-40", "V100-16"
ZONES = "us-central1-a", "us-west1-b", "europe-west4-a", "us-east1-b", "asia-east1-c"
MODEL = "OPT-350"
MICRO_BATCHES = tuple(range(1, 9))
#: Bytes of a GPU where the case knows no limit.
NO_LIMIT = 40 * 2**30
MIB = 2**20
FLAT, KINDS, BY_ZONE = (
    ("Varuna", "Piper", "Galvatron", "Aceso"),
    ("AMP", "Metis", "FlashFlex"),
    ("SAILOR", "DTFM", "Atlas"),
)
Json = dict[str, Any]


@dataclass(frozen=True)
class View:
    """Case as one planner of Sailor sees it."""

    case: Case
    gpus: Mapping[str, Gpu]  # Sailor's name of a GPU type -> the GPU
    groups: Mapping[tuple[str, str], tuple[str, ...]]  # (GPU type, zone) -> clusters of the case

    @classmethod
    def of(cls, case: Case, planner: str) -> View:
        """Return the case as a planner sees it (see the module docstring)."""
        clusters, kinds = list(case.site.clusters), case.gpu_kinds
        if planner in FLAT:
            return cls(case, {GPUS[0]: kinds[-1]}, {(GPUS[0], ZONES[0]): tuple(clusters)})
        # Cluster -> index of its type of GPU.
        kind = {name: kinds.index(replace(case.gpu(name), link_bps=0.0)) for name in clusters}
        if planner in KINDS and len(clusters) == 2:
            kind = {clusters[0]: 0, clusters[1]: 1}
        groups: dict[tuple[str, str], tuple[str, ...]] = {}
        for at, name in enumerate(clusters):
            key = GPUS[kind[name]], ZONES[at if planner in BY_ZONE else 0]
            groups[key] = (*groups.get(key, ()), name)
        return cls(case, {GPUS[kind[name]]: case.gpu(name) for name in clusters}, groups)

    def count(self, key: tuple[str, str]) -> int:
        """Return the number of nodes of a group."""
        return sum(node.cluster in self.groups[key] for node in self.case.site.nodes)

    def link(self, first: tuple[str, str], second: tuple[str, str]) -> tuple[float, float]:
        """Return rate (bytes/s) and latency (seconds) of the slowest pair of nodes of two groups."""
        pairs = [self._pair(a, b) for a in self.groups[first] for b in self.groups[second]]
        return min(rate for rate, _ in pairs) / 8, max(latency for _, latency in pairs)

    def _pair(self, first: str, second: str) -> tuple[float, float]:
        """Return the rate in bits/s and the latency in seconds between nodes of two clusters."""
        site = self.case.site
        node_in = {node.cluster: node.name for node in reversed(site.nodes)}
        fabric = site.shared_fabric([node_in[first], node_in[second]])
        hops = site.wan.hops(first, second) if first != second and fabric.name == ETHERNET else ()
        if not hops:
            return fabric.rate_bps, fabric.latency_s
        return min(fabric.rate_bps, *(hop.rate_bps for hop in hops)), sum(
            hop.latency_s for hop in hops
        )

    @property
    def tensors(self) -> list[int]:
        """The tensor-parallel sizes that are possible inside a node."""
        return [
            size for size in divisors(self.case.site.processes) if self.case.model.heads % size == 0
        ]

    def memory(self, gpu: str) -> float:
        """Return the bytes of a GPU."""
        return self.gpus[gpu].memory_bytes or NO_LIMIT

    def layers(self, gpu: str, tensor: int, micro_batch: int) -> list[Json]:
        """Return what each layer takes on a rank: the embedding, the blocks and the output layer.

        Args:
            gpu: Sailor's name of the GPU type.
            tensor: Tensor-parallel size.
            micro_batch: Sequences of a micro-batch.

        Returns:
            For each layer, the seconds of its forward and backward pass, with the all-reduces of the
            tensor-parallel group; and the bytes of its parameters, of what is kept for the backward pass,
            and of the activation that is sent.
        """
        spec, rows = self.gpus[gpu], []
        for layer in replace(self.case.model, micro_batch=micro_batch).costs(tensor):
            sums = (
                layer.tensor_bytes * 16 * (tensor - 1) / tensor / spec.link_bps
                if spec.link_bps
                else 0.0
            )
            rows.append(
                {
                    "forward": layer.forward_flops / spec.flops + sums / 2,
                    "backward": layer.backward_flops / spec.flops + sums / 2,
                    "parameters": layer.parameters,
                    "kept": layer.kept_bytes,
                    "sent": layer.activation_bytes,
                }
            )
        return rows


def polynomial(rate: float, latency: float, least: float, most: float) -> list[float]:
    """Return a polynomial for the rate of messages, in GB/s, over log2 of their size in megabytes.

    The polynomial goes through three sizes. If it would fall below zero between them, a line through two
    sizes is returned.

    Args:
        rate: In bytes/s.
        latency: In seconds.
        least, most: Smallest and largest message, in bytes.

    Returns:
        The coefficients, the highest power first.
    """
    places = np.linspace(np.log2(least / 1e6), np.log2(most / 1e6), 3)
    sizes = 2.0**places * 1e6
    reached = sizes / (sizes / rate + latency) / 1e9
    curve = np.polyfit(places, reached, 2)
    if np.polyval(curve, np.linspace(places[0], places[-1], 64)).min() <= 0.5 * reached[0]:
        curve = np.array([0.0, *np.polyfit(places[[0, 2]], reached[[0, 2]], 1)])
    return [float(value) for value in curve]


def network(view: View) -> Json:
    """Return the content of providers/multizone_bandwidths_het.json.

    It is zone -> GPU type -> GPUs of a node -> other zone -> other GPU type -> GPUs of a node -> the
    coefficients of polynomial() and the rate in bytes/s.
    """
    block = view.layers(GPUS[0], 1, 1)[1]  # behind the embedding
    # The smallest and the largest message, in bytes.
    sizes = block["sent"] / 64, max(4 * view.case.model.parameters, 2 * block["sent"])
    counts = [str(count) for count in sorted({*view.tensors, view.case.site.processes})]
    table: Json = {}
    zones = {zone: (gpu, zone) for gpu, zone in reversed(view.groups)}
    # Sailor's code looks for each GPU type in each zone.
    keys = [(gpu, zone) for zone in zones for gpu in view.gpus]
    for source in keys:
        for target in keys:
            sender, receiver = (
                key if key in view.groups else zones[key[1]] for key in (source, target)
            )
            rate, latency = view.link(sender, receiver)
            value = [polynomial(rate, latency, *sizes), rate]
            for out in counts:
                to = table.setdefault(source[1], {}).setdefault(source[0], {}).setdefault(out, {})
                to.setdefault(target[1], {})[target[0]] = dict.fromkeys(counts, value)
    return table


def inside(view: View) -> Json:
    """Return the content of providers/intra_node_bandwidths.json: rates inside a node, by number of GPUs."""
    table = {}
    for name, gpu in view.gpus.items():
        rate = (gpu.link_bps or 2400e9) / 8
        sizes = range(2, max(2, view.case.site.processes) + 1)
        table[name] = {str(size): [[0.0, 0.0, rate / 1e9], rate] for size in sizes}
    return table


def memory_info(view: View) -> Json:
    """Return the content of llm_info.json.

    Sailor's floats have 4 bytes. Elements that the case sends and keeps in 2 bytes count as half a float.
    """
    tables: Json = {}
    for tensor in view.tensors:
        layers = view.layers(next(iter(view.gpus)), tensor, 1)
        sent = [layers[0]["sent"], *(layer["sent"] for layer in layers)]
        tables[str(tensor)] = {
            str(at): {
                f"{what}_{unit}": int(size / (4 if unit == "floats" else 1))
                for unit in ("floats", "bytes")
                for what, size in (
                    ("params", 4 * layer["parameters"]),
                    ("act_output", layer["sent"]),
                    ("act_input", sent[at]),
                    ("act_mem", max(layer["kept"], layer["sent"])),
                )
            }
            for at, layer in enumerate(layers)
        }
    return {MODEL: tables}


def seconds(view: View, gpu: str) -> Json:
    """Return Sailor's profile.json of a GPU.

    It is micro-batch -> tensor-parallel size -> layer -> seconds of the forward pass, the backward pass
    and the update.
    """
    table: Json = {}
    for tensor in view.tensors:
        for size in MICRO_BATCHES:
            rows = {
                str(at): [layer["forward"], layer["backward"], 0.0]
                for at, layer in enumerate(view.layers(gpu, tensor, size))
            }
            table.setdefault(str(size), {})[str(tensor)] = rows
    return table


def varuna(view: View) -> Json:
    """Return Varuna's profile: layer -> micro-batch -> what the layer takes with tensor-parallel size 1."""
    state = view.case.model.state_bytes
    tables = {size: view.layers(GPUS[0], 1, size) for size in MICRO_BATCHES}
    return {
        str(at): {
            str(size): {
                "forward": layer["forward"],
                "backward": layer["backward"],
                "params_bytes": int(4 * layer["parameters"]),
                "mem_required": layer["parameters"] * state + layer["kept"],
                "output_activation": layer["sent"],
            }
            for size, table in tables.items()
            for layer in [table[at]]
        }
        for at in range(len(tables[1]))
    }


def piper(view: View) -> Json:
    """Return Piper's graph of layers, with their times and memory by tensor-parallel size.

    The state of a parameter is memory that the layer's stage keeps. A kept activation is memory for every
    later stage.
    """
    last = view.case.model.layers + 1
    names = ["Embedding", *["Transformer"] * (last - 1), "Output"]
    tables = {size: view.layers(GPUS[0], size, 1) for size in view.tensors}

    def node(at: int) -> Json:
        """Return the node of a layer, with its times and memory for each tensor-parallel size."""
        options = {
            str(tensor): [
                {
                    "id": "vanilla",
                    "timePerSample": layer["forward"] + layer["backward"],
                    "parameterSize": 4 * layer["parameters"],
                    "memoryUsageA": layer["kept"],
                    "memoryUsageB": layer["parameters"] * view.case.model.state_bytes,
                    "syncTimeFw": {str(at - 1): 0} if at else {},
                    "syncTimeBw": {str(at + 1): 0} if at < last else {},
                }
            ]
            for tensor, table in tables.items()
            for layer in [table[at]]
        }
        return {"id": at, "name": names[at], "TMPCs": options}

    stage_links = [
        {"sourceId": at, "destId": at + 1, "communicationCost": tables[1][at]["sent"]}
        for at in range(last)
    ]
    limits = {
        "maxDevices": 1,
        "maxMemoryPerDevice": view.memory(GPUS[0]),
        "bandwidth": 1,
        "mbsInBatch": 1,
    }
    return {
        "1": {**limits, "nodes": [node(at) for at in range(last + 1)], "stage_links": stage_links}
    }


def metis(view: View, gpu: str, tensor: int, micro_batch: int) -> Json:
    """Return Metis's mbsM_tmpT.json, in milliseconds and MiB.

    Args:
        gpu: Sailor's name of the GPU type.
        tensor: Tensor-parallel size (T).
        micro_batch: Sequences of a micro-batch (M).
    """
    rows, whole = view.layers(gpu, tensor, micro_batch), view.layers(gpu, 1, 1)
    times = [1000 * (layer["forward"] + layer["backward"]) for layer in rows]
    memory = [
        (layer["parameters"] * view.case.model.state_bytes + layer["kept"]) / MIB for layer in rows
    ]
    parameters = [4 * layer["parameters"] for layer in whole]
    return {
        "model": {
            "model_name": MODEL,
            "num_layers": len(rows),
            "parameters": {
                "total_parameters_bytes": sum(parameters),
                "parameters_per_layer_bytes": parameters,
                "activation_parameters_bytes": [layer["sent"] for layer in whole],
            },
        },
        "execution_time": {
            "total_time_ms": sum(times),
            "forward_backward_time_ms": sum(times),
            "batch_generator_time_ms": 0.0,
            "optimizer_time_ms": 0.0,
            "layer_compute_total_ms": times,
        },
        "execution_memory": {"layer_memory_total_mb": memory},
    }


def galvatron(view: View) -> dict[str, Json]:
    """Return Galvatron's three profiles by file name.

    They have milliseconds of the forward pass of a sequence, MiB, and MiB/ms of rings and sends.
    """
    first, block, *_, last = view.layers(GPUS[0], 1, 1)
    state, world = view.case.model.state_bytes, view.case.site.world_size
    rate, _ = view.link(next(iter(view.groups)), next(iter(view.groups)))
    kept = {str(size): view.layers(GPUS[0], size, 1)[1]["kept"] / MIB for size in (1, 2, 4, 8)}

    def other(*layers: Json) -> Json:
        """Return the memory of layers that are no transformer blocks, as in memory_profile.json."""
        parameters = sum(layer["parameters"] for layer in layers)
        return {"model_states": parameters * state / MIB, "activation": 0.0}

    hardware: Json = {"overlap_coe": 1.0}
    for size in range(2, world + 1):
        fast = (view.gpus[GPUS[0]].link_bps or 2400e9) / 8
        ring = (fast if size <= view.case.site.processes else rate) / 2**30
        hardware |= {
            f"allreduce_size_{size}_consec_1": ring,
            f"p2p_size_{size}": rate / 2**30,
            f"pp_size_{size}": rate / 2**30,
            f"allreduce_size_{size}_consec_0": rate / 2**30,
        }
    return {
        "compute_profile.json": {
            "layertype_0": 1000 * block["forward"],
            "layertype_other_0": 1000 * (first["forward"] + last["forward"]),
        },
        "memory_profile.json": {
            "layertype_0": {
                "parameter_size": 4 * block["parameters"] / MIB,
                "tp_activation_per_bsz_dict": kept,
            },
            "other_memory_pp_off": other(first, last),
            "other_memory_pp_on_first": other(first),
            "other_memory_pp_on_last": other(last),
        },
        "hw_prof.json": hardware,
    }


def flashflex(view: View) -> Json:
    """Return FlashFlex's machine_amounts.json, in TFLOP/s (of 2^40), GiB, and GiB/s inside a node."""
    specs = {
        name: [gpu.flops / 2**40, view.memory(name) / 2**30, (gpu.link_bps or 2400e9) / 8 / 2**30]
        for name, gpu in view.gpus.items()
    }
    return {"machine_specs": specs, "machine_amounts": {}}


def training(view: View) -> Json:
    """Return the content of training_config.json."""
    model = view.case.model
    return {
        "global_batch_size": view.case.batch,
        "type": "gpt2",
        "hidden_size": model.hidden,
        "sequence_length": model.sequence,
        "num_layers": model.layers,
        "vocab_size": model.vocabulary,
        "model": MODEL,
        "optimizer": "Adam",
        "heads": model.heads,
        "head_dim": model.hidden // model.heads,
        "max_position_embeddings": model.sequence,
        "num_all_layers": model.layers + 2,
    }


def cluster(view: View, planner: str) -> Json:
    """Return the cluster_config that Sailor's simulator passes to a planner: types and numbers of GPUs."""
    processes, keys = view.case.site.processes, list(view.groups)
    gpu, zone = keys[0]
    per_node = {"gpus_per_node": processes, "mem_per_gpu": view.memory(gpu)}
    if planner in FLAT:
        return {"gpu_type": gpu, "num_nodes": view.count(keys[0]), "zone": zone, **per_node}
    if planner in KINDS:
        kinds = {
            key[0]: {
                "num_nodes": view.count(key),
                "gpus_per_node": processes,
                "mem_per_gpu": view.memory(key[0]),
            }
            for key in keys
        }
        return {**kinds, "zone": zone}
    counts: Json = {f"{key[0]}_{key[1]}": view.count(key) * processes for key in keys}
    if planner == "SAILOR":
        return {**counts, "max_cost": 0.0, "min_throughput": 0.0}
    if planner == "DTFM":
        return {
            **counts,
            "gpu_types": list(view.gpus),
            "gpus_per_node": dict.fromkeys(view.gpus, processes),
        }
    # Atlas knows one kind of GPU
    alike = {name: count for name, count in counts.items() if name.startswith(gpu)}
    return {**alike, "gpus_per_node": processes, "gpu_type": gpu}
