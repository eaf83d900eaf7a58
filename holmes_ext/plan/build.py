"""Makes the Plan of a job: node order, partition, the decisions that follow, and predicted times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from holmes_ext.cluster.site import Site
from holmes_ext.errors import HolmesError
from holmes_ext.options import Options
from holmes_ext.plan.arrange.orders import launched
from holmes_ext.plan.arrange.place import fastest_first, place
from holmes_ext.plan.cost.links import Links
from holmes_ext.plan.cost.model import Model
from holmes_ext.plan.cost.network import Network, stock_fabric
from holmes_ext.plan.cost.pipeline import Estimate, asked_in_flight, uniform
from holmes_ext.plan.cost.price import Prices, price
from holmes_ext.plan.cost.stages import RankModel, StageCosts, estimate, predict
from holmes_ext.plan.decide import derive_traffic
from holmes_ext.plan.engine import EngineTraits, rules_of
from holmes_ext.plan.partition import METHODS
from holmes_ext.plan.partition import partition as split_layers
from holmes_ext.plan.placement import Placement
from holmes_ext.plan.plan import NOMINAL, Plan
from holmes_ext.plan.profile import Profile, check_profile, measured_costs
from holmes_ext.plan.sizes import Sizes
from holmes_ext.plan.workload import StageLoad, Workload
from holmes_ext.words import counted


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
    """Return the plan of a job on a site.

    `predicted` of the plan has seconds per step: step_seconds, reduction_seconds (of the slowest stage),
    exposed_reduction_seconds (after the first stage's last backward pass). The first two also exist with the
    prefix stock_, for the launcher's order of the nodes with all traffic on stock_fabric(site).

    Args:
        site: Nodes and fabrics.
        sizes: Parallel sizes. None: not known; only the order of the nodes and the group of all ranks are
            planned.
        workload: Work of a rank, if no model is given.
        partition: Method that distributes layers over stages (METHODS of plan/partition.py). "uniform"
            leaves that to the framework.
        model: The model.
        alpha: Factor of the partition "speed".
        overlap: Whether predictions assume that gradients are reduced during the last backward pass.
        stage_layers: Layers of each stage, if the user lists them.
        profile: Times that a job measured, used in place of the model's.
        links: Measured rates and latencies of the networks.
        options: Options of the user.
        basis: Where `workload` comes from.
        engine: Traits of the training engine.

    Raises:
        HolmesError: The sizes do not multiply to the world size, or the partition is not possible.
    """
    # The arguments: a profile has sizes and a workload, too.
    if profile is not None:
        check_profile(profile, site, sizes, model)
        sizes = sizes or profile.sizes
        workload = profile.workload()
        basis = "measured"
    if stage_layers or partition != "uniform":
        _check_partition(partition, sizes, model or profile, stage_layers)
    network = Network(site, links)
    nodes = tuple(node.name for node in site.nodes)
    plan = Plan(site.digest, nodes, site.processes, processes_of=site.processes_of)
    if sizes is None:
        # The stages are not known, so only the order of the nodes can be planned: the fastest first.
        plan = replace(
            plan,
            nodes=fastest_first(network),
            stage_layers=tuple(stage_layers),
            partition=partition,
        )
        return derive_traffic(plan, site, options, links, workload, basis or NOMINAL, engine)
    sizes = sizes.complete(site.world_size, site.ranks_of_every_node)
    if workload is None and model is not None:
        workload = model.workload(sizes)
        basis = model.source

    # The order of the nodes.
    rules = rules_of(engine, options)
    if workload is None:
        # Without a workload neither the micro-batches that hide stage links nor the memory is known.
        rules = replace(rules, hide_stage_links=False)
    prices = Prices(network, RankModel.of_workload(workload or Workload(), sizes), rules)
    placement = place(prices, sizes)
    predicted = _predicted(prices, placement)

    # The layers of each stage, and predictions that know them.
    split = tuple(stage_layers)
    loads: tuple[StageLoad, ...] = ()  # work of each stage
    if stage_layers:
        partition = "explicit"
    elif model is not None or profile is not None:
        costs = costs_of(prices, placement, model, profile, overlap)
        split = split_layers(partition, costs, alpha)
        loads = costs.loads(split)
        in_flight = asked_in_flight(options, sizes.pipeline, costs.micro_batches)
        predicted |= _times(predict(costs, split, in_flight))
        if profile is None and model is not None:
            predicted |= _stock_times(_stock_step(prices, RankModel.of(model, sizes), sizes))
        if partition == "uniform":
            split = ()  # the framework decides
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

    # How each group and stage communicates.
    return derive_traffic(plan, site, options, links, workload, basis, engine)


def _predicted(prices: Prices, placement: Placement) -> dict[str, float]:
    """Predict the step and reduction times of a job with one block on each pipeline stage.

    The times are for the planned order of the nodes (`placement`), and for the launcher's order in
    a job without holmes. The latter have names with the prefix stock_.
    """
    sizes = placement.sizes
    step = estimate(prices.costs(placement), (1,) * sizes.pipeline)
    stock_network, stock_placement = _stock(prices, sizes)
    stock_costs = Prices(stock_network, prices.job).costs(stock_placement)
    stock_step = estimate(stock_costs, (1,) * sizes.pipeline)
    return {**_times(step), **_stock_times(stock_step)}


def _stock_step(prices: Prices, job: RankModel, sizes: Sizes) -> Estimate:
    """Predict the step of a model in a job without holmes, with a uniform partition of the layers.

    Args:
        prices: Prices with holmes; only the site and its rates are used.
        job: The model, with all its layers.
        sizes: Parallel sizes.
    """
    network, placement = _stock(prices, sizes)
    costs = price(network, placement, job)
    return predict(costs, uniform(costs.blocks, costs.stages))


def _stock(prices: Prices, sizes: Sizes) -> tuple[Network, Placement]:
    """Return the network and the placement of the same job without holmes.

    The nodes are in the launcher's order, and all traffic uses the fastest fabric that all nodes share.
    """
    site = prices.network.site
    network = Network(site, prices.network.links, single_fabric=stock_fabric(site))
    return network, launched(network, sizes)


def costs_of(
    prices: Prices,
    placement: Placement,
    model: Model | None,
    profile: Profile | None,
    overlap: bool,
) -> StageCosts:
    """Return the costs of every layer on every stage, measured or predicted.

    Times come from the profile if it is given, else from the model. Memory always comes from the model.

    Args:
        prices: Prices of the job; only its network and rules (abilities of framework and holmes) are used.
        placement: Nodes of each stage.
        model: The model; None: not known.
        profile: Measured times; None: there are none. At least one of model and profile is given.
        overlap: Whether gradients are reduced during the last backward pass.

    Raises:
        HolmesError: There are fewer layers than stages, or the profile has no such stages.
    """
    network = prices.network
    sizes = placement.sizes
    rules = replace(prices.rules, overlap=overlap)
    predicted = None
    if model is not None:
        if model.layers < sizes.pipeline:
            problem = f"{counted(model.layers, 'layer', 'are')} too few for {sizes.pipeline} pipeline stages"
            raise HolmesError(f"{model.source}: {problem}; every stage needs one")
        predicted = price(network, placement, RankModel.of(model, sizes), rules)
    if profile is None:
        assert predicted is not None
        return predicted
    clusters = [network.clusters(content) for content in placement.stages]
    costs = measured_costs(profile, clusters, overlap)
    if not rules.hide_stage_links:
        # Nothing hides the links between stages, because the framework's own schedule runs. In StageCosts,
        # link_load_s=None means that.
        costs = replace(costs, link_load_s=None)
    if predicted is None:
        return costs  # without a model nothing is known of the memory

    # Predicted costs have a number for each kind of layer (embedding, block, output), measured costs for
    # each layer. by_layer() repeats the number of a kind for all of its layers.
    return replace(
        costs,
        state_bytes=tuple(predicted.by_layer(predicted.state_bytes)),
        kept_bytes=tuple(predicted.by_layer(predicted.kept_bytes)),  # activations of a micro-batch
        limit_bytes=predicted.limit_bytes,
        working_bytes=predicted.working_bytes,  # buffers that exist for a moment
    )


def _check_partition(
    partition: str, sizes: Sizes | None, model: Model | Profile | None, stage_layers: Sequence[int]
) -> None:
    """Raise HolmesError if the layers cannot be divided among the stages in the requested way.

    The user either lists the layers of each stage, or names a method that computes them. Listed
    layers need the number of stages only; a method also needs the model.

    Args:
        partition: Name of the method (METHODS); not used if `stage_layers` is given.
        sizes: Parallel sizes; None: not known.
        model: The model, or its measured times; None: not known.
        stage_layers: Layers of each stage that the user lists; empty: the method computes them.
    """
    if partition not in METHODS:
        raise HolmesError(f"partition {partition!r} is not one of {', '.join(METHODS)}")
    name = f"partition {partition!r}"
    if stage_layers:
        name = f"layers {','.join(map(str, stage_layers))}"
    if sizes is None:
        raise HolmesError(
            f"{name}: the number of stages is not known; give --holmes-sizes pipeline=N"
        )
    if stage_layers and (len(stage_layers) != sizes.pipeline or min(stage_layers) < 1):
        count = f"{counted(len(stage_layers), 'number')} for {counted(sizes.pipeline, 'pipeline stage')}"
        raise HolmesError(f"{name}: {count}; give one for each stage, all 1 or more")
    if not stage_layers and model is None:
        raise HolmesError(
            f"{name} needs to know the model: give --holmes-model FILE (examples/models has some)"
        )


def _times(step: Estimate) -> dict[str, float]:
    """Convert the predicted times of a step into a dictionary, with the names of Plan.predicted."""
    return {
        "step_seconds": step.step_s,
        "reduction_seconds": max(step.reduction_s),
        "exposed_reduction_seconds": step.waited_s,
    }


def _stock_times(step: Estimate) -> dict[str, float]:
    """Convert the times of a step without holmes into a dictionary, with the names of Plan.predicted."""
    return {
        "stock_step_seconds": step.step_s,
        "stock_reduction_seconds": max(step.reduction_s),
    }
