"""Limits on the layers of stages whose gradient reductions share a link between clusters.

A hop is a link between two clusters, or the uplink of a cluster. Example: stages 0 and 1 both lie on
clusters a and b. Then the gradients of both stages pass the hop from a to b.

The hop carries all these reductions within the time that a step leaves for them:

  * No reduction begins before its stage's last backward pass. The first stage's pass is the last of
    all, so its reduction begins last.
  * Reductions share the hop fairly. While the first stage's reduction runs, each reduction of
    another stage between the same clusters gets about the same rate, until it ends.
  * The tied embedding's reduction comes after the first stage's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from holmes_ext.cluster.wan import Hop
from holmes_ext.plan.cost.network import Load
from holmes_ext.plan.cost.reductions import Hierarchical
from holmes_ext.planner.bound.stages import StageBounds

#: Bytes that another stage's reduction sends over a hop for each byte of the first stage's, at
#: least, while both run: below 1 because the chunks of a reduction wait for each other.
FAIR = 0.9


class SharedHop(NamedTuple):
    """A link between clusters that carries the gradient reductions of several stages.

    shared_hops() makes it. The seconds say how long the link is busy, so they limit how many layers
    its stages can have in a step of a given length. A block is a transformer layer.
    """

    stages: tuple[int, ...]
    #: Least seconds for a block's gradients, on any of the stages.
    block_s: float
    #: Seconds for the gradients of the embedding and the output layer, as far as their stages use
    #: the hop.
    ends_s: float
    #: Seconds for the embedding's gradients, if the first stage uses the hop.
    embedding_s: float = 0.0
    #: Stages on the same nodes as the first stage, and the first stage itself: their reductions
    #: share the hop fairly with the first stage's.
    beside_first: tuple[int, ...] = ()

    def blocks(self, seconds: float) -> float:
        """Return how many layers (blocks) have gradients that this link can carry in `seconds`.

        The number may be a fraction. It is negative if the time is too short for embedding and
        output layer.
        """
        return (seconds - self.ends_s) / self.block_s

    def blocks_beside_first(self, max_layers: Sequence[int], seconds: float) -> float:
        """Return an upper bound on the layers of this link's stages, from the first stage's deadline.

        The first stage must send its gradients over the link within `seconds`. Stages on the same
        nodes (`beside_first`) send theirs at the same time, and share the link's rate with it: each
        sends at least FAIR = 0.9 bytes for every byte of the first stage. So with more layers on
        these stages the first stage ends later. Layers of the link's other stages do not delay it.
        The result counts the layers of all stages on the link together. No plan that meets the
        deadline has more. The first stage's number of layers is open, so every number is tried.

        Args:
            max_layers: For each stage, the largest number of layers that it may have.
            seconds: Time for the first stage's reduction.

        Returns:
            Number of layers, may be a fraction: inf if the first stage does not use the link, -inf
            if `seconds` is too short.
        """
        if 0 not in self.stages:
            return inf
        # Most layers of each stage that shares the link with the first stage, the largest first.
        sharing = sorted((max_layers[stage] for stage in self.beside_first if stage), reverse=True)
        all_layers = sum(max_layers[stage] for stage in self.stages)
        # Layers of the other stages on the link. They cost the first stage no time here.
        independent = all_layers - max_layers[0] - sum(sharing)
        most = -inf
        for first_layers in range(1, max_layers[0] + 1):
            sharing_layers = self._layers_sharing(first_layers, sharing, seconds)
            most = max(most, first_layers + independent + sharing_layers)
        return most

    def _layers_sharing(self, first_layers: int, sharing: Sequence[int], seconds: float) -> float:
        """Return an upper bound on the layers of the stages that share the link with the first stage.

        The first stage must have sent its gradients within `seconds`. At that moment each sharing
        stage either still sends (a "larger" stage, with more layers than the first), or has sent
        all its gradients (a "smaller" stage). The larger stages used the link for at least FAIR = 0.9
        times as long as the first stage; the time that remains limits the layers of the smaller
        stages. How many stages are larger is open, so every number is tried.

        Args:
            first_layers: Layers of the first stage.
            sharing: Most layers of each sharing stage, the largest first.
            seconds: Time for the first stage's reduction.

        Returns:
            Number of layers, may be a fraction; -inf if `seconds` is too short.
        """
        # Seconds for which the link is busy with the first stage's gradients.
        first_s = first_layers * self.block_s + self.embedding_s
        most = -inf
        for larger in range(len(sharing) + 1):
            # The link is busy for `first_s` with the first stage's gradients, and for at least
            # FAIR * first_s with those of each larger stage. The smaller stages have the remaining
            # time.
            remaining_s = seconds - (1 + FAIR * larger) * first_s
            if remaining_s >= 0:
                # At least the share FAIR of the smaller stages' gradients has passed in this time:
                # FAIR * layers * block_s <= remaining_s, solved for the number of layers.
                most_smaller_layers = remaining_s / (FAIR * self.block_s)
                smaller_layers = min(sum(sharing[larger:]), most_smaller_layers)
                most = max(most, sum(sharing[:larger]) + smaller_layers)
        return most


def shared_hops(bounds: StageBounds) -> list[SharedHop]:
    """Return the links between clusters that carry gradient reductions, the slowest first.

    A link limits how many layers the stages that use it can have together. If a stage uses several
    links, only the slowest is returned, as its limit is the lowest. So no stage is on two of the
    returned links, and the caller, blocks_at_most(), can apply the limits one after the other.
    """
    byte_s: dict[Hop, dict[int, float]] = defaultdict(dict)  # hop -> stage -> seconds for a byte
    for stage in range(bounds.stage_count):
        for hop, seconds in _hop_byte_s(bounds, stage).items():
            byte_s[hop][stage] = seconds

    # A stage may need 0 seconds, such as under ZeRO 2 and 3: it does not sum once a step. Then the
    # link sets no limit.
    candidates = [
        _shared_hop(bounds, by_stage) for by_stage in byte_s.values() if min(by_stage.values()) > 0
    ]

    # The slowest link needs most seconds for another layer on each of its stages.
    chosen: list[SharedHop] = []
    for candidate in sorted(candidates, key=lambda hop: -len(hop.stages) * hop.block_s):
        if not any(set(candidate.stages) & set(hop.stages) for hop in chosen):
            chosen.append(candidate)
    return chosen


def _shared_hop(bounds: StageBounds, byte_s: dict[int, float]) -> SharedHop:
    """Return the least seconds for which the gradients of its stages occupy a link between clusters.

    The result's `block_s` is for the gradients of a transformer layer, on the stage that sends
    least over the link for it: a lower bound for all stages. `ends_s` is for the embedding, if the
    first stage uses the link, and for the output layer, if the last stage does.

    Args:
        bounds: Lower bounds on the work of the stages.
        byte_s: Each stage on the link -> seconds for which a byte of its gradients occupies the
            link.
    """
    # Bytes of gradients that a rank reduces.
    embedding_bytes, block_bytes, output_bytes = bounds.prices.job.reduced_bytes
    first_byte_s = byte_s.get(0, 0.0)
    last_byte_s = byte_s.get(bounds.stage_count - 1, 0.0)

    # On the stage with the least traffic for a byte: a lower bound for all stages.
    block_s = min(byte_s.values()) * block_bytes
    # Stages like stage 0. Only between equal reductions is the hop shared fairly, and stages on
    # equal nodes may reduce in different ways (ring, hierarchical): then their traffic for each
    # byte differs.
    nodes = bounds.placement.stages  # of each stage: node types and the ranks on each
    beside_first = [
        stage
        for stage, seconds in byte_s.items()
        if nodes[stage] == nodes[0] and seconds == first_byte_s
    ]
    return SharedHop(
        stages=tuple(byte_s),
        block_s=block_s,
        ends_s=first_byte_s * embedding_bytes + last_byte_s * output_bytes,
        embedding_s=first_byte_s * embedding_bytes,
        beside_first=tuple(beside_first),
    )


def _hop_byte_s(bounds: StageBounds, stage: int) -> dict[Hop, float]:
    """Return the links that a stage's gradient reduction uses: link -> seconds that it is busy for a byte.

    Only links between clusters count. A link (Hop) connects two clusters, or a cluster to the WAN
    (uplink). The result is empty if the route depends on the number of bytes, because that number
    is not known yet.

    Args:
        bounds: Lower bounds on the work of the stages.
        stage: Stage that reduces its gradients.
    """
    # Traffic relative to an all-reduce; 0.5 if the gradients are only reduce-scattered once a step.
    share = bounds.all_reduce_share
    # A load says how a collective uses NICs and links. _: the groups that are summed over
    reduction, _ = bounds.reduction(stage)
    loads: tuple[Load, ...] = (reduction.load,)
    if isinstance(reduction, Hierarchical):
        if bounds.run.direct:  # gloo's direct exchanges instead of rings
            return {}  # the route depends on the stage's bytes, and they are not known yet
        # Only these two steps pass between clusters: the sums to the owners of a slice, and back.
        loads = (reduction.reduce_across, reduction.gather_across)
        share *= reduction.compressed_share
    byte_s = defaultdict[Hop, float](float)
    for load in loads:
        # For each byte of gradients a flow sends `volume` bytes, and `flows` flows pass the hop.
        for hop, flows in load.hops:
            byte_s[hop] += 8 * share * load.volume * flows / hop.rate_bps
    return byte_s


def blocks_at_most(
    hops: Sequence[SharedHop],
    max_layers: Sequence[int],
    seconds: Sequence[float],
    first_s: float = inf,
) -> float:
    """Return the most layers (blocks) whose gradients the links between clusters can carry in time.

    Without the links, the stages could have the sum of `max_layers`. A link must carry the gradients
    of the stages that use it. So it has a limit on the layers of these stages together. What
    `max_layers` exceeds this limit is subtracted, for each link.

    Args:
        hops: Links between clusters without a common stage (shared_hops).
        max_layers: For each stage, the largest number of layers that it may have.
        seconds: For each link, the time for the reductions of all its stages.
        first_s: Time for the first stage's reduction. It is shorter, because the first stage ends
            its backward passes last.
    """
    total: float = sum(max_layers)
    for hop, hop_s in zip(hops, seconds):
        most_on_stages = sum(max_layers[stage] for stage in hop.stages)
        limit_of_all = hop.blocks(hop_s)  # in the time for the reductions of all its stages
        limit_by_first = hop.blocks_beside_first(max_layers, first_s)  # in the first stage's time
        limit = min(limit_of_all, limit_by_first)
        total -= max(0.0, most_on_stages - limit)
    return total
