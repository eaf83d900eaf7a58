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

import json
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from math import inf
from pathlib import Path

from harness import Row, chosen, finish, kept, parser, tell, write
from referee import dtfm, judge, lab, sailor
from referee.picture import draw
from referee.plans import Grid, gridded
from referee.scenes import LAB, Scene, load_scenes

from holmes_ext.errors import HolmesError

OURS, TYPED, RANDOM = "holmes plan", "typed", "random"
PLANNERS = (OURS, TYPED, RANDOM, *sailor.PLANNERS, dtfm.NAME)
#: Random plans of a scene.
DICE = 10
#: Of the clock that counts CPU seconds: a search may take less.
TICK_S = 0.01
#: Regret up to which a plan is as good.
NEAR = 0.03
#: Metrics of one planner on one scene are "PLANNER: one of these".
STEP, PREDICTED, SEARCH, MISFITS, MEASURED, LOSSES, GAP = (
    "step", "predicted by its own model", "seconds of search", "plans before it that do not fit or start",
    "measured step in the lab", "greatest difference of a loss from stock's", "gap of its certificate")
REGRET, NONE = "regret to the best plan of all", "no plan"
LATE, CUT = "no plan within", 3
#: Planners that search as long as they are given time: what they found in less is asked again.
ANYTIME = "Metis", dtfm.NAME
ERROR = "its own prediction against the simulated step"
LAB_ERROR = "the simulated step of its plans against the lab's"


class Table:
    """Rows of the file and those that are new; notes: what a plan was changed to, or why there is none."""

    def __init__(self, path: Path | None):
        self.path, self.rows = path, kept(path)
        self.notes_path = path.with_name(f"{path.stem}_plans.json") if path else None
        known = self.notes_path is not None and self.notes_path.exists()
        self.notes: dict[str, dict] = json.loads(self.notes_path.read_text()) if known else {}

    def has(self, scene: str, planner: str, limit: float) -> bool:
        """Whether it was asked; one without a plan, or one that uses all of its time, with no less time."""
        note = self.notes.get(scene, {}).get(planner)
        if note is None or NONE not in note and planner not in ANYTIME:
            return note is not None
        return note["limit"] >= limit

    def forget(self, scene: str, planner: str) -> None:
        self.notes.get(scene, {}).pop(planner, None)
        self.rows = [row for row in self.rows
                     if row.scene != scene or not row.metric.startswith(f"{planner}: ")]

    def late(self, scenes: Iterable[str], planner: str, limit: float) -> int:
        """How many of the scenes it found nothing for in so much time."""
        own = [self.notes.get(scene, {}).get(planner, {}) for scene in scenes]
        return sum(note.get(NONE, "").startswith(LATE) and note["limit"] >= limit for note in own)

    def row(self, scene: str, planner: str, metric: str) -> Row | None:
        asked = scene, f"{planner}: {metric}"
        return next((row for row in self.rows if (row.scene, row.metric) == asked), None)

    def value(self, scene: str, planner: str, metric: str) -> float | None:
        row = self.row(scene, planner, metric)
        return row.value if row else None

    def add(self, scene: str, planner: str, metric: str, values: list[float], unit: str,
            emulated: bool = False):
        name = f"{planner}: {metric}"
        self.rows = [row for row in self.rows if (row.scene, row.metric) != (scene, name)]
        self.rows.append(Row.median(scene, name, values, unit, emulated))

    def save(self) -> None:
        write(self.rows, self.path)
        if self.notes_path:
            self.notes_path.write_text(json.dumps(self.notes, indent=1) + "\n")


def plans_of(scene: Scene, planner: str, args) -> tuple[list[tuple[Grid, judge.Verdict]], float, int, float]:
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
            found = _fitting(grids[-1:], scene)
            return found, answer.seconds, len(reasons), -1.0
        except HolmesError as error:
            reasons.append(str(error))
    raise HolmesError(f"none of its first {len(answer.plans)} plans starts and fits: {reasons[0]}")


def _fitting(grids: list[Grid], scene: Scene, every: bool = False) -> list[tuple[Grid, judge.Verdict]]:
    """With what is judged of those that fit; HolmesError where none does, or not `every` of one."""
    found = []
    for grid in grids:
        verdict = judge.judged(scene, grid)
        if verdict.fits:
            found.append((grid, verdict))
        elif not every:
            raise HolmesError(f"{grid} does not fit the memory")
    if not found:
        raise HolmesError(f"none of {len(grids)} plans fits the memory")
    return found


