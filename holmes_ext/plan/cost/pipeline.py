"""A pipeline's step: the order of a stage's passes, the end of its last backward, and what follows that.

    stage 0  F F F F    B   B   B   B [reduce]   each stage reduces its gradients right after its own last
    stage 1    F F F B F B ...  B [reduce]       backward, as DeepSpeed's and Megatron's 1F1B do; the later
                step ends with the last of them -^   the stage, the earlier

    1F1B           F F B F B F B B               Narayanan et al. 2019 (PipeDream-flush): bubble (p - 1) / m
    interleaved    the same, v chunks a stage    Narayanan et al. 2021 (arXiv 2104.04473): (p - 1) / (v m)
    breadth-first  F F F F B B B B, chunk by     Lamy-Poirier 2022 (arXiv 2211.05953): a chunk's gradients are
                   chunk                         final long before those of the first

All in seconds, tuples by stage; transfer: of one activation over each stage link, as of its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, inf

from holmes_ext.errors import HolmesError
from holmes_ext.plan.schedule import passes

Seconds = Sequence[float]
#: Part of a stage's forward and backward that a stage link may take unhidden: what holmes's own sends cost is
#: about as much.
SMALL = 0.01
#: A step of so many times the micro-batches in flight settles at the slowest stage's pace; more in flight
#: than that needs must save this part of a shorter one.
SETTLED, WORTH_MORE = 4, 0.005


def uniform(layers: int, parts: int) -> tuple[int, ...]:
    """The same number for each part, the first ones one more (DeepSpeed's and Megatron's rule)."""
    if layers < parts:
        raise HolmesError(
            f"{layers} layers are too few for {parts} pipeline stages; every stage needs one"
        )
    return tuple(layers // parts + (part < layers % parts) for part in range(parts))


def in_flight(
    busy: Seconds,
    transfer: Seconds,
    micro_batches: int,
    load: Seconds = (),
    most: Sequence[float] = (),
    pace_s: float = 0.0,
) -> tuple[int, ...]:
    """Micro-batches that each stage must have begun and not ended, at most, so that no stage link is
    waited for.

    With k[s] of them a stage's backward of m follows its forward of m + k[s] - 1. So a micro-batch goes from
    stage s to t, there the backward of an earlier one follows, comes back, and s goes on k[s] - k[t] + 1
    micro-batches later: that many paces must be as long as the busy seconds of s..t and the stage
    links between,
    there and back. The pace is that of the slowest stage, or stage link: load is the part of transfer
    in which an
    stage link carries nothing else (not its latency). Free stage links and equal stages: 1F1B's p - s,
    which is the least of all. A fiftieth of a pass more is none.

    most: of each stage, as many as its memory holds. Where they are fewer, the least pace is taken that needs
    no more than those; 1F1B's own are the framework's to fit. pace_s: of stages that may take longer, instead
    of the slowest's.
    """
    of_1f1b = range(len(busy), 0, -1)
    room = [max(limit, least) for limit, least in zip(most, of_1f1b)] or [inf] * len(busy)
    fast, slow = max((*((pace_s,) if pace_s else busy), *load)), sum(busy) + 2 * sum(transfer)

    def counts_at(pace: float) -> list[int]:
        return [min(count, micro_batches) for count in _counts_at(busy, transfer, pace)]

    counts = counts_at(fast)
    if any(count > holds for count, holds in zip(counts, room)):
        for _ in range(
            30
        ):  # bisection: a longer pace needs no more of them, the longest 1F1B's own
            middle = (fast + slow) / 2
            enough = all(count <= holds for count, holds in zip(counts_at(middle), room))
            fast, slow = (fast, middle) if enough else (middle, slow)
        counts = counts_at(slow)
    return tuple(counts)


@lru_cache(maxsize=64)
def quickest_in_flight(
    forward: tuple[float, ...],
    backward: tuple[float, ...],
    transfer: tuple[float, ...],
    micro_batches: int,
    load: tuple[float, ...] = (),
    most: tuple[float, ...] = (),
) -> tuple[int, ...]:
    """in_flight's, or as many as the mean stage's pace needs where that makes the step shorter: with few
    micro-batches faster stages work ahead, and messages have more time."""
    busy = [f + b for f, b in zip(forward, backward)]
    counts = in_flight(busy, transfer, micro_batches, load, most)
    if micro_batches > SETTLED * counts[0]:
        return counts
    more = in_flight(busy, transfer, micro_batches, load, most, sum(busy) / len(busy))
    if more == counts:
        return counts
    now, then = (
        max(walked_ends(forward, backward, transfer, micro_batches, numbers))
        for numbers in (counts, more)
    )
    return more if then < now * (1 - WORTH_MORE) else counts


def both_ways(
    transfer: Seconds, load: Seconds, nics: Sequence[tuple[int, int]], busy_s: float
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """`transfer` and `load` where stages first..final of `nics` send to both sides through one NIC, and that
    takes longer than the slowest stage is busy: it carries both for each micro-batch, so nearly every message
    meets one of the other stage link and takes longer by the shorter of both. (The longer one may be
    limited by a link, not by the NIC.)"""
    seconds, loads = list(transfer), list(load)
    for first, final in nics:
        shared = min(load[first - 1], load[final])
        for stage_link in (first - 1, final) if 2 * shared > busy_s else ():
            seconds[stage_link] = max(seconds[stage_link], transfer[stage_link] + shared)
            loads[stage_link] = max(loads[stage_link], 2 * shared)
    return tuple(seconds), tuple(loads)


def schedule(
    forward: tuple[float, ...],
    backward: tuple[float, ...],
    transfer: tuple[float, ...],
    micro_batches: int,
    load: tuple[float, ...] = (),
    most: tuple[float, ...] = (),
) -> tuple[int, ...]:
    """quickest_in_flight's; () where the framework's own schedule is as fast and stage links take little."""
    result = quickest_in_flight(forward, backward, transfer, micro_batches, load, most)
    if max(transfer, default=0.0) > SMALL * max(f + b for f, b in zip(forward, backward)):
        return result
    of_1f1b = tuple(min(count, micro_batches) for count in range(len(forward), 0, -1))
    if result == of_1f1b:
        return ()
    now, then = (
        max(walked_ends(forward, backward, transfer, micro_batches, numbers))
        for numbers in (of_1f1b, result)
    )
    return result if then < now * (1 - WORTH_MORE) else ()


def _counts_at(busy: Seconds, transfer: Seconds, pace_s: float) -> list[int]:
    """in_flight's number for one pace; a stage that takes longer counts as if it did not."""
    result, last = [1] * len(busy), len(busy) - 1
    for stage in reversed(range(last)):
        trip_s = min(busy[stage], pace_s)
        for other in range(stage + 1, last + 1):
            trip_s += min(busy[other], pace_s) + 2 * transfer[other - 1]
            result[stage] = max(result[stage], result[other] - 1 + ceil(trip_s / pace_s - 0.02))
        result[stage] = max(result[stage], len(busy) - stage)
    return result


