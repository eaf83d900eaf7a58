"""Duration of a pipeline's step: the order of each stage's passes, and when they end.

Each stage reduces its gradients right after its own last backward pass, as DeepSpeed's and Megatron's 1F1B
do, so the first stage starts last and usually decides the end of the step:

    stage 0  F F F F    B   B   B   B [reduce]   <- the step ends
    stage 1    F F F B F B ...  B [reduce]

With p stages, m micro-batches and v chunks per stage, the schedules are:

    1F1B           F F B F B F B B          bubble (p - 1) / m
                                            (Narayanan et al. 2019, PipeDream-flush)
    interleaved    the same, with v chunks  bubble (p - 1) / (v m)
                                            (Narayanan et al. 2021, arXiv 2104.04473)
    breadth-first  F F F F B B B B, chunk   the gradients of a chunk are final long before those of the first
                   by chunk                 (Lamy-Poirier 2022, arXiv 2211.05953)

All times are in seconds, in sequences by stage. `transfer` has an entry for each stage link (from a stage to
the next stage): the time of an activation. Its gradient takes as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, inf
from typing import TYPE_CHECKING

from holmes_ext.errors import HolmesError
from holmes_ext.plan.schedule import passes
from holmes_ext.words import counted

if TYPE_CHECKING:
    from holmes_ext.options import Options

Seconds = Sequence[float]
#: Stage links below this part of a stage's passes are not hidden: holmes' sends cost about as much.
NEGLIGIBLE_LINK_SHARE = 0.01
#: With more micro-batches than this times those in flight, the slowest stage decides the step.
SETTLED = 4
#: More micro-batches in flight are used only if they save this part of the step.
WORTH_MORE = 0.005
#: Part of a pass by which a rounded-up number of micro-batches may be short.
_ROUNDING_PASS = 0.02
_BISECTIONS = 30
#: Relative difference at which Dinkelbach's method has converged.
_CONVERGED = 1e-13


def uniform(layers: int, parts: int) -> tuple[int, ...]:
    """Split layers evenly into parts; the first parts get a layer more (DeepSpeed's and Megatron's rule).

    Raises:
        HolmesError: There are fewer layers than parts.
    """
    if layers < parts:
        problem = f"{counted(layers, 'layer', 'are')} too few for {parts} pipeline stages"
        raise HolmesError(f"{problem}; every stage needs one")
    return tuple(layers // parts + (part < layers % parts) for part in range(parts))


def in_flight(
    busy: Seconds,
    transfer: Seconds,
    micro_batches: int,
    load: Seconds = (),
    most: Sequence[float] = (),
    pace_s: float = 0.0,
) -> tuple[int, ...]:
    """Return the micro-batches in flight, by stage, with which no stage waits for a stage link.

    The pace is the time between two micro-batches: that of the slowest stage or stage link. With
    k[s] in flight, stage s begins a micro-batch k[s] paces before it ends its backward pass, and a
    later stage t k[t] paces before. The difference, and a pace for stage t itself, is the time of
    the trip from s to t and back:

        (k[s] - k[t] + 1) pace  >=  sum of busy[s..t]  +  2 x sum of transfer[s..t-1]

    With free stage links and equal stages this is 1F1B, p - s for stage s of p: the least possible.

    Args:
        busy: Seconds of a forward and a backward pass together.
        transfer: Seconds of an activation over each stage link.
        micro_batches: Micro-batches per step; the results are never larger.
        load: Part of `transfer` that occupies the stage link (without latency).
        most: Largest number that fits each stage's memory. If the needed numbers do not fit, the result is
            that of the shortest pace that fits. 1F1B's own numbers always count as fitting.
        pace_s: Seconds between micro-batches to aim at; 0: those of the slowest stage.
    """
    stages = len(busy)
    of_1f1b = range(stages, 0, -1)  # micro-batches in flight, by stage: 1 on the last
    limits = [max(limit, least) for limit, least in zip(most, of_1f1b)] or [inf] * stages
    stages_s = (pace_s,) if pace_s else busy
    fastest_s = max((*stages_s, *load))  # no pace is faster than the slowest stage or stage link

    def counts_at(pace: float) -> list[int]:
        """Return the micro-batches in flight that a time of `pace` seconds between micro-batches needs."""
        return [min(count, micro_batches) for count in _counts_at(busy, transfer, pace)]

    def fit(counts: Sequence[int]) -> bool:
        """Return whether each stage's memory holds its number of micro-batches in flight."""
        return all(count <= limit for count, limit in zip(counts, limits))

    counts = counts_at(fastest_s)
    if fit(counts):
        return tuple(counts)
    # A bisection finds the shortest pace that fits: a longer pace never needs more micro-batches in flight.
    # If a micro-batch passes all stages there and back within a pace, those of 1F1B suffice, and these fit.
    slowest_s = sum(busy) + 2 * sum(transfer)
    for _ in range(_BISECTIONS):
        middle_s = (fastest_s + slowest_s) / 2
        if fit(counts_at(middle_s)):
            slowest_s = middle_s
        else:
            fastest_s = middle_s
    return tuple(counts_at(slowest_s))


