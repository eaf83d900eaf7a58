"""All-reduce for a group that spans clusters: only sums of whole clusters cross the slow network.

    chunk 1   [1 scatter in][2 scatter across][3 gather across][4 gather in]
    chunk 2                 [1 scatter in    ][2 scatter across][3 ...           chunks follow each other like
    chunk 3                                   [1 scatter in    ][2 ...           micro-batches in a pipeline

    1  inside each cluster, on its fabric: rank k gets the cluster's sum of block k (reduce-scatter)
    2  across clusters, on Ethernet: the owners of the same elements reduce-scatter their sums; every node's
       NIC sends
    3  across: they all-gather the total
    4  inside: all-gather the blocks

Of B bytes a cluster sends 2 (C-1)/C B across for C clusters, the least that any all-reduce can; a flat ring
on Ethernet sends 2 (n-1)/n B from EVERY rank. This is the hierarchical all-reduce of Jia et al. 2018 (arXiv
1807.11205, section 3.2), with both outer steps split into their halves.

Over gloo each step is one exchange: every rank sends each other rank its block directly, receives posted
first, one group for each direction (gloo's own reduce_scatter moves as many bytes as an all-reduce: measured
3 to 4 times slower than this exchange). The order of additions is fixed by the rank order, and each element
is added up on one rank: all ranks get the same bits. Steps 2 and 3 may be compressed (compress.py), the steps
inside never are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from holmes_ext.errors import HolmesError
from holmes_ext.plan.buckets import CHUNK_SHARE_BYTES, chunks_of
from holmes_ext.runtime.compress import Residuals, codec
from holmes_ext.runtime.reduce.direct import DirectExchange, Relay
from holmes_ext.runtime.reduce.steps import Steps
from holmes_ext.units import format_bytes

if TYPE_CHECKING:
    from holmes_ext.plan.traffic import CrossClusterAlgorithm
    from holmes_ext.runtime.reduce.direct import Parts
    from holmes_ext.runtime.reduce.flat_bucket import FlatBucket
    from holmes_ext.runtime.reduce.steps import Work

#: A part of a tensor, and its residuals or its passage.
Chunk = tuple[torch.Tensor, Any]


@dataclass(frozen=True)
class Shard:
    """Elements [start, stop) of a chunk with one owner in every cluster, in cluster order."""

    start: int
    stop: int
    owners: tuple[int, ...]


def shards(numel: int, clusters: Sequence[Sequence[int]]) -> list[Shard]:
    """A chunk of `numel` elements, cut wherever the owner changes in some cluster."""
    cuts_of = [_cuts(numel, len(members)) for members in clusters]
    stage_links = sorted({cut for cuts in cuts_of for cut in cuts})
    return [
        Shard(
            start,
            stop,
            tuple(
                members[bisect_right(cuts, start) - 1] for members, cuts in zip(clusters, cuts_of)
            ),
        )
        for start, stop in pairwise(stage_links)
    ]


def _cuts(numel: int, parts: int) -> list[int]:
    return [numel * part // parts for part in range(parts + 1)]


def _split(tensor: torch.Tensor, parts: int) -> list[torch.Tensor]:
    cuts = _cuts(tensor.numel(), parts)
    return [tensor[start:stop] for start, stop in zip(cuts, cuts[1:])]


class HierarchicalAllReduce:
    """Hierarchical all-reduce over all ranks of `clusters` by sends over gloo: a Reduction.

    clusters: global ranks of each cluster, the same on every rank (two clusters or more). chunk_bytes: None
    takes 512 KiB for each rank of the smallest cluster. compress: of what crosses, "off", "bf16" or "int8"
    (with error feedback for tensors that are reduced again in later steps: the same tensor objects). across:
    another way than directly, for clusters of these names (relay.py; nothing is compressed); streams: of each
    two ranks, across; purpose: see DirectExchange. Construction is collective: it makes gloo groups of this
    cluster on its fabric and of all clusters on Ethernet (where holmes is active it chooses the NICs; else
    GLOO_SOCKET_IFNAME does). Tensors are on the CPU.
    """

    multiple = 1

    def __init__(
        self,
        clusters: Sequence[Sequence[int]],
        *,
        chunk_bytes: int | None = None,
        compress: str = "off",
        across: CrossClusterAlgorithm | None = None,
        names: Sequence[str] = (),
        streams: int = 1,
        purpose: str = "hierarchical",
    ):
        self.clusters = [list(members) for members in clusters]
        everyone = sorted(rank for members in self.clusters for rank in members)
        self.rank = dist.get_rank()
        if (
            len(self.clusters) < 2
            or len(set(everyone)) != len(everyone)
            or self.rank not in everyone
        ):
            raise HolmesError(
                f"HierarchicalAllReduce: clusters {self.clusters} must be two or more lists of "
                f"different ranks,"
                f" rank {self.rank} in one of them"
            )
        self.members = next(members for members in self.clusters if self.rank in members)
        self.chunk_bytes = chunk_bytes or CHUNK_SHARE_BYTES * min(
            len(members) for members in self.clusters
        )
        self._inside = DirectExchange(sorted(self.members), purpose=purpose)
        self._across = DirectExchange(everyone, codec(compress), streams, purpose)
        self._residuals = Residuals()
        middle: list[Callable[[Chunk], None]] = [self._scatter_across, self._gather_across]
        self._relay = None
        if across is not None:
            self._relay = Relay(
                self._across, across, names, names[self.clusters.index(self.members)]
            )
            middle = [partial(self._relay_on, turn) for turn in range(len(self._relay.rounds))]
        self._steps = Steps("hierarchical", self._scatter_inside, *middle, self._gather_inside)

    def all_reduce(self, flat: torch.Tensor, bucket: FlatBucket | None = None) -> Work:
        """Start the sum of a tensor, as Reduction.all_reduce. Rounding errors are kept for each `bucket`."""
        assert flat.dim() == 1 and flat.is_contiguous() and flat.device.type == "cpu"
        residuals = self._residuals.of(bucket or flat) if self._across.codec.feedback else None
        chunks = flat.tensor_split(chunks_of(flat.nbytes, self.chunk_bytes))
        if self._relay is None:
            return self._steps([(chunk, residuals) for chunk in chunks])
        owned = [self._owned(chunk, self._relay.parts) for chunk in chunks]
        return self._steps(
            [(chunk, self._relay.expect(parts)) for chunk, parts in zip(chunks, owned)]
        )

    def close(self) -> None:
        self._steps.close()

    def describe(self) -> str:
        chunk = format_bytes(self.chunk_bytes)
        return f"hierarchical all-reduce over {len(self.clusters)} clusters, in chunks of {chunk}"

    @property
    def bytes_across(self) -> int:
        """What this rank has sent to other clusters so far, without headers."""
        return self._across.bytes_sent

    def _relay_on(self, turn: int, part: Chunk) -> None:
        assert self._relay is not None
        self._relay.turn(turn, part[1])

    def _scatter_inside(self, part: Chunk) -> None:
        self._inside.reduce_scatter([(_split(part[0], len(self.members)), self.members)], tag=1)

    def _scatter_across(self, part: Chunk) -> None:
        self._across.reduce_scatter(self._owned(part[0]), 2, part[1])

    def _gather_across(self, part: Chunk) -> None:
        self._across.all_gather(self._owned(part[0]), 3, part[1])

    def _gather_inside(self, part: Chunk) -> None:
        self._inside.all_gather([(_split(part[0], len(self.members)), self.members)], tag=4)

    def _owned(self, chunk: torch.Tensor, count: int = 0) -> list[Parts]:
        """The pieces that this rank owns, each cut into `count` parts, or one for each of its owners."""
        owned = [
            shard for shard in shards(chunk.numel(), self.clusters) if self.rank in shard.owners
        ]
        return [
            (_split(chunk[shard.start : shard.stop], count or len(shard.owners)), shard.owners)
            for shard in owned
        ]
