"""Transfers of the simulation from the loads that the cost model puts on NICs and links.

A load (plan/cost/network.py) is what one byte of a message or collective sends over each NIC and each hop. A
hop is a link or an uplink between clusters.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from math import inf

from holmes_ext.plan.cost.links import CORES
from holmes_ext.plan.cost.network import Load, Network
from holmes_ext.plan.cost.reductions import Flow
from holmes_ext.planner.simulate.events import Transfer


class TransferMaker:
    """Factory of transfers, which collects the rates of all NICs and links that they use."""

    def __init__(self, network: Network, message_s: float):
        """Set the network.

        Args:
            network: Fabrics and rates.
            message_s: Seconds that software adds to each message.
        """
        self.network = network
        self.message_s = message_s
        #: NIC or hop -> bits/s
        self.capacities: dict[Hashable, float] = {}

    def message(self, load: Load, size: float, gathered_s: float = 0.0) -> Transfer:
        """Return a message of `size` bytes between two ranks.

        Args:
            load: Traffic of the message.
            size: Bytes.
            gathered_s: Seconds that the receiving node needs to gather the slices of its ranks.
        """
        if load.fabric is None:  # inside a node
            return Transfer(parties=2, fixed_s=self.message_s + load.price.seconds(size))
        curve = self.network.curve(load)  # startup time by size, and the rate of one flow
        return Transfer(
            parties=2,
            fixed_s=curve.fixed_s(size) + self.message_s + gathered_s,
            bits=8 * size,
            limit_bps=curve.rate_bps,
            uses=self._uses(load, size),
            across=load.crosses_clusters,
            latency_s=load.wan_latency_s,
        )

    def collective(
        self, load: Load, sizes: Sequence[float], parties: int, host: float = 1.0
    ) -> Transfer:
        """Return collectives of `sizes` bytes, one after the other, as a single transfer.

        Args:
            load: Traffic of the collective for each byte.
            sizes: Bytes of each collective.
            parties: Actors that take part.
            host: CPU seconds of a byte, relative to those of an all-reduced byte.
        """
        total_bytes = sum(sizes)
        if load.fabric is None:  # inside a node
            return Transfer(parties, fixed_s=load.price.seconds(total_bytes))
        curve = self.network.curve(load)
        # Startup time of one message of each collective, which is `part` of the collective's bytes.
        message_s = [curve.fixed_s(load.message_share * size) + self.message_s for size in sizes]
        way_s = len(sizes) * load.wan_latency_s  # latency between clusters
        return Transfer(
            parties,
            fixed_s=load.messages * sum(message_s) + way_s,
            bits=8 * load.volume * total_bytes,
            limit_bps=curve.rate_bps,
            uses=self._uses(load, total_bytes, host),
            across=load.crosses_clusters,
        )

    def flow(self, flow: Flow, parties: int) -> Transfer:
        """Return the transfer of one step of a gradient reduction.

        Args:
            flow: Messages one after the other; or, if chained, a step in several clusters at once, which is
                followed by the transfer `flow.then`.
            parties: Actors that take part.
        """
        if not flow.chained:  # it has a single load
            transfer = self.collective(flow.loads[0], flow.sizes, parties)
            return replace(transfer, channel=flow.channel)
        (size,) = flow.sizes
        fixed_s = 0.0  # startup of the slowest of all groups that act together
        for load in flow.loads:
            if load.fabric is None:
                fixed_s = max(fixed_s, load.price.seconds(size))
            else:
                curve = self.network.curve(load)
                message_s = curve.fixed_s(load.message_share * size) + self.message_s
                fixed_s = max(fixed_s, load.messages * message_s)
        # A blocking flow waits for the way there and back; another one only arrives later.
        latency_s = flow.wan_latency_s
        if flow.awaits_arrival:
            fixed_s += 2 * flow.wan_latency_s
            latency_s = 0.0
        weights: dict[Hashable, float] = {}  # resource -> weight of the flow there
        for load in flow.loads:
            if load.fabric is not None:
                for resource, weight in self._uses(load, size):
                    weights[resource] = weights.get(resource, 0.0) + load.volume * weight
        return Transfer(
            parties,
            fixed_s=fixed_s,
            bits=8 * size if weights else 0.0,
            limit_bps=inf,
            uses=tuple(weights.items()),
            channel=flow.channel,
            then=flow.then,
            across=True,
            latency_s=latency_s,
        )

    def _uses(
        self, load: Load, size: float, host: float = 1.0
    ) -> tuple[tuple[Hashable, float], ...]:
        """Return the resources that a load uses, with its weight there: hops, NICs and CPU cores.

        The rates of NICs and hops are kept in `capacities`.

        Args:
            load: Traffic of a message or collective.
            size: Bytes.
            host: CPU seconds of a byte, relative to those of an all-reduced byte.
        """
        assert load.fabric is not None
        link = self.network.link(load)
        for nic, _ in load.nics:
            self.capacities[nic] = link.rate_bps
        for hop, _ in load.hops:
            self.capacities[hop.key] = hop.rate_bps
        posts_per_byte = load.cpu_messages / size / load.volume
        cores = self.network.links.on_cores(load.fabric, load.senders, posts_per_byte)
        hop_uses = [(hop.key, flows) for hop, flows in load.hops]
        core_uses = [(CORES, host * weight) for _, weight in cores]
        return (*hop_uses, *load.nics, *core_uses)
