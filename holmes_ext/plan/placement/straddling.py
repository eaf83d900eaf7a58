"""Groups that no fast fabric holds though a member has one, and what that costs."""

from __future__ import annotations

from collections.abc import Iterable

from holmes_ext.cluster.site import ETHERNET, Fabric
from holmes_ext.plan.cost.network import Network
from holmes_ext.plan.cost.price import Prices
from holmes_ext.plan.placement.placement import Placement
from holmes_ext.plan.plan import Straddle
from holmes_ext.plan.sizes import INSIDE, groups


class _Inside(Network):
    """Every group is on the slowest of its members' own best fabrics."""

    def fabric(self, kinds: Iterable[int]) -> Fabric:
        fabrics = [super(_Inside, self).fabric([kind]) for kind in kinds]
        return min(fabrics, key=lambda fabric: fabric.preference)


def straddling(prices: Prices, placement: Placement) -> tuple[Straddle, ...]:
    """By kind of group; its cost: how much longer a step takes than with these groups inside."""
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
            longer_s = max(0.0, prices.step_s(placement) - _inside(prices, kind).step_s(placement))
            example = set(across[0].values())
            ordered = tuple(name for name in names if name in example)
            result.append(Straddle(kind, len(across), ordered, ETHERNET, longer_s))
    return tuple(result)


def _inside(prices: Prices, kind: str) -> Prices:
    """With groups of a kind inside."""
    network = prices.network
    inside = Prices(network, prices.job, prices.rules)
    inside.groups = {**inside.groups, kind: _Inside(network.site, network.links, network.only)}
    return inside
