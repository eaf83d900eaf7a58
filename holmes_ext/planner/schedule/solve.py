"""Search for a short order of the passes of a pipeline: list scheduling under local search.

A backward pass is split into the gradient of the input (I) and the gradient of the weights (W). W
may be delayed as far as the memory allows: a micro-batch's activations are kept from its forward
pass (F) to its W. A stage that has ended a pass chooses its next pass by its rule, the first of
these that applies:

    1. I, if its gradient has arrived, unless an F is ready and fewer than `ahead` micro-batches are
       between F and I
    2. W, if more than `late` of them are delayed
    3. F, if its activation has arrived and the memory has room
    4. W, unless a message arrives within `patience` times the duration of W (at once if the memory
       is full)

The local search changes the rule of one stage at a time, and keeps changes that shorten the step.
In a local minimum it makes three random changes and begins again (iterated local search). The
budget is a number of passes, not seconds, so the result is deterministic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heappop, heappush
from math import inf
from random import Random

from holmes_ext.plan.cost.pipeline import WORTH_MORE, quickest_in_flight, walked_ends
from holmes_ext.plan.schedule import OnePass, PassOrder, Times
from holmes_ext.plan.workload import StageLoad, passes_s
from holmes_ext.planner.schedule.least import least_s

#: Most passes that all tries of a search schedule together: about a second.
MAX_PASSES = 200_000
#: Factor on the work of a try if the messages of each stage link get a common order.
ONE_ORDER_WORK = 4
#: Number of restarts from the best rules, and random changes of each.
RESTARTS = 40
RANDOM_CHANGES = 3
#: Number of starting points from which the search descends.
STARTS = 3
#: Fraction of the step that a change must save; smaller differences are rounding errors.
BETTER = 1e-9
#: Fewest stages for which the order of passes matters.
MIN_STAGES = 2
#: A starting point delays as many W as the memory allows.
ANY_NUMBER = -1


@dataclass(frozen=True)
class Rule:
    """Rule by which a stage chooses its next pass."""

    #: Number of micro-batches between F and I that makes I take precedence over F.
    ahead: int
    #: Most gradients of the weights (W) that are delayed.
    late: int
    #: Longest wait for a message while a W could be done, in durations of a W.
    patience: float = 0.0


@lru_cache(maxsize=64)
def quickest(
    loads: tuple[StageLoad, ...],
    transfer: tuple[float, ...],
    sent: tuple[float, ...],
    micro_batches: int,
    one_order: bool,
) -> PassOrder | None:
    """Return an order of passes that is faster than 1F1B: backward passes are split and delayed.

    1F1B is compared with a warm-up depth that hides the transfers between stages.

    Args:
        loads: Seconds and memory of each stage. A memory of unknown size holds as many
            micro-batches as the fullest stage under 1F1B.
        transfer: Seconds of an activation from each stage to the next, latency included.
        sent: Part of `transfer` in which the bytes occupy the link, in seconds. Other messages can
            follow during the rest, the latency.
        micro_batches: Number of micro-batches.
        one_order: Sends and receives between two stages must follow the same order on both (NCCL).

    Returns:
        None if no faster order was found, or it is unknown which part of a backward pass can be
        delayed.
    """
    forward, backward = passes_s(loads)
    weights = tuple(load.weights_s for load in loads)
    most = tuple(load.most for load in loads)
    if len(loads) < MIN_STAGES or not all(weights):
        return None
    in_flight = quickest_in_flight(forward, backward, transfer, micro_batches, sent, most)
    step_1f1b_s = max(walked_ends(forward, backward, transfer, micro_batches, in_flight))
    largest_in_flight = max(in_flight)
    room = []  # micro-batches that each stage can hold
    for count, limit in zip(in_flight, most):
        if limit == inf:  # memory of unknown size
            limit = largest_in_flight
        # 1F1B's own number always counts as fitting.
        room.append(max(count, limit))
    inputs = tuple(backward_s - weights_s for backward_s, weights_s in zip(backward, weights))
    times = Times(forward, inputs, weights, transfer, micro_batches, tuple(room))
    pass_order = solved(times, in_flight, one_order)

    # An order that saves less than WORTH_MORE of the step is not worth it.
    is_faster = max(pass_order.ends(times)) < step_1f1b_s * (1 - WORTH_MORE)
    return pass_order if is_faster else None


def solved(times: Times, ahead: Sequence[int], one_order: bool = False) -> PassOrder:
    """Return the shortest order of passes that the local search finds.

    Args:
        times: Seconds of the passes, and memory of the stages.
        ahead: Warm-up depth of each stage under 1F1B, where the search begins: micro-batches that
            the stage begins before its first backward pass.
        one_order: Sends and receives between two stages must follow the same order on both (NCCL). Such
            an order is made for every try, and its time counts.
    """
    return _LocalSearch(times, ahead, one_order).best_order()


class _LocalSearch:
    """Local search for the order of a pipeline's passes with the shortest step.

    It varies a rule for each stage (Rule: how the stage chooses its next pass), and computes the
    order of passes that follows from the rules. At a local minimum it changes some rules at random
    and goes on.
    """

    def __init__(self, times: Times, ahead: Sequence[int], one_order: bool):
        """Prepare a search for a short order of passes, and limit the number of its tries.

        Args:
            times: Seconds of the passes, and memory of the stages.
            ahead: Warm-up depth of each stage under 1F1B, where the search begins.
            one_order: Sends and receives between two stages must follow the same order on both (NCCL).
        """
        self.times = times
        self.ahead = ahead
        self.one_order = one_order
        #: Micro-batches that fit the memory of each stage.
        self.room = [int(min(most, times.micro_batches)) for most in times.most]
        # Passes to schedule in a try: forward (F), gradient of the input (I) and of the weights
        # (W).
        passes = 3 * times.micro_batches * len(times.forward)
        if one_order:
            passes *= ONE_ORDER_WORK  # making one order takes longer than scheduling the passes
        self.max_tries = max(1, MAX_PASSES // passes)
        #: Rules tried -> seconds of their order.
        self.tried: dict[tuple[Rule, ...], float] = {}

    def best_order(self) -> PassOrder:
        """Return the order of passes with the shortest step that the search finds.

        The search stops after `max_tries` orders, or if the step reaches the lower bound on all
        orders (least_s).
        """
        bound_s = least_s(self.times)
        dice = Random(0)  # always the same changes
        starts = sorted(self._starts(), key=self._seconds)
        best = min(map(self._descend, starts[:STARTS]), key=self._seconds)
        for _ in range(RESTARTS):
            is_optimal = self._seconds(best) <= bound_s * (1 + BETTER)  # but for rounding
            if len(self.tried) >= self.max_tries or is_optimal:
                break
            # Leave the local minimum by random changes, and descend again.
            changed = best
            for _ in range(RANDOM_CHANGES):
                changed = dice.choice([*_neighbours(changed, self.room)])
            best = min(best, self._descend(changed), key=self._seconds)
        orders, _ = order_by_rules(self.times, best)  # _: its seconds
        whole_backward = [_with_whole_backward(stage, order) for stage, order in enumerate(orders)]
        return self._as_pass_order(whole_backward)

    def _starts(self) -> Iterator[list[Rule]]:
        """Yield starting points of the search: a rule for each stage.

        They have several warm-up depths, delay several numbers of W (gradients of the weights), and
        wait for messages or not. Patience is the longest wait for a message while a W could be
        done, in durations of a W.
        """
        stages = len(self.ahead)
        one_more = [depth + 1 for depth in self.ahead]
        wide = [min(2 * depth, depth + stages) for depth in self.ahead]  # about twice as deep
        equal = [max(self.ahead)] * stages
        for depths in (self.ahead, one_more, wide, equal, self.room):
            for late in (0, 1, 2, ANY_NUMBER):  # the last one: as many W as the memory holds
                for patience in (0.0, 1.0):
                    yield [
                        Rule(min(depth, most), most if late == ANY_NUMBER else late, patience)
                        for depth, most in zip(depths, self.room)
                    ]

    def _seconds(self, rules: Sequence[Rule]) -> float:
        """Return the step time, in seconds, that follows from the stages' rules; each set is simulated once.

        With `one_order` (NCCL), sends and receives between two stages must follow one order on
        both. Then the passes are changed to have such an order, and the changed step's time counts.

        Args:
            rules: Rule of each stage.
        """
        key = tuple(rules)
        if key not in self.tried:
            orders, end_s = order_by_rules(self.times, rules)
            if self.one_order:
                end_s = max(self._as_pass_order(orders).ends(self.times))
            self.tried[key] = end_s
        return self.tried[key]

    def _as_pass_order(self, orders: Sequence[Sequence[OnePass]]) -> PassOrder:
        """Convert the passes of each stage into a PassOrder.

        With NCCL (`one_order`), two neighbouring stages must launch their messages in the same order.
        If the given passes do not allow this, other passes are returned that do.

        Args:
            orders: For each stage its passes in order: (letter, micro-batch). F is a forward pass,
                I and W the gradients of the input and of the weights, B both.
        """
        pass_order = PassOrder(tuple(tuple(order) for order in orders))
        return pass_order.in_one_order(self.times) if self.one_order else pass_order

    def _descend(self, rules: list[Rule]) -> list[Rule]:
        """Return rules at a local minimum of the step time: no change of a single rule helps.

        The rules say how each stage chooses its next pass. From the given ones, each change
        (_neighbours) that shortens the step is kept, until none does or the number of tries is
        over.

        Args:
            rules: Rule of each stage, where the descent begins.
        """
        best_s = self._seconds(rules)
        improved = True
        while improved:
            improved = False
            # The neighbours are those of the rules at the beginning of the round.
            for neighbour in _neighbours(rules, self.room):
                if len(self.tried) >= self.max_tries:  # the budget is spent
                    continue
                if self._seconds(neighbour) < best_s * (1 - BETTER):
                    rules = neighbour
                    best_s = self._seconds(neighbour)
                    improved = True
        return rules


def _neighbours(rules: list[Rule], in_flight: Sequence[int]) -> Iterator[list[Rule]]:
    """Yield copies of the rules in which a single number of one stage's rule is changed.

    A rule has three numbers. `ahead` (micro-batches between forward and backward pass) and `late`
    (most delayed gradients of weights) change by 1 or 2 up or down, within what the memory can
    hold. `patience`, the longest wait for a message, becomes 0, 0.5, 1 or inf.

    Args:
        rules: Rule of each stage.
        in_flight: For each stage, the largest number of micro-batches that it can hold.
    """
    for stage, rule in enumerate(rules):
        changes = [replace(rule, ahead=rule.ahead + step) for step in (1, -1, 2, -2)]
        changes += [replace(rule, late=rule.late + step) for step in (1, -1, 2, -2)]
        for patience in (0.0, 0.5, 1.0, inf):
            if patience != rule.patience:
                changes.append(replace(rule, patience=patience))
        most = in_flight[stage]
        for change in changes:
            if 1 <= change.ahead <= most and 0 <= change.late <= most:
                yield [*rules[:stage], change, *rules[stage + 1 :]]


def _with_whole_backward(stage: int, order: list[OnePass]) -> tuple[OnePass, ...]:
    """Return the passes of a stage; on the first stage, I and a W right after it become one B.

    I and W are a micro-batch's gradient of the input and of the weights, B is the whole backward
    pass.

    No stage waits for the gradient of the first stage's input, so both can be one pass there.

    Args:
        stage: The stage; the order of other stages than the first is unchanged.
        order: Passes of the stage: (letter, micro-batch).
    """
    if stage > 0:
        return tuple(order)
    merged: list[OnePass] = []
    for letter, number in order:
        if letter == "W" and merged[-1] == ("I", number):
            merged[-1] = "B", number
        else:
            merged.append((letter, number))
    return tuple(merged)


class _StageState:
    """Progress of one stage while an order of passes is built: passes done, messages arrived.

    order_by_rules() keeps one for each stage, and asks it for the stage's next pass.
    """

    def __init__(self, room: int, activations: list[float]):
        """Create the state of a pipeline stage before its first pass of the step.

        Args:
            room: Largest number of micro-batches that the stage can hold.
            activations: Moments at which the activations arrive, as far as they are known, in
                seconds.
        """
        self.order: list[OnePass] = []
        self.room = room
        # Number of F, I and W done.
        self.forwards = 0
        self.inputs = 0
        self.weights = 0

        # Moments at which messages arrive, as far as they are known, by micro-batch.
        self.activations = activations
        self.gradients: list[float] = []
        #: End of the last pass.
        self.free_s = 0.0
        #: The stage has no entry in the event queue: it waits for a message whose moment is
        #: unknown.
        self.is_asleep = False

    @property
    def is_full(self) -> bool:
        """True if the stage's memory has no room for the activations of another micro-batch."""
        return self.forwards - self.weights >= self.room

    def next_forward_s(self) -> float:
        """Return when the stage can begin its next forward pass, in seconds of the step.

        inf if its activation's arrival is not known yet, or the memory is full.
        """
        if self.is_full or self.forwards == len(self.activations):
            return inf
        return self.activations[self.forwards]

    def next_input_s(self) -> float:
        """Return when the stage can begin its next gradient of the input, in seconds of the step.

        inf if the arrival of the gradient that this needs is not known yet.
        """
        return self.gradients[self.inputs] if self.inputs < len(self.gradients) else inf

    def choose(self, rule: Rule, now: float, weights_s: float) -> str:
        """Return the letter of the pass that a pipeline stage begins now; "" to wait for a message.

        F is a forward pass, I a gradient of the input, W a gradient of the weights. The first that
        applies:

            I    is ready, unless F is ready and fewer than `rule.ahead` micro-batches are between F and I
            W    more than `rule.late` are delayed
            F    is ready, and the memory has room
            W    nothing else is ready, and no message arrives within `rule.patience` durations of a W; or
                 the memory is full

        Args:
            rule: Rule of the stage.
            now: Moment, in seconds from the start of the step.
            weights_s: Seconds of a gradient of the weights.
        """
        next_forward_s = self.next_forward_s()
        next_input_s = self.next_input_s()
        prefers_forward = self.forwards - self.inputs < rule.ahead and next_forward_s <= now
        if next_input_s <= now and not prefers_forward:
            return "I"
        delayed = self.inputs - self.weights  # W that could begin
        if delayed > rule.late:
            return "W"
        if delayed and next_forward_s > now:
            # Nothing else is ready. W fills the time unless a message is worth waiting for. (If the
            # memory is full, only W makes room, so waiting for a message is of no use.)
            wait_s = min(next_forward_s, next_input_s) - now
            if wait_s >= rule.patience * weights_s or self.is_full:
                return "W"
        return "F" if next_forward_s <= now else ""


