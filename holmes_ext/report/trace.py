"""One step of every rank, as a trace for Chrome and Perfetto and as rows of the timeline picture.

The trace event format: a process for each rank, threads "compute" and one for each kind of group.
"""

from __future__ import annotations

from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.report.files import RankFile, Run

#: Operation -> the picture's kind.
_PICTURED = {
    "send": "send",
    "receive": "receive",
    "all_reduce": "reduce",
    "reduce_scatter": "reduce",
}
_COMPUTE = "compute"


def chosen_step(run: Run, step: int | None) -> int:
    """The given step, or the last one that is traced on all ranks; HolmesError when there is none."""
    traced, place = run.traced(), run.ranks[0].path.parent
    if not traced:
        raise HolmesError(
            f"{place}: no step is traced on all ranks (steps 2, 5, 25, 50, ... are): train more steps"
        )
    if step is not None and step not in traced:
        these = ", ".join(map(str, traced))
        raise HolmesError(f"{place}: step {step} is not traced on all ranks; these are: {these}")
    return traced[-1] if step is None else step


def trace(run: Run, step: int) -> dict[str, Any]:
    """Complete events ("X") in microseconds from the first rank's begin, on one clock, and names."""
    zero = min(rank.steps[step]["begin"] + run.offset(rank) for rank in run.ranks)
    events: list[dict[str, Any]] = []
    for rank in run.ranks:
        events += _events_of(rank, step, run.offset(rank) - zero)
    about = {"run": run.head["run"], "step": step, "ranks": len(run.ranks)}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _events_of(rank_file: RankFile, step: int, shift: float) -> list[dict[str, Any]]:
    line, events = rank_file.steps[step], []
    lanes: dict[str, int] = {_COMPUTE: 0}
    busy: dict[int, float] = {}

    def add(
        lane: int, name: str, category: str, start: float, end: float, about: dict[str, Any]
    ) -> None:
        times = {"ts": (start + shift) * 1e6, "dur": (end - start) * 1e6}
        events.append(
            {
                "name": name,
                "cat": category,
                "ph": "X",
                "pid": rank_file.rank,
                "tid": lane,
                **times,
                "args": about,
            }
        )

    add(0, f"step {step}", "step", line["begin"], line["end"], {"tokens": line.get("tokens", 0)})
    for kind, start, end in line.get("spans", ()):
        add(0, kind, _COMPUTE, start, end, {})
    for kind, fabric, name, group, number, peer, start, end, waited, sent in sorted(
        line["ops"], key=lambda op: op[6]
    ):
        end = max(end, start)
        about = {"fabric": fabric, "group": group, "number": number, "peer": peer}
        add(
            _lane(lanes, busy, kind, start, end),
            name,
            kind,
            start,
            end,
            {**about, "waited_ms": waited * 1e3, "bytes_sent": sent},
        )
    names = [
        (
            "process_name",
            0,
            f"rank {rank_file.rank} on {rank_file.node} ({rank_file.head['cluster']})",
        )
    ]
    names += [("thread_name", lane, name) for name, lane in lanes.items()]
    return [
        {"name": what, "ph": "M", "pid": rank_file.rank, "tid": lane, "args": {"name": name}}
        for what, lane, name in names
    ] + events


def _lane(
    lanes: dict[str, int], busy: dict[int, float], kind: str, start: float, end: float
) -> int:
    """A thread of this kind that is free at `start`: events of one thread may not cross each other."""
    for number in range(1, 1000):
        lane = lanes.setdefault(kind if number == 1 else f"{kind} {number}", len(lanes))
        if busy.get(lane, float("-inf")) <= start:
            break
    busy[lane] = end
    return lane


def pictured(run: Run, step: int) -> list[dict[str, Any]]:
    """Of each rank rows of [kind, start, end, bytes] on one clock."""
    ends = [rank.steps[step]["end"] + run.offset(rank) for rank in run.ranks]
    begins = [rank.steps[step]["begin"] + run.offset(rank) for rank in run.ranks]
    traces = []
    for rank in run.ranks:
        shift, line = run.offset(rank), rank.steps[step]
        events = [
            [kind, start + shift, end + shift, 0]
            for kind, start, end in line.get("spans", ())
            if kind in ("forward", "backward", "optimizer")
        ]
        events += [
            [_PICTURED.get(name, "collective"), start + shift, end + shift, sent]
            for _, _, name, _, _, _, start, end, _, sent in line["ops"]
            if end
        ]
        traces.append(
            {
                "rank": rank.rank,
                "node": rank.node,
                "events": events,
                "step": (min(begins), max(ends)),
            }
        )
    return traces
