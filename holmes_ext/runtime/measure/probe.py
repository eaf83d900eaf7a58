"""How long messages take in the running job: for `holmes probe`, and a profile's reductions.

    send   two nodes of a fabric (on Ethernet of two clusters if there are), there and back: half of it
    ring   one rank of every node of a fabric: an all-reduce of
           B bytes among n is 2 (n - 1) steps of B / n bytes

Where there is a WAN, runtime/measure/crossings.py measures it, and Ethernet is measured in a cluster that has
nothing faster (where there is none, it has its stated rate).

One fabric at a time, the others wait. Every figure is a median. Holmes must be active: it picks the NIC of
each group made here.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

from holmes_ext.cluster.fabric import ETHERNET
from holmes_ext.cluster.wan import MeasuredLink
from holmes_ext.plan.cost.links import fit
from holmes_ext.runtime.session import Session

SEND_BYTES = tuple(1024 * 4**power for power in range(9))  # 1 KiB to 64 MiB
#: A size is measured for so many seconds, but at least and at most so often; sizes that take longer than
#: LONGEST_S are the last.
SECONDS, LEAST, MOST, LONGEST_S = 0.25, 4, 50, 0.3
#: What a profile's reduction is tried with at most, in bytes.
_LARGEST_REDUCTION = 64 << 20


def pairs(session: Session, flat: bool = True) -> dict[str, tuple[int, int]]:
    """fabric -> first ranks of two nodes to measure between; Ethernet in one cluster unless it is flat."""
    site, plan = session.site, session.plan
    chosen: dict[str, tuple[tuple[str, str], bool]] = {}
    for source, target in itertools.combinations(plan.nodes, 2):
        fabric = site.shared_fabric((source, target)).name
        crossing = site.node_by_name[source].cluster != site.node_by_name[target].cluster
        if fabric == ETHERNET and crossing and not flat:
            continue
        if fabric not in chosen or (fabric == ETHERNET and crossing and not chosen[fabric][1]):
            chosen[fabric] = (source, target), crossing
    first = {node: index * plan.processes for index, node in enumerate(plan.nodes)}
    return {
        fabric: (first[source], first[target]) for fabric, ((source, target), _) in chosen.items()
    }


def rings(session: Session, flat: bool = True) -> dict[str, tuple[int, ...]]:
    """fabric -> first rank of every node whose best it is; for Ethernet all nodes if it is flat between
    clusters, else one cluster's."""
    site, plan = session.site, session.plan
    members: dict[str, list[int]] = {}
    first_cluster: dict[str, str] = {}
    for index, node in enumerate(plan.nodes):
        fabric, cluster = site.shared_fabric((node,)).name, site.node_by_name[node].cluster
        if flat or fabric != ETHERNET or first_cluster.setdefault(fabric, cluster) == cluster:
            members.setdefault(fabric, []).append(index * plan.processes)
    if flat:
        members[site.shared_fabric(plan.nodes).name] = [
            index * plan.processes for index in range(len(plan.nodes))
        ]
    return {fabric: tuple(ranks) for fabric, ranks in members.items() if len(ranks) > 1}


def measure(
    session: Session,
    largest: int,
    tell: Callable[[str], None] = lambda text: None,
    flat: bool = True,
) -> dict[str, MeasuredLink]:
    """Every fabric's curves, alike on all ranks (all call it). largest: bytes; flat: between clusters."""
    import torch
    import torch.distributed as dist

    rank, on_gpu = dist.get_rank(), torch.accelerator.is_available()
    device = torch.accelerator.current_accelerator() if on_gpu else torch.device("cpu")
    sizes = [size for size in SEND_BYTES if size <= largest]
    samples: dict[str, dict[str, list[tuple[float, float]]]] = {}
    measured = (
        ("send", pairs(session, flat), _there_and_back),
        ("ring", rings(session, flat), _all_reduce),
    )
    for key, groups, run in measured:
        for fabric, ranks in groups.items():
            group = dist.new_group(list(ranks))
            tell(f"{fabric}: {key} among {len(ranks)} ranks")
            points: list[tuple[float, float]] = []
            if rank in ranks:
                shares = len(ranks) if key == "ring" else 1
                curve = _curve(run, [size * shares for size in sizes], ranks, group, device)
                points = [(size / shares, seconds) for size, seconds in curve]
            all_points: list = [None] * dist.get_world_size()
            dist.all_gather_object(all_points, points)  # and a barrier: the others wait here
            samples.setdefault(fabric, {})[key] = all_points[ranks[0]]
    dist.barrier()
    links = {}
    for fabric, curves in samples.items():
        links[fabric] = MeasuredLink(
            **{key: fit(sampled, f"fabric {fabric}").points for key, sampled in curves.items()}
        )
    return links


