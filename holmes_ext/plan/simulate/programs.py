"""Passes of a stage with its sends and receives, as an engine orders and awaits them.

An operation is a Pass, or ("post", message) or ("wait", message) with message = ("a" | "g", stage of the model that
sends or is sent to, micro-batch), or ("post", message, sent): a receive whose word follows what was just sent to the
same stage. Virtual stage chunk x p + s passes activations ("a") to the next, which returns
gradients ("g"); both are named by the earlier one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from holmes_ext.plan.cost.pipeline import Pass, passes
from holmes_ext.plan.simulate.events import Op

Message = tuple[str, int, int]


def program(
    engine: str, stage: int, stages: int, micro_batches: int, virtual: int = 1, held: int = 0,
    breadth_first: bool = False,
) -> Iterator[Op]:
    """deepspeed: each operation waits until its message has gone or come, in TrainSchedule's order. megatron: 1F1B's
    pairs (send forward, receive backward and so on) are awaited together. async: receives are posted beforehand and
    awaited before use, sends by nobody (megatron's overlap_p2p_comm, its interleaved schedule here). held: as async,
    with so many micro-batches in flight (patches/deepspeed/edges.py). breadth_first: as async, in that order."""
    order, last = passes(stage, stages, micro_batches, virtual, held, breadth_first), stages * virtual - 1

    def comes(unit: Pass) -> list[Message]:
        """The message that a pass needs."""
        kind, micro_batch, chunk = unit
        place = chunk * stages + stage
        if kind == "F":
            return [("a", place - 1, micro_batch)] if place else []
        return [("g", place, micro_batch)] if place < last else []

    def goes(unit: Pass) -> list[Message]:
        """The message that a pass makes."""
        kind, micro_batch, chunk = unit
        place = chunk * stages + stage
        if kind == "F":
            return [("a", place, micro_batch)] if place < last else []
        return [("g", place - 1, micro_batch)] if place else []

    if virtual > 1 or engine in ("async", "ddp") or held or breadth_first:
        yield from (("post", message) for unit in order for message in comes(unit))
        for unit in order:
            yield from (("wait", message) for message in comes(unit))
            yield unit
            yield from (("post", message) for message in goes(unit))
    elif engine == "megatron":
        # forward_backward_pipelining_without_interleaving: neighbours F B and B F of the steady state exchange at once
        ahead = min(stages - stage - 1, micro_batches)
        steady = range(ahead, len(order) - ahead)
        for index, unit in enumerate(order):
            if not (index in steady and index - 1 in steady):
                yield from _together(comes(unit))
            yield unit
            joined = index in steady and index + 1 in steady
            yield from _together(goes(unit), comes(order[index + 1]) if joined else [])
    else:
        # deepspeed.runtime.pipe.schedule.TrainSchedule: what a pass made is sent at the next step, by even and odd
        # steps; a forward step sends the last gradient before it receives, a backward step receives before it sends
        made: list[Message] = []
        for step in range(2 * (micro_batches + last)):
            forward = step % 2 == stage % 2
            index = (step - stage) // 2 if forward else (step - 2 * stages + stage + 1) // 2
            units: list[Pass] = [("F" if forward else "B", index, 0)] if 0 <= index < micro_batches else []
            needed = [message for unit in units for message in comes(unit)]
            for messages in (made, needed) if forward else (needed, made):
                yield from _together(messages)
            yield from units
            made = [message for unit in units for message in goes(unit)]
        yield from _together(made)


def _together(messages: list[Message], received: Sequence[Message] = ()) -> Iterator[Op]:
    yield from (("post", message) for message in messages)
    yield from (("post", message, *messages) for message in received)
    yield from (("wait", message) for message in (*messages, *received))
