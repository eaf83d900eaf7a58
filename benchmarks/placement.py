"""Compares placements of pipeline stages by holmes with those by DT-FM, on DT-FM's cases (arXiv 2206.01288).

    python benchmarks/placement.py --json FILE [--dtfm FOLDER --seeds 0,1,2 --trials 4900]

The five cases have 64 GPUs in several places, and 8 stages of 8 GPUs. In DT-FM's objective, every two
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
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations_with_replacement, permutations, product
from math import inf
from pathlib import Path
from typing import NamedTuple

from harness import Row, chosen_cases, finish, parser, tell

from holmes_ext.cluster.fabric import ETHERNET
from holmes_ext.cluster.site import Site, site_from_spec
from holmes_ext.cluster.spec import load_spec
from holmes_ext.cluster.wan import Hop
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
from holmes_ext.words import grouped

CASES = {
    "datacenter_64": 0,
    "spot_64": 1,
    "two_universities_64": 2,
    "four_us_regions_64": 3,
    "eight_cities_64": 4,
}
STAGES = 8
DATA = 8  # GPUs of a stage
MICRO_BATCHES = 61  # of a pipeline, one sequence each: 1.25e5 / 2048, as in ACTIVATIONS
TRIES = 10_000  # of the search
#: Sizes in gigabytes (GB), as in DT-FM's scheduler.py: gradients of a stage, and all activations
#: that a stage sends in a step.
GRADIENTS = 1.3 * 4 * 3 / 24
ACTIVATIONS = 2024 * 2048 * 2 * (1.25e5 / 2048) / 2**30
THEIRS = Path(__file__).with_name("placement_dtfm.py")


class SlowLinkBound(NamedTuple):
    """Lower bound on the time of the slowest data-parallel group, for a number of slow links.

    The links are those between neighbouring pipeline stages.
    """

    group_s: float  # the bound, in seconds
    slow_links: int  # links between neighbouring stages that are slower than some limit


@dataclass(frozen=True)
class Matrix:
    """Latencies and rates between the locations of GPUs, and the cost of a placement on them.

    A location ("place") is a node with several GPUs, or else a cluster of nodes with one GPU: all
    GPUs of a place have the same links. The cost is the objective of DT-FM (arXiv 2206.01288): the
    slowest data-parallel group of a stage, plus twice the sum of the links between stages.
    """

    units: tuple[int, ...]  # GPUs of each place
    delay_s: tuple[tuple[float, ...], ...]  # latency between GPUs of two places, or of one place
    rate: tuple[tuple[float, ...], ...]  # the same for the rate, in Gb/s

    @classmethod
    def of(cls, site: Site, nvlink_bps: float) -> Matrix:
        """Return the latencies and rates between every two locations of GPUs.

        A location ("place") is a group of GPUs with the same links: a node if nodes have several
        GPUs, or else a cluster. Latencies are in seconds and rates in Gb/s.

        Args:
            site: Clusters, nodes and networks. `processes` is the number of GPUs of a node.
            nvlink_bps: Rate between GPUs of a node, in bits/s.
        """
        places_are_nodes = site.processes > 1
        if places_are_nodes:
            places = [[node] for node in site.nodes]
        else:
            places = [
                [node for node in site.nodes if node.cluster == name] for name in site.clusters
            ]
        delays_s = []
        rates = []
        for i, place in enumerate(places):
            delays_of_place = []
            rates_of_place = []
            for j, other_place in enumerate(places):
                node, other_node = place[0], other_place[0]  # all nodes of a place have equal links
                fabric = site.shared_fabric([node.name, other_node.name])
                hops: tuple[Hop, ...] = ()
                if fabric.name == ETHERNET and i != j:
                    hops = site.wan.hops(node.cluster, other_node.cluster)
                if places_are_nodes and i == j:  # between GPUs of a node
                    delay_s = 0.0
                    rate_bps = nvlink_bps
                elif hops:  # between clusters, over wide-area links
                    delay_s = sum(hop.latency_s for hop in hops)
                    rate_bps = min(hop.rate_bps for hop in hops)
                else:
                    delay_s = fabric.latency_s
                    rate_bps = fabric.rate_bps
                delays_of_place.append(delay_s)
                rates_of_place.append(rate_bps / 1e9)
            delays_s.append(tuple(delays_of_place))
            rates.append(tuple(rates_of_place))
        units = tuple(len(place) * site.processes for place in places)
        return cls(units, tuple(delays_s), tuple(rates))

    @cached_property
    def _memo(self) -> dict[object, float]:
        """Results of data() and stage_link() that have been computed."""
        return {}

    @cached_property
    def pair(self) -> list[list[float]]:
        """Seconds of the activations that a GPU sends another in a step: pair[place][other place].

        A place is a group of GPUs with the same links (a node or a cluster).
        """
        indices = range(len(self.units))
        return [
            # gigabytes * 8 / (Gb/s) = seconds
            [self.delay_s[i][j] + ACTIVATIONS * 8 / self.rate[i][j] for j in indices]
            for i in indices
        ]

    def data(self, stage: Sequence[int]) -> float:
        """Return the seconds of the gradient reduction in a data-parallel group.

        In DT-FM's model, every GPU exchanges its part of the gradients with each other GPU, one
        after the other, to reduce them and again to gather them. The slowest GPU decides the time.

        Args:
            stage: The GPUs of a pipeline stage. They are a data-parallel group. For each GPU,
                the index of its place (a node or cluster, whose GPUs have the same links),
                ascending. Such as (0, 0, 1): two GPUs of place 0 and one of place 1.
        """
        if stage not in self._memo:
            # Seconds of both exchanges between GPUs of two places. A GPU's part of the gradients is
            # GRADIENTS gigabytes / (GPUs of the group), and rates are in Gb/s.
            seconds = {}
            for u, v in product(set(stage), repeat=2):
                exchange_s = self.delay_s[u][v] + GRADIENTS * 8 / (self.rate[u][v] * len(stage))
                seconds[u, v] = 2 * exchange_s
            # A GPU does not send to itself: the sum has one exchange too many inside its place.
            gpu_s = [sum(seconds[u, v] for v in stage) - seconds[u, u] for u in set(stage)]
            self._memo[stage] = max(gpu_s)
        return self._memo[stage]

    def stage_link(self, left: Sequence[int], right: Sequence[int]) -> float:
        """Return the seconds of the slowest link between two stages, for the best pairing of GPUs.

        Args:
            left, right: For each GPU of the stage, the index of its location in `units`. A location
                is a node or a cluster: a group of GPUs with the same links.
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
            left, right: For each GPU of the stage, the index of its location in `units`. A location
                is a node or a cluster: a group of GPUs with the same links.
            most: Seconds in which a link carries the activations of a step.
        """
        partner = [-1] * len(right)  # GPU of `right` -> its partner in `left`, or -1

        def augment(u: int, seen: set[int]) -> bool:
            """Search a partner in `right` for GPU `u` of `left`, along an augmenting path.

            A GPU of `right` that already has a partner is taken over if that partner finds another.
            The result is in `partner`.

            Args:
                seen: GPUs of `right` that this search has already tried.

            Returns:
                Whether a partner was found.
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
        """Return DT-FM's objective for a placement, in seconds.

        It is the slowest data-parallel group of a stage, plus twice the sum of the times of the
        links between neighbouring stages (activations forward and gradients backward).

        Args:
            stages: For each stage, the locations of its GPUs as indices of `units`, ascending.
        """
        return max(map(self.data, stages)) + 2 * sum(map(self.stage_link, stages, stages[1:]))

    def least(self) -> float:
        """Return a lower bound on the cost of every placement, in seconds.

        The cost has two parts: the time of the slowest data-parallel group (one for each stage),
        and twice the sum of the links between stages. Both cannot be small at once. Fast links between stages
        need stages that are spread over the network in the same way, but this makes their groups slow. The
        function tries each possible time of the slowest group, computes the smallest sum of links that goes
        with it, and returns the smallest cost.
        """
        gpus_of_stage = sum(self.units) // STAGES
        places = range(len(self.units))
        # All ways to fill a stage: the places of its GPUs, ascending.
        fillings = [
            filling
            for filling in combinations_with_replacement(places, gpus_of_stage)
            if all(filling.count(place) <= self.units[place] for place in set(filling))
        ]
        group_s = {filling: self.data(filling) for filling in fillings}
        # Every place is used by some stage, at best in its fastest group.
        least_group_s = 0.0
        for place in places:
            fastest_s = min(group_s[filling] for filling in fillings if place in filling)
            least_group_s = max(least_group_s, fastest_s)
        # Possible times of a link between stages.
        link_times = sorted({seconds for row in self.pair for seconds in row})
        # For each time of a link (`limit`), a list of pairs (slow_links, group_s). If so many links
        # between stages take more than `limit`, some group takes at least group_s seconds.
        bounds_of = [self.slow_link_bounds(limit, fillings, group_s) for limit in link_times[:-1]]
        candidates = {least_group_s}
        for bounds in bounds_of:
            candidates |= {bound.group_s for bound in bounds if bound.group_s > least_group_s}
        best = inf
        for slowest_group_s in sorted(candidates):
            # The sum over all links: each of the STAGES - 1 links takes at least the shortest time.
            # Each link that takes more than `limit` takes at least the next possible time
            # (`longer`), which adds longer - limit to the sum. Example: times 1, 3 and 7, with two
            # links above 1 and one of these above 3: (STAGES - 1) * 1 + 2 * 2 + 1 * 4.
            links_s = link_times[0] * (STAGES - 1)
            for limit, longer, bounds in zip(link_times, link_times[1:], bounds_of):
                # The smallest number of links above the limit that lets all groups be as fast as
                # slowest_group_s.
                slow_links = min(
                    bound.slow_links for bound in bounds if bound.group_s <= slowest_group_s
                )
                links_s += (longer - limit) * slow_links
            best = min(best, slowest_group_s + 2 * links_s)
        return best

    def slow_link_bounds(
        self, limit: float, fillings: list[Sequence[int]], group_s: dict
    ) -> list[SlowLinkBound]:
        """Return lower bounds on the time of the slowest data-parallel group of a stage.

        There is one for each possible number of slow links between stages: links that take more
        than `limit` seconds. The fewer slow links, the more consecutive stages are joined by fast
        links. These stages must spread over the network in the same way, so their data-parallel
        groups are slow.

        Args:
            limit: Seconds of a link.
            fillings: All possible stages: for each GPU, the index of its location (node or
                cluster).
            group_s: Possible stage -> seconds of its data-parallel group.
        """
        indices = range(len(self.units))
        component = self._components(limit)
        alone = [
            u for u in indices if self.pair[u][u] > limit and component.count(component[u]) == 1
        ]
        # GPUs of these places cannot be at a stage link within the limit. Stages that hold them (rounded
        # up) force as many stage links beyond it.
        forced = -(-sum(self.units[u] for u in alone) * STAGES // sum(self.units))
        forced = min(forced, STAGES - 1)
        gpus_of_component: Counter[int] = Counter()
        for u in indices:
            gpus_of_component[component[u]] += self.units[u]
        # For each filling: the number of its GPUs in each component.
        fillings_by_component = [Counter(component[u] for u in filling) for filling in fillings]
        bounds = []
        for slow_links in range(forced, STAGES):
            # At least so many consecutive stages have no slow link between them (rounded up). A fast
            # link joins two stages with equally many GPUs in each component, so each of these stages
            # has the same number of a component's GPUs: at most the component's GPUs / `run`.
            run = -(-STAGES // (slow_links + 1))
            possible = []  # seconds of the groups of these stages
            for filling, gpus_in in zip(fillings, fillings_by_component):
                if all(count <= gpus_of_component[root] // run for root, count in gpus_in.items()):
                    possible.append(group_s[filling])
            if forced:  # the bound on the group is left at 0, which is always true
                bounds.append(SlowLinkBound(0.0, slow_links))
            elif possible:
                bounds.append(SlowLinkBound(min(possible), slow_links))
        return bounds

    def _components(self, limit: float) -> list[int]:
        """Return for each place the number of its component.

        Places are in the same component if links of at most `limit` seconds connect them, directly or
        over other places.
        """
        places = range(len(self.units))
        component = list(places)
        for u, v in permutations(places, 2):
            if self.pair[u][v] <= limit and component[u] != component[v]:
                merged = component[v]
                component = [component[u] if number == merged else number for number in component]
        return component


def plan_with_holmes(site: Site, links: Links) -> tuple[SearchResult, float]:
    """Return the result of `holmes plan` for 8 stages of 8 GPUs, and the CPU seconds of the search.

    The sizes are fixed. The search decides which GPUs each stage has. First it looks for a good
    plan without a proof, then with_spread() adds placements that spread a stage over clusters, and
    proven() examines the rest for 30 s, to prove how far the best plan is from the optimum.

    Args:
        site: The clusters with 64 GPUs.
        links: Links between the clusters.
    """
    begin = sum(os.times()[:4])  # CPU seconds, including those of processes that the search starts
    limits = Limits(
        {"pipeline": (STAGES,), "data": (DATA,), "virtual": (1,), "micro_batch": (1,), "zero": (0,)}
    )
    model = load_model(examples() / "models" / "gpt3_xl.toml")
    problem = SearchResult(
        Network(site, links),
        model,
        global_batch=DATA * MICRO_BATCHES,
        limits=limits,
        rules=Rules(overlap=True),
    )
    result = with_spread(search(problem, prove=False))
    return proven(result, time.monotonic() + 30.0), sum(os.times()[:4]) - begin


def gpus_of_stages(result: SearchResult, candidate: Candidate) -> list[list[int]]:
    """Return the numbers of the GPUs of each stage, in the order of cluster.toml.

    Args:
        result: The planning problem, with its clusters.
        candidate: The plan.
    """
    site, sizes = result.network.site, candidate.placement.sizes
    index_of = {node.name: index for index, node in enumerate(site.nodes)}  # in cluster.toml
    nodes, stages = result.network.nodes(candidate.placement), [[] for _ in range(STAGES)]
    for rank in range(site.world_size):
        node, local = divmod(rank, site.processes)
        stages[sizes.stage(rank)].append(index_of[nodes[node]] * site.processes + local)
    return stages


def simulate_step_s(result: SearchResult, groups: list[list[int]], matrix: Matrix) -> float:
    """Return the simulated step time of a placement, in seconds. Nodes have one GPU.

    Args:
        result: The planning problem, with the best plan that holmes found: its sizes are used.
        groups: GPUs of each stage. The GPUs of neighbouring stages are paired greedily: one GPU
            after the other gets the free GPU of the next stage with the fastest link.
        matrix: Latencies and rates between the locations of the GPUs. Here a location is a cluster,
            and `units` has the number of GPUs of each.
    """
    network = result.network
    best = result.best
    place_of_gpu = _places_of_gpus(matrix)
    # GPUs of all stages, stage by stage. Ranks at the same position of two neighbouring stages
    # exchange activations, so the order inside a stage decides the pairs.
    ordered_gpus = list(groups[0])
    previous_stage = groups[0]
    for group in groups[1:]:
        free_gpus = list(group)
        stage = []
        for gpu in previous_stage:
            seconds_to_place = matrix.pair[place_of_gpu[gpu]]
            nearest = min(free_gpus, key=lambda free: seconds_to_place[place_of_gpu[free]])  # noqa: B023
            free_gpus.remove(nearest)
            stage.append(nearest)
        ordered_gpus += stage
        previous_stage = stage
    nodes = [network.site.nodes[gpu].name for gpu in ordered_gpus]
    placement = network.placement(nodes, best.placement.sizes)
    return timed(result, result.candidate(best.shape, placement, best.split)).simulated_s


def _places_of_gpus(matrix: Matrix) -> list[int]:
    """Return the index of the place of each GPU: GPUs are numbered place by place."""
    places: list[int] = []
    for place, gpus in enumerate(matrix.units):
        places += [place] * gpus
    return places


def search_with_dtfm(folder: Path, case: int, seed: int, trials: int) -> dict:
    """Return the result of DT-FM's search, from an earlier run if there is one.

    Args:
        folder: DT-FM's code, and the results of earlier runs.
        case: Number of the case in DT-FM's config.py.
        seed: Seed of the search.
        trials: Trials of the search.

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


def cost_by_dtfm(folder: Path, case: int, groups: list[list[int]]) -> float:
    """Return the cost of a placement by DT-FM's code, in seconds.

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
    nvlink_bps = spec.clusters[0].accelerator.link_bps if site.processes > 1 else 0.0
    matrix = Matrix.of(site, nvlink_bps)
    begin = time.process_time()
    stages, cost = spread(matrix.units, STAGES, matrix.cost, TRIES)
    seconds = time.process_time() - begin
    least = matrix.least()
    dtfm = []
    if folder:
        dtfm = [search_with_dtfm(folder, case, seed, trials) for seed in seeds]
    place_of_gpu = _places_of_gpus(matrix)
    free_gpus = grouped((place, gpu) for gpu, place in enumerate(place_of_gpu))
    ours = []  # GPUs of each stage
    for stage in stages:
        ours.append([free_gpus[place].pop() for place in stage])
    rows = []

    def row(metric: str, values: list[float], unit: str, target: str = "") -> None:
        rows.append(Row.median(name, metric, values, unit=unit, emulated=False, target=target))

    limit = ""
    if dtfm:
        assert abs(cost_by_dtfm(folder, case, ours) / cost - 1) < 1e-9, "the same objective"
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
    result, seconds = plan_with_holmes(site, links)
    places_of_stages = []
    for group in gpus_of_stages(result, result.best):
        places_of_stages.append(tuple(sorted(place_of_gpu[gpu] for gpu in group)))
    row("holmes plan: simulated step", [result.best.step_s], "s")
    row("holmes plan: optimality gap", [result.optimality_gap.gap], "fraction")
    row("holmes plan: seconds", [seconds], "s")
    row("holmes plan: DT-FM's objective", [matrix.cost(tuple(places_of_stages))], "s")
    if site.processes == 1:
        row(
            "simulated step of ours by DT-FM's objective",
            [simulate_step_s(result, ours, matrix)],
            "s",
        )
        if dtfm:
            row(
                "simulated step of DT-FM's",
                [simulate_step_s(result, run["groups"], matrix) for run in dtfm],
                "s",
            )
    return rows


def main() -> int:
    """Measure the chosen cases, print the table of results, and write the results file."""
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument(
        "--dtfm",
        type=Path,
        metavar="FOLDER",
        help="DT-FM's scheduler.py and config.py; without them only holmes is measured",
    )
    arguments.add_argument(
        "--trials", type=int, default=4900, help="of DT-FM's search (4900: as in its own code)"
    )
    arguments.add_argument("--seeds", default="0", metavar="N,...", help="of DT-FM's search")
    args = arguments.parse_args()
    seeds = [int(seed) for seed in args.seeds.split(",")]
    rows = []
    for name in chosen_cases(args.cases, CASES):
        rows += measure(name, args.dtfm, seeds, args.trials)
        tell(f"{name}: done")
    return finish(rows, args.json, "stages of 64 GPUs on DT-FM's link matrices")


if __name__ == "__main__":
    sys.exit(main())
