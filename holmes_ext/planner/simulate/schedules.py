"""Passes of a stage with its sends and receives, as an engine orders and awaits them.

An operation is a Pass, or ("post", message) or ("wait", message). message = ("a" | "g", place, micro-batch):
the stage of the model at `place` sends an activation to the next, which returns a gradient; both go by the
earlier one. ("post", message, sent): a receive whose notice follows what was just sent to the same stage.
Chunk c of stage s stands at c x stages + s.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from holmes_ext.plan.engine import AWAITED, PAIRED
from holmes_ext.plan.schedule import Pass, PassOrder, passes
from holmes_ext.planner.simulate.events import Op

Message = tuple[str, int, int]
_KINDS = {"a": "F", "g": "B"}


def schedule(
    sends: str,
    stage: int,
    stages: int,
    micro_batches: int,
    virtual: int = 1,
    in_flight: int = 0,
    breadth_first: bool = False,
    planned: PassOrder | None = None,
) -> Iterator[Op]:
    """sends: of plan/engine.py's SENDS. Receives are posted beforehand where chunks are interleaved,
    breadth-first, or `in_flight` or `planned` passes are given: at the step's begin, or as these have it."""
    ends = _Ends(stage, stages, stages * virtual - 1)
    if planned:
        listed = [(letter, micro_batch, 0) for letter, micro_batch in planned.stages[stage]]
        return _posted(listed, ends, planned if planned.leads else None)
    order = passes(stage, stages, micro_batches, virtual, in_flight, breadth_first)
    if virtual > 1 or in_flight or breadth_first or sends not in (AWAITED, PAIRED):
        return _posted(order, ends)
    if sends == PAIRED:
        return _paired(order, ends, min(stages - stage - 1, micro_batches))
    return _awaited(ends, micro_batches)


class _Ends:
    """What a pass of a stage needs, and makes."""

    def __init__(self, stage: int, stages: int, last: int):
        self.stage, self.stages, self.last = stage, stages, last

    def needs(self, stage_pass: Pass) -> list[Message]:
        kind, micro_batch, chunk = stage_pass
        place = chunk * self.stages + self.stage
        if kind == "F":
            return [("a", place - 1, micro_batch)] if place else []
        return [("g", place, micro_batch)] if place < self.last and kind != "W" else []

    def makes(self, stage_pass: Pass) -> list[Message]:
        kind, micro_batch, chunk = stage_pass
        place = chunk * self.stages + self.stage
        if kind == "F":
            return [("a", place, micro_batch)] if place < self.last else []
        return [("g", place - 1, micro_batch)] if place and kind != "W" else []


def _posted(order: Sequence[Pass], ends: _Ends, planned: PassOrder | None = None) -> Iterator[Op]:
    posts: dict[Message | None, list[Op]] = defaultdict(list)  # by what was sent before them
    for message in (message for stage_pass in order for message in ends.needs(stage_pass)):
        kind, place, number = message
        after = planned.posted_after(place, _KINDS[kind], number) if planned else None
        posts[("g" if kind == "a" else "a", place, after[1]) if after else None].append(
            ("post", message)
        )
    yield from posts[None]
    for stage_pass in order:
        yield from (("wait", message) for message in ends.needs(stage_pass))
        yield stage_pass
        for message in ends.makes(stage_pass):
            yield from (("post", message), *posts[message])


def _paired(order: Sequence[Pass], ends: _Ends, ahead: int) -> Iterator[Op]:
    """megatron-core's 1F1B: in the steady state a pass's output is exchanged for the next one's input."""
    steady = range(ahead, len(order) - ahead)
    for index, stage_pass in enumerate(order):
        if not (index in steady and index - 1 in steady):
            yield from _together(ends.needs(stage_pass))
        yield stage_pass
        joined = index in steady and index + 1 in steady
        yield from _together(ends.makes(stage_pass), ends.needs(order[index + 1]) if joined else [])


def _awaited(ends: _Ends, micro_batches: int) -> Iterator[Op]:
    """deepspeed.runtime.pipe.schedule.TrainSchedule: what a pass made is sent at the next step, by even and
    odd steps. A forward step sends the last gradient before it receives, a backward step receives before it
    sends."""
    stage, stages = ends.stage, ends.stages
    to_send: list[Message] = []
    for step in range(2 * (micro_batches + ends.last)):
        forward = step % 2 == stage % 2
        index = (step - stage) // 2 if forward else (step - 2 * stages + stage + 1) // 2
        current: list[Pass] = (
            [("F" if forward else "B", index, 0)] if 0 <= index < micro_batches else []
        )
        to_receive = [message for stage_pass in current for message in ends.needs(stage_pass)]
        for messages in (to_send, to_receive) if forward else (to_receive, to_send):
            yield from _together(messages)
        yield from current
        to_send = [message for stage_pass in current for message in ends.makes(stage_pass)]
    yield from _together(to_send)


def _together(messages: Sequence[Message], received: Sequence[Message] = ()) -> Iterator[Op]:
    yield from (("post", message) for message in messages)
    yield from (("post", message, *messages) for message in received)
    yield from (("wait", message) for message in (*messages, *received))
