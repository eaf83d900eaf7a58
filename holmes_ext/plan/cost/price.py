"""Cost of every layer on every stage of a placement, gradient reductions included.

    ReductionPrices               prices the ways in which the groups of a stage can reduce gradients
    ReductionPrices.reductions    the reduction of each stage: the way it uses, with its slowest group's price
    Prices.costs, price           -> StageCosts, the input of partition, search, bounds and plans

Results are kept, so stages on equal nodes are priced once. A stage is as fast as its slowest GPU and its
slowest group, and holds as much as its smallest GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any, NamedTuple, TypeVar

from holmes_ext.cluster.fabric import ETHERNET
from holmes_ext.plan.cost.network import FREE, Load, Network, Price
from holmes_ext.plan.cost.reductions import (
    NONE,
    ZERO_GRADIENTS,
    Hierarchical,
    PricedReduction,
    Sharded,
    by_pairs,
    hierarchical,
    inside_clusters,
    owners,
    tied_hierarchical,
    tied_weight_families,
)
from holmes_ext.plan.cost.stages import RankModel, Row, StageCosts, estimate
from holmes_ext.plan.engine import FLAT, HIERARCHICAL, Rules
from holmes_ext.plan.placement import Content, Fold, GroupFamily, Placement, StageMessages
from holmes_ext.plan.sizes import INSIDE

T = TypeVar("T")


class FoldedStages(NamedTuple):
    """A compact placement (Fold) of some stages, with the numbers of these stages in it.

    A Fold keeps a representative of each set of equal ranks, and counts the ranks that it represents.
    This Fold lacks all nodes that hold none of the stages. So other stages may be missing, and it
    numbers its stages from 0 again.
    """

    fold: Fold
    stages: tuple[int, ...]  # number in the fold of each requested stage


@dataclass(frozen=True)
class FamilyReductions:
    """Prices of the two ways to reduce the gradients of equal groups of a stage (a family)."""

    family: GroupFamily  # the groups
    flat: PricedReduction  # a single ring over all ranks of a group
    hierarchical: Hierarchical | None  # inside clusters, then across; None: not possible
    crossing_groups: float  # number of groups that share the links between clusters


class _StageKey(NamedTuple):
    """Key for cached results; it is equal for stages with equal nodes and groups."""

    parts: tuple[Content, ...]  # nodes of the components that contain the stages
    sizes: Hashable
    stages: tuple[int, ...]  # numbers of the stages within these components


class ReductionPrices:
    """Prices of the gradient reductions of a job on a given network, for any order of the nodes.

    A price is a time as a linear function of the bytes: seconds per byte, and latency in seconds.
    All placements (orders of the nodes) must have the same parallel sizes. Prices are computed when a
    method first needs them, and are then cached.

    Args:
        network: Nodes, fabrics and links of the site.
        job: Layers and bytes of a rank.
        rules: Reductions that the engine and the options allow.
        role_on_best_fabrics: Kind of group ("data", "tensor", "context" or "expert") that is priced as
            if all nodes of a group could use their best fabrics, even if they share only a slow
            fabric. The difference to the real price is the cost of such groups. "": no kind.
    """

    def __init__(
        self,
        network: Network,
        job: RankModel,
        rules: Rules = Rules(),
        role_on_best_fabrics: str = "",
    ):
        """Prepare prices of gradient reductions, and choose the network for each kind of group.

        The class describes the arguments.
        """
        self.network = network
        self.job = job
        self.rules = rules
        #: Whether prices are those of training without holmes, with a single fabric for all traffic.
        self.stock = network.single_fabric is not None
        self.hide_stage_links = rules.hide_stage_links and not self.stock and rules.virtual == 1
        self.cached_results: dict[Hashable, Any] = {}  # results of `remember`
        #: Role (kind) of a group, such as "data" -> network on which its groups are priced.
        self.network_of_role: dict[str, Network] = dict.fromkeys(INSIDE, network)
        if role_on_best_fabrics:
            self.network_of_role[role_on_best_fabrics] = Network(
                network.site, network.links, network.single_fabric, on_best_fabrics=True
            )

    # ------------------------------------------------------------------- results of equal stages

    def _key_and_fold(
        self, placement: Placement, *stages: int
    ) -> tuple[_StageKey, Callable[[], FoldedStages]]:
        """Return a cache key that equal stages share, and a function that makes their compact placement.

        A component is a set of neighbouring stages that share nodes; each component has equally
        many stages. Stages are equal if their components have nodes of the same types, and if they
        have the same numbers within their components. The compact placement (Fold) contains only
        these components, and only a representative of equal pipelines. It takes time, so callers
        make it only if no result is cached under the key.

        Args:
            placement: Nodes of each stage.
            stages: Numbers of the stages.
        """
        per_component = placement.stages_per_component  # neighbouring stages that share nodes
        components = sorted({stage // per_component for stage in stages})
        # The fold has only these components, in this order, so the stages have other numbers there.
        folded_stages = tuple(
            components.index(stage // per_component) * per_component + stage % per_component
            for stage in stages
        )
        parts = tuple(placement.parts[index] for index in components)  # the components' nodes
        sizes = placement.sizes

        def folded() -> FoldedStages:
            """Return the compact placement, made once for equal nodes, and the stages' numbers."""
            fold = self.network.remember(
                ("fold", (parts, sizes)),
                lambda: Fold(placement.alone(*components)),  # without the nodes of other components
            )
            return FoldedStages(fold, folded_stages)

        return _StageKey(parts, sizes, folded_stages), folded

    def _computed_once(
        self,
        name: str,
        make: Callable[[Fold, tuple[int, ...]], T],
        placement: Placement,
        *stages: int,
    ) -> T:
        """Return make(fold, stages), computed once for all stages on equal nodes.

        Args:
            name: Name of the result.
            make: Computes the result from a Fold (compact placement) and the stages' numbers there.
            placement: The placement.
            stages: Numbers of the stages.
        """
        # The key is equal for stages on equal nodes. folded() makes their compact placement, and
        # returns it with the stages' numbers in it.
        key, folded = self._key_and_fold(placement, *stages)
        return self.remember(name, key, lambda: make(*folded()))

    def fold(self, placement: Placement, *stages: int) -> FoldedStages:
        """Return a compact placement of these stages' nodes, and the stages' numbers in it.

        It keeps a representative of equal ranks, and counts them. Stages on other nodes are missing,
        so the stages may have other numbers in it.
        """
        _, folded = self._key_and_fold(placement, *stages)
        return folded()  # cached for equal nodes

    def remember(self, name: str, key: Hashable, make: Callable[[], T]) -> T:
        """Cache the result of make(): compute it once for each name and key.

        Args:
            name: Name of the result, such as "reduction".
            key: Everything that affects the result, besides this object.
            make: Computes the result.
        """
        if (name, key) not in self.cached_results:
            self.cached_results[name, key] = make()
        result: T = self.cached_results[name, key]
        return result

    # ------------------------------------------------------------------- reductions

    def reductions(self, placement: Placement) -> list[PricedReduction]:
        """Return how each stage reduces its gradients, priced for its slowest group."""
        result = [self._reduction(placement, stage) for stage in range(placement.sizes.pipeline)]
        if not self.rules.same_reductions:
            return result

        # The engine takes one setting for all stages. So it can reduce hierarchically only if all
        # stages do, and if all have equally many runs of equal nodes (mostly a run for each cluster).
        # Otherwise all of them use the flat ring. `content`: (node type, ranks) of each run.
        choices = {
            (reduction.name, len(content)) for reduction, content in zip(result, placement.stages)
        }
        if len(choices) > 1 and any(name == HIERARCHICAL for name, _ in choices):
            # The same prices, if only flat rings are allowed.
            flat = ReductionPrices(self.network, self.job, replace(self.rules, reductions=(FLAT,)))
            return flat.reductions(placement)
        return result

    def _reduction(self, placement: Placement, stage: int) -> PricedReduction:
        """Return the gradient reduction of a stage's slowest group, computed once for equal stages.

        Equal groups form a family, and are priced once. Each family can use a flat ring. If its groups
        span clusters, it may have a hierarchical all-reduce, too. A stage reduces hierarchically if
        that is faster for each such family. (The groups of a stage run at the same time and share
        NICs, so they all reduce in the same way.)
        """
        key, _ = self._key_and_fold(placement, stage)  # equal for stages on equal nodes
        # The number of stages on the same nodes decides how many groups share the links.
        stages_at_once = self._stages_on_same_nodes(placement, stage)
        return self.remember(
            "reduction",
            (key, stages_at_once),
            lambda: self._slowest_reduction(placement, stage),
        )

    def _slowest_reduction(self, placement: Placement, stage: int) -> PricedReduction:
        """Choose how each group of a stage reduces; return the reduction that takes longest.

        All groups that span clusters reduce hierarchically, if that is faster for each of them.

        Args:
            placement: Nodes of each stage.
            stage: Number of the stage.
        """
        mean_stage_bytes = self.job.total_bytes / placement.sizes.pipeline
        # The possible reductions (flat, hierarchical) of each family of equal groups.
        families = self.family_reductions(placement, stage)
        spanning = []  # families whose groups span clusters
        for options in families:
            # Only such groups have a hierarchical reduction. Then there is no need to look further.
            has_hierarchical = options.hierarchical is not None
            if has_hierarchical or self.network.spans_clusters(options.family.node_types):
                spanning.append(options)
        use_hierarchical = bool(spanning) and all(
            self._prefers_hierarchical(options, mean_stage_bytes) for options in spanning
        )
        chosen = [self._chosen(options, use_hierarchical) for options in families]
        return max(chosen, key=lambda reduction: reduction.seconds(mean_stage_bytes))

    def _prefers_hierarchical(self, options: FamilyReductions, size: float) -> bool:
        """Return whether some groups should reduce `size` bytes hierarchically.

        They should if it is possible, and either faster than a flat ring or the only allowed way.

        Args:
            options: The possible reductions of these equal groups, priced.
            size: Bytes of gradients.
        """
        if options.hierarchical is None:
            return False
        if FLAT not in self.rules.reductions:
            return True
        return options.hierarchical.seconds(size) < options.flat.seconds(size)

    def _chosen(self, options: FamilyReductions, use_hierarchical: bool) -> PricedReduction:
        """Return the reduction of some equal groups: hierarchical, sharded (ZeRO, FSDP) or flat.

        Args:
            options: The possible reductions of these groups, priced.
            use_hierarchical: Whether the groups of this stage reduce hierarchically if they can.
        """
        if options.family.ranks == 1:
            return NONE  # nothing to reduce
        # Collectives of ZeRO or FSDP, priced; None: nothing is sharded.
        sharded = self._sharded(options) if self.rules.zero else None
        if use_hierarchical and options.hierarchical is not None:
            if sharded is not None and self.rules.gathers:
                # ZeRO 1: all-reduced gradients, and the updated weights are gathered afterwards.
                return replace(options.hierarchical, weight_gather=sharded.gather)
            return options.hierarchical
        return sharded or options.flat

    def _stages_on_same_nodes(self, placement: Placement, stage: int) -> int:
        """Return how many stages use the links between clusters at the same time as `stage`, itself included.

        These are the stages on the same nodes, which reduce their gradients at the same time.
        """
        if not self.network.wan:
            return 1  # without such links, a stage shares none
        # placement.stages: nodes of each stage, as (node type, ranks)
        return placement.stages.count(placement.stages[stage])

    def family_reductions(self, placement: Placement, stage: int) -> list[FamilyReductions]:
        """Return the possible reductions of a stage's gradients, priced for each of its groups.

        Equal groups form a family with a single entry. Results are cached. Equal stages share them,
        if the same number of stages competes for the links between clusters.
        """
        key, folded = self._key_and_fold(placement, stage)
        stages_at_once = self._stages_on_same_nodes(placement, stage)
        pipeline = placement.sizes.pipeline
        return self.remember(
            "family reductions",
            (key, stages_at_once),
            lambda: self._priced_families(folded(), stages_at_once, pipeline),
        )

    def _priced_families(
        self, folded: FoldedStages, stages_at_once: int, pipeline: int
    ) -> list[FamilyReductions]:
        """Return the possible reductions of a stage's gradients, with an entry for equal groups.

        Args:
            folded: Compact placement (Fold) of the nodes of this stage. It has only this stage, and
                numbers it anew.
            stages_at_once: How many stages reduce at the same time over the same links.
            pipeline: How many stages the whole pipeline has.
        """
        (number_in_fold,) = folded.stages
        # A family is all data-parallel groups of the stage on equal nodes; `count` is their number.
        families = folded.fold.families(number_in_fold)
        groups_of_stage = sum(family.count for family in families)
        crossing_groups = stages_at_once * groups_of_stage
        return [self.reductions_of_family(family, crossing_groups, pipeline) for family in families]

    def reductions_of_family(
        self, family: GroupFamily, crossing_groups: float, pipeline: int = 1
    ) -> FamilyReductions:
        """Return the prices of the two ways in which equal data-parallel groups can sum gradients.

        Flat is a ring over all ranks of a group. Hierarchical sums inside each cluster first.

        Args:
            family: The equal groups.
            crossing_groups: Number of data-parallel groups, of this and other families, that use the
                links between clusters at the same time.
            pipeline: Number of stages. Each is assumed to have an equal part of all gradients.
        """
        network = self.network_of_role["data"]
        gpu_link_bps = self.link_bps(family.node_types)  # between the GPUs of a node
        flat = PricedReduction(
            load=network.ring(family, crossing_groups, gpu_link_bps),
            name=FLAT if family.nodes > 1 else "local",
        )
        return FamilyReductions(
            family,
            flat=flat,
            hierarchical=self._hierarchical_of_family(
                family, crossing_groups, stage_bytes=self.job.total_bytes / pipeline
            ),
            crossing_groups=crossing_groups,
        )

    def _hierarchical_of_family(
        self, family: GroupFamily, crossing_groups: float, stage_bytes: float
    ) -> Hierarchical | None:
        """Return the fastest hierarchical reduction of equal groups, or None if it is not allowed or useful.

        Args:
            family: The equal groups.
            crossing_groups: Number of groups that use the links between clusters at the same time.
            stage_bytes: Bytes of gradients for which the reduction should be fast.
        """
        rules = self.rules
        # ZeRO 2 and 3 reduce-scatter the gradients of each micro-batch instead.
        sums_once_a_step = rules.zero < ZERO_GRADIENTS
        is_allowed = not self.stock and HIERARCHICAL in rules.reductions
        if not sums_once_a_step or not is_allowed:
            return None
        return hierarchical(
            self.network_of_role["data"],
            family,
            stage_bytes,
            direct=rules.direct,  # gloo's exchanges in place of NCCL's rings
            groups=crossing_groups,
            compress=rules.compress,
            inside_bps=self.link_bps(family.node_types),
            chunk_bytes=rules.bucket_bytes,  # a chunk for each bucket; 0: the best size
        )

    def _sharded(self, options: FamilyReductions) -> Sharded:
        """Return the prices of the collectives of sharded training (ZeRO, FSDP) in equal groups.

        Weights, gradients or optimizer states are sharded over the ranks of each group. With hybrid
        sharding (FSDP's HSDP), every cluster has all shards: its ranks gather weights and
        reduce-scatter gradients among themselves. Ranks with the same shard in different clusters
        then all-reduce the gradient of their shard.

        Args:
            options: The groups, with the price of a flat ring all-reduce.
        """
        sharded = Sharded(
            load=options.flat.load,
            name=options.flat.name,
            zero=self.rules.zero,
            weight_bytes_per_gradient_byte=self.job.weight_bytes_per_gradient_byte,
        )
        if self.rules.zero == 1 and self.rules.gathers:
            # The engine all-reduces gradients, although a rank needs only its shard's, and gathers
            # the updated weights. So its scatter takes the whole time of an all-reduce.
            sharded = replace(sharded, scatter_share=1.0)
        if not self.rules.hybrid:
            return sharded

        # For each cluster, the ranks of the groups in this cluster, as a family of smaller groups.
        cluster_families = inside_clusters(self.network, options.family)
        if not cluster_families:  # the groups do not span clusters evenly
            return sharded  # all shards are divided among the ranks of all clusters

        # Load of a ring all-reduce inside each cluster.
        rings_inside = [
            self.network.ring(family, options.crossing_groups, self.link_bps(family.node_types))
            for family in cluster_families
        ]
        slowest = max(rings_inside, key=lambda ring: (ring.price.byte_s, ring.price.latency_s))
        shard_owners = owners(self.network, options.family)  # groups with a rank of each cluster
        across = self.network.ring(shard_owners, options.crossing_groups)  # load of an all-reduce
        shards = cluster_families[0].ranks  # ranks of a group in each cluster
        return replace(sharded, load=slowest, name="hybrid", across=across, shards=shards)

    def link_bps(self, node_types: Iterable[int]) -> float:
        """Return the slowest rate between the GPUs of a node of these types, in bits/s.

        0: not known; traffic inside a node then counts as free.
        """
        node_types = frozenset(node_types)
        clusters = map(self.network.cluster, node_types)
        # slowest(): a GPU with the least speed, memory and link rate of these clusters' GPUs.
        return self.remember("link", node_types, lambda: self.job.slowest(clusters).link_bps)


