"""Forecast for joined jobs, one in each cluster, instead of one job that spans the clusters (docs/joined.md).

Joined jobs train one model together. Each takes inner steps by itself, and in rounds the jobs exchange
pseudo-gradients of one fragment of the model while they go on training.

a round         simulated while the jobs' inner steps run (simulated_rounds.py)
round alone     without other traffic: the busiest hop's bits divided by its rate, plus three round trips
                (two verdicts of the coordinator, and the first bytes); see round_seconds
hidden          a round that takes no longer than `delay` inner steps of the slowest job
least `every`   fragments x (delay + 1): a fragment's aggregate is applied before the next one is sent
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

from holmes_ext.cluster.fabric import ETHERNET
from holmes_ext.cluster.site import Site
from holmes_ext.join.simulated_rounds import JoinedJob, simulate_round
from holmes_ext.plan.across import hop_loads
from holmes_ext.plan.cost.reductions import SHARES

#: Round trips of a round.
TRIPS = 3
#: Delay that Streaming DiLoCo (arXiv 2501.18512, section 3.3) found nearly free, in inner steps.
DELAY = 5
#: Defaults of --holmes-outer (settings.py): every, fragments, delay.
DEFAULT = (32, 4, DELAY)
#: Largest number of fragments.
MOST_FRAGMENTS = 1024
#: Share of an inner step below which a wait is a rounding error.
_ROUNDING = 1e-9
#: Bits of an element without compression.
_ELEMENT_BITS = 32
#: Upper limit of a search.
_UNLIMITED = 2**40


@dataclass(frozen=True)
class Setting:
    """Values of --holmes-outer, and their forecast."""

    every: int  # inner steps
    fragments: int
    delay: int  # inner steps
    round_s: float  # from the pseudo-gradient to its aggregate
    exposed_s: float  # of each inner step, waited for the end of a round
    slower_s: float  # by which each inner step takes longer, because rounds share the network
    samples_per_s: float  # of all jobs

    def __str__(self) -> str:
        return f"every={self.every},fragments={self.fragments},delay={self.delay}"


class _Key(NamedTuple):
    """Values of --holmes-outer that determine a forecast."""

    every: int
    fragments: int
    delay: int


def apart(site: Site, cluster: str) -> Site:
    """Return a site with the nodes of one cluster only."""
    return replace(
        site,
        nodes=tuple(node for node in site.nodes if node.cluster == cluster),
        wan=type(site.wan)(),
    )


def nodes_of(site: Site) -> Counter[str]:
    """Return the number of nodes of each cluster."""
    return Counter(node.cluster for node in site.nodes)


def shares(site: Site, samples: int, unit: int) -> dict[str, int]:
    """Divide a batch among one job in each cluster, in proportion to their nodes.

    Args:
        site: The clusters.
        samples: Samples of the batch.
        unit: Samples of a micro-batch. Shares are multiples of it on every rank if possible.

    Returns:
        Cluster -> samples.
    """
    result = {}
    for name, nodes in nodes_of(site).items():
        share = samples * nodes / len(site.nodes)
        # A micro-batch on every rank, if the share is large enough; otherwise one micro-batch.
        unit_on_all_ranks = unit * nodes * site.processes
        multiple = unit_on_all_ranks if share >= unit_on_all_ranks else unit
        result[name] = max(1, round(share / multiple)) * multiple
    return result


def round_seconds(site: Site, parameters: float, fragments: int, compress: str = "bf16") -> float:
    """Return the seconds of a round without other traffic on the network.

    Each cluster has one job, which sends its pseudo-gradient to every other one. The busiest link or the NICs
    of the smallest cluster determine the time, plus a few round trips.

    Args:
        site: The clusters, and the links between them.
        parameters: Parameters of the model.
        fragments: Fragments of the model.
        compress: Codec of the pseudo-gradients.
    """
    bits = _bits(parameters, fragments, compress)
    bits_of_pair = {
        (sender, receiver): bits
        for sender in site.clusters
        for receiver in site.clusters
        if sender != receiver
    }
    loads = hop_loads(site.wan, bits_of_pair)  # hop of the WAN -> bits that cross it
    busiest_hop_s = max((load / hop.rate_bps for hop, load in loads.items()), default=0.0)
    ethernet = site.fabric_by_name[ETHERNET]
    sent_bits = (len(site.clusters) - 1) * bits
    smallest_cluster_bps = min(nodes_of(site).values()) * ethernet.rate_bps
    nics_s = sent_bits / smallest_cluster_bps
    longest_latency_s = max(
        (sum(hop.latency_s for hop in site.wan.hops(*pair)) for pair in bits_of_pair), default=0.0
    )
    round_trip_s = 2 * (longest_latency_s or ethernet.latency_s)
    return max(busiest_hop_s, nics_s) + TRIPS * round_trip_s


def _bits(parameters: float, fragments: int, compress: str) -> float:
    """Return the bits of a fragment's compressed pseudo-gradient."""
    return _ELEMENT_BITS * SHARES[compress] * parameters / fragments


