"""Rounds of joined jobs (join), event by event: what one takes, what training waits for it, and what
steps take longer on a shared Ethernet.

    a job       steps | its pseudo-gradient leaves | `delay` steps | waits for the round's end
    a round     once all jobs are ready: the coordinator's verdict,
                each job's bits to each other one, the verdict

A step computes, and sends for what of it Ethernet's rate decides, in pieces; a fragment is cut into one TCP
stream for each rank of the larger of two jobs. Who meets at a NIC, uplink or link shares it (events.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from holmes_ext.cluster.fabric import ETHERNET
from holmes_ext.cluster.site import Site
from holmes_ext.planner.simulate.events import Op, Simulation, Transfer, Transfers

#: Two are played, and the second is measured: before the first all jobs begin at once.
_ROUNDS = range(2)
#: Pieces of the steps under a round: what computes and what sends are in turn, however short the round is.
_PIECES = 64


@dataclass(frozen=True)
class JoinedJob:
    """A job in one cluster. samples, step_s: of its step alone; ethernet_s: what of it Ethernet's rate
    decides."""

    cluster: str
    samples: int
    step_s: float
    ethernet_s: float = 0.0


@dataclass(frozen=True)
class RoundSeconds:
    """round_s: from the last pseudo-gradient to the sum in all jobs; waited_s: by the job that waits least;
    longer_s: that its steps took longer than alone, between two rounds' ends."""

    round_s: float
    waited_s: float
    longer_s: float


def simulate_round(
    site: Site, joined: Sequence[JoinedJob], bits: float, alone: int, delay: int
) -> RoundSeconds:
    """bits: that each job sends to each other one; alone, delay: steps before a round and under it."""
    jobs = range(len(joined))
    templates: dict[Hashable, Transfer] = dict.fromkeys(("off", "there", "end"), Transfer(1))
    capacities: dict[Hashable, float] = {}
    ethernet, nodes = site.fabric_by_name[ETHERNET], Counter(node.cluster for node in site.nodes)
    rate, farthest_s = float(ethernet.rate_bps), ethernet.latency_s
    for job, sender in enumerate(joined):
        capacities |= {(job, "out"): rate, (job, "in"): rate}
        nics = tuple(((job, direction), site.processes) for direction in ("out", "in"))
        templates["own", job] = Transfer(
            1, bits=delay * sender.ethernet_s * rate / site.processes / _PIECES, uses=nics
        )
        for other, receiver in enumerate(joined):
            if job != other:
                streams = max(nodes[sender.cluster], nodes[receiver.cluster]) * site.processes
                leaving, arriving = (
                    streams / nodes[sender.cluster],
                    streams / nodes[receiver.cluster],
                )
                ends = ((job, "out"), leaving), ((other, "in"), arriving)
                hops = site.wan.hops(sender.cluster, receiver.cluster)
                link = site.wan.pair_of.get((sender.cluster, receiver.cluster))
                capacities |= {hop.key: hop.rate_bps for hop in hops}
                limit = float(link.stream_bps if link and link.stream_bps else inf)
                way_s = sum(hop.latency_s for hop in hops) or ethernet.latency_s
                farthest_s = max(farthest_s, way_s)
                uses = *((hop.key, streams) for hop in hops), *ends
                templates["bits", job, other] = (
                    Transfer(  # the first bytes are answered before all may leave
                        1, way_s, bits / streams, limit, uses, latency_s=way_s
                    )
                )
    templates |= dict.fromkeys(("go", "done"), Transfer(len(joined), latency_s=2 * farthest_s))
    transfers = Transfers(templates)
    training = [list(_training(number, job, alone, delay)) for number, job in enumerate(joined)]
    Simulation(
        [*training, *(list(_rounds(job, jobs)) for job in jobs)], transfers, capacities
    ).run()

    def at(event: str, job: int, number: int = _ROUNDS[-1]) -> float:
        return transfers[event, job, number].ended

    waited = {job: max(0.0, at("end", job) - at("there", job)) for job in jobs}
    slowest = min(jobs, key=lambda job: (waited[job], -joined[job].step_s))
    before = max(at(event, slowest, _ROUNDS[-2]) for event in ("there", "end"))
    longer = at("there", slowest) - before - (alone + delay) * joined[slowest].step_s
    round_s = max(at("end", job) for job in jobs) - max(at("off", job) for job in jobs)
    return RoundSeconds(round_s, waited[slowest], max(0.0, longer))


def _training(job: int, runs: JoinedJob, alone: int, delay: int) -> Iterator[Op]:
    for number in _ROUNDS:
        yield ("compute", "forward", alone * runs.step_s, -1, 0)
        yield ("post", ("off", job, number))
        for piece in range(_PIECES):
            yield ("compute", "forward", delay * (runs.step_s - runs.ethernet_s) / _PIECES, -1, 0)
            if delay * runs.ethernet_s:
                yield ("post", (("own", job), number, piece))
                yield ("wait", (("own", job), number, piece), "reduce", -1)
        yield ("post", ("there", job, number))
        yield ("wait", ("end", job, number), "reduce", -1)


def _rounds(job: int, jobs: Sequence[int]) -> Iterator[Op]:
    """What the thread of a job's rounds does (join/rounds.py)."""
    for number in _ROUNDS:
        yield ("wait", ("off", job, number), "idle", -1)
        yield from _all(("go", number))
        yield from (("post", (("bits", job, other), number)) for other in jobs if other != job)
        yield from (
            ("wait", (("bits", other, job), number), "reduce", -1) for other in jobs if other != job
        )
        yield from _all(("done", number))
        yield ("post", ("end", job, number))


def _all(tag: Hashable) -> tuple[Op, Op]:
    """To the coordinator, and its answer once all jobs have told."""
    return ("post", tag), ("wait", tag, "reduce", -1)
