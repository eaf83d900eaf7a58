"""Compares two pipeline schedules over slow links between the stages.

    python benchmarks/schedules.py --json FILE [--cases "40 ms; 16 micro-batches",...]

- 1F1B with as many micro-batches in flight as hide the links
- an order of all forward and backward passes of each stage that the planner has searched ("listed",
  by `--holmes-schedule auto`). It needs the same memory.

Steps are simulated. One case also runs in the lab (schedules_lab.py).

The job has 4 stages over 2 clusters with 20 to 80 ms between them, and 8 to 32 micro-batches. A forward
pass takes 20 ms. A backward pass takes twice as long, and half of it is the gradient of the weights,
which may be delayed. The limits of the memory are:

    each stage's    A stage has no more micro-batches in flight than in 1F1B.
    the fullest     Each stage may have as many micro-batches in flight as the first stage of 1F1B,
                    since it has most.

With NCCL the messages of a stage link have a fixed order (runtime/groups/receive_order.py). With gloo no
message waits for its receiver. The lower bound holds for every schedule (planner/schedule/least.py).
"""

from __future__ import annotations

import sys

import schedules_lab
from harness import Row, chosen_cases, finish, kept_rows, parser, tell

from holmes_ext.plan.cost.pipeline import quickest_in_flight, walked_ends
from holmes_ext.plan.schedule import Times
from holmes_ext.planner.schedule.least import least_s
from holmes_ext.planner.schedule.solve import solved

STAGES, PASS_S = 4, 0.02
CASES = {
    f"{ms} ms; {count} micro-batches": (ms / 1000, count)
    for ms in (20, 40, 80)
    for count in (8, 16, 32)
}
#: Case and limit of the memory with a target.
ASKED = "40 ms; 16 micro-batches", "the fullest"


def measure(name: str) -> list[Row]:
    """Compare the schedules of one case, and return the rows of results.

    Args:
        name: A key of CASES.
    """
    between_s, count = CASES[name]  # seconds between the clusters, number of micro-batches
    forward = (PASS_S,) * STAGES  # seconds of each stage
    backward = (2 * PASS_S,) * STAGES
    stage_links = (0.0, between_s, 0.0)
    no_limit = (float("inf"),) * STAGES
    in_flight = quickest_in_flight(  # micro-batches of each stage
        forward, backward, stage_links, count, (0.0,) * len(stage_links), no_limit
    )
    now = max(walked_ends(forward, backward, stage_links, count, in_flight))  # seconds of the step
    rows = [Row.median(name, "1F1B in flight", [now], unit="s", emulated=False)]
    # Limits of the memory: the largest number of micro-batches in flight of each stage.
    per_stage, fullest = tuple(map(float, in_flight)), (float(max(in_flight)),) * STAGES
    for memory, most in (("each stage's", per_stage), ("the fullest", fullest)):
        times = Times(forward, forward, forward, stage_links, count, most)
        schedules = {
            "listed passes": solved(times, in_flight),
            "listed passes, NCCL": solved(times, in_flight, True),  # fixed order of messages
        }
        best = {
            what: min(max(schedule.ends(times)), now)  # the plan keeps 1F1B where no list is faster
            for what, schedule in schedules.items()
        }
        target = ">= 1.1" if (name, memory) == ASKED else ""
        gloo, nccl = best.values()
        for what, value, unit in (
            *((what, value, "s") for what, value in best.items()),
            ("ratio", now / gloo, "x"),
            ("ratio, NCCL", now / nccl, "x"),
            ("ratio that no schedule beats", now / least_s(times), "x"),
        ):
            row_target = target if what in ("ratio", "ratio, NCCL") else ""
            rows.append(
                Row.median(
                    name,
                    f"{what}, memory of {memory}",
                    [value],
                    unit=unit,
                    emulated=False,
                    target=row_target,
                )
            )
    return rows


def main() -> int:
    """Measure the chosen cases, print the table of results, and write the results file."""
    args = parser(__doc__.splitlines()[0]).parse_args()
    known = [*CASES, *schedules_lab.ENGINES_OF]
    names = chosen_cases(args.cases, known)
    rows = kept_rows(args.json, names)
    for name in names:
        rows += measure(name) if name in CASES else schedules_lab.rows(name)
        tell(f"{name}: done")
    rows.sort(key=lambda row: known.index(row.case))
    return finish(rows, args.json, "schedules at the same memory")


if __name__ == "__main__":
    sys.exit(main())
