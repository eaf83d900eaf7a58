"""Command `holmes plan --experts FILE`: place the experts of a mixture-of-experts model on ranks.

FILE has the traffic: for each layer, how many tokens go to each expert, by rank. The placement found
sends few tokens across clusters and nodes, and keeps the load of the clusters even.
"""

from __future__ import annotations

import argparse
import json

from holmes_ext.cli.show.table import Column, Screen
from holmes_ext.errors import HolmesError
from holmes_ext.plan.experts import ALL_LAYERS, ExpertOrder, load_traffic
from holmes_ext.plan.plan import Plan
from holmes_ext.planner.experts.places import Places, places_of
from holmes_ext.planner.experts.program import Answer, solve

COLUMNS = (
    Column("layer"),
    Column("experts"),
    Column("tokens across clusters", right=True),
    Column("across nodes", right=True, drop=2),
    Column("fullest rank : mean", right=True, drop=1),
    Column("proven within", right=True),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the placement of experts."""
    title = "which expert lives on which rank (needs scipy and the parallel sizes)"
    add = parser.add_argument_group(title).add_argument
    add(
        "--experts",
        metavar="FILE",
        help="place experts by their traffic: JSON, see docs/experts.md",
    )
    add(
        "--experts-output",
        metavar="FILE",
        help="which rank gets which expert, for --holmes-experts",
    )

    # EPLB is DeepSeek's heuristic for placing experts. If its placement gives a cluster more than X
    # times the mean, the limit of this cluster is that number.
    add(
        "--experts-balance",
        type=float,
        default=1.1,
        metavar="X",
        help="a cluster gets at most X times the mean number of tokens (default: 1.1; or what EPLB gives it)",
    )

    # Default: the number of experts divided by the number of ranks. Each rank must hold them in any
    # case ("as many as must").
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
    """Place the experts of every layer, and print or write their order; return the exit status 0.

    Args:
        args: Arguments of `holmes plan`.
        plan: Plan with the nodes of the ranks, and the parallel sizes.

    Raises:
        HolmesError: The input is bad.
    """
    places = places_of(plan)  # expert-parallel ranks, grouped by node
    answers = _solve_layers(args, places)  # number of the layer -> placements
    orders = {number: answer.best.order for number, answer in answers.items()}
    if args.experts_output:
        ExpertOrder(places.ranks, orders).save(args.experts_output)
    if args.json:
        layers = {str(number): _document(answer) for number, answer in answers.items()}
        print(json.dumps({"ranks": places.ranks, "layers": layers}))
        return 0
    screen = Screen()
    experts = len(next(iter(orders.values())))  # every layer has as many
    spread = f"{experts // places.ranks} on each of {places.ranks} expert-parallel ranks"
    screen.line(f"{experts} experts, {spread}, at {len(places.of)} places that differ")
    rows = []
    for number, answer in sorted(answers.items()):
        rows += _table_rows(number, answer)
    screen.table(COLUMNS, rows)
    if args.experts_output:
        screen.line(
            f"written: {args.experts_output}; start with --holmes-experts {args.experts_output}"
        )
    return 0


def _solve_layers(args: argparse.Namespace, places: Places) -> dict[int, Answer]:
    """Return the placement of each layer's experts: number of the layer -> Answer.

    The number ALL_LAYERS stands for all layers together, if the file does not tell them apart.

    Raises:
        HolmesError: The traffic does not fit the ranks, such as too few ranks for the experts; the
            message names the layer.
    """
    answers = {}
    for number, counts in load_traffic(args.experts).items():
        try:
            # Limits: a cluster's tokens relative to the mean, seconds to solve, experts that a rank
            # holds.
            answers[number] = solve(
                counts, places, args.experts_balance, args.experts_seconds, args.experts_per_rank
            )
        except HolmesError as error:
            layer = "" if number == ALL_LAYERS else f": layer {number}"
            raise HolmesError(f"{args.experts}{layer}: {error}") from None
    return answers


def _table_rows(number: int, answer: Answer) -> list[tuple[str, ...]]:
    """Return a row for each placement of a layer's experts, in the order of COLUMNS.

    Only the first row has the layer's number, and only the best placement has a proven distance
    from the optimum.
    """
    rows: list[tuple[str, ...]] = []
    for placed in answer.placements:
        layer = ""
        if placed is answer.placements[0]:
            layer = "all" if number == ALL_LAYERS else str(number)
        proven = f"{answer.gap:.2%}" if placed is answer.best else ""
        rows.append(
            (
                layer,
                placed.name,
                f"{placed.crossing:.1%}",  # share of tokens that cross clusters
                f"{placed.moving:.1%}",  # share of tokens that cross nodes
                f"{placed.fullest:.2f}",  # tokens of the rank with most of them, relative to the mean
                proven,
            )
        )
    return rows


def _document(answer: Answer) -> dict[str, object]:
    """Return a layer's placements as a dictionary for --json."""
    placements = {}
    for placed in answer.placements:
        placements[placed.name] = {
            "across_clusters": placed.crossing,
            "across_nodes": placed.moving,
            "fullest": placed.fullest,
            "cost": placed.cost,
        }
    return {
        "order": answer.best.order,
        "bound": answer.bound,
        "gap": answer.gap,
        "ways": placements,
    }
