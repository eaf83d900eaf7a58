"""Measures the CPU time of network bytes and messages on this machine, for simulations of steps in the lab.

All hosts of a lab share the cores of this machine. The simulations of prediction.py and stacks.py
therefore need the CPU seconds that it takes to send a byte over each network, and to send a message
of a hierarchical all-reduce.

The nodes of a lab run all-reduces and nothing else: first all clusters at the same time, then all nodes
over Ethernet. Meanwhile /proc/stat counts the seconds in which a core is not idle: for sockets,
checksums, the limited rates, the switch and gloo's additions. A byte costs less if many are sent at the
same time. Of several measurements the smallest counts, because other programs on this machine only add to
it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from math import ceil
from pathlib import Path
from typing import NamedTuple

from holmes_lab import interleave
from holmes_lab.compare import lab_for_measurements

from holmes_ext.cluster.spec import SiteSpec

SIZE = 4 * 2**20  # bytes of an all-reduce
SECONDS = 0.8  # of a measurement
REPETITIONS = 7
#: Operations of a measurement: many small operations, fewer of SIZE bytes, and steps of the optimizer (they
#: take longest).
SUMS, LARGE_SUMS, OPTIMIZER_STEPS = 100, 20, 5


class NetworkGroup(NamedTuple):
    """Ranks that make all-reduces over one network. As JSON, it is a list of its fields."""

    nic: str  # name of the NIC on each node
    ranks: list[int]
    rate_bps: float  # of the NIC


def measure_hosts(spec: SiteSpec) -> dict[str, float]:
    """Measure how much CPU time of this machine it takes to send a byte over each emulated network.

    It is measured in two phases: all clusters send at the same time on their fast networks, then
    all nodes send over Ethernet. A phase gives one number.

    Returns:
        Network (the name of a cluster, or "ethernet") -> CPU seconds of a byte. All clusters have
        the same number.
    """
    order = list(interleave(spec))  # over Ethernet every byte goes from cluster to cluster
    fast_groups = {
        cluster.name: NetworkGroup(
            nic=f"{cluster.kind}0",
            ranks=[order.index(node) for node in cluster.nodes],
            rate_bps=cluster.rate_bps,
        )
        for cluster in spec.clusters
        if len(cluster.nodes) > 1
    }
    all_nodes = NetworkGroup("eth0", list(range(len(order))), spec.ethernet_rate_bps)
    phases = [{"ethernet": all_nodes}]
    if fast_groups:
        phases = [fast_groups, *phases]
    return _in_lab(spec, order, ["bytes", json.dumps(phases)])


def measure_software(spec: SiteSpec) -> dict[str, float]:
    """Measure the CPU costs of messages and collectives on this machine.

    Returns:
        Fields of Links (plan/cost/links.py):
        "host_message_s": CPU seconds to send and receive a message of a hierarchical all-reduce;
            only with two clusters or more.
        "host_gather", "host_scatter": CPU time of a byte that an all-gather or a reduce-scatter
            sends, relative to a byte of an all-reduce.
    """
    order = list(interleave(spec))
    clusters = [
        [f"{cluster.kind}0", list(map(order.index, cluster.nodes))] for cluster in spec.clusters
    ]
    return _in_lab(spec, order, ["software", json.dumps(clusters)])


def measure_optimizer(spec: SiteSpec) -> float:
    """Measure how much CPU time an optimizer step takes for each parameter, in seconds.

    It is a step of torch's AdamW, with the norm of the gradients before it.
    """
    return _in_lab(spec, list(interleave(spec)), ["optimizer", "[]"])


def _in_lab(spec: SiteSpec, order: list[str], arguments: list[str]):
    """Run a measurement on all nodes of emulated clusters, and return the result of rank 0.

    Every node runs this program as one rank. Rank 0 prints the result as JSON.

    Args:
        spec: The clusters to emulate.
        order: Nodes in the order of their ranks.
        arguments: Name of the measurement ("bytes", "software" or "optimizer"), and its input as JSON.
    """
    with lab_for_measurements(spec) as lab:
        result = lab.run(
            [sys.executable, __file__, *arguments], order=order, preload=("torch",), timeout=120
        )
        if result.returncode:
            rank = result.first_failed or 0  # None, e.g. after a time-out: show rank 0
            # "a sum" stands for any of the three measurements.
            raise SystemExit(f"prediction_hosts.py: a sum failed: {result.outputs[rank]}")
        return json.loads(result.stdout[0])


def rank_main(what: str, argument: list) -> None:
    """Run a measurement as a rank, and print the result as JSON on rank 0.

    Args:
        what: "bytes": CPU time of a sent byte. "software": CPU time of a message and of
            collectives. "optimizer": CPU time of an optimizer step for a parameter.
        argument: For "bytes", the groups of ranks that send at the same time (of_bytes()). For
            "software", the NIC and the ranks of each cluster. For "optimizer", an empty list.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group("gloo")
    result = {"bytes": of_bytes, "software": of_software, "optimizer": of_optimizer}[what](argument)
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
    dist.barrier()
    os._exit(0)


