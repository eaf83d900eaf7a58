"""Network between clusters: uplinks, links with rate and latency, and measured values.

Part of a cluster.toml that describes it:

    uplink = "100Gb/s"         # in a [[cluster]]: all its nodes to other clusters, each way

    [[between]]                # a link; either every pair of clusters has one, or none has
    clusters = ["a", "b"]
    rate = "10Gb/s"            # shared by all traffic between the two, each way; default: no limit
    latency = "20ms"           # one way, from node to node; default: [ethernet]'s

Without uplinks and links, the network is flat: only the nodes' NICs limit it. Traffic passes in
order

    a0 --NIC--> (uplink of a) --> (link from a to b: rate, latency) --> (uplink of b) --NIC--> b0

`holmes probe` writes the measured values into the same file and leaves the rest of the file as it
is:

    [link.ethernet]                             # a fabric
    send = [[1024, 0.00021], [65536, 0.0024]]   # [bytes of a message, seconds from node to node]
    ring = [[8192, 0.0004], [524288, 0.0171]]   # [bytes that a rank passes on, seconds] of one
                                                # step of a ring all-reduce

    [[measured]]               # a pair of clusters; predictions prefer it to [[between]]
    clusters = ["a", "b"]
    rate = "9.4Gb/s"           # of several nodes at once, each way
    stream = "1.2Gb/s"         # of one TCP stream; optional
    latency = "20.3ms"         # half a round trip, from node to node

`send` and `ring` are optional. Each has at least two sizes, and both numbers grow. Without them,
the time of a message is calculated from rate and latency (plan/cost/links.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Any, NamedTuple

from holmes_ext.document import Table
from holmes_ext.errors import HolmesError
from holmes_ext.units import format_rate
from holmes_ext.words import counted, did_you_mean, some_of

#: Longest latency that is accepted, seconds one way. A geostationary satellite takes 0.3.
LONGEST_LATENCY_S = 10.0
#: A link joins two clusters.
_PAIR = 2


class Hop(NamedTuple):
    """Part of a path that limits traffic in one direction, such as a NIC or an uplink."""

    #: Identity of the hop, equal for all traffic that shares it: ("out" | "in", node, fabric) is a
    #: NIC, ("uplink" | "downlink", cluster) an uplink, ("between", from, to) a link between
    #: clusters.
    key: tuple[str, ...]
    rate_bps: float  # bits/s that all traffic on the hop shares
    latency_s: float = 0.0  # seconds that the hop adds to the latency of the path


@dataclass(frozen=True)
class Uplink:
    """Connection of all nodes of a cluster to the other clusters."""

    cluster: str
    rate_bps: int  # bits/s of all nodes together, each way


@dataclass(frozen=True)
class Between:
    """Link between two clusters: one `[[between]]` of cluster.toml."""

    clusters: tuple[str, ...]  # two names
    rate_bps: int  # bits/s, 0 for no limit
    latency_s: float  # one way, from node to node
    stream_bps: int = 0  # rate of one TCP stream in bits/s, 0 if not measured


class LinkCost(NamedTuple):
    """Time of a message between two clusters: latency_s + bits * seconds_per_bit, in seconds."""

    seconds_per_bit: float  # on the slowest hop
    latency_s: float  # of all hops together


@dataclass(frozen=True)
class Wan:
    """Network between the clusters. An empty network is flat: only the nodes' NICs limit it."""

    uplinks: tuple[Uplink, ...] = ()
    between: tuple[Between, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.uplinks or self.between)

    @cached_property
    def uplink_of(self) -> dict[str, int]:
        """Rates of the uplinks in bits/s, by the name of the cluster."""
        return {uplink.cluster: uplink.rate_bps for uplink in self.uplinks}

    @cached_property
    def pair_of(self) -> dict[tuple[str, str], Between]:
        """Links by the names of their two clusters, in both orders."""
        links: dict[tuple[str, str], Between] = {}
        for link in self.between:
            first, second = link.clusters
            links[first, second] = link
            links[second, first] = link
        return links

    def hops(self, source: str, target: str) -> tuple[Hop, ...]:
        """Return the hops between the NICs of two clusters, in the order of the traffic.

        There are none inside a cluster and on a flat network.

        Args:
            source: Cluster of the sender.
            target: Cluster of the receiver.
        """
        if source == target:
            return ()
        hops = []
        if source in self.uplink_of:
            hops.append(Hop(("uplink", source), self.uplink_of[source]))
        link = self.pair_of.get((source, target))
        if link is not None:
            rate_bps = link.rate_bps or float("inf")
            hops.append(Hop(("between", source, target), rate_bps, link.latency_s))
        if target in self.uplink_of:
            hops.append(Hop(("downlink", target), self.uplink_of[target]))
        return tuple(hops)

    def cost(self, pair: tuple[str, str]) -> LinkCost:
        """Return the time that data takes from the first to the second cluster of a pair."""
        source, target = pair
        hops = self.hops(source, target)
        return LinkCost(
            seconds_per_bit=max((1 / hop.rate_bps for hop in hops), default=0.0),
            latency_s=sum(hop.latency_s for hop in hops),
        )

    def only(self, clusters: Collection[str]) -> Wan:
        """Return the part of this network that connects the given clusters with one another."""
        return Wan(
            tuple(uplink for uplink in self.uplinks if uplink.cluster in clusters),
            tuple(link for link in self.between if set(link.clusters).issubset(clusters)),
        )

    def measured(self, pairs: Sequence[Between]) -> Wan:
        """Return this network with measured links.

        Args:
            pairs: The measured links. Each replaces the link between the same clusters, if there is
                any.
        """
        if not pairs:
            return self
        # By the clusters in any order. A MeasuredPair becomes a plain Between.
        links = {frozenset(link.clusters): link for link in self.between}
        for link in pairs:
            links[frozenset(link.clusters)] = Between(**vars(link))
        return replace(self, between=tuple(links.values()))

    def scaled(self, factor: float, latency_factor: float = 1.0) -> Wan:
        """Return this network with all rates and latencies multiplied.

        Args:
            factor: Factor of the rates of uplinks and links.
            latency_factor: Factor of the latencies.
        """
        uplinks = [
            replace(uplink, rate_bps=max(1, round(uplink.rate_bps * factor)))
            for uplink in self.uplinks
        ]
        between = []
        for link in self.between:
            rate_bps = 0  # no limit
            if link.rate_bps:
                rate_bps = max(1, round(link.rate_bps * factor))
            latency_s = link.latency_s * latency_factor
            between.append(replace(link, rate_bps=rate_bps, latency_s=latency_s))
        return Wan(tuple(uplinks), tuple(between))


