"""Found clusters as a cluster.toml: a new one, or put into one that a person wrote.

What is there stays byte for byte. New nodes come to the cluster that holds their like, or into clusters of
their own at the end.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from holmes_ext.cluster.sources.found import FoundCluster
from holmes_ext.cluster.sources.hostlist import runs
from holmes_ext.cluster.spec import SiteSpec, parse_spec
from holmes_ext.document import quoted
from holmes_ext.errors import HolmesError
from holmes_ext.units import format_rate
from holmes_ext.words import some_of

_HEADER = re.compile(r"(?m)^\s*\[{1,2}\s*[A-Za-z]")
_CLUSTER = re.compile(r"\s*\[\[\s*cluster\s*\]\]")
_NODES = re.compile(r"(?m)^\s*nodes\s*=\s*\[")


def new_file(clusters: Sequence[FoundCluster], ethernet_bps: int, source: str) -> str:
    """A whole cluster.toml; kinds and rates must be known. source: "Slurm", for its first line."""
    first = f"# from {source} by `holmes discover`; what is changed here stays when it is run again"
    top = [first, "version = 2", "", "[ethernet]", f'rate = "{_rate(ethernet_bps)}"', ""]
    return "\n".join([*top, *map(_table, clusters)])


def _table(cluster: FoundCluster) -> str:
    lines = ["[[cluster]]", f'name = "{cluster.name}"', f'kind = "{cluster.kind}"']
    lines += [f'rate = "{_rate(cluster.rate_bps)}"'] if cluster.kind != "ethernet" else []
    lines += [
        f"nodes = [{', '.join(map(quoted, runs(cluster.nodes)))}]",
        f"processes = {cluster.processes}",
    ]
    lines += [f"gpu = {quoted(cluster.gpu)}"] if cluster.gpu else []
    lines += [f'fabric = "{cluster.fabric}"'] if cluster.fabric else []
    return "\n".join([*lines, ""])


def _rate(bits_per_second: int) -> str:
    return format_rate(bits_per_second, 12).replace(" ", "")


def split(
    spec: SiteSpec, clusters: Sequence[FoundCluster]
) -> tuple[dict[str, tuple[str, ...]], list[FoundCluster]]:
    """What the file does not know: nodes for clusters that hold others of theirs; clusters, newly named."""
    more: dict[str, tuple[str, ...]] = {}
    new: list[FoundCluster] = []
    taken = {cluster.name for cluster in spec.clusters}
    for cluster in clusters:
        missing = tuple(node for node in cluster.nodes if node not in spec.owner)
        homes = [spec.owner[node].name for node in cluster.nodes if node in spec.owner]
        if missing and homes:
            home = max(dict.fromkeys(homes), key=homes.count)
            more[home] = (*more.get(home, ()), *missing)
        elif missing:
            name, number = cluster.name, 2
            while name in taken:
                name, number = f"{cluster.name}-{number}", number + 1
            taken.add(name)
            new.append(replace(cluster, name=name))
    return more, new


def merged(
    text: str, source: str, more: dict[str, tuple[str, ...]], new: Sequence[FoundCluster]
) -> str:
    """`text` of a cluster.toml with what `split` found; HolmesError where it cannot be put there safely."""
    before = parse_spec(text, source)
    for name, nodes in more.items():
        text = _with_nodes(text, source, name, nodes)
    if new:
        text = "\n".join([text.rstrip("\n"), "", *map(_table, new)])
    after = parse_spec(text, source)
    kept = {cluster.name: cluster for cluster in after.clusters}
    grown = tuple(
        replace(cluster, nodes=(*cluster.nodes, *more.get(cluster.name, ())))
        for cluster in before.clusters
    )
    if tuple(kept[cluster.name] for cluster in grown) != grown or replace(
        after, clusters=()
    ) != replace(before, clusters=()):
        raise HolmesError(
            f"{source}: {some_of(more)}: nodes cannot be added safely; write them there "
            f"yourself: {some_of(node for nodes in more.values() for node in nodes)}"
        )
    return text


def _with_nodes(text: str, source: str, name: str, nodes: Sequence[str]) -> str:
    """With `nodes` at the end of the list of cluster `name`."""
    at = _end_of_list(text, name)
    if at is None:
        raise HolmesError(
            f"{source}: the list of nodes of cluster {name!r} is written in a way that is not "
            f"understood here; add {some_of(nodes)} there yourself"
        )
    comma = "" if text[at - 1] in ",[" else ","
    return f"{text[:at]}{comma} {', '.join(map(quoted, runs(nodes)))}{text[at:]}"


def _end_of_list(text: str, name: str) -> int | None:
    """Where the last entry of the list of nodes of [[cluster]] `name` ends; None where that is not found."""
    headers = [match.start() for match in _HEADER.finditer(text)]
    for start, end in zip(headers, [*headers[1:], len(text)]):
        table = text[start:end]
        named, nodes = (
            re.search(rf"""(?m)^\s*name\s*=\s*["']{re.escape(name)}["']""", table),
            _NODES.search(table),
        )
        if _CLUSTER.match(table) and named and nodes:
            return _end_of_entries(text, start + nodes.end())
    return None


def _end_of_entries(text: str, start: int) -> int | None:
    """Of those behind a bracket at `start` - 1: strings and comments may hold brackets too."""
    quote, comment, end = "", False, start
    for place in range(start, len(text)):
        letter = text[place]
        if comment:
            comment = letter != "\n"
            continue
        if not quote and letter == "#":
            comment = True
            continue
        if not quote and letter == "]":
            return end
        if letter in "\"'" and quote in ("", letter):
            quote = "" if quote else letter
        if not letter.isspace():
            end = place + 1
    return None