@lru_cache(maxsize=64)
def quickest_in_flight(
    forward: tuple[float, ...],
    backward: tuple[float, ...],
    transfer: tuple[float, ...],
    micro_batches: int,
    load: tuple[float, ...] = (),
    most: tuple[float, ...] = (),
) -> tuple[int, ...]:
    """Return the number of micro-batches in flight on each stage, of the faster of two schedules.

    Both have enough in flight that no stage waits for a stage link (see in_flight). They aim at
    different times from one micro-batch to the next: that of the slowest stage, or the mean of all
    stages. The mean is shorter, so it needs more in flight. With few micro-batches per step it may
    be faster: fast stages work ahead of the slowest stage.

    Args:
        forward: Seconds of a forward pass, by stage.
        backward: Seconds of a backward pass, by stage.
        transfer: Seconds of an activation over each stage link.
        micro_batches: Micro-batches per step.
        load: Part of `transfer` that occupies the stage link.
        most: Largest number of micro-batches that fits each stage's memory.
    """
    busy = [forward_s + backward_s for forward_s, backward_s in zip(forward, backward)]
    counts = in_flight(busy, transfer, micro_batches, load=load, most=most)
    if micro_batches > SETTLED * counts[0]:  # many more than fit into the pipeline at once
        return counts  # the pace of the slowest stage decides the step
    mean_s = sum(busy) / len(busy)
    more_counts = in_flight(busy, transfer, micro_batches, load=load, most=most, pace_s=mean_s)
    if more_counts == counts:
        return counts

    def step_s(numbers: tuple[int, ...]) -> float:
        """Return when the last stage ends, in seconds, with these numbers of micro-batches in flight."""
        return max(walked_ends(forward, backward, transfer, micro_batches, numbers))

    # More activations need more memory, so they must save the share WORTH_MORE of the step.
    is_worth_it = step_s(more_counts) < step_s(counts) * (1 - WORTH_MORE)
    return more_counts if is_worth_it else counts


