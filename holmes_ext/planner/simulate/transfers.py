"""Loads (plan/cost/network.py) as transfers of the simulation."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from math import inf

from holmes_ext.plan.cost.links import CORES
from holmes_ext.plan.cost.network import Load, Network
from holmes_ext.plan.cost.reductions import Flow
from holmes_ext.planner.simulate.events import Transfer


class TransferMaker:
    """message_s: of software, for each message; capacities: bits/s of all that was used so far."""

    def __init__(self, network: Network, message_s: float):
        self.network, self.message_s = network, message_s
        self.capacities: dict[Hashable, float] = {}

    def message(self, load: Load, size: float, gathered_s: float = 0.0) -> Transfer:
        """Between two ranks; gathered_s: seconds that the receiving node adds."""
        if load.fabric is None:
            return Transfer(2, self.message_s + load.price.seconds(size))
        curve = self.network.curve(load)
        fixed_s = curve.fixed_s(size) + self.message_s + gathered_s
        uses, bits = self._uses(load, size), 8 * size
        return Transfer(
            2, fixed_s, bits, curve.rate_bps, uses, across=load.across, latency_s=load.longer_s
        )

    def collective(
        self, load: Load, sizes: Sequence[float], parties: int, host: float = 1.0
    ) -> Transfer:
        """Of `sizes` bytes, one after the other."""
        total = sum(sizes)
        if load.fabric is None:
            return Transfer(parties, load.price.seconds(total))
        curve = self.network.curve(load)
        per_message_s = [curve.fixed_s(load.part * size) + self.message_s for size in sizes]
        fixed_s = load.messages * sum(per_message_s) + len(sizes) * load.longer_s
        uses, bits = self._uses(load, total, host), 8 * load.volume * total
        return Transfer(parties, fixed_s, bits, curve.rate_bps, uses, across=load.across)

    def flow(self, flow: Flow, parties: int) -> Transfer:
        """Of a reduction."""
        if not flow.chained:
            return replace(
                self.collective(flow.loads[0], flow.sizes, parties), channel=flow.channel
            )
        (size,) = flow.sizes
        fixed_s = 0.0
        for load in flow.loads:
            if load.fabric is None:
                fixed_s = max(fixed_s, load.price.seconds(size))
            else:
                per_message_s = self.network.curve(load).fixed_s(load.part * size) + self.message_s
                fixed_s = max(fixed_s, load.messages * per_message_s)
        latency_s = 0.0 if flow.blocks else flow.way_s
        fixed_s += 2 * flow.way_s if flow.blocks else 0.0
        uses: dict[Hashable, float] = {}
        for load in (load for load in flow.loads if load.fabric is not None):
            for resource, weight in self._uses(load, size):
                uses[resource] = uses.get(resource, 0.0) + load.volume * weight
        shared = tuple(uses.items())
        bits = 8 * size if shared else 0.0
        return Transfer(
            parties, fixed_s, bits, inf, shared, flow.channel, flow.then, True, latency_s
        )

    def _uses(
        self, load: Load, size: float, host: float = 1.0
    ) -> tuple[tuple[Hashable, float], ...]:
        """host: CPU seconds of a byte, to an all-reduced one's."""
        assert load.fabric is not None
        link = self.network.link(load)
        for nic, _ in load.nics:
            self.capacities[nic] = link.rate_bps
        for hop, _ in load.hops:
            self.capacities[hop.key] = hop.rate_bps
        cores = self.network.links.on_cores(
            load.fabric, load.senders, load.posts / size / load.volume
        )
        hops = ((hop.key, flows) for hop, flows in load.hops)
        return (*hops, *load.nics, *((CORES, host * weight) for _, weight in cores))