def pace(busy: Seconds, transfer: Seconds) -> float:
    """From one micro-batch to the next under 1F1B; busy: forward and backward of each stage. The slowest run
    of neighbouring stages s..t decides: (sum of busy[s..t] + 2 x transfers between them) / (t - s + 1), found
    by Dinkelbach's method."""
    best = top = max(busy)
    while True:
        total, count = busy[-1], 1
        for stage in reversed(range(len(busy) - 1)):
            hop = 2 * transfer[stage]
            # the run from the next stage on is slower than the pace, with its stage link
            onward = total + hop > best * count
            total, count = (total + hop + busy[stage], count + 1) if onward else (busy[stage], 1)
            top = max(top, total / count)
        if top <= best * (1 + 1e-13):
            return best
        best = top


def formula_ends(
    forward: Seconds,
    backward: Seconds,
    transfer: Seconds,
    micro_batches: int,
    virtual: int = 1,
    load_s: float = 0.0,
    hidden: Seconds | None = None,
    nics: Sequence[tuple[int, int]] = (),
) -> list[float]:
    """When each stage ends its last backward: the first micro-batch goes down and back, the others follow at
    the pace, the last backward runs up. Exact for equal stages and free stage links, (m + p - 1)(f +
    b); else up to
    20 % too long. hidden: load of each stage link (in_flight) where enough micro-batches are in flight
    to hide them. virtual, load_s: as in StageCosts; nics: as in walked_ends."""
    busy = [f + b for f, b in zip(forward, backward)]
    hops = 2 * sum(transfer)
    if hidden is not None:
        both = (hidden[first - 1] + hidden[final] for first, final in nics)
        ends = [sum(busy) + hops + (micro_batches - 1) * max((*busy, *hidden, *both))]
    elif virtual == 1:
        ends = [sum(busy) + hops + (micro_batches - 1) * pace(busy, transfer)]
    else:
        ends = [sum(busy) / virtual + hops + (micro_batches - 1 / virtual) * max(*busy, load_s)]
    for stage, stage_link in enumerate(transfer):
        ends.append(ends[-1] - backward[stage] / virtual - stage_link)
    return ends


