"""Prices of a job whose nodes stand in a given order."""

from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.cost.price import Prices, price
from holmes_ext.plan.cost.stages import RankModel, estimate
from holmes_ext.plan.engine import Rules
from holmes_ext.plan.placement import family_of
from holmes_ext.plan.sizes import Sizes
from holmes_ext.plan.workload import Workload
from holmes_ext.planner.simulate.step import JobStep


def costs_on_site(
    site, order, sizes, model, overlap=False, only=None, async_stage_links=True, **rules
):
    """Return the costs of each layer of a model on each stage.

    Args:
        order: Names of the nodes, in the order of the ranks.
        only: Name of the fabric that carries all traffic; None: each group uses its fastest.
    """
    network, sizes = Network(site, single_fabric=only), sizes.complete(site.world_size)
    job = RankModel.of(model, sizes)
    rules = Rules(overlap=overlap, hide_stage_links=async_stage_links, **rules)
    return price(network, network.placement(order, sizes), job, rules)


def step_seconds(site, order, sizes, work=Workload(), only=None, **rules):
    """Return the seconds of a step of a workload."""
    network, sizes = Network(site, single_fabric=only), sizes.complete(site.world_size)
    prices = Prices(
        network, RankModel.of_workload(work, sizes), Rules(**{"hide_stage_links": False, **rules})
    )
    return estimate(prices.costs(network.placement(order, sizes)), (1,) * sizes.pipeline)


def sums_on_site(site, order=(), ranks=(), size=1e9, **rules):
    """Return the ways in which a group of ranks can reduce `size` bytes.

    Args:
        order: Names of the nodes, in the order of the ranks; by default as in the site.
        ranks: Ranks of the group; by default all.
    """
    network, sizes = Network(site), Sizes().complete(site.world_size)
    job = RankModel.of_workload(Workload(gradient_bytes=size), sizes)
    placement = network.placement(order or [node.name for node in site.nodes], sizes)
    family = family_of(placement, ranks or range(site.world_size))
    return Prices(network, job, Rules(**{"direct": True, **rules})).reductions_of_family(family, 1)


def job_on_site(site, order, sizes, model, execution):
    """Return a step of a job, to be simulated."""
    network, sizes = Network(site), sizes.complete(site.world_size)
    placement = network.placement(order, sizes)
    return JobStep(
        network, placement, model, execution, price(network, placement, RankModel.of(model, sizes))
    )
