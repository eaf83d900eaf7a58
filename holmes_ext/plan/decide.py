"""What follows from a Plan's order, sizes and networks: each group's network, how gradients are reduced.

    derive_traffic(plan, site)   the plan with the ports that there are: by `holmes
                                 plan`, at a job's start, when a port fails
    complete_plan(plan, sizes)         for other sizes, which a framework tells when it starts
    spec_of_group(...)            for groups that are not planned: the same rules, with the plan's own rates
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from holmes_ext.cluster.fabric import ETHERNET, Fabric
from holmes_ext.cluster.site import Node, Port, Site
from holmes_ext.errors import HolmesError
from holmes_ext.options import Options
from holmes_ext.plan.buckets import FEWEST, SMALLEST_BYTES
from holmes_ext.plan.cost.links import Links
from holmes_ext.plan.cost.model import Model
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.cost.pipeline import uniform
from holmes_ext.plan.cost.price import Prices
from holmes_ext.plan.cost.stages import RankModel
from holmes_ext.plan.decisions import Decisions
from holmes_ext.plan.engine import EngineTraits, rules_of
from holmes_ext.plan.placement import Placement
from holmes_ext.plan.plan import NOMINAL, Plan, Straddle
from holmes_ext.plan.sizes import INSIDE, Sizes, groups
from holmes_ext.plan.traffic import NETWORK_APIS, SOCKETS, VERBS, PlannedFabric, ReductionSpec
from holmes_ext.plan.workload import Workload


def derive_traffic(
    plan: Plan, site: Site, options: Options = Options(), links: Links = Links(),
    workload: Workload | None = None, basis: str = NOMINAL, engine: EngineTraits = EngineTraits(),
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
        return tuple(n.name for n in here
                     for p in n.ports if p.fabric == fabric.name and _carries(p, network_api))

    rates = [known.get(fabric.name, fabric) for fabric in links.site(site).fabrics]
    nets = {fabric.name: fabric.net for fabric in site.fabrics}
    fabrics = tuple(
        PlannedFabric(f.name, f.kind, f.rate_bps, f.latency_s, able(f, VERBS), able(f, SOCKETS),
                      net=nets[f.name])
        for f in sorted(rates, key=lambda f: f.preference, reverse=True)
    )
    names = dict.fromkeys(node.cluster for node in here)
    clusters = {name: tuple(node.name for node in here if node.cluster == name) for name in names}
    wan = plan.wan if plan.fabrics else links.site(site).wan
    resolved = replace(plan, fabrics=fabrics, clusters=clusters, wan=wan)
    if not plan.fabrics:
        resolved = replace(resolved, workload=workload or Workload(), basis=basis)
    if plan.sizes is not None and fabrics != plan.fabrics:  # what straddles, on the ports that are left
        network = Network(site_of(resolved))
        prices = Prices(network, RankModel.of_workload(resolved.workload, plan.sizes),
                        rules_of(engine, options))
        placement = network.placement(plan.nodes, plan.sizes)
        resolved = replace(resolved, straddling=straddles_of(prices, placement))
    return with_traffic(resolved, options, engine)


def _carries(port: Port, network_api: str) -> bool:
    """Whether groups may use `port`; taken for granted where its NIC is not known yet."""
    known = port.interface or port.address or port.hcas
    needed = port.hcas and not port.no_verbs if network_api == VERBS else port.address
    return port.usable and (port.fabric == ETHERNET or not known or bool(needed))


def decisions(plan: Plan, network_api: str, options: Options,
              engine: EngineTraits = EngineTraits()) -> Decisions:
    return Decisions(plan, network_api, site_of(plan, network_api), options, engine)


def with_traffic(plan: Plan, options: Options, engine: EngineTraits = EngineTraits()) -> Plan:
    """The decisions for both network APIs, one entry where they are the same."""
    verbs, sockets = (decisions(plan, network_api, options, engine).traffic() for network_api in NETWORK_APIS)
    alike = verbs == replace(sockets, network_apis=verbs.network_apis)
    return replace(plan, traffic=(replace(verbs, network_apis=NETWORK_APIS),) if alike else (verbs, sockets))


def complete_plan(
    plan: Plan, sizes: Sizes, options: Options, model: Model | None = None,
    engine: EngineTraits = EngineTraits()
) -> Plan:
    """What the plan decides for other sizes than its own; the order stays."""
    workload = workload_of(model, sizes) or plan.workload
    changed = replace(
        plan, sizes=sizes, workload=workload, loads=(), stage_layers=(), straddling=(), predicted={}
    )  # fmt: skip
    return with_loads(with_traffic(changed, options, engine), options, model, engine)


def with_loads(plan: Plan, options: Options, model: Model | None,
               engine: EngineTraits = EngineTraits()) -> Plan:
    """`plan` with what its stages compute and hold of `model`, and the micro-batches in flight that follow;
    as it is where that is known, or the model is not, or the framework will refuse it."""
    sizes = plan.sizes
    if plan.loads or model is None or sizes is None or workload_of(model, sizes) is None:
        return plan
    if model.layers < sizes.pipeline:
        return plan
    network = Network(site_of(plan))
    costs = Prices(network, RankModel.of(model, sizes)).costs(network.placement(plan.nodes, sizes))
    whole = len(plan.stage_layers) == costs.stages and sum(plan.stage_layers) == model.layers  # else chunks
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
    plan: Plan, ranks: Sequence[int], network_api: str, options: Options, total_bytes: float = inf,
    engine: EngineTraits = EngineTraits(),
) -> ReductionSpec:
    """How the group of `ranks` sums total_bytes in a step: as its stage does. For itself where the plan has
    no such group, it is to compress otherwise, or has too little for a network's buckets; for the stage again
    where links have a latency and the plan did not know its bytes."""
    planned, stage = plan.traffic_of(network_api).reductions, plan.stage_of(ranks)
    nominal = plan.basis == NOMINAL and plan.sizes is not None
    if stage is not None and plan.wan and nominal and total_bytes < inf:
        known = replace(plan, workload=replace(plan.workload, gradient_bytes=total_bytes))
        return decisions(known, network_api, options, engine).reduction(stage, planned[stage].overlap)
    enough = total_bytes >= FEWEST * SMALLEST_BYTES
    if stage is not None and planned[stage].compress == options.compress and enough:
        return planned[stage]
    overlap = options.overlap != "off" if stage is None else planned[stage].overlap
    return decisions(plan, network_api, options, engine).of_group(ranks, overlap, total_bytes)


def straddling(plan: Plan, sizes: Sizes, instances: int = 1) -> dict[str, int]:
    """Kind of group -> how many straddle (Plan.straddles) in a job of complete `sizes`. instances > 1: of a
    data-parallel group its slices, within which megatron-core reduces first."""
    result = {}
    for kind in INSIDE:
        members = groups(sizes, kind)
        if kind == "data" and instances > 1:
            size = len(members[0]) // instances
            members = [group[start : start + size] for group in members
                       for start in range(0, len(group), size)]
        if count := sum(map(plan.straddles, members)):
            result[kind] = count
    return result


def straddles_of(prices: Prices, placement: Placement) -> tuple[Straddle, ...]:
    """Groups that no fast fabric holds though a member has one, by kind; their cost: how much longer a step
    takes than with these groups inside."""
    if not prices.straddles(placement):
        return ()
    network, result = prices.network, []
    names, kinds = network.nodes(placement), placement.kinds()
    for kind in INSIDE:
        across: list[dict[int, str]] = []
        for ranks in groups(placement.sizes, kind):
            slots = dict.fromkeys(rank // placement.processes for rank in ranks)
            first = {kinds[slot]: names[slot] for slot in sorted(slots, reverse=True)}
            if network.straddles(frozenset(first)):
                across.append(first)
        if across:
            inside = Prices(network, prices.job, prices.rules, on_best_fabrics=kind)
            longer_s = max(0.0, prices.step_s(placement) - inside.step_s(placement))
            example = set(across[0].values())
            ordered = tuple(name for name in names if name in example)
            result.append(Straddle(kind, len(across), ordered, ETHERNET, longer_s))
    return tuple(result)
