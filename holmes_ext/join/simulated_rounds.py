"""Event-driven simulation of a round of joined jobs, while their inner steps share the network with it.

    a job       inner steps | its pseudo-gradient is sent | `delay` inner steps | waits for the round's end
    a round     begins when all jobs are ready: verdict of the coordinator, bits from each job to each other
                one, verdict of the coordinator

An inner step alternates between computing and sending over Ethernet, in small pieces. A fragment is divided
into one TCP stream for each rank of the larger of two jobs. Flows that meet at a NIC, uplink or link share
its rate (planner/simulate/events.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

from holmes_ext.cluster.fabric import ETHERNET
from holmes_ext.cluster.site import Site
from holmes_ext.planner.simulate.events import Op, Simulation, Transfer, Transfers

#: Two rounds are simulated and the second one is measured, because all jobs begin the first one together.
_ROUNDS = range(2)
#: Pieces into which the inner steps during a round are divided, so that computing and sending alternate
#: however short the round is.
_PIECES = 64


@dataclass(frozen=True)
class JoinedJob:
    """A job in one cluster."""

    cluster: str
    samples: int  # of an inner step
    step_s: float  # seconds of an inner step without joined jobs
    ethernet_s: float = 0.0  # seconds of it that depend on the rate of Ethernet


@dataclass(frozen=True)
class RoundSeconds:
    """Simulated times of a round, in seconds."""

    round_s: float  # from the last job's pseudo-gradient to the aggregate in all jobs
    waited_s: float  # for which the job that waits least waits
    longer_s: (
        float  # by which its inner steps between the ends of two rounds take longer than alone
    )


def simulate_round(
    site: Site, joined: Sequence[JoinedJob], bits: float, alone: int, delay: int
) -> RoundSeconds:
    """Simulate a round and return its times.

    Args:
        site: The clusters, and the links between them.
        joined: The jobs.
        bits: Bits that each job sends to each other job in a round.
        alone: Inner steps before the round.
        delay: Inner steps during the round.
    """
    jobs = range(len(joined))
    first_round, measured_round = _ROUNDS
    network = _Network(site, joined)
    for job in jobs:
        network.add_steps(job, delay)
        for other in jobs:
            if job != other:
                network.add_exchange(job, other, bits)
    network.add_verdicts()
    transfers = Transfers(network.templates)
    # Each job has two actors, as it has two threads: training, and rounds.
    training_actors = [
        list(_training(index, job, alone, delay)) for index, job in enumerate(joined)
    ]
    round_actors = [list(_rounds(job, jobs)) for job in jobs]
    Simulation([*training_actors, *round_actors], transfers, network.capacities).run()

    def time_of(event: str, job: int, number: int = measured_round) -> float:
        """Return the time of an event of a job in a round.

        "off": its pseudo-gradient is sent; "there": training needs the aggregate; "end": the aggregate has
        arrived.
        """
        return transfers[event, job, number].ended

    waited_s = {job: max(0.0, time_of("end", job) - time_of("there", job)) for job in jobs}
    # The job that waits least is the one for which the others wait.
    slowest = min(jobs, key=lambda job: (waited_s[job], -joined[job].step_s))
    period_start = max(time_of(event, slowest, first_round) for event in ("there", "end"))
    steps_s = time_of("there", slowest) - period_start
    steps_alone_s = (alone + delay) * joined[slowest].step_s
    round_start = max(time_of("off", job) for job in jobs)
    round_end = max(time_of("end", job) for job in jobs)
    return RoundSeconds(
        round_s=round_end - round_start,
        waited_s=waited_s[slowest],
        longer_s=max(0.0, steps_s - steps_alone_s),
    )


@dataclass
class _Network:
    """Transfers of the simulation, and the capacities that they share.

    Events of job j, each a transfer without bits: "off" (its pseudo-gradient is sent), "there" (training
    needs the aggregate) and "end" (the aggregate is there).
    """

    site: Site
    joined: Sequence[JoinedJob]
    templates: dict[Hashable, Transfer] = field(
        default_factory=lambda: dict.fromkeys(("off", "there", "end"), Transfer(1))
    )
    capacities: dict[Hashable, float] = field(default_factory=dict)  # NIC or hop -> bits/s
    longest_way_s: float = 0.0

    def __post_init__(self) -> None:
        ethernet = self.site.fabric_by_name[ETHERNET]
        self.nic_bps = float(ethernet.rate_bps)
        self.ethernet_latency_s = ethernet.latency_s
        self.longest_way_s = ethernet.latency_s
        self.nodes = Counter(node.cluster for node in self.site.nodes)

    def add_steps(self, job: int, delay: int) -> None:
        """Add the transfers over Ethernet of a job's inner steps during a round, in _PIECES pieces.

        Args:
            job: Index of the job.
            delay: Inner steps during a round.
        """
        # The nodes of a job do the same at the same time, so one of them stands for all.
        self.capacities[job, "out"] = self.nic_bps
        self.capacities[job, "in"] = self.nic_bps
        processes = self.site.processes  # of a node, which share its NIC
        nics = tuple(((job, direction), processes) for direction in ("out", "in"))
        # Each process sends its share of the bits that take `ethernet_s` at the full rate.
        bits = delay * self.joined[job].ethernet_s * self.nic_bps / processes / _PIECES
        self.templates["own", job] = Transfer(1, bits=bits, uses=nics)

    def add_exchange(self, job: int, other: int, bits: float) -> None:
        """Add the transfer of a pseudo-gradient from a job to another job.

        Args:
            job: Index of the sending job.
            other: Index of the receiving job.
            bits: Size of the compressed pseudo-gradient.
        """
        sender = self.joined[job].cluster
        receiver = self.joined[other].cluster
        # One TCP stream for each rank of the larger job.
        streams = max(self.nodes[sender], self.nodes[receiver]) * self.site.processes
        streams_of_sending_node = streams / self.nodes[sender]
        streams_of_receiving_node = streams / self.nodes[receiver]
        hops = self.site.wan.hops(sender, receiver)
        for hop in hops:
            self.capacities[hop.key] = hop.rate_bps
        link = self.site.wan.pair_of.get((sender, receiver))
        stream_bps = float(link.stream_bps if link and link.stream_bps else inf)
        way_s = sum(hop.latency_s for hop in hops) or self.ethernet_latency_s
        self.longest_way_s = max(self.longest_way_s, way_s)
        uses = (  # capacity -> number of streams that share it
            *((hop.key, streams) for hop in hops),
            ((job, "out"), streams_of_sending_node),
            ((other, "in"), streams_of_receiving_node),
        )
        # The first bytes must be answered before all bytes may leave: way_s at the begin and at the end.
        self.templates["bits", job, other] = Transfer(
            1, way_s, bits / streams, stream_bps, uses, latency_s=way_s
        )

    def add_verdicts(self) -> None:
        """Add the requests of all jobs to the coordinator, and its replies."""
        round_trip_s = 2 * self.longest_way_s
        for verdict in ("go", "done"):
            self.templates[verdict] = Transfer(len(self.joined), latency_s=round_trip_s)


def _training(index: int, job: JoinedJob, alone: int, delay: int) -> Iterator[Op]:
    """Yield the operations of a job's training thread.

    In each round: inner steps; the event "off"; inner steps during the round, in pieces that compute and send
    in turn; the event "there"; and a wait for the event "end".

    The operations are those of planner/simulate/events.py: ("compute", kind of work, seconds, micro-batch,
    chunk), ("post", transfer), ("wait", transfer, kind of wait, micro-batch).

    Args:
        index: Number of the job.
        job: The job.
        alone: Inner steps before the round.
        delay: Inner steps during the round.
    """
    compute_s = delay * (job.step_s - job.ethernet_s) / _PIECES
    for number in _ROUNDS:
        yield ("compute", "forward", alone * job.step_s, -1, 0)
        yield ("post", ("off", index, number))
        for piece in range(_PIECES):
            yield ("compute", "forward", compute_s, -1, 0)
            if delay * job.ethernet_s:
                yield ("post", (("own", index), number, piece))
                yield ("wait", (("own", index), number, piece), "reduce", -1)
        yield ("post", ("there", index, number))
        yield ("wait", ("end", index, number), "reduce", -1)


def _rounds(job: int, jobs: Sequence[int]) -> Iterator[Op]:
    """Yield the operations of a job's rounds thread (rounds/round_runner.py).

    In each round: wait for the pseudo-gradient (event "off"); wait until all jobs are ready; exchange bits
    with every other job; wait until all jobs are done; the event "end".

    The operations are those of planner/simulate/events.py: ("post", transfer) and ("wait", transfer, kind of
    wait, micro-batch).

    Args:
        job: Number of the job.
        jobs: Numbers of all jobs.
    """
    others = [other for other in jobs if other != job]
    for number in _ROUNDS:
        yield ("wait", ("off", job, number), "idle", -1)
        yield from _verdict(("go", number))
        for other in others:
            yield ("post", (("bits", job, other), number))
        for other in others:
            yield ("wait", (("bits", other, job), number), "reduce", -1)
        yield from _verdict(("done", number))
        yield ("post", ("end", job, number))


def _verdict(tag: Hashable) -> tuple[Op, Op]:
    """Return the operations of a request to the coordinator, which replies when all jobs have sent it."""
    return ("post", tag), ("wait", tag, "reduce", -1)
