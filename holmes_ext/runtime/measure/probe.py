"""Measures messages and all-reduces in the running job: for `holmes probe`, and for a profile.

    send   a message between two nodes of a fabric, there and back; half of the time counts. On Ethernet
           the nodes are in two clusters, if there are two.
    ring   an all-reduce among a rank of every node of a fabric (network). An all-reduce of B bytes among n
           ranks is 2 (n - 1) steps of B / n bytes; the time of a step counts.

If clusters are connected by a WAN, runtime/measure/crossings.py measures that. Ethernet is then measured
inside a cluster that has no faster network; if there is none, the rate of the cluster file counts.

Fabrics are measured in turn, while other ranks wait. Every number is a median. holmes must be active,
because it chooses the NIC of each process group that is made here.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from holmes_ext.cluster.fabric import ETHERNET
from holmes_ext.cluster.wan import MeasuredLink
from holmes_ext.plan.cost.links import fit
from holmes_ext.runtime.session import Session

SEND_BYTES = tuple(1024 * 4**power for power in range(9))  # 1 KiB to 64 MiB
#: Each size is repeated for about SECONDS, but at least LEAST and at most MOST times.
SECONDS = 0.25
LEAST = 4
MOST = 50
#: A size that takes longer than this many seconds is the last.
LONGEST_S = 0.3
_SHORTEST_S = 1e-6  # a time of 0 would divide by 0
_FLOAT32_BYTES = 4
#: Largest all-reduce, in bytes, that a profile measures.
_LARGEST_REDUCTION = 64 << 20
_SMALLEST_REDUCTION = 4096
_SMALL_SHARE = 4  # the smaller all-reduce has the bytes of the larger divided by this
_REDUCTIONS = 4  # of each size; the first is not counted
_TRANSFERS = 6  # of an activation; the first is not counted

#: Runs an operation once with (tensor, ranks, group), and returns a factor for the measured time.
Run = Callable[[Any, tuple[int, ...], Any], float]


class Point(NamedTuple):
    """Measured time of an operation on a tensor of a certain size."""

    size_bytes: float
    seconds: float


class ReductionTime(NamedTuple):
    """Time of an all-reduce as a linear function of its bytes."""

    s_per_byte: float
    latency_s: float


def pairs(session: Session, flat: bool = True) -> dict[str, tuple[int, int]]:
    """Return two ranks on different nodes for each fabric (network), to measure messages.

    Two nodes may share several fabrics. They are a candidate only for the fastest of these.

    Args:
        session: The session of this process.
        flat: Whether Ethernet connects all nodes of all clusters ("flat": no WAN between clusters).
            True: Ethernet is measured between two clusters, if there are several. False: a WAN
            connects the clusters, and Ethernet is measured inside a cluster.

    Returns:
        Fabric -> the first ranks of two nodes. A fabric without such nodes is left out.
    """
    site = session.site
    plan = session.plan
    nodes_of: dict[str, tuple[str, str]] = {}  # fabric -> two nodes, the best ones so far
    for source, target in itertools.combinations(plan.nodes, 2):
        fabric = site.shared_fabric((source, target)).name  # the fastest that both have
        crosses = site.node_by_name[source].cluster != site.node_by_name[target].cluster
        if fabric == ETHERNET and crosses and not flat:
            continue
        # On Ethernet, the first pair in different clusters replaces a pair inside a cluster.
        is_better = False
        if fabric == ETHERNET and crosses and fabric in nodes_of:
            first, second = nodes_of[fabric]
            is_better = site.node_by_name[first].cluster == site.node_by_name[second].cluster
        if fabric not in nodes_of or is_better:
            nodes_of[fabric] = (source, target)
    first_ranks = plan.first_ranks
    return {
        fabric: (first_ranks[source], first_ranks[target])
        for fabric, (source, target) in nodes_of.items()
    }


def ring_members(session: Session, flat: bool = True) -> dict[str, tuple[int, ...]]:
    """Return, for each fabric (network), a rank of each node, to measure ring all-reduces among them.

    Each node takes part in the ring of its fastest fabric. With `flat`, all nodes also form a ring on
    the fabric that they share, mostly Ethernet. Without it, the ring on Ethernet has nodes of a single
    cluster: the first cluster with nodes that have nothing faster.

    Args:
        session: The session of this process.
        flat: Whether a single network connects all nodes of all clusters. False: a WAN connects the
            clusters, and is measured elsewhere (crossings.py).

    Returns:
        Fabric -> the first rank of each node. A fabric with a single node is left out.
    """
    site = session.site
    plan = session.plan
    ranks_of: dict[str, list[int]] = {}
    ethernet_cluster = None  # the cluster of the ring on Ethernet, without `flat`
    for node in plan.nodes:
        fabric = site.shared_fabric((node,)).name
        cluster = site.node_by_name[node].cluster
        if fabric == ETHERNET and not flat:
            # Without `flat`, a ring must not cross clusters: the first cluster that gets here is used.
            if ethernet_cluster is None:
                ethernet_cluster = cluster
            if cluster != ethernet_cluster:
                continue
        ranks_of.setdefault(fabric, []).append(plan.first_rank(node))
    if flat:
        common_fabric = site.shared_fabric(plan.nodes).name
        ranks_of[common_fabric] = list(plan.first_ranks.values())
    return {fabric: tuple(ranks) for fabric, ranks in ranks_of.items() if len(ranks) > 1}


def _print_nothing(text: str) -> None:
    """Ignore a line about the progress of measure(), because its caller wants none."""


def measure(
    session: Session,
    largest: int,
    tell: Callable[[str], None] = _print_nothing,
    flat: bool = True,
) -> dict[str, MeasuredLink]:
    """Measure messages and all-reduces of several sizes on every fabric (network) of the job.

    All ranks call this function and get the same result.

    Args:
        session: The session of this process.
        largest: Bytes of the largest message.
        tell: Called with a line about each measurement.
        flat: True: one network connects all nodes, so Ethernet is measured across clusters. False:
            a WAN connects the clusters, and crossings.measure() measures it. Then Ethernet is
            measured inside a cluster.

    Returns:
        Fabric -> its curves: seconds over bytes, of messages and of all-reduces.
    """
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    device: torch.device | None = torch.device("cpu")
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
    sizes = [size for size in SEND_BYTES if size <= largest]
    samples: dict[str, dict[str, list[Point]]] = {}  # fabric -> "send" or "ring" -> curve
    measurements: tuple[tuple[str, dict[str, Any], Run], ...] = (
        ("send", pairs(session, flat), _send_there_and_back),
        ("ring", ring_members(session, flat), _all_reduce),
    )
    for name, ranks_of, run in measurements:
        for fabric, ranks in ranks_of.items():
            group = dist.new_group(list(ranks))
            tell(f"{fabric}: {name} among {len(ranks)} ranks")
            points: list[Point] = []
            if rank in ranks:
                # An all-reduce of n times the size has steps of this size.
                factor = len(ranks) if name == "ring" else 1
                curve = _curve(run, [size * factor for size in sizes], ranks, group, device)
                points = [Point(size_bytes / factor, seconds) for size_bytes, seconds in curve]
            all_points: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(all_points, points)  # other ranks wait here
            samples.setdefault(fabric, {})[name] = all_points[ranks[0]]
    dist.barrier()
    links = {}
    for fabric, curves in samples.items():
        fitted = {}
        for name, curve in curves.items():
            fitted[name] = fit(curve, f"fabric {fabric}").points
        links[fabric] = MeasuredLink(**fitted)
    return links


def _curve(
    run: Run, sizes: Sequence[int], ranks: tuple[int, ...], group: Any, device: Any
) -> list[Point]:
    """Return the median seconds of an operation for each size, until a size takes longer than LONGEST_S.

    All ranks of the group call this function. The numbers of the first rank count, so that all ranks repeat
    a size equally often and get the same points.

    Args:
        run: Runs the operation once with (tensor, ranks, group). It returns a factor for the
            measured time: 0.5 if it sends a message there and back.
        sizes: Bytes of the operation's tensor, in ascending order.
        ranks: Members of the group.
        group: The process group.
        device: Device of the tensor.
    """
    import torch
    import torch.distributed as dist

    points: list[Point] = []
    for size in sizes:
        tensor = torch.zeros(max(1, size // _FLOAT32_BYTES), device=device)
        run_once = partial(run, tensor, ranks, group)
        share = run_once()  # the first call connects the ranks
        (first_s,) = seconds_of(run_once, 1, device)
        # Repeat for about SECONDS, but at least LEAST and at most MOST times.
        repetitions = int(SECONDS / max(share * first_s, _SHORTEST_S))
        count = torch.tensor([max(LEAST, min(MOST, repetitions))], device=device)
        dist.broadcast(count, ranks[0], group=group)
        seconds = share * statistics.median(seconds_of(run_once, int(count), device))
        # Not every accelerator has float64.
        dtype = torch.float64 if device.type == "cpu" else torch.float32
        median = torch.tensor([seconds], dtype=dtype, device=device)
        dist.broadcast(median, ranks[0], group=group)
        points.append(Point(float(size), float(median)))
        # A curve needs two points at least, however long they take.
        if float(median) > LONGEST_S and len(points) > 1:
            break
    return points


def seconds_of(run: Callable[[], Any], times: int, device: Any) -> list[float]:
    """Return the seconds of each of several calls; on a GPU, until the work that a call started is done.

    Args:
        run: The function to call.
        times: Number of calls.
        device: torch.device of the function's work.
    """
    import torch

    durations = []
    for _ in range(times):
        begin = time.perf_counter()
        run()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        durations.append(time.perf_counter() - begin)
    return durations


def _send_there_and_back(tensor: Any, ranks: tuple[int, ...], group: Any) -> float:
    """Send a tensor from the first rank to the second, and back. Both ranks call this function.

    Args:
        tensor: The tensor; the received tensor replaces it.
        ranks: Global ranks of the two.
        group: Process group of the two.

    Returns:
        0.5: the caller multiplies the measured time by it, to get the time of a message in one
        direction.
    """
    import torch.distributed as dist

    is_first = dist.get_rank() == ranks[0]
    if is_first:
        dist.send(tensor, ranks[1], group=group)
        dist.recv(tensor, ranks[1], group=group)
    else:
        dist.recv(tensor, ranks[0], group=group)
        dist.send(tensor, ranks[0], group=group)
    return 0.5  # of the time for both directions


def _all_reduce(tensor: Any, ranks: tuple[int, ...], group: Any) -> float:
    """All-reduce a tensor. NCCL and gloo do so in 2 (n - 1) steps around a ring of n ranks.

    Returns:
        1 / (2 (n - 1)): the caller multiplies the measured time by it, to get the time of a step.
        From that, the plan computes the time of ring all-reduces.
    """
    import torch.distributed as dist

    dist.all_reduce(tensor, group=group)
    steps = 2 * (len(ranks) - 1)
    return 1 / steps


def reduction(group: Any, size_bytes: int, device: Any) -> ReductionTime:
    """Measure an all-reduce with a large and a small tensor; fit a line to seconds over bytes.

    All ranks of the group call this function. The small tensor has a quarter of the large tensor's
    bytes.

    Args:
        group: The process group.
        size_bytes: Bytes of gradients that the group reduces in a training step. The large tensor
            has this size, but 4 KiB at least and 64 MiB at most.
        device: Device of the gradients.

    Returns:
        The line: seconds per byte, and latency in seconds. If the large
        all-reduce does not take longer, because of noise, the latency is 0. Both are 0 if the group
        has a single rank.
    """
    import torch
    import torch.distributed as dist

    if size_bytes <= 0 or dist.get_world_size(group) == 1:
        return ReductionTime(0.0, 0.0)

    def median_of(elements: int) -> Point:
        tensor = torch.zeros(elements, device=device)
        times = seconds_of(lambda: dist.all_reduce(tensor, group=group), _REDUCTIONS, device)
        # In the first all-reduce, ranks wait for each other.
        return Point(elements * _FLOAT32_BYTES, statistics.median(times[1:]))

    largest_bytes = max(_SMALLEST_REDUCTION, min(size_bytes, _LARGEST_REDUCTION))
    large = median_of(largest_bytes // _FLOAT32_BYTES)
    small = median_of(largest_bytes // _FLOAT32_BYTES // _SMALL_SHARE)  # a quarter of the elements
    if large.seconds > small.seconds:
        s_per_byte = (large.seconds - small.seconds) / (large.size_bytes - small.size_bytes)
    else:
        s_per_byte = large.seconds / large.size_bytes
    latency_s = max(0.0, large.seconds - s_per_byte * large.size_bytes)
    return ReductionTime(s_per_byte, latency_s)


def stage_link(
    stage: int,
    stages: int,
    size_bytes: int,
    device: Any,
    send: Callable[[Any, int], Any],
    receive: Callable[[Any, int], Any],
) -> float:
    """Measure the transfer of an activation to the next pipeline stage. All stages call this function.

    The stage links (connections of adjacent stages) are measured in turn. On each, a tensor is sent to the
    later stage and back.

    Args:
        stage: Number of this stage.
        stages: Number of pipeline stages.
        size_bytes: Bytes of an activation.
        device: Device of the activation.
        send: Sends a tensor to a stage, and returns when it is sent.
        receive: Receives a tensor from a stage, and returns when it has arrived.

    Returns:
        Seconds in one direction; 0 on the last stage.
    """
    import torch

    tensor = torch.zeros(max(1, size_bytes // _FLOAT32_BYTES), device=device)

    def send_first(other: int) -> None:
        send(tensor, other)
        receive(tensor, other)

    def receive_first(other: int) -> None:
        receive(tensor, other)
        send(tensor, other)

    link_s = 0.0
    for first in range(stages - 1):
        if stage == first:
            times = seconds_of(partial(send_first, first + 1), _TRANSFERS, device)
            # The first transfer is a warm-up; half of the time is one direction.
            link_s = statistics.median(times[1:]) / 2
        elif stage == first + 1:
            seconds_of(partial(receive_first, first), _TRANSFERS, device)
    return link_s