def walked_ends(
    forward: Seconds,
    backward: Seconds,
    transfer: Seconds,
    micro_batches: int,
    in_flight: Sequence[int] = (),
    load: Seconds = (),
    nics: Sequence[tuple[int, int]] = (),
) -> list[float]:
    """The same pass by pass, one chunk a stage: each after the one before it on its stage and what it needs
    of its neighbour. in_flight: micro-batches by stage, if not 1F1B's; load: part of transfer in which
    a stage link carries nothing else, () where sends block; nics: first and last stage of those that
    send to both neighbours through one NIC."""
    last = len(forward) - 1
    ahead, load = in_flight or range(last + 1, 0, -1), load or (0.0,) * last
    orders = [
        passes(stage, last + 1, micro_batches, in_flight=ahead[stage]) for stage in range(last + 1)
    ]
    # of each stage, by micro-batch: when its message has left, but for the latency
    left: dict[str, list[list[float]]] = {kind: [[] for _ in orders] for kind in "FB"}
    clock, place = [0.0] * len(orders), [0] * len(orders)
    while place[0] < len(orders[0]):
        for stage, order in enumerate(orders):
            while place[stage] < len(order):
                kind, micro_batch, _ = order[place[stage]]
                seconds, ready = (forward if kind == "F" else backward)[stage], 0.0
                neighbour = stage - 1 if kind == "F" else stage + 1
                if 0 <= neighbour <= last:
                    if len(left[kind][neighbour]) <= micro_batch:
                        break
                    ready = left[kind][neighbour][micro_batch] + transfer[min(stage, neighbour)]
                clock[stage] = max(clock[stage], ready) + seconds
                stage_link = stage if kind == "F" else stage - 1
                free = (
                    left[kind][stage][-1] + load[stage_link]
                    if micro_batch and 0 <= stage_link < last
                    else 0.0
                )
                left[kind][stage].append(max(clock[stage], free))
                place[stage] += 1
    least = {
        first - 1: _sent_s(forward, backward, transfer, load, first, final, micro_batches)
        for first, final in nics
    }
    for stage in reversed(range(last)):
        after_s = clock[stage + 1] + transfer[stage] + backward[stage]
        clock[stage] = max(clock[stage], after_s, least.get(stage, 0.0))
    return clock


def _sent_s(
    forward: Seconds,
    backward: Seconds,
    transfer: Seconds,
    load: Seconds,
    first: int,
    final: int,
    micro_batches: int,
) -> float:
    """When stage first - 1 has ended its last backward, at the earliest, where stages first..final send and
    receive everything through one NIC, from the first activation to the last gradient."""
    before, stage_link = first - 1, transfer[first - 1]
    sends = sum(forward[: final + 1]) + sum(transfer[:final]) + stage_link - load[before]
    receives = (
        sum(forward[:first])
        + sum(transfer[:before])
        + transfer[final]
        - load[final]
        + sum(backward[first : final + 1])
        + sum(transfer[first:final])
        + stage_link
    )
    return micro_batches * (load[before] + load[final]) + max(sends, receives) + backward[before]


@dataclass(frozen=True)
class Estimate:
    """One step; tuples by stage. compute_s: all micro-batches. transfer_s: one activation to the next stage,
    by stage link. reduction_s: all of it; exposed_s: what is left after the stage's last backward,
    with a tied
    embedding's all-reduce. end_s: when the stage has ended all. stage_layers, memory_bytes, fits, in_flight
    (of each stage): where layers were given to stages (plan/cost/stages.py)."""

    compute_s: tuple[float, ...]
    transfer_s: tuple[float, ...]
    reduction_s: tuple[float, ...]
    exposed_s: tuple[float, ...]
    end_s: tuple[float, ...]
    stage_layers: tuple[int, ...] = ()
    memory_bytes: tuple[float, ...] = ()
    fits: tuple[bool, ...] = ()
    in_flight: tuple[int, ...] = ()

    @property
    def step_s(self) -> float:
        return max(self.end_s)

    @property
    def idle_s(self) -> tuple[float, ...]:
        """Neither computing nor reducing after its backward: bubble, transfers, waiting for others."""
        return tuple(
            self.step_s - compute - exposed
            for compute, exposed in zip(self.compute_s, self.exposed_s)
        )

    @property
    def waited_s(self) -> float:
        """What reductions add after the first stage's last backward."""
        return self.step_s - (self.end_s[0] - self.exposed_s[0])