class RoundPrices:
    """Forecasts for one set of joined jobs, simulated on demand and cached.

    Args:
        site: The clusters, with measured rates if available.
        parameters: Parameters of the model.
        jobs: One job in each cluster.
        compress: Codec of the pseudo-gradients.
    """

    def __init__(
        self, site: Site, parameters: float, jobs: Sequence[JoinedJob], compress: str = "bf16"
    ):
        self.site = site
        self.parameters = parameters
        self.jobs = jobs
        self.compress = compress
        self.step_s = max(job.step_s for job in jobs)
        self.samples = sum(job.samples for job in jobs)
        self._cache: dict[_Key, Setting] = {}

    def of(self, every: int, fragments: int, delay: int) -> Setting:
        """Return the forecast for these values of --holmes-outer."""
        key = _Key(every, fragments, delay)
        if key not in self._cache:
            self._cache[key] = self._simulated(key)
        return self._cache[key]

    def _simulated(self, key: _Key) -> Setting:
        """Simulate a round with these values of --holmes-outer, and return the forecast."""
        period = key.every // key.fragments  # inner steps from one round to the next
        bits = _bits(self.parameters, key.fragments, self.compress)
        times = simulate_round(
            self.site, self.jobs, bits, alone=period - key.delay, delay=key.delay
        )
        exposed_s = self._per_step(times.waited_s, period)
        slower_s = self._per_step(times.longer_s, period)
        return Setting(
            every=key.every,
            fragments=key.fragments,
            delay=key.delay,
            round_s=times.round_s,
            exposed_s=exposed_s,
            slower_s=slower_s,
            samples_per_s=self.samples / (self.step_s + exposed_s + slower_s),
        )

    def _per_step(self, seconds: float, period: int) -> float:
        """Return the share of one inner step in seconds of a period; 0 for rounding errors."""
        if seconds <= _ROUNDING * self.step_s:
            return 0.0
        return seconds / period

    def hidden_with(self, fragments: int) -> Setting:
        """Return the forecast with the least delay, and least `every`, at which rounds are hidden."""
        alone_s = round_seconds(self.site, self.parameters, fragments, self.compress)

        def with_delay(delay: int) -> Setting:
            return self.of(fragments * (delay + 1), fragments, delay)

        setting = _least_hidden(with_delay, first=ceil(alone_s / self.step_s), most=_UNLIMITED)
        assert setting is not None
        return setting

    def hidden_after(self, delay: int) -> Setting | None:
        """Return the forecast with the fewest fragments, and least `every`, at which rounds are hidden.

        None if they are not hidden even with MOST_FRAGMENTS.
        """

        def with_fragments(count: int) -> Setting:
            return self.of(count * (delay + 1), count, delay)

        return _least_hidden(with_fragments, first=1, most=MOST_FRAGMENTS)


def _least_hidden(setting_of: Callable[[int], Setting], first: int, most: int) -> Setting | None:
    """Return the setting of the least number at which rounds are hidden, by bisection.

    Args:
        setting_of: Returns the setting of a number. Larger numbers hide more.
        first: Number at which the search begins.
        most: Largest number.

    Returns:
        None if rounds are not hidden at the largest number.
    """
    exposed = 0  # a number at which rounds are exposed, or 0
    hidden = max(1, first)
    result = setting_of(hidden)
    while result.exposed_s:  # double the number until rounds are hidden
        if hidden == most:
            return None
        exposed = hidden
        hidden = min(2 * hidden, most)
        result = setting_of(hidden)
    while hidden - exposed > 1:  # bisect between the two numbers
        middle = (exposed + hidden) // 2
        setting = setting_of(middle)
        if setting.exposed_s:
            exposed = middle
        else:
            hidden = middle
            result = setting
    return result


def settings(rounds: RoundPrices) -> list[Setting]:
    """Return the settings to show: the default, and two with the least `every` that hides rounds.

    The first of these two has the default's number of fragments, the second one its delay.
    """
    _, default_fragments, default_delay = DEFAULT
    choices = [
        rounds.of(*DEFAULT),
        rounds.hidden_with(default_fragments),
        rounds.hidden_after(default_delay),
    ]
    return list(dict.fromkeys(setting for setting in choices if setting is not None))


def over_every(rounds: RoundPrices) -> dict[str, list[Setting]]:
    """Return forecasts for values of `every` up to twice the largest one of `settings`.

    There are three series: the default's fragments with the longest delay or the default's delay, and the
    default's delay with as many fragments as `every` allows.

    Returns:
        How fragments and delay follow from `every` (name of a series) -> forecasts in order of `every`.
    """
    _, fragments, _ = DEFAULT
    longest = 2 * max(setting.every for setting in settings(rounds))
    powers_of_two = {2**power for power in range(longest.bit_length())}
    # Beside powers of two, the points from which on rounds are hidden.
    hidden = rounds.hidden_after(DELAY)
    hidden_fragments = {hidden.fragments} if hidden else set()
    counts = sorted(powers_of_two | hidden_fragments)
    periods = sorted(powers_of_two | {DELAY + 1, rounds.hidden_with(fragments).delay + 1})
    keys_of_series = {
        f"fragments={fragments}, delay=every/{fragments}-1": [
            _Key(fragments * period, fragments, period - 1) for period in periods
        ],
        f"fragments={fragments}, delay={DELAY}": [
            _Key(fragments * period, fragments, DELAY) for period in periods if period > DELAY
        ],
        f"fragments=every/{DELAY + 1}, delay={DELAY}": [
            _Key(count * (DELAY + 1), count, DELAY) for count in counts
        ],
    }
    result = {}
    for name, keys in keys_of_series.items():
        result[name] = [
            rounds.of(*key)
            for key in keys
            if key.every <= longest and key.fragments <= MOST_FRAGMENTS
        ]
    return result
