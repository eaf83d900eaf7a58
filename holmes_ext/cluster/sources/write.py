"""Writer of cluster.toml files from nodes that Slurm, Kubernetes or a hostfile lists.

The text of an existing file stays byte for byte. New nodes are added to the cluster that already
has nodes of the same kind, or form new clusters at the end of the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from holmes_ext.cluster.sources.found import FoundCluster
from holmes_ext.cluster.sources.hostlist import runs
from holmes_ext.cluster.spec import SiteSpec, parse_spec
from holmes_ext.document import quoted
from holmes_ext.errors import HolmesError
from holmes_ext.units import format_rate
from holmes_ext.words import some_of

#: TOML header of any table.
_HEADER = re.compile(r"(?m)^\s*\[{1,2}\s*[A-Za-z]")
_CLUSTER_HEADER = re.compile(r"\s*\[\[\s*cluster\s*\]\]")
#: Begin of the list of nodes, up to its bracket.
_NODES = re.compile(r"(?m)^\s*nodes\s*=\s*\[")


class Additions(NamedTuple):
    """Nodes and clusters to add to a cluster.toml: a source lists them, and the file lacks them."""

    nodes: dict[str, tuple[str, ...]]  # cluster of the file -> nodes to add
    clusters: list[FoundCluster]  # clusters to add


def new_file(clusters: Sequence[FoundCluster], ethernet_bps: int, source: str) -> str:
    """Return the text of a new cluster.toml.

    Args:
        clusters: Clusters with known kinds and rates.
        ethernet_bps: Rate of one node on the network that reaches every node, in bits/s.
        source: Name of the source of the nodes, such as "Slurm".
    """
    lines = [
        f"# from {source} by `holmes discover`; what is changed here stays when it is run again",
        "version = 2",
        "",
        "[ethernet]",
        f'rate = "{_rate_text(ethernet_bps)}"',
        "",
    ]
    return "\n".join([*lines, *map(_cluster_table, clusters)])


def _cluster_table(cluster: FoundCluster) -> str:
    """Return a `[[cluster]]` of cluster.toml."""
    lines = ["[[cluster]]", f'name = "{cluster.name}"', f'kind = "{cluster.kind}"']
    if cluster.kind != "ethernet":
        lines.append(f'rate = "{_rate_text(cluster.rate_bps)}"')
    lines.append(f"nodes = [{_toml_items(cluster.nodes)}]")
    lines.append(f"processes = {cluster.processes}")
    if cluster.gpu:
        lines.append(f"gpu = {quoted(cluster.gpu)}")
    if cluster.fabric:
        lines.append(f'fabric = "{cluster.fabric}"')
    return "\n".join(lines) + "\n"


def _toml_items(nodes: Sequence[str]) -> str:
    """Return nodes as items of a TOML list: '"a[0-3]", "b1"'."""
    return ", ".join(quoted(text) for text in runs(nodes))


def _rate_text(bits_per_second: int) -> str:
    """Return a rate as cluster.toml has it, with all significant digits."""
    return format_rate(bits_per_second, digits=12).replace(" ", "")


def split(spec: SiteSpec, clusters: Sequence[FoundCluster]) -> Additions:
    """Return the listed nodes that a cluster.toml lacks, split into nodes and clusters to add.

    If the file has some nodes of a listed cluster, the missing ones are added to a cluster of the
    file: that with most nodes of this listed cluster. If the file has none, the listed cluster is
    added to the file. It gets a number if its name is taken: "a" becomes "a-2".

    Args:
        spec: Content of the file.
        clusters: All clusters of the nodes that Slurm, Kubernetes or a hostfile lists.
    """
    added: dict[str, tuple[str, ...]] = {}
    new_clusters: list[FoundCluster] = []
    taken = {cluster.name for cluster in spec.clusters}
    for cluster in clusters:
        missing = tuple(node for node in cluster.nodes if node not in spec.cluster_by_node)
        if not missing:
            continue
        # The file's clusters of the nodes that it has already, an entry for each node.
        homes = [
            spec.cluster_by_node[node].name
            for node in cluster.nodes
            if node in spec.cluster_by_node
        ]
        if homes:
            most_common = max(dict.fromkeys(homes), key=homes.count)
            added[most_common] = (*added.get(most_common, ()), *missing)
            continue
        name = cluster.name
        number = 2
        while name in taken:
            name = f"{cluster.name}-{number}"
            number += 1
        taken.add(name)
        new_clusters.append(replace(cluster, name=name))
    return Additions(added, new_clusters)


def merged(
    text: str, source: str, added: Mapping[str, tuple[str, ...]], clusters: Sequence[FoundCluster]
) -> str:
    """Return a cluster.toml with nodes and clusters added.

    Args:
        text: Content of the file.
        source: Path of the file, for error messages.
        added: Cluster of the file -> nodes to add.
        clusters: Clusters to add.

    Raises:
        HolmesError: the file is written in a way in which nodes cannot be added safely.
    """
    before = parse_spec(text, source)
    for name, nodes in added.items():
        text = _add_to_cluster(text, source, name, nodes)
    if clusters:
        text = "\n".join([text.rstrip("\n"), "", *map(_cluster_table, clusters)])
    after = parse_spec(text, source)

    # The text was edited without a TOML parser: check that the result is as intended.
    expected = [
        replace(cluster, nodes=(*cluster.nodes, *added.get(cluster.name, ())))
        for cluster in before.clusters
    ]
    after_by_name = {cluster.name: cluster for cluster in after.clusters}
    clusters_match = [after_by_name[cluster.name] for cluster in expected] == expected
    others_match = replace(after, clusters=()) == replace(before, clusters=())
    if not clusters_match or not others_match:
        all_nodes = [node for nodes in added.values() for node in nodes]
        raise HolmesError(
            f"{source}: {some_of(added)}: nodes cannot be added safely; write them there "
            f"yourself: {some_of(all_nodes)}"
        )
    return text


def _add_to_cluster(text: str, source: str, name: str, nodes: Sequence[str]) -> str:
    """Return a cluster.toml with nodes added at the end of a cluster's list of nodes.

    Args:
        text: Content of the file.
        source: Path of the file, for the error message.
        name: Name of the cluster.
        nodes: The nodes to add.

    Raises:
        HolmesError: the list is not found.
    """
    end = _end_of_list(text, name)
    if end is None:
        raise HolmesError(
            f"{source}: the list of nodes of cluster {name!r} is written in a way that is not "
            f"understood here; add {some_of(nodes)} there yourself"
        )
    comma = "" if text[end - 1] in ",[" else ","
    return f"{text[:end]}{comma} {_toml_items(nodes)}{text[end:]}"


def _end_of_list(text: str, name: str) -> int | None:
    """Return the position after the last item of the list `nodes` of a cluster, to add nodes there.

    Args:
        text: Content of a cluster.toml.
        name: Name of the cluster.

    Returns:
        Index in `text`. None if the text has no such cluster, or the cluster has no list `nodes`.
    """
    # A table reaches from its header to the next header, or to the end of the file.
    has_name = re.compile(rf"""(?m)^\s*name\s*=\s*["']{re.escape(name)}["']""")
    headers = [match.start() for match in _HEADER.finditer(text)]
    for start, end in zip(headers, [*headers[1:], len(text)]):
        table = text[start:end]
        nodes = _NODES.search(table)
        if _CLUSTER_HEADER.match(table) and has_name.search(table) and nodes:
            return _end_of_items(text, start + nodes.end())
    return None


def _end_of_items(text: str, start: int) -> int | None:
    """Return the position after the last item of a TOML list of hosts, None if it does not end.

    Strings and comments in the list may have brackets, too. Backslash escapes and triple quotes are
    not understood: host names need none, and the caller parses the edited file to check the result.

    Args:
        text: Content of a TOML file.
        start: Position after the list's opening bracket.
    """
    quote = ""  # quotation mark of the string that has begun, "" outside of strings
    is_comment = False
    end = start
    for position in range(start, len(text)):
        letter = text[position]
        if is_comment:
            is_comment = letter != "\n"
            continue
        if not quote:
            if letter == "#":
                is_comment = True
                continue
            if letter == "]":
                return end
            if letter in "\"'":
                quote = letter
        elif letter == quote:
            quote = ""
        if not letter.isspace():
            end = position + 1
    return None
