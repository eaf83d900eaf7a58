"""What lies between the clusters, and is shared by all that crosses: uplinks, and links with latency.

uplink = "100Gb/s"         # of a [[cluster]]: what all its nodes together get to other clusters, each way

[[between]]             # every pair of clusters, or none: then the network between them is flat
clusters = ["a", "b"]
rate = "10Gb/s"         # what all traffic between the two shares, each way; left out: no limit of its own
latency = "20ms"        # one way, from node to node; left out: [ethernet]'s

a0 --NIC--> (uplink of a) --> (a to b: rate, latency) --> (uplink of b) --NIC--> b0

[link.FABRIC] and [[measured]] of cluster.toml, from `holmes probe`, written without touching the rest.

    [link.ethernet]
    send = [[1024, 0.00021], [65536, 0.0024]]   # bytes of a message, seconds from node to node
    ring = [[8192, 0.0004], [524288, 0.0171]]   # bytes that a rank passes on in a
                                                step of an all-reduce's ring, seconds

Both optional, at least two sizes each, both numbers growing. Left out: rate and latency say what a message
takes (plan/cost/links.py).

    [[measured]]                  # a pair of clusters: in predictions it takes the place of their [[between]]
    clusters = ["a", "b"]
    rate = "9.4Gb/s"              # of several nodes at once, each way
    stream = "1.2Gb/s"            # of one stream; optional
    latency = "20.3ms"            # half a round trip, node to node
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from holmes_ext.document import Table, parse_toml, quoted, read_text, write_whole
from holmes_ext.errors import HolmesError
from holmes_ext.units import format_rate
from holmes_ext.words import did_you_mean, some_of, why

#: Seconds one way; a geostationary satellite takes 0.3.
LONGEST_LATENCY_S = 10.0


class Hop(NamedTuple):
    """One thing that traffic passes, one way. key: ("out" | "in", node, fabric) of a NIC, ("uplink" |
    "downlink", cluster), ("between", from, to): the same for all who share it. rate_bps: bits/s that they
    share; latency_s: what it adds to the path, seconds."""

    key: tuple[str, ...]
    rate_bps: float
    latency_s: float = 0.0


@dataclass(frozen=True)
class Uplink:
    """Bits/s of all nodes of a cluster together, to other clusters, each way."""

    cluster: str
    rate_bps: int


@dataclass(frozen=True)
class Between:
    """One `[[between]]`. rate_bps: bits/s, 0 without a limit of its own; latency_s: seconds one way, node to
    node; stream_bps: what one TCP stream gets, 0 where that was not measured."""

    clusters: tuple[str, ...]
    rate_bps: int
    latency_s: float
    stream_bps: int = 0


@dataclass(frozen=True)
class Wan:
    """The network between the clusters. Empty: flat, limited by the nodes' NICs only."""

    uplinks: tuple[Uplink, ...] = ()
    between: tuple[Between, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.uplinks or self.between)

    @cached_property
    def uplink_of(self) -> dict[str, int]:
        """Cluster -> bits/s, of those that have one."""
        return {uplink.cluster: uplink.rate_bps for uplink in self.uplinks}

    @cached_property
    def pair_of(self) -> dict[tuple[str, str], Between]:
        """(cluster, cluster), in either order -> their link."""
        links = [(link.clusters, link) for link in self.between]
        return {pair: link for (a, b), link in links for pair in ((a, b), (b, a))}

    def hops(self, source: str, target: str) -> tuple[Hop, ...]:
        """What traffic from one cluster to another passes between NICs; () in one, on a flat network."""
        hops: list[Hop] = []
        if source == target:
            return ()
        if source in self.uplink_of:
            hops.append(Hop(("uplink", source), self.uplink_of[source]))
        if link := self.pair_of.get((source, target)):
            hops.append(
                Hop(("between", source, target), link.rate_bps or float("inf"), link.latency_s)
            )
        if target in self.uplink_of:
            hops.append(Hop(("downlink", target), self.uplink_of[target]))
        return tuple(hops)

    def cost(self, pair: tuple[str, str]) -> tuple[float, float]:
        """From one cluster to another: seconds of a bit over the slowest hop, and of latency."""
        hops = self.hops(*pair)
        return max((1 / hop.rate_bps for hop in hops), default=0.0), sum(
            hop.latency_s for hop in hops
        )

    def only(self, clusters: Collection[str]) -> Wan:
        return Wan(
            tuple(uplink for uplink in self.uplinks if uplink.cluster in clusters),
            tuple(link for link in self.between if set(link.clusters).issubset(clusters)),
        )

    def measured(self, pairs: Sequence[Between]) -> Wan:
        """With these in place of the links between the same clusters; others come besides."""
        new = {frozenset(link.clusters): Between(**vars(link)) for link in pairs}
        kept = {frozenset(link.clusters): link for link in self.between}
        return replace(self, between=tuple((kept | new).values())) if new else self

    def scaled(self, factor: float, latency_factor: float = 1.0) -> Wan:
        """All rates times `factor`, all latencies times `latency_factor`."""
        uplinks = tuple(
            replace(u, rate_bps=max(1, round(u.rate_bps * factor))) for u in self.uplinks
        )
        between = tuple(
            replace(
                link,
                rate_bps=link.rate_bps and max(1, round(link.rate_bps * factor)),
                latency_s=link.latency_s * latency_factor,
            )
            for link in self.between
        )
        return Wan(uplinks, between)


