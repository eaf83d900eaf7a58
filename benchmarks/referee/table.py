"""Keeps the results of all planners: their metrics on each case, and medians over the cases.

A row is a metric of a planner on a case, such as the simulated step of its plan. Two metrics
are derived from the others: the regret of a plan (how much longer its step is than that of the best
plan of all planners, relative), and the error of a predicted step.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from math import inf
from pathlib import Path

from harness import Row, kept_rows, write

from referee import dtfm, sailor
from referee.cases import load_cases

OURS, TYPED, RANDOM = "holmes plan", "typed", "random"
PLANNERS = (OURS, TYPED, RANDOM, *sailor.PLANNERS, dtfm.NAME)
#: Resolution of the clock that counts CPU seconds.
TICK_S = 0.01
#: Largest regret of a plan that counts as equally good.
NEAR = 0.03
#: Metrics. That of a planner on a case is named "PLANNER: METRIC".
STEP, PREDICTED, SEARCH, MISFITS, MEASURED, LOSSES, GAP = (
    "step",
    "predicted by its own model",
    "seconds of search",
    "plans before it that do not fit or start",
    "measured step in the lab",
    "greatest difference of a loss from stock's",
    "optimality gap",
)
REGRET, NONE = "regret to the best plan of all", "no plan"
LATE = "no plan within"
#: Planners that use all of their time. They run again if the limit has become longer.
ANYTIME = "Metis", dtfm.NAME
ERROR = "its own prediction against the simulated step"
LAB_ERROR = "the simulated step of its plans against the lab's"


class Table:
    """Rows of the results file and new rows, and notes about the plans."""

    def __init__(self, path: Path | None):
        """Load the rows of a results file, and the plans beside it (NAME_plans.json).

        Args:
            path: The results file; None keeps nothing.
        """
        self.path, self.rows = path, kept_rows(path)
        self.notes_path = path.with_name(f"{path.stem}_plans.json") if path else None
        known = self.notes_path is not None and self.notes_path.exists()
        self.notes: dict[str, dict] = json.loads(self.notes_path.read_text()) if known else {}

    def has(self, case: str, planner: str, limit: float) -> bool:
        """Return whether a planner need not run again, because its result on a case is in the file.

        A planner that found no plan, or that always uses all of its time (ANYTIME), runs again if
        it had fewer than `limit` CPU seconds.
        """
        # A note has the plan of a planner, or under the key NONE the reason why there is none. It
        # also has the CPU seconds that the planner was given ("limit").
        note = self.notes.get(case, {}).get(planner)
        if note is None:
            return False
        has_plan = NONE not in note
        if has_plan and planner not in ANYTIME:
            return True
        return note["limit"] >= limit

    def forget(self, case: str, planner: str) -> None:
        """Remove the results of a planner on a case."""
        self.notes.get(case, {}).pop(planner, None)
        self.rows = [
            row
            for row in self.rows
            if row.case != case or not row.metric.startswith(f"{planner}: ")
        ]

    def late(self, cases: Iterable[str], planner: str, limit: float) -> int:
        """Return for how many of the cases a planner has found no plan in `limit` CPU seconds."""
        notes = [self.notes.get(case, {}).get(planner, {}) for case in cases]
        return sum(note.get(NONE, "").startswith(LATE) and note["limit"] >= limit for note in notes)

    def row(self, case: str, planner: str, metric: str) -> Row | None:
        """Return the row with a metric of a planner's plan for a case, None if there is no such row."""
        key = case, f"{planner}: {metric}"
        return next((row for row in self.rows if (row.case, row.metric) == key), None)

    def value(self, case: str, planner: str, metric: str) -> float | None:
        """Return the value of a metric of a planner's plan for a case, None if there is no such row."""
        row = self.row(case, planner, metric)
        return row.value if row else None

    def add(
        self,
        case: str,
        planner: str,
        metric: str,
        values: list[float],
        unit: str,
        emulated: bool = False,
        busy: float | None = None,
    ):
        """Add the median of some values as a row for a planner and a metric on a case.

        An earlier row with the same case, planner and metric is removed.

        Args:
            case: Name of the planning problem.
            planner: Name of the planner.
            metric: Name of the metric, without the planner. The row's metric is "PLANNER: METRIC".
            values: The row has their median and their spread.
            emulated: Whether the values were measured on emulated GPUs.
            busy: How busy this machine's cores were during the measurement; None: not measured.
        """
        name = f"{planner}: {metric}"
        self.rows = [row for row in self.rows if (row.case, row.metric) != (case, name)]
        self.rows.append(Row.median(case, name, values, unit=unit, emulated=emulated, busy=busy))

    def save(self) -> None:
        """Write the results file and the file of plans."""
        write(self.rows, self.path)
        if self.notes_path:
            self.notes_path.write_text(json.dumps(self.notes, indent=1) + "\n")


