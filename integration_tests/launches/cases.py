"""Trains small models for random clusters and records the communication that holmes would launch on NCCL.

The tests then check whether the recorded operations could hang on NCCL, or receive the data of another send.
How it works:

    data       All process groups use gloo, so the models train on real data, without GPUs.
    backend    Holmes reads the name of a group's backend as "fake", and then launches the same operations as
               for NCCL (runtime/backend.py).

Holmes all-reduces hierarchically only above a minimum size. The minimum is zero here, so that small models
use hierarchical all-reduces, too.
"""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import random_sites
import torch.distributed as dist
from launches import Log, recorded
from ranks import run_ranks

from holmes_ext.cluster.fabric import ETHERNET, Fabric
from holmes_ext.cluster.site import Node, Port, Site
from holmes_ext.options import Options
from holmes_ext.patches import Registry, all_patches
from holmes_ext.patches.deepspeed import hierarchical as deepspeed_hierarchical
from holmes_ext.plan import maker
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.sizes import Sizes
from holmes_ext.runtime import backend, session
from holmes_ext.runtime.reduce.hierarchical_nccl import HierarchicalCollectives
from holmes_ext.runtime.start.launcher import Process

GB = 10**9
#: Number of cases that the same processes train, one after the other: see run_in_batches().
SEEDS_PER_LAUNCH = 5


@dataclass(frozen=True)
class Case:
    """A random emulated cluster and a random job on it, drawn from `seed`."""

    seed: int
    site: Site  # the nodes, their clusters and networks
    sizes: Sizes  # parallel sizes: pipeline stages, data-parallel ranks, ...
    options: Options  # values of the --holmes-... flags

    @property
    def rng(self) -> random.Random:
        return random.Random(self.seed)


def case(seed: int, world: int, pipeline: bool = True) -> Case:
    """Draw a random case.

    Args:
        world: Number of ranks.
        pipeline: The job may have several pipeline stages.
    """
    rng = random.Random(seed)
    if rng.random() < 0.7:
        site = _site_of_equal_clusters(rng, world)
    else:
        site = _site_of_any_shape(rng, world)
    stages = 1
    if pipeline:
        divisors = [count for count in range(1, world + 1) if world % count == 0]
        stages = rng.choice([1, *divisors])
    options = Options(
        overlap=rng.choice(("on", "on", "auto", "off")),
        bucket="0.002",
        compress_gradients=rng.choice(("off", "off", "bf16")),
        inflight=rng.choice(("off", "1", "3")),
    )
    return Case(seed, site, Sizes(stages).complete(world), options)


def _site_of_any_shape(rng: random.Random, world: int) -> Site:
    """Draw random clusters with this number of ranks and a slow Ethernet."""
    site = random_sites.site(rng)
    while site.world_size != world:
        site = random_sites.site(rng)
    fabrics = []
    for fabric in site.fabrics:
        if fabric.name == ETHERNET:
            fabric = replace(fabric, rate_bps=GB)
        fabrics.append(fabric)
    return Site(site.nodes, tuple(fabrics))


