"""Decisions that follow from a plan's node order, sizes and networks: the plan's `traffic`.

`derive_traffic` adds the decisions to a plan. `holmes plan` calls it, a job at its start, and a job when
a port fails. `Decisions` makes them for a network API (verbs or sockets): how gradients are summed, how
stages send, and in which order passes run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from holmes_ext import extensions
from holmes_ext.cluster.fabric import ETHERNET
from holmes_ext.cluster.site import Site
from holmes_ext.options import Options
from holmes_ext.plan.buckets import bucket_bytes
from holmes_ext.plan.cost.links import Links
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.cost.pipeline import asked_in_flight, schedule, share_nics
from holmes_ext.plan.cost.price import FamilyReductions, Prices
from holmes_ext.plan.cost.reductions import Hierarchical, tied_weight_families
from holmes_ext.plan.cost.stages import RankModel, estimate
from holmes_ext.plan.engine import EngineTraits, rules_of
from holmes_ext.plan.placement import Placement, family_of
from holmes_ext.plan.plan import (
    NOMINAL,
    Plan,
    SpanningGroups,
    name_of,
    pairs_with_group,
    planned_fabrics,
    site_of,
)
from holmes_ext.plan.schedule import PassOrder
from holmes_ext.plan.sizes import INSIDE, Sizes, groups
from holmes_ext.plan.traffic import (
    NETWORK_APIS,
    SOCKETS,
    ReductionSpec,
    StageLink,
    Traffic,
    one_if_equal,
)
from holmes_ext.plan.workload import StageLoad, Workload, passes_s

#: Bucket size of a group inside a node: bucket_cap_mb of torch's DistributedDataParallel.
INSIDE_BYTES = 25 * 2**20
#: Larger sums of gradients are reduced as if they had this size.
LARGE_BYTES = float(2**30)


class LinkTimes(NamedTuple):
    """Times of an activation over each stage link, in seconds."""

    transfer_s: tuple[float, ...]  # until it has arrived, with the latency
    #: Without the latency, during which other messages can use the link.
    occupied_s: tuple[float, ...]


class Decisions:
    """Decisions of a plan for the groups that communicate through the same network API.

    Args:
        plan: The plan.
        network_api: Interface to the NICs: "verbs" (NCCL's groups) or "sockets" (gloo's groups).
        site: The plan's networks as this network API reaches them.
        options: Options of the user.
        engine: Abilities of the training engine.
    """

    def __init__(
        self, plan: Plan, network_api: str, site: Site, options: Options, engine: EngineTraits
    ):
        """Prepare the decisions of a plan (see the class); each is made when its method is called."""
        self.plan = plan
        self.network_api = network_api
        self.options = options
        self.engine = engine
        sizes = plan.sizes or Sizes().complete(plan.world_size)  # not known yet: only data-parallel
        self.network = Network(site)
        self.placement = self.network.placement(plan.nodes, sizes)
        rules = rules_of(engine, options, direct=network_api == SOCKETS)
        # A workload has no size of the tied weight. Assume so many bytes that latency is negligible.
        job = replace(RankModel.of_workload(plan.workload, sizes), tied_bytes=LARGE_BYTES)
        self.prices = Prices(self.network, job, rules)

    def traffic(self) -> Traffic:
        """Return how the job communicates: networks of groups, reductions, stage links, order of passes."""
        fabrics_of: dict[str, list[str]] = {}  # role, such as "data" -> fabric of each group
        for role, ranks in self.plan.groups():
            fabric = self.plan.fabric_of(ranks, self.network_api)
            fabrics_of.setdefault(role, []).append(name_of(fabric))
        traffic = Traffic(
            network_apis=(self.network_api,),
            transports={role: one_if_equal(tuple(fabrics)) for role, fabrics in fabrics_of.items()},
            reductions=self.reductions(),  # how each stage sums gradients
            stage_links=self.stage_links(),  # how each stage sends to the next one
            tied=self.tied(),  # how a weight of the first and the last stage is summed
        )
        return self.with_order(traffic)  # adds the order of passes, which may change the reductions

    # ------------------------------------------------------------------- reductions

    def reductions(self) -> tuple[ReductionSpec, ...]:
        """Return how the gradients of every stage are summed."""
        return tuple(
            self.reduction(stage, overlap) for stage, overlap in enumerate(self._overlapped())
        )

    def _overlapped(self) -> Sequence[bool]:
        """Return, for each pipeline stage, whether it reduces its gradients during its last backward pass.

        With --holmes-overlap auto a stage does so if its reduction would otherwise end after the first
        stage's last backward pass. (Frameworks overlap on the first stage only, which suits a uniform
        network.)
        """
        sizes = self.placement.sizes
        options = self.options
        is_reducing = sizes.data * sizes.context > 1
        # options.off: disabled features
        is_possible = is_reducing and self.engine.can("overlap", options.off)
        if is_possible and self.engine.overlaps == "on":
            return (True,) * sizes.pipeline  # the engine does it, with or without the option
        if options.overlap != "auto" or not is_possible:
            return (options.overlap == "on" and is_possible,) * sizes.pipeline
        # Leave out the tied weight's reduction: it runs after the backward pass in any case. The job has
        # 1 block for each stage. `exposed_s` is the part of `end_s` after the last backward pass.
        costs = replace(self.prices.costs(self.placement), tied_s=0.0)
        step = estimate(costs, (1,) * costs.stages)
        first_backward_end_s = step.end_s[0] - step.exposed_s[0]
        return [
            bool(reduction_s) and end_s > first_backward_end_s
            for end_s, reduction_s in zip(step.end_s, step.reduction_s)
        ]

    def reduction(self, stage: int, overlap: bool) -> ReductionSpec:
        """Return how the gradients of a stage are summed.

        Args:
            stage: Number of the stage.
            overlap: Whether they are reduced during the last backward pass.
        """
        families = self.prices.family_reductions(self.placement, stage)
        return self._reduction(families, overlap, self.plan.workload.gradient_bytes)

    def reduction_of_group(
        self, ranks: Sequence[int], overlap: bool, total_bytes: float
    ) -> ReductionSpec:
        """Decide how a group of ranks that is not in the plan sums `total_bytes` of gradients per step.

        Args:
            ranks: The group.
            overlap: Whether gradients are reduced during the last backward pass.
            total_bytes: Bytes of all gradients; inf: not known.
        """
        family = family_of(self.placement, ranks)
        # The two ways to reduce need a finite size, `inf` for "not known" has none. For large sums
        # latency does not matter, so all above LARGE_BYTES are reduced in the same way.
        priced_bytes = min(total_bytes, LARGE_BYTES)
        # Prices are made for a model. This one has a single layer, with all of the gradients.
        job = replace(self.prices.job, reduced_bytes=(priced_bytes,), repeats=(1,))
        prices = Prices(self.network, job, self.prices.rules)
        both_ways = prices.reductions_of_family(family, crossing_groups=1)  # no other group crosses
        return self._reduction([both_ways], overlap, total_bytes)

    def _reduction(
        self, families: Sequence[FamilyReductions], overlap: bool, total_bytes: float
    ) -> ReductionSpec:
        """Decide how the groups of a stage sum gradients: bucket size, and flat or hierarchical reduction.

        Args:
            families: Flat and hierarchical reduction, with prices, of each family of equal groups.
            overlap: Whether gradients are reduced during the last backward pass.
            total_bytes: Bytes of all gradients of a rank.
        """
        fabrics = [
            self.network.fabric(ways.family.node_types)
            for ways in families
            if ways.family.nodes > 1
        ]
        suitable_bytes = INSIDE_BYTES  # if no group leaves its node
        if fabrics:
            # A faster fabric has a higher preference.
            slowest = min(fabrics, key=lambda fabric: fabric.preference)
            # All groups of a stage have equally many ranks.
            suitable_bytes = bucket_bytes(slowest, families[0].family.ranks, total_bytes)
        flat = ReductionSpec(
            overlap=overlap,
            bucket_bytes=self.options.bucket_bytes or suitable_bytes,
            compress=self.options.compress_gradients,
        )
        across = [ways for ways in families if self.network.spans_clusters(ways.family.node_types)]
        return self._hierarchical_if_faster(flat, across)

    def _hierarchical_if_faster(
        self, flat: ReductionSpec, sums: Sequence[FamilyReductions]
    ) -> ReductionSpec:
        """Return a hierarchical reduction if it is faster for each of the groups, else `flat`.

        Args:
            flat: Reduction in one ring.
            sums: Possible reductions, with prices, of each family of equal groups. All groups
                reduce at the same time, so all reduce in the same way.
        """
        candidates: list[Hierarchical] = []
        faster_from: list[int] = []  # bytes from which each candidate is faster than its flat ring
        for group in sums:  # sets of equal groups
            if group.hierarchical is None:
                return flat
            threshold = group.hierarchical.faster_from(group.flat)
            if threshold is None:  # slower even for many bytes
                return flat
            candidates.append(group.hierarchical)
            faster_from.append(threshold)
        if not candidates:
            return flat
        streams = 1
        across = None  # direct exchanges
        if self.network_api == SOCKETS:  # only gloo has several TCP streams, and other algorithms
            streams = max(
                candidate.streams(self.network, group.crossing_groups)
                for candidate, group in zip(candidates, sums)
            )
            # An algorithm other than direct exchanges (a `route`) lists the clusters of a group. A
            # stage has a single algorithm. So it needs groups that all lie on the same clusters.
            cluster_sets = {frozenset(candidate.ranks) for candidate in candidates}
            route = candidates[-1].route
            if len(cluster_sets) == 1 and route.algorithm != "direct":
                across = route
        clusters = dict.fromkeys(cluster for candidate in candidates for cluster in candidate.ranks)
        return replace(
            flat,
            clusters=tuple(clusters),
            hierarchical_from=max(faster_from),  # it is faster for every group
            chunk_bytes=int(min(candidate.chunk_bytes for candidate in candidates)),
            across=across,
            streams=streams,
        )

    def tied(self) -> ReductionSpec | None:
        """Return how the gradient of a weight that the first and the last stage share is summed.

        This is a hierarchical reduction over the ranks of both stages, if it is faster for all of
        them. None: each rank sums with its counterpart in the other stage, as engines do.
        """
        last = self.placement.sizes.pipeline - 1
        if self.plan.sizes is None or not last or not self.prices.rules.tied:
            return None
        # A fold has one pipeline of each class of equal ones; a family are equal groups of both stages.
        fold, _ = self.prices.fold(self.placement, 0, last)
        family_of_class = {
            pipeline_class: family
            for family in tied_weight_families(fold)
            for pipeline_class in family.pipeline_classes
        }
        families = []
        for pipeline_class in range(len(fold.pipeline_classes)):
            # Price of the sum between counterparts, and of the hierarchical sum of all ranks.
            by_pairs, joint = self.prices.tied_of(fold, pipeline_class, alone=False)
            if pipeline_class not in family_of_class or joint is None:
                return None
            family = family_of_class[pipeline_class]
            # The sum by pairs takes the part of the flat ring in the comparison.
            reductions = FamilyReductions(
                family, flat=by_pairs, hierarchical=joint, crossing_groups=family.count
            )
            families.append(reductions)
        not_hierarchical = ReductionSpec(overlap=False, bucket_bytes=0)
        planned = self._hierarchical_if_faster(not_hierarchical, families)
        return None if planned is not_hierarchical else planned

    # ------------------------------------------------------------------- stages

    def stage_links(self) -> tuple[StageLink, ...]:
        """Return the networks and groups of the messages from each stage to the next one.

        With more than two stages, messages from the last to the first stage are included, which interleaved
        schedules send. For each pipeline, a StageLink names the fabric, and the groups too slow for the two
        ranks, which then need their own group: "pipeline" (of all stages), "world" (of all ranks),
        "pipeline+world", or "" (none). Equal pipelines share one entry.
        """
        plan = self.plan
        if plan.sizes is None:
            return ()
        network_api = self.network_api
        stages = plan.sizes.pipeline
        world_fabric = name_of(plan.fabric_of(range(plan.world_size), network_api))
        pairs_of = {  # ranks of a pipeline -> pairs that need a group in place of the pipeline's
            ranks: pairs_with_group(plan, ranks, network_api)
            for ranks in groups(plan.sizes, "pipeline")
        }
        result = []
        are_last_and_first_linked = stages - 1 <= 1  # as neighbours
        for stage in range(stages - 1 if are_last_and_first_linked else stages):
            following = (stage + 1) % stages
            fabrics = []
            pair_groups = []
            for ranks, pairs in pairs_of.items():
                pair = tuple(sorted((ranks[stage], ranks[following])))
                fabric = name_of(plan.fabric_of(pair, network_api))
                fabrics.append(fabric)
                # Groups over which a framework may send, but on a slower fabric than the two ranks.
                frameworks = []
                if pair in pairs:
                    frameworks.append("pipeline")
                if fabric != world_fabric:
                    frameworks.append("world")
                pair_groups.append("+".join(frameworks))
            stage_link = StageLink(  # one_if_equal: a single entry if all are equal
                (stage, following), one_if_equal(tuple(fabrics)), one_if_equal(tuple(pair_groups))
            )
            if ETHERNET in fabrics:
                stage_link = replace(
                    stage_link,
                    slices=self.prices.slices(self.placement),
                    compression=self.prices.rules.compression,
                )
            result.append(stage_link)
        return tuple(result)

    def with_order(self, traffic: Traffic) -> Traffic:
        """Return `traffic` with the order of the stages' passes.

        It is one of three: split backward passes in a given order (`schedule`), 1F1B with more micro-
        batches in flight (`in_flight`), or the framework's own order (both are empty).
        """
        passes = self.passes()  # empty unless backward passes are split
        reductions = traffic.reductions
        if passes:  # gradients are final at the end only, and are reduced then
            reductions = tuple(replace(reduction, overlap=False) for reduction in reductions)
        return replace(
            traffic,
            reductions=reductions,
            in_flight=() if passes else self.in_flight(),  # an order of passes determines it
            schedule=passes,
        )

    def passes(self) -> tuple[str, ...]:
        """Search for the best order of passes with split backward passes; return it as a text for each stage.

        A stage's text is such as "F0 F1 I0 F2 W0": letter and micro-batch of each pass. F is
        forward, I and W compute the gradients of inputs and weights, B of both. () if 1F1B is as
        fast, or if it is not known which part of a backward pass can be delayed.
        """
        loads = self.plan.loads
        if not self.prices.rules.splits or not loads:
            return ()
        work = self.plan.workload
        stage_links = self.prices.stage_links(self.placement)
        size = work.activation_bytes
        transfer_s = tuple(stage_link.seconds(size) for stage_link in stage_links)
        # The part of transfer_s in which the stage link is busy: without the latency.
        occupied_s = tuple(stage_link.byte_s * size for stage_link in stage_links)
        needs_message_order = self.network_api != SOCKETS  # NCCL
        # quickest() of planner/schedule/solve.py, which plan/ does not import: an order that is faster
        # than 1F1B, or None.
        find_quickest = extensions.contributed("pass_solvers", "quickest")
        pass_order: PassOrder | None = find_quickest(
            loads, transfer_s, occupied_s, work.micro_batches, needs_message_order
        )
        return pass_order.texts if pass_order else ()

    def in_flight(self) -> tuple[int, ...]:
        """Return the micro-batches that each stage begins before its first backward pass ends.

        This is the number that the user asks for, or else as many as hide the stage links: a stage then
        computes other micro-batches while a message travels. () means the framework's own schedule.
        """
        sizes = self.plan.sizes
        work = self.plan.workload
        if sizes is None or sizes.pipeline == 1 or not self.prices.rules.hide_stage_links:
            return ()
        if asked := asked_in_flight(self.options, sizes.pipeline, work.micro_batches):
            return asked
        if self.plan.basis == NOMINAL:  # the model is not known
            return tuple(range(sizes.pipeline, 0, -1))  # 1F1B: p on the first stage, 1 on the last
        plan_loads = self.plan.loads  # work of each stage; (): only the mean of the stages is known
        loads = plan_loads or (StageLoad(work.forward_s, work.backward_s),) * sizes.pipeline
        transfer_s, occupied_s = self.stage_link_seconds()
        # Measured times of stage links contain the waiting for other messages on the NIC.
        if not any(load.stage_link_s for load in plan_loads):
            busy_s = max(load.busy_s for load in loads)
            nics = self.prices.shared_nic_stages(self.placement)
            transfer_s, occupied_s = share_nics(transfer_s, occupied_s, nics, busy_s)
        forward_s, backward_s = passes_s(loads)
        most = tuple(load.most for load in plan_loads)  # micro-batches that fit the memory
        return schedule(forward_s, backward_s, transfer_s, work.micro_batches, occupied_s, most)

    def stage_link_seconds(self) -> LinkTimes:
        """Return the times of an activation over each stage link, measured or predicted."""
        stage_links = self.prices.stage_links(self.placement)
        size = self.plan.workload.activation_bytes
        transfer_s = []
        occupied_s = []
        for stage, stage_link in enumerate(stage_links):
            # A plan's load of a stage has the time of its stage link if it was measured; else 0.
            measured_s = self.plan.loads[stage].stage_link_s if self.plan.loads else 0.0
            if measured_s:
                transfer_s.append(measured_s)
                occupied_s.append(max(0.0, measured_s - stage_link.latency_s))
            else:
                transfer_s.append(stage_link.seconds(size))
                occupied_s.append(stage_link.byte_s * size)
        return LinkTimes(tuple(transfer_s), tuple(occupied_s))


def derive_traffic(
    plan: Plan,
    site: Site,
    options: Options = Options(),
    links: Links = Links(),
    workload: Workload | None = None,
    basis: str = NOMINAL,
    engine: EngineTraits = EngineTraits(),
) -> Plan:
    """Return `plan` with the fabrics that the ports of `site` carry, and how each group uses them.

    Args:
        plan: The plan, new or with networks already.
        site: Nodes with the ports that work.
        options: Options of the user.
        links: Measured rates, for fabrics that are not in the plan yet (all, if the plan is new).
        workload: Work of a rank in a step, for a new plan; one that has networks keeps its own.
        basis: Source of `workload`: "measured", "given", the model's, or NOMINAL (no model known).
        engine: Abilities of the training engine.
    """
    measured = links.site(site)
    nodes = [site.node_by_name[name] for name in plan.nodes]
    fabrics = planned_fabrics(plan, site, measured)
    clusters: dict[str, tuple[str, ...]] = {}
    for node in nodes:
        clusters[node.cluster] = (*clusters.get(node.cluster, ()), node.name)
    wan = plan.wan if plan.fabrics else measured.wan
    resolved = replace(plan, fabrics=fabrics, clusters=clusters, wan=wan)
    if not plan.fabrics:  # a new plan: build_plan() leaves the fabrics to this function
        resolved = replace(resolved, workload=workload or Workload(), basis=basis)
    if plan.sizes is not None and fabrics != plan.fabrics:
        # Ports have failed, or come back: other groups may have to use Ethernet now.
        network = Network(site_of(resolved))
        job = RankModel.of_workload(resolved.workload, plan.sizes)
        prices = Prices(network, job, rules_of(engine, options))
        placement = network.placement(plan.nodes, plan.sizes)
        resolved = replace(resolved, spanning=spanning_groups_of(prices, placement))
    return with_traffic(resolved, options, engine)  # adds the decisions, for both network APIs


def decisions(
    plan: Plan, network_api: str, options: Options, engine: EngineTraits = EngineTraits()
) -> Decisions:
    """Return the decisions of `plan` for a network API, on the networks in the plan."""
    return Decisions(plan, network_api, site_of(plan, network_api), options, engine)


def with_traffic(plan: Plan, options: Options, engine: EngineTraits = EngineTraits()) -> Plan:
    """Decide how groups communicate with NCCL and with gloo; add both (once if equal) to `plan`."""
    verbs, sockets = (
        decisions(plan, network_api, options, engine).traffic() for network_api in NETWORK_APIS
    )
    if verbs == replace(sockets, network_apis=verbs.network_apis):
        return replace(plan, traffic=(replace(verbs, network_apis=NETWORK_APIS),))
    return replace(plan, traffic=(verbs, sockets))


def spanning_groups_of(prices: Prices, placement: Placement) -> tuple[SpanningGroups, ...]:
    """Return the groups that have to use Ethernet although a member has a faster fabric, by role.

    A role is "data", "tensor", "context" or "expert" (INSIDE). The cost of a role, in seconds, is how
    much longer a step takes than if its groups could use the best fabric of each of their nodes.
    """
    if not prices.spans_networks(placement):
        return ()
    network = prices.network
    names = network.nodes(placement)
    node_types = placement.node_types()
    result = []
    for role in INSIDE:
        spanning: list[set[str]] = []  # of each group that spans: its first node of each node type
        for ranks in groups(placement.sizes, role):
            first_node: dict[int, str] = {}  # node type -> the group's first node of this type
            for index in sorted(set(map(placement.node_of, ranks))):
                first_node.setdefault(node_types[index], names[index])
            if network.spans_networks(frozenset(first_node)):
                spanning.append(set(first_node.values()))
        if spanning:
            # Prices as if the groups of this role could use their nodes' best fabrics.
            ideal = Prices(network, prices.job, prices.rules, role_on_best_fabrics=role)
            longer_s = max(0.0, prices.step_s(placement) - ideal.step_s(placement))
            result.append(
                SpanningGroups(
                    kind=role,
                    groups=len(spanning),
                    example=tuple(name for name in names if name in spanning[0]),
                    fabric=ETHERNET,
                    seconds=longer_s,
                )
            )
    return tuple(result)