def _curve(
    run: Callable, sizes: list[int], ranks: tuple[int, ...], group, device
) -> list[tuple[float, float]]:
    """(bytes, median seconds) until a size takes too long; all ranks of the group decide alike."""
    import torch
    import torch.distributed as dist

    points: list[tuple[float, float]] = []
    for size in sizes:
        tensor = torch.zeros(max(1, size // 4), device=device)
        part = run(tensor, ranks, group)  # connects
        again = lambda: run(tensor, ranks, group)  # noqa: B023, E731
        (once,) = seconds_of(again, 1, device)
        count = torch.tensor(
            [max(LEAST, min(MOST, int(SECONDS / max(part * once, 1e-6))))], device=device
        )
        dist.broadcast(count, ranks[0], group=group)
        seconds = part * statistics.median(seconds_of(again, int(count), device))
        median = torch.tensor(
            [seconds], dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device
        )
        dist.broadcast(median, ranks[0], group=group)
        points.append((float(size), float(median)))
        if float(median) > LONGEST_S and len(points) > 1:
            break
    return points


def seconds_of(run: Callable[[], Any], times: int, device: Any) -> list[float]:
    """Of each of `times` calls; on a GPU until what they started has ended."""
    import torch

    durations = []
    for _ in range(times):
        begin = time.perf_counter()
        run()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        durations.append(time.perf_counter() - begin)
    return durations


def _there_and_back(tensor, ranks: tuple[int, ...], group) -> float:
    """The part of the time that one message is."""
    import torch.distributed as dist

    other = ranks[1] if dist.get_rank() == ranks[0] else ranks[0]
    for step in (dist.send, dist.recv) if other == ranks[1] else (dist.recv, dist.send):
        step(tensor, other, group=group)
    return 0.5


def _all_reduce(tensor, ranks: tuple[int, ...], group) -> float:
    import torch.distributed as dist

    dist.all_reduce(tensor, group=group)
    return 1 / (2 * (len(ranks) - 1))


def reduction(group: Any, size_bytes: int, device: Any) -> tuple[float, float]:
    """(seconds of a byte, of latency) of an all-reduce in `group`, from two sizes (all bytes where noise
    hides the difference); zeros for one rank."""
    import torch
    import torch.distributed as dist

    if size_bytes <= 0 or dist.get_world_size(group) == 1:
        return 0.0, 0.0
    timings = []
    for count in (large := max(4096, min(size_bytes, _LARGEST_REDUCTION)) // 4, large // 4):
        tensor = torch.zeros(count, device=device)
        times = seconds_of(lambda: dist.all_reduce(tensor, group=group), 4, device)  # noqa: B023
        timings.append(
            (count * 4, statistics.median(times[1:]))
        )  # the first one brings the ranks together
    (big, long), (small, short) = timings
    per_byte = (long - short) / (big - small) if long > short else long / big
    return per_byte, max(0.0, long - per_byte * big)


def stage_link(
    stage: int, stages: int, size_bytes: int, device: Any, send: Callable, receive: Callable
) -> float:
    """Seconds of an activation to the next stage, one way (0 on the last). All stages call it; send(tensor,
    stage) and receive(tensor, stage) block."""
    import torch

    tensor, result = torch.zeros(max(1, size_bytes // 4), device=device), 0.0
    for first in range(stages - 1):
        if stage not in (first, first + 1):
            continue
        calls = (send, receive) if stage == first else (receive, send)
        other = first + 1 if stage == first else first
        times = seconds_of(lambda: [call(tensor, other) for call in calls], 6, device)  # noqa: B023
        if stage == first:
            result = statistics.median(times[1:]) / 2
    return result