def regrets(table: Table, cases: list[str]) -> None:
    """Add the regret of each planner on each case: step of its plan / step of the best plan - 1.

    The best plan is that of the planner with the shortest step on the case. There are regrets of
    simulated steps, and of measured steps if there are any.

    Args:
        table: The results of all planners. It gets the regrets.
        cases: Names of the cases.
    """
    for case in cases:
        for metric, regret in ((STEP, REGRET), (MEASURED, f"{REGRET}, measured")):
            steps = {name: table.value(case, name, metric) for name in table.notes.get(case, {})}
            known = {name: step for name, step in steps.items() if step is not None}
            best = min(known.values(), default=inf)
            for name, step in known.items():
                table.add(case, name, regret, [step / best - 1], "fraction", metric == MEASURED)


def over_cases(table: Table, cases: list[str]) -> list[Row]:
    """Return rows with each planner's medians over all cases for which it has a plan.

    The metrics are the number of such cases, the CPU seconds of the search, and the regret: how
    much longer the step is than that of the best plan of all planners. Two further metrics are
    errors of predictions: of the planner's own cost model against the simulation, and of the
    simulation against runs on emulated clusters. Rows with the targets of `holmes plan` follow.

    Args:
        table: The results of all planners.
        cases: Names of the cases that have been planned.
    """
    rows = []
    for planner in PLANNERS:
        tried = [case for case in cases if planner in table.notes[case]]
        # A note with the key NONE says why the planner has no plan.
        planned = [case for case in tried if NONE not in table.notes[case][planner]]
        if tried:
            metric = f"{planner}: cases with a plan that starts and fits, of {len(tried)}"
            rows.append(Row.median("all", metric, [len(planned)], unit="", emulated=False))
        for metric, unit in ((REGRET, "fraction"), (SEARCH, "s")):
            values = [table.value(case, planner, metric) for case in planned]
            if known := [value for value in values if value is not None]:
                rows.append(
                    Row.median("all", f"{planner}: {metric}", known, unit=unit, emulated=False)
                )
        # (metric with a predicted step, metric with the step that it is compared with, name of the
        # error). STEP is the simulated step of the planner's plan. It is compared with the
        # planner's own prediction (PREDICTED), and with a run in the lab (MEASURED).
        for predicted, actual, what in ((PREDICTED, STEP, ERROR), (STEP, MEASURED, LAB_ERROR)):
            pairs = [
                (table.value(case, planner, predicted), table.value(case, planner, actual))
                for case in planned
            ]
            if errors := [
                prediction / step - 1 for prediction, step in pairs if prediction and step
            ]:
                row = Row.median(
                    "all",
                    f"{planner}: {what}",
                    errors,
                    unit="fraction",
                    emulated=actual == MEASURED,
                )
                rows.append(row)
    # targets() returns the rows that compare `holmes plan` with its targets.
    return rows + targets(table, cases)


