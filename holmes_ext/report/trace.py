"""Shows a training step of every rank: a trace for Chrome or Perfetto, and rows of a timeline picture.

The trace has a process for each rank. Its threads are "compute", and one for each kind of process
group (trace event format of Chrome).
"""

from __future__ import annotations

from typing import Any

from holmes_ext.errors import HolmesError
from holmes_ext.report.files import RankFile, Run

#: Operation of torch.distributed -> kind of the event in the picture.
_PICTURED = {
    "send": "send",
    "receive": "receive",
    "all_reduce": "reduce",
    "reduce_scatter": "reduce",
}
_COMPUTE = "compute"
_US_PER_S = 1e6
_MOST_THREADS = 1000  # limit of the threads of one kind of group
_START = 6  # position of the start in a row of "ops"


def chosen_step(run: Run, step: int | None) -> int:
    """Return the step to show: `step`, or if it is None the last step that is traced on all ranks.

    Args:
        run: Telemetry of all ranks.
        step: Number that the user gave; None if the user gave none.

    Raises:
        HolmesError: There is no such step.
    """
    traced = run.traced()
    folder = run.ranks[0].path.parent
    if not traced:
        raise HolmesError(
            f"{folder}: no step is traced on all ranks (steps 2, 5, 25, 50, ... are): train more steps"
        )
    if step is not None and step not in traced:
        steps = ", ".join(map(str, traced))
        raise HolmesError(f"{folder}: step {step} is not traced on all ranks; these are: {steps}")
    return traced[-1] if step is None else step


def trace(run: Run, step: int) -> dict[str, Any]:
    """Return a step in Chrome's trace event format.

    Times are microseconds since the first rank began the step, on rank 0's clock.

    Args:
        run: Telemetry of all ranks.
        step: Number of a step that is traced on all ranks.
    """
    first_begin = min(rank.steps[step]["begin"] + run.offset(rank) for rank in run.ranks)
    events: list[dict[str, Any]] = []
    for rank in run.ranks:
        events += _events_of(rank, step, run.offset(rank) - first_begin)
    about = {"run": run.head["run"], "step": step, "ranks": len(run.ranks)}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _events_of(rank_file: RankFile, step: int, shift: float) -> list[dict[str, Any]]:
    """Return the trace events of a rank.

    Args:
        rank_file: Telemetry of the rank.
        step: Number of the step.
        shift: Seconds to add to the rank's times, so that the first rank begins the step at 0.
    """
    line = rank_file.steps[step]
    events: list[dict[str, Any]] = []
    threads = {_COMPUTE: 0}  # name of a thread of the trace -> its number
    busy_until: dict[int, float] = {}  # number of a thread -> end of its last event

    def add(
        thread: int, name: str, category: str, start: float, end: float, arguments: dict[str, Any]
    ) -> None:
        """Append an event of this rank to the trace, with its times shifted to the trace's zero.

        Zero is the moment when the first rank began the step.

        Args:
            thread: Row of the event in the trace viewer, by number.
            name: Title of the event.
            category: Category, for the filter of the viewer.
            start: Begin of the event, in seconds on the clock of the rank's node.
            end: End of the event on the same clock.
            arguments: Details that the viewer shows.
        """
        event = {
            "name": name,
            "cat": category,
            "ph": "X",  # a complete event
            "pid": rank_file.rank,
            "tid": thread,
            "ts": (start + shift) * _US_PER_S,
            "dur": (end - start) * _US_PER_S,
            "args": arguments,
        }
        events.append(event)

    compute_thread = threads[_COMPUTE]
    add(
        compute_thread,
        f"step {step}",
        "step",
        line["begin"],
        line["end"],
        {"tokens": line.get("tokens", 0)},
    )
    for kind, start, end in line.get("spans", ()):
        add(compute_thread, kind, _COMPUTE, start, end, {})
    ops = sorted(line["ops"], key=lambda op: op[_START])
    for kind, fabric, name, group, number, peer, start, end, waited, sent in ops:
        end = max(end, start)  # it is 0 if the operation was not over
        arguments = {
            "fabric": fabric,
            "group": group,
            "number": number,
            "peer": peer,
            "waited_ms": waited * 1e3,
            "bytes_sent": sent,
        }
        thread = _free_thread(threads, busy_until, kind, start, end)
        add(thread, name, kind, start, end, arguments)

    process = f"rank {rank_file.rank} on {rank_file.node} ({rank_file.head['cluster']})"
    names = [_name_event("process_name", rank_file.rank, 0, process)]
    for name, thread in threads.items():
        names.append(_name_event("thread_name", rank_file.rank, thread, name))
    return names + events


def _name_event(event: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    """Return a metadata event that names a process or a thread of the trace.

    Args:
        event: "process_name" or "thread_name".
        rank: Rank: a process of the trace.
        thread: Number of the thread in the trace.
        name: The name to show.
    """
    return {"name": event, "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}


def _free_thread(
    threads: dict[str, int], busy_until: dict[int, float], kind: str, start: float, end: float
) -> int:
    """Return a thread without another event at the time of an event; add a thread if necessary.

    The threads of a kind are named "data", "data 2", "data 3", ... If no thread is free and there
    are _MOST_THREADS - 1 of the kind, the last thread is returned: events overlap in it.

    Args:
        threads: Name of a thread -> its number.
        busy_until: Number of a thread -> end of its last event.
        kind: Kind of the event's process group.
        start: Start of the event.
        end: End of the event.
    """
    # number: of the thread among those of its kind. thread: its number in the whole trace. If the
    # loop ends without a break, `thread` is the last thread.
    for number in range(1, _MOST_THREADS):
        name = kind if number == 1 else f"{kind} {number}"
        thread = threads.setdefault(name, len(threads))
        if busy_until.get(thread, float("-inf")) <= start:
            break
    busy_until[thread] = end
    return thread


def pictured(run: Run, step: int) -> list[dict[str, Any]]:
    """Return the events of a step for the timeline picture, in seconds on rank 0's clock.

    Args:
        run: Telemetry of all ranks.
        step: Number of a step that is traced on all ranks.

    Returns:
        A dict for each rank: "rank", "node", "events" as rows [kind, start, end, bytes], and
        "step": (first begin, last end) of the step on any rank, the same in all dicts.
    """
    begin = min(rank.steps[step]["begin"] + run.offset(rank) for rank in run.ranks)
    end = max(rank.steps[step]["end"] + run.offset(rank) for rank in run.ranks)
    traces = []
    for rank in run.ranks:
        offset = run.offset(rank)
        line = rank.steps[step]
        events = []
        for kind, span_start, span_end in line.get("spans", ()):  # spans of computation
            if kind in ("forward", "backward", "optimizer"):
                events.append([kind, span_start + offset, span_end + offset, 0])
        for op in line["ops"]:
            # All columns of an operation. The picture needs its name, its times and the sent bytes.
            _kind, _fabric, name, _group, _number, _peer, op_start, op_end, _waited, sent = op
            if op_end:  # 0: not over when the step ended
                kind = _PICTURED.get(name, "collective")
                events.append([kind, op_start + offset, op_end + offset, sent])
        traces.append(
            {"rank": rank.rank, "node": rank.node, "events": events, "step": (begin, end)}
        )
    return traces
