"""Hierarchical all-reduce whose sums cross clusters by recursive doubling, over gloo.

Inside a cluster it is holmes's own: a reduce-scatter before, an all-gather after. Between clusters, P is the
largest power of two that is not above the number of clusters C (rounds are numbered from 0):

    fold      cluster P + i sends its sums to cluster i, which adds them
    double    in the k-th of log2(P) rounds, clusters i and i ^ 2**k exchange their sums, and both add them
    unfold    cluster i sends the total to cluster P + i

A sum crosses in 2 + log2(P) messages, log2(C) if C is a power of two, where a ring needs 2 (C - 1). Each
message has a whole shard, so this is for links of high latency, and for two clusters.

Addition commutes, so both clusters of a pair compute the same bits; after each round those of all clusters
that have exchanged are equal.

Source: Thakur, Rabenseifner and Gropp 2005, Optimization of Collective Communication Operations in MPICH.
"""

from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from holmes_ext.plan.buckets import CHUNK_SHARE_BYTES, chunks_of
from holmes_ext.plan.traffic import SOCKETS
from holmes_ext.runtime import session
from holmes_ext.runtime.backend import backend_of, network_api_of
from holmes_ext.runtime.reduce.direct import DirectExchange, DividedTensor, wait_for
from holmes_ext.runtime.reduce.hierarchical import shards
from holmes_ext.runtime.reduce.steps import ThreadPipeline

# Tags of the messages: those of a round across clusters are _ACROSS_TAG plus its number.
_SCATTER_TAG, _GATHER_TAG, _ACROSS_TAG = 1, 2, 10


class Round(NamedTuple):
    """What a cluster does in a round: it sends its sums, receives a partner's, or both."""

    partner: int  # number of the other cluster
    tag: int
    sends: bool
    receives: bool
    adds: bool = True  # False: what it receives is the total


def rounds_of(cluster: int, clusters: int) -> list[Round]:
    """Return the rounds of a cluster, whose number is less than `clusters`, in a sum over all clusters."""
    steps = clusters.bit_length() - 1
    power = 1 << steps
    extra = clusters - power  # clusters beyond the power of two
    unfold_tag = _ACROSS_TAG + steps + 1
    if cluster >= power:
        partner = cluster - power
        return [
            Round(partner, _ACROSS_TAG, sends=True, receives=False),
            Round(partner, unfold_tag, sends=False, receives=True, adds=False),
        ]
    rounds = [
        Round(cluster ^ (1 << step), _ACROSS_TAG + 1 + step, sends=True, receives=True)
        for step in range(steps)
    ]
    if cluster < extra:
        partner = cluster + power
        rounds.insert(0, Round(partner, _ACROSS_TAG, sends=False, receives=True))
        rounds.append(Round(partner, unfold_tag, sends=True, receives=False))
    return rounds


class DoublingAllReduce:
    """All-reduce for tensors on the CPU; implements holmes_ext.runtime.reduce.reduction.Reduction."""

    multiple = 1

    def __init__(self, clusters, chunk_bytes=0, purpose="doubling"):
        """Make the process groups and start the threads. All ranks of all clusters must do so.

        Args:
            clusters: Global ranks of each cluster, equal on all ranks; two clusters or more.
            chunk_bytes: Size of a chunk; 0 for 512 KiB for each rank of the smallest cluster.
            purpose: Part of the process groups' names.
        """
        self.clusters = [list(members) for members in clusters]
        self.rank = dist.get_rank()
        (number,) = (n for n, members in enumerate(self.clusters) if self.rank in members)
        self.members = self.clusters[number]
        self.chunk_bytes = chunk_bytes or CHUNK_SHARE_BYTES * min(map(len, self.clusters))
        self._inside = DirectExchange(sorted(self.members), purpose=purpose)
        all_ranks = sorted(rank for members in self.clusters for rank in members)
        self._across = DirectExchange(all_ranks, purpose=purpose)
        rounds = rounds_of(number, len(self.clusters))
        self._pipeline = ThreadPipeline(
            "doubling",
            self._scatter_inside,
            *(partial(self._run, one) for one in rounds),
            self._gather_inside,
        )

    def all_reduce(self, flat, bucket=None):
        """Start the sum of a tensor over all ranks, in place; see Reduction.all_reduce."""
        return self._pipeline.submit(flat.tensor_split(chunks_of(flat.nbytes, self.chunk_bytes)))

    def close(self):
        """Finish the sums under way and end the threads."""
        self._pipeline.close()

    def _blocks(self, chunk):
        return DividedTensor(chunk.tensor_split(self._cuts(chunk)), self.members)

    def _cuts(self, chunk):
        """Return where a chunk is cut into a block for each rank of this cluster, as shards() cuts it."""
        count = len(self.members)
        return [chunk.numel() * block // count for block in range(1, count)]

    def _scatter_inside(self, chunk):
        self._inside.reduce_scatter([self._blocks(chunk)], _SCATTER_TAG)

    def _gather_inside(self, chunk):
        self._inside.all_gather([self._blocks(chunk)], _GATHER_TAG)

    def _run(self, one, chunk):
        """Exchange the sums of this rank's shards of a chunk in a round."""
        owned = [s for s in shards(chunk.numel(), self.clusters) if self.rank in s.owners]
        transfers, received = [], []
        if one.receives:  # posted before the sends, so that no rank waits for ever
            for shard in owned:
                own = chunk[shard.start : shard.stop]
                buffer = torch.empty_like(own) if one.adds else own
                transfers += self._across.start_receive(buffer, shard.owners[one.partner], one.tag)
                received.append((own, buffer))
        if one.sends:
            for shard in owned:
                own = chunk[shard.start : shard.stop]
                transfers += self._across.start_send(own, shard.owners[one.partner], one.tag)
        wait_for(transfers)
        if one.adds:
            for own, buffer in received:
                own.add_(buffer)


def doubling_for(group, size, spec, device_type):
    """Return recursive doubling for a group that the plan sums hierarchically over gloo, else None."""
    if not spec.clusters or size < spec.hierarchical_from or spec.compress != "off":
        return None
    if network_api_of(backend_of(group, device_type)) != SOCKETS or device_type == "cuda":
        return None
    clusters = session.require().plan.by_cluster(dist.get_process_group_ranks(group))
    return (
        DoublingAllReduce(list(clusters.values()), spec.chunk_bytes) if len(clusters) > 1 else None
    )
