"""When a pipeline stage posts its receives: early enough that messages travel under its passes, and in an
order that no stream, hardware queue or wait of the host can bring to a stand.

With NCCL a posted receive is a kernel that ends when its message is there; so is a send, until its receive
has begun. Streams may share a hardware queue, one of several streams may be another's (torch has 32 to give
away), the host may wait for the device (torch.cuda.synchronize(), cudaFree, CUDA_LAUNCH_BLOCKING=1). All of
that is right exactly if each launch of a rank could wait for the one before it. For that both ends of
a stage link need one order of its messages:

    a 0 ... a (lead - 1)   g 0   a lead   g 1   a (lead + 1)   g 2  ...        a: activation, g: gradient

A stage that holds k micro-batches must have sent k activations before it needs the first gradient; the next
stage, which holds k' of them, gives its first gradient after k': so k' <= lead <= k, and of the k - k' passes
between

    lead - k'   is how many micro-batches early the next stage posts receives of activations: of m before its
                forward of m - (lead - k'), which is after its gradient of m - lead
    k - lead    is how many early this stage posts those of gradients: of m before its backward of m - (k -
                lead), which is after its activation of m + lead - 1

In no order of these is there a circle: the launch of each depends on earlier ones of both ends
(tests/runtime/groups/test_receive_order.py goes through random pipelines).

The plan holds so many micro-batches in flight that k - k' - 1 paces of the pipeline are as long as the
stage link,
there and back, less the time that both stages wait anyway (plan/cost/pipeline.py, in_flight). The stage that
computes longer waits less and needs the more of it: (lead - k') - (k - lead) is the difference of their
times, in paces.

Where the plan lists the passes of each stage (plan/passes), k and k' are each gradient's own: the activations
that one end has sent when it needs that gradient, and the other has received when it sends it. Its lead is in
the list, as the plan's times have it.

With gloo nothing but a message's own wait waits for it: each end posts a receive as early as the other may
send it, activations up to k, gradients from k' on, and no message waits for its receiver.
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
class Early:
    """How early receives are posted. passes: micro-batches before the one whose pass needs the message;
    after_sends: the first one after so many activations went there (None: of activations)."""

    passes: int
    after_sends: int | None = None

    def before(self, index: int) -> int:
        """How many receives there are when that of micro-batch `index` is needed."""
        return index + 1 + self.passes

    def after(self, kind: str, index: int) -> int:
        """Receives that are there once the pass ("F", "B") of micro-batch `index` has sent what it sends."""
        return index + 2 - self.after_sends if kind == "F" and self.after_sends is not None else 0


@dataclass(frozen=True)
class ListedEarly:
    """Of listed passes. leads: by micro-batch, activations that go before its gradient, as this end goes by
    it; sent: by activation, gradients before it at its receiver, () at its sender."""

    leads: tuple[int, ...]
    sent: tuple[int, ...] = ()

    def before(self, index: int) -> int:
        return self._until(self.sent[index]) if self.sent else index + 1

    def after(self, kind: str, index: int) -> int:
        if self.sent:
            return self._until(index + 1) if kind == "B" else 0
        return bisect_right(self.leads, index + 1) if kind == "F" else 0

    def _until(self, gradients: int) -> int:
        """Activations before the gradient that follows so many."""
        return self.leads[gradients] if gradients < len(self.leads) else len(self.leads)


@dataclass(frozen=True)
class ReceiveOrder:
    """in_flight: micro-batches in flight, by stage; busy_s: seconds that each computes for one, or (); free:
    messages need no one order (gloo)."""

    in_flight: tuple[int, ...]
    busy_s: tuple[float, ...] = ()
    free: bool = False

    def early(self, stage: int, neighbour: int, micro_batches: int) -> Early:
        """On `stage`, for messages of its neighbour (a stage, too); micro_batches: of a step."""
        first = min(stage, neighbour)
        ahead, behind = (min(held, micro_batches) for held in self.in_flight[first : first + 2])
        longer = (
            (self.busy_s[first + 1] - self.busy_s[first]) / max(self.busy_s) if self.busy_s else 0.0
        )
        room = ahead - behind
        if self.free:
            return Early(room, behind if stage == first else None)
        lead = behind + min(max(floor((room + longer) / 2 + 0.5), 0), room)
        return Early(ahead - lead, lead) if stage == first else Early(lead - behind)

    def order(self, stage: int, micro_batches: int) -> Sequence[OnePass]:
        """The passes of a stage."""
        scheduled = passes(
            stage, len(self.in_flight), micro_batches, in_flight=self.in_flight[stage]
        )
        return [(kind, number) for kind, number, _ in scheduled]


@dataclass(frozen=True)
class ListedOrder:
    """Of a schedule whose passes are listed."""

    schedule: PassOrder
    in_flight: tuple[int, ...] = ()

    def early(self, stage: int, neighbour: int, micro_batches: int) -> ListedEarly:
        """As ReceiveOrder's."""
        of_activations, of_gradients = self.schedule.posted(min(stage, neighbour))
        if stage < neighbour:
            return ListedEarly(of_gradients)
        return ListedEarly(of_activations, before(self.order(stage, micro_batches), "BI", "F"))

    def order(self, stage: int, micro_batches: int) -> Sequence[OnePass]:
        """As ReceiveOrder's."""
        return self.schedule.stages[stage]


Flight = ReceiveOrder | ListedOrder


def listed_passes(texts: Sequence[str], network_api: str) -> PassOrder:
    """A plan's, for groups of `network_api`. HolmesError: as flight_of's."""
    order = PassOrder.parse(texts)
    if network_api == VERBS and not order.leads:
        raise HolmesError(
            "the plan's passes do not say when gradients' receives are posted (g0, g1 ...), "
            "which NCCL needs; make the plan again"
        )
    return order


def flight_of(plan: Plan, network_api: str) -> Flight | None:
    """As the plan has it for groups of `network_api`; None where the engine's own schedule runs. HolmesError:
    NCCL's messages have no order."""
    traffic = plan.traffic_of(network_api)
    if traffic.schedule:
        return ListedOrder(listed_passes(traffic.schedule, network_api))
    held = traffic.in_flight
    busy_s = tuple(load.busy_s for load in plan.loads)
    return ReceiveOrder(held, busy_s, network_api == SOCKETS) if held else None
