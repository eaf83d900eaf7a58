"""Makes the input files of Sailor's planners for a case (eth-easl/sailor: its planner and nine others).

A profile is a table with seconds and bytes of each layer, by GPU, tensor-parallel size and micro-batch.
Users of these planners measure it. Here it has the numbers of the case (plan/cost/model.py), so that all
planners, holmes too, get the same costs of the layers. Layer 0 is the embedding, and the last layer is the
output layer. Sailor's code accepts only certain names of GPUs and zones, so these stand for those of the
case.

A planner sees a case in one of three ways, as in Sailor's scripts:

    flat     Varuna, Piper, Galvatron: one type of GPU (the slowest), and one network (that reaches all)
    kinds    AMP, Metis, FlashFlex: at most two types of nodes. They are the clusters if there are two, else
             the types of GPUs
    zones    Sailor, DTFM, Atlas: a zone in a region of its own for each cluster, and a rate for each pair
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from holmes_ext.cluster.fabric import ETHERNET
from holmes_ext.plan.cost.model import Gpu
from holmes_ext.plan.sizes import divisors
from referee.cases import Case

#: Names that Sailor's code accepts. They stand for the GPU types and the clusters of a case.
GPUS = "A100-40", "V100-16"
ZONES = "us-central1-a", "us-west1-b", "europe-west4-a", "us-east1-b", "asia-east1-c"
MODEL = "OPT-350"  # a name that Sailor's code accepts; it stands for the case's model
MICRO_BATCHES = tuple(range(1, 9))
#: Bytes of a GPU where the case knows no limit.
NO_LIMIT = 40 * 2**30
MIB = 2**20
#: Rate between GPUs of a node where the case names none, in bits/s: NVLink of an A100.
NVLINK_BPS = 2400e9
#: Sailor's planners count 4 bytes for each parameter (float32).
PARAMETER_BYTES = 4
FLAT, KINDS, BY_ZONE = (
    ("Varuna", "Piper", "Galvatron", "Aceso"),
    ("AMP", "Metis", "FlashFlex"),
    ("SAILOR", "DTFM", "Atlas"),
)
Json = dict[str, Any]


class GroupKey(NamedTuple):
    """Key of a group of nodes with the same GPU type and zone: a planner treats them as equal."""

    gpu: str
    zone: str


@dataclass(frozen=True)
class View:
    """Case as one planner of Sailor sees it."""

    case: Case
    gpus: Mapping[str, Gpu]  # Sailor's name of a GPU type -> the GPU
    groups: Mapping[
        GroupKey, tuple[str, ...]
    ]  # nodes that the planner cannot tell apart -> clusters

    @classmethod
    def of(cls, case: Case, planner: str) -> View:
        """Return the case as a planner sees it: with the GPU types and zones that it knows.

            planner      GPU types                             zones
            in FLAT      one: the slowest stands for all       one
            in KINDS     of two clusters: one for each;        one
                         otherwise: those of the case
            in BY_ZONE   those of the case                     one for each cluster

        Types and zones have names that Sailor's code accepts (GPUS, ZONES).

        Args:
            case: The planning problem.
            planner: A name in FLAT, KINDS or BY_ZONE.
        """
        clusters, gpu_types = list(case.site.clusters), case.gpu_kinds  # the fastest type first
        if planner in FLAT:
            slowest = gpu_types[-1]
            all_nodes = GroupKey(GPUS[0], ZONES[0])
            return cls(case, gpus={GPUS[0]: slowest}, groups={all_nodes: tuple(clusters)})
        # Cluster -> index of its GPU type. GPUs with the same speed and memory are one type, even
        # if the links between the GPUs of a node differ. gpu_kinds has link_bps=0 everywhere, so
        # the GPU is looked up with link_bps=0, too.
        type_of = {
            name: gpu_types.index(replace(case.gpu(name), link_bps=0.0)) for name in clusters
        }
        if planner in KINDS and len(clusters) == 2:
            # Clusters with the same GPUs get two types, too: their networks differ.
            type_of = {clusters[0]: 0, clusters[1]: 1}
        groups: dict[GroupKey, tuple[str, ...]] = {}
        for number, name in enumerate(clusters):
            zone = ZONES[number] if planner in BY_ZONE else ZONES[0]
            key = GroupKey(GPUS[type_of[name]], zone)
            groups[key] = (*groups.get(key, ()), name)
        gpus = {GPUS[type_of[name]]: case.gpu(name) for name in clusters}
        return cls(case, gpus=gpus, groups=groups)

    def count(self, key: GroupKey) -> int:
        """Return the number of nodes of a group: those with its GPU type in its zone."""
        return sum(node.cluster in self.groups[key] for node in self.case.site.nodes)

    def link(self, first: GroupKey, second: GroupKey) -> tuple[float, float]:
        """Return the rate (bytes/s) and the latency (seconds) between nodes of two groups.

        They are those of the slowest pair of nodes. A group has all nodes with one GPU type in one
        zone.
        """
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
        """Return times and sizes of each layer on a rank: the embedding, the blocks and the output layer.

        Args:
            gpu: Sailor's name of the GPU type.
            tensor: Tensor-parallel size.
            micro_batch: Sequences of a micro-batch.

        Returns:
            For each layer: "forward" and "backward", seconds of its passes with the all-reduces of
            the tensor-parallel group; "parameters", their number on the rank; "kept", bytes of
            activations that are kept for the backward pass; "sent", bytes of the activation that
            goes to the next layer.
        """
        spec, rows = self.gpus[gpu], []
        for layer in replace(self.case.model, micro_batch=micro_batch).costs(tensor):
            all_reduces_s = 0.0  # of the tensor-parallel group, in both passes
            if spec.link_bps:
                # 16 = 8 bits x 2: in a ring, a rank sends 2 (tensor - 1) / tensor times the bytes.
                all_reduces_s = layer.tensor_bytes * 16 * (tensor - 1) / tensor / spec.link_bps
            rows.append(
                {
                    "forward": layer.forward_flops / spec.flops + all_reduces_s / 2,
                    "backward": layer.backward_flops / spec.flops + all_reduces_s / 2,
                    "parameters": layer.parameters,
                    "kept": layer.kept_bytes,
                    "sent": layer.activation_bytes,
                }
            )
        return rows


def polynomial(rate: float, latency: float, least: float, most: float) -> list[float]:
    """Return a polynomial for the rate of messages, in GB/s, over log2 of their size in megabytes.

    A parabola through three sizes is returned. But if it falls to half of the smallest message's
    rate or less, a line through the smallest and the largest size is returned: rates must stay
    positive.

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
    between = np.linspace(places[0], places[-1], 64)
    if np.polyval(curve, between).min() <= 0.5 * reached[0]:
        curve = np.array([0.0, *np.polyfit(places[[0, 2]], reached[[0, 2]], 1)])
    return [float(value) for value in curve]


