"""[link.FABRIC] and [[measured]] of cluster.toml, from `holmes probe`, written without touching the rest.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holmes_ext.cluster.wan import Between, cluster_pair, latency_of
from holmes_ext.document import Table, parse_toml, quoted, read_text, write_whole
from holmes_ext.errors import HolmesError
from holmes_ext.words import why

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
        pair = MeasuredPair(names, table.rate("rate"), latency_of(table, 0.0),
                            table.rate("stream", required=False))
        table.done()
        if pairs.setdefault(frozenset(names), pair) is not pair:
            raise HolmesError(
                f"{table.at('clusters')}: the pair {' and '.join(names)} is given twice; probe again")
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
        numbers = [value for value in row if isinstance(value, (int, float)) and not isinstance(value, bool)]
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


def merge(text: str, links: Mapping[str, MeasuredLink], source: str,
          pairs: Sequence[MeasuredPair] = ()) -> str:
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
        raise HolmesError(f"{source}: its [link] and [[measured]] tables cannot be replaced safely; {advice}")
    return merged


def store(path: str | Path, links: Mapping[str, MeasuredLink], pairs: Sequence[MeasuredPair] = ()) -> None:
    """Put what was measured into the cluster.toml `path`, which keeps its permissions."""
    merged = merge(read_text(path, "name a cluster.toml"), links, str(path), pairs)
    try:
        write_whole(path, merged)
    except OSError as error:
        raise HolmesError(
            f"{path}: cannot be written ({why(error)}); use --dry-run to print the tables") from None
