"""What follows from a Plan's order, sizes and networks: where a group's network and a reduction's way are decided.

    settle(plan, site)    the plan with the ports that there are: by `holmes plan`, at a job's start, when a port fails
    reduction_of(...)     for groups that are not planned: the same rules, with the plan's own rates
    straddling(...)       groups that an order of the nodes leaves to Ethernet
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from holmes_ext.cluster.site import ETHERNET, Fabric, Node, Port, Site
from holmes_ext.errors import HolmesError
from holmes_ext.options import Options
from holmes_ext.plan.cost.buckets import FEWEST, SMALLEST_BYTES, bucket_bytes
from holmes_ext.plan.cost.links import Links
from holmes_ext.plan.cost.model import Model
from holmes_ext.plan.cost.nodes import Predictor, costs_on_site, exposed_stages, slices_of
from holmes_ext.plan.cost.pipeline import uniform
from holmes_ext.plan.cost.workload import Workload
from holmes_ext.plan.in_flight import under_way
from holmes_ext.plan.layout import INSIDE, Layout, groups
from holmes_ext.plan.place_old import straddling_groups
from holmes_ext.plan.plan import NOMINAL, Plan
from holmes_ext.plan.reductions import FLAT, in_two_levels, tied_reduction
from holmes_ext.plan.sizes import Sizes
from holmes_ext.plan.traffic import CARRIERS, LOCAL, SOCKETS, VERBS, Edge, PlannedFabric, Reduction, Traffic, same

#: A bucket of a group in one node, where no network says how large: torch DistributedDataParallel's bucket_cap_mb.
INSIDE_BYTES = 25 * 2**20


def settle(
    plan: Plan,
    site: Site,
    options: Options = Options(),
    links: Links = Links(),
    workload: Workload | None = None,
    basis: str = NOMINAL,
) -> Plan:
    """`plan` with what the ports of `site` can carry, and the decisions that follow from it under the user's `options`.

    links, workload, basis: for a plan that has no rates and no model of its own yet (a new one, or one of version 1).
    """
    known, here = {fabric.name: fabric for fabric in plan.fabrics}, [site.node_by_name[name] for name in plan.nodes]

    def able(fabric: Fabric, carrier: str) -> tuple[str, ...]:
        return tuple(n.name for n in here for p in n.ports if p.fabric == fabric.name and _carries(p, carrier))

    rates = [known.get(fabric.name, fabric) for fabric in links.site(site).fabrics]
    nets = {fabric.name: fabric.net for fabric in site.fabrics}
    fabrics = tuple(
        PlannedFabric(f.name, f.kind, f.rate_bps, f.latency_s, able(f, VERBS), able(f, SOCKETS), net=nets[f.name])
        for f in sorted(rates, key=lambda f: f.preference, reverse=True)
    )
    names = dict.fromkeys(node.cluster for node in here)
    clusters = {name: tuple(node.name for node in here if node.cluster == name) for name in names}
    wan = plan.wan if plan.fabrics else links.site(site).wan
    settled = replace(plan, fabrics=fabrics, clusters=clusters, wan=wan)
    if not plan.fabrics:
        settled = replace(settled, workload=workload or Workload(), basis=basis)
    elif fabrics != plan.fabrics and plan.sizes is not None:  # what straddles, on the ports that are left
        predictor = Predictor(site_of(settled), Layout(plan.sizes, plan.processes), plan.workload)
        settled = replace(settled, straddling=straddling_groups(predictor, plan.nodes))
    return with_traffic(settled, options)


def _carries(port: Port, carrier: str) -> bool:
    """Whether groups may use `port`; taken for granted where its NIC is not known yet (a plan before the job)."""
    known = port.interface or port.address or port.hcas
    needed = port.hcas and not port.no_verbs if carrier == VERBS else port.address
    return port.usable and (port.fabric == ETHERNET or not known or bool(needed))


def with_traffic(plan: Plan, options: Options) -> Plan:
    """The decisions for both carriers, one entry where they are the same."""
    verbs = _traffic(plan, VERBS, options)
    if all(fabric.verbs == fabric.sockets for fabric in plan.fabrics):
        sockets = replace(verbs, carriers=(SOCKETS,), reductions=_reductions(plan, SOCKETS, options))
    else:
        sockets = _traffic(plan, SOCKETS, options)
    alike = verbs == replace(sockets, carriers=verbs.carriers)
    return replace(plan, traffic=(replace(verbs, carriers=CARRIERS),) if alike else (verbs, sockets))


def resized(plan: Plan, sizes: Sizes, options: Options, model: Model | None = None) -> Plan:
    """What the plan decides for other sizes than its own, which a framework tells when it starts; the order stays."""
    workload = workload_of(model, sizes) or plan.workload
    changed = replace(plan, sizes=sizes, workload=workload, loads=(), stage_layers=(), straddling=(), predicted={})
    return with_loads(with_traffic(changed, options), options, model)


def with_loads(plan: Plan, options: Options, model: Model | None) -> Plan:
    """`plan` with what its stages compute and hold of `model`, and as many micro-batches in flight as follow; the plan
    itself where it knows that, or the model is not known, or such that the framework will refuse it."""
    sizes = plan.sizes
    if plan.loads or model is None or sizes is None or workload_of(model, sizes) is None:
        return plan
    if model.layers < sizes.pipeline:
        return plan
    costs = costs_on_site(site_of(plan), plan.nodes, sizes, model)
    own = len(plan.stage_layers) == costs.stages and sum(plan.stage_layers) == model.layers  # else chunks of stages
    layers = plan.stage_layers if own else uniform(model.layers, costs.stages)
    plan = replace(plan, loads=costs.loads(layers))
    held = [under_way(plan, site_of(plan, one.carriers[0]), options) for one in plan.traffic]
    return replace(plan, traffic=tuple(replace(one, in_flight=own) for one, own in zip(plan.traffic, held)))


def workload_of(model: Model | None, sizes: Sizes | None) -> Workload | None:
    """None where model or (complete) sizes are not known, or the batch does not divide: the framework refuses that."""
    try:
        return model.workload(sizes) if model is not None and sizes is not None else None
    except HolmesError:
        return None


def site_of(plan: Plan, carrier: str = VERBS) -> Site:
    """The plan's own networks as a Site, nodes in its order."""
    cluster_of = {node: name for name, nodes in plan.clusters.items() for node in nodes}
    fast = [fabric.name for fabric in plan.fabrics if fabric.name != ETHERNET]  # the fastest first

    def node(name: str) -> Node:
        ports = (Port(fabric) for fabric in fast if fabric in plan.reach[carrier][name])
        return Node(name, cluster_of[name], plan.processes, (*ports, Port(ETHERNET)))

    return Site(tuple(map(node, plan.nodes)), plan.fabrics, wan=plan.wan)


