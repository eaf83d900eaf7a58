"""Measures all-reduces over three clusters with unequal links, and the placement on DT-FM's eight cities.

These cases are run by links.py. `python links_across.py --rank WAY CLUSTERS TIMES` is a single rank
of a case.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness import Row, tell
from holmes_lab import Lab
from holmes_lab.compare import lab_for_measurements

from holmes_ext.cluster.site import site_from_spec
from holmes_ext.cluster.spec import SiteSpec, load_spec
from holmes_ext.plan.arrange.place import place
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.cost.price import Prices
from holmes_ext.plan.cost.stages import RankModel
from holmes_ext.plan.sizes import Sizes
from holmes_ext.plan.traffic import SOCKETS, CrossClusterAlgorithm
from holmes_ext.plan.workload import Workload
from holmes_ext.samples import examples

BYTES = 10 * 2**20  # of an all-reduce
#: Names of the three ways to sum.
HIERARCHICAL = "hierarchical, directly (no links known)"
FLAT = "flat ring"
PLANNED = "as the plan has it"


#: Further cluster files: with equal links as in reduction.py, and with unequal links as in
#: prediction_links.py.
FLAT_FILES = "two_clusters_8", "three_clusters_8"
LINK_FILES = "links_uplinks_2ms", "links_two_20ms", "links_two_80ms"


def reduction(repetitions: int) -> list[Row]:
    """Measure an all-reduce of 10 MiB over three clusters of 2 nodes; link rates are as 4 : 4 : 1."""
    return _reduction("reduction", "three_links_6", repetitions, ">= 1.3")


def never_slower(repetitions: int) -> list[Row]:
    """Compare the times of the planned and of a plain hierarchical all-reduce on five networks.

    Two networks have equal links, and three have unequal links or shared uplinks. Nowhere may the
    planned all-reduce be more than 3 % slower.
    """
    files = (*FLAT_FILES, *LINK_FILES)
    return [
        row
        for file in files
        for row in _reduction(f"reduction, {file}", file, repetitions, ">= 0.97")
    ]


def _reduction(case: str, file: str, repetitions: int, target: str) -> list[Row]:
    """Measure an all-reduce of 10 MiB in three ways.

    The ways are a flat ring, a hierarchical all-reduce with messages from every cluster directly to
    all others, and the plan's algorithm. The latter considers the rates of the links between
    clusters.

    Args:
        case: Name of the case in the results.
        file: Cluster file, without .toml.
        repetitions: Runs of each way.
        target: Bound such as ">= 1.3" for the time of the direct hierarchical all-reduce, divided
            by that of the planned all-reduce.
    """
    path = Path(__file__).parent / f"{file}.toml"
    if not path.exists():
        path = examples() / "clusters" / f"{file}.toml"
    spec = load_spec(path)
    rows = []
    # Settings of each all-reduce, as rank() takes them: {}: a flat ring. "clusters": hierarchical,
    # with the clusters as its groups.
    ways = {FLAT: {}, HIERARCHICAL: {"clusters": True}, PLANNED: _planned_reduction(spec)}
    with lab_for_measurements(spec) as lab:
        seconds = _time_all_reduces(lab, spec, ways, repetitions)
    for name, values in seconds.items():
        rows.append(Row.median(case, f"10 MiB, {name}", values, unit="s", emulated=True))
    for name, wanted in ((HIERARCHICAL, target), (FLAT, "")):
        ratios = [a / b for a, b in zip(seconds[name], seconds[PLANNED])]
        rows.append(
            Row.median(case, f"{name} / {PLANNED}", ratios, unit="x", emulated=True, target=wanted)
        )
    return rows


def _planned_reduction(spec: SiteSpec) -> dict[str, Any]:
    """Return how the plan of holmes reduces 10 MiB over all nodes.

    Returns:
        {} for a flat ring. Otherwise the settings of a hierarchical all-reduce:
        "clusters": True. Each cluster is a group that first reduces on its own network.
        "chunk_bytes": size of the chunks that are pipelined.
        "across": the algorithm between clusters, as fields of CrossClusterAlgorithm. None: every
            cluster sends directly to all others.
    """
    plan = build_plan(site_from_spec(spec), Sizes(pipeline=1), Workload(gradient_bytes=BYTES))
    # A plan has traffic for gloo (SOCKETS) and for NCCL. The lab uses gloo.
    planned = plan.traffic_of(SOCKETS).reductions[0]
    tell(f"the plan: {planned}")
    if not planned.clusters:  # (): a flat ring; else the clusters that are groups of it
        return {}
    across = asdict(planned.across) if planned.across else None
    return {"clusters": True, "chunk_bytes": planned.chunk_bytes, "across": across}


def _time_all_reduces(
    lab: Lab, spec: SiteSpec, ways: dict[str, dict[str, Any]], repetitions: int
) -> dict[str, list[float]]:
    """Measure the seconds of a 10 MiB all-reduce by several methods, on emulated clusters.

    Every repetition runs each method once, in changing order. A run gives the median of four
    all-reduces.

    Args:
        lab: The running emulated nodes.
        spec: The clusters of these nodes.
        ways: Name of a method -> {} for a flat ring, or else the settings of a hierarchical
            all-reduce (see _planned_reduction()).
        repetitions: Runs of each method.

    Returns:
        Name of a method -> seconds of an all-reduce, one number for each repetition.
    """
    order = [node for cluster in spec.clusters for node in cluster.nodes]
    members: dict[str, list[int]] = {}  # cluster -> its ranks
    first = 0
    for cluster in spec.clusters:
        end = first + len(cluster.nodes)
        members[cluster.name] = list(range(first, end))
        first = end
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    listed = list(ways.items())
    for repetition in range(repetitions):  # each way is first in as many repetitions
        turn = repetition % len(listed)
        for name, way in (*listed[turn:], *listed[:turn]):
            command = [
                sys.executable,
                __file__,
                "--rank",
                json.dumps(way),
                json.dumps(members),
                "4",
            ]
            result = lab.run(command, order=order, preload=("torch",), timeout=180)
            if result.returncode:
                raise SystemExit(result.outputs[result.first_failed])
            seconds[name].append(float(result.stdout[0].split()[-1]))
            tell(f"{name}: {seconds[name][-1]:.4g} s")
    return seconds


def placement(repetitions: int) -> list[Row]:
    """Measure how long holmes needs to order 64 nodes in eight cities."""
    site = site_from_spec(load_spec(examples() / "clusters" / "eight_cities_64.toml"))
    rows = []
    for stages in (4, 8, 16):
        seconds = []
        for _ in range(max(3, repetitions)):
            begin = time.perf_counter()
            sizes = Sizes(pipeline=stages).complete(site.world_size)
            place(Prices(Network(site), RankModel.of_workload(Workload(), sizes)), sizes)
            seconds.append(time.perf_counter() - begin)
        rows.append(
            Row.median(
                "placement",
                f"eight cities, 64 GPUs, {stages} stages",
                seconds,
                unit="s",
                emulated=False,
                target="<= 1",
            )
        )
    return rows


def join_group(hierarchical: bool) -> None:
    """Initialize torch.distributed with gloo over Ethernet.

    Args:
        hierarchical: Whether smaller groups use the fast NIC, as holmes would choose it.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group("gloo")
    fast = next(
        nic
        for nic in os.listdir("/proc/sys/net/ipv4/conf")
        if nic[-1].isdigit() and not nic.startswith("eth")
    )
    original = dist.new_group

    def new_group(ranks: list[int], **options: Any) -> Any:
        """Make a group whose gloo sockets use the fast NIC, unless it has all ranks."""
        os.environ["GLOO_SOCKET_IFNAME"] = fast if len(ranks) < dist.get_world_size() else "eth0"
        return original(ranks, **options)

    if hierarchical:
        dist.new_group = new_group