def targets(table: Table, cases: list[str]) -> list[Row]:
    """Return rows that compare `holmes plan` with its targets.

    One target is for its regret: how much longer its step is than that of the best plan of all
    planners. Others are for the error of simulated steps against runs on emulated clusters, and for
    the search time relative to the published planners. There are no rows before other planners have
    run on every case.

    Args:
        table: The results of all planners.
        cases: Names of the cases that have been planned.
    """
    field = {*sailor.PLANNERS, dtfm.NAME}  # the published planners
    if not all(field & {*table.notes.get(case, {})} for case in load_cases()):
        return []
    # Errors of the simulated steps against the lab, for plans of holmes and of other planners.
    ours = []
    others = []
    regret = []  # of holmes, on each case
    ratios = []  # search time of holmes : that of the planner with the best plan, on each case
    near = []  # the same to the fastest planner within NEAR of the best plan
    for case in cases:
        steps = {name: table.value(case, name, STEP) for name in table.notes[case]}
        for name in steps:
            measured = table.row(case, name, MEASURED)
            if measured is not None and not measured.machine_was_busy:
                errors = ours if name == OURS else others
                errors.append(abs(steps[name] / measured.value - 1))
        regret_of_case = table.value(case, OURS, REGRET)
        if regret_of_case is not None:
            regret.append(regret_of_case)
        # CPU seconds of the searches of published planners that have found a plan.
        seconds = {name: _searched_s(table, case, name) for name in field if steps.get(name)}
        if not seconds:
            continue
        ours_s = table.value(case, OURS, SEARCH)
        planner_of_best_plan = min(seconds, key=lambda name: (steps[name], seconds[name]))  # noqa: B023
        ratios.append(ours_s / seconds[planner_of_best_plan])
        best_step_s = min(filter(None, steps.values()))
        near_best = [name for name in seconds if steps[name] <= (1 + NEAR) * best_step_s]
        if near_best:
            near.append(ours_s / min(seconds[name] for name in near_best))
    rows = []
    for values, what, limits, emulated in (
        (regret, f"{OURS}: {REGRET}", ("<= 0", "<= 0.03"), False),
        (ours, f"{OURS}: error of its prediction against the lab", ("<= 0.03", "<= 0.1"), True),
        (
            others,
            "plans of others: error of our prediction against the lab",
            ("<= 0.03", "<= 0.1"),
            True,
        ),
    ):
        for label, summarize, limit in (
            ("median", statistics.median, limits[0]),
            ("worst", max, limits[1]),
        ):
            if values:
                row = Row.of(
                    "all",
                    f"{what}, {label}",
                    summarize(values),
                    unit="fraction",
                    spread=(min(values), max(values)),
                    emulated=emulated,
                    target=limit,
                )
                rows.append(row)
    if ratios:
        what = f"{OURS}: seconds of search, times those of the best of the field"
        rows.append(Row.median("all", what, ratios, unit="x", emulated=False, target="<= 0.2"))
        where = f"within {NEAR:.0%} of the best plan"
        what = f"the field: cases with a plan {where}, of {len(ratios)}"
        rows.append(Row.median("all", what, [len(near)], unit="", emulated=False))
        what = f"{OURS}: there, seconds of search, times those of the fastest of the field {where}"
        rows.append(Row.median("all", what, near, unit="x", emulated=False))
        rows.append(_search_time_ratio(table, cases, field))
    return rows


def _searched_s(table: Table, case: str, planner: str) -> float:
    """Return the CPU seconds of a search, at least TICK_S (the clock's resolution).

    The search time of holmes is divided by this number, which must not be 0.
    """
    return max(TICK_S, table.value(case, planner, SEARCH))


def _search_time_ratio(table: Table, cases: list[str], field: set[str]) -> Row:
    """Return a row with the search time of holmes, divided by that of the best published planner.

    It is the median ratio of CPU seconds over all cases for which that planner has a plan. The
    target is at most 0.2. The best planner has the smallest median regret (how much longer its
    steps are than those of the best plans), and plans for more than half of the cases.

    Args:
        table: The results of all planners.
        cases: Names of the cases that have been planned.
        field: Names of the published planners.
    """
    planned_cases = {}  # planner -> cases for which it has a plan
    median_regret = {}  # planner -> regret, if it plans more than half of the cases
    for planner in sorted(field):
        regret_of = {case: table.value(case, planner, REGRET) for case in cases}
        regrets = {case: regret for case, regret in regret_of.items() if regret is not None}
        planned_cases[planner] = list(regrets)
        if 2 * len(regrets) > len(cases):
            median_regret[planner] = statistics.median(regrets.values())
    best_other = min(median_regret, key=median_regret.__getitem__)
    ratios = [
        # The divisor is _searched_s(): the CPU seconds of the search, but never 0.
        table.value(case, OURS, SEARCH) / _searched_s(table, case, best_other)
        for case in planned_cases[best_other]
    ]
    # Ratio: search time of holmes / that of `best_other`, the best published planner by median
    # regret.
    metric = f"{OURS}: seconds of search, times those of {best_other}, next by its median regret"
    return Row.median("all", metric, ratios, unit="x", emulated=False, target="<= 0.2")
