"""What a pipeline's stage links take, of the times at which messages were sent at one end and came at
the other.

    rank a   sent ----------------.                 came  <-- gradient ---.
                                   `-- activation -->  came                `-- sent     rank b

The two nodes' clocks differ. Of the messages that were alone on their way the quickest takes as long in both
directions, by which the difference is known; then each took from when it was sent, and the other end waited
for it, until it came. Only receives that the program stood still for tell when that was (window.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

#: Micro-batch -> when it was sent (sender's clock); when its receive was posted, when the program had it, and
#: whether it stood still for it until then (receiver's clock).
Sent = Mapping[int, float]
Came = Mapping[int, tuple[float, float, bool]]


def stage_link_of(forward: tuple[Sent, Came], backward: tuple[Sent, Came]) -> float | None:
    """Seconds of a message, mean of both directions; None where none of one of them was waited for."""
    raw = [
        [
            came - sent[index]
            for index, (_, came, waited) in received.items()
            if waited and index in sent
        ]
        for sent, received in (forward, backward)
    ]
    if not all(raw):
        return None
    ahead = (min(raw[0]) - min(raw[1])) / 2  # the clock of the activations' receiver
    return (_median(*forward, ahead) + _median(*backward, -ahead)) / 2


def _median(sent: Sent, received: Came, ahead: float) -> float:
    """Of the messages that had no earlier one in their way; of all where there are none."""
    alone, every, last = [], [], float("-inf")
    for index, (posted, came, waited) in sorted(received.items()):
        start = max(sent.get(index, posted - ahead) + ahead, posted)
        if waited and index in sent:
            every.append(max(came - start, 0.0))
            alone += every[-1:] if start >= last else []
        last = came
    return statistics.median(alone or [min(every)])


def stage_links_of(reports: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Stage -> seconds that an activation takes to the next stage: of each pair of ranks the median of the
    reported steps, of the pairs the slowest. Stage links that nobody waited for are left out."""
    stage = {report["rank"]: report["stage"] for report in reports}
    sent: dict[tuple[int, int], list[list[list[Any]]]] = {}
    came: dict[tuple[int, int], list[list[list[Any]]]] = {}
    for report in reports:
        for direction, steps in report["messages"].items():
            source, _, to = direction.rpartition(" ")[2].partition(">")
            (sent if int(source) == report["rank"] else came)[int(source), int(to)] = steps
    stage_link_s: dict[int, float] = {}
    for sender, receiver in sent:
        if stage.get(receiver) != stage[sender] + 1:
            continue
        pairs = (sender, receiver), (receiver, sender)
        steps = (messages.get(pair, []) for pair in pairs for messages in (sent, came))
        by_step = [_of_step(*step) for step in zip(*steps)]
        if waited := [seconds for seconds in by_step if seconds is not None]:
            stage_link_s[stage[sender]] = max(
                stage_link_s.get(stage[sender], 0.0), statistics.median(waited)
            )
    return stage_link_s


def _of_step(
    sent: list[Any], came: list[Any], sent_back: list[Any], came_back: list[Any]
) -> float | None:
    directions = [
        (dict(ours), {index: (*times,) for index, *times in theirs})
        for ours, theirs in ((sent, came), (sent_back, came_back))
    ]
    return stage_link_of(*directions)
