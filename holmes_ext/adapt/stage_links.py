"""Computes the transfer time of a stage link from the times of its messages at both ends.

    rank a   sent ----------------.                 received <-- gradient -.
                                   `-- activation --> received              `-- sent     rank b

The clocks of the two nodes differ. The difference is computed from the quickest message of each
direction, assuming that these two take equally long. The transfer time of a message is then the time
from its start, when it was sent and its receive was posted, until it arrived. Only receives for which
the program waited have a known time of arrival (window.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Receive(NamedTuple):
    """Times of a receive from a neighbouring pipeline stage, in seconds on this rank's clock."""

    posted: float  # start of the receive
    received: float  # end of the receive
    #: True: the program waited for the message, so it arrived at `received`. False: it had arrived
    #: before, at an unknown time.
    was_waited_for: bool


#: Micro-batch -> time of sending its message, in seconds of the sender's clock.
SendTimes = Mapping[int, float]
#: Micro-batch -> times of its receive.
Receives = Mapping[int, Receive]
#: Messages of a training step: [micro-batch, time] for sends, [micro-batch, *Receive] for receives.
_Messages = list[list[Any]]
#: (sending rank, receiving rank) -> messages of each reported step.
_MessagesByRanks = dict[tuple[int, int], list[_Messages]]


class Direction(NamedTuple):
    """Messages of a direction of a stage link (activations, or gradients), in a training step."""

    sent: SendTimes  # on the sender's clock
    received: Receives  # on the receiver's clock

    def raw_seconds(self) -> list[float]:
        """Return the seconds from sending to arrival of each message that the program waited for.

        The two times are those of different clocks, so the clock difference is part of the result.
        """
        return [
            receive.received - self.sent[micro_batch]
            for micro_batch, receive in self.received.items()
            if receive.was_waited_for and micro_batch in self.sent
        ]


def stage_link_of(forward: Direction, backward: Direction) -> float | None:
    """Return the transfer time of a message in seconds, as the mean of both directions.

    The clocks of the two stages differ. The difference is computed from the quickest message of each
    direction, assuming that these two take equally long.

    Args:
        forward: Activations.
        backward: Gradients.

    Returns:
        None if the program waited for no message of a direction.
    """
    raw_forward = forward.raw_seconds()
    raw_backward = backward.raw_seconds()
    if not raw_forward or not raw_backward:
        return None
    # How far the clock of the later stage (it receives activations) is ahead of the other.
    ahead_s = (min(raw_forward) - min(raw_backward)) / 2
    forward_s = _median_seconds(forward, ahead_s)
    backward_s = _median_seconds(backward, -ahead_s)
    return (forward_s + backward_s) / 2


def _median_seconds(direction: Direction, ahead_s: float) -> float:
    """Return the median transfer time, in seconds, of messages that did not queue behind another.

    If all messages had to queue, the shortest time of all messages is returned.

    Args:
        direction: The messages. The receiving program must have waited for at least one of them: only
            for such a message is the time of arrival known.
        ahead_s: How far the receiver's clock is ahead of the sender's, in seconds.
    """
    all_times = []
    times_without_queue = []
    # End of the receive of the previous message: until then, the link may be
    # busy. If the program did not wait for that message, it arrived earlier: this is an upper bound.
    previous_received = float("-inf")
    for micro_batch, receive in sorted(direction.received.items()):
        if receive.was_waited_for and micro_batch in direction.sent:
            # A message begins to move when it was sent and its receive was posted: by the receiver's
            # clock, the later of both times.
            sent_at = direction.sent[micro_batch] + ahead_s
            start = max(sent_at, receive.posted)
            seconds = max(receive.received - start, 0.0)
            all_times.append(seconds)
            if start >= previous_received:  # not behind the previous message
                times_without_queue.append(seconds)
        previous_received = receive.received
    return statistics.median(times_without_queue or [min(all_times)])


def stage_links_of(reports: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Return the transfer times of stage links: stage -> seconds of a message to the next stage.

    The time of a pair of ranks is the median of the reported steps. The time of a stage link is
    that of its slowest pair. Stage links for which no program waited are left out.

    Args:
        reports: Reports of all ranks (StepWindow.report).
    """
    stage_of_rank = {report["rank"]: report["stage"] for report in reports}
    # The times in the sender's report, and those in the receiver's report about the same messages.
    sent: _MessagesByRanks = {}
    received: _MessagesByRanks = {}
    for report in reports:
        # direction: "GROUP sender>receiver", the name of a process group and two ranks.
        for direction, steps in report["messages"].items():
            sender_text, _, receiver_text = direction.rpartition(" ")[2].partition(">")
            ranks = int(sender_text), int(receiver_text)
            messages = sent if ranks[0] == report["rank"] else received
            messages[ranks] = steps
    stage_link_s: dict[int, float] = {}
    for sender, receiver in sent:
        stage = stage_of_rank[sender]
        # Each pair of ranks is handled once: as (rank of a stage, rank of the next stage).
        if stage_of_rank.get(receiver) != stage + 1:
            continue
        pair_s = _seconds_of_pair(sender, receiver, sent, received)
        if pair_s is not None:
            stage_link_s[stage] = max(stage_link_s.get(stage, 0.0), pair_s)
    return stage_link_s


def _seconds_of_pair(
    rank: int, next_rank: int, sent: _MessagesByRanks, received: _MessagesByRanks
) -> float | None:
    """Return the median transfer time of a message between two ranks, over the reported steps.

    Args:
        rank: Rank of a stage.
        next_rank: Rank of the next stage, to which `rank` sends activations.
        sent: Messages with the times in the sender's report.
        received: The same messages with the times in the receiver's report.

    Returns:
        The time in seconds; None if in no step both programs waited for a message.
    """
    forward = rank, next_rank  # activations
    backward = next_rank, rank  # gradients
    seconds_of_steps = []
    for sent_forward, received_forward, sent_backward, received_backward in zip(
        sent.get(forward, []),
        received.get(forward, []),
        sent.get(backward, []),
        received.get(backward, []),
    ):
        seconds = stage_link_of(
            _direction(sent_forward, received_forward),
            _direction(sent_backward, received_backward),
        )
        if seconds is not None:
            seconds_of_steps.append(seconds)
    return statistics.median(seconds_of_steps) if seconds_of_steps else None


def _direction(sent: _Messages, received: _Messages) -> Direction:
    """Join the sender's and the receiver's times of the same messages, in a step.

    Args:
        sent: From the sending rank's report: [micro-batch, time of sending] of each message.
        received: From the receiving rank's report: [micro-batch, posted, received, was_waited_for] of
            each message.
    """
    send_times = {micro_batch: float(sent_at) for micro_batch, sent_at in sent}
    receives = {micro_batch: Receive(*times) for micro_batch, *times in received}
    return Direction(send_times, receives)
