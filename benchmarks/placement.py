"""Compares placements of pipeline stages by holmes with those by DT-FM, on DT-FM's cases (arXiv 2206.01288).

    python benchmarks/placement.py --json FILE [--dtfm FOLDER --seeds 0,1,2 --trials 4900]

The five cases have 64 GPUs in several places, which form 8 stages of 8 GPUs. In DT-FM's objective, every two
GPUs have a link of their own. It is the sum of two times:

- the slowest data-parallel group of a stage
- twice the path of the pipeline. GPUs of neighbouring stages are paired as well as possible, and the
  slowest pair decides the time of a stage link

The search of holmes (plan/arrange/spread.py) runs with the same objective. Matrix.least() is a lower bound
for all placements.

Then `holmes plan` searches with the same sizes. It minimizes the simulated step, in which GPUs share links
between clusters. Results are that step, its cost by DT-FM's objective, and the step of DT-FM's placement.

FOLDER has scheduler.py and config.py of scheduler/heuristic_evolutionary_solver in DT-FM's repository.
Results of DT-FM's search are kept there (theirs_CASE_SEED.json), because it takes minutes. Seconds are CPU
seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations_with_replacement
from math import inf
from pathlib import Path

from harness import Row, chosen, finish, parser, tell

from holmes_ext.cluster.fabric import ETHERNET
from holmes_ext.cluster.site import Site, site_from_spec
from holmes_ext.cluster.spec import load_spec
from holmes_ext.plan.arrange.spread import Stages, spread
from holmes_ext.plan.cost.links import Links
from holmes_ext.plan.cost.model import load_model
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.engine import Rules
from holmes_ext.planner.search.result import Candidate, SearchResult
from holmes_ext.planner.search.search import proven, search
from holmes_ext.planner.search.simulated import timed
from holmes_ext.planner.search.space import Limits
from holmes_ext.planner.search.spreading import with_spread
from holmes_ext.samples import examples

CASES = {
    "datacenter_64": 0,
    "spot_64": 1,
    "two_universities_64": 2,
    "four_us_regions_64": 3,
    "eight_cities_64": 4,
}
STAGES = 8
DATA = 8  # GPUs of a stage
TRIES = 10_000  # of the search
#: Sizes in gigabytes, as in DT-FM's scheduler.py: gradients of a stage, and all activations of a pipeline
#: step.
GRADIENTS = 1.3 * 4 * 3 / 24
ACTIVATIONS = 2024 * 2048 * 2 * (1.25e5 / 2048) / 2**30
THEIRS = Path(__file__).with_name("placement_dtfm.py")


@dataclass(frozen=True)
class Matrix:
    """Clusters as a matrix of links between places, with the objective of DT-FM (arXiv 2206.01288)."""

    units: tuple[int, ...]  # GPUs of each place
    delay_s: tuple[tuple[float, ...], ...]  # latency between GPUs of two places, or of one place
    rate: tuple[tuple[float, ...], ...]  # the same for the rate, in Gb/s

    @classmethod
    def of(cls, site: Site, nvlink_bps: float) -> Matrix:
        """Return the matrix of a site.

        A place is a node if nodes have several GPUs, or else a cluster.

        Args:
            nvlink_bps: Rate between GPUs of a node, in bits/s.
        """
        inside = site.processes > 1
        places = (
            [[node] for node in site.nodes]
            if inside
            else [[node for node in site.nodes if node.cluster == name] for name in site.clusters]
        )
        link = {}  # (index of a place, index of another or the same) -> (latency in s, rate in Gb/s)
        for i, first in enumerate(places):
            for j, second in enumerate(places):
                fabric = site.shared_fabric([first[0].name, second[0].name])
                hops = (
                    site.wan.hops(first[0].cluster, second[0].cluster)
                    if fabric.name == ETHERNET and i != j
                    else ()
                )
                link[i, j] = fabric.latency_s, fabric.rate_bps / 1e9
                if inside and i == j:
                    link[i, j] = 0.0, nvlink_bps / 1e9
                elif hops:
                    link[i, j] = (
                        sum(hop.latency_s for hop in hops),
                        min(hop.rate_bps for hop in hops) / 1e9,
                    )
        indices = range(len(places))
        delay, rate = (
            tuple(tuple(link[i, j][part] for j in indices) for i in indices) for part in (0, 1)
        )
        return cls(tuple(len(place) * site.processes for place in places), delay, rate)

    @cached_property
    def _memo(self) -> dict[object, float]:
        """Results of data() and stage_link() that have been computed."""
        return {}

    @cached_property
    def pair(self) -> list[list[float]]:
        """Seconds of the activations of a pipeline step from one GPU to another, by their places."""
        indices = range(len(self.units))
        return [
            [self.delay_s[i][j] + ACTIVATIONS * 8 / self.rate[i][j] for j in indices]
            for i in indices
        ]

    def data(self, stage: Sequence[int]) -> float:
        """Return the seconds of the gradient reduction in a data-parallel group.

        Args:
            stage: Places of the group's GPUs, ascending.
        """
        if stage not in self._memo:
            # For two places: the gradients are exchanged twice, in parts of 1 / (GPUs of the group).
            seconds = {
                (u, v): 2 * (self.delay_s[u][v] + GRADIENTS * 8 / (self.rate[u][v] * len(stage)))
                for u in set(stage)
                for v in set(stage)
            }
            self._memo[stage] = max(
                sum(seconds[u, v] for v in stage) - seconds[u, u] for u in set(stage)
            )
        return self._memo[stage]

    def stage_link(self, left: Sequence[int], right: Sequence[int]) -> float:
        """Return the seconds of the slowest link between two stages in the best pairing of their GPUs.

        Args:
            left, right: Places of the GPUs of each stage.
        """
        if (left, right) not in self._memo:
            values = sorted({self.pair[u][v] for u in left for v in right})
            low = 0
            high = len(values) - 1
            while low < high:
                middle = (low + high) // 2
                if self._match(left, right, values[middle]):
                    high = middle
                else:
                    low = middle + 1
            self._memo[left, right] = self._memo[right, left] = values[low]
        return self._memo[left, right]

    def _match(self, left: Sequence[int], right: Sequence[int], most: float) -> bool:
        """Return whether the GPUs of two stages can be paired with links of at most `most` seconds.

        The function searches a bipartite matching by augmenting paths.

        Args:
            left, right: Places of the GPUs of each stage.
        """
        partner = [-1] * len(right)  # GPU of `right` -> its partner in `left`, or -1

        def augment(u: int, seen: set[int]) -> bool:
            """Find a partner for GPU `u` of `left`, and return whether there is one.

            Args:
                seen: GPUs of `right` that this search has already tried.
            """
            for v in range(len(right)):
                if v not in seen and self.pair[left[u]][right[v]] <= most:
                    seen.add(v)
                    if partner[v] < 0 or augment(partner[v], seen):
                        partner[v] = u
                        return True
            return False

        return all(augment(u, set()) for u in range(len(left)))

    def cost(self, stages: Stages) -> float:
        """Return DT-FM's objective: the slowest data-parallel group, plus twice the path of the pipeline."""
        return max(map(self.data, stages)) + 2 * sum(map(self.stage_link, stages, stages[1:]))

    def least(self) -> float:
        """Return a lower bound on the cost of every placement, in seconds.

        For each limit c of a stage link, consider the connected components of the places whose links take
        at most c. A stage link within c joins two stages that have equally many GPUs in each component.
        If k stage links exceed c, at least m >= stages / (k + 1) consecutive stages have equal counts,
        and therefore at most 1/m of each component. The fastest data-parallel group of such a stage is a
        lower bound for the slowest group D.

        In reverse, each value of D allows only some k for each limit. The path is at least the sum, over
        all limits, of the stage links that exceed them. The result is the minimum over all D. A place
        without any link within c cannot be in a stage at such a stage link.
        """
        size = sum(self.units) // STAGES
        indices = range(len(self.units))
        kinds = [
            kind
            for kind in combinations_with_replacement(indices, size)
            if all(kind.count(u) <= self.units[u] for u in set(kind))
        ]
        seconds = {kind: self.data(kind) for kind in kinds}
        start = max(min(seconds[kind] for kind in kinds if u in kind) for u in indices)
        limits = sorted({self.pair[u][v] for u in indices for v in indices})
        least_of = [self._stage_links_beyond(limit, kinds, seconds) for limit in limits[:-1]]
        starts = sorted(
            {start, *(most for bounds in least_of for most, _ in bounds if most > start)}
        )
        best = inf
        for slowest in starts:
            path = limits[0] * (STAGES - 1)
            for low, high, bounds in zip(limits, limits[1:], least_of):
                path += (high - low) * min(k for most, k in bounds if most <= slowest)
            best = min(best, slowest + 2 * path)
        return best

    def _stage_links_beyond(
        self, limit: float, kinds: list[Sequence[int]], seconds: dict
    ) -> list[tuple[float, int]]:
        """Return what numbers of stage links beyond a limit are possible, and their slowest groups.

        Args:
            limit: In seconds.
            kinds: All combinations of places that a stage can have.
            seconds: Combination -> seconds of its data-parallel group.

        Returns:
            Pairs (lower bound for the slowest group in seconds, number of stage links that exceed the limit).
        """
        indices = range(len(self.units))
        component = list(indices)  # place -> representative of its connected component
        for u in indices:
            for v in indices:
                if u != v and self.pair[u][v] <= limit and component[u] != component[v]:
                    old, new = component[v], component[u]
                    component = [new if root == old else root for root in component]
        alone = [
            u for u in indices if self.pair[u][u] > limit and component.count(component[u]) == 1
        ]
        # GPUs of these places cannot be at a stage link within the limit. Stages that hold them (rounded
        # up) force as many stage links beyond it.
        forced = -(-sum(self.units[u] for u in alone) * STAGES // sum(self.units))
        forced = min(forced, STAGES - 1)
        total = {
            root: sum(self.units[u] for u in indices if component[u] == root)
            for root in set(component)
        }
        counted = [
            (seconds[kind], [(root, sum(component[u] == root for u in kind)) for root in total])
            for kind in kinds
        ]
        bounds = []
        for beyond in range(STAGES):
            if beyond < forced:
                continue
            run = -(-STAGES // (beyond + 1))  # consecutive stages that no such stage link divides
            fits = [
                cost
                for cost, counts in counted
                if all(n <= total[root] // run for root, n in counts)
            ]
            if fits or forced:
                bounds.append((min(fits) if fits and not forced else 0.0, beyond))
        return bounds


def planned(site: Site, links: Links) -> tuple[SearchResult, float]:
    """Return what `holmes plan` finds for 8 stages of 8 GPUs, and the CPU seconds of the search.

    The sizes are fixed. The search decides which GPUs each stage has.
    """
    begin = sum(os.times()[:4])  # CPU seconds, including those of processes that the search starts
    limits = Limits(
        {"pipeline": (STAGES,), "data": (DATA,), "virtual": (1,), "micro_batch": (1,), "zero": (0,)}
    )
    model = load_model(examples() / "models" / "gpt3_xl.toml")
    asked = SearchResult(Network(site, links), model, STAGES * 61, limits, Rules(overlap=True))
    result = with_spread(search(asked, prove=False))
    return proven(result, time.monotonic() + 30.0), sum(os.times()[:4]) - begin


def gpus(result: SearchResult, candidate: Candidate) -> list[list[int]]:
    """Return the numbers of the GPUs of each stage, in the order of cluster.toml."""
    site, sizes = result.network.site, candidate.placement.sizes
    index_of = {node.name: index for index, node in enumerate(site.nodes)}  # in cluster.toml
    nodes, stages = result.network.nodes(candidate.placement), [[] for _ in range(STAGES)]
    for rank in range(site.world_size):
        node, local = divmod(rank, site.processes)
        stages[sizes.stage(rank)].append(index_of[nodes[node]] * site.processes + local)
    return stages


def simulated(result: SearchResult, groups: list[list[int]], matrix: Matrix) -> float:
    """Return the simulated step time of a placement, in seconds. Nodes have one GPU.

    Args:
        result: The planning problem, with the best plan that holmes found: its sizes are used.
        groups: GPUs of each stage. The GPUs of neighbouring stages are paired by the fastest links.
        matrix: The links.
    """
    network, best = result.network, result.best
    place = [index for index, count in enumerate(matrix.units) for _ in range(count)]  # of each GPU
    # For each stage its GPUs, in an order in which GPUs of the same position are paired (greedily).
    columns = [list(groups[0])]
    for group in groups[1:]:
        left, column = list(group), []
        for before in columns[-1]:
            column.append(min(left, key=lambda gpu: matrix.pair[place[before]][place[gpu]]))  # noqa: B023
            left.remove(column[-1])
        columns.append(column)
    nodes = [network.site.nodes[gpu].name for column in columns for gpu in column]
    placement = network.placement(nodes, best.placement.sizes)
    return timed(result, result.candidate(best.shape, placement, best.split)).simulated_s


def theirs(folder: Path, case: int, seed: int, trials: int) -> dict:
    """Return what DT-FM's search finds, from an earlier run if there is one.

    Args:
        folder: DT-FM's code, and the results of earlier runs.
        case: Number of the case in DT-FM's config.py.

    Returns:
        The keys are "groups" (GPUs of each stage), "cost", "seconds", "cpu_seconds" and "trials".
    """
    kept = folder / f"theirs_{case}_{seed}.json"
    if not kept.exists() or not kept.read_text():
        command = [sys.executable, THEIRS, folder, case, seed, trials]
        kept.write_text(
            subprocess.run(
                list(map(str, command)), check=True, text=True, capture_output=True
            ).stdout
        )
    return json.loads(kept.read_text())


def check(folder: Path, case: int, groups: list[list[int]]) -> float:
    """Return the cost of a placement by DT-FM's own code, in seconds.

    Args:
        folder: DT-FM's code.
        case: Number of the case in DT-FM's config.py.
        groups: GPUs of each stage.
    """
    command = [sys.executable, THEIRS, folder, str(case), "check"]
    run = subprocess.run(
        list(map(str, command)),
        check=True,
        text=True,
        capture_output=True,
        input=json.dumps(groups),
    )
    return json.loads(run.stdout)["cost"]


def measure(name: str, folder: Path | None, seeds: list[int], trials: int) -> list[Row]:
    """Compare the search of holmes with DT-FM's on one case, and return the rows of results.

    Args:
        name: Name of the case, and of its cluster file in examples/clusters.
        folder: DT-FM's code; None: only holmes is measured.
        seeds: Seeds of DT-FM's search.
        trials: Trials of DT-FM's search.
    """
    spec = load_spec(examples() / "clusters" / f"{name}.toml")
    site = site_from_spec(spec)
    links = Links.of_spec(spec)
    case = CASES[name]
    matrix = Matrix.of(site, spec.clusters[0].accelerator.link_bps if site.processes > 1 else 0.0)
    begin = time.process_time()
    stages, cost = spread(matrix.units, STAGES, matrix.cost, TRIES)
    seconds = time.process_time() - begin
    least = matrix.least()
    dtfm = []
    if folder:
        dtfm = [theirs(folder, case, seed, trials) for seed in seeds]
    place = [index for index, count in enumerate(matrix.units) for _ in range(count)]
    free = {
        index: [gpu for gpu, gpu_place in enumerate(place) if gpu_place == index]
        for index in set(place)
    }
    ours = [[free[index].pop() for index in stage] for stage in stages]
    rows = []

    def row(metric: str, values: list[float], unit: str, target: str = "") -> None:
        rows.append(Row.median(name, metric, values, unit=unit, emulated=False, target=target))

    limit = ""
    if dtfm:
        assert abs(check(folder, case, ours) / cost - 1) < 1e-9, "the same objective"
        costs = [run["cost"] for run in dtfm]
        times = [run["cpu_seconds"] for run in dtfm]
        row("DT-FM's objective: DT-FM", costs, "s")
        row("seconds: DT-FM", times, "s")
        row("trials: DT-FM (its own number is 4900)", [run["trials"] for run in dtfm], "")
        row("DT-FM's objective: ours", [cost], "s", f"<= {min(costs)}")
        limit = f"<= {min([min(times) / 10, 1.0])}"
    else:
        row("DT-FM's objective: ours", [cost], "s")
    row("seconds: ours", [seconds], "s", limit or "<= 1")
    row("gap to a lower bound", [max(0.0, 1 - least / cost)], "fraction")
    result, seconds = planned(site, links)
    by_place = tuple(
        tuple(sorted(place[gpu] for gpu in group)) for group in gpus(result, result.best)
    )
    row("holmes plan: simulated step", [result.best.step_s], "s")
    row("holmes plan: optimality gap", [result.optimality_gap.gap], "fraction")
    row("holmes plan: seconds", [seconds], "s")
    row("holmes plan: DT-FM's objective", [matrix.cost(by_place)], "s")
    if site.processes == 1:
        row("simulated step of ours by DT-FM's objective", [simulated(result, ours, matrix)], "s")
        if dtfm:
            row(
                "simulated step of DT-FM's",
                [simulated(result, run["groups"], matrix) for run in dtfm],
                "s",
            )
    return rows


def main() -> int:
    """Measure the chosen cases, print the table of results, and write the results file."""
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument(
        "--dtfm", type=Path, metavar="FOLDER", help="DT-FM's scheduler.py and config.py"
    )
    arguments.add_argument("--trials", type=int, default=4900, help="of DT-FM's search")
    arguments.add_argument("--seeds", default="0", metavar="N,...", help="of DT-FM's search")
    args, rows = arguments.parse_args(), []
    for name in chosen(args.cases, CASES):
        rows += measure(name, args.dtfm, [int(seed) for seed in args.seeds.split(",")], args.trials)
        tell(f"{name}: done")
    return finish(rows, args.json, "stages of 64 GPUs on DT-FM's link matrices")


if __name__ == "__main__":
    sys.exit(main())