def parse_wan(top: Table, uplinks: Mapping[str, int], ethernet_latency_s: float) -> Wan:
    """The `[[between]]` tables of a cluster.toml; uplinks: cluster -> bits/s (0: none), of every cluster."""
    links: dict[frozenset[str], Between] = {}
    for table in top.tables("between"):
        link = Between(
            cluster_pair(table, list(uplinks)),
            table.rate("rate", required=False),
            latency_of(table, ethernet_latency_s),
        )
        table.done()
        if links.setdefault(frozenset(link.clusters), link) is not link:
            raise HolmesError(
                f"{table.at('clusters')}: the pair {_names(link.clusters)} is given twice; keep one"
            )
    pairs = list(combinations(uplinks, 2)) if links else []
    missing = [_names(pair) for pair in pairs if frozenset(pair) not in links]
    if missing:
        advice = "give every pair of clusters, or no [[between]] at all (a flat network)"
        raise HolmesError(f"{top.at('between')}: {some_of(missing, 3)} missing; {advice}")
    return Wan(
        tuple(Uplink(name, rate) for name, rate in uplinks.items() if rate), tuple(links.values())
    )


def cluster_pair(table: Table, known: Sequence[str]) -> tuple[str, ...]:
    """The key `clusters`: two different names of `known`."""
    clusters = table.list("clusters", str)
    for name in clusters:
        if name not in known:
            raise HolmesError(
                f"{table.at('clusters')}: no cluster is called {name!r:.80}; {did_you_mean(name, known)}"
            )
    if len(clusters) != 2:
        raise HolmesError(
            f"{table.at('clusters')}: {len(clusters)} names; a link joins two clusters"
        )
    if clusters[0] == clusters[1]:
        raise HolmesError(
            f"{table.at('clusters')}: a link of {clusters[0]!r} with itself; name two clusters"
        )
    return clusters


def latency_of(table: Table, default: float) -> float:
    """The key `latency`, in seconds."""
    seconds = table.seconds("latency", default)
    if seconds > LONGEST_LATENCY_S:
        raise HolmesError(
            f"{table.at('latency')}: {seconds:g} s one way; it must be at most {LONGEST_LATENCY_S:g} s"
        )
    return seconds


def notes(wan: Wan, node_rates: Mapping[str, int]) -> list[str]:
    """What is possible but looks unintended; node_rates: bits/s of one node's Ethernet NIC, by cluster."""
    result = []
    for name, rate in wan.uplink_of.items():
        if rate < node_rates[name]:
            less = f"less than one node's {format_rate(node_rates[name])}"
            result.append(f"the uplink of cluster {name!r} is {format_rate(rate)}, {less}")
    for link in wan.between:
        for name in link.clusters:
            if link.rate_bps > (uplink := wan.uplink_of.get(name, link.rate_bps)):
                more = (
                    f"{format_rate(link.rate_bps)}, more than the uplink of {name!r} "
                    f"({format_rate(uplink)})"
                )
                result.append(f"the link between {_names(link.clusters)} is {more}")
    return result


def _names(pair: Sequence[str]) -> str:
    return " and ".join(map(repr, pair))


Points = tuple[tuple[float, float], ...]
_HEADER = re.compile(r"\s*\[\[?\s*([^\[\]]+?)\s*\]\]?\s*(#.*)?")
_OURS = ("link", "measured")
NOTE = "# measured by `holmes probe`; it replaces these tables, and only these"


@dataclass(frozen=True)
class MeasuredLink:
    """(bytes, seconds) of messages and of ring steps; () where not measured."""

    send: Points = ()
    ring: Points = ()


@dataclass(frozen=True)
class MeasuredPair(Between):
    """One `[[measured]]`. rate_bps: bits/s of several nodes at once; latency_s: half a round trip."""


