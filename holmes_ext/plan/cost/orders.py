"""What a pipeline stage does in which order: passes of micro-batches, and when it sends and receives.

    gpipe        F F F F B B B B                    Huang et al. 2019 (arXiv 1811.06965)
    1f1b         F F B F B F B B                    Narayanan et al. 2019 (PipeDream-flush); bubble (p - 1) / m of the work
    interleaved  the same with v chunks a stage     Narayanan et al. 2021 (arXiv 2104.04473, sec. 2.2); bubble (p - 1) / (v m)
    zb-h1        B alone is passed on, W fills      Qi et al. 2024 (arXiv 2401.10241, sec. 3.1); idle (p - 1)(F + B - W)

A pass is (kind, micro_batch, chunk), kind "F", "B" or "W". A program is a list of passes and of ("send" | "recv", ...) operations for
plan/simulate/step.py: ("post", what), ("wait", what) with what = ("a" | "g", stage of the model that sends or is sent to, micro_batch).
Virtual stage chunk x p + s passes activations ("a") to the next, which returns gradients ("g"); both are named by the earlier one.
"""

from __future__ import annotations

from collections.abc import Iterator

from holmes_ext.errors import HolmesError

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1")
Pass = tuple[str, int, int]


def passes(schedule: str, stage: int, stages: int, micro_batches: int, virtual: int = 1) -> list[Pass]:
    """The passes of one stage, in order."""
    if schedule not in SCHEDULES:
        raise HolmesError(f"schedule {schedule!r} is none of {', '.join(SCHEDULES)}")
    if schedule != "interleaved" and virtual != 1:
        raise HolmesError(f"schedule {schedule!r} has one chunk on a stage, not {virtual}; 'interleaved' has several")
    if schedule == "gpipe":
        return [("F", m, 0) for m in range(micro_batches)] + [("B", m, 0) for m in range(micro_batches)]
    if schedule == "interleaved":
        return _interleaved(stage, stages, micro_batches, virtual)
    ahead = min(stages - stage - 1, micro_batches)
    order: list[Pass] = [("F", m, 0) for m in range(ahead)]
    for m in range(micro_batches):
        order += [("F", m + ahead, 0)] if m + ahead < micro_batches else []
        order += [("B", m, 0)]
        if schedule == "zb-h1" and m >= stage:  # W lies back by as many micro-batches as the stage is far down: memory as 1F1B's
            order += [("W", m - stage, 0)]
    if schedule == "zb-h1":
        order += [("W", m, 0) for m in range(max(0, micro_batches - stage), micro_batches)]
    return order


def _interleaved(stage: int, stages: int, micro_batches: int, virtual: int) -> list[Pass]:
    if micro_batches % stages:
        raise HolmesError(f"interleaved: {micro_batches} micro-batches are not divisible by {stages} pipeline stages")
    total, group = micro_batches * virtual, stages * virtual

    def unit(kind: str, index: int) -> Pass:
        chunk = index % group // stages
        return kind, index // group * stages + index % stages, chunk if kind == "F" else virtual - 1 - chunk

    ahead = min(total, (stages - stage - 1) * 2 + (virtual - 1) * stages) if micro_batches > stages else total
    order = [unit("F", index) for index in range(ahead)]
    for index in range(total):
        order += [unit("F", index + ahead)] if index + ahead < total else []
        order += [unit("B", index)]
    return order


def program(engine: str, schedule: str, stage: int, stages: int, micro_batches: int, virtual: int = 1) -> Iterator[tuple]:
    """Passes with their sends and receives as `engine` orders and awaits them.

    deepspeed: each waits until its message has gone or come, in TrainSchedule's order. megatron: 1F1B's pairs (send forward, receive
    backward and so on) are awaited together. async: receives are posted beforehand and awaited before use, sends by nobody (megatron's
    overlap_p2p_comm, and its interleaved schedule here).
    """
    order = passes(schedule, stage, stages, micro_batches, virtual)
    if engine == "deepspeed" and schedule == "1f1b":
        yield from _deepspeed(order, stage, stages)
    elif engine == "megatron" and schedule == "1f1b":
        yield from _megatron(order, stage, stages)
    else:
        yield from _async(order, stage, stages, virtual)


def _comes(unit: Pass, stage: int, last: int, stages: int) -> tuple | None:
    """The message that a pass needs."""
    kind, micro_batch, chunk = unit
    place = chunk * stages + stage
    if kind == "F":
        return ("a", place - 1, micro_batch) if place else None
    return ("g", place, micro_batch) if kind == "B" and place < last else None


def _goes(unit: Pass, stage: int, last: int, stages: int) -> tuple | None:
    """The message that a pass makes."""
    kind, micro_batch, chunk = unit
    place = chunk * stages + stage
    if kind == "F":
        return ("a", place, micro_batch) if place < last else None
    return ("g", place - 1, micro_batch) if kind == "B" and place else None


def _together(*messages: tuple | None) -> Iterator[tuple]:
    found = [message for message in messages if message]
    for message in found:
        yield ("post", message)
    for message in found:
        yield ("wait", message)


def _async(order: list[Pass], stage: int, stages: int, virtual: int) -> Iterator[tuple]:
    last = stages * virtual - 1
    for unit in order:
        if message := _comes(unit, stage, last, stages):
            yield ("post", message)
    for unit in order:
        if message := _comes(unit, stage, last, stages):
            yield ("wait", message)
        yield unit
        if message := _goes(unit, stage, last, stages):
            yield ("post", message)


def _megatron(order: list[Pass], stage: int, stages: int) -> Iterator[tuple]:
    """megatron.core's forward_backward_pipelining_without_interleaving: neighbours F B and B F of the steady state exchange at once."""
    last, ahead, total = stages - 1, min(stages - stage - 1, len(order) // 2), len(order)
    steady = range(ahead, total - ahead)
    for index, unit in enumerate(order):
        before, after = _comes(unit, stage, last, stages), _goes(unit, stage, last, stages)
        joined = index in steady and index - 1 in steady
        if not joined:
            yield from _together(before)
        yield unit
        follower = order[index + 1] if index in steady and index + 1 in steady else None
        yield from _together(after, _comes(follower, stage, last, stages) if follower else None)


def _deepspeed(order: list[Pass], stage: int, stages: int) -> Iterator[tuple]:
    """deepspeed.runtime.pipe.schedule.TrainSchedule: what a pass made is sent at the next step, by even and odd steps; a forward step sends
    the last gradient before it receives, a backward step receives before it sends."""
    last = stages - 1
    micro_batches = len(order) // 2
    previous: Pass | None = None
    for step in range(2 * (micro_batches + last)):
        unit = _deepspeed_unit(step, stage, stages, micro_batches)
        valid = 0 <= unit[1] < micro_batches
        sent = _goes(previous, stage, last, stages) if previous else None
        comes = _comes(unit, stage, last, stages) if valid else None
        for message in (sent, comes) if unit[0] == "F" else (comes, sent):
            yield from _together(message)
        if valid:
            yield unit
        previous = unit if valid else None
    if previous:
        yield from _together(_goes(previous, stage, last, stages))


def _deepspeed_unit(step: int, stage: int, stages: int, micro_batches: int) -> Pass:
    if step % 2 == stage % 2:
        return "F", (step - stage) // 2, 0
    return "B", (step - 2 * stages + stage + 1) // 2, 0
