"""One step of every rank on one time axis: as a trace for Chrome and Perfetto, and as the picture of report/pictures.py.

The trace event format (chrome://tracing, ui.perfetto.dev): a process for each rank, threads "compute" and one for each kind of group.
"""

from __future__ import annotations

from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.report.files import RankFile, Run

#: Operation -> the picture's kind.
_PICTURED = {"send": "send", "receive": "receive", "all_reduce": "reduce", "reduce_scatter": "reduce"}
_COMPUTE = "compute"


def chosen_step(run: Run, step: int | None) -> int:
    """The given step, or the last one that is traced on all ranks; HolmesError when there is none."""
    traced = run.traced()
    if not traced:
        raise HolmesError(f"{run.ranks[0].path.parent}: no step is traced on all ranks (steps 2, 5, 25, 50, ... are): train some more steps")
    if step is not None and step not in traced:
        raise HolmesError(f"{run.ranks[0].path.parent}: step {step} is not traced on all ranks; these are: {', '.join(map(str, traced))}")
    return traced[-1] if step is None else step


def trace(run: Run, step: int) -> dict[str, Any]:
    """The JSON object: complete events ("X") in microseconds of rank 0's clock, from the first rank's begin on, and names ("M")."""
    zero = min(one.steps[step]["begin"] + run.offset(one) for one in run.ranks)
    events: list[dict[str, Any]] = []
    for one in run.ranks:
        events += _events_of(one, step, run.offset(one) - zero)
    about = {"run": run.head["run"], "step": step, "ranks": len(run.ranks)}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _events_of(one: RankFile, step: int, shift: float) -> list[dict[str, Any]]:
    line = one.steps[step]
    lanes = {_COMPUTE: 0}
    events = [_complete(one.rank, 0, f"step {step}", "step", line["begin"], line["end"], shift, {"tokens": line.get("tokens", 0)})]
    events += [_complete(one.rank, 0, kind, _COMPUTE, start, end, shift, {}) for kind, start, end in line.get("spans", ())]
    busy: dict[int, float] = {}
    for kind, fabric, name, group, number, peer, start, end, waited, sent in sorted(line["ops"], key=lambda op: op[6]):
        lane = _lane(lanes, busy, kind, start, max(end, start))
        about = {"fabric": fabric, "group": group, "number": number, "peer": peer, "waited_ms": waited * 1e3, "bytes_sent": sent}
        events.append(_complete(one.rank, lane, name, kind, start, max(end, start), shift, about))
    names = [{"name": "process_name", "ph": "M", "pid": one.rank, "tid": 0, "args": {"name": f"rank {one.rank} on {one.node} ({one.head['cluster']})"}}]
    names += [{"name": "thread_name", "ph": "M", "pid": one.rank, "tid": lane, "args": {"name": name}} for name, lane in lanes.items()]
    return names + events


def _lane(lanes: dict[str, int], busy: dict[int, float], kind: str, start: float, end: float) -> int:
    """A thread of this kind that is free at `start`: events of one thread may not cross each other."""
    for number in range(1, 1000):
        name = kind if number == 1 else f"{kind} {number}"
        lane = lanes.setdefault(name, len(lanes))
        if busy.get(lane, float("-inf")) <= start:
            break
    busy[lane] = end
    return lane


def _complete(rank: int, lane: int, name: str, category: str, start: float, end: float, shift: float, about: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "cat": category, "ph": "X", "pid": rank, "tid": lane, "ts": (start + shift) * 1e6, "dur": (end - start) * 1e6, "args": about}


def pictured(run: Run, step: int) -> list[dict[str, Any]]:
    """The step as holmes_ext.report.pictures.timeline_figure takes it: rows of [kind, start, end, bytes] on one clock."""
    ends = [one.steps[step]["end"] + run.offset(one) for one in run.ranks]
    begins = [one.steps[step]["begin"] + run.offset(one) for one in run.ranks]
    traces = []
    for one in run.ranks:
        shift, line = run.offset(one), one.steps[step]
        events = [[kind, start + shift, end + shift, 0] for kind, start, end in line.get("spans", ()) if kind in ("forward", "backward", "optimizer")]
        for _, _, name, _, _, _, start, end, _, sent in line["ops"]:
            if end:
                events.append([_PICTURED.get(name, "collective"), start + shift, end + shift, sent])
        traces.append({"rank": one.rank, "node": one.node, "events": events, "step": (min(begins), max(ends))})
    return traces
