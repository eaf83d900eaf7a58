"""`holmes plan --experts TRAFFIC`: which expert should live on which rank, and how good that is."""

from __future__ import annotations

import argparse
import json

from holmes_ext.cli.show.table import Column, Screen
from holmes_ext.errors import HolmesError
from holmes_ext.plan.experts import EVERY, ExpertOrder, load_traffic
from holmes_ext.plan.plan import Plan
from holmes_ext.planner.experts.places import places_of
from holmes_ext.planner.experts.program import Answer, Placed, solve

COLUMNS = (
    Column("layer"),
    Column("experts"),
    Column("tokens across clusters", right=True),
    Column("across nodes", right=True, drop=2),
    Column("fullest rank : mean", right=True, drop=1),
    Column("proven within", right=True),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = "which expert lives on which rank (needs scipy and the parallel sizes)"
    add = parser.add_argument_group(what).add_argument
    add("--experts", metavar="FILE", help="place experts by their traffic: JSON, see docs/plan.md")
    add(
        "--experts-output",
        metavar="FILE",
        help="which rank gets which expert, for --holmes-experts",
    )
    add(
        "--experts-balance",
        type=float,
        default=1.1,
        metavar="X",
        help="a cluster gets at most X times the mean number of tokens (default: 1.1; or what EPLB gives it)",
    )
    add(
        "--experts-per-rank",
        type=int,
        default=0,
        metavar="N",
        help="experts that a rank can hold (default: as many as must)",
    )
    add(
        "--experts-seconds",
        type=float,
        default=10.0,
        metavar="S",
        help="seconds to solve for each layer (default: 10)",
    )


def run(args: argparse.Namespace, plan: Plan) -> int:
    """Print (or write) the order. HolmesError on bad input."""
    places, answers = places_of(plan), {}
    for number, counts in load_traffic(args.experts).items():
        try:
            answers[number] = solve(
                counts, places, args.experts_balance, args.experts_seconds, args.experts_per_rank
            )
        except HolmesError as error:
            layer = f": layer {number}" if number != EVERY else ""
            raise HolmesError(f"{args.experts}{layer}: {error}") from None
    order = ExpertOrder(
        places.ranks, {number: answer.best.order for number, answer in answers.items()}
    )
    if args.experts_output:
        order.save(args.experts_output)
    if args.json:
        print(
            json.dumps(
                {
                    "ranks": places.ranks,
                    "layers": {str(n): _document(answer) for n, answer in answers.items()},
                }
            )
        )
        return 0
    screen = Screen()
    experts = len(next(iter(order.layers.values())))
    spread = f"{experts // places.ranks} on each of {places.ranks} expert-parallel ranks"
    screen.line(f"{experts} experts, {spread}, at {len(places.of)} places that differ")
    screen.table(
        COLUMNS,
        [row for number, answer in sorted(answers.items()) for row in _rows(number, answer)],
    )
    if args.experts_output:
        screen.line(
            f"written: {args.experts_output}; start with --holmes-experts {args.experts_output}"
        )
    return 0


def _rows(number: int, answer: Answer) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for placed in answer.placements:
        layer = (
            ("all" if number == EVERY else str(number)) if placed is answer.placements[0] else ""
        )
        proven = f"{answer.gap:.2%}" if placed is answer.best else ""
        rows.append(
            (
                layer,
                placed.name,
                f"{placed.crossing:.1%}",
                f"{placed.moving:.1%}",
                f"{placed.fullest:.2f}",
                proven,
            )
        )
    return rows


def _document(answer: Answer) -> dict[str, object]:
    def of(placed: Placed) -> dict[str, object]:
        return {
            "across_clusters": placed.crossing,
            "across_nodes": placed.moving,
            "fullest": placed.fullest,
            "cost": placed.cost,
        }

    placements = {placed.name: of(placed) for placed in answer.placements}
    return {
        "order": answer.best.order,
        "bound": answer.bound,
        "gap": answer.gap,
        "ways": placements,
    }
