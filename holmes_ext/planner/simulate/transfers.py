"""Transfers of the simulation from the loads that the cost model puts on NICs and links.

A load (plan/cost/network.py, Load) says how a message or collective uses the network:

    volume           bytes through a NIC for each byte of the message or collective
    messages         number of messages that follow each other
    message_share    size of each message, as a part of all bytes
    nics, hops       each NIC or hop, with the number of such messages that share it

A hop is a link between clusters, or the uplink of a cluster.
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
    """Factory of the simulation's transfers, from loads (use of NICs and links) of the cost model.

    It also collects the rates of all NICs and links that its transfers use (`capacities`).
    """

    def __init__(self, network: Network, message_s: float):
        """Create a factory of transfers for a network.

        Args:
            network: Fabrics and rates.
            message_s: Seconds that software adds to each message.
        """
        self.network = network
        self.message_s = message_s
        #: NIC, or link between clusters -> bits/s
        self.capacities: dict[Hashable, float] = {}

    def message(self, load: Load, size: float, gathered_s: float = 0.0) -> Transfer:
        """Return a message of `size` bytes between two ranks, as a transfer of the simulation.

        Software, such as the communication library, adds self.message_s seconds.

        Args:
            load: NICs and links that the message uses, and how many messages share each.
            size: Bytes.
            gathered_s: Seconds that the receiving node needs to gather the slices of its ranks.
        """
        if load.fabric is None:  # inside a node
            return Transfer(parties=2, fixed_s=self.message_s + load.price.seconds(size))
        curve = self.network.curve(load)  # startup time by size, and the rate of a flow
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
        """Return a single transfer that takes as long as collectives of `sizes` bytes in sequence.

        The transfer takes a fixed time, fixed_s, and then the time of its bits. A collective of n
        bytes sends `load.messages` messages in sequence, each of n x `load.message_share` bytes. Each
        message has a startup time, to which software adds self.message_s seconds. All startup times
        are in fixed_s. In total n x `load.volume` bytes pass a NIC.

        Args:
            load: Use of NICs and links by the collective, such as a ring all-reduce.
            sizes: Bytes of each collective.
            parties: Actors (ranks, or sets of equal ranks) that must be ready before it starts.
            cpu_factor: CPU seconds of a byte, relative to those of an all-reduced byte (for jobs
                whose ranks share CPU cores).
        """
        total_bytes = sum(sizes)
        if load.fabric is None:  # inside a node
            return Transfer(parties, fixed_s=load.price.seconds(total_bytes))
        curve = self.network.curve(load)  # startup time by size, and the rate of one flow

        # For each collective: startup time of one of its messages.
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
        """Return the transfer of a step of a gradient reduction.

        A flat all-reduce is a single step. A hierarchical all-reduce is a chain of steps: inside the
        clusters, between them, inside again. Its bytes are divided into pieces. A step starts when
        the step before it on the same piece has arrived, while other pieces are in other steps.

        Args:
            flow: Traffic of the step: loads (use of NICs and links, for each cluster), bytes and
                channel; `then` is the next step.
            parties: Actors (ranks, or sets of equal ranks) that must be ready before it starts.
        """
        if not flow.chained:  # collectives of the same load
            transfer = self.collective(flow.loads[0], flow.sizes, parties)
            return replace(transfer, channel=flow.channel)
        (size,) = flow.sizes
        fixed_s = 0.0  # startup of the slowest of all groups that act together
        for load in flow.loads:
            if load.fabric is None:
                fixed_s = max(fixed_s, load.price.seconds(size))
            else:
                curve = self.network.curve(load)  # startup time by size
                startup_s = curve.fixed_s(load.message_share * size) + self.message_s
                fixed_s = max(fixed_s, load.messages * startup_s)

        # `wan_latency_s` is the latency between clusters. If the step blocks the next step on its
        # channel, that waits for the way there and back. Otherwise the step only arrives later.
        latency_s = flow.wan_latency_s
        if flow.awaits_arrival:
            fixed_s += 2 * flow.wan_latency_s
            latency_s = 0.0

        # Resource (NIC, WAN link or CPU) -> weight: bits through it for each bit of the flow. The
        # loads run at once, as a flow of `size` bytes; a load sends `volume` bytes for each byte.
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
        """Return the resources (NICs, WAN links, CPU cores) of a transfer, each with its weight.

        The weight is the bits that pass the resource for each bit of the flow. The rates of the
        NICs and WAN links are added to `capacities`. Only in a lab do nodes share CPU cores.

        Args:
            load: Use of NICs and links by a message or collective of `size` bytes. It sends size x
                `load.volume` bytes; `load.cpu_messages` of its messages cost CPU time.
            size: Bytes of the message or collective.
            cpu_factor: CPU seconds of a byte, relative to those of an all-reduced byte.
        """
        assert load.fabric is not None
        link = self.network.link(load)
        for nic, _ in load.nics:
            self.capacities[nic] = link.rate_bps
        for hop, _ in load.hops:
            self.capacities[hop.key] = hop.rate_bps

        # A hierarchical all-reduce also costs CPU time for each of its `cpu_messages`. on_cores()
        # takes their number for each byte sent; size * load.volume bytes are sent.
        messages_per_byte = load.cpu_messages / size / load.volume

        # At most 1 pair: (CORES, CPU use for each bit of the flow); none without shared cores.
        cores = self.network.links.on_cores(load.fabric, load.senders, messages_per_byte)
        # load.hops and load.nics: pairs of a WAN link or NIC, and its number of equal flows. This
        # number is the weight.
        hop_uses = [(hop.key, flows) for hop, flows in load.hops]
        core_uses = [(CORES, cpu_factor * weight) for _, weight in cores]
        return (*hop_uses, *load.nics, *core_uses)