def share_nics(
    transfer: Seconds, load: Seconds, nics: Sequence[tuple[int, int]], busy_s: float
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the times of stage links, longer for two stage links that share a busy NIC.

    Such a NIC sends a message to the previous and another to the next stage, for each micro-batch.
    Sent at the same time, each gets half of the rate until the shorter message ends: they overlap for
    twice its time. An overlap longer than the computation of the slowest stage slows the step.

    Args:
        transfer: Seconds of an activation over each stage link.
        load: Part of `transfer` that occupies the stage link.
        nics: (first, last) stage of each run of stages that sends to both sides through the same NIC.
        busy_s: Seconds of a forward and a backward pass on the slowest stage.

    Returns:
        The longer `transfer` and the longer `load`, by stage link.
    """
    transfer_s = list(transfer)
    load_s = list(load)
    for first, last in nics:
        # Stage links first - 1 (before these stages) and last (after them) share the NIC.
        shared_s = min(load[first - 1], load[last])  # of the shorter message; delays both
        if 2 * shared_s <= busy_s:
            continue  # the overlap is no longer than the slowest stage computes
        for stage_link in (first - 1, last):
            shared_transfer_s = transfer[stage_link] + shared_s
            transfer_s[stage_link] = max(transfer_s[stage_link], shared_transfer_s)
            load_s[stage_link] = max(load_s[stage_link], 2 * shared_s)
    return tuple(transfer_s), tuple(load_s)


def schedule(
    forward: tuple[float, ...],
    backward: tuple[float, ...],
    transfer: tuple[float, ...],
    micro_batches: int,
    load: tuple[float, ...] = (),
    most: tuple[float, ...] = (),
) -> tuple[int, ...]:
    """Return the number of micro-batches in flight on each stage that makes the step shortest.

    Args:
        forward: Seconds of a forward pass, by stage.
        backward: Seconds of a backward pass, by stage.
        transfer: Seconds of an activation over each stage link.
        micro_batches: Micro-batches per step.
        load: Part of `transfer` that occupies the stage link.
        most: Largest number of micro-batches that fits each stage's memory.

    Returns:
        Number of forward passes that each stage runs before its first backward pass. (): keep the
        framework's own schedule (1F1B); stage links take little time, and it is as fast.
    """
    counts = quickest_in_flight(forward, backward, transfer, micro_batches, load, most)
    slowest_s = max(forward_s + backward_s for forward_s, backward_s in zip(forward, backward))
    if max(transfer, default=0.0) > NEGLIGIBLE_LINK_SHARE * slowest_s:
        return counts  # a stage link is slow enough to be worth hiding
    of_1f1b = tuple(min(count, micro_batches) for count in range(len(forward), 0, -1))
    if counts == of_1f1b:
        return ()

    def step_s(numbers: tuple[int, ...]) -> float:
        """Return when the last stage ends, in seconds, with these numbers of micro-batches in flight."""
        return max(walked_ends(forward, backward, transfer, micro_batches, numbers))

    is_worth_it = step_s(counts) < step_s(of_1f1b) * (1 - WORTH_MORE)
    return counts if is_worth_it else ()


def _counts_at(busy: Seconds, transfer: Seconds, pace_s: float) -> list[int]:
    """Return the least numbers of micro-batches in flight, by stage, that a given pace needs.

    With fewer, some stage would wait for a message. The trip of a micro-batch from stage s to stage
    t and back must be hidden. So k, the result, is the least solution, for all stages s < t, of
    (k[s] - k[t] + 1) pace_s >= sum of busy[s..t] + 2 x sum of transfer[s..t-1] (see in_flight), and
    at least 1F1B's numbers. busy[s] counts as pace_s at most.

    Args:
        busy: Seconds of a forward and a backward pass together, by stage.
        transfer: Seconds of an activation over each stage link; a gradient takes as long.
        pace_s: Seconds from one micro-batch to the next.
    """
    stages = len(busy)
    counts = [1] * stages
    for stage in reversed(range(stages - 1)):
        # Right side of the inequality: a micro-batch's trip from `stage` to `other` and back.
        trip_s = min(busy[stage], pace_s)
        for other in range(stage + 1, stages):
            trip_s += min(busy[other], pace_s) + 2 * transfer[other - 1]
            # The inequality, solved for k[s]. An excess below _ROUNDING_PASS costs no further micro-batch.
            needed = counts[other] - 1 + ceil(trip_s / pace_s - _ROUNDING_PASS)
            counts[stage] = max(counts[stage], needed)
        of_1f1b = stages - stage
        counts[stage] = max(counts[stage], of_1f1b)
    return counts


def pace(busy: Seconds, transfer: Seconds) -> float:
    """Return the seconds from a micro-batch to the next under 1F1B.

    A run of stages s..t holds t - s + 1 micro-batches at once, and each makes a round trip through it. So the
    slowest run decides: the maximum over all runs of

        (sum of busy[s..t] + 2 x sum of transfer[s..t-1]) / (t - s + 1)

    Dinkelbach's method (1967) finds it: for a guess, find the run whose sum exceeds guess x stages most
    (a maximal subarray, Kadane's algorithm); its ratio is the next guess, until no ratio is larger.

    Args:
        busy: Seconds of a forward and a backward pass together, by stage.
        transfer: Seconds of an activation over each stage link.
    """
    guess_s = largest_s = max(busy)  # ratio of the slowest run of a single stage
    while True:
        run_s = busy[-1]  # seconds of the slowest run that begins with `stage`, below
        count = 1  # stages in that run
        for stage in reversed(range(len(busy) - 1)):
            link_s = 2 * transfer[stage]  # an activation and a gradient
            if run_s + link_s > guess_s * count:  # the run after `stage` is worth adding
                run_s = run_s + link_s + busy[stage]
                count += 1
            else:  # begin a new run
                run_s = busy[stage]
                count = 1
            largest_s = max(largest_s, run_s / count)
        if largest_s <= guess_s * (1 + _CONVERGED):
            return guess_s
        guess_s = largest_s


def formula_ends(
    forward: Seconds,
    backward: Seconds,
    transfer: Seconds,
    micro_batches: int,
    virtual: int = 1,
    load_s: float = 0.0,
    link_load_s: Seconds | None = None,
    nics: Sequence[tuple[int, int]] = (),
) -> list[float]:
    """Compute by a formula when each stage ends its last backward pass, in seconds.

    The first micro-batch travels to the last stage and back, the others follow at the pace of the pipeline,
    and the last gradient travels to the first stage. This is exact for equal stages and free stage links,
    (m + p - 1) (f + b); otherwise it is up to 20 % too long.

    Args:
        forward: Seconds of a forward pass, by stage.
        backward: Seconds of a backward pass, by stage.
        transfer: Seconds of an activation over each stage link.
        micro_batches: Micro-batches per step.
        virtual: Chunks per stage.
        load_s: Seconds that a NIC needs to send a micro-batch of all chunks of a stage (interleaved).
        link_load_s: Part of `transfer` that occupies the stage link, if enough micro-batches are in
            flight to hide the stage links; None under the framework's own schedule (StageCosts).
        nics: (first, last) stage of runs on the same nodes that send to both sides through the same NIC.
    """
    busy = [forward_s + backward_s for forward_s, backward_s in zip(forward, backward)]
    links_s = 2 * sum(transfer)
    if link_load_s is not None:  # hidden stage links: the slowest stage, link or NIC sets the pace
        # Links first - 1 (before the run) and last (after it) share a NIC, so their times add up.
        nics_s = (link_load_s[first - 1] + link_load_s[last] for first, last in nics)
        pace_s = max((*busy, *link_load_s, *nics_s))
        first_end_s = sum(busy) + links_s + (micro_batches - 1) * pace_s
    elif virtual == 1:  # 1F1B: stages wait for messages (see pace)
        first_end_s = sum(busy) + links_s + (micro_batches - 1) * pace(busy, transfer)
    else:  # interleaved, the only use of load_s: a chunk travels, all other chunks follow it
        pace_s = max(*busy, load_s)
        first_end_s = sum(busy) / virtual + links_s + (micro_batches - 1 / virtual) * pace_s
    # A gradient travels from the last stage to the first, so later stages end earlier.
    ends = [first_end_s]
    for stage, link_s in enumerate(transfer):
        ends.append(ends[-1] - backward[stage] / virtual - link_s)
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
    """Simulate all passes, and return when each stage ends its last backward pass, in seconds.

    A pass starts when its stage is free and its message has arrived. Each stage has a single chunk.

    Args:
        forward: Seconds of a forward pass, by stage.
        backward: Seconds of a backward pass, by stage.
        transfer: Seconds of an activation over each stage link.
        micro_batches: Micro-batches per step.
        in_flight: Micro-batches in flight on each stage; (): those of 1F1B.
        load: Part of `transfer` that occupies the stage link; (): sends block.
        nics: (first, last) stage of runs on the same nodes that send to both sides through the same NIC.
    """
    stages = len(forward)
    last = stages - 1
    counts = in_flight or range(stages, 0, -1)
    load = load or (0.0,) * last
    orders = [
        passes(stage, stages, micro_batches, in_flight=counts[stage]) for stage in range(stages)
    ]
    # kind of pass -> stage -> micro-batch -> when its message has left the stage, without latency
    left: dict[str, list[list[float]]] = {"F": [[] for _ in orders], "B": [[] for _ in orders]}
    clock = [0.0] * stages  # when each stage has ended its latest pass
    position = [0] * stages  # of the next pass in each stage's order
    while position[0] < len(orders[0]):
        for stage, order in enumerate(orders):
            while position[stage] < len(order):
                kind, micro_batch, _ = order[position[stage]]
                if kind == "F":
                    seconds = forward[stage]
                    sender = stage - 1
                    stage_link = stage
                else:
                    seconds = backward[stage]
                    sender = stage + 1
                    stage_link = stage - 1
                ready = 0.0  # when the message that the pass needs has arrived
                if 0 <= sender <= last:
                    if len(left[kind][sender]) <= micro_batch:
                        break  # not sent yet: continue with the next stage
                    ready = left[kind][sender][micro_batch] + transfer[min(stage, sender)]
                clock[stage] = max(clock[stage], ready) + seconds
                link_free = 0.0  # when the stage link has carried the message before this one
                if micro_batch and 0 <= stage_link < last:
                    link_free = left[kind][stage][-1] + load[stage_link]
                left[kind][stage].append(max(clock[stage], link_free))
                position[stage] += 1
    # The passes above do not wait for NICs that two stage links share. Lower bounds take these into account.
    least_end = {
        first - 1: _least_end_s(forward, backward, transfer, load, first, final, micro_batches)
        for first, final in nics
    }
    for stage in reversed(range(last)):
        # If the next stage ends later, so does this one: its last gradient arrives later.
        after_s = clock[stage + 1] + transfer[stage] + backward[stage]
        clock[stage] = max(clock[stage], after_s, least_end.get(stage, 0.0))
    return clock


def asked_in_flight(options: Options, stages: int, micro_batches: int) -> tuple[int, ...]:
    """Return the micro-batches in flight on each stage that --holmes-inflight sets; (): it sets none.

    The option is a number of micro-batches more than 1F1B has. It does not apply to the last stage.
    """
    if options.inflight in ("auto", "off"):
        return ()
    extra = int(options.inflight)
    of_1f1b = range(stages, 0, -1)
    counts = [count + extra if count > 1 else count for count in of_1f1b]  # 1: the last stage
    return tuple(min(count, micro_batches) for count in counts)


def _least_end_s(
    forward: Seconds,
    backward: Seconds,
    transfer: Seconds,
    load: Seconds,
    first: int,
    final: int,
    micro_batches: int,
) -> float:
    """Return a lower bound on the time at which stage `first` - 1 ends its last backward pass.

    Stages `first` to `final` are on the same nodes. For each micro-batch, their NIC sends an
    activation to the next stage and a gradient to stage `first` - 1. It is busy for the time of all
    these messages, and idle before the first can be sent and after the last has left. Busy time
    plus idle time is a bound; the same for receiving is another. The result is the larger bound,
    plus the last backward pass.

    Args:
        forward: Seconds of a forward pass, by stage.
        backward: Seconds of a backward pass, by stage.
        transfer: Seconds of an activation over each stage link.
        load: Part of `transfer` that occupies the stage link.
        first: First of the stages that share the NIC.
        final: Last of the stages that share the NIC.
        micro_batches: Micro-batches per step.
    """
    before = first - 1  # number of the stage before them, and of the stage link from it
    link_before_s = transfer[before]
    messages_s = micro_batches * (load[before] + load[final])
    # The NIC cannot send before the first activation leaves stage `final`, nor after the last
    # gradient has left stage `first`: then only the latency of this message is left.
    until_first_send_s = sum(forward[: final + 1]) + sum(transfer[:final])
    not_sending_s = until_first_send_s + link_before_s - load[before]
    # It cannot receive before the first activation leaves the stage before `first`, nor after the
    # last gradient has reached stage `final`: this gradient then travels through stages `final` to
    # `first`.
    until_first_receive_s = sum(forward[:first]) + sum(transfer[:before])
    not_receiving_s = (
        until_first_receive_s
        + transfer[final]
        - load[final]
        + sum(backward[first : final + 1])
        + sum(transfer[first:final])
        + link_before_s
    )
    # The last gradient has arrived: stage `first` - 1 runs its last backward pass.
    return messages_s + max(not_sending_s, not_receiving_s) + backward[before]


@dataclass(frozen=True)
class Estimate:
    """Predicted times of a step; tuples are by stage."""

    compute_s: tuple[float, ...]  # of all micro-batches
    transfer_s: tuple[float, ...]  # of an activation, by stage link
    reduction_s: tuple[float, ...]  # the whole reduction, hidden or not
    exposed_s: tuple[float, ...]  # reduction and tied weights after the stage's last backward pass
    end_s: tuple[float, ...]  # when the stage has ended everything
    # Empty if the prediction is not about a partition (plan/cost/stages.py):
    stage_layers: tuple[int, ...] = ()
    memory_bytes: tuple[float, ...] = ()
    fits: tuple[bool, ...] = ()  # whether memory_bytes is within the GPU's memory
    in_flight: tuple[int, ...] = ()  # micro-batches; (): those of the framework's own schedule

    @property
    def step_s(self) -> float:
        """Return the duration of the step, in seconds."""
        return max(self.end_s)

    @property
    def idle_s(self) -> tuple[float, ...]:
        """Return the seconds in which each stage neither computes nor reduces: bubble and transfers."""
        return tuple(
            self.step_s - compute - exposed
            for compute, exposed in zip(self.compute_s, self.exposed_s)
        )

    @property
    def waited_s(self) -> float:
        """Return the seconds that reductions add after the first stage's last backward pass."""
        return self.step_s - (self.end_s[0] - self.exposed_s[0])