def network(view: View) -> Json:
    """Return Sailor's table of network links (providers/multizone_bandwidths_het.json).

    The table has a link for every two kinds of nodes. It is a nested dict:

        table[zone][GPU type][GPUs of a node][zone][GPU type][GPUs of a node] = value

    The first three keys are of the sender, and the others of the receiver. A value is
    [coefficients, rate in bytes/s]. The coefficients are of a polynomial, by which Sailor computes
    the rate of a message from log2 of its size.
    """
    # A block's "sent": bytes of the activation that goes to the next layer.
    _embedding, block, *_ = view.layers(GPUS[0], tensor=1, micro_batch=1)
    # The smallest and the largest message in bytes, between which the polynomial must be right: an
    # activation that is divided among up to 64 ranks, and the gradients of the whole model or two
    # activations.
    smallest = block["sent"] / 64
    largest = max(PARAMETER_BYTES * view.case.model.parameters, 2 * block["sent"])
    # Numbers of GPUs of a node that Sailor may look up: all of the node's, or only as many as a
    # tensor-parallel group needs.
    counts = [str(count) for count in sorted({*view.tensors, view.case.site.processes})]
    table: Json = {}
    # Zone -> its first group. Reversed, because a later entry of a dict replaces an earlier one.
    first_group = {group.zone: group for group in reversed(view.groups)}
    # Sailor's code looks up each GPU type in each zone, also where the case has none of that type.
    # Then the first group of the zone stands for it.
    keys = [GroupKey(gpu, zone) for zone in first_group for gpu in view.gpus]
    group_of = {key: key if key in view.groups else first_group[key.zone] for key in keys}
    for source in keys:
        for target in keys:
            rate, latency = view.link(group_of[source], group_of[target])
            value = [polynomial(rate, latency, least=smallest, most=largest), rate]
            by_gpu = table.setdefault(source.zone, {}).setdefault(source.gpu, {})
            # The rate is that of a node, for any number of GPUs of the sender and the receiver.
            for gpus_of_sender in counts:
                receivers = by_gpu.setdefault(gpus_of_sender, {})
                receivers.setdefault(target.zone, {})[target.gpu] = dict.fromkeys(counts, value)
    return table


