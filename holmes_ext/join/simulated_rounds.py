"""Event-driven simulation of a round of joined jobs, while their inner steps share the network with it.

    a job       inner steps | its pseudo-gradient is sent | `delay` inner steps | waits for the round's end
    a round     begins when all jobs are ready: verdict of the coordinator, bits from each job to each other
                job, verdict of the coordinator

In a round, the jobs exchange pseudo-gradients (how far their weights have moved) of a part of the model. An
inner step alternates between computing and sending over Ethernet, in small pieces. Two jobs exchange data
over as many TCP streams as the larger job has ranks. Flows that meet at a NIC, uplink or link share its rate
(planner/simulate/events.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

from holmes_ext.cluster.fabric import ETHERNET
from holmes_ext.cluster.site import Site
from holmes_ext.planner.simulate.events import (
    NO_CHUNK,
    NO_MICRO_BATCH,
    Op,
    Simulation,
    Transfer,
    Transfers,
)

#: Two rounds are simulated and the second is measured, because all jobs begin the first round together.
_ROUNDS = range(2)
#: Pieces into which the inner steps during a round are divided, so that computing and sending alternate
#: however short the round is.
_PIECES = 64


@dataclass(frozen=True)
class JoinedJob:
    """Simulated job that trains one model together with others: its cluster, batch and step time."""

    cluster: str
    samples: int  # of an inner step
    step_s: float  # seconds of an inner step while no round runs
    ethernet_s: float = 0.0  # part of `step_s` that depends on the rate of Ethernet


@dataclass(frozen=True)
class RoundSeconds:
    """Simulated duration of a round, and how much it delays training, in seconds."""

    round_s: float  # from the last job's pseudo-gradient to the aggregate in all jobs
    waited_s: float  # wait for the end of the round, in the job that waits least (the slowest job)
    #: Time by which that job's inner steps from a round to the next take longer than without rounds.
    longer_s: float
    #: From the end of a round to the end of the next round, in the job that takes longest: the inner
    #: steps without a round, those during a round, and the wait for its end.
    period_s: float


def simulate_round(
    site: Site, joined: Sequence[JoinedJob], bits: float, alone: int | Sequence[int], delay: int
) -> RoundSeconds:
    """Simulate jobs that exchange pseudo-gradients in rounds; return the times of a round.

    Between two rounds, a job takes `alone` inner steps at full speed. Then it sends its
    pseudo-gradient and takes `delay` inner steps that share the network with the round. Then it
    waits for the aggregate.

    Two rounds (_ROUNDS) are simulated, and the times are those of the second. All jobs begin the
    simulation together, so the first round is not typical.

    Args:
        site: The clusters, and the links between them.
        joined: The jobs.
        bits: Bits that each job sends to each other job in a round.
        alone: Inner steps between two rounds, without a round in the background: the same number for
            all jobs, or a number for each job.
        delay: Inner steps that a job takes while a round runs, before it waits for the aggregate.
    """
    steps_without_round = [alone] * len(joined) if isinstance(alone, int) else alone
    times = _simulated_times(site, joined, bits, steps_without_round, delay)
    jobs = range(len(joined))
    first_round, measured_round = _ROUNDS
    # Times at which training needs the aggregate, and at which it arrives, in the measured round.
    needed_s = [times.of_event("needed", job, measured_round) for job in jobs]
    arrived_s = [times.of_event("arrived", job, measured_round) for job in jobs]
    waited_s = [max(0.0, arrived_s[job] - needed_s[job]) for job in jobs]
    # The other jobs wait for the job that waits least. If several wait equally long, for example not
    # at all, take the job with the longest step.
    slowest = min(jobs, key=lambda job: (waited_s[job], -joined[job].step_s))
    # All inner steps of this job from a round to the next: as simulated, and at full speed.
    steps_s = needed_s[slowest] - times.resumed(slowest, first_round)
    full_speed_s = (steps_without_round[slowest] + delay) * joined[slowest].step_s
    # The round begins when the last job is ready.
    round_start_s = max(times.of_event("sent", job, measured_round) for job in jobs)
    periods_s = [
        times.resumed(job, measured_round) - times.resumed(job, first_round) for job in jobs
    ]
    return RoundSeconds(
        round_s=max(arrived_s) - round_start_s,
        waited_s=waited_s[slowest],
        longer_s=max(0.0, steps_s - full_speed_s),
        period_s=max(periods_s),
    )


@dataclass(frozen=True)
class _EventTimes:
    """Times of the events of simulated rounds, in seconds from the start of the simulation.

    In a round, all jobs send pseudo-gradients (how far their weights have moved) to each other. The
    aggregate combines all of them, and every job applies it to its weights.
    """

    transfers: Transfers

    def of_event(self, event: str, job: int, round_number: int) -> float:
        """Return the time of an event of a job in a round, in seconds from the simulation's start.

        Args:
            event: "sent": the job begins to send its pseudo-gradient to the other jobs. "needed":
                its inner steps during the round are over, and training needs the aggregate of all
                pseudo-gradients. "arrived": the job has the aggregate.
            job: Index of the job.
            round_number: 0 for the first simulated round.
        """
        return self.transfers[event, job, round_number].ended

    def resumed(self, job: int, round_number: int) -> float:
        """Return when a job's training goes on after a round (an exchange of pseudo-gradients).

        That is the time at which both its inner steps during the round are over and the aggregate has
        arrived, in seconds from the simulation's start.

        Args:
            job: Index of the job.
            round_number: 0 for the first simulated round.
        """
        needed_s = self.of_event("needed", job, round_number)
        arrived_s = self.of_event("arrived", job, round_number)
        return max(needed_s, arrived_s)


def _simulated_times(
    site: Site,
    joined: Sequence[JoinedJob],
    bits: float,
    steps_without_round: Sequence[int],
    delay: int,
) -> _EventTimes:
    """Simulate the rounds in which jobs exchange pseudo-gradients; return the times of their events.

    From a round to the next, a job takes inner steps (steps of its own optimizer): first
    `steps_without_round`, then `delay` while the round is under way.

    Args:
        site: The clusters, and the links between them.
        joined: The jobs.
        bits: Size of the pseudo-gradient that each job sends to each other job in a round.
        steps_without_round: For each job, inner steps between two rounds.
        delay: Inner steps during a round.
    """
    jobs = range(len(joined))
    network = _Network(site, joined)
    for job in jobs:
        network.add_steps(job, delay)
        for other in jobs:
            if job != other:
                network.add_exchange(job, other, bits)
    # Before and after an exchange, all jobs wait for a reply of the coordinator: its verdict.
    network.add_verdicts()
    transfers = Transfers(network.templates)
    # Each job has two actors, as it has two threads: training, and rounds.
    training_actors = [
        list(_training(index, job, steps_without_round[index], delay))
        for index, job in enumerate(joined)
    ]
    round_actors = [list(_rounds(job, jobs)) for job in jobs]
    Simulation([*training_actors, *round_actors], transfers, network.capacities).run()
    return _EventTimes(transfers)


@dataclass
class _Network:
    """Network transfers of joined jobs for a simulation, and the links that they share.

    Each transfer is a copy of a template, and is identified by a tag: template key, then round.
    Examples: tag ("sent", job, round) copies template "sent"; tag (("steps", job), round, piece)
    copies ("steps", job). A transfer begins when `parties` threads have posted it: for most
    transfers a single thread, the sender.

    Events of a job are transfers without bits: "sent" (its pseudo-gradient is sent), "needed"
    (training needs the aggregate) and "arrived" (the aggregate has arrived).
    """

    site: Site
    joined: Sequence[JoinedJob]
    templates: dict[Hashable, Transfer] = field(
        default_factory=lambda: dict.fromkeys(("sent", "needed", "arrived"), Transfer(parties=1))
    )
    capacities: dict[Hashable, float] = field(default_factory=dict)  # NIC or hop -> bits/s
    longest_way_s: float = 0.0  # longest one-way latency between two jobs

    def __post_init__(self) -> None:
        ethernet = self.site.fabric_by_name[ETHERNET]
        self.nic_bps = float(ethernet.rate_bps)
        self.ethernet_latency_s = ethernet.latency_s
        self.longest_way_s = ethernet.latency_s
        self.nodes = Counter(node.cluster for node in self.site.nodes)

    def add_steps(self, job: int, delay: int) -> None:
        """Add the Ethernet traffic of a job's inner steps during a round, in _PIECES transfers.

        In a round, the jobs exchange their pseudo-gradients. Meanwhile each job takes `delay` inner
        steps (ordinary training steps inside the job), and they also send over Ethernet. These
        transfers share a node's NIC with the exchange. They are stored as a template, ("steps", job);
        the simulation copies it for each transfer.

        Args:
            job: Index of the job.
            delay: Inner steps that the job takes while a round runs, before it waits for the
                aggregate.
        """
        # The nodes of a job do the same at the same time, so one node stands for all.
        self.capacities[job, "out"] = self.nic_bps
        self.capacities[job, "in"] = self.nic_bps
        # Processes of a node; they share its NIC.
        processes = self.site.processes_in(self.joined[job].cluster)
        # `uses` of a transfer: pairs of a capacity and the number of equal flows that share it. A single
        # process is simulated, and the others of its node send as much at the same time.
        nics = tuple(((job, direction), processes) for direction in ("out", "in"))
        # The forecast of a step gives seconds on Ethernet at the full rate; the simulation needs bits.
        ethernet_s = delay * self.joined[job].ethernet_s
        bits_of_node = ethernet_s * self.nic_bps
        bits_of_process = bits_of_node / processes
        self.templates["steps", job] = Transfer(
            parties=1,  # it begins when one thread has posted it: the job's training thread
            bits=bits_of_process / _PIECES,
            uses=nics,
        )

    def add_exchange(self, job: int, other: int, bits: float) -> None:
        """Add the transfer of a pseudo-gradient from a job to another, for all rounds.

        Each rank sends its part over a TCP stream of its own. All streams between two jobs are
        equal and begin together. So only one stream is simulated, with its share of the NICs and
        WAN links. It is stored as a template, ("gradient", job, other); the simulation copies it in
        each round.

        Args:
            job: Index of the sending job.
            other: Index of the receiving job.
            bits: Size of the compressed pseudo-gradient.
        """
        sender = self.joined[job].cluster
        receiver = self.joined[other].cluster
        # A rank exchanges its elements with the ranks of the other job that have the same elements. If
        # the jobs have 2 and 4 ranks, each rank of the first job has two partners: 4 streams. So there
        # are as many streams as the larger job has ranks.
        streams = max(
            self.nodes[cluster] * self.site.processes_in(cluster) for cluster in (sender, receiver)
        )
        streams_of_sending_node = streams / self.nodes[sender]
        streams_of_receiving_node = streams / self.nodes[receiver]
        hops = self.site.wan.hops(sender, receiver)
        for hop in hops:
            self.capacities[hop.key] = hop.rate_bps
        link = self.site.wan.pair_of.get((sender, receiver))
        stream_bps = float(link.stream_bps if link and link.stream_bps else inf)
        way_s = sum(hop.latency_s for hop in hops) or self.ethernet_latency_s
        self.longest_way_s = max(self.longest_way_s, way_s)
        # For `uses` of the transfer: a capacity (WAN hop or NIC), and the number of streams that share
        # it. All streams cross the WAN; the NIC of a node carries those of the node's ranks.
        shared_hops = tuple((hop.key, streams) for hop in hops)
        sending_nic = ((job, "out"), streams_of_sending_node)
        receiving_nic = ((other, "in"), streams_of_receiving_node)
        # Besides its bits, a stream takes a round trip, because its first bytes must be answered before all
        # bytes may leave. The way there counts before the bits, the way back after them.
        self.templates["gradient", job, other] = Transfer(
            parties=1,  # it begins when one thread has posted it: the sender's
            fixed_s=way_s,
            bits=bits / streams,  # of one stream; it stands for all
            limit_bps=stream_bps,
            uses=(*shared_hops, sending_nic, receiving_nic),
            latency_s=way_s,
        )

    def add_verdicts(self) -> None:
        """Add the two times in a round at which all jobs wait for the coordinator's verdict.

        They are transfers without bits, "go" and "done"; each job posts them as its request. All jobs get the
        reply a round trip after the last request.
        """
        round_trip_s = 2 * self.longest_way_s
        for verdict in ("go", "done"):
            self.templates[verdict] = Transfer(parties=len(self.joined), latency_s=round_trip_s)


def _training(index: int, job: JoinedJob, alone: int, delay: int) -> Iterator[Op]:
    """Yield the operations of a job's training thread, for the event-driven simulation.

    In each round:

    1. Take `alone` inner steps.
    2. Post the event "sent": the pseudo-gradient is ready.
    3. Take `delay` inner steps while the round runs.
    4. Post the event "needed": training needs the aggregate.
    5. Wait for the event "arrived": the rounds thread has the aggregate.

    Only the inner steps during a round share Ethernet with it. So only they are divided into pieces
    that alternate between computing and sending. The others are one operation of known duration.

    Args:
        index: Number of the job.
        job: The job.
        alone: Inner steps before the round.
        delay: Inner steps during the round.
    """
    # ethernet_s: seconds of an inner step that depend on Ethernet's rate; the rest is computing.
    compute_s = delay * (job.step_s - job.ethernet_s) / _PIECES
    for number in _ROUNDS:
        yield _compute(alone * job.step_s)
        yield _post(("sent", index, number))
        for piece in range(_PIECES):
            yield _compute(compute_s)
            if delay * job.ethernet_s:  # each piece sends over Ethernet, too (_Network.add_steps)
                sending = (("steps", index), number, piece)
                yield _post(sending)
                yield _wait(sending)
        yield _post(("needed", index, number))
        yield _wait(("arrived", index, number))


def _rounds(job: int, jobs: Sequence[int]) -> Iterator[Op]:
    """Yield the operations of a job's rounds thread, for the event-driven simulation.

    In each round:

    1. Wait for the event "sent": the training thread has a pseudo-gradient.
    2. Wait for the verdict "go": all jobs are ready.
    3. Exchange the pseudo-gradient with every other job.
    4. Wait for the verdict "done": all jobs have finished their exchanges.
    5. Post the event "arrived": the aggregate is complete.

    An operation is "post" (begin a transfer, and go on) or "wait" (for the end of a transfer). Each
    names a transfer by a tag:

        ("sent", job, number)                   event, without bits, of a job in a round
        (("gradient", job, other), number)      transfer from a job to another in a round. It has
                                                bits: those of the template ("gradient", job, other)

    Args:
        job: Number of the job.
        jobs: Numbers of all jobs.
    """
    others = [other for other in jobs if other != job]
    for number in _ROUNDS:
        # kind: how the simulation records the time of the wait, here as idle time.
        yield _wait(("sent", job, number), kind="idle")
        yield from _verdict("go", number)  # request to the coordinator, and wait for its reply
        for other in others:
            yield _post((("gradient", job, other), number))
        for other in others:
            yield _wait((("gradient", other, job), number))
        yield from _verdict("done", number)
        yield _post(("arrived", job, number))


def _verdict(name: str, number: int) -> tuple[Op, Op]:
    """Return the operations of a job that sends a request and waits until all jobs have sent it.

    Then the coordinator replies. In the simulation, the request is one transfer of all jobs, so
    its tag does not name a job. It begins when the last job has posted it.

    Args:
        name: "go" (all are ready) or "done" (all have exchanged).
        number: Number of the round.
    """
    tag = (name, number)
    return _post(tag), _wait(tag)


def _compute(seconds: float) -> Op:
    return ("compute", "forward", seconds, NO_MICRO_BATCH, NO_CHUNK)


def _post(tag: Hashable) -> Op:
    """Return the operation that begins a transfer, and does not wait for it."""
    return ("post", tag)


def _wait(tag: Hashable, kind: str = "reduce") -> Op:
    """Return the operation that waits for the end of a transfer.

    Args:
        tag: Tag of the transfer.
        kind: Name under which the simulation records the time of the wait.
    """
    return ("wait", tag, kind, NO_MICRO_BATCH)