def parse_pairs(top: Table, clusters: Sequence[str]) -> tuple[MeasuredPair, ...]:
    """The `[[measured]]` tables; HolmesError names the key."""
    pairs: dict[frozenset[str], MeasuredPair] = {}
    for table in top.tables("measured"):
        names = cluster_pair(table, clusters)
        table.take("latency", str)
        pair = MeasuredPair(
            names, table.rate("rate"), latency_of(table, 0.0), table.rate("stream", required=False)
        )
        table.done()
        if pairs.setdefault(frozenset(names), pair) is not pair:
            raise HolmesError(
                f"{table.at('clusters')}: the pair {' and '.join(names)} is given twice; probe again"
            )
    return tuple(pairs.values())


def parse_links(table: Table, fabrics: set[str]) -> dict[str, MeasuredLink]:
    """The tables by fabric name; HolmesError names the key."""
    result = {}
    for name in list(table.values):
        link = table.table(name)
        if name not in fabrics:
            known = ", ".join(sorted(fabrics))
            raise HolmesError(f"{table.at(name)}: there is no fabric of that name; known: {known}")
        result[name] = MeasuredLink(_points(link, "send"), _points(link, "ring"))
        link.done()
    return result


def _points(table: Table, key: str) -> Points:
    points: list[tuple[float, float]] = []
    for index, row in enumerate(table.list(key, list, ())):
        item = f"{table.at(key)}: item {index}"
        numbers = [
            value
            for value in row
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        ]
        if len(row) != 2 or len(numbers) != 2 or not all(0 < number < 1e18 for number in numbers):
            raise HolmesError(f"{item} is {row!r:.60}, not [bytes, seconds], both above 0")
        if points and not (points[-1][0] < row[0] and points[-1][1] <= row[1]):
            rule = "bytes must grow and seconds not shrink"
            raise HolmesError(f"{item}, {row!r:.60}, after {list(points[-1])}: {rule}")
        points.append((float(row[0]), float(row[1])))
    if len(points) == 1:
        raise HolmesError(f"{table.at(key)}: one size makes no curve; give two or more")
    return tuple(points)


def render(links: Mapping[str, MeasuredLink], pairs: Sequence[MeasuredPair] = ()) -> str:
    parts = [NOTE]
    for name, link in links.items():
        parts.append(f"[link.{name if re.fullmatch('[A-Za-z0-9_-]+', name) else quoted(name)}]")
        for key in ("send", "ring"):
            if points := getattr(link, key):
                listed = ", ".join(f"[{size:.0f}, {seconds:.4g}]" for size, seconds in points)
                parts.append(f"{key} = [{listed}]")
    for pair in pairs:
        first, second = pair.clusters
        parts += ["[[measured]]", f'clusters = ["{first}", "{second}"]']
        parts.append(f'rate = "{pair.rate_bps / 1e6:.6g}Mb/s"')
        parts += [f'stream = "{pair.stream_bps / 1e6:.6g}Mb/s"'] if pair.stream_bps else []
        parts.append(f'latency = "{pair.latency_s * 1e3:.4g}ms"')
    return "\n".join(parts) + "\n"


def merge(
    text: str, links: Mapping[str, MeasuredLink], source: str, pairs: Sequence[MeasuredPair] = ()
) -> str:
    """`text` of a cluster.toml with its [link] and [[measured]] tables replaced, the rest byte for byte;
    HolmesError when that cannot be done."""
    before = parse_toml(text, source).values
    kept, dropping = [], False
    for line in text.splitlines(keepends=True):
        if header := _HEADER.fullmatch(line.rstrip("\r\n")):
            dropping = re.split(r"[.\s]", header[1])[0].strip("\"'") in _OURS
        if not dropping and line.strip() != NOTE:
            kept.append(line)
    merged = "".join(kept).rstrip("\r\n") + "\n\n" + render(links, pairs)
    try:
        after = parse_toml(merged, source).values
    except HolmesError:
        after = {}
    written = [after.pop(key, None) for key in _OURS]
    for key in _OURS:
        before.pop(key, None)
    if not any(written) or after != before:
        advice = "put them in tables of their own at the end, or use --dry-run"
        raise HolmesError(
            f"{source}: its [link] and [[measured]] tables cannot be replaced safely; {advice}"
        )
    return merged


def store(
    path: str | Path, links: Mapping[str, MeasuredLink], pairs: Sequence[MeasuredPair] = ()
) -> None:
    """Put what was measured into the cluster.toml `path`, which keeps its permissions."""
    merged = merge(read_text(path, "name a cluster.toml"), links, str(path), pairs)
    try:
        write_whole(path, merged)
    except OSError as error:
        raise HolmesError(
            f"{path}: cannot be written ({why(error)}); use --dry-run to print the tables"
        ) from None
