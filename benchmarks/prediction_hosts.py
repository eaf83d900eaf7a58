"""Measures the CPU time of network bytes and messages on this machine, for simulations of steps in the lab.

All hosts of a lab share the cores of this machine. The simulations of prediction.py and stacks.py
therefore need the CPU seconds of a byte on each network, and of a message of a hierarchical all-reduce.

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

from holmes_lab import interleave
from holmes_lab.compare import lab_for_measurements

from holmes_ext.cluster.spec import SiteSpec

SIZE = 4 * 2**20  # bytes of an all-reduce
SECONDS = 0.8  # of a measurement
REPETITIONS = 7
#: Operations of a measurement: many small ones, fewer of SIZE bytes, and steps of the optimizer,
#: which take longest.
SUMS, LARGE_SUMS, OPTIMIZER_STEPS = 100, 20, 5


def measure_hosts(spec: SiteSpec) -> dict[str, float]:
    """Return the CPU seconds of this machine for a byte that a node of a lab sends, by network.

    All networks inside clusters have the same number, and Ethernet has another.
    """
    order = list(interleave(spec))  # over Ethernet every byte goes from cluster to cluster
    fast = {
        cluster.name: [f"{cluster.kind}0", list(map(order.index, cluster.nodes)), cluster.rate_bps]
        for cluster in spec.clusters
        if len(cluster.nodes) > 1
    }
    phases = [
        group
        for group in (fast, {"ethernet": ["eth0", list(range(len(order))), spec.ethernet_rate_bps]})
        if group
    ]
    return _in_lab(spec, order, ["bytes", json.dumps(phases)])


def measure_software(spec: SiteSpec) -> dict[str, float]:
    """Measure the CPU costs of messages and collectives on this machine.

    Returns:
        Fields of Links (plan/cost/links.py):
        "host_message_s": CPU seconds of a message of a hierarchical all-reduce; only with two
            clusters or more.
        "host_gather", "host_scatter": CPU time of a byte that an all-gather or a reduce-scatter
            sends, relative to a byte of an all-reduce.
    """
    order = list(interleave(spec))
    clusters = [
        [f"{cluster.kind}0", list(map(order.index, cluster.nodes))] for cluster in spec.clusters
    ]
    return _in_lab(spec, order, ["software", json.dumps(clusters)])


def measure_optimizer(spec: SiteSpec) -> float:
    """Return the CPU seconds for a parameter of a step of torch's AdamW, and of its gradient's norm."""
    return _in_lab(spec, list(interleave(spec)), ["optimizer", "[]"])


def _in_lab(spec: SiteSpec, order: list[str], arguments: list[str]):
    """Run this program on all nodes of a lab, and return the result of rank 0.

    Args:
        order: Nodes in the order of their ranks.
        arguments: The two arguments of rank_main().
    """
    with lab_for_measurements(spec) as lab:
        result = lab.run(
            [sys.executable, __file__, *arguments], order=order, preload=("torch",), timeout=120
        )
        if result.returncode:
            raise SystemExit(
                f"prediction_hosts.py: a sum failed: {result.outputs[result.first_failed or 0]}"
            )
        return json.loads(result.stdout[0])


def rank_main(what: str, argument: list) -> None:
    """Measure as one rank, and print the result as JSON on rank 0.

    Args:
        what: "bytes", "software" or "optimizer".
        argument: Of the function that measures this.
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
    """Measure the CPU costs of messages and collectives as one rank (see measure_software()).

    Args:
        clusters: For each cluster, the name of its fast NIC and its ranks.

    Returns:
        "host_message_s" in CPU seconds of a message, and "host_gather" and "host_scatter" as ratios
        to an all-reduce, for bytes that are sent.
    """
    import torch
    import torch.distributed as dist

    from holmes_ext.runtime.reduce.hierarchical import HierarchicalAllReduce

    costs, groups = {}, [ranks for _, ranks in clusters]
    if len(groups) > 1:
        reduction = HierarchicalAllReduce(groups)
        small = torch.ones(64 * dist.get_world_size())  # so small that its bytes cost nothing
        # Messages of a hierarchical all-reduce. Its groups are the clusters, and the ranks with the same
        # position in their clusters. In a group of n ranks, reduce-scatter and all-gather have n (n - 1)
        # messages each.
        sent = 2 * sum(n * (n - 1) for n in map(len, [*groups, *zip(*groups)]))
        all_reduces_s = cpu_s(lambda: reduction.all_reduce(small).wait(), SUMS)
        costs["host_message_s"] = all_reduces_s / SUMS / sent
    os.environ["GLOO_SOCKET_IFNAME"], ranks = next(
        pair for pair in clusters if dist.get_rank() in pair[1]
    )
    group, flat = dist.new_group(ranks, use_local_synchronization=True), torch.ones(SIZE // 4)
    shard = torch.empty(len(flat) // len(ranks))
    reduced, gathered, scattered = (
        cpu_s(partial(run, *tensors, group=group), LARGE_SUMS)
        for run, *tensors in (
            (dist.all_reduce, flat),
            (dist.all_gather_into_tensor, flat, shard),
            (dist.reduce_scatter_tensor, shard, flat),
        )
    )
    # An all-gather sends half as many bytes as an all-reduce, and gloo's reduce-scatter as many.
    costs |= {"host_gather": 2 * gathered / reduced, "host_scatter": scattered / reduced}
    return costs


def of_optimizer(_unused: list) -> float:
    """Return the CPU seconds of a parameter in a step of AdamW, with the norm of its gradient.

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
    """Return the CPU seconds of this machine for runs of a function on all ranks at the same time.

    The first measurement does not count. Of the others the smallest is returned.

    Args:
        times: Runs of the function in a measurement.
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
    """Return the CPU seconds of a sent byte by network, measured by all-reduces.

    All groups of a phase run at the same time, and cpu_s() returns the CPU time of the whole
    machine. Their networks therefore share one number: this CPU time, divided by the bytes that all
    groups have sent.

    Args:
        phases: Each phase is network -> [NIC, ranks of the group, rate in bits/s]. A rank in no
            group of a phase sends nothing.
    """
    import torch
    import torch.distributed as dist

    costs, flat = {}, torch.ones(SIZE // 4)
    for phase in phases:
        total_bytes, group, times = 0.0, None, 0  # of all groups; this rank's group and all-reduces
        for interface, ranks, rate_bps in phase.values():
            sent_bytes = 2 * (len(ranks) - 1) * SIZE  # of all ranks in one all-reduce
            # All-reduces that take SECONDS at this rate.
            count = ceil(SECONDS * rate_bps * len(ranks) / (8 * sent_bytes))
            total_bytes += count * sent_bytes
            if dist.get_rank() in ranks:
                os.environ["GLOO_SOCKET_IFNAME"], times = interface, count
                group = dist.new_group(ranks, use_local_synchronization=True)
        byte_s = cpu_s(partial(dist.all_reduce, flat, group=group), times) / total_bytes
        costs.update(dict.fromkeys(phase, byte_s))
    return costs


def busy_seconds() -> float:
    """Return the seconds in which this machine's cores were not idle since it started.

    Interrupts count. Programs of a lower priority (nice) do not, and a lab has none.
    """
    cpu = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    user, _nice, system, _idle, _iowait, irq, softirq, *_ = map(int, cpu)
    return (user + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    rank_main(sys.argv[1], json.loads(sys.argv[2]))
