"""What of a Plan a running job looks up: which network every group gets, how gradients are reduced, how stages send.

    fabrics    in the order of preference: the first that all nodes of a group can use is the group's
    traffic    for each carrier the decisions that follow; one entry where both come to the same

What carries a group's tensors decides which ports it can use: NCCL needs HCAs ("verbs"), gloo an address ("sockets",
which InfiniBand without IPoIB has not). Ethernet carries both, so every node is on it.
"""

from __future__ import annotations

from dataclasses import dataclass

from holmes_ext.cluster.site import Fabric
from holmes_ext.plan.cost.across import Across

VERBS, SOCKETS = CARRIERS = ("verbs", "sockets")
#: The "fabric" of a group that one node holds: memory, NVLink or loopback.
LOCAL = "local"


@dataclass(frozen=True)
class PlannedFabric(Fabric):
    """A fabric as the plan reckons with it (measured where it was), and the nodes that can use it."""

    verbs: tuple[str, ...]
    sockets: tuple[str, ...]


@dataclass(frozen=True)
class Reduction:
    """How the gradients of one pipeline stage are averaged.

    overlap: under the last backward pass. bucket_bytes: of gradients that travel together in one ring. clusters: where
    their names stand, a group that lies on several of them sums in two levels what has two_level_from bytes or more, in
    buckets of chunk_bytes; compress: what crosses then ("off", "bf16", "int8"). across: how, where it is not directly;
    streams: connections that each pair of ranks shares out what crosses over (gloo groups).
    """

    overlap: bool
    bucket_bytes: int
    clusters: tuple[str, ...] = ()
    two_level_from: int = 0
    chunk_bytes: int = 0
    compress: str = "off"
    across: Across | None = None
    streams: int = 1


@dataclass(frozen=True)
class Edge:
    """Two neighbouring stages; one entry for each pipeline group, in their order, or one where all are the same.

    fabrics: of the pair of ranks. own: where the pair gets a group of its own: "world" in frameworks that send over the
    group of all ranks (DeepSpeed), "pipeline" in those that send over the pipeline group (megatron-core),
    "pipeline+world" in both, "" in none. slices: tensor ranks that share out what each of them has to send. narrow:
    what activations and gradients are rounded to on their way ("off", "bf16", "int8").
    """

    stages: tuple[int, ...]
    fabrics: tuple[str, ...]
    own: tuple[str, ...]
    slices: int = 1
    narrow: str = "off"


@dataclass(frozen=True)
class Traffic:
    """The decisions for groups that one of `carriers` carries.

    transports: for each kind of group the fabric of every group, in the order of first ranks; one entry where they
    share one. reductions: by stage, one entry where the sizes are not known. edges: of the pipeline. in_flight:
    micro-batches that each stage begins before its first backward ends, where sends do not block; () where the
    framework's own schedule runs. tied: names of the clusters between which gradients of a weight that the first and
    the last stage share are summed in two levels; () where each rank does it with its twin, as frameworks do.
    """

    carriers: tuple[str, ...]
    transports: dict[str, tuple[str, ...]]
    reductions: tuple[Reduction, ...]
    edges: tuple[Edge, ...] = ()
    in_flight: tuple[int, ...] = ()
    tied: tuple[str, ...] = ()


def same(values: tuple[str, ...]) -> tuple[str, ...]:
    """One entry where all are equal."""
    return values[:1] if len(set(values)) == 1 else values
