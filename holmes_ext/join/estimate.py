"""What jobs would make that join over the links between the clusters, one in each, instead of one job that
crosses (docs/joined.md): seconds of a round, what of it is exposed, tokens per second.

    a round     join/simulated_rounds.py plays it while the jobs' steps run
    alone       the busiest hop's bytes over its rate, and three trips there and back (the
                coordinator's verdict before and after, the first bytes): what it takes where nothing
                else is on the network (round_seconds)
    hidden      while it takes no longer than `delay` steps of the slowest job
    least every fragments x (delay + 1): a fragment's sum is applied before the next one leaves
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil

from holmes_ext.cluster.fabric import ETHERNET
from holmes_ext.cluster.site import Site
from holmes_ext.join.simulated_rounds import JoinedJob, simulate_round
from holmes_ext.plan.across import hop_loads
from holmes_ext.plan.cost.reductions import SHARES

#: There and back, in a round.
TRIPS = 3
#: What Streaming DiLoCo (arXiv 2501.18512, section 3.3) found nearly free.
DELAY = 5
#: What --holmes-outer is without these keys (join/settings.py): every, fragments, delay.
DEFAULT = (32, 4, DELAY)
#: Fragments that --holmes-outer takes at most.
MOST_FRAGMENTS = 1024
#: Part of a step below which a wait is rounding.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Setting:
    """What --holmes-outer would say and do. round_s: from the pseudo-gradient to its sum; exposed_s: waited
    for, each step; slower_s: by sharing the network; samples_per_s: of all jobs."""

    every: int
    fragments: int
    delay: int
    round_s: float
    exposed_s: float
    slower_s: float
    samples_per_s: float

    def __str__(self) -> str:
        return f"every={self.every},fragments={self.fragments},delay={self.delay}"


def apart(site: Site, cluster: str) -> Site:
    """One cluster's nodes alone."""
    return replace(
        site,
        nodes=tuple(node for node in site.nodes if node.cluster == cluster),
        wan=type(site.wan)(),
    )


def nodes_of(site: Site) -> Counter[str]:
    """By cluster."""
    return Counter(node.cluster for node in site.nodes)


def shares(site: Site, samples: int, unit: int) -> dict[str, int]:
    """Samples of each job, by its ranks; multiples of `unit` (a micro-batch) times its nodes if possible."""
    result = {}
    for name, nodes in nodes_of(site).items():
        share = samples * nodes / len(site.nodes)
        multiple = unit * nodes * site.processes if share >= unit * nodes * site.processes else unit
        result[name] = max(1, round(share / multiple)) * multiple
    return result


def round_seconds(site: Site, parameters: float, fragments: int, compress: str = "bf16") -> float:
    """From a fragment's pseudo-gradient to its sum in all jobs, where nothing else is on the network."""
    bits = _bits(parameters, fragments, compress)
    pairs = {
        (cluster, two): bits for cluster in site.clusters for two in site.clusters if cluster != two
    }
    busiest = max(
        (load / hop.rate_bps for hop, load in hop_loads(site.wan, pairs).items()), default=0.0
    )
    ethernet = site.fabric_by_name[ETHERNET]
    nics = (len(site.clusters) - 1) * bits / (min(nodes_of(site).values()) * ethernet.rate_bps)
    latency = max(
        (sum(hop.latency_s for hop in site.wan.hops(*pair)) for pair in pairs), default=0.0
    )
    return max(busiest, nics) + 2 * TRIPS * (latency or ethernet.latency_s)


def _bits(parameters: float, fragments: int, compress: str) -> float:
    return 32 * SHARES[compress] * parameters / fragments


class RoundPrices:
    """Rounds of these jobs, simulated; site: as measured."""

    def __init__(
        self, site: Site, parameters: float, jobs: Sequence[JoinedJob], compress: str = "bf16"
    ):
        self.site, self.parameters, self.jobs, self.compress = site, parameters, jobs, compress
        self.step_s, self.samples = (
            max(job.step_s for job in jobs),
            sum(job.samples for job in jobs),
        )
        self._known: dict[tuple[int, int, int], Setting] = {}

    def of(self, every: int, fragments: int, delay: int) -> Setting:
        if (key := (every, fragments, delay)) not in self._known:
            period, bits = every // fragments, _bits(self.parameters, fragments, self.compress)
            round_times = simulate_round(self.site, self.jobs, bits, period - delay, delay)
            exposed_s, slower_s = (
                seconds / period if seconds > _ROUNDING * self.step_s else 0.0
                for seconds in (round_times.waited_s, round_times.longer_s)
            )
            rate = self.samples / (self.step_s + exposed_s + slower_s)
            self._known[key] = Setting(*key, round_times.round_s, exposed_s, slower_s, rate)
        return self._known[key]

    def hidden_with(self, fragments: int) -> Setting:
        """With the least delay, and the least `every`, at which nothing is exposed."""
        alone = ceil(
            round_seconds(self.site, self.parameters, fragments, self.compress) / self.step_s
        )
        setting = _least(lambda delay: self.of(fragments * (delay + 1), fragments, delay), alone)
        assert setting is not None
        return setting

    def hidden_after(self, delay: int) -> Setting | None:
        """With the fewest fragments and least `every` at which nothing is exposed; None: there is none."""
        return _least(lambda count: self.of(count * (delay + 1), count, delay), 1, MOST_FRAGMENTS)


def _least(of: Callable[[int], Setting], first: int, most: int = 2**40) -> Setting | None:
    """At the least number from 1 to `most` from which nothing is exposed; first: where to look."""
    low, high = 0, max(1, first)
    while (result := of(high)).exposed_s:
        if high == most:
            return None
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        if (choice := of(middle)).exposed_s:
            low = middle
        else:
            high, result = middle, choice
    return result


def settings(rounds: RoundPrices) -> list[Setting]:
    """The default; then the least `every` that exposes nothing: with its fragments, with its delay."""
    choices = [rounds.of(*DEFAULT), rounds.hidden_with(DEFAULT[1]), rounds.hidden_after(DELAY)]
    return list(dict.fromkeys(setting for setting in choices if setting is not None))


def over_every(rounds: RoundPrices) -> dict[str, list[Setting]]:
    """Settings for each `every` up to twice the greatest of settings(), by how the rest is chosen."""
    count, longest = DEFAULT[1], 2 * max(setting.every for setting in settings(rounds))
    doubled = [2**power for power in range(longest.bit_length())]
    hidden = rounds.hidden_after(DELAY)
    counts = sorted({*doubled, *((hidden.fragments,) if hidden else ())})
    periods = sorted({*doubled, DELAY + 1, rounds.hidden_with(count).delay + 1})
    series = {
        f"fragments={count}, delay=every/{count}-1": [
            (count * period, count, period - 1) for period in periods
        ],
        f"fragments={count}, delay={DELAY}": [
            (count * period, count, DELAY) for period in periods if period > DELAY
        ],
        f"fragments=every/{DELAY + 1}, delay={DELAY}": [
            (n * (DELAY + 1), n, DELAY) for n in counts
        ],
    }
    return {
        name: [
            rounds.of(every, fragments, delay)
            for every, fragments, delay in points
            if every <= longest and fragments <= MOST_FRAGMENTS
        ]
        for name, points in series.items()
    }
