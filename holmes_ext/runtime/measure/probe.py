"""Measures how long messages take on every fabric of the running job: what `holmes probe` puts into cluster.toml.

    send   two nodes of a fabric (on Ethernet of two clusters if there are), there and back: half of it
    ring   one rank of every node of a fabric: an all-reduce of B bytes among n is 2 (n - 1) steps of B / n bytes

One fabric at a time, the others wait. Every figure is a median. Holmes must be active: it picks the NIC of each group made here.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

from holmes_ext.cluster.measured import MeasuredLink
from holmes_ext.cluster.site import ETHERNET
from holmes_ext.plan.cost.links import fit
from holmes_ext.runtime.session import Session

SEND_BYTES = tuple(1024 * 4**power for power in range(9))  # 1 KiB to 64 MiB
#: A size is measured for so many seconds, but at least and at most so often; sizes that take longer than LONGEST_S are the last.
SECONDS, LEAST, MOST, LONGEST_S = 0.25, 4, 50, 0.3


def pairs(session: Session) -> dict[str, tuple[int, int]]:
    """fabric -> first ranks of the two nodes to measure between."""
    site, plan, found = session.site, session.plan, {}
    for one, two in itertools.combinations(plan.nodes, 2):
        fabric = site.shared_fabric((one, two)).name
        crossing = site.node_by_name[one].cluster != site.node_by_name[two].cluster
        if fabric not in found or (fabric == ETHERNET and crossing and not found[fabric][1]):
            found[fabric] = (one, two), crossing
    first = {node: index * plan.processes for index, node in enumerate(plan.nodes)}
    return {fabric: (first[one], first[two]) for fabric, ((one, two), _) in found.items()}


def rings(session: Session) -> dict[str, tuple[int, ...]]:
    """fabric -> first rank of every node that is on it as its best one; all nodes for Ethernet between clusters."""
    site, plan, found = session.site, session.plan, {}
    for index, node in enumerate(plan.nodes):
        found.setdefault(site.shared_fabric((node,)).name, []).append(index * plan.processes)
    everywhere = site.shared_fabric(plan.nodes).name
    found[everywhere] = [index * plan.processes for index in range(len(plan.nodes))]
    return {fabric: tuple(ranks) for fabric, ranks in found.items() if len(ranks) > 1}


def measure(session: Session, largest: int, tell: Callable[[str], None] = lambda text: None) -> dict[str, MeasuredLink]:
    """Every fabric's curves, the same on all ranks (which all must call it). torch.distributed is initialized; largest: bytes."""
    import torch
    import torch.distributed as dist

    rank, device = dist.get_rank(), _device()
    sizes = [size for size in SEND_BYTES if size <= largest]
    samples: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for key, groups, run in (("send", pairs(session), _there_and_back), ("ring", rings(session), _all_reduce)):
        for fabric, ranks in groups.items():
            group = dist.new_group(list(ranks))
            tell(f"{fabric}: {key} among {len(ranks)} ranks")
            found: list[tuple[float, float]] = []
            if rank in ranks:
                found = _curve(run, [size * (len(ranks) if key == "ring" else 1) for size in sizes], ranks, group, device)
                found = [(size / len(ranks), seconds) for size, seconds in found] if key == "ring" else found
            everyone: list = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, found)  # and a barrier: the others wait here
            samples.setdefault(fabric, {})[key] = everyone[ranks[0]]
    dist.barrier()
    del torch
    return {fabric: MeasuredLink(**{key: fit(own, f"fabric {fabric}").points for key, own in curves.items()}) for fabric, curves in samples.items()}


def _device():
    import torch

    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")


def _curve(run: Callable, sizes: list[int], ranks: tuple[int, ...], group, device) -> list[tuple[float, float]]:
    """(bytes, median seconds) until a size takes too long; all ranks of the group decide alike."""
    import torch
    import torch.distributed as dist

    found = []
    for size in sizes:
        tensor = torch.zeros(max(1, size // 4), device=device)
        run(tensor, ranks, group)  # connects
        count = torch.tensor([LEAST], device=device)
        seconds = _timed(run, tensor, ranks, group, device)
        count[0] = max(LEAST, min(MOST, int(SECONDS / max(seconds, 1e-6))))
        dist.broadcast(count, ranks[0], group=group)
        times = [_timed(run, tensor, ranks, group, device) for _ in range(int(count))]
        median = torch.tensor([statistics.median(times)], dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device)
        dist.broadcast(median, ranks[0], group=group)
        found.append((float(size), float(median)))
        if float(median) > LONGEST_S and len(found) > 1:
            break
    return found


def _timed(run: Callable, tensor, ranks: tuple[int, ...], group, device) -> float:
    import torch

    start = time.perf_counter()
    part = run(tensor, ranks, group)
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return (time.perf_counter() - start) * part


def _there_and_back(tensor, ranks: tuple[int, ...], group) -> float:
    """The part of the time that one message is."""
    import torch.distributed as dist

    other = ranks[1] if dist.get_rank() == ranks[0] else ranks[0]
    steps = [dist.send, dist.recv] if other == ranks[1] else [dist.recv, dist.send]
    for step in steps:
        step(tensor, other, group=group)
    return 0.5


def _all_reduce(tensor, ranks: tuple[int, ...], group) -> float:
    import torch.distributed as dist

    dist.all_reduce(tensor, group=group)
    return 1 / (2 * (len(ranks) - 1))
