"""The Plan of a job: placement, the fabric of every group under it, and what to expect."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from holmes_ext.cluster.site import Site
from holmes_ext.errors import HolmesError
from holmes_ext.plan.cost.links import Links
from holmes_ext.plan.cost.model import Model
from holmes_ext.plan.cost.nodes import clusters_of_stages, costs_on_site, step_seconds, stock_fabric
from holmes_ext.plan.cost.pipeline import Estimate, uniform
from holmes_ext.plan.cost.stages import StageCosts, predict
from holmes_ext.plan.cost.workload import Workload
from holmes_ext.plan.layout import KINDS, groups
from holmes_ext.plan.placement import place
from holmes_ext.plan.plan import Plan
from holmes_ext.plan.profile import Profile, check_profile, measured_costs
from holmes_ext.plan.search import partition as stages
from holmes_ext.plan.sizes import Sizes

#: The "fabric" of a group that one node holds: memory, NVLink or loopback.
LOCAL = "local"


def build_plan(
    site: Site,
    sizes: Sizes | None = None,
    workload: Workload | None = None,
    partition: str = "uniform",
    model: Model | None = None,
    alpha: float = 1.0,
    overlap: bool = False,
    stage_layers: Sequence[int] = (),
    profile: Profile | None = None,
    links: Links = Links(),
) -> Plan:
    """The plan for a job of `sizes` on `site`; with sizes None only the order of the nodes and the world group's fabric.

    partition: how layers go to stages (plan/search/partition.py), of `model`; "uniform" leaves them to the framework. alpha: of "speed"; overlap:
    gradients are reduced under the last backward. stage_layers: the layers of each stage, as the user lists them. predicted, in seconds for each step:
    step_seconds, reduction_seconds (of the slowest stage), exposed_reduction_seconds (after the first stage's last backward),
    and the same two with the prefix stock_ for the launcher's order with all traffic on stock_fabric(site). HolmesError
    when the sizes do not multiply to the world size, or the partition cannot be made. With a model the times are its own,
    with a profile those measured (and a model's memory, where both are given). links: what was measured of the networks; times follow it, the choice of a
    fabric for a group follows the rates of `site`.
    """
    if profile is not None:
        check_profile(profile, site, sizes, model)
        sizes, workload = sizes or profile.sizes, profile.workload()
    if stage_layers or partition != "uniform":
        _check(partition, sizes, model or profile, stage_layers)
    sizes = sizes.complete(site.world_size) if sizes is not None else None
    if workload is None and model is not None and sizes is not None:
        workload = model.workload(sizes)
    measured = links.site(site)
    placement = place(measured, sizes, workload)
    predicted = {}
    if sizes is not None:
        stock = step_seconds(measured, [node.name for node in site.nodes], sizes, workload, only=stock_fabric(measured))
        predicted = {
            "step_seconds": placement.predicted.step_s,
            "reduction_seconds": max(placement.predicted.reduction_s),
            "exposed_reduction_seconds": placement.predicted.waited_s,
            "stock_step_seconds": stock.step_s,
            "stock_reduction_seconds": max(stock.reduction_s),
        }
    if stage_layers:
        partition = "explicit"
    elif (model is not None or profile is not None) and sizes is not None:
        costs = costs_of(measured, placement.nodes, sizes, model, overlap, profile)
        split = stages.partition(partition, costs, alpha)
        predicted |= _times(predict(costs, split))
        if profile is None:
            launched = [node.name for node in site.nodes]
            stock = predict(costs_on_site(measured, launched, sizes, model, only=stock_fabric(measured)), uniform(costs.blocks, costs.stages))
            times = {f"stock_{name}": value for name, value in _times(stock).items()}
            predicted |= {name: value for name, value in times.items() if name in predicted}
        stage_layers = split if partition != "uniform" else ()
    return Plan(
        site_digest=site.digest,
        nodes=placement.nodes,
        processes=site.processes,
        sizes=sizes,
        transports=transports(site, placement.nodes, sizes),
        straddling=placement.straddling,
        stage_layers=tuple(stage_layers),
        partition=partition,
        predicted=predicted,
    )


def costs_of(site: Site, nodes: Sequence[str], sizes: Sizes, model: Model | None, overlap: bool, profile: Profile | None) -> StageCosts:
    """Of `model`, or as measured; the memory always comes from the model."""
    planned = costs_on_site(site, nodes, sizes, model, overlap) if model is not None else None
    if profile is None:
        return planned
    costs = measured_costs(profile, clusters_of_stages(site, nodes, sizes), overlap)
    if planned is None:
        return costs
    state, kept = (tuple(planned.by_layer(row)) for row in (planned.state_bytes, planned.kept_bytes))
    return replace(costs, state_bytes=state, kept_bytes=kept, limit_bytes=planned.limit_bytes, working_bytes=planned.working_bytes)


def _check(partition: str, sizes: Sizes | None, model: Model | Profile | None, stage_layers: Sequence[int]) -> None:
    """What a partition that is not the framework's needs."""
    if partition not in stages.METHODS:
        raise HolmesError(f"partition {partition!r} is not one of {', '.join(stages.METHODS)}")
    what = f"layers {','.join(map(str, stage_layers))}" if stage_layers else f"partition {partition!r}"
    if sizes is None:
        raise HolmesError(f"{what}: the number of stages is not known; give --holmes-sizes pipeline=N")
    if stage_layers and (len(stage_layers) != sizes.pipeline or min(stage_layers) < 1):
        raise HolmesError(f"{what}: {len(stage_layers)} numbers for {sizes.pipeline} pipeline stages; give each stage one, 1 or more")
    if not stage_layers and model is None:
        raise HolmesError(f"{what} needs to know the model: give --holmes-model FILE (examples/models has some)")


def _times(outcome: Estimate) -> dict[str, float]:
    return {
        "step_seconds": outcome.step_s,
        "reduction_seconds": max(outcome.reduction_s),
        "exposed_reduction_seconds": outcome.waited_s,
    }


def transports(site: Site, nodes: Sequence[str], sizes: Sizes | None) -> dict[str, tuple[str, ...]]:
    """For each kind of group the fabric of every group in the order of first ranks, one entry when all are the same.

    "data" are the groups that reduce gradients, over data x context; "expert" is left out when the expert size is 1.
    """
    fabrics_of = {node.name: node.fabrics for node in site.nodes}
    known: dict[frozenset[tuple[str, ...]], str] = {}

    def fabric(members: Iterable[str]) -> str:
        names = list(dict.fromkeys(members))
        if len(names) == 1:
            return LOCAL
        key = frozenset(fabrics_of[name] for name in names)
        if key not in known:
            known[key] = site.shared_fabric(names).name
        return known[key]

    found = {}
    if sizes is not None:
        for kind in KINDS:
            if kind == "expert" and sizes.expert == 1:
                continue
            found[kind] = tuple(fabric(nodes[rank // site.processes] for rank in group) for group in groups(sizes, kind))
    found["world"] = (fabric(nodes),)
    return {kind: names[:1] if len(set(names)) == 1 else names for kind, names in found.items()}