def parse_wan(top: Table, uplinks: Mapping[str, int], ethernet_latency_s: float) -> Wan:
    """Return the network between the clusters of a cluster.toml.

    Args:
        top: The whole file.
        uplinks: Every cluster -> rate of its uplink in bits/s, 0 for no limit.
        ethernet_latency_s: Latency of a link whose table has none.

    Raises:
        HolmesError: a [[between]] is wrong, or some pairs of clusters have one and others have
            none.
    """
    links: dict[frozenset[str], Between] = {}
    for table in top.tables("between"):
        clusters = cluster_pair(table, list(uplinks))
        if frozenset(clusters) in links:
            raise HolmesError(
                f"{table.at('clusters')}: the pair {_pair_in_words(clusters)} is given twice; keep one"
            )
        links[frozenset(clusters)] = Between(
            clusters,
            rate_bps=table.rate("rate", required=False),
            latency_s=latency_of(table, ethernet_latency_s),
        )
        table.done()  # raises for keys that were not read
    if links:
        pairs = combinations(uplinks, _PAIR)
        missing = [_pair_in_words(pair) for pair in pairs if frozenset(pair) not in links]
        if missing:
            advice = "give every pair of clusters, or no [[between]] at all (a flat network)"
            raise HolmesError(f"{top.at('between')}: {some_of(missing, 3)} missing; {advice}")
    return Wan(
        uplinks=tuple(Uplink(name, rate_bps) for name, rate_bps in uplinks.items() if rate_bps),
        between=tuple(links.values()),
    )


def cluster_pair(table: Table, known: Sequence[str]) -> tuple[str, ...]:
    """Return the value of the key `clusters`: the names of two different clusters.

    Args:
        table: A [[between]] or [[measured]].
        known: Names of all clusters.

    Raises:
        HolmesError: the value is anything else.
    """
    clusters = table.list("clusters", str)
    for name in clusters:
        if name not in known:
            raise HolmesError(
                f"{table.at('clusters')}: no cluster is called {name!r:.80}; {did_you_mean(name, known)}"
            )
    if len(clusters) != _PAIR:
        raise HolmesError(
            f"{table.at('clusters')}: {counted(len(clusters), 'name')}; a link joins two clusters"
        )
    first, second = clusters
    if first == second:
        raise HolmesError(
            f"{table.at('clusters')}: a link of {first!r} with itself; name two clusters"
        )
    return clusters


def latency_of(table: Table, default: float) -> float:
    """Return the value of the key `latency` in seconds.

    Args:
        table: A table of cluster.toml.
        default: Value in seconds for a table without the key.

    Raises:
        HolmesError: the value is not a time, or longer than LONGEST_LATENCY_S.
    """
    seconds = table.seconds("latency", default)
    if seconds > LONGEST_LATENCY_S:
        raise HolmesError(
            f"{table.at('latency')}: {seconds:g} s one way; it must be at most {LONGEST_LATENCY_S:g} s"
        )
    return seconds