def inside(view: View) -> Json:
    """Return the content of providers/intra_node_bandwidths.json: rates inside a node, by number of GPUs."""
    table = {}
    for name, gpu in view.gpus.items():
        rate = (gpu.link_bps or NVLINK_BPS) / 8
        sizes = range(2, max(2, view.case.site.processes) + 1)
        table[name] = {str(size): [[0.0, 0.0, rate / 1e9], rate] for size in sizes}
    return table


def memory_info(view: View) -> Json:
    """Return llm_info.json, the file with the sizes of the model's layers for Sailor's planners.

    Its levels of keys are the model, the tensor-parallel size and the number of the layer. Each
    size is given in bytes, and in floats of 4 bytes.

    Args:
        view: The clusters and the model as the planner sees them.
    """
    tables: Json = {}
    any_gpu = next(iter(view.gpus))  # sizes do not depend on the GPU
    for tensor in view.tensors:
        layers = view.layers(any_gpu, tensor, micro_batch=1)
        # The input of a layer is the output of the previous one. The embedding's output stands
        # for its input.
        inputs = [layers[0]["sent"], *(layer["sent"] for layer in layers)]
        tables[str(tensor)] = {
            str(number): _sizes_of_layer(layer, input_bytes=inputs[number])
            for number, layer in enumerate(layers)
        }
    return {MODEL: tables}


def _sizes_of_layer(layer: Json, input_bytes: float) -> Json:
    """Return the sizes of a layer on one rank, by their names in Sailor's llm_info.json.

    They are the parameters ("params"), the activations that the layer receives and sends
    ("act_input", "act_output"), and those kept for the backward pass ("act_mem"). Each has an entry in bytes
    ("params_bytes"), and an entry in floats of 4 bytes ("params_floats").

    Args:
        layer: "parameters": their number. "sent", "kept": bytes of activations.
        input_bytes: Bytes of the activation that the layer receives.
    """
    bytes_of = {
        "params": PARAMETER_BYTES * layer["parameters"],
        "act_output": layer["sent"],
        "act_input": input_bytes,
        "act_mem": max(layer["kept"], layer["sent"]),  # kept for the backward pass
    }
    floats = {f"{name}_floats": int(size / 4) for name, size in bytes_of.items()}
    return floats | {f"{name}_bytes": int(size) for name, size in bytes_of.items()}


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
    """Return Varuna's profile: layer -> size of the micro-batch -> times and bytes of the layer.

    Varuna knows no tensor parallelism, and one type of GPU. Times are in seconds.
    """
    # Bytes of a parameter in GPU memory: weight, gradient and optimizer state. (PARAMETER_BYTES are
    # those of the weight alone, as it is sent.)
    state_bytes = view.case.model.state_bytes

    def entry(layer: Json) -> Json:
        """Return Varuna's entry for a row of View.layers().

        Args:
            layer: "forward", "backward": seconds. "parameters": their number. "kept": bytes of
                activations that are kept for the backward pass. "sent": bytes of the activation
                that goes to the next layer.
        """
        return {
            "forward": layer["forward"],
            "backward": layer["backward"],
            "params_bytes": int(PARAMETER_BYTES * layer["parameters"]),
            "mem_required": layer["parameters"] * state_bytes + layer["kept"],
            "output_activation": layer["sent"],
        }

    tables = {size: view.layers(GPUS[0], tensor=1, micro_batch=size) for size in MICRO_BATCHES}
    layer_count = len(tables[1])
    return {
        str(number): {str(size): entry(layers[number]) for size, layers in tables.items()}
        for number in range(layer_count)
    }