def time_sums(
    all_reduce: Callable[[Any], Any],
    size: int,
    times: int,
    summed: Callable[[Any], Any] = lambda flat: flat,
) -> None:
    """Measure an all-reduce, print its median seconds on rank 0, and end the process.

    A tensor of ones is reduced. After each all-reduce, an assertion checks that elements equal the
    number of ranks.

    Args:
        all_reduce: Starts an all-reduce of a tensor in place, and returns a request to wait for.
        size: Bytes of the tensor.
        times: Number of measurements; a first one does not count.
        summed: Returns the elements to check: in a reduce-scatter, those of this rank's part.
            Default: all.
    """
    import torch
    import torch.distributed as dist

    flat = torch.ones(size // 4)
    seconds = []
    for _ in range(times + 1):
        before = flat.clone()
        dist.barrier()
        begin = time.perf_counter()
        all_reduce(flat).wait()
        seconds.append(time.perf_counter() - begin)
        assert summed(flat).eq(dist.get_world_size()).all()
        flat.copy_(before)
    if dist.get_rank() == 0:
        print(statistics.median(seconds[1:]), flush=True)
    dist.barrier()
    os._exit(0)


def rank(way: dict[str, Any], members: dict[str, list[int]], times: int) -> None:
    """Time an all-reduce as a rank of a job. Rank 0 prints the median seconds.

    Args:
        way: {} for a flat ring. Else the settings of a hierarchical all-reduce: "chunk_bytes", its
            pipelined chunks; "across", the algorithm between clusters: its name ("algorithm"), the
            order of the clusters ("order"), and the parent of each in a tree ("parents").
        members: Cluster -> its ranks.
        times: Number of measurements.
    """
    import torch.distributed as dist

    from holmes_ext.runtime.reduce.hierarchical import HierarchicalAllReduce

    join_group(hierarchical=bool(way))
    all_reduce: Callable[[Any], Any] = lambda flat: dist.all_reduce(flat, async_op=True)  # noqa: E731
    if way:
        settings = way.get("across")
        across = None  # every cluster sends directly to all others
        if settings:
            across = CrossClusterAlgorithm(
                settings["algorithm"],
                order=tuple(settings["order"]),
                parents=tuple(settings["parents"]),
            )
        reduction = HierarchicalAllReduce(
            list(members.values()),
            chunk_bytes=way.get("chunk_bytes"),
            across=across,
            names=list(members),
        )
        all_reduce = reduction.all_reduce
    time_sums(all_reduce, BYTES, times)


CASES = {"reduction": reduction, "never slower": never_slower, "placement": placement}

if __name__ == "__main__":
    assert sys.argv[1:2] == ["--rank"], f"run {Path(__file__).with_name('links.py')}"
    rank(json.loads(sys.argv[2]), json.loads(sys.argv[3]), int(sys.argv[4]))