def of_software(clusters: list) -> dict[str, float]:
    """Measure the CPU time of messages and collectives, as one rank of a job on all emulated nodes.

    All ranks share the cores of this machine, and the CPU time of all of them is measured.

    Args:
        clusters: For each cluster, the name of its fast NIC and its ranks.

    Returns:
        "host_message_s": CPU seconds of a message of a hierarchical all-reduce. "host_gather",
        "host_scatter": CPU time of a byte that an all-gather or a reduce-scatter sends, divided by
        that of a byte of an all-reduce.
    """
    import torch
    import torch.distributed as dist

    from holmes_ext.runtime.reduce.hierarchical import HierarchicalAllReduce

    costs = {}
    groups = [ranks for _nic, ranks in clusters]
    if len(groups) > 1:
        reduction = HierarchicalAllReduce(groups)
        # 64 elements for each rank: so few that only the messages take time, not their bytes.
        small = torch.ones(64 * dist.get_world_size())
        # Messages of a hierarchical all-reduce. Its groups are the clusters, and the ranks with the same
        # position in their clusters. In a group of n ranks, reduce-scatter and all-gather have n (n - 1)
        # messages each.
        sent = 2 * sum(n * (n - 1) for n in map(len, [*groups, *zip(*groups)]))
        all_reduces_s = cpu_s(lambda: reduction.all_reduce(small).wait(), SUMS)
        costs["host_message_s"] = all_reduces_s / SUMS / sent
    nic, ranks = next((nic, ranks) for nic, ranks in clusters if dist.get_rank() in ranks)
    os.environ["GLOO_SOCKET_IFNAME"] = nic  # the group below uses this NIC
    group = dist.new_group(ranks, use_local_synchronization=True)
    flat = torch.ones(SIZE // 4)
    shard = torch.empty(len(flat) // len(ranks))
    all_reduce = partial(dist.all_reduce, flat, group=group)
    all_gather = partial(dist.all_gather_into_tensor, flat, shard, group=group)
    reduce_scatter = partial(dist.reduce_scatter_tensor, shard, flat, group=group)
    all_reduce_s = cpu_s(all_reduce, LARGE_SUMS)
    all_gather_s = cpu_s(all_gather, LARGE_SUMS)
    reduce_scatter_s = cpu_s(reduce_scatter, LARGE_SUMS)
    # An all-gather sends half as many bytes as an all-reduce, and gloo's reduce-scatter as many.
    costs |= {
        "host_gather": 2 * all_gather_s / all_reduce_s,
        "host_scatter": reduce_scatter_s / all_reduce_s,
    }
    return costs


def of_optimizer(_unused: list) -> float:
    """Return the CPU seconds of a step of AdamW, with the gradient norm, for each parameter.

    All ranks run the steps at the same time, and cpu_s() returns the CPU time of the whole machine.
    It is therefore divided by the number of ranks.

    Args:
        _unused: rank_main() calls all measurements with one argument.
    """
    import torch
    import torch.distributed as dist

    parameter = torch.nn.Parameter(torch.ones(SIZE // 4))
    parameter.grad, optimizer = torch.ones_like(parameter), torch.optim.AdamW([parameter])

    def step() -> None:
        torch.nn.utils.clip_grad_norm_([parameter], 1.0)
        optimizer.step()

    steps_s = cpu_s(step, OPTIMIZER_STEPS)
    return steps_s / OPTIMIZER_STEPS / parameter.numel() / dist.get_world_size()


def cpu_s(run: Callable[[], object], times: int) -> float:
    """Return the CPU seconds of this machine while every rank calls a function `times` times.

    The result is for all calls of all ranks together. The calls are measured several times: the
    first measurement does not count, and the smallest of the others is returned.

    Args:
        run: The function.
        times: Calls of each rank in one measurement.
    """
    import torch.distributed as dist

    costs = []
    for _ in range(1 + REPETITIONS):
        dist.barrier()
        before = busy_seconds()
        for _ in range(times):
            run()
        dist.barrier()
        costs.append(busy_seconds() - before)
    return min(costs[1:])


def of_bytes(phases: list[dict]) -> dict[str, float]:
    """Measure the CPU seconds of a sent byte on each network, as one rank of a job.

    The job makes all-reduces and nothing else.

    All groups of a phase run at the same time, and cpu_s() returns the CPU time of the whole
    machine. Their networks therefore share one number: this CPU time, divided by the bytes that all
    groups have sent.

    Args:
        phases: Each phase is network -> the fields of a NetworkGroup. A rank in no group of a phase
            sends nothing, and only waits for the others.

    Returns:
        Network -> CPU seconds of a byte.
    """
    import torch
    import torch.distributed as dist

    costs = {}
    flat = torch.ones(SIZE // 4)
    for phase in phases:
        bytes_of_all_groups = 0.0
        own_group = None
        own_count = 0  # all-reduces of this rank; 0 if it is in no group
        for fields_of_group in phase.values():
            network_group = NetworkGroup(*fields_of_group)
            rank_count = len(network_group.ranks)
            sent_bytes = 2 * (rank_count - 1) * SIZE  # by all ranks in one all-reduce, in a ring
            # All-reduces that take SECONDS, if every rank sends its share at this rate.
            sent_bits = 8 * sent_bytes
            count = ceil(SECONDS * network_group.rate_bps * rank_count / sent_bits)
            bytes_of_all_groups += count * sent_bytes
            if dist.get_rank() in network_group.ranks:
                os.environ["GLOO_SOCKET_IFNAME"] = network_group.nic  # the new group uses this NIC
                own_count = count
                own_group = dist.new_group(network_group.ranks, use_local_synchronization=True)
        all_reduce = partial(dist.all_reduce, flat, group=own_group)
        byte_s = cpu_s(all_reduce, own_count) / bytes_of_all_groups
        costs.update(dict.fromkeys(phase, byte_s))
    return costs


def busy_seconds() -> float:
    """Return the seconds in which this machine's cores were not idle since it started.

    Interrupts count. Programs with a lower priority (nice) do not count: no process of an emulated
    node is one.
    """
    cpu = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    user, _nice, system, _idle, _iowait, irq, softirq, *_ = map(int, cpu)
    return (user + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    rank_main(sys.argv[1], json.loads(sys.argv[2]))