class Prices(ReductionPrices):
    """Costs of a job on a given network, for any order of the nodes (placement) of the same sizes.

    These are computation, messages between stages and memory, besides the prices of reductions.
    """

    def costs(
        self, placement: Placement, reductions: Sequence[PricedReduction] = (), sharded: bool = True
    ) -> StageCosts:
        """Return the costs of every type of layer on every stage.

        Args:
            placement: Nodes of each stage.
            reductions: Reduction of each stage; by default the fastest.
            sharded: Whether passes include the collectives of ZeRO 2 and 3 in each micro-batch.
        """
        job = self.job
        rules = self.rules
        chosen = list(reductions) or self.reductions(placement)  # by stage

        # By stage: seconds of both passes and of the reduction, for each type of layer.
        layer_costs = [
            self._layer_costs_of(placement, stage, reduction, sharded)
            for stage, reduction in enumerate(chosen)
        ]
        stage_links = self.stage_links(placement)  # price of an activation to each next stage
        limits = [
            self.remember("limits", content, partial(self._limits, content))
            for content in placement.stages
        ]
        link_load_s = None
        if self.hide_stage_links and stage_links:
            # Without the latency, during which other messages can use the stage link.
            size = job.block.activation_bytes
            link_load_s = tuple(stage_link.byte_s * size for stage_link in stage_links)
        return StageCosts(
            forward_s=tuple(costs.forward_s for costs in layer_costs),
            backward_s=tuple(costs.backward_s for costs in layer_costs),
            reduction_s=tuple(costs.reduction_s for costs in layer_costs),
            transfer_s=self._transfer_s(stage_links),  # of each type of layer's output, by stage
            micro_batches=job.micro_batches,
            # once: price of the collectives that run once a step
            latency_s=tuple(reduction.once.latency_s for reduction in chosen),
            state_bytes=job.state_bytes,
            kept_bytes=tuple(layer.kept_bytes for layer in job.layers),
            limit_bytes=tuple(limit.memory_bytes for limit in limits),
            before=job.before,
            after=job.after,
            tied_s=self.tied_s(placement),  # sum of the gradient of a tied embedding
            overlap=rules.overlap,
            repeats=job.repeats,
            working_bytes=job.working_bytes,
            virtual=rules.virtual,
            # Of the busiest NIC, for a micro-batch of an interleaved schedule.
            load_s=self._load_s(placement, stage_links) if rules.virtual > 1 else 0.0,
            places=tuple(limit.clusters for limit in limits),
            link_load_s=link_load_s,
            # (first, last) of stages that send to both sides over the same NIC.
            shared_nic_stages=self.shared_nic_stages(placement) if self.hide_stage_links else (),
            weights_s=tuple(costs.weights_s for costs in layer_costs),
        )

    def step_s(self, placement: Placement) -> float:
        """Return the step time in closed form, in seconds, for a job with a single block on each stage.

        This suits a RankModel.of_workload: its block has the work of a whole average stage.
        """
        costs = self.costs(placement)
        # estimate: times of a step in closed form, for these numbers of blocks (1, 1, ...)
        return estimate(costs, (1,) * costs.stages).step_s

    def _limits(self, content: Content) -> _StageLimits:
        """Return the clusters that a stage lies on, and the GPU memory that its ranks may use.

        Args:
            content: Nodes of the stage: (node type, number of ranks).
        """
        clusters = self.network.clusters(content)
        # slowest(): a GPU with the least speed, memory and link rate of these clusters' GPUs.
        memory_bytes = self.job.slowest(clusters).memory_bytes or inf  # 0: not known
        return _StageLimits(
            clusters=", ".join(clusters),
            memory_bytes=min(memory_bytes, self.rules.memory_bytes or inf),
        )

    def _layer_costs_of(
        self, placement: Placement, stage: int, reduction: PricedReduction, sharded: bool
    ) -> _LayerCosts:
        """Return the costs of each type of layer on a stage, computed once for equal stages.

        Args:
            placement: Nodes of each stage.
            stage: Number of the stage.
            reduction: Reduction of the stage's gradients.
            sharded: Whether passes include the collectives of ZeRO 2 and 3 in each micro-batch.
        """
        # A key that is equal for stages on equal nodes, and a function that makes their Fold (a
        # compact placement).
        key, folded = self._key_and_fold(placement, stage)
        return self.remember(
            "layers",
            (key, id(reduction), sharded),
            partial(self._layer_costs, folded, reduction, sharded),
        )

    def _layer_costs(
        self, folded: Callable[[], FoldedStages], reduction: PricedReduction, sharded: bool
    ) -> _LayerCosts:
        """Return the costs of each type of layer (embedding, block, output) on a stage.

        Args:
            folded: Makes the compact placement (Fold) of the stage's nodes. It is a function because
                making the placement takes time, and results are cached.
            reduction: Reduction of the stage's gradients.
            sharded: Whether passes include the collectives of ZeRO 2 and 3 in each micro-batch.
        """
        fold, (stage,) = folded()  # the compact placement, and the number of the stage in it
        job = self.job
        content = fold.placement.stages[stage]  # nodes of the stage: (node type, ranks)
        flops = job.slowest(self.network.clusters(content)).flops  # the slowest GPU decides

        # Half of the groups' collectives run in the forward pass, half in the backward pass.
        half_s = self.collective_s(fold, stage) / 2
        # By type of layer: seconds of its tensor, context and expert groups in one pass.
        collectives_s = [half_s if layer.kind == "block" else 0.0 for layer in job.layers]
        forward_s = tuple(
            layer.forward_flops / flops + group_s
            for layer, group_s in zip(job.layers, collectives_s)
        )
        backward_s = tuple(
            layer.backward_flops / flops + group_s
            for layer, group_s in zip(job.layers, collectives_s)
        )
        if sharded and isinstance(reduction, Sharded):
            # Add the gathers and reduce-scatters that ZeRO 2 and 3 run in each pass.
            forward_s, backward_s = reduction.passes(
                forward_s,
                backward_s,
                sizes=job.reduced_bytes,
                repeats=job.repeats,
                prefetch=self.rules.prefetch,  # whether they overlap with computation
            )

        # The collectives that run once a step, after the backward pass: seconds per byte of gradients.
        reduction_byte_s = reduction.once.byte_s
        return _LayerCosts(
            forward_s=forward_s,
            backward_s=backward_s,
            reduction_s=tuple(size * reduction_byte_s for size in job.reduced_bytes),
            weights_s=tuple(layer.weight_flops / flops for layer in job.layers),
        )

    def collective_s(self, fold: Fold, stage: int) -> float:
        """Return the seconds in which a block's tensor, context and expert groups communicate.

        This is the time for a micro-batch, forward and backward pass together.

        Args:
            fold: A compact placement: it has a representative of each set of equal ranks.
            stage: Number of the stage in the fold.
        """
        block = self.job.block
        sizes = fold.full_placement.sizes
        total_s = 0.0
        # A group of a single rank exchanges nothing.
        if sizes.tensor > 1:
            total_s += self._group_s(fold, stage, "tensor", block.tensor_bytes)
        if sizes.context > 1:
            total_s += self._group_s(fold, stage, "context", block.context_bytes)
        if sizes.expert > 1:
            total_s += self._group_s(fold, stage, "expert", block.expert_bytes)
        return total_s

    def _group_s(self, fold: Fold, stage: int, role: str, size: float) -> float:
        """Return the seconds that the slowest group of a role needs to exchange `size` bytes.

        Tensor groups all-reduce them, expert groups run an all-to-all, and context groups pass them around a
        ring.

        Args:
            fold: A compact placement: it has a representative of each set of equal ranks.
            stage: Number of the stage in the fold.
            role: Kind of group: "tensor", "context" or "expert".
            size: Bytes that the group sums, or that a rank sends.
        """
        network = self.network_of_role[role]
        slowest_s = 0.0
        for family in fold.families(stage, role):  # a family: equal groups of the stage
            link_bps = self.link_bps(family.node_types)  # between the GPUs of a node
            # Load: use of NICs and links, for each byte that the group sums or a rank sends.
            if role == "tensor":
                load = network.ring(family, groups=family.count, inside_bps=link_bps)
            else:
                is_all_to_all = role == "expert"
                load = network.exchange(family, is_all_to_all, inside_bps=link_bps)
            slowest_s = max(slowest_s, load.price.seconds(size))
        return slowest_s

    # ------------------------------------------------------------------- stage links

    def stage_links(self, placement: Placement) -> list[Price]:
        """Return the price of sending an activation from each stage to the next stage.

        A price has seconds per byte, and latency in seconds.
        """
        return [
            self.stage_link(placement, stage, stage + 1)
            for stage in range(placement.sizes.pipeline - 1)
        ]

    def stage_link(self, placement: Placement, stage: int, other: int) -> Price:
        """Return the price of sending an activation to another stage, for the slowest pair of ranks."""
        return self._computed_once("stage_link", self._stage_link, placement, stage, other)

    def _stage_link(self, fold: Fold, stages: tuple[int, ...]) -> Price:
        """Return the price of an activation from one stage to another, for the slowest pair of ranks.

        Args:
            fold: A compact placement: it has a representative of each set of equal ranks.
            stages: Numbers of the sending and the receiving stage in the fold.
        """
        # (full_placement has all ranks of the job, not only those that the fold keeps.)
        slices = self.slices(fold.full_placement)
        # Training without holmes (`stock`) compresses nothing.
        share = 1.0 if self.stock else self.job.compressed_share(self.rules.compression)
        # The prices depend on the job only by its GPUs, so jobs with the same GPUs share them. The
        # network and the job keep both objects alive, so their ids are not used again.
        key = "stage_link", id(fold), stages, slices, share, id(self.job.gpus)
        prices = self.network.remember(
            key, lambda: self._stage_link_of_classes(fold, stages, slices, share)
        )
        size = self.job.block.activation_bytes or 1.0  # 0: compare by the latency and a single byte
        return max(prices, key=lambda price: price.seconds(size))

    def _stage_link_of_classes(
        self, fold: Fold, stages: tuple[int, ...], slices: int, share: float
    ) -> list[Price]:
        """Return the price of an activation from one stage to another, for each class of equal pipelines.

        A price has seconds per byte, and latency in seconds. All pipelines send at the same time.

        Args:
            fold: A compact placement: it has a representative of each set of equal ranks.
            stages: Numbers of the sending and the receiving stage in the fold.
            slices: Number of ranks that send a part of the activation each, over Ethernet.
            share: Part of the bytes that compression leaves, over Ethernet.
        """
        sender, receiver = stages
        messages_of_classes = self._messages(fold, sender, receiver)
        # Messages between nodes of the same types share the links between their clusters.
        crossing: Counter[tuple[int, int]] = Counter()  # types of both nodes -> messages
        for messages in messages_of_classes:
            crossing[messages.node_types] += messages.count
        prices = []
        for messages in messages_of_classes:
            link_bps = self.link_bps(messages.node_types)  # between the GPUs of a node
            # Use of NICs and links by the message of a single pipeline.
            load = self.network.message(messages, link_bps, crossing[messages.node_types])
            # A message inside a node or on a fast fabric stays whole and uncompressed.
            prices.append(_price_of_slices(load, link_bps, slices, share))
        return prices

    def _messages(self, fold: Fold, sender: int, receiver: int) -> list[StageMessages]:
        """Return the messages between two stages, with an entry for each class of equal pipelines."""
        # Classes whose messages use the same fabric send at the same time.
        return fold.stage_links(sender, receiver, lambda types: self.network.fabric(types).name)

    def _transfer_s(self, stage_links: Sequence[Price]) -> tuple[Row, ...]:
        """Return the seconds of sending the output of a layer to the next stage.

        Args:
            stage_links: Price of an activation from each stage to the next stage.

        Returns:
            For each stage a row with a number for each kind of layer (embedding, block, output): the
            seconds if this is the last layer of the stage.
        """
        job = self.job
        kinds = len(job.layers)  # embedding, block and output; a job may lack some of them
        has_output_layer = job.after > 0  # job.after: number of layers after the last block
        rows = []
        for price in (*stage_links, FREE):  # FREE: the last stage has no next stage
            seconds = price.seconds(job.block.activation_bytes)
            if has_output_layer:  # it is the last kind, and has no output for a next stage
                row = (seconds,) * (kinds - 1) + (0.0,)
            else:
                row = (seconds,) * kinds
            rows.append(row)
        return tuple(rows)

    def shared_nic_stages(self, placement: Placement) -> tuple[tuple[int, int], ...]:
        """Return the stages whose nodes send to the previous and the next stage over the same NIC.

        Returns:
            (first, last) stage of each run of neighbouring stages on the same nodes. The stage link
            before the first and the stage link after the last of these stages use the same fabric.
        """
        last = placement.sizes.pipeline - 1
        # By stage link: fabrics of its messages, {_INSIDE_NODE} if none leaves a node. Stage link i
        # connects stages i and i + 1.
        fabrics = [
            self._computed_once("fabrics", self._fabrics, placement, stage, stage + 1)
            for stage in range(last)
        ]

        # Divide the stages into runs on the same nodes: a run ends where messages leave the nodes.
        runs = []
        first = 0
        for stage in range(last + 1):
            ends_run = stage == last or fabrics[stage] != {_INSIDE_NODE}
            if ends_run:
                runs.append((first, stage))
                first = stage + 1

        # Of the runs with links on both sides, keep those whose links use the same fabric: a node has a
        # single NIC on each fabric, so the links share it.
        return tuple(
            (first, final)
            for first, final in runs
            if first > 0 and final < last and fabrics[first - 1] & fabrics[final]
        )

    def _fabrics(self, fold: Fold, stages: tuple[int, ...]) -> set[str]:
        """Return the names of the fabrics that carry messages between two stages, or _INSIDE_NODE."""
        sender, receiver = stages
        names = set()
        for stage_link in self._messages(fold, sender, receiver):
            if stage_link.local:  # messages inside a node
                names.add(_INSIDE_NODE)
            else:  # fabric(): the fastest that both nodes share
                names.add(self.network.fabric(stage_link.node_types).name)
        return names

    def slices(self, placement: Placement) -> int:
        """Return the number of slices into which an activation is cut to cross Ethernet.

        Without sequence parallelism, all ranks of a tensor-parallel group have the same activation.
        So each of them sends a slice, and the receivers gather the slices inside their node
        (runtime/groups/wire.py). The result is 1 (no slices) if a tensor-parallel group has several
        nodes, or in training without holmes (`stock`).
        """
        # Whether every tensor-parallel group lies in a single node.
        is_possible = placement.sizes.tensor_inside(placement.processes)
        if self.stock or not self.rules.slices or not is_possible:
            return 1
        # Ranks that have the same activation: 1 with sequence parallelism, else the tensor-parallel
        # size. 0: not known whether the job uses it; assume that it does not.
        return self.job.copies or placement.sizes.tensor

    def _load_s(self, placement: Placement, stage_links: Sequence[Price]) -> float:
        """Return the seconds that the busiest NIC needs to send a micro-batch of an interleaved schedule.

        A micro-batch passes all stages v times, once for each of the v chunks of a stage. So it crosses every
        stage link v times, and from the last stage back to the first v - 1 times. For each crossing the
        sender sends an activation, and later the receiver sends a gradient back. Messages inside a cluster
        and between clusters use different NICs.

        Args:
            placement: Nodes of each stage.
            stage_links: Price of an activation from each stage to the next stage.
        """
        chunks = self.rules.virtual
        size = self.job.block.activation_bytes
        last = placement.sizes.pipeline - 1

        # By stage: names of the clusters of its nodes.
        clusters = [set(self.network.clusters(content)) for content in placement.stages]
        inside_s = [0.0] * (last + 1)  # by stage: its NICs inside the cluster
        across_s = [0.0] * (last + 1)  # by stage: its NICs between clusters

        def add(stage: int, other: int, seconds: float) -> None:
            """Add the messages between two stages to the load of the NICs of both.

            One of the stages sends activations, the other sends gradients back, in `seconds` each.
            """
            crosses = len(clusters[stage] | clusters[other]) > 1
            load_s = across_s if crosses else inside_s
            load_s[stage] += seconds
            load_s[other] += seconds

        for stage, stage_link in enumerate(stage_links):
            add(stage, stage + 1, chunks * stage_link.seconds(size))
        # From the last stage to the first, where the next chunk begins.
        around_s = self.stage_link(placement, last, 0).seconds(size) if last else 0.0
        add(0, last, (chunks - 1) * around_s)
        return max(*inside_s, *across_s)

    # ------------------------------------------------------------------- tied weights, spanning groups

    def tied_s(self, placement: Placement) -> float:
        """Return the seconds that the first and last stage need to sum a tied embedding's gradient.

        0: the job has no tied embedding, or a single stage.
        """
        size = self.job.tied_bytes
        last = placement.sizes.pipeline - 1
        if not size or not last:
            return 0.0

        def seconds(fold: Fold, _: tuple[int, ...]) -> float:
            # fold: the compact placement of both stages. The unused argument has the numbers of the
            # stages in it; tied() takes the first and the last stage. It prices the fastest reduction
            # for each class of pipelines on equal nodes; the slowest class counts.
            return max(reduction.seconds(size) for reduction in self.tied(fold))

        # Calls seconds() for stages 0 and `last`; stages on equal nodes share the result.
        return self._computed_once("tied", seconds, placement, 0, last)

    def tied(self, fold: Fold) -> list[PricedReduction]:
        """Return the fastest reduction of a tied weight, for each class of equal pipelines.

        A tied weight is the embedding that the first and the last stage share. Pipelines on equal
        nodes form a class.

        Args:
            fold: A compact placement: it has a pipeline of each class, and the number of its equals.
        """
        size = self.job.tied_bytes
        result: list[PricedReduction] = []
        for pipeline_class in range(len(fold.pipeline_classes)):
            # pairs: all-reduce of two counterparts. joint: hierarchical, of all ranks of both
            # stages.
            pairs, joint = self.tied_of(fold, pipeline_class, alone=False)
            if joint and joint.seconds(size) < pairs.seconds(size):
                result.append(joint)
            else:
                result.append(pairs)
        return result

    def tied_of(
        self, fold: Fold, pipeline_class: int, alone: bool
    ) -> tuple[PricedReduction, Hierarchical | None]:
        """Return the prices of two ways to sum a tied weight's gradient: by pairs, and hierarchically.

        A tied weight is the embedding that the first and the last stage share. By pairs, each rank of
        the first stage all-reduces with its counterpart in the last stage. Hierarchically, the ranks
        of both stages form a single group (`joint`). None: this is not possible.

        Args:
            fold: A compact placement: it has a pipeline of each class, and the number of its equals.
            pipeline_class: Number of the class; pipelines of the same class run on equal nodes.
            alone: Whether the price leaves out the other groups that send at the same time (for the
                simulation, which adds their loads itself).
        """
        last = fold.stages[-1]
        # Types of the nodes that hold the first and the last stage of these pipelines.
        node_types = [fold.node_type_on(pipeline_class, stage) for stage in (0, last)]

        # All-reduce between the two ranks of each pipeline. link_bps: bits/s between a node's GPUs.
        pairs = by_pairs(self.network, fold, pipeline_class, self.link_bps(node_types))
        if self.stock or not self.rules.tied:
            return pairs, None

        # Families of equal groups of all ranks, in both stages, with the same part of the weight.
        for family in tied_weight_families(fold):
            if pipeline_class in family.pipeline_classes:  # the family of these pipelines
                # None if a stage does not lie in a single cluster, or if both lie in the same cluster.
                joint = tied_hierarchical(
                    self.network,
                    family,
                    self.job.tied_bytes,
                    direct=self.rules.direct,
                    groups=0 if alone else family.count,  # crossing groups; 0: leave out others
                    inside_bps=self.link_bps(family.node_types),
                )
                return pairs, joint
        return pairs, None

    def spans_networks(self, placement: Placement) -> bool:
        """Return whether some group has to use Ethernet although a member has a faster fabric."""
        return any(
            self._computed_once("spans_networks", self._spans_networks, placement, stage)
            for stage in range(placement.sizes.pipeline)
        )

    def _spans_networks(self, fold: Fold, stages: tuple[int, ...]) -> bool:
        """Return whether a group of a stage must use Ethernet because its nodes share no fast network."""
        # Groups of a stage in all roles (data, tensor, context, expert), as families of equal
        # groups.
        families = (family for role in INSIDE for family in fold.families(stages[0], role))
        return any(self.network.spans_networks(family.node_types) for family in families)


