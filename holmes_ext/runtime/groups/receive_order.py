"""Decides when a pipeline stage posts its receives: in advance, and in an order that cannot deadlock.

With NCCL a posted receive is a kernel that ends when its message has arrived, and a send is a kernel that
ends when its receive has begun. Such kernels may share a hardware queue or a stream (torch hands out 32
streams in turn), and the host may wait for the device (torch.cuda.synchronize(), cudaFree,
CUDA_LAUNCH_BLOCKING=1). A rank is safe from all of that if each of its launches may wait for the launch
before it. This requires one order of all messages between two stages, which both stages follow:

    a 0 ... a (lead - 1)   g 0   a lead   g 1   a (lead + 1)   g 2  ...        a: activation, g: gradient

The lead is the number of activations before the first gradient. Let the earlier stage hold k micro-batches
in flight, and the later stage k'. The earlier stage must send k activations before it needs the first
gradient, and the later stage sends its first gradient after k' activations, so k' <= lead <= k. The k - k'
passes between these bounds are divided:

    lead - k'   passes in advance, the later stage posts receives of activations: the receive of micro-batch m
                before its forward pass of m - (lead - k'), which follows its gradient of m - lead
    k - lead    passes in advance, the earlier stage posts receives of gradients: the receive of micro-batch m
                before its backward pass of m - (k - lead), which follows its activation of m + lead - 1

No rank waits for ever: in this order, every launch depends only on earlier launches of both stages, so there
is no cycle (tests/runtime/groups/test_receive_order.py checks random pipelines).

Choice of the lead: the plan keeps so many micro-batches in flight that k - k' - 1 micro-batches take as long
as a round trip over the stage link, less the idle time of both stages (plan/cost/pipeline.py, in_flight). The
stage with the longer compute time idles less and needs more passes in advance. Therefore
(lead - k') - (k - lead) is the difference of the two compute times, divided by the longest compute time of
all stages.

If the plan lists the passes of each stage (plan/schedule.py), every gradient has its own lead, which the plan
lists too.

With gloo only the wait for a message waits for its sender, and no order is required. Each stage posts a
receive as soon as the other stage may send the message: activations up to k, gradients from k' on.
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
    """Number of receives from a neighbour that a stage has posted at each point of a step.

    Receives are counted in micro-batches from the beginning of the step.
    """

    #: Passes between posting a receive and the pass that needs its message.
    passes_in_advance: int
    #: For receives of gradients: activations sent before the first receive is posted. None for receives of
    #: activations.
    activations_first: int | None = None

    def before(self, index: int) -> int:
        """Return the number of posted receives before the pass of micro-batch `index` that needs one."""
        return index + 1 + self.passes_in_advance

    def after(self, kind: str, index: int) -> int:
        """Return the number of posted receives after a pass and its messages.

        Args:
            kind: "F" for a forward pass, "B" for a backward pass.
            index: Micro-batch of the pass.
        """
        if kind == "F" and self.activations_first is not None:
            activations_sent = index + 1
            return activations_sent - self.activations_first + 1
        return 0


@dataclass(frozen=True)
class ListedPostingRule:
    """Number of receives from a neighbour that a stage has posted, if the plan lists all passes.

    Receives are counted in micro-batches from the beginning of the step.
    """

    #: Micro-batch -> activations before its gradient in the order of messages.
    leads: tuple[int, ...]
    #: For receives of activations: micro-batch -> gradients that the receiving stage has sent before it needs
    #: the activation. Empty for receives of gradients.
    gradients_sent: tuple[int, ...] = ()

    def before(self, index: int) -> int:
        """Return the number of posted receives before the pass of micro-batch `index` that needs one."""
        if self.gradients_sent:
            return self._activations_before_gradient(self.gradients_sent[index])
        return index + 1

    def after(self, kind: str, index: int) -> int:
        """Return the number of posted receives after a pass and its messages.

        Args:
            kind: "F" for a forward pass, "B" for a backward pass.
            index: Micro-batch of the pass.
        """
        if self.gradients_sent:
            return self._activations_before_gradient(index + 1) if kind == "B" else 0
        activations_sent = index + 1
        return bisect_right(self.leads, activations_sent) if kind == "F" else 0

    def _activations_before_gradient(self, micro_batch: int) -> int:
        """Return how many activations precede a gradient; all of them if there is no such gradient."""
        if micro_batch < len(self.leads):
            return self.leads[micro_batch]
        return len(self.leads)


@dataclass(frozen=True)
class ReceiveOrder:
    """Order of passes and messages of a pipeline with a planned number of micro-batches in flight.

    Each stage alternates forward and backward passes (1F1B) once its micro-batches are in flight.
    """

    in_flight: tuple[int, ...]  # planned micro-batches in flight, by stage
    busy_s: tuple[float, ...] = ()  # compute seconds of a micro-batch, by stage; () if unknown
    is_unordered: bool = False  # messages need no common order (gloo)

    def posting_rule(self, stage: int, neighbour: int, micro_batches: int) -> PostingRule:
        """Return when a stage posts its receives from a neighbouring stage.

        Let the earlier of the two stages hold k micro-batches in flight, and the later one k'. The k - k'
        passes by which receives can be posted in advance are divided between the stages, so that the stage
        with the longer compute time gets more of them. Without a common order of messages (gloo), each
        stage uses all of them.

        Args:
            stage: Number of the stage that receives.
            neighbour: Number of the stage that sends.
            micro_batches: Micro-batches of a step.
        """
        earlier_stage = min(stage, neighbour)
        later_stage = earlier_stage + 1
        in_flight_earlier = min(self.in_flight[earlier_stage], micro_batches)  # k
        in_flight_later = min(self.in_flight[later_stage], micro_batches)  # k'
        receives_gradients = stage == earlier_stage
        most_in_advance = in_flight_earlier - in_flight_later  # passes
        if self.is_unordered:
            if receives_gradients:
                return PostingRule(
                    passes_in_advance=most_in_advance,
                    activations_first=in_flight_later,  # sent before the first receive is posted
                )
            return PostingRule(passes_in_advance=most_in_advance)

        time_difference = 0.0  # of the two stages, in units of the longest stage
        if self.busy_s:
            busy_difference_s = self.busy_s[later_stage] - self.busy_s[earlier_stage]
            time_difference = busy_difference_s / max(self.busy_s)
        # Passes of the later stage. "+ 0.5" rounds to the nearest whole number.
        rounded = floor((most_in_advance + time_difference) / 2 + 0.5)
        later_in_advance = min(max(rounded, 0), most_in_advance)
        lead = in_flight_later + later_in_advance  # activations before the first gradient
        if receives_gradients:
            return PostingRule(
                passes_in_advance=in_flight_earlier - lead,
                activations_first=lead,
            )
        return PostingRule(passes_in_advance=later_in_advance)

    def order(self, stage: int, micro_batches: int) -> Sequence[OnePass]:
        """Return the passes of a stage, as pairs of a letter ("F" or "B") and a micro-batch."""
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
        """Return when a stage posts its receives from a neighbouring stage.

        The lead of a gradient is the number of activations before it in the order of messages.

        Args:
            stage: Number of the stage that receives.
            neighbour: Number of the stage that sends.
            micro_batches: Micro-batches of a step.
        """
        stage_link = min(stage, neighbour)  # numbered by its earlier stage
        # The leads of all gradients, as the later and as the earlier stage of the link count them.
        leads_for_activations, leads_for_gradients = self.schedule.receive_orders(stage_link)
        if stage < neighbour:  # receives gradients
            return ListedPostingRule(leads=leads_for_gradients)
        own_passes = self.order(stage, micro_batches)
        # For each forward pass ("F"), the backward passes before it: whole ones ("B") and those that compute
        # the gradient of the input only ("I"). Each has sent a gradient.
        gradients_sent = before(own_passes, "BI", "F")
        return ListedPostingRule(leads=leads_for_activations, gradients_sent=gradients_sent)

    def order(self, stage: int, micro_batches: int) -> Sequence[OnePass]:
        """Return the listed passes of a stage, as pairs of a letter and a micro-batch."""
        return self.schedule.stages[stage]


Flight = ReceiveOrder | ListedOrder


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
    if network_api == VERBS and not order.activations_before:
        raise HolmesError(
            "the plan's passes do not say when gradients' receives are posted (g0, g1 ...), "
            "which NCCL needs; make the plan again"
        )
    return order


def flight_of(plan: Plan, network_api: str) -> Flight | None:
    """Return the planned order of passes and messages of a pipeline.

    The plan lists all passes, or only gives the micro-batches that each stage holds in flight, or neither.

    Args:
        plan: Plan of the job.
        network_api: VERBS for NCCL, SOCKETS for gloo.

    Returns:
        None if the engine keeps its own schedule.

    Raises:
        HolmesError: the plan lists passes for NCCL without the order of messages.
    """
    traffic = plan.traffic_of(network_api)
    if traffic.schedule:
        return ListedOrder(listed_passes(traffic.schedule, network_api))
    if not traffic.in_flight:
        return None
    busy_s = tuple(load.busy_s for load in plan.loads)  # compute seconds of a micro-batch, by stage
    return ReceiveOrder(traffic.in_flight, busy_s, is_unordered=network_api == SOCKETS)