def order_by_rules(times: Times, rules: Sequence[Rule]) -> tuple[list[list[OnePass]], float]:
    """Compute the order of all passes that follows from the stages' rules, and its end.

    Args:
        times: Seconds of the passes and links, and memory of the stages.
        rules: Rule of each stage: how it chooses its next pass.

    Returns:
        For each stage its passes in order, (letter, micro-batch), where F is a forward pass, I and
        W the gradients of the input and of the weights; and the end of the last pass, in seconds.
    """
    micro_batches = times.micro_batches
    last = len(rules) - 1
    stages = []
    for stage, most in enumerate(times.most[: len(rules)]):
        # The first stage has its inputs from the start.
        activations = [0.0] * micro_batches if stage == 0 else []
        stages.append(_StageState(max(1, int(min(most, micro_batches))), activations))
    end_s = 0.0
    queue = [(0.0, stage) for stage in range(len(rules))]  # (moment, stage that is free then)

    def wake(stage: int, moment: float) -> None:
        """Queue a stage again that waited for a message, now that its arrival at `moment` is known."""
        state = stages[stage]
        if state.is_asleep:
            state.is_asleep = False
            heappush(queue, (max(state.free_s, moment), stage))

    while queue:
        now, stage = heappop(queue)
        state = stages[stage]
        letter = state.choose(rules[stage], now, times.weights[stage])
        if not letter:  # no pass can run now
            # Try again when the next message arrives. If none is on its way, wake() ends the wait.
            next_message_s = min(state.next_forward_s(), state.next_input_s())
            if next_message_s < inf:
                heappush(queue, (next_message_s, stage))
            else:
                state.is_asleep = True
            continue
        if letter == "F":
            number = state.forwards
            state.forwards += 1
            pass_end_s = now + times.forward[stage]
            if stage == last:
                state.gradients.append(pass_end_s)  # its backward pass can follow at once
            else:
                arrival_s = pass_end_s + times.transfer[stage]
                stages[stage + 1].activations.append(arrival_s)
                wake(stage + 1, arrival_s)
        elif letter == "I":
            number = state.inputs
            state.inputs += 1
            pass_end_s = now + times.inputs[stage]
            if stage:
                arrival_s = pass_end_s + times.transfer[stage - 1]
                stages[stage - 1].gradients.append(arrival_s)
                wake(stage - 1, arrival_s)
        else:
            number = state.weights
            state.weights += 1
            pass_end_s = now + times.weights[stage]
        # The stage has run the pass, and chooses the next when it ends.
        state.order.append((letter, number))
        state.free_s = pass_end_s
        end_s = max(end_s, pass_end_s)
        if state.weights < micro_batches:
            heappush(queue, (pass_end_s, stage))
    return [state.order for state in stages], end_s