def piper(view: View) -> Json:
    """Return the model's costs in the form that Sailor's version of the planner Piper reads.

    The form is {"1": graph}, where 1 is the size of a micro-batch. The graph has a node for each
    layer and an edge to the next layer, with the bytes of an activation. It also has the memory of
    a GPU. The numbers of devices and micro-batches and the bandwidth are placeholders (1): Sailor's
    code sets them itself.

    Args:
        view: The clusters and the model as the planner sees them.
    """
    last = view.case.model.layers + 1  # number of the output layer; the embedding is 0
    # Tensor-parallel size -> the layers on a rank.
    tables = {size: view.layers(GPUS[0], tensor=size, micro_batch=1) for size in view.tensors}
    stage_links = [
        {"sourceId": number, "destId": number + 1, "communicationCost": tables[1][number]["sent"]}
        for number in range(last)
    ]
    limits = {
        "maxDevices": 1,
        "maxMemoryPerDevice": view.memory(GPUS[0]),
        "bandwidth": 1,
        "mbsInBatch": 1,
    }
    nodes = [_piper_node(view, tables, number, last) for number in range(last + 1)]
    return {"1": {**limits, "nodes": nodes, "edges": stage_links}}


def _piper_node(view: View, tables: dict[int, list[Json]], number: int, last: int) -> Json:
    """Return the node of a layer in Piper's graph.

    "TMPCs" are the tensor-parallel configurations: size -> its variants, of which there is one
    ("vanilla"). A stage needs memoryUsageA for each micro-batch in flight and memoryUsageB once, in
    bytes. The sync times are for layers whose neighbours have other configurations; they take no
    time here.

    Args:
        tables: Tensor-parallel size -> the layers on a rank.
        number: Number of the layer.
        last: Number of the last layer.
    """
    configurations = {}
    for tensor, layers in tables.items():
        layer = layers[number]
        configurations[str(tensor)] = [
            {
                "id": "vanilla",
                "timePerSample": layer["forward"] + layer["backward"],
                "parameterSize": PARAMETER_BYTES * layer["parameters"],
                "memoryUsageA": layer["kept"],
                "memoryUsageB": layer["parameters"] * view.case.model.state_bytes,
                "syncTimeFw": {str(number - 1): 0} if number else {},
                "syncTimeBw": {str(number + 1): 0} if number < last else {},
            }
        ]
    name = {0: "Embedding", last: "Output"}.get(number, "Transformer")
    return {"id": number, "name": name, "TMPCs": configurations}


