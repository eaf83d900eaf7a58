"""What follows from a Plan's order, sizes and networks: each group's network, how gradients are reduced.

derive_traffic(plan, site)   the plan with the ports that there are: by `holmes
                             plan`, at a job's start, when a port fails
complete_plan(plan, sizes)   for other sizes, which a framework tells when it starts
spec_of_group(...)           for groups that are not planned: the same rules, with the plan's own rates
Decisions                    of the groups of one network API (verbs, sockets): how gradients are summed,
                             how stages send
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from holmes_ext import extensions
from holmes_ext.cluster.fabric import ETHERNET, Fabric
from holmes_ext.cluster.site import Node, Port, Site
from holmes_ext.errors import HolmesError
from holmes_ext.options import Options
from holmes_ext.plan.buckets import FEWEST, SMALLEST_BYTES, bucket_bytes
from holmes_ext.plan.cost.links import Links
from holmes_ext.plan.cost.model import Model
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.cost.pipeline import both_ways, schedule, uniform
from holmes_ext.plan.cost.price import Prices, Sums
from holmes_ext.plan.cost.reductions import Hierarchical, twins
from holmes_ext.plan.cost.stages import RankModel, estimate
from holmes_ext.plan.engine import EngineTraits, rules_of
from holmes_ext.plan.placement import Placement, family_of
from holmes_ext.plan.plan import NOMINAL, Plan, SpanningGroups, name_of, pairs_with_group
from holmes_ext.plan.schedule import PassOrder
from holmes_ext.plan.sizes import INSIDE, Sizes, groups
from holmes_ext.plan.traffic import (
    NETWORK_APIS,
    SOCKETS,
    VERBS,
    PlannedFabric,
    ReductionSpec,
    StageLink,
    Traffic,
    same,
)
from holmes_ext.plan.workload import StageLoad, Workload, passes_s

#: A bucket of a group in one node, where no network says how large: torch DistributedDataParallel's
#: bucket_cap_mb.
INSIDE_BYTES = 25 * 2**20
#: Beyond it a sum does not change how it goes.
LARGE_BYTES = float(2**30)


class Decisions:
    """site: the plan's networks as the network API reaches them."""

    def __init__(
        self, plan: Plan, network_api: str, site: Site, options: Options, engine: EngineTraits
    ):
        self.plan, self.network_api, self.options, self.engine = plan, network_api, options, engine
        sizes = plan.sizes or Sizes().complete(plan.world_size)
        self.network = Network(site)
        self.placement = self.network.placement(plan.nodes, sizes)
        rules = rules_of(engine, options, network_api == SOCKETS)
        job = RankModel.of_workload(plan.workload, sizes)
        self.prices = Prices(self.network, replace(job, tied_bytes=LARGE_BYTES), rules)

    def traffic(self) -> Traffic:
        plan, transports = self.plan, dict[str, list[str]]()
        for kind, ranks in plan.groups():
            transports.setdefault(kind, []).append(name_of(plan.fabric_of(ranks, self.network_api)))
        listed = {kind: same(tuple(names)) for kind, names in transports.items()}
        return self.with_order(
            Traffic(
                (self.network_api,), listed, self.reductions(), self.stage_links(), tied=self.tied()
            )
        )

    # ------------------------------------------------------------------- reductions

    def reductions(self) -> tuple[ReductionSpec, ...]:
        """Of every stage."""
        return tuple(
            self.reduction(stage, overlap) for stage, overlap in enumerate(self._overlapped())
        )

    def _overlapped(self) -> Sequence[bool]:
        """By itself: where one reduction after a stage's last backward would end after the first stage's last
        one. (Frameworks overlap on the first stage only, which is right on one uniform network.)"""
        sizes, options = self.placement.sizes, self.options
        reduces = sizes.data * sizes.context > 1 and self.engine.can("overlap", options.off)
        if reduces and self.engine.overlaps == "on":  # by itself, whatever the option says
            return (True,) * sizes.pipeline
        if options.overlap != "auto" or not reduces:
            return (options.overlap == "on" and reduces,) * sizes.pipeline
        costs = replace(self.prices.costs(self.placement), tied_s=0.0)
        step = estimate(costs, (1,) * costs.stages)
        first = step.end_s[0] - step.exposed_s[0]
        return [
            bool(reduction) and end > first for end, reduction in zip(step.end_s, step.reduction_s)
        ]

    def reduction(self, stage: int, overlap: bool) -> ReductionSpec:
        sums = self.prices.sums(self.placement, stage)
        return self._reduction(sums, overlap, self.plan.workload.gradient_bytes)

    def of_group(self, ranks: Sequence[int], overlap: bool, total_bytes: float) -> ReductionSpec:
        """Of any group, whose bytes no plan knew."""
        family = family_of(self.placement, ranks)
        job = replace(self.prices.job, reduced_bytes=(min(total_bytes, LARGE_BYTES),), repeats=(1,))
        prices = Prices(self.network, job, self.prices.rules)
        return self._reduction([prices.sums_of(family, 1)], overlap, total_bytes)

    def _reduction(self, sums: Sequence[Sums], overlap: bool, total_bytes: float) -> ReductionSpec:
        fabrics = [
            self.network.fabric(group.family.kinds) for group in sums if group.family.nodes > 1
        ]
        slowest = min(fabrics, key=lambda fabric: fabric.preference, default=None)
        size = INSIDE_BYTES
        if slowest is not None:
            size = bucket_bytes(slowest, sums[0].family.ranks, total_bytes)
        user_bytes = self.options.bucket_bytes
        across = [group for group in sums if self.network.across(group.family.kinds)]
        planned = ReductionSpec(
            overlap, user_bytes or size, compress=self.options.compress_gradients
        )
        return self._is_hierarchical(planned, across)

    def _is_hierarchical(self, planned: ReductionSpec, sums: Sequence[Sums]) -> ReductionSpec:
        """Of groups that do the same at once: where that is faster for each of them."""
        both = [group.both for group in sums if group.both is not None]
        least = [levels.faster_from(group.flat) for levels, group in zip(both, sums)]
        if len(both) < len(sums) or not sums or None in least:
            return planned
        names = dict.fromkeys(name for levels in both for name in levels.ranks)
        routes = {frozenset(levels.ranks): levels.route for levels in both}
        route, streams = next(iter(routes.values())), 1
        if self.network_api == SOCKETS:
            streams = max(
                levels.streams(self.network, group.crossing) for levels, group in zip(both, sums)
            )
        other = self.network_api == SOCKETS and len(routes) == 1 and route.algorithm != "direct"
        return replace(
            planned,
            clusters=tuple(names),
            hierarchical_from=max(size for size in least if size is not None),
            chunk_bytes=int(min(levels.chunk_bytes for levels in both)),
            across=route if other else None,
            streams=streams,
        )

    def tied(self) -> ReductionSpec | None:
        """Of a weight of the first and the last stage; None: every rank with its twin, as engines do."""
        last = self.placement.sizes.pipeline - 1
        if self.plan.sizes is None or not last or not self.prices.rules.tied:
            return None
        fold, _ = self.prices.fold(self.placement, 0, last)
        families = {kind: family for family in twins(fold) for kind in family.pipelines}
        sums = []
        for kind in range(len(fold.kinds)):
            pairs, both = self.prices.tied_of(fold, kind, alone=False)
            if kind not in families or not isinstance(both, Hierarchical):
                return None
            sums.append(Sums(families[kind], pairs, both, families[kind].count))
        planned = self._is_hierarchical(ReductionSpec(False, 0), sums)
        return planned if planned.clusters else None

    # ------------------------------------------------------------------- stages

    def stage_links(self) -> tuple[StageLink, ...]:
        """Of each stage to the next, and of the last to the first if that is another pair (interleaving)."""
        plan, sizes, network_api, result = self.plan, self.plan.sizes, self.network_api, []
        if sizes is None:
            return ()
        world = name_of(plan.fabric_of(range(plan.world_size), network_api))
        whole = {
            ranks: pairs_with_group(plan, ranks, network_api) for ranks in groups(sizes, "pipeline")
        }
        stages, slices = sizes.pipeline, self.prices.slices(self.placement)
        for stage in range(stages if stages > 2 else stages - 1):
            fabrics, pair_groups = [], []
            for ranks, pairs in whole.items():
                pair = tuple(sorted((ranks[stage], ranks[(stage + 1) % stages])))
                fabrics.append(name_of(plan.fabric_of(pair, network_api)))
                frameworks = {"pipeline": pair in pairs, "world": fabrics[-1] != world}
                pair_groups.append(
                    "+".join(name for name, gets_one in frameworks.items() if gets_one)
                )
            pair = (stage, (stage + 1) % stages)
            how = (slices, self.prices.rules.compression) if ETHERNET in fabrics else (1, "off")
            result.append(StageLink(pair, same(tuple(fabrics)), same(tuple(pair_groups)), *how))
        return tuple(result)

    def with_order(self, traffic: Traffic) -> Traffic:
        """With the order of the stages' passes. Where a backward is in two, gradients are reduced at its
        end."""
        passes = self.passes()
        in_flight = () if passes else self.in_flight()
        reductions = tuple(
            replace(reduction, overlap=reduction.overlap and not passes)
            for reduction in traffic.reductions
        )
        return replace(traffic, reductions=reductions, in_flight=in_flight, schedule=passes)

    def passes(self) -> tuple[str, ...]:
        """See Traffic; () where 1F1B is as fast, or nobody told what of a backward could wait."""
        loads = self.plan.loads
        if not self.prices.rules.splits or not loads:
            return ()
        work, stage_links = self.plan.workload, self.prices.stage_links(self.placement)
        size = work.activation_bytes
        seconds = tuple(stage_link.seconds(size) for stage_link in stage_links)
        sent = tuple(stage_link.byte_s * size for stage_link in stage_links)
        find_quickest = extensions.contributed("pass_solvers", "quickest")
        pass_order: PassOrder | None = find_quickest(
            loads, seconds, sent, work.micro_batches, self.network_api != SOCKETS
        )
        return pass_order.texts if pass_order else ()

    def in_flight(self) -> tuple[int, ...]:
        """Micro-batches that each stage begins before its first backward: what the user asked for, as many as
        hide the stage links, 1F1B's where nobody told the model; () for the framework's own schedule."""
        plan, sizes, work = self.plan, self.plan.sizes, self.plan.workload
        if sizes is None or sizes.pipeline == 1 or not self.prices.rules.hide_stage_links:
            return ()
        if asked := asked_in_flight(self.options, sizes.pipeline, work.micro_batches):
            return asked
        if plan.basis == NOMINAL:
            return tuple(range(sizes.pipeline, 0, -1))
        loads = plan.loads or (StageLoad(work.forward_s, work.backward_s),) * sizes.pipeline
        seconds, sent = self.stage_link_seconds()
        if not any(load.stage_link_s for load in plan.loads):  # measured ones have met others
            busy_s = max(load.busy_s for load in loads)
            seconds, sent = both_ways(seconds, sent, self.prices.nics(self.placement), busy_s)
        most = tuple(load.most for load in plan.loads)
        return schedule(*passes_s(loads), seconds, work.micro_batches, sent, most)

    def stage_link_seconds(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """By stage link: seconds of an activation to the next stage, as measured if it was; and those
        in which the stage link carries nothing else."""
        stage_links, size = (
            self.prices.stage_links(self.placement),
            self.plan.workload.activation_bytes,
        )
        measured = [load.stage_link_s for load in self.plan.loads] or [0.0] * (len(stage_links) + 1)
        pairs = list(zip(stage_links, measured))
        seconds = tuple(measured_s or stage_link.seconds(size) for stage_link, measured_s in pairs)
        sent = tuple(
            max(0.0, measured_s - stage_link.latency_s) if measured_s else stage_link.byte_s * size
            for stage_link, measured_s in pairs
        )
        return seconds, sent


def asked_in_flight(options: Options, stages: int, micro_batches: int) -> tuple[int, ...]:
    """Where the user gave a number: that many more than 1F1B has; else ()."""
    if options.inflight in ("auto", "off"):
        return ()
    more = int(options.inflight)
    return tuple(min(count + more * (count > 1), micro_batches) for count in range(stages, 0, -1))


def more_bytes(plan: Plan) -> tuple[float, ...]:
    """That each stage keeps more than under 1F1B; () where nothing is known of the model's activations."""
    traffic = plan.traffic_of(SOCKETS)
    in_flight = (
        PassOrder.parse(traffic.schedule).in_flight if traffic.schedule else traffic.in_flight
    )
    of_1f1b = (min(count, plan.workload.micro_batches) for count in range(len(in_flight), 0, -1))
    more = (count - least for count, least in zip(in_flight, of_1f1b))
    return tuple(count * load.kept_bytes for count, load in zip(more, plan.loads))


def derive_traffic(
    plan: Plan,
    site: Site,
    options: Options = Options(),
    links: Links = Links(),
    workload: Workload | None = None,
    basis: str = NOMINAL,
    engine: EngineTraits = EngineTraits(),
) -> Plan:
    """Return `plan` with the networks that the ports of `site` can carry, and the decisions that follow.

    Args:
        links: Measured rates of networks that the plan has no rate of. A new plan has none.
        workload: What a rank does in a step, for a new plan; one that has networks keeps its own.
        basis: Where `workload` comes from.
    """
    known = {fabric.name: fabric for fabric in plan.fabrics}
    here = [site.node_by_name[name] for name in plan.nodes]

    def able(fabric: Fabric, network_api: str) -> tuple[str, ...]:
        return tuple(
            n.name
            for n in here
            for p in n.ports
            if p.fabric == fabric.name and _carries(p, network_api)
        )

    rates = [known.get(fabric.name, fabric) for fabric in links.site(site).fabrics]
    nets = {fabric.name: fabric.net for fabric in site.fabrics}
    fabrics = tuple(
        PlannedFabric(
            f.name,
            f.kind,
            f.rate_bps,
            f.latency_s,
            able(f, VERBS),
            able(f, SOCKETS),
            net=nets[f.name],
        )
        for f in sorted(rates, key=lambda f: f.preference, reverse=True)
    )
    names = dict.fromkeys(node.cluster for node in here)
    clusters = {name: tuple(node.name for node in here if node.cluster == name) for name in names}
    wan = plan.wan if plan.fabrics else links.site(site).wan
    resolved = replace(plan, fabrics=fabrics, clusters=clusters, wan=wan)
    if not plan.fabrics:
        resolved = replace(resolved, workload=workload or Workload(), basis=basis)
    if plan.sizes is not None and fabrics != plan.fabrics:  # what spans, on the ports that are left
        network = Network(site_of(resolved))
        prices = Prices(
            network, RankModel.of_workload(resolved.workload, plan.sizes), rules_of(engine, options)
        )
        placement = network.placement(plan.nodes, plan.sizes)
        resolved = replace(resolved, spanning=spanning_groups_of(prices, placement))
    return with_traffic(resolved, options, engine)


def _carries(port: Port, network_api: str) -> bool:
    """Whether groups may use `port`; taken for granted where its NIC is not known yet."""
    known = port.interface or port.address or port.hcas
    needed = port.hcas and not port.no_verbs if network_api == VERBS else port.address
    return port.usable and (port.fabric == ETHERNET or not known or bool(needed))


def decisions(
    plan: Plan, network_api: str, options: Options, engine: EngineTraits = EngineTraits()
) -> Decisions:
    return Decisions(plan, network_api, site_of(plan, network_api), options, engine)


def with_traffic(plan: Plan, options: Options, engine: EngineTraits = EngineTraits()) -> Plan:
    """The decisions for both network APIs, one entry where they are the same."""
    verbs, sockets = (
        decisions(plan, network_api, options, engine).traffic() for network_api in NETWORK_APIS
    )
    alike = verbs == replace(sockets, network_apis=verbs.network_apis)
    return replace(
        plan, traffic=(replace(verbs, network_apis=NETWORK_APIS),) if alike else (verbs, sockets)
    )


def complete_plan(
    plan: Plan,
    sizes: Sizes,
    options: Options,
    model: Model | None = None,
    engine: EngineTraits = EngineTraits(),
) -> Plan:
    """What the plan decides for other sizes than its own; the order stays."""
    workload = workload_of(model, sizes) or plan.workload
    changed = replace(
        plan, sizes=sizes, workload=workload, loads=(), stage_layers=(), spanning=(), predicted={}
    )
    return with_loads(with_traffic(changed, options, engine), options, model, engine)


def with_loads(
    plan: Plan, options: Options, model: Model | None, engine: EngineTraits = EngineTraits()
) -> Plan:
    """`plan` with what its stages compute and hold of `model`, and the micro-batches in flight that follow;
    as it is where that is known, or the model is not, or the framework will refuse it."""
    sizes = plan.sizes
    if plan.loads or model is None or sizes is None or workload_of(model, sizes) is None:
        return plan
    if model.layers < sizes.pipeline:
        return plan
    network = Network(site_of(plan))
    costs = Prices(network, RankModel.of(model, sizes)).costs(network.placement(plan.nodes, sizes))
    whole = (
        len(plan.stage_layers) == costs.stages and sum(plan.stage_layers) == model.layers
    )  # else chunks
    layers = plan.stage_layers if whole else uniform(model.layers, costs.stages)
    plan = replace(plan, loads=costs.loads(layers))
    traffic = [
        decisions(plan, decided.network_apis[0], options, engine).with_order(decided)
        for decided in plan.traffic
    ]
    return replace(plan, traffic=tuple(traffic))


def workload_of(model: Model | None, sizes: Sizes | None) -> Workload | None:
    """None where model or sizes are not known, or the batch does not divide (the framework refuses that)."""
    try:
        return model.workload(sizes) if model is not None and sizes is not None else None
    except HolmesError:
        return None


def site_of(plan: Plan, network_api: str = VERBS) -> Site:
    """The plan's own networks as a Site, nodes in its order."""
    fast = [fabric.name for fabric in plan.fabrics if fabric.name != ETHERNET]  # the fastest first

    def node(name: str) -> Node:
        ports = (Port(fabric) for fabric in fast if fabric in plan.reach[network_api][name])
        return Node(name, plan.cluster_of[name], plan.processes, (*ports, Port(ETHERNET)))

    return Site(tuple(map(node, plan.nodes)), plan.fabrics, wan=plan.wan)


def spec_of_group(
    plan: Plan,
    ranks: Sequence[int],
    network_api: str,
    options: Options,
    total_bytes: float = inf,
    engine: EngineTraits = EngineTraits(),
) -> ReductionSpec:
    """How the group of `ranks` sums total_bytes in a step: as its stage does. For itself where the plan has
    no such group, it is to compress otherwise, or has too little for a network's buckets; for the stage again
    where links have a latency and the plan did not know its bytes."""
    planned, stage = plan.traffic_of(network_api).reductions, plan.stage_of(ranks)
    nominal = plan.basis == NOMINAL and plan.sizes is not None
    if stage is not None and plan.wan and nominal and total_bytes < inf:
        known = replace(plan, workload=replace(plan.workload, gradient_bytes=total_bytes))
        return decisions(known, network_api, options, engine).reduction(
            stage, planned[stage].overlap
        )
    enough = total_bytes >= FEWEST * SMALLEST_BYTES
    if stage is not None and planned[stage].compress == options.compress_gradients and enough:
        return planned[stage]
    overlap = options.overlap != "off" if stage is None else planned[stage].overlap
    return decisions(plan, network_api, options, engine).of_group(ranks, overlap, total_bytes)


def spanning(plan: Plan, sizes: Sizes, instances: int = 1) -> dict[str, int]:
    """Kind of group -> how many span (Plan.spans) in a job of complete `sizes`. instances > 1: of a
    data-parallel group its slices, within which megatron-core reduces first."""
    result = {}
    for kind in INSIDE:
        members = groups(sizes, kind)
        if kind == "data" and instances > 1:
            size = len(members[0]) // instances
            members = [
                group[start : start + size]
                for group in members
                for start in range(0, len(group), size)
            ]
        if count := sum(map(plan.spans_networks, members)):
            result[kind] = count
    return result


def spanning_groups_of(prices: Prices, placement: Placement) -> tuple[SpanningGroups, ...]:
    """Groups that no fast fabric holds though a member has one, by kind; their cost: how much longer a step
    takes than with these groups inside."""
    if not prices.spans_networks(placement):
        return ()
    network, result = prices.network, []
    names, kinds = network.nodes(placement), placement.kinds()
    for kind in INSIDE:
        across: list[dict[int, str]] = []
        for ranks in groups(placement.sizes, kind):
            slots = dict.fromkeys(rank // placement.processes for rank in ranks)
            first = {kinds[slot]: names[slot] for slot in sorted(slots, reverse=True)}
            if network.spans_networks(frozenset(first)):
                across.append(first)
        if across:
            inside = Prices(network, prices.job, prices.rules, on_best_fabrics=kind)
            longer_s = max(0.0, prices.step_s(placement) - inside.step_s(placement))
            example = set(across[0].values())
            ordered = tuple(name for name in names if name in example)
            result.append(SpanningGroups(kind, len(across), ordered, ETHERNET, longer_s))
    return tuple(result)
