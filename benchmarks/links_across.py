"""Cases of links.py about what crosses: ways to sum over three clusters with unequal links, and placement on
DT-FM's eight cities. Run through links.py; `python links_across.py --rank WAY CLUSTERS TIMES` is one rank of
a case."""

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
from holmes_lab.compare import tuned

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

BYTES = 10 * 2**20
TODAY, FLAT, PLANNED = "hierarchical, directly (no links known)", "flat ring", "as the plan has it"


#: Whose ways to sum are compared besides: flat ones as in reduction.py, and those of prediction_links.py.
FLAT_FILES = "two_clusters_8", "three_clusters_8"
LINK_FILES = "links_uplinks_2ms", "links_two_20ms", "links_two_80ms"


def reduction(repetitions: int) -> list[Row]:
    """An all-reduce of 10 MiB over 2 + 2 + 2 nodes whose links are 4 : 4 : 1, 20 ms each."""
    return _reduction("reduction", "three_links_6", repetitions, ">= 1.3")


def never_slower(repetitions: int) -> list[Row]:
    """The same on other networks, flat ones and such with links: what the plan takes against hierarchical
    directly."""
    files = (*FLAT_FILES, *LINK_FILES)
    return [
        row
        for file in files
        for row in _reduction(f"reduction, {file}", file, repetitions, ">= 0.97")
    ]


def _reduction(case: str, file: str, repetitions: int, target: str) -> list[Row]:
    local = Path(__file__).parent / f"{file}.toml"
    spec, rows = (
        load_spec(local if local.exists() else examples() / "clusters" / f"{file}.toml"),
        [],
    )
    ways = {FLAT: {}, TODAY: {"clusters": True}, PLANNED: _planned(spec)}
    with tuned(spec) as lab:
        seconds = _sums(lab, spec, ways, repetitions)
    for name, values in seconds.items():
        rows.append(Row.median(case, f"10 MiB, {name}", values, "s", True))
    for name, wanted in ((TODAY, target), (FLAT, "")):
        ratios = [a / b for a, b in zip(seconds[name], seconds[PLANNED])]
        rows.append(Row.median(case, f"{name} / {PLANNED}", ratios, "x", True, wanted))
    return rows


def _planned(spec: SiteSpec) -> dict[str, Any]:
    """What the plan of a job whose one group has all nodes says of 10 MiB; {}: a flat ring."""
    plan = build_plan(site_from_spec(spec), Sizes(pipeline=1), Workload(gradient_bytes=BYTES))
    planned = plan.traffic_of(SOCKETS).reductions[0]
    tell(f"the plan: {planned}")
    if not planned.clusters:
        return {}
    across = asdict(planned.across) if planned.across else None
    return {"clusters": True, "chunk_bytes": planned.chunk_bytes, "across": across}


def _sums(
    lab: Lab, spec: SiteSpec, ways: dict[str, dict[str, Any]], repetitions: int
) -> dict[str, list[float]]:
    order = [node for cluster in spec.clusters for node in cluster.nodes]
    first, members = 0, {}
    for cluster in spec.clusters:
        members[cluster.name] = list(range(first, first := first + len(cluster.nodes)))
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    listed = list(ways.items())
    for repetition in range(repetitions):  # each way first, and after each other one, as often
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
    """The order of 64 nodes in eight cities."""
    site, rows = site_from_spec(load_spec(examples() / "clusters" / "eight_cities_64.toml")), []
    for stages in (4, 8, 16):
        seconds = []
        for _ in range(max(3, repetitions)):
            begin = time.perf_counter()
            sizes = Sizes(pipeline=stages).complete(site.world_size)
            place(Prices(Network(site), RankModel.of_workload(Workload(), sizes)), sizes)
            seconds.append(time.perf_counter() - begin)
        rows.append(
            Row.median(
                "placement", f"eight cities, 64 GPUs, {stages} stages", seconds, "s", False, "<= 1"
            )
        )
    return rows


def join_group(hierarchical: bool) -> None:
    """Over Ethernet; hierarchical: groups of fewer ranks are on the NICs that holmes would choose."""
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
    """Rank 0 prints the median seconds of a sum of `size` bytes, and the process ends. summed: what this rank
    then has of it."""
    import torch
    import torch.distributed as dist

    flat, seconds = torch.ones(size // 4), []
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
    """One rank."""
    import torch.distributed as dist

    from holmes_ext.runtime.reduce.hierarchical import HierarchicalAllReduce

    join_group(hierarchical=bool(way))
    all_reduce: Callable[[Any], Any] = lambda flat: dist.all_reduce(flat, async_op=True)  # noqa: E731
    if way:
        chosen = way.get("across")
        across = None
        if chosen:
            order, parents = tuple(chosen["order"]), tuple(chosen["parents"])
            across = CrossClusterAlgorithm(chosen["algorithm"], order, parents)
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
