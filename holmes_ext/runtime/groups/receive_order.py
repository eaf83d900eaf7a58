"""Decides when a pipeline stage posts its receives: some passes ahead, in an order that cannot deadlock.

With NCCL a posted receive is a kernel that ends when its message has arrived, and a send is a kernel that
ends when its receive has begun. Such kernels may share a hardware queue or a stream (torch hands out 32
streams in turn), and the host may wait for the device (torch.cuda.synchronize(), cudaFree,
CUDA_LAUNCH_BLOCKING=1). In the worst case, every operation of a rank waits until the rank's operation before
it has ended. The order of messages here is chosen so that even then no rank waits for ever. Both stages post
and send all messages between them in a common order. Here `a` is an activation and `g` a gradient, with the
numbers of their micro-batches:

    a 0 ... a (lead - 1)   g 0   a lead   g 1   a (lead + 1)   g 2  ...

The lead is the number of activations before the first gradient. Before its first backward pass, a stage runs
some forward passes, its micro-batches in flight. They bound the lead:

    lead >= micro-batches in flight of the later stage
            The later stage runs so many forward passes, and each needs an activation, before it sends
            its first gradient.
    lead <= micro-batches in flight of the earlier stage
            The earlier stage sends no more activations than that before it needs the first gradient.

Example: the earlier stage runs 4 forward passes first, the later stage 2, and the lead is 3. Both stages post
(post) and send (send) in the order a0 a1 a2 g0 a3 g1 a4 ...:

    earlier stage   F0 send a0, F1 send a1, F2 send a2, post g0, F3 send a3, post g1, B0, F4 send a4, ...
    later stage     post a0, post a1, F0, post a2, F1, B0 send g0, post a3, F2, B1 send g1, post a4, ...

So the earlier stage posts the receive of a gradient 4 - 3 = 1 pass before the pass that needs it, and the
later stage that of an activation 3 - 2 = 1 pass before.

No rank waits for ever: in this order, every launch depends only on earlier launches of both stages, so there
is no cycle (tests/runtime/groups/test_receive_order.py checks random pipelines).

Choice of the lead: the plan keeps so many micro-batches in flight that a message has time for a round trip
over the stage link (plan/cost/pipeline.py, in_flight). The difference of both stages' micro-batches in flight
is a number of passes: both stages together can post receives so many passes ahead. Each stage gets half of
it. The stage with the longer compute time has less idle time to wait for a message, so it gets more.

If the plan lists the passes of each stage (plan/schedule.py), it also lists, for each gradient, the
activations before it.

With gloo only the wait for a message waits for its sender, and no order is required. Each stage posts a
receive as soon as the other stage may send the message.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import floor
from typing import TYPE_CHECKING

from holmes_ext.errors import HolmesError
from holmes_ext.plan.schedule import PassOrder, before, passes
from holmes_ext.plan.traffic import SOCKETS, VERBS

if TYPE_CHECKING:
    from holmes_ext.plan.plan import Plan
    from holmes_ext.plan.schedule import OnePass


@dataclass(frozen=True)
class PostingRule:
    """Rule by which a 1F1B pipeline stage posts its receives (irecv) from a neighbouring stage.

    Order1F1B makes the rule. Mailbox applies it before and after each pass: it posts receives until
    their number reaches the rule's. Receives are counted in micro-batches from the beginning of the
    step. Example: with passes_ahead=1, micro-batches 0 to 3 are posted before the pass of
    micro-batch 2.
    """

    #: A receive is posted so many passes before the pass that needs its message.
    passes_ahead: int
    #: For receives of gradients: activations sent before the first receive is posted. None for
    #: receives of activations.
    activations_before_first: int | None = None

    def posted_before(self, micro_batch: int) -> int:
        """Return how many receives the stage must have posted before a pass that uses a message.

        Args:
            micro_batch: Micro-batch of the pass and of its message.

        Returns:
            Number of receives from the neighbour since the beginning of the step, in micro-batches.
        """
        needed = micro_batch + 1
        return needed + self.passes_ahead

    def posted_after(self, kind: str, micro_batch: int) -> int:
        """Return how many receives the stage must have posted after one of its passes.

        Only forward passes of a stage that receives gradients from the neighbour require any. Such
        a stage first sends `activations_before_first` activations. Then it posts the receive of a
        gradient, and another after each further activation. Example with
        activations_before_first=3: after forward passes 0, 1, 2, 3 the result is -1, 0, 1, 2.

        Args:
            kind: "F" after a forward pass, "B" after a backward pass.
            micro_batch: Micro-batch of the pass.

        Returns:
            Number of receives from the neighbour since the beginning of the step, in micro-batches.
            0 or less: no receive has to be posted.
        """
        if kind == "F" and self.activations_before_first is not None:
            activations_sent = micro_batch + 1
            return activations_sent - self.activations_before_first + 1
        return 0


@dataclass(frozen=True)
class ListedPostingRule:
    """Rule by which a pipeline stage posts its receives (irecv), if the plan lists all passes.

    The rule is for the receives from a single neighbouring stage. ListedOrder makes it. Mailbox
    applies it before and after each pass: it posts receives until their number reaches the rule's.
    Receives are counted in micro-batches from the beginning of the step.
    """

    #: Micro-batch -> number of activations that both stages launch before its gradient.
    activations_before: tuple[int, ...]
    #: For receives of activations: micro-batch -> gradients that the receiving stage has sent
    #: before it needs the activation. Empty for receives of gradients.
    gradients_sent: tuple[int, ...] = ()

    def posted_before(self, micro_batch: int) -> int:
        """Return how many receives the stage must have posted before a pass that uses a message.

        Args:
            micro_batch: Micro-batch of the pass and of its message.

        Returns:
            Number of receives from the neighbour since the beginning of the step, in micro-batches.
        """
        if not self._receives_activations:
            return micro_batch + 1  # only the receive of the gradient that this pass needs
        # Before this forward pass, the stage has sent gradients 0 to next_gradient - 1. In the planned order
        # of messages, this pass's activation comes before the next gradient. So all activations before that
        # gradient are posted.
        next_gradient = self.gradients_sent[micro_batch]
        return self._activations_before_gradient(next_gradient)

    def posted_after(self, kind: str, micro_batch: int) -> int:
        """Return how many receives the stage must have posted after one of its passes.

        The activations and gradients between two stages have a planned order. A pass of this stage
        sends a message; then the stage posts all receives that come before the next message that it
        sends in this order. A stage that receives activations sends gradients, in backward passes. A
        stage that receives gradients sends activations, in forward passes.

        Args:
            kind: "F" after a forward pass, "B" after a backward pass.
            micro_batch: Micro-batch of the pass.

        Returns:
            Number of receives from the neighbour since the beginning of the step, in micro-batches.
            0: the pass requires none.
        """
        if self._receives_activations:
            if kind != "B":
                return 0
            next_gradient = micro_batch + 1
            return self._activations_before_gradient(next_gradient)
        if kind != "F":
            return 0
        activations_sent = micro_batch + 1
        # The number of gradients with at most `activations_sent` activations before them. The list
        # is sorted, so this is the position behind the last of them.
        return bisect_right(self.activations_before, activations_sent)

    @property
    def _receives_activations(self) -> bool:
        """True if the stage receives activations from the neighbour, False if it receives gradients."""
        return bool(self.gradients_sent)

    def _activations_before_gradient(self, micro_batch: int) -> int:
        """Return the number of activations that are launched before the gradient of a micro-batch.

        Args:
            micro_batch: Number of the micro-batch. A number after the last micro-batch has no
                gradient: then the result is the number of all activations of the step.
        """
        if micro_batch < len(self.activations_before):
            return self.activations_before[micro_batch]
        return len(self.activations_before)


@dataclass(frozen=True)
class Order1F1B:
    """Order of passes and messages of a 1F1B pipeline with a planned number of micro-batches in flight.

    Each stage first runs as many forward passes as it holds micro-batches in flight. Then it alternates a
    backward pass and a forward pass.
    """

    #: By stage: forward passes before the first backward pass.
    in_flight: tuple[int, ...]
    #: By stage: compute time of a micro-batch in seconds; () if unknown.
    busy_s: tuple[float, ...] = ()
    #: Whether both stages must launch their messages in the same order: True with NCCL, False with gloo.
    needs_message_order: bool = True

    def posting_rule(self, stage: int, neighbour: int, micro_batches: int) -> PostingRule:
        """Return how many passes before its use a stage posts each receive from a neighbour stage.

        Before its first backward pass, the earlier of the two stages runs forwards_of_earlier forward
        passes, the later stage forwards_of_later. The difference is the number of passes by which
        they can post receives ahead (passes_to_share).

        With gloo, each stage posts all of these passes ahead. With NCCL, both must launch all
        messages in the same order: `lead` activations first, then gradients and activations in turn
        (see the module). So the stages divide the passes:

            later stage      posts an activation's receive lead - forwards_of_later passes ahead
            earlier stage    posts a gradient's receive forwards_of_earlier - lead passes ahead

        Args:
            stage: Number of the stage that receives.
            neighbour: Number of the stage that sends.
            micro_batches: Micro-batches of a step.
        """
        earlier_stage = min(stage, neighbour)
        later_stage = earlier_stage + 1
        # A step with few micro-batches has fewer forward passes than are planned before the first
        # backward pass.
        forwards_of_earlier = min(self.in_flight[earlier_stage], micro_batches)
        forwards_of_later = min(self.in_flight[later_stage], micro_batches)
        receives_gradients = stage == earlier_stage
        passes_to_share = forwards_of_earlier - forwards_of_later
        if not self.needs_message_order:
            if receives_gradients:
                return PostingRule(
                    passes_ahead=passes_to_share,
                    activations_before_first=forwards_of_later,
                )
            return PostingRule(passes_ahead=passes_to_share)

        later_ahead = self._share_of_later_stage(later_stage, passes_to_share)
        lead = forwards_of_later + later_ahead  # activations before the first gradient
        if receives_gradients:
            return PostingRule(
                passes_ahead=forwards_of_earlier - lead,  # the rest of passes_to_share
                activations_before_first=lead,
            )
        return PostingRule(passes_ahead=later_ahead)

    def _share_of_later_stage(self, later_stage: int, passes_to_share: int) -> int:
        """Divide a number of passes between two neighbour stages; return the later stage's share.

        With a share of 2, a stage posts each receive 2 passes before it needs the message. Both
        stages get half, but the stage that computes longer gets more: it has less idle time to wait
        for a message.

        Args:
            later_stage: Number of the later stage.
            passes_to_share: Number of passes to divide among both stages.

        Returns:
            An integer from 0 to passes_to_share. The earlier stage gets the rest.
        """
        # How much longer the later stage computes a micro-batch than the earlier stage. The unit is
        # the time between two passes: in the steady state, that of the slowest stage.
        passes_longer = 0.0
        if self.busy_s:
            busy_difference_s = self.busy_s[later_stage] - self.busy_s[later_stage - 1]
            passes_longer = busy_difference_s / max(self.busy_s)
        share = (passes_to_share + passes_longer) / 2
        nearest = floor(share + 0.5)
        return min(max(nearest, 0), passes_to_share)

    def order(self, stage: int, micro_batches: int) -> Sequence[OnePass]:
        """Return the passes of a stage in order, as pairs of a letter ("F" or "B") and a micro-batch."""
        scheduled = passes(
            stage, len(self.in_flight), micro_batches, in_flight=self.in_flight[stage]
        )
        return [(kind, micro_batch) for kind, micro_batch, _ in scheduled]


@dataclass(frozen=True)
class ListedOrder:
    """Order of passes and messages of a pipeline whose plan lists every pass."""

    schedule: PassOrder
    in_flight: tuple[int, ...] = ()  # left empty: the schedule itself limits the micro-batches

    def posting_rule(self, stage: int, neighbour: int, micro_batches: int) -> ListedPostingRule:
        """Return when a stage posts its receives from a neighbouring stage, as the plan lists them.

        For each gradient between the two stages, the plan has the number of activations before it.
        If this is 3 for the first gradient:

            earlier stage    sends 3 activations, then posts the receive of the gradient
            later stage      posts the receives of 3 activations, then sends the gradient

        Args:
            stage: Number of the stage that receives.
            neighbour: Number of the stage that sends.
            micro_batches: Micro-batches of a step.
        """
        stage_link = min(stage, neighbour)  # numbered by its earlier stage
        # Each stage of the link has an order of activations and gradients: for each gradient, the
        # number of activations before it. With NCCL both stages launch in the same order. With gloo
        # the orders differ: each stage posts its receives as early as possible.
        later_stage_order, earlier_stage_order = self.schedule.receive_orders(stage_link)
        receives_gradients = stage < neighbour
        if receives_gradients:
            return ListedPostingRule(activations_before=earlier_stage_order)

        # The stage receives activations, and sends a gradient after each backward pass: a whole one
        # ("B"), or one that computes only the gradient of the input ("I"). So the gradients sent
        # before a forward pass ("F") are the backward passes before it.
        own_passes = self.order(stage, micro_batches)
        gradients_sent = before(own_passes, counted="BI", of_letters="F")
        return ListedPostingRule(
            activations_before=later_stage_order, gradients_sent=gradients_sent
        )

    def order(self, stage: int, micro_batches: int) -> Sequence[OnePass]:
        """Return the listed passes of a stage in order, as pairs of a letter and a micro-batch."""
        return self.schedule.stages[stage]


PipelineOrder = Order1F1B | ListedOrder


def listed_passes(texts: Sequence[str], network_api: str) -> PassOrder:
    """Parse the passes of all stages that a plan lists.

    Args:
        texts: The passes of each stage, such as "F0 F1 B0 F2 ...": forward (F) and backward (B) passes of
            numbered micro-batches.
        network_api: VERBS for NCCL, SOCKETS for gloo.

    Raises:
        HolmesError: the list is for NCCL but does not say when to post the receives of gradients.
    """
    order = PassOrder.parse(texts)
    # An entry such as g0 stands after the activations that are launched before the receive of a gradient:
    # parse() turns these entries into activations_before.
    if network_api == VERBS and not order.activations_before:
        raise HolmesError(
            "the plan's passes do not say when gradients' receives are posted (g0, g1 ...), "
            "which NCCL needs; make the plan again"
        )
    return order


def pipeline_order_of(plan: Plan, network_api: str) -> PipelineOrder | None:
    """Return the planned order of passes and messages of a pipeline.

    Args:
        plan: Plan of the job.
        network_api: VERBS for NCCL, SOCKETS for gloo.

    Returns:
        A ListedOrder if the plan lists all passes, an Order1F1B if it only has the micro-batches that each
        stage holds in flight. None if it has neither: the engine keeps its own schedule.

    Raises:
        HolmesError: the plan lists passes for NCCL without the order of messages.
    """
    traffic = plan.traffic_of(network_api)
    if traffic.schedule:
        return ListedOrder(listed_passes(traffic.schedule, network_api))
    if not traffic.in_flight:
        return None
    busy_s = tuple(load.busy_s for load in plan.loads)  # compute seconds of a micro-batch, by stage
    # SOCKETS is gloo: its messages may be posted in any order. An NCCL send or receive is a kernel
    # that runs until the other rank takes part. The kernels launched after it may have to wait for
    # its end. So with NCCL, both ranks must launch their messages in the same order.
    return Order1F1B(traffic.in_flight, busy_s, needs_message_order=network_api != SOCKETS)
