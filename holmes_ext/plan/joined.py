"""What jobs would make that join over the links between the clusters, one in each, instead of one job that crosses
(docs/joined.md): seconds of a round, what of it is exposed, tokens per second.

    a round     each job sends each other one its fragment, all at once: the busiest hop's bytes over its rate, and
                three trips there and back (the meeting point's verdict before and after, the first bytes)
    hidden      while it takes no longer than `delay` steps of the slowest job
    least every fragments x (delay + 1): a fragment's sum is applied before the next one leaves
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from holmes_ext.cluster.site import ETHERNET, Site
from holmes_ext.plan.cost.across import hop_loads
from holmes_ext.plan.reductions import SHARES

#: There and back, in a round.
TRIPS = 3
#: What Streaming DiLoCo (arXiv 2501.18512, section 3.3) found nearly free.
DELAY = 5
#: What --holmes-outer is without these keys (runtime/outer/settings.py): every, fragments, delay.
DEFAULT = (32, 4, DELAY)
#: That --holmes-outer takes.
_FRAGMENTS = 1024


@dataclass(frozen=True)
class JoinedJob:
    """Of one cluster. samples: of a step."""

    cluster: str
    samples: int
    step_s: float


@dataclass(frozen=True)
class Setting:
    """What --holmes-outer would say, and what becomes of it. round_s: from the pseudo-gradient to its sum; exposed_s:
    what all jobs wait for it, each step; samples_per_s: of all jobs together."""

    every: int
    fragments: int
    delay: int
    round_s: float
    exposed_s: float
    samples_per_s: float

    def __str__(self) -> str:
        return f"every={self.every},fragments={self.fragments},delay={self.delay}"


def apart(site: Site, cluster: str) -> Site:
    """One cluster's nodes alone."""
    return replace(site, nodes=tuple(node for node in site.nodes if node.cluster == cluster), wan=type(site.wan)())


def shares(site: Site, samples: int, unit: int) -> dict[str, int]:
    """Samples of each cluster's job, after its number of ranks; multiples of `unit` (a micro-batch) times its nodes
    where that leaves something."""
    found = {}
    for name in site.clusters:
        nodes = sum(node.cluster == name for node in site.nodes)
        share = samples * nodes / len(site.nodes)
        whole = unit * nodes * site.processes if share >= unit * nodes * site.processes else unit
        found[name] = max(1, round(share / whole)) * whole
    return found


def round_seconds(site: Site, parameters: float, fragments: int, compress: str = "bf16") -> float:
    """From a fragment's pseudo-gradient to its sum in all jobs."""
    bits = 32 * SHARES[compress] * parameters / fragments
    pairs = {(one, two): bits for one in site.clusters for two in site.clusters if one != two}
    busiest = max((load / hop.rate_bps for hop, load in hop_loads(site.wan, pairs).items()), default=0.0)
    ethernet = site.fabric_by_name[ETHERNET]
    for name in site.clusters:
        nodes = sum(node.cluster == name for node in site.nodes)
        busiest = max(busiest, (len(site.clusters) - 1) * bits / (nodes * ethernet.rate_bps))
    latency = max((sum(hop.latency_s for hop in site.wan.hops(*pair)) for pair in pairs), default=ethernet.latency_s)
    return busiest + 2 * TRIPS * latency


def settings(site: Site, parameters: float, jobs: Sequence[JoinedJob], compress: str = "bf16") -> list[Setting]:
    """The default, and with the least `every` at which nothing is exposed: with its fragments, and with its delay
    (left out where no number of fragments does it)."""
    step_s, samples = max(job.step_s for job in jobs), sum(job.samples for job in jobs)

    def of(every: int, fragments: int, delay: int) -> Setting:
        round_s = round_seconds(site, parameters, fragments, compress)
        exposed_s = max(0.0, round_s - delay * step_s) * fragments / every
        return Setting(every, fragments, delay, round_s, exposed_s, samples / (step_s + exposed_s))

    delay = ceil(round_seconds(site, parameters, DEFAULT[1], compress) / step_s)
    found = [DEFAULT, (DEFAULT[1] * (delay + 1), DEFAULT[1], delay)]
    trips_s = round_seconds(site, 0.0, 1)
    if (left_s := DELAY * step_s - trips_s) > 0:
        count = max(1, ceil((round_seconds(site, parameters, 1, compress) - trips_s) / left_s))
        found += [(count * (DELAY + 1), count, DELAY)] if count <= _FRAGMENTS else []
    return [of(*one) for one in dict.fromkeys(found)]
