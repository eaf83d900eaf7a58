"""Experts placed by traffic: what crosses clusters, against EPLB and the identity; what is proven; seconds.

    python benchmarks/experts.py --json FILE [--cases cases,large] [--count 20] [--large 5]

    cases   random counts, a row for each of 6 to 64 ranks on sites of examples/clusters, 2 to 8 experts each:
            from even to skewed, with and without tokens that belong to ranks
    large   256 experts over 64 GPUs in four regions, with links of their own

Counts are drawn, no router's. EPLB here is its balanced packing without copies of experts, from its
description.
"""

from __future__ import annotations

import random
import sys
import time

from harness import Row, chosen, finish, parser, tell

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


def places(name: str, expert: int) -> Places:
    spec = load_spec(examples() / "clusters" / f"{name}.toml")
    site = site_from_spec(spec)
    sizes = Sizes(expert=expert).complete(site.world_size)
    return places_of(build_plan(site, sizes, links=Links.of_spec(spec)))


def counts(rng: random.Random, ranks: int, experts: int) -> Counts:
    skew, kinds = rng.choice((0.5, 1, 2, 3)), rng.choice((0.0, 0.0, 2.0, 10.0))
    load = [rng.expovariate(1) ** skew for _ in range(experts)]
    liked = [rng.sample(range(experts), max(1, experts // ranks)) for _ in range(ranks)]
    return Counts(
        RANK,
        tuple(
            tuple(
                1000 * load[e] * rng.uniform(0.5, 1.5) * (1 + kinds * (e in liked[rank]))
                for e in range(experts)
            )
            for rank in range(ranks)
        ),
    )


def rows(case: str, answers: list[tuple[Answer, float]]) -> list[Row]:
    def placed(answer: Answer, name: str) -> Placed:
        return next(placement for placement in answer.placements if placement.name == name)

    def parts(name: str) -> list[float]:
        pairs = [(answer.best.crossing, placed(answer, name).crossing) for answer, _ in answers]
        return [best / other for best, other in pairs if other]

    costs = [answer.best.cost / placed(answer, EPLB).cost for answer, _ in answers]
    return [
        Row.median(
            case, "tokens by the slowness of their links, placed : EPLB", costs, "x", False, "<= 1"
        ),
        Row.median(case, "tokens across clusters, placed : EPLB", parts(EPLB), "x", False),
        Row.median(case, "tokens across clusters, placed : identity", parts(IDENTITY), "x", False),
        Row.median(
            case,
            "proven within",
            [answer.gap for answer, _ in answers],
            "of the cost",
            False,
            "<= 0.02",
        ),
        Row.median(
            case, "fullest rank : mean", [answer.best.fullest for answer, _ in answers], "x", False
        ),
        Row.median(case, "seconds", [seconds for _, seconds in answers], "s", False, "<= 10"),
    ]


def measure(case: str, names: list[str], per_rank: tuple[int, ...], count: int) -> list[Row]:
    answers = []
    for seed in range(count):
        rng = random.Random(seed)
        name = rng.choice(names)
        expert_places = places(name, SITES[name])
        token_counts = counts(rng, expert_places.ranks, expert_places.ranks * rng.choice(per_rank))
        begin = time.monotonic()
        answers.append((solve(token_counts, expert_places), time.monotonic() - begin))
        answer, seconds = answers[-1]
        tell(
            f"{case} {seed}: {name}, {token_counts.experts} experts: gap {answer.gap:.2%}, {seconds:.1f} s"
        )
    return rows(case, answers)


def main() -> int:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("--count", type=int, default=20)
    arguments.add_argument("--large", type=int, default=5)
    args = arguments.parse_args()
    makers = {
        "cases": lambda: measure("cases", list(SITES), (2, 4, 8), args.count),
        "large": lambda: measure("large", ["four_us_regions_64"], (4,), args.large),
    }
    figures = [row for name in chosen(args.cases, makers) for row in makers[name]()]
    return finish(figures, args.json, "Experts placed by traffic")


if __name__ == "__main__":
    sys.exit(main())
