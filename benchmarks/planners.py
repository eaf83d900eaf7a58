"""Compares `holmes plan` with other public planners, by the same simulation and the same lab.

    python benchmarks/planners.py --json FILE [--cases NAME,...] [--planners NAME,...] [--limit S]
                                  [--sailor DIR --dtfm DIR --python PYTHON] [--lab [--minutes M]]
                                  [--again] [--judge]

There are 24 cases (referee/cases.toml). Each planner gets a case in its own format and at most --limit
CPU seconds. Its first plan that fits the memory is written as sizes, order of nodes and layers, and
simulated. With --lab, the plans of the 12 small cases also run in the lab. "typed" is the plan that a
careful person would type, and random plans show what no planning achieves.

Planners of Sailor's repository need a clone of it (--sailor), DT-FM's search needs a clone (--dtfm),
and both need an interpreter with what they import (--python).

FILE keeps results, so that a run can be made in parts:

    --again      runs these planners on these cases again
    --judge      simulates all plans of FILE again, after a change of the simulation
    --minutes    begins no run in the lab after this time

A planner that finds nothing in time on CUT of the small or of the larger cases is not run on the others.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import NamedTuple

from harness import chosen_cases, finish, parser, tell
from referee import dtfm, judge, lab, sailor
from referee.cases import LAB, Case, load_cases
from referee.picture import draw
from referee.plans import Grid, gridded
from referee.table import (
    GAP,
    LATE,
    LOSSES,
    MEASURED,
    MISFITS,
    NONE,
    OURS,
    PLANNERS,
    PREDICTED,
    RANDOM,
    REGRET,
    SEARCH,
    STEP,
    TYPED,
    Table,
    over_cases,
    regrets,
)

from holmes_ext.errors import HolmesError

#: Number of random plans of a case.
RANDOM_PLANS = 10
#: A planner that finds nothing in time on this number of cases is not run on the others.
CUT = 3


class FoundPlans(NamedTuple):
    """Result of a planner for one case: its plans, each with the simulated step time."""

    plans: list[tuple[Grid, judge.SimulatedPlan]]  # one, or all random plans
    search_s: float  # CPU seconds of the search
    misfits: int = (
        0  # plans that the planner prefers, but that do not fit the memory or do not start
    )
    gap: float | None = (
        None  # relative gap to a lower bound, proven by the planner; None: it proves none
    )


def plans_of(case: Case, planner: str, args) -> FoundPlans:
    """Return the plan of a planner for a case, with its simulated step.

    It is the planner's best plan that the engine can run ("starts") and that fits the GPU memory.
    Most planners run a search now. Two need none. TYPED is the plan that a careful person would
    choose by the advice of Megatron and DeepSpeed. RANDOM makes RANDOM_PLANS random plans: then the
    result has all of them that fit.

    Args:
        case: The planning problem: clusters, model and batch size.
        planner: One of PLANNERS.
        args: Options of this program.

    Raises:
        HolmesError: The planner finds no plan that fits and starts.
    """
    if planner == OURS:
        grid, seconds, gap = judge.holmes_plan(case, args.limit)
        return FoundPlans([(grid, judge.simulate_plan(case, grid))], search_s=seconds, gap=gap)
    if planner == TYPED:
        return FoundPlans(_fitting([judge.careful_plan(case)], case), search_s=0.0)
    if planner == RANDOM:
        plans = judge.random_plans(case, RANDOM_PLANS)
        return FoundPlans(_fitting(plans, case, skip_misfits=True), search_s=0.0)
    if planner == dtfm.NAME:
        answer = dtfm.ask(case, args.dtfm, args.python, args.limit)
    else:
        answer = sailor.ask(case, planner, args.sailor, args.python, args.limit)
    reasons = []  # why the better plans do not start or fit; their number is `misfits`
    for plan in answer.plans:  # the best first
        try:
            # The engine needs equal parallel sizes on all stages, and whole nodes.
            grid = gridded(plan, case.site, case.model.layers, case.batch)
            fitting = _fitting([grid], case)
            return FoundPlans(fitting, search_s=answer.seconds, misfits=len(reasons))
        except HolmesError as error:
            reasons.append(str(error))
    raise HolmesError(f"none of its first {len(answer.plans)} plans starts and fits: {reasons[0]}")


def _fitting(
    grids: list[Grid], case: Case, skip_misfits: bool = False
) -> list[tuple[Grid, judge.SimulatedPlan]]:
    """Simulate a step of each plan, and return the plans that fit the GPU memory.

    Args:
        grids: The plans.
        case: The planning problem.
        skip_misfits: Whether plans that do not fit are left out. Otherwise, the first of them is an
            error.

    Returns:
        Pairs (plan, simulated step).

    Raises:
        HolmesError: No plan fits, or one does not and `skip_misfits` is false.
    """
    fitting = []
    for grid in grids:
        verdict = judge.simulate_plan(case, grid)
        if verdict.fits:
            fitting.append((grid, verdict))
        elif not skip_misfits:
            raise HolmesError(f"{grid} does not fit the memory")
    if not fitting:
        raise HolmesError(f"none of {len(grids)} plans fits the memory")
    return fitting


def ask(table: Table, case: Case, planner: str, args) -> None:
    """Let a planner plan a case, and add its plan and the simulated step to the table.

    If there is no plan, the reason is noted. A planner that was too slow on CUT cases of about the same size
    is not run.

    Args:
        planner: One of PLANNERS.
        args: Options of this program.
    """
    begin, notes = time.monotonic(), table.notes.setdefault(case.name, {})
    # Either the small cases, which also run in the lab, or the larger ones.
    same_size = [name for name, other in load_cases().items() if other.run == case.run]
    if table.late(same_size, planner, args.limit) >= CUT:
        where = "lab's" if case.run == LAB else "larger"
        notes[planner] = {
            NONE: f"not asked: {LATE} {args.limit:g} CPU s on {CUT} of the {where} cases",
            "limit": args.limit,
        }
        table.save()
        return
    try:
        found = plans_of(case, planner, args)
    except HolmesError as error:
        table.forget(case.name, planner)
        notes[planner] = {NONE: str(error), "limit": args.limit}
        tell(f"{case.name}: {planner}: no plan: {error}")
        table.save()
        return
    before = notes.get(planner, {})
    # The plan with the median step; only "random" has several.
    grid, verdict = sorted(found.plans, key=lambda plan: plan[1].step_s)[len(found.plans) // 2]
    note = {
        "plan": str(grid),
        "nodes": list(grid.nodes),
        "changed": list(grid.changed),
        "sizes": [grid.sizes.pipeline, grid.sizes.tensor, grid.sizes.data],
        "split": list(grid.split),
        "micro_batch": grid.micro_batch,
        "limit": args.limit,
    }
    if {**before, **note} != before:  # the plan has changed: results of the lab are of the old one
        table.forget(case.name, planner)
    notes[planner] = {**notes.get(planner, {}), **note}
    table.add(case.name, planner, STEP, [judged.step_s for _, judged in found.plans], "s")
    table.add(case.name, planner, SEARCH, [found.search_s], "s")
    table.add(case.name, planner, MISFITS, [found.misfits], "")
    if grid.predicted_s:
        table.add(case.name, planner, PREDICTED, [grid.predicted_s], "s")
    if found.gap is not None:
        table.add(case.name, planner, GAP, [found.gap], "fraction")
    tell(
        f"{case.name}: {planner}: {verdict.step_s:.4g} s, {grid}; {time.monotonic() - begin:.0f} s"
    )
    table.save()


def judge_again(table: Table, case: Case) -> None:
    """Simulate all plans of a case again and replace their step times. The random plans are drawn anew."""
    for planner, note in table.notes.get(case.name, {}).items():
        if NONE not in note:
            steps = [judge.simulate_plan(case, judge.grid_of(note)).step_s]
            if planner == RANDOM:
                plans = _fitting(judge.random_plans(case, RANDOM_PLANS), case, skip_misfits=True)
                steps = [verdict.step_s for _, verdict in plans]
            table.add(case.name, planner, STEP, steps, "s")
    table.save()


def in_turns(table: Table, cases: list[Case]) -> Iterator[tuple[Case, list[str]]]:
    """Yield pairs (case, planners) in the order in which these planners' plans run on emulated clusters.

    There are four turns over all cases: for holmes, for the best of the other planners, for the plan
    that a person would type, and for all others. So the most important plans run even if time is short.
    """
    for turn in ("holmes", "best other", "typed", "all others"):
        for case in cases:
            # table.notes: case -> planner -> its plan. A planner without a plan has no step.
            steps = {
                name: table.value(case.name, name, STEP) for name in table.notes.get(case.name, {})
            }
            published = sorted(
                (step, name)
                for name, step in steps.items()
                if step is not None and name not in (OURS, TYPED, RANDOM)
            )
            fastest_first = [name for _, name in published]
            if turn == "holmes":
                yield case, [OURS]
            elif turn == "best other":
                yield case, fastest_first[:1]
            elif turn == "typed":
                yield case, [TYPED]
            else:
                yield case, [*fastest_first[1:], RANDOM]


def _finished_runs(table: Table, case: Case, grids: dict[str, Grid]) -> dict[Grid, lab.Run]:
    """Return the training runs of plans on emulated clusters, by plan, if the table has results.

    The table has only the smallest, the median and the largest step of a run. They stand for all
    its steps.

    Args:
        grids: Planner -> its plan for the case.
    """
    finished: dict[Grid, lab.Run] = {}
    for name, grid in grids.items():
        row = table.row(case.name, name, MEASURED)
        losses = table.value(case.name, name, LOSSES)
        if row is not None and losses is not None:
            smallest_s, largest_s = row.spread
            finished[grid] = lab.Run(
                [smallest_s, row.value, largest_s], loss_difference=losses, busy=row.busy
            )
    return finished


def run_in_lab(table: Table, case: Case, named: list[str], end: float = inf) -> None:
    """Train with the plans of some planners on emulated clusters, and add the steps to the table.

    Planners with the same plan share a run, also one of an earlier call. A plan that has been
    measured does not run again, and neither does one that could not start.

    Args:
        table: Results of all planners, with a note on each plan.
        case: Clusters, model and batch size.
        named: Names of the planners.
        end: No run begins after this time (time.monotonic).
    """
    # Planner -> note about its plan. A note with the key NONE says why there is no plan.
    notes = {
        name: note for name, note in table.notes.get(case.name, {}).items() if NONE not in note
    }
    grids = {name: judge.grid_of(note) for name, note in notes.items()}
    finished = _finished_runs(table, case, grids)
    for name in named:
        if name not in notes:
            continue
        has_run = table.row(case.name, name, MEASURED) is not None
        if has_run or "lab" in notes[name]:
            continue
        if grids[name] not in finished and time.monotonic() > end:
            continue
        try:
            run = finished.get(grids[name]) or lab.run(case, grids[name])
        except HolmesError as error:
            notes[name]["lab"] = f"did not start: {error}"
            tell(f"{case.name}: {name}: {error}")
            table.save()
            continue
        finished[grids[name]] = run
        table.add(case.name, name, MEASURED, run.steps, "s", True, run.busy)
        table.add(case.name, name, LOSSES, [run.loss_difference], "", True)
        tell(f"{case.name}: {name}: measured {statistics.median(run.steps):.4g} s")
        table.save()


def main() -> int:
    """Measure the chosen cases, print the table of results, and write the results file."""
    arguments = parser(__doc__.splitlines()[0])
    add = arguments.add_argument
    add("--planners", default="", metavar="NAME,...", help="only these planners")
    add(
        "--limit",
        type=float,
        default=600.0,
        metavar="S",
        help="CPU seconds of a planner on a case",
    )
    add("--sailor", type=Path, metavar="DIR", help=f"clone of Sailor's repository; {sailor.HOW}")
    add("--dtfm", type=Path, metavar="DIR", help=f"clone of DT-FM's repository; {dtfm.HOW}")
    add("--python", default=sys.executable, help="that has what Sailor's planners import")
    add("--lab", action="store_true", help="run the plans of the small cases in the lab")
    add(
        "--minutes",
        type=float,
        default=inf,
        metavar="M",
        help="after which no run in the lab begins",
    )
    add(
        "--judge",
        action="store_true",
        help="judge all plans of FILE again: the simulation has changed",
    )
    add("--again", action="store_true", help="ask these planners on these cases again")
    add("--picture", type=Path, metavar="SVG", help="draw planners by regret over cases")
    args, cases, begin = arguments.parse_args(), load_cases(), time.monotonic()
    names, planners = chosen_cases(args.cases, cases), chosen_cases(args.planners, PLANNERS)
    table = Table(args.json)
    for where, theirs, how in (
        (args.sailor, sailor.PLANNERS, sailor.HOW),
        (args.dtfm, (dtfm.NAME,), dtfm.HOW),
    ):
        if not where:
            tell(f"left out: {', '.join(theirs)}: {how}")
            planners = [name for name in planners if name not in theirs]
    for name in names:
        if args.judge:
            judge_again(table, cases[name])
        for planner in planners:
            if args.again or not table.has(name, planner, args.limit):
                ask(table, cases[name], planner, args)
    lab_cases = [cases[name] for name in names if args.lab and cases[name].run == LAB]
    for case, named in in_turns(table, lab_cases):
        run_in_lab(table, case, named, begin + 60 * args.minutes)
    asked = [name for name in cases if name in table.notes]
    regrets(table, asked)
    table.rows = [row for row in table.rows if row.case != "all"] + over_cases(table, asked)
    table.save()
    if args.picture:
        draw(table.rows, table.notes, REGRET, PLANNERS, args.picture)
    return finish(table.rows, args.json, "planners by the steps of their plans")


if __name__ == "__main__":
    sys.exit(main())
