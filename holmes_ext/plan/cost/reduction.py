"""Which stages' gradient reductions would be waited for, and how large a bucket suits a fabric.

    stage 0   B B B B [reduce]           ends last: whatever it reduces after its last backward is exposed
    stage 1   B B B B   [=== reduce ===] ends a backward earlier: hidden on a fast fabric, exposed on a slow one

Frameworks bucket and overlap on the first stage only, which is right on one uniform network.
"""

from __future__ import annotations

from collections.abc import Sequence

from holmes_ext.cluster.site import Fabric, Site
from holmes_ext.plan.cost.model import Layer
from holmes_ext.plan.cost.step import Workload, step_seconds
from holmes_ext.plan.sizes import Sizes

#: A bucket is at least so much longer on the wire than the latencies of its ring, and at most this part of its stage.
LATENCIES = 10
BUCKETS = 8


def exposed_stages(site: Site, nodes: Sequence[str], sizes: Sizes, workload: Workload | None = None) -> tuple[bool, ...]:
    """For each stage, whether reducing in one piece after its last backward would end after the first stage's last backward.

    nodes: in the order of ranks. workload: nominal by default (plan/cost/step.py), whose proportions hold for any model size.
    """
    step = step_seconds(site, nodes, sizes, workload)
    first = step.backward_end_s[0]
    return tuple(bool(reduction) and end + reduction > first for end, reduction in zip(step.backward_end_s, step.reduction_s))


def reduced_parameters(layer: Layer, shards: int, expert: int) -> float:
    """Parameters of a layer that a group of all `shards` data- and context-parallel ranks would have to reduce to send as much: an expert's
    are reduced only by the shards / expert ranks that hold it."""
    group = max(1, shards // expert)
    less = (group - 1) / group / ((shards - 1) / shards) if shards > 1 else 1.0
    return layer.parameters - layer.expert_parameters * (1 - less)


def bucket_bytes(stage_bytes: int, members: int, fabric: Fabric) -> int:
    """Bytes of one bucket for a stage that reduces `stage_bytes` among `members` ranks on `fabric`.

    The last bucket is what overlap cannot hide, so an eighth of the stage; but never so small that a ring's 2(n-1) latencies
    (plan/cost/step.py, allreduce_seconds) are more than a tenth of its time.
    """
    latency_floor = LATENCIES * members * fabric.latency_s * fabric.rate_bps / 8
    return max(stage_bytes // BUCKETS, int(latency_floor), 1)
