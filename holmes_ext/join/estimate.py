"""Forecast for joined jobs, one in each cluster, instead of one job that spans the clusters (docs/joined.md).

Joined jobs train one model together. Each takes inner steps by itself. In rounds, the jobs exchange
pseudo-gradients of a fragment (part of the model) while they go on training.

every           setting: inner steps from an exchange of a fragment to its next exchange
period          inner steps from one fragment's exchange to the next fragment's: every / fragments
a round         simulated while the jobs' inner steps run (simulated_rounds.py)
round alone     without other traffic: the busiest hop's bits divided by its rate, plus three round trips
                (the coordinator answers twice, and the first bytes travel); see round_seconds
exposed         time for which training waits because a round takes longer than `delay` inner steps; a round
                without such time is overlapped with training
least `every`   fragments x (delay + 1): a fragment's aggregate is applied before the next fragment is sent
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from math import ceil
from typing import NamedTuple

from holmes_ext.cluster.fabric import ETHERNET
from holmes_ext.cluster.site import Site
from holmes_ext.join.simulated_rounds import JoinedJob, simulate_round
from holmes_ext.plan.across import hop_loads
from holmes_ext.plan.cost.reductions import SHARES

#: Round trips over the longest way in a round: two verdicts of the coordinator, and the first bytes
#: of an exchange (they must be answered before all bytes may leave).
_ROUND_TRIPS = 3
#: Delay that Streaming DiLoCo (arXiv 2501.18512, section 3.3) found nearly free, in inner steps.
DELAY = 5
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
    """Values of --holmes-outer, with the simulated time of a round and samples/s of all jobs.

    A round is the exchange of a fragment's pseudo-gradients (changes of a part of the model's weights)
    among the jobs. RoundForecasts simulates it.
    """

    every: int  # inner steps
    fragments: int
    delay: int  # inner steps
    round_s: float  # seconds from the pseudo-gradient to its aggregate
    exposed_s: float  # seconds of waiting for the ends of rounds, per inner step
    slower_s: float  # seconds by which an inner step takes longer, because rounds share its network
    samples_per_s: float  # of all jobs

    def __str__(self) -> str:
        return f"every={self.every},fragments={self.fragments},delay={self.delay}"


@dataclass(frozen=True)
class TimedSetting:
    """Schedule of exchanges by time instead of by inner steps, with its simulated throughput.

    Joined jobs exchange pseudo-gradients in rounds, a fragment (part of the model) in each round.
    `--holmes-outer every=60s` (an option of the training command) exchanges each fragment once in
    60 seconds: with 4 fragments there is a round every 15 seconds. In these 15 seconds, each job
    takes as many inner steps as it can. So a fast job does not wait for a slow job.
    """

    seconds: int  # of `every`: from an exchange of a fragment to its next exchange
    steps: tuple[int, ...]  # inner steps of each job from one round to the next
    round_s: float  # from the pseudo-gradient to its aggregate
    samples_per_s: float  # of all jobs

    def __str__(self) -> str:
        return f"every={self.seconds}s"


class OuterValues(NamedTuple):
    """Values of `every`, `fragments` and `delay` in --holmes-outer: the step time depends on these."""

    every: int  # inner steps from an exchange of a fragment to its next exchange
    fragments: int  # parts of the model that are exchanged one after the other
    delay: int  # inner steps from sending a pseudo-gradient to applying the aggregate


#: Defaults of --holmes-outer (settings.py).
DEFAULT = OuterValues(every=32, fragments=4, delay=DELAY)


def least_every(fragments: int, delay: int) -> int:
    """Return the least value of `every`, in inner steps, for a number of fragments and a delay.

    A fragment's aggregate is applied `delay` inner steps after the fragment was sent, and before the
    next fragment is sent. So there are at least delay + 1 inner steps from a fragment to the next.
    A fragment is sent again after all other fragments: after fragments x (delay + 1) steps.
    """
    return fragments * (delay + 1)


def site_of_cluster(site: Site, cluster: str) -> Site:
    """Return a site with only the nodes of a cluster, and no WAN."""
    return replace(
        site,
        nodes=tuple(node for node in site.nodes if node.cluster == cluster),
        wan=type(site.wan)(),
    )


def nodes_of(site: Site) -> Counter[str]:
    """Return the number of nodes of each cluster."""
    return Counter(node.cluster for node in site.nodes)


def shares(
    site: Site, samples: int, unit: int, speeds: Mapping[str, float] | None = None
) -> dict[str, int]:
    """Divide a batch among the jobs (one in each cluster), in proportion to their ranks or speeds.

    Each share is rounded to a multiple of the micro-batch times the cluster's ranks. A share that is
    smaller than that is rounded to a multiple of the micro-batch. So the sum may differ a little
    from the batch.

    Args:
        site: The clusters.
        samples: Samples of the batch.
        unit: Samples of a micro-batch.
        speeds: Cluster -> its samples/s; None to divide by the number of ranks.

    Returns:
        Cluster -> samples.
    """
    result = {}
    ranks_of = {name: nodes * site.processes_in(name) for name, nodes in nodes_of(site).items()}
    weights = speeds or ranks_of
    for name, ranks in ranks_of.items():
        share = samples * weights[name] / sum(weights.values())
        # A micro-batch on every rank, if the share is large enough; otherwise a single micro-batch.
        unit_on_all_ranks = unit * ranks
        multiple = unit_on_all_ranks if share >= unit_on_all_ranks else unit
        result[name] = max(1, round(share / multiple)) * multiple
    return result


def round_seconds(site: Site, parameters: float, fragments: int, compress: str = "bf16") -> float:
    """Return the seconds of a round without other traffic on the network.

    Each cluster has a job that sends its pseudo-gradient to every other job. The time is that of the
    busiest link, or of the NICs of the smallest cluster (an Ethernet port per node) if that is longer,
    plus three round trips: two for the coordinator's verdicts, one for the first bytes.

    Args:
        site: The clusters, and the links between them.
        parameters: Parameters of the model.
        fragments: Number of fragments (parts of the model that are exchanged one by one).
        compress: Codec of the pseudo-gradients.
    """
    bits = _bits(parameters, fragments, compress)  # from a job to another job, in a round
    bits_of_pair = dict.fromkeys(permutations(site.clusters, 2), bits)  # (sender, receiver) -> bits
    loads = hop_loads(site.wan, bits_of_pair)  # hop of the WAN -> bits that cross it
    busiest_hop_s = max((load / hop.rate_bps for hop, load in loads.items()), default=0.0)
    ethernet = site.fabric_by_name[ETHERNET]
    sent_bits = (len(site.clusters) - 1) * bits
    smallest_cluster_bps = min(nodes_of(site).values()) * ethernet.rate_bps
    nics_s = sent_bits / smallest_cluster_bps
    latencies_s = []  # of each pair of clusters, one way
    for sender, receiver in bits_of_pair:
        hops = site.wan.hops(sender, receiver)
        latencies_s.append(sum(hop.latency_s for hop in hops))
    round_trip_s = 2 * (max(latencies_s, default=0.0) or ethernet.latency_s)
    return max(busiest_hop_s, nics_s) + _ROUND_TRIPS * round_trip_s


def _bits(parameters: float, fragments: int, compress: str) -> float:
    """Return the size of a fragment's compressed pseudo-gradient, in bits.

    Args:
        parameters: Number of parameters of the model.
        fragments: Number of fragments (parts) into which the model is divided.
        compress: Compression of the pseudo-gradients, a key of SHARES.
    """
    return _ELEMENT_BITS * SHARES[compress] * parameters / fragments


class RoundForecasts:
    """Simulated round time and throughput for given joined jobs, by values of --holmes-outer.

    Joined jobs, one in each cluster, train the same model and exchange pseudo-gradients in rounds.
    Each combination of values is simulated once and cached.

    Args:
        site: The clusters, with measured rates if available.
        parameters: Number of parameters of the model.
        jobs: The joined jobs, one in each cluster.
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
        self._cache: dict[OuterValues, Setting] = {}

    def forecast(self, every: int, fragments: int, delay: int) -> Setting:
        """Return the round time and the samples/s of all jobs for these values of --holmes-outer.

        Args:
            every: Inner steps from an exchange of a fragment to its next exchange.
            fragments: Number of parts of the model that are exchanged one after the other.
            delay: Inner steps from sending a pseudo-gradient to applying the aggregate.

        Returns:
            The three values, with the result of the simulation.
        """
        key = OuterValues(every, fragments, delay)
        if key not in self._cache:
            self._cache[key] = self._simulated(key)
        return self._cache[key]

    def _simulated(self, key: OuterValues) -> Setting:
        """Simulate a round with these values of --holmes-outer; return its costs and the samples/s.

        A round costs time in two ways, both given in seconds per inner step. Training may wait for
        its end (`exposed_s`). And inner steps take longer while the round uses the same network
        (`slower_s`).
        """
        period = key.every // key.fragments  # inner steps from one round to the next
        bits = _bits(self.parameters, key.fragments, self.compress)
        # Of the inner steps of a period, `delay` run during the round.
        steps_without_round = period - key.delay
        times = simulate_round(
            self.site, self.jobs, bits, alone=steps_without_round, delay=key.delay
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

    def by_time(self) -> TimedSetting:
        """Return the forecast for rounds by time instead of by inner steps (every=60s).

        `every` is chosen in such a way that the slowest job exchanges each fragment about as often
        as with the default. The other values of --holmes-outer are the defaults.

        A period lasts from the end of a round to the end of the next round. The exchange of
        pseudo-gradients takes only a part of it, `round_s`. So throughput is the samples of all jobs
        in a period, divided by `period_s`.
        """
        fragments = DEFAULT.fragments
        delay = DEFAULT.delay
        seconds = ceil(DEFAULT.every * self.step_s)
        steps = []  # of each job in a period
        for job in self.jobs:
            steps_in_period = round(seconds / fragments / job.step_s)
            # A fragment's aggregate is applied `delay` steps after sending, before the next is sent.
            steps.append(max(delay + 1, steps_in_period))
        # Of these steps, the last `delay` run during a round, and the others without a round.
        steps_without_round = [count - delay for count in steps]
        times = simulate_round(
            self.site,
            self.jobs,
            bits=_bits(self.parameters, fragments, self.compress),
            alone=steps_without_round,
            delay=delay,
        )
        samples_in_period = sum(count * job.samples for count, job in zip(steps, self.jobs))
        return TimedSetting(
            seconds=seconds,
            steps=tuple(steps),
            round_s=times.round_s,
            samples_per_s=samples_in_period / times.period_s,
        )

    def _per_step(self, seconds: float, period: int) -> float:
        """Return seconds per inner step, for a time that is lost once in a period.

        Args:
            seconds: The lost time. Below a billionth of an inner step it is a rounding error of the
                simulation, and the result is 0.
            period: Inner steps from a round to the next round.
        """
        if seconds <= _ROUNDING * self.step_s:
            return 0.0
        return seconds / period

    def with_least_delay(self, fragments: int) -> Setting:
        """Return the setting with the least `delay` at which training never waits for a round.

        The delay is the number of inner steps from sending a pseudo-gradient to applying the
        aggregate. It may be as long as needed, so there always is such a setting. `every` (inner
        steps from an exchange of a fragment to its next exchange) is the least that the delay allows.

        Args:
            fragments: Number of fragments (parts of the model) of the setting.
        """
        # The delay must last at least as long as a round without other traffic.
        alone_s = round_seconds(self.site, self.parameters, fragments, self.compress)

        def with_delay(delay: int) -> Setting:
            return self.forecast(least_every(fragments, delay), fragments, delay)

        least_possible_delay = ceil(alone_s / self.step_s)
        setting = _first_without_waiting(with_delay, first=least_possible_delay, most=_UNLIMITED)
        assert setting is not None
        return setting

    def with_fewest_fragments(self, delay: int) -> Setting | None:
        """Return the setting with the fewest fragments at which training never waits for a round.

        The model is exchanged fragment by fragment: the more fragments, the smaller each is, and
        the shorter a round. `every` (inner steps from an exchange of a fragment to its next exchange)
        is the least that the number of fragments and the delay allow.

        Args:
            delay: Inner steps from sending a pseudo-gradient to applying the aggregate.

        Returns:
            None if training waits even with MOST_FRAGMENTS.
        """

        def with_fragments(count: int) -> Setting:
            return self.forecast(least_every(count, delay), count, delay)

        return _first_without_waiting(with_fragments, first=1, most=MOST_FRAGMENTS)


def _first_without_waiting(
    setting_of: Callable[[int], Setting], first: int, most: int
) -> Setting | None:
    """Find the smallest number, such as a delay, for which training never waits for a round.

    The search doubles the number, starting with `first`, and then bisects.

    Args:
        setting_of: Number -> simulated setting. The larger the number, the less training waits.
        first: Number at which the search begins.
        most: Largest number.

    Returns:
        The setting of that number; None if training waits even at the largest number.
    """
    too_small = 0  # training waits at this number
    enough = max(1, first)
    result = setting_of(enough)
    while result.exposed_s:  # double the number until training does not wait
        if enough == most:
            return None
        too_small = enough
        enough = min(2 * enough, most)
        result = setting_of(enough)
    while enough - too_small > 1:  # bisect between the two numbers
        middle = (too_small + enough) // 2
        setting = setting_of(middle)
        if setting.exposed_s:
            too_small = middle
        else:
            enough = middle
            result = setting
    return result


def settings(rounds: RoundForecasts) -> list[Setting]:
    """Return the settings to show: the default, and two at which training never waits for a round.

    The first of these two has the default's number of fragments and as long a delay as is needed.
    The second has the default's delay (inner steps from sending a pseudo-gradient to applying the
    aggregate) and as many fragments as are needed; it is missing if no number suffices. Both have
    the least possible `every`: inner steps from an exchange of a fragment to its next exchange.
    """
    choices = [
        rounds.forecast(DEFAULT.every, DEFAULT.fragments, DEFAULT.delay),
        rounds.with_least_delay(DEFAULT.fragments),
        rounds.with_fewest_fragments(DEFAULT.delay),
    ]
    # With the default itself, training may never wait, too: keep each setting once, in this order.
    return list(dict.fromkeys(setting for setting in choices if setting is not None))


def over_every(rounds: RoundForecasts) -> dict[str, list[Setting]]:
    """Return simulated throughput for more and more inner steps between exchanges, as three series.

    Three settings of joined jobs matter here:

        fragments    parts of the model; they are exchanged in turn, one in each round
        every        inner steps from an exchange of a fragment to its next exchange
        delay        inner steps from sending a pseudo-gradient to applying the aggregate

    A larger `every` leaves time for a longer delay or for more fragments:

        series 1    default number of fragments    the longest delay that `every` allows
        series 2    default number of fragments    default delay
        series 3    the most that `every` allows   default delay

    In each series, `every` grows up to twice the largest value in settings().

    Returns:
        Name of the series, in the form of --holmes-outer -> forecasts in order of `every`.
    """
    fragments = DEFAULT.fragments
    most_every = 2 * max(setting.every for setting in settings(rounds))
    powers_of_two = {2**power for power in range(most_every.bit_length())}
    # A period (inner steps between two rounds) must be longer than the delay, so the shortest is delay + 1.
    shortest_period = DELAY + 1
    # Besides powers of two, the values from which on training never waits for a round. In series 1
    # that is the least delay without waiting; its period is a step longer than the delay.
    without_waiting = rounds.with_least_delay(fragments)
    periods = powers_of_two | {shortest_period, without_waiting.delay + 1}
    fragment_counts = set(powers_of_two)
    many_fragments = rounds.with_fewest_fragments(DELAY)
    if many_fragments is not None:
        fragment_counts.add(many_fragments.fragments)

    longest_delay = []
    default_delay = []
    for period in sorted(periods):
        every = fragments * period
        longest_delay.append(OuterValues(every, fragments, delay=period - 1))
        if period >= shortest_period:
            default_delay.append(OuterValues(every, fragments, delay=DELAY))
    most_fragments = [
        OuterValues(every=least_every(count, DELAY), fragments=count, delay=DELAY)
        for count in sorted(fragment_counts)
    ]
    values_of_series = {
        f"fragments={fragments}, delay=every/{fragments}-1": longest_delay,
        f"fragments={fragments}, delay={DELAY}": default_delay,
        f"fragments=every/{shortest_period}, delay={DELAY}": most_fragments,
    }
    result = {}
    for name, values in values_of_series.items():
        result[name] = [
            rounds.forecast(item.every, item.fragments, item.delay)
            for item in values
            if item.every <= most_every and item.fragments <= MOST_FRAGMENTS
        ]
    return result