def metis(view: View, gpu: str, tensor: int, micro_batch: int) -> Json:
    """Return Metis's profile of the layers for one GPU type, tensor-parallel size and micro-batch.

    Metis reads it from a file named mbsM_tmpT.json. Times are in milliseconds, and memory in MiB.

    Args:
        view: The case as Metis sees it.
        gpu: Sailor's name of the GPU type.
        tensor: Tensor-parallel size (T).
        micro_batch: Sequences of a micro-batch (M).
    """
    rows = view.layers(gpu, tensor, micro_batch)  # of one rank
    # Under "model", Metis expects sizes of the model itself: not divided among tensor-parallel
    # ranks, and for one sequence.
    whole = view.layers(gpu, tensor=1, micro_batch=1)
    # Of a layer: "kept" are bytes of activations that stay for the backward pass, and "sent" are
    # bytes of the activation that goes to the next layer.
    times = [1000 * (layer["forward"] + layer["backward"]) for layer in rows]
    memory = [
        (layer["parameters"] * view.case.model.state_bytes + layer["kept"]) / MIB for layer in rows
    ]
    parameters = [PARAMETER_BYTES * layer["parameters"] for layer in whole]
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

    compute_profile.json has milliseconds of the forward pass of a sequence, memory_profile.json has
    MiB, and hw_prof.json rates in GiB/s (Galvatron takes them for MiB/ms, which differ by 2.4 %).
    "layertype_0" is a transformer block, and "other" are embedding and output layer.
    """
    embedding, block, *_, output = view.layers(GPUS[0], tensor=1, micro_batch=1)
    state_bytes = view.case.model.state_bytes  # of a parameter: weight, gradient and optimizer
    kept = {}  # MiB of a block's activations, by tensor-parallel size
    for size in (1, 2, 4, 8):
        _, block_of_rank, *_ = view.layers(GPUS[0], tensor=size, micro_batch=1)
        kept[str(size)] = block_of_rank["kept"] / MIB

    def other(*layers: Json) -> Json:
        """Return the memory of layers that are no blocks, without activations."""
        parameters = sum(layer["parameters"] for layer in layers)
        return {"model_states": parameters * state_bytes / MIB, "activation": 0.0}

    return {
        "compute_profile.json": {
            "layertype_0": 1000 * block["forward"],
            "layertype_other_0": 1000 * (embedding["forward"] + output["forward"]),
        },
        "memory_profile.json": {
            "layertype_0": {
                "parameter_size": PARAMETER_BYTES * block["parameters"] / MIB,
                "tp_activation_per_bsz_dict": kept,
            },
            "other_memory_pp_off": other(embedding, output),  # without a pipeline
            "other_memory_pp_on_first": other(embedding),  # of the first stage of a pipeline
            "other_memory_pp_on_last": other(output),
        },
        "hw_prof.json": _galvatron_network(view),
    }


def _galvatron_network(view: View) -> Json:
    """Return the content of Galvatron's hw_prof.json: network rates in GiB/s by number of ranks.

    For N ranks, the keys are:

        allreduce_size_N_consec_1      all-reduce of consecutive ranks (first inside a node)
        allreduce_size_N_consec_0      all-reduce of ranks on different nodes
        p2p_size_N and pp_size_N       messages between pipeline stages: two names, one rate

    Args:
        view: The clusters as the planner sees them: with a single network.
    """
    (group,) = view.groups  # all nodes
    node_rate, _latency = view.link(group, group)
    between_nodes = node_rate / 2**30
    inside_node = (view.gpus[GPUS[0]].link_bps or NVLINK_BPS) / 8 / 2**30
    rates: Json = {"overlap_coe": 1.0}  # computing is not slower while messages travel
    for ranks in range(2, view.case.site.world_size + 1):
        fits_in_node = ranks <= view.case.site.processes
        rates |= {
            f"allreduce_size_{ranks}_consec_1": inside_node if fits_in_node else between_nodes,
            f"p2p_size_{ranks}": between_nodes,
            f"pp_size_{ranks}": between_nodes,
            f"allreduce_size_{ranks}_consec_0": between_nodes,
        }
    return rates


def flashflex(view: View) -> Json:
    """Return FlashFlex's machine_amounts.json: GPU type -> speed, memory, rate inside a node.

    The units are 2^40 FLOP/s, GiB and GiB/s: FlashFlex multiplies all three by powers of 1024.
    """
    specs = {}
    for name, gpu in view.gpus.items():
        link_bytes = (gpu.link_bps or NVLINK_BPS) / 8
        specs[name] = [gpu.flops / 2**40, view.memory(name) / 2**30, link_bytes / 2**30]
    return {"machine_specs": specs, "machine_amounts": {}}


def training(view: View) -> Json:
    """Return the model and the batch size as Sailor's planners read them (training_config.json).

    The sizes are those of the case. The name of the model is one that Sailor's code accepts.
    """
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
        "num_all_layers": model.layers + 2,  # with the embedding and the output layer
    }


def cluster(view: View, planner: str) -> Json:
    """Return the cluster_config of a planner: types and numbers of its GPUs.

    Its form depends on the planner: one GPU type (FLAT: Varuna, Piper, Galvatron), nodes by GPU
    type in one zone (KINDS: AMP, Metis, FlashFlex), or numbers of GPUs as "TYPE_ZONE" (BY_ZONE:
    Sailor, DTFM, Atlas).
    """
    processes, groups = view.case.site.processes, list(view.groups)
    first = groups[0]  # with FLAT the only one; with KINDS all groups are in its zone

    def nodes_of(group: GroupKey) -> Json:
        """Return number and size of a group's nodes."""
        return {
            "num_nodes": view.count(group),
            "gpus_per_node": processes,
            "mem_per_gpu": view.memory(group.gpu),
        }

    if planner in FLAT:
        return {"gpu_type": first.gpu, "zone": first.zone, **nodes_of(first)}
    if planner in KINDS:
        return {**{group.gpu: nodes_of(group) for group in groups}, "zone": first.zone}
    counts: Json = {f"{group.gpu}_{group.zone}": view.count(group) * processes for group in groups}
    if planner == "SAILOR":
        return {**counts, "max_cost": 0.0, "min_throughput": 0.0}
    if planner == "DTFM":
        return {
            **counts,
            "gpu_types": list(view.gpus),
            "gpus_per_node": dict.fromkeys(view.gpus, processes),
        }
    # Atlas knows one type of GPU.
    of_first_type = {name: count for name, count in counts.items() if name.startswith(first.gpu)}
    return {**of_first_type, "gpus_per_node": processes, "gpu_type": first.gpu}