def rate_notes(wan: Wan, node_rates: Mapping[str, int]) -> list[str]:
    """Return one sentence for each rate that is allowed but probably a mistake.

    Args:
        wan: The network between the clusters.
        node_rates: Cluster -> Ethernet rate of one of its nodes, in bits/s.
    """
    sentences = []
    for name, uplink_bps in wan.uplink_of.items():
        if uplink_bps < node_rates[name]:
            sentences.append(
                f"the uplink of cluster {name!r} is {format_rate(uplink_bps)}, "
                f"less than one node's {format_rate(node_rates[name])}"
            )
    for link in wan.between:
        for name in link.clusters:
            uplink_bps = wan.uplink_of.get(name, link.rate_bps)
            if link.rate_bps > uplink_bps:
                sentences.append(
                    f"the link between {_pair_in_words(link.clusters)} is {format_rate(link.rate_bps)}, "
                    f"more than the uplink of {name!r} ({format_rate(uplink_bps)})"
                )
    return sentences


def _pair_in_words(pair: Sequence[str]) -> str:
    return " and ".join(map(repr, pair))


#: Measured (bytes, seconds), growing.
Points = tuple[tuple[float, float], ...]
#: Upper limit of measured sizes and times, to keep nonsense out.
_LARGEST_NUMBER = 1e18


@dataclass(frozen=True)
class MeasuredLink:
    """Measured seconds of messages and of ring all-reduces on one fabric, by their sizes in bytes.

    It is one table [link.FABRIC] of cluster.toml.
    """

    send: Points = ()  # (bytes of a message, seconds from node to node), () if not measured
    #: (bytes that a rank passes on, seconds) of a step of a ring all-reduce, () if not measured.
    ring: Points = ()


@dataclass(frozen=True)
class MeasuredPair(Between):
    """Measured link between two clusters: one `[[measured]]` of cluster.toml.

    The rate is that of several nodes at once, the latency half a round trip.
    """


def parse_pairs(top: Table, clusters: Sequence[str]) -> tuple[MeasuredPair, ...]:
    """Return the measured links between the clusters of a cluster.toml.

    Args:
        top: The whole file.
        clusters: Names of all clusters.

    Raises:
        HolmesError: a [[measured]] is wrong, or two are for the same pair.
    """
    pairs: dict[frozenset[str], MeasuredPair] = {}
    for table in top.tables("measured"):
        names = cluster_pair(table, clusters)
        if frozenset(names) in pairs:
            raise HolmesError(
                f"{table.at('clusters')}: the pair {' and '.join(names)} is given twice; probe again"
            )
        table.take("latency", str)  # raises if the key is missing
        pairs[frozenset(names)] = MeasuredPair(
            names,
            rate_bps=table.rate("rate"),
            latency_s=latency_of(table, default=0.0),
            stream_bps=table.rate("stream", required=False),
        )
        table.done()  # raises for keys that were not read
    return tuple(pairs.values())


def parse_links(table: Table, fabrics: set[str]) -> dict[str, MeasuredLink]:
    """Return the measured times of each fabric, by the fabric's name.

    Args:
        table: The table `link` of a cluster.toml.
        fabrics: Names of all fabrics.

    Raises:
        HolmesError: a fabric does not exist, or its measured times are wrong.
    """
    links = {}
    for name in list(table.values):
        link = table.table(name)
        if name not in fabrics:
            known = ", ".join(sorted(fabrics))
            raise HolmesError(f"{table.at(name)}: there is no fabric of that name; known: {known}")
        links[name] = MeasuredLink(send=_read_points(link, "send"), ring=_read_points(link, "ring"))
        link.done()
    return links


def _read_points(table: Table, key: str) -> Points:
    """Return the measured points [bytes, seconds] in the list of a key, () without the key.

    Args:
        table: A table [link.FABRIC] of cluster.toml.
        key: "send" or "ring".

    Raises:
        HolmesError: the list has a single entry, or an entry is not two numbers above 0. Also if
            the bytes do not grow, or the seconds shrink, from one entry to the next.
    """
    points: list[tuple[float, float]] = []
    for index, row in enumerate(table.list(key, list, ())):
        item = f"{table.at(key)}: item {index}"
        if len(row) != _PAIR or not all(_is_measurement(value) for value in row):
            raise HolmesError(f"{item} is {row!r:.60}, not [bytes, seconds], both above 0")
        size_bytes, seconds = row
        if points:
            last_size_bytes, last_seconds = points[-1]
            if size_bytes <= last_size_bytes or seconds < last_seconds:
                rule = "bytes must grow and seconds not shrink"
                raise HolmesError(f"{item}, {row!r:.60}, after {list(points[-1])}: {rule}")
        points.append((float(size_bytes), float(seconds)))
    if len(points) == 1:
        raise HolmesError(f"{table.at(key)}: one size makes no curve; give two or more")
    return tuple(points)


def _is_measurement(value: Any) -> bool:
    """Return whether a value is a positive number that may be a size or a time."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 < value < _LARGEST_NUMBER
