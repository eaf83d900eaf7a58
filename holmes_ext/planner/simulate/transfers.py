"""Transfers of the simulation from the loads that the cost model puts on NICs and links.

A load (plan/cost/network.py, Load) says how a message or collective uses the network:

    volume           bytes through a NIC for each byte of the message or collective
    messages         number of messages that follow each other
    message_share    size of each message, as a part of all bytes
    nics, hops       each NIC or hop, with the number of such messages that share it

A hop is a link between clusters, or the uplink of one.
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
        #: NIC, or link between clusters -> bits/s
        self.capacities: dict[Hashable, float] = {}

    def message(self, load: Load, size: float, gathered_s: float = 0.0) -> Transfer:
        """Return a message of `size` bytes between two ranks.

        `message_s` is the time that software (such as the communication library) adds to a message.

        Args:
            load: Use of NICs and links by the message.
            size: Bytes.
            gathered_s: Seconds that the receiving node needs to gather the slices of its ranks.
        """
        if load.fabric is None:  # inside a node
            return Transfer(parties=2, fixed_s=self.message_s + load.price.seconds(size))
        curve = self.network.curve(load)  # startup time by size, and the rate of one flow
        return Transfer(
            parties=2,  # sender and receiver must be ready
            fixed_s=curve.fixed_s(size) + self.message_s + gathered_s,
            bits=8 * size,
            limit_bps=curve.rate_bps,
            uses=self._uses(load, size),
            across=load.crosses_clusters,
            latency_s=load.wan_latency_s,  # between clusters, beyond the fabric's own
        )

    def collective(
        self, load: Load, sizes: Sequence[float], parties: int, cpu_factor: float = 1.0
    ) -> Transfer:
        """Return collectives of `sizes` bytes, one after the other, as a single transfer.

        A collective sends `load.messages` messages one after the other, and each carries the part
        `load.message_share` of its bytes. Through a NIC pass `load.volume` bytes for each byte of
        the collective. Software adds `message_s` seconds to each message.

        Args:
            load: Use of NICs and links by the collective.
            sizes: Bytes of each collective.
            parties: Actors that take part.
            cpu_factor: CPU seconds of a byte, relative to those of an all-reduced byte (for jobs
                whose ranks share CPU cores).
        """
        total_bytes = sum(sizes)
        if load.fabric is None:  # inside a node
            return Transfer(parties, fixed_s=load.price.seconds(total_bytes))
        curve = self.network.curve(load)
        # Startup of one message of each collective.
        startups_s = [curve.fixed_s(load.message_share * size) + self.message_s for size in sizes]
        # Latency between clusters beyond the fabric's own, once for each collective.
        latency_s = len(sizes) * load.wan_latency_s
        return Transfer(
            parties,
            fixed_s=load.messages * sum(startups_s) + latency_s,
            bits=8 * load.volume * total_bytes,
            limit_bps=curve.rate_bps,
            uses=self._uses(load, total_bytes, cpu_factor),
            across=load.crosses_clusters,
        )

    def reduction_step(self, flow: Flow, parties: int) -> Transfer:
        """Return the transfer of one step of a gradient reduction.

        A flat reduction (not chained) has one step: one or more collectives that follow each other.
        A hierarchical one has a chain of steps. Each step runs in several clusters at once, with a
        load for each, and starts when the step before it has arrived; so steps of different pieces
        overlap.

        Args:
            flow: Loads, bytes and channel of the step; `then` is the next step.
            parties: Actors that take part.
        """
        if not flow.chained:  # collectives of one load
            transfer = self.collective(flow.loads[0], flow.sizes, parties)
            return replace(transfer, channel=flow.channel)
        (size,) = flow.sizes
        fixed_s = 0.0  # startup of the slowest of all groups that act together
        for load in flow.loads:
            if load.fabric is None:
                fixed_s = max(fixed_s, load.price.seconds(size))
            else:
                curve = self.network.curve(load)
                startup_s = curve.fixed_s(load.message_share * size) + self.message_s
                fixed_s = max(fixed_s, load.messages * startup_s)
        # `wan_latency_s` is the latency between clusters. If the step blocks the next one on its channel,
        # that waits for the way there and back. Otherwise the step only arrives later.
        latency_s = flow.wan_latency_s
        if flow.awaits_arrival:
            fixed_s += 2 * flow.wan_latency_s
            latency_s = 0.0
        # Resource (NIC, WAN link or CPU) -> weight: bits through it for each bit of the flow. The
        # loads run at once, as one flow of `size` bytes; a load sends `volume` bytes for each byte.
        weights: dict[Hashable, float] = {}
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
        self, load: Load, size: float, cpu_factor: float = 1.0
    ) -> tuple[tuple[Hashable, float], ...]:
        """Return the resources that a load uses, with its weight there: WAN links, NICs, CPU cores.

        A weight is the bits that pass the resource for each bit of the flow. The rates of the NICs
        and hops are added to `capacities`. Only in a lab do nodes share CPU cores.

        Args:
            load: Use of NICs and links by a message or collective; `volume` is the bytes that it
                sends for each of its bytes, `cpu_messages` the number of messages that cost CPU
                time.
            size: Bytes of the message or collective.
            cpu_factor: CPU seconds of a byte, relative to those of an all-reduced byte.
        """
        assert load.fabric is not None
        link = self.network.link(load)
        for nic, _ in load.nics:
            self.capacities[nic] = link.rate_bps
        for hop, _ in load.hops:
            self.capacities[hop.key] = hop.rate_bps
        # A hierarchical all-reduce also costs CPU time for each message: here for each byte sent.
        messages_per_byte = load.cpu_messages / size / load.volume
        # (CORES, weight), or () if the ranks share no CPU cores
        cores = self.network.links.on_cores(load.fabric, load.senders, messages_per_byte)
        hop_uses = [(hop.key, flows) for hop, flows in load.hops]
        core_uses = [(CORES, cpu_factor * weight) for _, weight in cores]
        return (*hop_uses, *load.nics, *core_uses)
