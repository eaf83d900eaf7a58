"""What every reduction of the gradients of a stage tells of itself.

It is made for one family of groups (plan/placement/fold.py): its prices where it is alone, its flows for the
simulation.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from holmes_ext.plan.cost.network import Load, Price

#: Of a transfer.
Tag = tuple[Hashable, ...]


@dataclass(frozen=True)
class Flow:
    """Bytes of `sizes`, one after the other, over one load; or one step of a chain, over several at once."""

    loads: tuple[Load, ...]
    sizes: tuple[float, ...]
    #: Name in the simulation, and what it stands behind.
    tag: Hashable
    channel: Hashable = None
    #: The step of a chain that follows when it has arrived.
    then: Hashable = None
    chained: bool = False
    #: Latency of a way between clusters; blocks: what follows on the same channel waits for it too.
    way_s: float = 0.0
    blocks: bool = False


@dataclass(frozen=True)
class PricedReduction:
    """A reduction by one ring over all ranks of a group, which others refine. name: in tables."""

    load: Load = Load()
    name: str = "flat"

    @property
    def once(self) -> Price:
        """Of a step's gradients, by their bytes."""
        return self.load.price

    def seconds(self, size: float) -> float:
        """Of `size` bytes at once."""
        return self.once.seconds(size)

    def flows(self, sizes: Sequence[float], tag: Tag, most: int) -> list[list[Flow]]:
        """Of buckets of `sizes` bytes: at most `most` chains, begun by their first flow; the last is named
        `tag`."""
        return [[Flow((self.load,), tuple(sizes), tag, tag[:3])]]


#: Where there is nothing to sum.
NONE = PricedReduction(name="none")