#: Stands for the fabric of messages that do not leave a node.
_INSIDE_NODE = ""


class _StageLimits(NamedTuple):
    """GPU memory that each rank of a stage may use, and the clusters of the stage."""

    clusters: str  # their names, for the message if the memory does not suffice
    memory_bytes: float  # of the stage's smallest GPU; inf: no limit


class _LayerCosts(NamedTuple):
    """Seconds of each type of layer on a stage."""

    forward_s: Row
    backward_s: Row
    reduction_s: Row  # of the layer's gradients, without latency
    weights_s: Row  # part of backward_s that computes weight gradients


def _price_of_slices(load: Load, link_bps: float, slices: int, share: float) -> Price:
    """Return the price of a message that is compressed and divided among ranks if it uses Ethernet.

    A price has seconds per byte, and latency in seconds.

    Args:
        load: Use of NICs and links by the whole message.
        link_bps: Bits/s inside the receiving node, where the slices are gathered; 0: not known.
        slices: Number of ranks that send a slice each.
        share: Part of the bytes that compression leaves.
    """
    if load.fabric is None or load.fabric.name != ETHERNET:
        return load.price  # messages inside a node or on a fast fabric stay whole
    # A receiver has a slice and gets the others from its node.
    gather_byte_s = 8 * (slices - 1) / slices / link_bps if link_bps else 0.0
    return Price(share * load.price.byte_s / slices + gather_byte_s, load.price.latency_s)


def price(
    network: Network,
    placement: Placement,
    job: RankModel,
    rules: Rules = Rules(),
    reductions: Sequence[PricedReduction] = (),
) -> StageCosts:
    """Return the seconds and bytes of every type of layer on every stage of a placement.

    Args:
        network: The site.
        placement: Nodes of each stage.
        job: Layers and bytes of a rank.
        rules: Reductions that the engine and the options allow.
        reductions: Reduction of each stage; by default the fastest.
    """
    return Prices(network, job, rules).costs(placement, reductions)
