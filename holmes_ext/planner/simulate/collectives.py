"""Collectives of a step: the bytes that are summed or gathered, the ranks that take part, and the start.

gradients       of a stage after its last backward pass, or under it: a layer's gradients are final in the
                last micro-batch's backward pass, and full buckets are sent at once. Chunks of an
                interleaved stage share no bucket
tied weight     of the first and the last stage, after the stage's own gradients or before them
                (EngineTraits.tied_first)
ZeRO 1          weights are gathered after the optimizer, or under the next forward pass
ZeRO 2, 3       in each micro-batch a layer's gradients are scattered after its backward pass; ZeRO 3
                gathers its weights before both passes, ZeRO 2 once a step
single numbers  the gradient norm among a pipeline's stages before the optimizer; the loss, averaged
                over the last stage's ranks and sent to the other stages at the step's end; sums of
                the script

A pipeline class is all pipelines on equal nodes; their ranks do the same at the same time. A family
is all groups of a stage with equal nodes; they are simulated together. A tag is the key of a transfer:
(name of the collective, stage, pipeline classes that take part, number).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby

from holmes_ext.plan.buckets import bucket_bytes
from holmes_ext.plan.cost.model import Layer, Model
from holmes_ext.plan.cost.network import Load, Network
from holmes_ext.plan.cost.reductions import (
    ZERO_GRADIENTS,
    ZERO_WEIGHTS,
    Hierarchical,
    PricedReduction,
    Tag,
    by_pairs,
    hierarchical,
    inside_clusters,
    owners,
    tied_hierarchical,
    tied_weight_families,
)
from holmes_ext.plan.placement import Fold, GroupFamily
from holmes_ext.planner.simulate.events import Transfer
from holmes_ext.planner.simulate.execution import Execution
from holmes_ext.planner.simulate.gradient_buckets import (
    BucketGroup,
    ChunkLayer,
    Gradient,
    bucket_groups,
)
from holmes_ext.planner.simulate.transfers import TransferMaker

#: Most pieces into which a reduction is divided. The steps of the pieces overlap like a pipeline. More
#: pieces are simulated as fewer, larger pieces. That overrates the time to fill this pipeline by less
#: than 1/32.
MAX_PIECES = 32
#: Bytes of a single number.
NUMBER_BYTES = 4.0


class Collectives:
    """Transfers of all collectives of a step."""

    def __init__(
        self,
        network: Network,
        fold: Fold,
        run: Execution,
        ranges: Sequence[tuple[int, int]],
        layers: Sequence[Layer],
        model: Model,
        maker: TransferMaker,
    ):
        """Create the transfers of all collectives of a step; `transfers` has them by tag (key).

        Args:
            fold: Compact placement: it has a representative of each set of equal ranks.
            run: Schedule and overlap.
            ranges: (first layer, end, exclusive) of every chunk, in the order of the forward pass:
                chunk c of stage s is item c x stages + s.
            layers: Embedding, transformer blocks and output layer.
        """
        self.network = network
        self.fold = fold
        self.run = run
        self.ranges = ranges
        self.model = model
        self.maker = maker
        self.stages = len(fold.stages)
        sizes = fold.full_placement.sizes
        #: Bytes of weights for each byte of gradients.
        self.weight_share = model.activation_width / model.gradient_width
        self.parameters = [layer.parameters for layer in layers]
        #: Bytes of each gradient of each layer.
        self.reduced: list[list[float]] = []
        for layer in layers:  # reduced(): elements of each gradient
            counts = layer.reduced(sizes.data * sizes.context, sizes.expert)
            self.reduced.append([model.gradient_width * count for count in counts])
        self.tied_bytes = model.tied_bytes(sizes)
        #: ZeRO 1 gathers the weights under the next forward pass.
        self.late_gather = run.zero == 1 and run.gather_overlap
        self.transfers: dict[Hashable, Transfer] = {}
        #: Tag of a collective -> tags of the transfers to post instead: the first of each of its
        #: chains.
        self.starts: dict[Tag, list[Hashable]] = {}

        # By (pipeline class, stage): groups that sum gradients, groups that shard, buckets.
        self.groups: dict[tuple[int, int], GroupFamily] = {}
        self.shards: dict[tuple[int, int], GroupFamily] = {}
        self.bucket_groups: dict[tuple[int, int], list[BucketGroup]] = {}
        #: Pipeline class -> collective of the tied embedding.
        self.tied: dict[int, Tag] = {}
        for stage in fold.stages:
            for family in fold.families(stage):  # all groups of a stage on equal nodes
                if family.ranks > 1:
                    self._add_family(family)
        if self.tied_bytes:
            self._add_tied()
        if self.stages > 1:
            self._add_numbers()

    def _add_numbers(self) -> None:
        """Add the messages of single numbers (gradient norm and loss) to the step's transfers.

        A pipeline class is all pipelines on equal nodes; each has its own. The norm is all-reduced
        among a pipeline's stages; the loss goes from the last stage to each other stage.
        """
        last = self.stages - 1
        for pipeline_class in range(len(self.fold.pipeline_classes)):
            if self.run.engine.norm:
                self.transfers["norm", pipeline_class] = self._norm(pipeline_class)
            if self.run.engine.reports_loss:
                for stage in range(last):
                    self.transfers["loss", pipeline_class, stage] = self._number(
                        pipeline_class, last, stage
                    )

    # ------------------------------------------------------------------- gradients and weights

    def gradients(self, stage: int) -> list[Gradient]:
        """Return the gradients of a stage in the order in which its backward passes complete them.

        So the last layer comes first. A gradient is marked as late if the reduction can send it only
        after the last backward pass: that of a tied weight (embedding and output layer), if the
        engine sums it between the first and the last stage before.
        """
        late: set[tuple[int, int]] = set()  # (layer, number of the gradient)
        if self.tied_bytes and self.run.engine.tied_first:
            # The tied weight is the embedding's first gradient and the output layer's last.
            last_layer = len(self.reduced) - 1
            late = {(0, 0), (last_layer, len(self.reduced[-1]) - 1)}
        result = []
        for chunk in reversed(range(self.run.virtual)):
            low, high = self.ranges[chunk * self.stages + stage]
            for layer in reversed(range(low, high)):
                for number, size in reversed(list(enumerate(self.reduced[layer]))):
                    is_late = (layer, number) in late
                    result.append(Gradient(ChunkLayer(chunk, layer), size, late=is_late))
        return result

    def _add_family(self, family: GroupFamily) -> None:
        """Add all collectives of the groups that sum a stage's gradients.

        They are bucket reductions, weight gathers with ZeRO, and sums of numbers. A family is all
        groups of a stage on equal nodes; a pipeline class is all pipelines on equal nodes.
        """
        run = self.run
        stage = family.stage
        parties = len(family.pipeline_classes)  # actors that take part
        gradients = self.gradients(stage)
        ring = self._ring(family)
        hierarchical_reduction = None  # hierarchical all-reduce, if used
        if run.is_hierarchical(stage):
            total_bytes = sum(gradient.size for gradient in gradients)
            link_bps = self._link_bps(family.node_types)
            # None if impossible. 0: number of other groups; the simulation shares the links itself
            hierarchical_reduction = hierarchical(
                self.network, family, total_bytes, run.direct, 0, run.compress, link_bps
            )
        piece_bytes = hierarchical_reduction.chunk_bytes if hierarchical_reduction else 0.0
        all_buckets = self._buckets(family, gradients, piece_bytes)
        for pipeline_class in family.pipeline_classes:
            self.groups[pipeline_class, stage] = family
            self.bucket_groups[pipeline_class, stage] = all_buckets
        if run.engine.averages_loss and stage == self.stages - 1:
            average = ("average", stage, family.pipeline_classes, 0)
            self.transfers[average] = self._number_summed(family, ring)
        for number in range(run.sums):
            total = ("sum", stage, family.pipeline_classes, number)
            self.transfers[total] = self._number_summed(family, ring)
        if run.zero >= ZERO_GRADIENTS:
            self._add_shards(family)

        scatters = run.zero > 0 and run.engine.scatters
        reduction = (
            hierarchical_reduction
            if hierarchical_reduction and not scatters
            else PricedReduction(ring)
        )
        for number, buckets in enumerate(all_buckets):
            tag = ("reduce", stage, family.pipeline_classes, number)  # key of the transfer
            if scatters:  # a reduce-scatter, with run.scatter of an all-reduce's traffic
                self._add_ring(family, ring.scaled(run.scatter), tag, buckets.sizes)
            else:
                max_pieces = MAX_PIECES // len(all_buckets)
                self._add_reduction(reduction, tag, buckets.sizes, parties, max_pieces)
            if run.zero:
                weight_bytes = [self.weight_share * size for size in buckets.sizes]
                gather = ("gather", *tag[1:])
                all_gather = ring.scaled(0.5)  # half of an all-reduce's traffic
                self._add_ring(family, all_gather, gather, weight_bytes)

    def _buckets(
        self, family: GroupFamily, gradients: Sequence[Gradient], piece_bytes: float
    ) -> list[BucketGroup]:
        """Divide a stage's gradients into buckets. Buckets that are sent at the same time are a group.

        Args:
            family: Equal groups that sum the gradients.
            gradients: In the order of becoming final.
            piece_bytes: Size of the pieces of a hierarchical all-reduce; 0 without.
        """
        run = self.run
        total_bytes = sum(gradient.size for gradient in gradients)
        has_overlap = run.buckets_on(family.stage)
        if not has_overlap:  # a single bucket, sent after all backward passes (after=None)
            chunk_layers = dict.fromkeys(gradient.chunk_layer for gradient in gradients)
            return [BucketGroup(sizes=(total_bytes,), chunk_layers=tuple(chunk_layers), after=None)]
        fabric = self.network.fabric(family.node_types)
        default_bytes = bucket_bytes(fabric, family.ranks, total_bytes)
        limit_bytes = run.bucket_bytes or piece_bytes or default_bytes  # the first that is not 0
        exceed = run.engine.buckets_exceed  # a bucket ends with the gradient that reaches the limit
        result: list[BucketGroup] = []
        # The chunks of an interleaved schedule share no bucket.
        for _, chunk in groupby(gradients, lambda gradient: gradient.chunk_layer.chunk):
            result += bucket_groups(list(chunk), limit_bytes, exceed, run.first_bucket_bytes)
        return result

    def _add_reduction(
        self,
        reduction: PricedReduction,
        tag: Tag,
        sizes: Sequence[float],
        parties: int,
        max_pieces: int,
    ) -> None:
        """Add the transfers of a gradient reduction: a chain for each piece of the bytes.

        Each step of a chain is a transfer. The ranks post (start) the first transfer of a chain; each
        transfer posts the next.

        Args:
            reduction: All-reduce to add.
            tag: Key of the reduction.
            sizes: Bytes of each bucket.
            parties: Actors that take part.
            max_pieces: Most pieces into which a bucket is divided.
        """
        # For each piece of the bytes, its steps in order (Flow: tag, bytes, use of the networks).
        chains = reduction.flows(sizes, tag, max(1, max_pieces))
        self.starts[tag] = [chain[0].tag for chain in chains]
        for chain in chains:
            for number, flow in enumerate(chain):
                posts = parties if number == 0 else 1  # the transfer before posts the others
                self.transfers[flow.tag] = self.maker.reduction_step(flow, posts)

    def _add_ring(self, family: GroupFamily, load: Load, tag: Tag, sizes: Sequence[float]) -> None:
        """Add a ring collective to the transfers.

        Args:
            family: Groups that take part: all groups of a stage on equal nodes, simulated together.
            load: Traffic of the ring for each byte.
            tag: Key of the transfer: (name, stage, pipeline classes, number of the bucket or
                layer). Names: "reduce" (gradients), "gather" (weights once a step), "weights"
                (weights before each pass, ZeRO 3), "scatter" and "across" (ZeRO 2 and 3).
            sizes: Bytes of each part, if several parts follow each other as a single transfer.
        """
        links = self.network.links
        # Measured CPU seconds of a byte, relative to those of an all-reduced byte.
        cpu_factor_of = {
            "gather": links.host_gather,
            "weights": links.host_gather,
            "scatter": links.host_scatter,
        }
        name, stage, pipeline_classes, *_ = tag
        cpu_factor = cpu_factor_of.get(str(name), 1.0)
        transfer = self.maker.collective(load, sizes, len(family.pipeline_classes), cpu_factor)
        # Transfers of a channel follow each other. A communicator runs its collectives in sequence,
        # so those of equal name, stage and pipeline classes share a channel.
        self.transfers[tag] = replace(transfer, channel=(name, stage, pipeline_classes))

    def _add_shards(self, family: GroupFamily) -> None:
        """Add the transfers of ZeRO 2 and 3 for every layer; they recur in each micro-batch.

        They are a reduce-scatter of the gradients, with ZeRO 3 an all-gather of the weights before
        each pass, and with hybrid sharding an all-reduce of the shards between clusters.

        Args:
            family: Equal data parallel groups of a stage, simulated together.
        """
        run = self.run
        stage = family.stage
        # Hybrid sharding: the ranks of each cluster shard the model by themselves.
        hybrid = inside_clusters(self.network, family) if run.replicas == "clusters" else []
        # Groups whose ranks share a whole model: a group for each cluster, or all ranks.
        sharding_groups = [self._of_cluster(shards) for shards in hybrid] or [family]
        # Groups of the ranks that own the same shard, a rank in each cluster; they all-reduce it.
        across = owners(self.network, family) if hybrid else None
        for shards in sharding_groups:
            for pipeline_class in shards.pipeline_classes:
                self.shards[pipeline_class, stage] = shards
        for layer in range(*self.ranges[stage]):
            gradient_bytes = sum(self.reduced[layer])
            weight_bytes = self.weight_share * gradient_bytes  # weights for each byte of gradients
            for shards in sharding_groups:
                ring = self._ring(shards)  # load of an all-reduce; scaled() multiplies its bytes
                name = (stage, shards.pipeline_classes, layer)
                scatter = ("scatter", *name)
                # run.scatter: traffic of a reduce-scatter, relative to an all-reduce
                self._add_ring(shards, ring.scaled(run.scatter), scatter, [gradient_bytes])
                if run.zero == ZERO_WEIGHTS:
                    for letter in "FB":  # forward and backward pass
                        weights = ("weights", *name, letter)
                        all_gather = ring.scaled(0.5)  # half of an all-reduce's traffic
                        self._add_ring(shards, all_gather, weights, [weight_bytes])
            if across is not None:
                shard_bytes = gradient_bytes / sharding_groups[0].ranks
                tag = ("across", stage, family.pipeline_classes, layer)  # key of the transfer
                self._add_ring(across, self._ring(across), tag, [shard_bytes])

    def _of_cluster(self, family: GroupFamily) -> GroupFamily:
        """Restrict groups of ranks to the pipelines that lie in the groups' own cluster.

        A pipeline class is all pipelines on equal nodes; on this stage it lies in a single cluster.

        Args:
            family: Ranks of equal data parallel groups in a cluster. Its `pipeline_classes` are still those
                of all clusters.
        """
        pipeline_classes = tuple(
            pipeline_class
            for pipeline_class in family.pipeline_classes
            if self.fold.node_type_on(pipeline_class, family.stage) in family.node_types
        )
        return replace(family, pipeline_classes=pipeline_classes)

    def _ring(self, family: GroupFamily) -> Load:
        return self.network.ring(family, inside_bps=self._link_bps(family.node_types))

    def _link_bps(self, node_types: Iterable[int]) -> float:
        """Return the least rate between the GPUs of a node, over several node types, in bits/s."""
        clusters = [self.network.cluster(node_type) for node_type in node_types]
        return min(self.model.gpu_of(cluster).link_bps for cluster in clusters)

    # ------------------------------------------------------------------- tied embedding

    def _add_tied(self) -> None:
        """Add the transfers that sum the tied embedding's gradient over first and last stage.

        Each pipeline class (pipelines on equal nodes) takes the faster of two ways: an all-reduce in
        each pair of ranks, one of either stage; or a hierarchical all-reduce over all these ranks.
        """
        hierarchical_of = self._hierarchical_tied() if self.run.tied else {}
        for pipeline_class in range(len(self.fold.pipeline_classes)):
            pair = self._tied_pair(pipeline_class)
            tag: Tag = ("tied", 0, (pipeline_class,), 0)  # key of the transfer
            parties = 2  # actors that must be ready: the first and the last stage of the class
            reduction: PricedReduction = pair
            if pipeline_class in hierarchical_of:
                hierarchical_reduction, family = hierarchical_of[pipeline_class]
                if hierarchical_reduction.seconds(self.tied_bytes) < pair.seconds(self.tied_bytes):
                    # All pipeline classes of the family (equal groups) share one reduction: two
                    # actors of each class take part.
                    tag = ("tied", 0, family.pipeline_classes, 0)
                    parties = 2 * len(family.pipeline_classes)
                    reduction = hierarchical_reduction
            if tag not in self.transfers:
                self._add_reduction(reduction, tag, [self.tied_bytes], parties, MAX_PIECES)
                # Transfers of a channel run in sequence. A reduction with a single step (transfer)
                # needs no channel. flows() lists the steps; their number does not depend on the bytes,
                # so it is called with 1 byte in 1 piece.
                (steps,) = reduction.flows([1.0], tag, 1)
                if len(steps) == 1:
                    self.transfers[tag].channel = None
            self.tied[pipeline_class] = tag

    def _tied_pair(self, pipeline_class: int) -> PricedReduction:
        """Return the all-reduce of the tied embedding's gradient between first and last stage.

        A pipeline class is all pipelines on equal nodes.
        """
        fold = self.fold
        last = fold.stages[-1]
        link_bps = self._link_bps(
            (fold.node_type_on(pipeline_class, 0), fold.node_type_on(pipeline_class, last))
        )
        return by_pairs(self.network, fold, pipeline_class, link_bps)

    def _hierarchical_tied(self) -> dict[int, tuple[Hierarchical, GroupFamily]]:
        """Return pipeline class -> (hierarchical all-reduce of the tied embedding, its groups).

        A pipeline class is all pipelines on equal nodes. The all-reduce is possible if the first
        and the last stage are on different clusters.
        """
        result: dict[int, tuple[Hierarchical, GroupFamily]] = {}
        # Groups of the ranks that hold the tied weight, on the first and the last stage:
        for family in tied_weight_families(self.fold):
            link_bps = self._link_bps(family.node_types)
            hierarchical_reduction = tied_hierarchical(
                self.network,
                family,
                self.tied_bytes,
                direct=self.run.direct,  # gloo's direct exchanges instead of NCCL's rings
                groups=0,  # the simulation shares the links between groups by itself
                inside_bps=link_bps,
            )
            for pipeline_class in family.pipeline_classes:
                # A class may be in several families (sets of equal groups), but the simulation has a
                # single reduction for it. The last family decides: its hierarchical all-reduce, or
                # none if it has none. So an earlier family's is removed.
                result.pop(pipeline_class, None)
                if hierarchical_reduction:
                    result[pipeline_class] = hierarchical_reduction, family
        return result

    # ------------------------------------------------------------------- single numbers

    def _number(self, pipeline_class: int, stage: int, other: int) -> Transfer:
        """Return the message of a single number from a stage to another: only its latency counts.

        Args:
            pipeline_class: Number of the class of pipelines: all pipelines on equal nodes.
            stage, other: Sending and receiving stage.
        """
        load = self.network.message(self.fold.stage_link(pipeline_class, stage, other))
        message = self.maker.message(load, NUMBER_BYTES)
        # No bits, so it takes no rate from other transfers.
        return replace(message, bits=0.0, uses=(), channel=None)

    def _norm(self, pipeline_class: int) -> Transfer:
        """Return the all-reduce of a number among the stages of pipelines on equal nodes (a class).

        In gloo's ring, the number goes around twice, with a message less than a whole round each
        time. Before that, the receiver of the first message sends a notice that it is ready.
        """
        stages = self.stages
        # Message of a number from each stage to the previous stage; stage 0 sends to the last.
        receivers = (stages - 1, *range(stages - 1))
        hops = [self._number(pipeline_class, *pair) for pair in enumerate(receivers)]
        hops_s = [hop.fixed_s + hop.latency_s for hop in hops]
        # The first time omits the message of the first stage, the second time that of the second.
        twice_around_s = 2 * sum(hops_s) - hops_s[0] - hops_s[1]
        notice_s = hops[-1].latency_s  # back over the link of the last stage's message
        across = any(hop.across for hop in hops)
        return Transfer(parties=stages, fixed_s=twice_around_s + notice_s, across=across)

    def _number_summed(self, family: GroupFamily, ring: Load) -> Transfer:
        """Return the all-reduce of a number over gloo's ring (gloo/allreduce.cc).

        The number goes around the ring twice, each time without the last link:

            first time     last rank -> ... -> second rank -> first rank
            second time    first rank -> last rank -> ... -> second rank

        Before that, the receiver of the first message sends a notice that it is ready. Only the
        latencies of links between clusters are added here; `ring` has those of the messages inside.

        Args:
            family: Equal groups that sum the number. family.ring: (node type, nodes) in ring order.
            ring: Traffic of a ring over their ranks.
        """
        parties = len(family.pipeline_classes)
        if ring.fabric is None:
            return self.maker.collective(ring, [NUMBER_BYTES], parties)
        # Cluster of each rank on the ring, with at most two nodes of each run of equal nodes:
        # messages inside a cluster have no latency between clusters, so more nodes would add
        # nothing.
        clusters = [
            self.network.cluster(node_type)
            for node_type, nodes in family.ring
            for _ in range(min(nodes, 2))
        ]
        # Messages once around: last rank -> ... -> second -> first -> last rank.
        downwards = list(reversed(clusters))
        senders = downwards
        receivers = [*downwards[1:], downwards[0]]
        fabric = self.network.fabric(family.node_types)
        extra_s = []  # for each of these messages: latency between clusters
        for pair in zip(senders, receivers):
            source, target = pair
            extra_s.append(self.network.wan_latency_s(fabric, pair) if source != target else 0.0)
        # The list ends with the messages second -> first rank and first -> last rank. The first
        # time omits the latter, the second time the former: twice around, less each once.
        twice_around_s = 2 * sum(extra_s) - sum(extra_s[-2:])
        notice_s = extra_s[0]  # back over the first message's link (from the last rank)
        load = replace(ring, wan_latency_s=twice_around_s + notice_s)
        transfer = self.maker.collective(load, [NUMBER_BYTES], parties)
        # No bits, so it takes no rate from other transfers.
        return replace(transfer, bits=0.0, uses=())
