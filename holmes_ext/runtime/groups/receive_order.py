"""When a pipeline stage posts its receives: early enough that messages travel under its passes, and in an order that
no stream, hardware queue or wait of the host can bring to a stand.

With NCCL a posted receive is a kernel that ends when its message is there; so is a send, until its receive has begun.
Streams may share a hardware queue, one of several streams may be another's (torch has 32 to give away), the host may
wait for the device (torch.cuda.synchronize(), cudaFree, CUDA_LAUNCH_BLOCKING=1). All of that is right exactly if each
launch of a rank could wait for the one before it. For that both ends of an edge need one order of its messages:

    a 0 ... a (lead - 1)   g 0   a lead   g 1   a (lead + 1)   g 2  ...        a: activation, g: gradient

A stage that holds k micro-batches must have sent k activations before it needs the first gradient; the next stage,
which holds k' of them, gives its first gradient after k': so k' <= lead <= k, and of the k - k' passes between

    lead - k'   is how many micro-batches early the next stage posts receives of activations: of m before its forward of
                m - (lead - k'), which is after its gradient of m - lead
    k - lead    is how many early this stage posts those of gradients: of m before its backward of m - (k - lead), which
                is after its activation of m + lead - 1

In no order of these is there a circle: the launch of each depends on earlier ones of both ends
(tests/runtime/groups/test_receive_order.py goes through random pipelines).

The plan holds so many micro-batches in flight that k - k' - 1 paces of the pipeline are as long as the edge, there and
back, less the time that both stages wait anyway (plan/cost/pipeline.py, in_flight). The stage that computes longer
waits less and needs the more of it: (lead - k') - (k - lead) is the difference of their times, in paces.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor

from holmes_ext.plan.plan import Plan


@dataclass(frozen=True)
class Early:
    """How early receives from a neighbour are posted. passes: so many micro-batches before the one whose pass needs the
    message. after_sends: the first one after so many activations were sent there; None: of activations, from the stage
    before.
    """

    passes: int
    after_sends: int | None = None


@dataclass(frozen=True)
class ReceiveOrder:
    """held: micro-batches in flight, by stage; busy_s: seconds that each computes for one, () where unknown."""

    held: tuple[int, ...]
    busy_s: tuple[float, ...] = ()

    def early(self, own: int, other: int, micro_batches: int) -> Early:
        """On stage `own`, for messages of its neighbour `other`; micro_batches: of a step."""
        first = min(own, other)
        before, behind = (min(held, micro_batches) for held in self.held[first : first + 2])
        longer = (self.busy_s[first + 1] - self.busy_s[first]) / max(self.busy_s) if self.busy_s else 0.0
        room = before - behind
        lead = behind + min(max(floor((room + longer) / 2 + 0.5), 0), room)
        return Early(before - lead, lead) if own == first else Early(lead - behind)


def flight_of(plan: Plan, carrier: str) -> ReceiveOrder | None:
    """As the plan has it for groups of `carrier`; None where the engine's own schedule runs."""
    held = plan.traffic_of(carrier).in_flight
    return ReceiveOrder(held, tuple(load.busy_s for load in plan.loads)) if held else None