def _traffic(plan: Plan, carrier: str, options: Options) -> Traffic:
    transports: dict[str, list[str]] = {}
    for kind, ranks in plan.groups():
        transports.setdefault(kind, []).append(_name(plan.fabric_of(ranks, carrier)))
    listed = {kind: same(tuple(names)) for kind, names in transports.items()}
    edges, held = _edges(plan, carrier, options), under_way(plan, site_of(plan, carrier), options)
    tied = _tied(plan, carrier) if options.counts_on("deepspeed-tied", "megatron-tied") else ()
    return Traffic((carrier,), listed, _reductions(plan, carrier, options), edges, held, tied)


def _name(fabric: Fabric | None) -> str:
    return LOCAL if fabric is None else fabric.name


# --------------------------------------------------------------------------- edges


def own_pair(plan: Plan, pair: Sequence[int], over: Sequence[int], carrier: str) -> bool:
    """Whether two ranks that would send over the group `over` get a group of their own: what they share is faster."""
    return _name(plan.fabric_of(pair, carrier)) != _name(plan.fabric_of(over, carrier))


def adjacent_stages(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Of a pipeline group the pairs that may send to each other, last and first (interleaved schedules) among them."""
    return sorted({(min(pair), max(pair)) for pair in zip(ranks, (*ranks[1:], ranks[0])) if len(set(pair)) > 1})


def own_pairs(plan: Plan, ranks: Sequence[int], carrier: str) -> list[tuple[int, int]]:
    """The neighbours that get a group each where a framework sends batches over their pipeline group: all or none.

    All, once one pair has something faster: NCCL makes a group's communicator among all its ranks at the first batch
    over it, where no device is bound, and a rank whose pairs all have their own would never come to it.
    """
    pairs, over = adjacent_stages(ranks), _name(plan.fabric_of(ranks, carrier))
    return pairs if any(_name(plan.fabric_of(pair, carrier)) != over for pair in pairs) else []


def _edges(plan: Plan, carrier: str, options: Options) -> tuple[Edge, ...]:
    """Of each stage to the next, and of the last to the first where that is another pair (interleaved schedules)."""
    sizes, found, world = plan.sizes, [], _name(plan.fabric_of(range(plan.world_size), carrier))
    whole = {ranks: own_pairs(plan, ranks, carrier) for ranks in (groups(sizes, "pipeline") if sizes else ())}
    stages = sizes.pipeline if sizes else 1
    for stage in range(stages if stages > 2 else stages - 1):
        fabrics, own = [], []
        for ranks, pairs in whole.items():
            pair = tuple(sorted((ranks[stage], ranks[(stage + 1) % stages])))
            fabrics.append(_name(plan.fabric_of(pair, carrier)))
            frameworks = {"pipeline": pair in pairs, "world": fabrics[-1] != world}
            own.append("+".join(name for name, gets_one in frameworks.items() if gets_one))
        crosses = ETHERNET in fabrics
        cut = crosses and options.counts_on("megatron-slices")
        slices = slices_of(sizes, plan.workload.copies, plan.processes) if sizes is not None and cut else 1
        pair = (stage, (stage + 1) % stages)
        narrow = options.edges if crosses and options.counts_on("deepspeed-narrow") else "off"
        found.append(Edge(pair, same(tuple(fabrics)), same(tuple(own)), slices, narrow))
    return tuple(found)


# --------------------------------------------------------------------------- reductions


def reduction_of(
    plan: Plan, ranks: Sequence[int], carrier: str, options: Options, total_bytes: float = inf
) -> Reduction:
    """How the group of `ranks` sums total_bytes in a step: as its stage does. By the same rules, for itself, where the
    plan has no such group, it is to compress otherwise, or has too little for buckets that suit a network; for the
    stage, where links between clusters have a latency and the plan did not know how many bytes."""
    planned, stage = plan.traffic_of(carrier).reductions, plan.stage_of(ranks)
    if stage is not None and plan.wan and plan.basis == NOMINAL and plan.sizes is not None and total_bytes < inf:
        found = [own for own in groups(plan.sizes, "data") if plan.stage_of(own) == stage]
        return _reduction(plan, found, carrier, options, planned[stage].overlap, total_bytes)
    if stage is not None and planned[stage].compress == options.compress and total_bytes >= FEWEST * SMALLEST_BYTES:
        return planned[stage]
    overlap = options.overlap != "off" if stage is None else planned[stage].overlap
    return _reduction(plan, [tuple(ranks)], carrier, options, overlap, total_bytes)


def _reductions(plan: Plan, carrier: str, options: Options) -> tuple[Reduction, ...]:
    sizes = plan.sizes or Sizes().complete(plan.world_size)
    reduces = sizes.data * sizes.context > 1 and options.counts_on("overlap", "megatron-reduction")
    if options.overlap == "auto" and reduces:
        wanted = exposed_stages(site_of(plan, carrier), plan.nodes, sizes, plan.workload)
    else:
        wanted = (options.overlap == "on" and reduces,) * sizes.pipeline
    of_stage: dict[int, list[tuple[int, ...]]] = {stage: [] for stage in range(sizes.pipeline)}
    for ranks in groups(sizes, "data"):
        of_stage[sizes.stage(ranks[0])].append(ranks)
    total = plan.workload.gradient_bytes
    return tuple(_reduction(plan, found, carrier, options, wanted[stage], total) for stage, found in of_stage.items())


def _tied(plan: Plan, carrier: str) -> tuple[str, ...]:
    return way.clusters if (way := tied_reduction(plan, carrier)) is not None else ()


def _reduction(
    plan: Plan, found: Sequence[Sequence[int]], carrier: str, options: Options, overlap: bool, total_bytes: float
) -> Reduction:
    """Of groups that do the same at once: in two levels where that is faster for each that lies on several clusters."""
    on = options.counts_on("two-level", "megatron-reduction")
    way = in_two_levels(plan, found, carrier, options.compress, total_bytes) if on else FLAT
    clusters, least, chunk, across, streams = way
    fabrics = [fabric for ranks in found if (fabric := plan.fabric_of(ranks, carrier)) is not None]
    slowest = min(fabrics, key=lambda fabric: fabric.preference, default=None)
    size = bucket_bytes(slowest, len(found[0]), total_bytes) if slowest is not None else INSIDE_BYTES
    given = options.bucket_bytes
    chunk = (given or chunk) if clusters else 0
    return Reduction(overlap, given or size, clusters, least, chunk, options.compress, across, streams)


# --------------------------------------------------------------------------- other orders


def straddling(plan: Plan, sizes: Sizes, instances: int = 1) -> dict[str, int]:
    """How many groups of each kind straddle in a job of complete `sizes` in the plan's order (Plan.straddles).

    instances > 1: of a data-parallel group its slices are looked at, within which megatron-core reduces first.
    """
    found = {}
    for kind in INSIDE:
        members = groups(sizes, kind)
        if kind == "data" and instances > 1:
            size = len(members[0]) // instances
            members = [group[start : start + size] for group in members for start in range(0, len(group), size)]
        if count := sum(map(plan.straddles, members)):
            found[kind] = count
    return found
