"""Hierarchical all-reduce over gloo: only the sums of whole clusters cross the slow network.

A tensor is cut into pieces:

    chunk   piece of the tensor; it passes through the steps below as a whole
    block   piece of a chunk. Each rank of a cluster sums the elements of a block in its cluster.
    shard   piece of a chunk whose elements are summed by a single rank in each cluster, its owner there. If
            all clusters have the same number of ranks, the shards are the blocks.
    part    piece of a shard. The shard's owner in each cluster adds up a part over all clusters.

Each chunk passes through four steps:

    1  scatter inside   reduce-scatter among the ranks of a cluster, on the fabric of the cluster: rank k gets
                        the cluster's sum of block k
    2  scatter across   reduce-scatter among the ranks of all clusters that have sums of the same elements, on
                        Ethernet; the NICs of all nodes take part
    3  gather across    all-gather of the totals among the same ranks
    4  gather inside    all-gather of the blocks among the ranks of a cluster

Each step runs in a thread (steps.py), so consecutive chunks overlap:

    chunk 1   [scatter in][scatter across][gather across ][gather in]
    chunk 2               [scatter in    ][scatter across][gather across][gather in]
    chunk 3                               [scatter in    ][scatter across][ ...

Invariant: all ranks reduce the same tensors in the same order, and each step has a thread and a tag of its
own. So the messages of a step are matched chunk by chunk. Each element is added up on a single rank in the
order of the ranks, so all ranks get the same bits.

No rank waits for ever: a step of a chunk waits only for the step before on the same rank, and for the same
step of the same chunk on other ranks. These send after they have posted their receives. This order has no
cycle.

Bytes: for a tensor of B bytes and C clusters, each cluster sends 2 (C-1)/C B to other clusters, the least of
any all-reduce. A flat ring over n ranks sends 2 (n-1)/n B from EVERY rank. The algorithm is the hierarchical
all-reduce of Jia et al. 2018 (arXiv 1807.11205, section 3.2); each all-reduce across clusters is split into
a reduce-scatter and an all-gather. All steps are direct exchanges (direct.py), because gloo's own
reduce_scatter moves as many bytes as an all-reduce, and took 3 to 4 times as long in a measurement.

Steps 2 and 3 may be compressed (compress.py), or be replaced by the rounds of a ring or a tree of clusters
(direct.py, Relay).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from holmes_ext.errors import HolmesError
from holmes_ext.plan.buckets import CHUNK_SHARE_BYTES, chunks_of
from holmes_ext.runtime.compress import Residuals, codec
from holmes_ext.runtime.reduce.direct import DirectExchange, DividedTensor, Relay
from holmes_ext.runtime.reduce.steps import ThreadPipeline

if TYPE_CHECKING:
    from holmes_ext.plan.traffic import CrossClusterAlgorithm
    from holmes_ext.runtime.compress import ResidualMap
    from holmes_ext.runtime.reduce.direct import RelayedChunk
    from holmes_ext.runtime.reduce.flat_bucket import FlatBucket
    from holmes_ext.runtime.reduce.steps import Work

# Tags of the messages of each step.
_SCATTER_INSIDE_TAG = 1
_SCATTER_ACROSS_TAG = 2
_GATHER_ACROSS_TAG = 3
_GATHER_INSIDE_TAG = 4

_FEWEST_CLUSTERS = 2


class Chunk(NamedTuple):
    """A chunk of a tensor on its way through the steps of the all-reduce."""

    tensor: torch.Tensor
    residuals: ResidualMap | None  # rounding errors of its tensor; None without error feedback
    relayed: RelayedChunk | None  # receives of a ring or tree; None: clusters exchange directly


@dataclass(frozen=True)
class Shard:
    """Elements [start, stop) of a chunk that a single rank of each cluster, its owner there, adds up.

    After the reduce-scatter inside the clusters, each owner has the sum of the elements over its cluster.
    """

    start: int
    stop: int
    owners: tuple[int, ...]  # global rank of the owner in each cluster


def shards(numel: int, clusters: Sequence[Sequence[int]]) -> list[Shard]:
    """Cut a chunk into shards, so that each shard has a single owner in every cluster.

    Within a cluster, each rank owns an equal block of the chunk. Clusters of different sizes have blocks of
    different lengths, so the chunk is cut at the boundaries of all clusters' blocks.

    Args:
        numel: Elements of the chunk.
        clusters: Global ranks of each cluster.
    """
    boundaries_of = [_block_boundaries(numel, len(members)) for members in clusters]
    all_boundaries = sorted({boundary for boundaries in boundaries_of for boundary in boundaries})
    result = []
    for start, stop in pairwise(all_boundaries):
        owners = []
        for members, boundaries in zip(clusters, boundaries_of):
            block = bisect_right(boundaries, start) - 1  # number of the block that contains `start`
            owners.append(members[block])
        result.append(Shard(start, stop, tuple(owners)))
    return result


def _block_boundaries(numel: int, blocks: int) -> list[int]:
    """Return the boundaries of equal blocks: the first element of each block, and the end."""
    return [numel * block // blocks for block in range(blocks + 1)]


def _split(tensor: torch.Tensor, blocks: int) -> list[torch.Tensor]:
    """Return views of equal blocks of a flat tensor."""
    boundaries = _block_boundaries(tensor.numel(), blocks)
    return [tensor[start:stop] for start, stop in pairwise(boundaries)]


class HierarchicalAllReduce:
    """Hierarchical all-reduce over gloo, for tensors on the CPU; implements Reduction."""

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
        """Set up a hierarchical all-reduce: make its process groups, and start its threads.

        All ranks of all clusters must do so. The process groups inside a cluster use its fabric,
        and those of all clusters use Ethernet. If holmes is off, GLOO_SOCKET_IFNAME chooses the
        network of both.

        Args:
            clusters: Global ranks of each cluster, equal on all ranks; two clusters or more.
            chunk_bytes: Size of a chunk; None for 512 KiB for each rank of the smallest cluster.
            compress: Compression between clusters: "off", "bf16" or "int8". "int8" adds the rounding errors
                to the next reduction of the same tensor (error feedback).
            across: Ring or tree of clusters; None for a direct exchange. A ring or tree is not compressed.
            names: Names of the clusters, as `across` uses them.
            streams: Connections between two ranks of different clusters.
            purpose: Part of the process groups' names.

        Raises:
            HolmesError: the clusters overlap, there are fewer than two, or this rank is in none.
        """
        self.clusters = [list(members) for members in clusters]
        all_ranks = sorted(rank for members in self.clusters for rank in members)
        self.rank = dist.get_rank()
        has_duplicates = len(set(all_ranks)) != len(all_ranks)
        if len(self.clusters) < _FEWEST_CLUSTERS or has_duplicates or self.rank not in all_ranks:
            raise HolmesError(
                f"HierarchicalAllReduce: clusters {self.clusters} must be two or more lists of "
                f"different ranks, rank {self.rank} in one of them"
            )
        self.members = next(members for members in self.clusters if self.rank in members)
        smallest_cluster = min(len(members) for members in self.clusters)
        self.chunk_bytes = chunk_bytes or CHUNK_SHARE_BYTES * smallest_cluster
        self._inside = DirectExchange(sorted(self.members), purpose=purpose)
        self._across = DirectExchange(all_ranks, codec(compress), streams, purpose)
        self._residuals = Residuals()
        self._relay = None  # ring or tree of clusters; None if clusters exchange directly
        steps_across: list[Callable[[Chunk], None]] = [self._scatter_across, self._gather_across]
        if across is not None:
            own_name = names[self.clusters.index(self.members)]
            self._relay = Relay(self._across, across, names, own_name)
            steps_across = []
            for number in range(len(self._relay.rounds)):
                steps_across.append(partial(self._run_relay_round, number))
        self._pipeline = ThreadPipeline(
            "hierarchical", self._scatter_inside, *steps_across, self._gather_inside
        )

    def all_reduce(self, flat: torch.Tensor, bucket: FlatBucket | None = None) -> Work:
        """Start the sum of a tensor over all ranks, in place; see Reduction.all_reduce.

        Args:
            flat: One-dimensional and contiguous, on the CPU.
            bucket: The bucket whose buffer `flat` is, or None. With a compression that has error
                feedback, it identifies the rounding errors of earlier calls (if None: `flat`).
        """
        assert flat.dim() == 1
        assert flat.is_contiguous()
        assert flat.device.type == "cpu"
        residuals = None  # no rounding errors are kept
        if self._across.codec.feedback:
            residuals = self._residuals.of(bucket or flat)
        chunks = []
        chunk_count = chunks_of(flat.nbytes, self.chunk_bytes)
        for tensor in flat.tensor_split(chunk_count):
            relayed = None
            # Between clusters, sums pass around a ring or along a tree of clusters (_relay), or
            # each rank exchanges its shard with all other clusters directly (None).
            if self._relay is not None:
                # The receives of the ring or tree are posted now, so that no message has to wait
                # for its receiver.
                shards_of_rank = self._shards_of_this_rank(tensor, part_count=self._relay.parts)
                relayed = self._relay.post_receives(shards_of_rank)
            chunks.append(Chunk(tensor, residuals, relayed))

        # Each chunk passes through four steps: reduce-scatter inside the clusters, then between
        # them, all-gather between the clusters, then inside them. Each step has a thread. So chunk
        # 2 can be in the first step while chunk 1 is in the second.
        return self._pipeline.submit(chunks)

    def close(self) -> None:
        """Finish the sums under way, and end the threads of the all-reduce."""
        self._pipeline.close()

    @property
    def bytes_across(self) -> int:
        """Number of bytes that this rank has sent to other clusters so far, without headers."""
        return self._across.bytes_sent

    # The steps of a chunk

    def _scatter_inside(self, chunk: Chunk) -> None:
        self._inside.reduce_scatter([self._cluster_blocks(chunk.tensor)], _SCATTER_INSIDE_TAG)

    def _scatter_across(self, chunk: Chunk) -> None:
        shards_of_rank = self._shards_of_this_rank(chunk.tensor)
        self._across.reduce_scatter(shards_of_rank, _SCATTER_ACROSS_TAG, chunk.residuals)

    def _gather_across(self, chunk: Chunk) -> None:
        shards_of_rank = self._shards_of_this_rank(chunk.tensor)
        self._across.all_gather(shards_of_rank, _GATHER_ACROSS_TAG, chunk.residuals)

    def _gather_inside(self, chunk: Chunk) -> None:
        self._inside.all_gather([self._cluster_blocks(chunk.tensor)], _GATHER_INSIDE_TAG)

    def _run_relay_round(self, number: int, chunk: Chunk) -> None:
        assert self._relay is not None
        assert chunk.relayed is not None
        self._relay.run_round(number, chunk.relayed)

    def _cluster_blocks(self, tensor: torch.Tensor) -> DividedTensor:
        """Divide a chunk of the tensor into equal blocks, one for each rank of this cluster."""
        return DividedTensor(_split(tensor, len(self.members)), self.members)

    def _shards_of_this_rank(
        self, tensor: torch.Tensor, part_count: int | None = None
    ) -> list[DividedTensor]:
        """Return the ranges of a chunk that this rank sums with a rank of each other cluster.

        Such a range is a shard. After the reduce-scatter inside the clusters, one rank of each
        cluster, the shard's owner, holds the cluster's sum of the shard. If the clusters have
        different numbers of ranks, a rank may own several shards of a chunk.

        Args:
            tensor: The chunk.
            part_count: Number of parts of each shard. None: as many as there are clusters.
                The owner in cluster i then adds up part i. A sum along a tree of clusters has 1
                part.

        Returns:
            The shards that this rank owns in its cluster, as views of the chunk.
        """
        result = []
        for shard in shards(tensor.numel(), self.clusters):
            if self.rank in shard.owners:
                elements = tensor[shard.start : shard.stop]
                parts = _split(elements, part_count or len(shard.owners))
                result.append(DividedTensor(parts, shard.owners))
        return result