def _site_of_equal_clusters(rng: random.Random, world: int) -> Site:
    """Draw two or four clusters of equal size, with the nodes in random order.

    A hierarchical all-reduce over NCCL requires clusters of equal size.
    """
    cluster_count = rng.choice([n for n in (2, 4) if world % n == 0 and world > n])
    ranks_of_cluster = world // cluster_count
    processes = rng.choice([n for n in (1, 2) if ranks_of_cluster % n == 0])
    kinds = ("ib", "roce", "ib", "roce")[:cluster_count]
    fabrics = [Fabric(f"{kind}{number}", kind, 100 * GB, 2e-6) for number, kind in enumerate(kinds)]
    nodes = []
    for cluster, fabric in zip("abcd", fabrics):
        fast = Port(fabric.name, fabric.name, "10.1.0.1", (f"mlx_{fabric.name}:1",))
        ports = (fast, Port(ETHERNET, "eth0", "10.0.0.1"))
        for number in range(ranks_of_cluster // processes):
            nodes.append(Node(f"{cluster}{number}", cluster, processes, ports))
    rng.shuffle(nodes)
    return Site(tuple(nodes), (Fabric(ETHERNET, "ethernet", GB, 3e-5), *fabrics))


@contextlib.contextmanager
def as_under_nccl(one: Case, features: list[str]) -> Iterator[Log]:
    """Switch holmes on with these features as for NCCL, and record the operations that it launches.

    The context yields the record.
    """
    rank = dist.get_rank()
    world = dist.get_world_size()
    plan = build_plan(one.site, one.sizes, options=one.options)
    process = Process(rank, world, 0, 1, "", 0, "test")
    current = session.Session(one.options, process, one.site, plan, rank, maker=maker)
    original_backend_named = backend.backend_named
    original_reduction = session.Session.reduction
    original_new_group = dist.new_group

    def backend_named(*args: Any) -> str:
        return original_backend_named(*args).replace("gloo", "fake")

    def reduction(*args: Any, **more: Any) -> Any:
        return replace(original_reduction(*args, **more), hierarchical_from=0, chunk_bytes=4096)

    def new_group(*args: Any, **more: Any) -> Any:
        return original_new_group(*args, **{**more, "backend": "gloo"})

    fakes = (
        mock.patch.object(backend, "backend_named", backend_named),
        mock.patch.object(session.Session, "reduction", reduction),
        mock.patch.object(dist, "new_group", new_group),
    )
    applied = Registry(all_patches())
    with contextlib.ExitStack() as stack:
        for fake in fakes:
            stack.enter_context(fake)
        applied.enable(features, required=True, disabled=frozenset())
        stack.callback(applied.undo)
        session.set_active(current)
        stack.callback(session.set_active, None)
        # The group of all ranks is used again by the next case, which must not find these entries.
        stack.callback(deepspeed_hierarchical._planned_specs.clear)
        stack.callback(deepspeed_hierarchical._hierarchical_reductions.clear)
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        yield stack.enter_context(recorded())


@dataclass(frozen=True)
class CaseResult:
    """Result of training one case with holmes on one rank."""

    log: Log  # the recorded communication
    losses: list[float]
    #: Features that had an effect: "overlap", "a hierarchical all-reduce", "pairs", "stage_links".
    used: frozenset[str]


def run_in_batches(
    train_cases: Callable[..., list[Any]], world: int, seeds: Sequence[int], *args: Any
) -> list[list[Any]]:
    """Train the random cases of all seeds, with new processes for every few cases.

    The processes are started again because gloo keeps a thread for each process group that was ever made.
    Each thread wakes 100 times a second. With the groups of 15 cases in each of 8 processes, these threads
    would use up both cores of a small machine.

    Args:
        train_cases: Called on each rank as `train_cases(rank, world, seeds, *args)`. It returns a list with
            one result for each seed.
        world: Number of ranks. Each is a process of its own.

    Returns:
        For each rank the list of its results, in the order of the seeds.
    """
    results: list[list[Any]] = [[] for _ in range(world)]
    for start in range(0, len(seeds), SEEDS_PER_LAUNCH):
        batch = seeds[start : start + SEEDS_PER_LAUNCH]
        arguments = (world, batch, *args)  # those of train_cases after the rank
        batch_results = run_ranks(train_cases, world, *arguments, timeout_s=580)
        for rank in range(world):
            results[rank].extend(batch_results[rank])
    return results


def outcome(one: Case, features: list[str], train: Callable[[], list[float]]) -> CaseResult:
    """Call train() with holmes switched on for the case, and record the communication that it launches.

    The result also says which features of holmes the case used.
    """
    used: set[str] = set()  # names of the features that the case used
    hierarchical_all_reduce = HierarchicalCollectives.all_reduce  # the hierarchical all-reduce

    def note_use(*args: Any, **more: Any) -> Any:
        used.add("a hierarchical all-reduce")
        return hierarchical_all_reduce(*args, **more)

    with (
        as_under_nccl(one, features) as log,
        mock.patch.object(HierarchicalCollectives, "all_reduce", note_use),
    ):
        losses = train()
        current = (
            session.require()
        )  # the state of holmes in this process, with the plan of the case
        reductions_of_stages = current.stages(one.sizes, backend="fake")
    # The other features are those of the plan.
    if any(reduction.overlap for reduction in reductions_of_stages):  # during the backward passes
        used.add("overlap")
    traffic = current.plan.traffic_of("verbs")  # the traffic over RDMA networks
    # A pair group is a process group for one pair of stages.
    if any(stage_link.pair_groups[0] for stage_link in traffic.stage_links):
        used.add("pairs")
    if traffic.in_flight:  # messages between stages are received before the stage waits for them
        used.add("stage_links")
    return CaseResult(log, losses, frozenset(used))