def ask(table: Table, scene: Scene, planner: str, args) -> None:
    begin, notes = time.monotonic(), table.notes.setdefault(scene.name, {})
    alike = [name for name, other in load_scenes().items() if other.run == scene.run]
    if table.late(alike, planner, args.limit) >= CUT:
        where = "lab's" if scene.run == LAB else "larger"
        notes[planner] = {NONE: f"not asked: {LATE} {args.limit:g} CPU s on {CUT} of the {where} scenes",
                          "limit": args.limit}
        return table.save()
    try:
        found, seconds, misfits, gap = plans_of(scene, planner, args)
    except HolmesError as error:
        notes[planner] = {NONE: str(error), "limit": args.limit}
        tell(f"{scene.name}: {planner}: no plan: {error}")
        return table.save()
    grid, verdict = sorted(found, key=lambda one: one[1].step_s)[len(found) // 2]
    notes[planner] = {"plan": str(grid), "nodes": grid.nodes, "changed": grid.changed, "sizes": [
        grid.sizes.pipeline, grid.sizes.tensor, grid.sizes.data], "split": grid.split,
        "micro_batch": grid.micro_batch, "limit": args.limit}
    table.add(scene.name, planner, STEP, [own.step_s for _, own in found], "s")
    table.add(scene.name, planner, SEARCH, [seconds], "s")
    table.add(scene.name, planner, MISFITS, [misfits], "")
    if grid.predicted_s:
        table.add(scene.name, planner, PREDICTED, [grid.predicted_s], "s")
    if gap >= 0:
        table.add(scene.name, planner, GAP, [gap], "fraction")
    tell(f"{scene.name}: {planner}: {verdict.step_s:.4g} s, {grid}; {time.monotonic() - begin:.0f} s")
    table.save()


def judge_again(table: Table, scene: Scene) -> None:
    """The plans that FILE has, and others by the dice."""
    for planner, note in table.notes.get(scene.name, {}).items():
        if NONE not in note:
            steps = [judge.judged(scene, judge.grid_of(note)).step_s]
            if planner == RANDOM:
                found = _fitting(judge.random_plans(scene, DICE), scene, every=True)
                steps = [own.step_s for _, own in found]
            table.add(scene.name, planner, STEP, steps, "s")
    table.save()


def in_turns(table: Table, scenes: list[Scene]) -> Iterator[tuple[Scene, list[str]]]:
    """The plans of a scene that a turn runs: of all scenes ours first, then the best of the field, then what
    one types, then the others."""
    for turn in range(4):
        for scene in scenes:
            steps = {name: table.value(scene.name, name, STEP) for name in table.notes.get(scene.name, {})}
            field = sorted((step, name) for name, step in steps.items()
                           if step is not None and name not in (OURS, TYPED, RANDOM))
            best = [name for _, name in field]
            yield scene, [[OURS], best[:1], [TYPED], [*best[1:], RANDOM]][turn]


def run_in_lab(table: Table, scene: Scene, named: list[str], end: float = inf) -> None:
    """The plans of these planners, none begun after `end`; those that found the same one share its run."""
    own = {name: note for name, note in table.notes.get(scene.name, {}).items() if NONE not in note}
    grids, done = {name: judge.grid_of(note) for name, note in own.items()}, {}
    for name, grid in grids.items():
        row, losses = table.row(scene.name, name, MEASURED), table.value(scene.name, name, LOSSES)
        if row is not None and losses is not None:
            done[grid] = lab.Run([row.spread[0], row.value, row.spread[1]], losses)
    for name in named:
        if name not in own or "lab" in own[name] or table.row(scene.name, name, MEASURED) is not None:
            continue
        if grids[name] not in done and time.monotonic() > end:
            continue
        try:
            run = done.get(grids[name]) or lab.run(scene, grids[name])
        except HolmesError as error:
            own[name]["lab"] = f"did not start: {error}"
            tell(f"{scene.name}: {name}: {error}")
            table.save()
            continue
        done[grids[name]] = run
        table.add(scene.name, name, MEASURED, run.steps, "s", True)
        table.add(scene.name, name, LOSSES, [run.loss_difference], "", True)
        tell(f"{scene.name}: {name}: measured {statistics.median(run.steps):.4g} s")
        table.save()


def regrets(table: Table, scenes: list[str]) -> None:
    """Of the simulated steps, and of measured ones where there are some; the best is that of all planners."""
    for scene in scenes:
        for metric, told in ((STEP, REGRET), (MEASURED, f"{REGRET}, measured")):
            steps = {name: table.value(scene, name, metric) for name in table.notes.get(scene, {})}
            known = {name: step for name, step in steps.items() if step is not None}
            best = min(known.values(), default=inf)
            for name, step in known.items():
                table.add(scene, name, told, [step / best - 1], "fraction", metric == MEASURED)


def over_scenes(table: Table, scenes: list[str]) -> list[Row]:
    """Of each planner the medians over the scenes in which it has a plan; then what `holmes plan` must
    reach."""
    found = []
    for planner in PLANNERS:
        asked = [scene for scene in scenes if planner in table.notes[scene]]
        planned = [scene for scene in asked if NONE not in table.notes[scene][planner]]
        if asked:
            what = f"{planner}: scenes with a plan that starts and fits, of {len(asked)}"
            found.append(Row.median("all", what, [len(planned)], "", False))
        for metric, unit in ((REGRET, "fraction"), (SEARCH, "s")):
            values = [table.value(scene, planner, metric) for scene in planned]
            if known := [value for value in values if value is not None]:
                found.append(Row.median("all", f"{planner}: {metric}", known, unit, False))
        for told, true, what in ((PREDICTED, STEP, ERROR), (STEP, MEASURED, LAB_ERROR)):
            pairs = [(table.value(scene, planner, told), table.value(scene, planner, true))
                     for scene in planned]
            if errors := [said / step - 1 for said, step in pairs if said and step]:
                row = Row.median("all", f"{planner}: {what}", errors, "fraction", true == MEASURED)
                found.append(row)
    return found + targets(table, scenes)


def targets(table: Table, scenes: list[str]) -> list[Row]:
    """What `holmes plan` must reach, once the planners of the field were asked on all scenes."""
    field, found = {*sailor.PLANNERS, dtfm.NAME}, []
    if not all(field & {*table.notes.get(scene, {})} for scene in load_scenes()):
        return found
    ours, others, regret, ratios, near = [], [], [], [], []
    for scene in scenes:
        steps = {name: table.value(scene, name, STEP) for name in table.notes[scene]}
        for name in steps:
            if (measured := table.value(scene, name, MEASURED)) is not None:
                (ours if name == OURS else others).append(abs(steps[name] / measured - 1))
        if (value := table.value(scene, OURS, REGRET)) is not None:
            regret.append(value)
        seconds = {name: max(TICK_S, table.value(scene, name, SEARCH)) for name in field if steps.get(name)}
        if seconds:
            spent, best = table.value(scene, OURS, SEARCH), min(filter(None, steps.values()))
            ratios.append(spent / seconds[min(seconds, key=steps.__getitem__)])
            if as_good := [seconds[name] for name in seconds if steps[name] <= (1 + NEAR) * best]:
                near.append(spent / min(as_good))
    for values, what, limits, emulated in (
        (regret, f"{OURS}: {REGRET}", ("<= 0", "<= 0.03"), False),
        (ours, f"{OURS}: error of its prediction against the lab", ("<= 0.03", "<= 0.1"), True),
        (others, "plans of others: error of our prediction against the lab", ("<= 0.03", "<= 0.1"), True),
    ):
        for told, value, limit in (("median", statistics.median, limits[0]), ("worst", max, limits[1])):
            if values:
                own = value(values), "fraction", (min(values), max(values)), emulated, limit
                found.append(Row.of("all", f"{what}, {told}", *own))
    if ratios:
        what = f"{OURS}: seconds of search, times those of the best of the field"
        found.append(Row.median("all", what, ratios, "x", False, "<= 0.2"))
        where = f"within {NEAR:.0%} of the best plan"
        what = f"the field: scenes with a plan {where}, of {len(ratios)}"
        found.append(Row.median("all", what, [len(near)], "", False))
        what = f"{OURS}: there, seconds of search, times those of the fastest of the field {where}"
        found.append(Row.median("all", what, near, "x", False))
    return found


def main() -> int:
    arguments = parser(__doc__.splitlines()[0])
    add = arguments.add_argument
    add("--planners", default="", metavar="NAME,...", help="only these planners")
    add("--limit", type=float, default=600.0, metavar="S", help="CPU seconds of a planner on a scene")
    add("--sailor", type=Path, metavar="DIR", help=f"clone of Sailor's repository; {sailor.HOW}")
    add("--dtfm", type=Path, metavar="DIR", help=f"clone of DT-FM's repository; {dtfm.HOW}")
    add("--python", default=sys.executable, help="that has what Sailor's planners import")
    add("--lab", action="store_true", help="run the plans of the small scenes in the lab")
    add("--minutes", type=float, default=inf, metavar="M", help="after which no run in the lab begins")
    add("--judge", action="store_true", help="judge all plans of FILE again: the simulation has changed")
    add("--again", action="store_true", help="ask these planners on these scenes again")
    add("--picture", type=Path, metavar="PNG", help="draw planners by regret over scenes")
    args, scenes, begin = arguments.parse_args(), load_scenes(), time.monotonic()
    names, planners = chosen(args.scenes, scenes), chosen(args.planners, PLANNERS)
    table = Table(args.json)
    for where, theirs, how in ((args.sailor, sailor.PLANNERS, sailor.HOW),
                               (args.dtfm, (dtfm.NAME,), dtfm.HOW)):
        if not where:
            tell(f"left out: {', '.join(theirs)}: {how}")
            planners = [name for name in planners if name not in theirs]
    for name in names:
        if args.judge:
            judge_again(table, scenes[name])
        for planner in planners:
            if args.again:
                table.forget(name, planner)
            if not table.has(name, planner, args.limit):
                ask(table, scenes[name], planner, args)
    lab_scenes = [scenes[name] for name in names if args.lab and scenes[name].run == LAB]
    for scene, named in in_turns(table, lab_scenes):
        run_in_lab(table, scene, named, begin + 60 * args.minutes)
    every = [name for name in scenes if name in table.notes]
    regrets(table, every)
    table.rows = [row for row in table.rows if row.scene != "all"] + over_scenes(table, every)
    table.save()
    if args.picture:
        draw(table.rows, table.notes, REGRET, PLANNERS, args.picture)
    return finish(table.rows, args.json, "planners by the steps of their plans")


if __name__ == "__main__":
    sys.exit(main())
