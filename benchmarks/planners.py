"""The referee: every public planner on the same scenes, each one's plan judged by the same simulation and the
same lab.

    python benchmarks/planners.py --json FILE [--scenes NAME,...] [--planners NAME,...] [--limit S]
                                  [--sailor DIR --dtfm DIR --python PYTHON] [--lab [--minutes M]]
                                  [--again] [--judge]

24 scenes (referee/scenes.toml). Each planner gets a scene in its own format and at most --limit seconds of
CPU; its first plan that fits the memory is written as sizes, order of nodes and layers, and simulated; --lab
runs that of the 12 small scenes, too. "typed" is what a careful person types; random plans are a floor.
Planners of Sailor's repository need --sailor, a clone, DT-FM's own search --dtfm, and both --python, an
interpreter that has what they import. What FILE has is kept and not run again (--again: these planners, on
these scenes, are; --judge: plans that it has are judged again, after a change of the simulation), so that a
run can be made in parts; --minutes: no run in the lab begins later. A planner that finds nothing in time on
CUT of the lab's scenes, or of the larger ones, is not asked about the others.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from math import inf
from pathlib import Path

from harness import chosen, finish, parser, tell
from referee import dtfm, judge, lab, sailor
from referee.picture import draw
from referee.plans import Grid, gridded
from referee.scenes import LAB, Scene, load_scenes
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
    over_scenes,
    regrets,
)

from holmes_ext.errors import HolmesError

#: Random plans of a scene.
DICE = 10
#: See the module.
CUT = 3


def plans_of(
    scene: Scene, planner: str, args
) -> tuple[list[tuple[Grid, judge.Verdict]], float, int, float]:
    """(the plan that is judged, or all random ones; seconds of search; plans before it that do not fit or
    start; gap). HolmesError: why there is none."""
    if planner == OURS:
        grid, seconds, gap = judge.holmes_plan(scene, args.limit)
        return [(grid, judge.judged(scene, grid))], seconds, 0, gap
    if planner == TYPED:
        grid = judge.typed(scene)
        return _fitting([grid], scene), 0.0, 0, -1.0
    if planner == RANDOM:
        return _fitting(judge.random_plans(scene, DICE), scene, every=True), 0.0, 0, -1.0
    if planner == dtfm.NAME:
        answer = dtfm.ask(scene, args.dtfm, args.python, args.limit)
    else:
        answer = sailor.ask(scene, planner, args.sailor, args.python, args.limit)
    grids, reasons = [], []
    for plan in answer.plans:
        try:
            grids.append(gridded(plan, scene.site, scene.model.layers, scene.batch))
            fitting = _fitting(grids[-1:], scene)
            return fitting, answer.seconds, len(reasons), -1.0
        except HolmesError as error:
            reasons.append(str(error))
    raise HolmesError(f"none of its first {len(answer.plans)} plans starts and fits: {reasons[0]}")


def _fitting(
    grids: list[Grid], scene: Scene, every: bool = False
) -> list[tuple[Grid, judge.Verdict]]:
    """The plans that fit, with their verdicts; HolmesError where none fits or, without `every`,
    where one does not."""
    fitting = []
    for grid in grids:
        verdict = judge.judged(scene, grid)
        if verdict.fits:
            fitting.append((grid, verdict))
        elif not every:
            raise HolmesError(f"{grid} does not fit the memory")
    if not fitting:
        raise HolmesError(f"none of {len(grids)} plans fits the memory")
    return fitting


def ask(table: Table, scene: Scene, planner: str, args) -> None:
    begin, notes = time.monotonic(), table.notes.setdefault(scene.name, {})
    alike = [name for name, other in load_scenes().items() if other.run == scene.run]
    if table.late(alike, planner, args.limit) >= CUT:
        where = "lab's" if scene.run == LAB else "larger"
        notes[planner] = {
            NONE: f"not asked: {LATE} {args.limit:g} CPU s on {CUT} of the {where} scenes",
            "limit": args.limit,
        }
        return table.save()
    try:
        plans, seconds, misfits, gap = plans_of(scene, planner, args)
    except HolmesError as error:
        table.forget(scene.name, planner)
        notes[planner] = {NONE: str(error), "limit": args.limit}
        tell(f"{scene.name}: {planner}: no plan: {error}")
        return table.save()
    before = notes.get(planner, {})
    grid, verdict = sorted(plans, key=lambda plan: plan[1].step_s)[len(plans) // 2]
    note = {
        "plan": str(grid),
        "nodes": list(grid.nodes),
        "changed": list(grid.changed),
        "sizes": [grid.sizes.pipeline, grid.sizes.tensor, grid.sizes.data],
        "split": list(grid.split),
        "micro_batch": grid.micro_batch,
        "limit": args.limit,
    }
    if {**before, **note} != before:  # the lab ran another
        table.forget(scene.name, planner)
    notes[planner] = {**notes.get(planner, {}), **note}
    table.add(scene.name, planner, STEP, [judged.step_s for _, judged in plans], "s")
    table.add(scene.name, planner, SEARCH, [seconds], "s")
    table.add(scene.name, planner, MISFITS, [misfits], "")
    if grid.predicted_s:
        table.add(scene.name, planner, PREDICTED, [grid.predicted_s], "s")
    if gap >= 0:
        table.add(scene.name, planner, GAP, [gap], "fraction")
    tell(
        f"{scene.name}: {planner}: {verdict.step_s:.4g} s, {grid}; {time.monotonic() - begin:.0f} s"
    )
    table.save()


def judge_again(table: Table, scene: Scene) -> None:
    """The plans that FILE has, and others by the dice."""
    for planner, note in table.notes.get(scene.name, {}).items():
        if NONE not in note:
            steps = [judge.judged(scene, judge.grid_of(note)).step_s]
            if planner == RANDOM:
                plans = _fitting(judge.random_plans(scene, DICE), scene, every=True)
                steps = [verdict.step_s for _, verdict in plans]
            table.add(scene.name, planner, STEP, steps, "s")
    table.save()


def in_turns(table: Table, scenes: list[Scene]) -> Iterator[tuple[Scene, list[str]]]:
    """The plans of a scene that a turn runs: of all scenes ours first, then the best of the field, then what
    one types, then the others."""
    for turn in range(4):
        for scene in scenes:
            steps = {
                name: table.value(scene.name, name, STEP)
                for name in table.notes.get(scene.name, {})
            }
            field = sorted(
                (step, name)
                for name, step in steps.items()
                if step is not None and name not in (OURS, TYPED, RANDOM)
            )
            best = [name for _, name in field]
            yield scene, [[OURS], best[:1], [TYPED], [*best[1:], RANDOM]][turn]


def run_in_lab(table: Table, scene: Scene, named: list[str], end: float = inf) -> None:
    """The plans of these planners, none begun after `end`; those that found the same one share its run."""
    notes = {
        name: note for name, note in table.notes.get(scene.name, {}).items() if NONE not in note
    }
    grids, done = {name: judge.grid_of(note) for name, note in notes.items()}, {}
    for name, grid in grids.items():
        row, losses = table.row(scene.name, name, MEASURED), table.value(scene.name, name, LOSSES)
        if row is not None and losses is not None:
            done[grid] = lab.Run([row.spread[0], row.value, row.spread[1]], losses, row.busy)
    for name in named:
        if (
            name not in notes
            or "lab" in notes[name]
            or table.row(scene.name, name, MEASURED) is not None
        ):
            continue
        if grids[name] not in done and time.monotonic() > end:
            continue
        try:
            run = done.get(grids[name]) or lab.run(scene, grids[name])
        except HolmesError as error:
            notes[name]["lab"] = f"did not start: {error}"
            tell(f"{scene.name}: {name}: {error}")
            table.save()
            continue
        done[grids[name]] = run
        table.add(scene.name, name, MEASURED, run.steps, "s", True, run.busy)
        table.add(scene.name, name, LOSSES, [run.loss_difference], "", True)
        tell(f"{scene.name}: {name}: measured {statistics.median(run.steps):.4g} s")
        table.save()


def main() -> int:
    arguments = parser(__doc__.splitlines()[0])
    add = arguments.add_argument
    add("--planners", default="", metavar="NAME,...", help="only these planners")
    add(
        "--limit",
        type=float,
        default=600.0,
        metavar="S",
        help="CPU seconds of a planner on a scene",
    )
    add("--sailor", type=Path, metavar="DIR", help=f"clone of Sailor's repository; {sailor.HOW}")
    add("--dtfm", type=Path, metavar="DIR", help=f"clone of DT-FM's repository; {dtfm.HOW}")
    add("--python", default=sys.executable, help="that has what Sailor's planners import")
    add("--lab", action="store_true", help="run the plans of the small scenes in the lab")
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
    add("--again", action="store_true", help="ask these planners on these scenes again")
    add("--picture", type=Path, metavar="PNG", help="draw planners by regret over scenes")
    args, scenes, begin = arguments.parse_args(), load_scenes(), time.monotonic()
    names, planners = chosen(args.scenes, scenes), chosen(args.planners, PLANNERS)
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
            judge_again(table, scenes[name])
        for planner in planners:
            if args.again or not table.has(name, planner, args.limit):
                ask(table, scenes[name], planner, args)
    lab_scenes = [scenes[name] for name in names if args.lab and scenes[name].run == LAB]
    for scene, named in in_turns(table, lab_scenes):
        run_in_lab(table, scene, named, begin + 60 * args.minutes)
    asked = [name for name in scenes if name in table.notes]
    regrets(table, asked)
    table.rows = [row for row in table.rows if row.scene != "all"] + over_scenes(table, asked)
    table.save()
    if args.picture:
        draw(table.rows, table.notes, REGRET, PLANNERS, args.picture)
    return finish(table.rows, args.json, "planners by the steps of their plans")


if __name__ == "__main__":
    sys.exit(main())
