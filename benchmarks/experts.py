"""Compares placements of experts on ranks: that of holmes, EPLB, and the order of megatron-core.

    python benchmarks/experts.py --json FILE [--cases cases,large] [--count 20] [--large 5]

    cases   Random token counts for 6 to 64 ranks on clusters of examples/clusters, with 2 to 8 experts on
            each rank. The counts are even or skewed, and some ranks prefer some experts.
    large   256 experts on 64 GPUs in four regions, with different links between the regions.

Results are the tokens that cross clusters, the proven distance to the best placement, and the seconds of
the search. The counts are random, not those of a real router. EPLB is its balanced packing without copies
of experts, written from its description.
"""

from __future__ import annotations

import random
import sys
import time

from harness import Row, chosen_cases, finish, parser, tell

from holmes_ext.cluster.site import site_from_spec
from holmes_ext.cluster.spec import load_spec
from holmes_ext.plan.build import build_plan
from holmes_ext.plan.cost.links import Links
from holmes_ext.plan.experts import RANK, Counts
from holmes_ext.plan.sizes import Sizes
from holmes_ext.planner.experts.places import Places, places_of
from holmes_ext.planner.experts.program import EPLB, IDENTITY, Answer, Placed, solve
from holmes_ext.samples import examples

SITES = {
    "two_clusters_8": 8,
    "three_clusters_8": 8,
    "two_clusters_3_5": 8,
    "three_links_6": 6,
    "eight_cities_64": 64,
    "four_us_regions_64": 64,
}


def expert_ranks(name: str, expert: int) -> Places:
    """Return the ranks that can hold experts, with the links between them.

    Args:
        name: Name of a cluster file in examples/clusters, without .toml.
        expert: Expert-parallel size.
    """
    spec = load_spec(examples() / "clusters" / f"{name}.toml")
    site = site_from_spec(spec)
    sizes = Sizes(expert=expert).complete(site.world_size)
    return places_of(build_plan(site, sizes, links=Links.of_spec(spec)))


def random_token_counts(rng: random.Random, ranks: int, experts: int) -> Counts:
    """Return random token counts: how many tokens each rank sends to each expert.

    Some experts are more popular than others, and some ranks prefer some experts.

    Args:
        rng: Source of random numbers.
        ranks: Number of ranks.
        experts: Number of experts.
    """
    skew = rng.choice((0.5, 1, 2, 3))  # exponent: the larger, the more tokens go to few experts
    # Further tokens of a rank for its preferred experts. Half of the problems have no preferences.
    preference = rng.choice((0.0, 0.0, 2.0, 10.0))
    load = [rng.expovariate(1) ** skew for _ in range(experts)]
    preferred = [rng.sample(range(experts), max(1, experts // ranks)) for _ in range(ranks)]
    rows_of_counts = []
    for rank in range(ranks):
        row = []
        for expert in range(experts):
            factor = 1 + preference * (expert in preferred[rank])
            # About 1000 tokens go from each rank to each expert. Only their ratios matter.
            row.append(1000 * load[expert] * rng.uniform(0.5, 1.5) * factor)
        rows_of_counts.append(tuple(row))
    return Counts(RANK, tuple(rows_of_counts))  # RANK: a row of the table is a sending rank


def rows(case: str, answers: list[tuple[Answer, float]]) -> list[Row]:
    """Return the rows of results of a case.

    Args:
        answers: For each random problem, the placements that were found (those of holmes, EPLB and
            megatron-core) and the seconds of the search.
    """

    def placement_named(answer: Answer, name: str) -> Placed:
        """Return the placement that a method (EPLB or IDENTITY) has found for a problem."""
        return next(placement for placement in answer.placements if placement.name == name)

    def crossing_ratios(baseline: str) -> list[float]:
        """Return for each problem the tokens that cross clusters, divided by those of a baseline.

        Problems in which no token crosses clusters under the baseline are left out.

        Args:
            baseline: Name of another placement of the same experts (EPLB or IDENTITY).
        """
        pairs = [
            (answer.best.crossing, placement_named(answer, baseline).crossing)
            for answer, _ in answers
        ]
        return [best / other for best, other in pairs if other]

    costs = [answer.best.cost / placement_named(answer, EPLB).cost for answer, _ in answers]
    return [
        Row.median(
            case,
            "tokens by the slowness of their links, placed : EPLB",
            costs,
            unit="x",
            emulated=False,
            target="<= 1",
        ),
        Row.median(
            case,
            "tokens across clusters, placed : EPLB",
            crossing_ratios(EPLB),
            unit="x",
            emulated=False,
        ),
        Row.median(
            case,
            "tokens across clusters, placed : identity",
            crossing_ratios(IDENTITY),
            unit="x",
            emulated=False,
        ),
        Row.median(
            case,
            "proven within",
            [answer.gap for answer, _ in answers],
            unit="of the cost",
            emulated=False,
            target="<= 0.02",
        ),
        Row.median(
            case,
            "fullest rank : mean",
            [answer.best.fullest for answer, _ in answers],
            unit="x",
            emulated=False,
        ),
        Row.median(
            case,
            "seconds",
            [seconds for _, seconds in answers],
            unit="s",
            emulated=False,
            target="<= 10",
        ),
    ]


def measure(case: str, names: list[str], per_rank: tuple[int, ...], count: int) -> list[Row]:
    """Place experts on ranks for `count` random problems, and return the rows of results.

    A problem has random clusters, and random numbers of tokens that each rank sends to each expert.
    solve() searches the placement with the fewest tokens over slow links. Its answer has the best
    placement, the baselines, and the proven optimality gap of the best placement.

    Args:
        case: Name of the case in the results.
        names: Cluster files to choose from, keys of SITES.
        per_rank: Numbers of experts on a rank to choose from.
        count: Number of random problems.
    """
    answers = []
    for seed in range(count):
        rng = random.Random(seed)
        name = rng.choice(names)
        ranks = expert_ranks(name, SITES[name])  # with the links between them
        experts = ranks.ranks * rng.choice(per_rank)
        token_counts = random_token_counts(rng, ranks.ranks, experts)
        begin = time.monotonic()
        answer = solve(token_counts, ranks)
        seconds = time.monotonic() - begin
        answers.append((answer, seconds))
        tell(f"{case} {seed}: {name}, {experts} experts: gap {answer.gap:.2%}, {seconds:.1f} s")
    return rows(case, answers)


def main() -> int:
    """Measure the chosen cases, print the table of results, and write the results file."""
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--count", type=int, default=20, help="random problems of `cases`")
    arguments.add_argument("--large", type=int, default=5, help="random problems of `large`")
    args = arguments.parse_args()
    measure_of = {
        "cases": lambda: measure("cases", list(SITES), per_rank=(2, 4, 8), count=args.count),
        # 64 GPUs in four regions, with 4 experts on each: 256 experts.
        "large": lambda: measure("large", ["four_us_regions_64"], per_rank=(4,), count=args.large),
    }
    figures = [row for name in chosen_cases(args.cases, measure_of) for row in measure_of[name]()]
    return finish(figures, args.json, "Experts placed by traffic")


if __name__ == "__main__":
    sys.exit(main())
