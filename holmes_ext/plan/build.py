"""The Plan of a job: placement, the decisions that follow from it, and what to expect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from holmes_ext.cluster.site import Site
from holmes_ext.errors import HolmesError
from holmes_ext.options import Options
from holmes_ext.plan import partition as stages
from holmes_ext.plan.arrange.orders import launched
from holmes_ext.plan.arrange.place import fastest_first, place
from holmes_ext.plan.cost.links import Links
from holmes_ext.plan.cost.model import Model
from holmes_ext.plan.cost.network import Network, stock_fabric
from holmes_ext.plan.cost.pipeline import Estimate, uniform
from holmes_ext.plan.cost.price import Prices, price
from holmes_ext.plan.cost.stages import RankModel, StageCosts, estimate, predict
from holmes_ext.plan.decide import asked_in_flight, derive_traffic
from holmes_ext.plan.engine import EngineTraits, rules_of
from holmes_ext.plan.placement import Placement
from holmes_ext.plan.plan import NOMINAL, Plan
from holmes_ext.plan.profile import Profile, check_profile, measured_costs
from holmes_ext.plan.sizes import Sizes
from holmes_ext.plan.workload import StageLoad, Workload


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
    options: Options = Options(),
    basis: str = "",
    engine: EngineTraits = EngineTraits(),
) -> Plan:
    """The plan for a job of `sizes` on `site`; with sizes None only the order of the nodes, and what follows
    for the group of all ranks.

    Args:
        workload: What a rank does, where no model is given; basis: where that comes from.
        partition: How layers go to stages (plan/partition.py), of `model`; "uniform" leaves them to
            the framework. alpha: of "speed".
        overlap: Gradients are reduced under the last backward.
        stage_layers: The layers of each stage, as the user lists them.
        profile: What a job measured; its seconds in place of the model's.
        links: What was measured of the networks; times and the choice among them follow it.
        options: What the user asked of reductions and stage links.

    predicted, in seconds for each step: step_seconds, reduction_seconds (of the slowest stage),
    exposed_reduction_seconds (after the first stage's last backward), and the first two with the prefix
    stock_ for the launcher's order with all traffic on stock_fabric(site). HolmesError when the sizes do not
    multiply to the world size, or the partition cannot be made.
    """
    if profile is not None:
        check_profile(profile, site, sizes, model)
        sizes, workload, basis = sizes or profile.sizes, profile.workload(), "measured"
    if stage_layers or partition != "uniform":
        _check(partition, sizes, model or profile, stage_layers)
    sizes = sizes.complete(site.world_size, site.processes) if sizes is not None else None
    if workload is None and model is not None and sizes is not None:
        workload, basis = model.workload(sizes), model.source
    network, plan = (
        Network(site, links),
        Plan(site.digest, tuple(node.name for node in site.nodes), site.processes),
    )
    if sizes is None:
        plan = replace(
            plan,
            nodes=fastest_first(network),
            stage_layers=tuple(stage_layers),
            partition=partition,
        )
        return derive_traffic(plan, site, options, links, workload, basis or NOMINAL, engine)
    rules = rules_of(engine, options)
    if workload is None:  # nobody knows what hides stage links then, and what fits
        rules = replace(rules, hide_stage_links=False)
    prices = Prices(network, RankModel.of_workload(workload or Workload(), sizes), rules)
    placement = place(prices, sizes)
    predicted, loads, split = (
        _compared(prices, placement),
        tuple[StageLoad, ...](),
        tuple(stage_layers),
    )
    if stage_layers:
        partition = "explicit"
    elif model is not None or profile is not None:
        costs = costs_of(prices, placement, model, profile, overlap)
        split = stages.partition(partition, costs, alpha)
        loads = costs.loads(split)
        asked = asked_in_flight(options, sizes.pipeline, costs.micro_batches)
        predicted |= _times(predict(costs, split, asked))
        if profile is None and model is not None:
            by_stage = price(*_stock(prices, sizes), RankModel.of(model, sizes))
            times = _times(predict(by_stage, uniform(by_stage.blocks, by_stage.stages)))
            predicted |= {
                key: value for name, value in times.items() if (key := f"stock_{name}") in predicted
            }
        split = split if partition != "uniform" else ()
    plan = replace(
        plan,
        nodes=placement.names,
        sizes=sizes,
        stage_layers=split,
        loads=loads,
        partition=partition,
        predicted=predicted,
    )
    basis = basis or (NOMINAL if workload is None else "given")
    return derive_traffic(plan, site, options, links, workload, basis, engine)


def _compared(prices: Prices, placement: Placement) -> dict[str, float]:
    """The step, and stock's."""
    sizes = placement.sizes
    costs, split = prices.costs(placement), (1,) * sizes.pipeline
    result = _times(estimate(costs, split))
    stock, order = _stock(prices, sizes)
    times = _times(estimate(Prices(stock, prices.job).costs(order), split))
    result |= {
        f"stock_{name}": value
        for name, value in times.items()
        if name != "exposed_reduction_seconds"
    }
    return result


def _stock(prices: Prices, sizes: Sizes) -> tuple[Network, Placement]:
    """The launcher's order, with all traffic on the network that all nodes share."""
    site, links = prices.network.site, prices.network.links
    network = Network(site, links, stock_fabric(site))
    return network, launched(network, sizes)


def costs_of(
    prices: Prices,
    placement: Placement,
    model: Model | None,
    profile: Profile | None,
    overlap: bool,
) -> StageCosts:
    """Of `model`, or as measured (one is given); the memory always comes from the model."""
    network, sizes, rules = prices.network, placement.sizes, replace(prices.rules, overlap=overlap)
    if model is not None and model.layers < sizes.pipeline:
        what = f"{model.layers} layers are too few for {sizes.pipeline} pipeline stages"
        raise HolmesError(f"{model.source}: {what}; every stage needs one")
    memory = (
        price(network, placement, RankModel.of(model, sizes), rules) if model is not None else None
    )
    if profile is None:
        assert memory is not None
        return memory
    costs = measured_costs(
        profile, [network.clusters(content) for content in placement.stages], overlap
    )
    costs = costs if rules.hide_stage_links else replace(costs, hidden=None)
    if memory is None:
        return costs
    state, kept = (tuple(memory.by_layer(row)) for row in (memory.state_bytes, memory.kept_bytes))
    limits, working = memory.limit_bytes, memory.working_bytes
    return replace(
        costs, state_bytes=state, kept_bytes=kept, limit_bytes=limits, working_bytes=working
    )


def _check(
    partition: str, sizes: Sizes | None, model: Model | Profile | None, stage_layers: Sequence[int]
) -> None:
    """What a partition that is not the framework's needs."""
    if partition not in stages.METHODS:
        raise HolmesError(f"partition {partition!r} is not one of {', '.join(stages.METHODS)}")
    what = (
        f"layers {','.join(map(str, stage_layers))}" if stage_layers else f"partition {partition!r}"
    )
    if sizes is None:
        raise HolmesError(
            f"{what}: the number of stages is not known; give --holmes-sizes pipeline=N"
        )
    if stage_layers and (len(stage_layers) != sizes.pipeline or min(stage_layers) < 1):
        count = f"{len(stage_layers)} numbers for {sizes.pipeline} pipeline stages"
        raise HolmesError(f"{what}: {count}; give one for each stage, all 1 or more")
    if not stage_layers and model is None:
        raise HolmesError(
            f"{what} needs to know the model: give --holmes-model FILE (examples/models has some)"
        )


def _times(outcome: Estimate) -> dict[str, float]:
    return {
        "step_seconds": outcome.step_s,
        "reduction_seconds": max(outcome.reduction_s),
        "exposed_reduction_seconds": outcome.waited_s,
    }
