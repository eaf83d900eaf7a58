"""Limits on the layers of stages whose gradient reductions share a link between clusters.

    clusters a, b    stages 0 and 1 lie on both    all gradients of stages 0 and 1 pass the hop a -> b

A hop (a link or an uplink) carries all these reductions in the time that a step leaves for them. No reduction
begins before its stage's last backward pass, and the first stage's begins last. Hops are shared fairly:
while the first stage's reduction is under way, each other reduction between the same clusters gets as much
of the hop until it has ended. The tied embedding's reduction comes after the first stage's.
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

#: Least share of a hop that another reduction gets, relative to the first stage's: below 1 because the
#: chunks of a reduction wait for each other.
FAIR = 0.9


class SharedHop(NamedTuple):
    """A hop between clusters that carries the gradient reductions of several stages."""

    stages: tuple[int, ...]
    #: Least seconds for one block's gradients, on any of the stages.
    block_s: float
    #: Seconds for the gradients of embedding and output layer.
    ends_s: float
    #: Seconds for the embedding's gradients, if the first stage uses the hop.
    embedding_s: float = 0.0
    #: Stages between the same clusters as the first stage, which is among them.
    beside_first: tuple[int, ...] = ()

    def blocks(self, seconds: float) -> float:
        """Return the number of blocks whose gradients the hop carries in `seconds`; a fraction is possible.

        The number is negative if the time is too short for embedding and output layer.
        """
        return (seconds - self.ends_s) / self.block_s

    def blocks_beside_first(self, max_layers: Sequence[int], seconds: float) -> float:
        """Return the most blocks of all stages on the hop if the first stage has `seconds` to reduce.

        Args:
            max_layers: Most layers of each stage.
            seconds: Time for the first stage's reduction, which shares the hop fairly.

        Returns:
            Number of blocks: inf if the first stage does not use the hop, -inf if `seconds` is too short.
        """
        if 0 not in self.stages:
            return inf
        # Layers of the stages that compete with the first one, the largest first.
        sharing = sorted((max_layers[stage] for stage in self.beside_first if stage), reverse=True)
        all_layers = sum(max_layers[stage] for stage in self.stages)
        # layers of the stages on the hop that do not compete with the first stage
        independent = all_layers - max_layers[0] - sum(sharing)
        best = -inf
        for first_blocks in range(1, max_layers[0] + 1):
            first_s = first_blocks * self.block_s + self.embedding_s
            # Stages with more layers than the first one share the hop as long as the first one needs it. How
            # many there are is open, so every number is tried.
            for larger in range(len(sharing) + 1):
                remaining_s = seconds - (1 + FAIR * larger) * first_s
                if remaining_s >= 0:
                    smaller_blocks = min(sum(sharing[larger:]), remaining_s / (FAIR * self.block_s))
                    larger_blocks = sum(sharing[:larger])
                    blocks = first_blocks + independent + larger_blocks + smaller_blocks
                    best = max(best, blocks)
        return best


def shared_hops(bounds: StageBounds) -> list[SharedHop]:
    """Return the hops between clusters that limit the layers of several stages, slowest first.

    A hop that would share a stage with a slower one is left out. So no two hops have a stage in common, and
    their limits add up.
    """
    byte_s: dict[Hop, dict[int, float]] = defaultdict(dict)  # hop -> stage -> seconds of a byte
    for stage in range(bounds.stage_count):
        for hop, seconds in _hop_byte_s(bounds, stage).items():
            byte_s[hop][stage] = seconds
    candidates = [
        _shared_hop(bounds, by_stage) for by_stage in byte_s.values() if min(by_stage.values()) > 0
    ]
    chosen: list[SharedHop] = []
    for candidate in sorted(candidates, key=lambda hop: -len(hop.stages) * hop.block_s):
        if not any(set(candidate.stages) & set(hop.stages) for hop in chosen):
            chosen.append(candidate)
    return chosen


def _shared_hop(bounds: StageBounds, byte_s: dict[int, float]) -> SharedHop:
    """Return the SharedHop of a hop.

    Args:
        bounds: Lower bounds on the work of the stages.
        byte_s: Stage -> seconds that the hop needs for a byte of the stage's gradients.
    """
    embedding_bytes, block_bytes, output_bytes = bounds.prices.job.reduced_bytes
    first_byte_s = byte_s.get(0, 0.0)
    last_byte_s = byte_s.get(bounds.stage_count - 1, 0.0)
    nodes = bounds.placement.stages  # of each stage: clusters and the ranks on each
    beside_first = [  # stages on the same clusters as stage 0
        stage
        for stage, seconds in byte_s.items()
        if nodes[stage] == nodes[0] and seconds == first_byte_s
    ]
    return SharedHop(
        stages=tuple(byte_s),
        block_s=min(byte_s.values()) * block_bytes,
        ends_s=first_byte_s * embedding_bytes + last_byte_s * output_bytes,
        embedding_s=first_byte_s * embedding_bytes,
        beside_first=tuple(beside_first),
    )


def _hop_byte_s(bounds: StageBounds, stage: int) -> dict[Hop, float]:
    """Return, for each hop that a stage's reduction passes, the seconds for a byte of gradients."""
    share = bounds.all_reduce_share
    reduction, _ = bounds.reduction(stage)
    loads: tuple[Load, ...] = (reduction.load,)
    if isinstance(reduction, Hierarchical):
        if bounds.run.direct:
            return {}  # the route depends on the stage's bytes, which are not known yet
        loads = (
            reduction.reduce_across,
            reduction.gather_across,
        )  # to the other clusters, and back
        share *= reduction.compressed_share
    byte_s = defaultdict[Hop, float](float)
    for load in loads:
        for hop, flows in load.hops:
            byte_s[hop] += 8 * share * load.volume * flows / hop.rate_bps
    return byte_s


def blocks_at_most(
    hops: Sequence[SharedHop],
    max_layers: Sequence[int],
    seconds: Sequence[float],
    first_s: float = inf,
) -> float:
    """Return the most blocks of all stages if the hops carry their gradients in time.

    Args:
        hops: Hops without a common stage (shared_hops).
        max_layers: Most layers of each stage.
        seconds: Time that each hop has for all its reductions.
        first_s: Time for the first stage's reduction.
    """
    total: float = sum(max_layers)
    for hop, hop_s in zip(hops, seconds):
        # The stages on the hop lose the layers whose gradients it cannot carry.
        possible = sum(max_layers[stage] for stage in hop.stages)
        carried = min(hop.blocks(hop_s), hop.blocks_beside_first(max_layers, first_s))
        total -= max(0.0, possible - carried)
    return total
