"""`holmes discover --from ...`: clusters that Slurm, Kubernetes or a hostfile know, as a cluster.toml."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from holmes_ext.cluster.nic import KINDS
from holmes_ext.cluster.sources import slurm, write
from holmes_ext.cluster.sources.found import (
    FoundCluster,
    FoundNode,
    MissingValue,
    clusters_of,
    completed,
)
from holmes_ext.cluster.sources.hostfile import read_hostfile
from holmes_ext.cluster.sources.hostlist import folded
from holmes_ext.cluster.sources.kubernetes import read_nodes
from holmes_ext.cluster.sources.topology import parse_topology
from holmes_ext.cluster.spec import SiteSpec, load_spec
from holmes_ext.document import read_text, save
from holmes_ext.errors import HolmesError
from holmes_ext.units import parse_rate
from holmes_ext.words import did_you_mean, grouped, named_values, some_of

T = TypeVar("T")
#: Source -> how it is called in what is said, and whether it is read from a file.
SOURCES = {
    "slurm": ("Slurm", False),
    "kubernetes": ("Kubernetes", True),
    "hostfile": ("the hostfile", True),
}
_ETHERNET = "ethernet"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = "clusters that another program knows, as a cluster.toml"
    add = parser.add_argument_group(what).add_argument
    add(
        "--from",
        dest="source",
        nargs="+",
        metavar=("slurm|kubernetes|hostfile", "FILE"),
        help="slurm: what scontrol and sinfo say; kubernetes FILE: of kubectl get nodes -o json; hostfile "
        "FILE: of mpirun or deepspeed; FILE - is standard input",
    )
    add(
        "--output",
        metavar="FILE",
        help="write it here; an existing file keeps all it has, new nodes and clusters are added",
    )
    add(
        "--rate",
        action="append",
        default=[],
        metavar="NAME=RATE",
        help="of a node of cluster NAME, all its fast NICs together, each way: a=400Gb/s; of all nodes on "
        "the common network: ethernet=25Gb/s",
    )
    add(
        "--kind",
        action="append",
        default=[],
        metavar="NAME=KIND",
        help=f"kind of cluster NAME's fast NICs, where it cannot be detected: {', '.join(KINDS)}",
    )
    add(
        "--partition",
        action="append",
        default=[],
        metavar="P",
        help="slurm: only nodes of this partition; repeatable",
    )
    add("--topology", metavar="FILE", help="slurm: topology.conf or topology.yaml")


def run(args: argparse.Namespace) -> int:
    """Print the file, or write it and say what is new. HolmesError on bad input."""
    source, nodes = args.source[0], _nodes(args)
    source_name = SOURCES[source][0]
    try:
        clusters = clusters_of(nodes)
    except HolmesError as error:
        raise HolmesError(f"{source_name}: {error}") from None
    existing = load_spec(args.output) if args.output and os.path.exists(args.output) else None
    more, new = write.split(existing, clusters) if existing else ({}, clusters)
    rates = named_values(args.rate, (), "--rate")
    bps = {name: parse_rate(text, f"--rate {name}") for name, text in rates.items()}
    ethernet, kinds = bps.pop(_ETHERNET, 0), named_values(args.kind, (), "--kind")
    kept = _kept(existing, kinds, bps, ethernet) if existing else []
    new, missing = completed(new, kinds, bps)
    needs_ethernet_rate = not existing and not ethernet
    if missing or needs_ethernet_rate:
        if not sys.stdin.isatty():
            raise _missing_values(missing, needs_ethernet_rate, source_name)
        new = _ask_for_clusters(new)
        if needs_ethernet_rate:
            question = "rate of one node on the network that reaches every node (25Gb/s)"
            ethernet = _ask(question, _rate)
    if existing:
        text = write.merged(read_text(args.output, "name a cluster.toml"), args.output, more, new)
    else:
        text = write.new_file(new, ethernet, source_name)
    if args.output:
        save(args.output, text, "the cluster file")
    else:
        sys.stdout.write(text)
    _tell(args.output, existing, nodes, more, new)
    for what in kept:
        print(
            f"holmes discover: {args.output}: {what} stays as the file has it; edit the file to change it",
            file=sys.stderr,
        )
    return 0


def _kept(
    existing: SiteSpec, kinds: dict[str, str], bps: dict[str, int], ethernet_bps: int
) -> list[str]:
    """What the file says otherwise than the options do; `kinds` and `bps` lose those of its clusters."""
    kept = [
        f"cluster {cluster.name}"
        for cluster in existing.clusters
        if (kinds.pop(cluster.name, cluster.kind), bps.pop(cluster.name, cluster.rate_bps))
        != (cluster.kind, cluster.rate_bps)
    ]
    return kept + [_ETHERNET] * (ethernet_bps not in (0, existing.ethernet_rate_bps))


def _nodes(args: argparse.Namespace) -> list[FoundNode]:
    source, *files = args.source
    if source not in SOURCES:
        raise HolmesError(f"--from {source!r}: {did_you_mean(source, SOURCES)}")
    wanted = SOURCES[source][1]
    if len(files) != wanted:
        example = f"--from {source} FILE" if wanted else f"--from {source}"
        raise HolmesError(
            f"--from {source}: {'it is read from one file' if wanted else 'it takes no file'}: {example}"
        )
    if source != "slurm" and (args.partition or args.topology):
        raise HolmesError(
            f"--partition and --topology only apply to --from slurm, not to --from {source}"
        )
    if source == "slurm":
        text = (
            read_text(args.topology, "name a topology.conf or topology.yaml")
            if args.topology
            else ""
        )
        topology = parse_topology(text, args.topology) if args.topology else None
        return slurm.nodes_of_slurm(args.partition, topology)
    return read_hostfile(files[0]) if source == "hostfile" else read_nodes(files[0])


def _missing_values(
    missing: Sequence[MissingValue], needs_ethernet_rate: bool, source_name: str
) -> HolmesError:
    """Return the error that lists the missing values and the options that give them."""
    values = [f"{value.name} of cluster {value.cluster!r}" for value in missing]
    options = [f"--{value.name} {value.cluster}=..." for value in missing]
    if needs_ethernet_rate:
        values.append("rate of the network that reaches every node")
        options.append(f"--rate {_ETHERNET}=...")
    return HolmesError(f"{source_name} has no {some_of(values)}; give {' '.join(options)}")


def _ask_for_clusters(clusters: Sequence[FoundCluster]) -> list[FoundCluster]:
    """Return `clusters` with the kinds and rates that the user types for those without.

    Raises:
        HolmesError: standard input has ended.
    """
    kinds: dict[str, str] = {}
    rates: dict[str, int] = {}
    for cluster in clusters:
        kind = cluster.kind
        if not kind:
            nodes = folded(cluster.nodes)
            question = f"cluster {cluster.name} ({nodes:.60}): its fast NICs ({', '.join(KINDS)})"
            kind = kinds[cluster.name] = _ask(question, _kind)
        if kind != _ETHERNET and not cluster.rate_bps:
            nics = f"all its {kind} NICs together"
            question = f"cluster {cluster.name}: rate of one node, {nics}, each way (400Gb/s)"
            rates[cluster.name] = _ask(question, _rate)
    return completed(clusters, kinds, rates).clusters


def _rate(text: str) -> int:
    return parse_rate(text, "rate")


def _kind(text: str) -> str:
    if text not in KINDS:
        raise HolmesError(f"{text!r:.40} is not one of {', '.join(KINDS)}")
    return text


def _ask(question: str, read: Callable[[str], T]) -> T:
    """Return the answer to a question, which is asked again until `read` accepts the answer.

    Raises:
        HolmesError: standard input has ended.
    """
    while True:
        print(f"{question}: ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            raise HolmesError("no answer: nothing was written")
        try:
            return read(line.strip())
        except HolmesError as error:
            print(error, file=sys.stderr)


def _tell(
    path: str | None,
    existing: SiteSpec | None,
    nodes: Sequence[FoundNode],
    more: Mapping[str, Sequence[str]],
    new: Sequence[FoundCluster],
) -> None:
    """On standard error: what came to the file, what it has besides, and which nodes no job can use now."""

    def say(text: str) -> None:
        print(f"holmes discover: {text}", file=sys.stderr)

    for name, added in more.items():
        say(f"{path}: cluster {name}: added {folded(added)}")
    for cluster in new:
        say(
            f"{path or 'found'}: cluster {cluster.name}: {len(cluster.nodes)} x {cluster.processes} "
            f"processes, {cluster.kind}: {folded(cluster.nodes)}"
        )
    if existing and not more and not new:
        say(f"{path}: it has all of these nodes already; nothing was changed")
    discovered = {node.name for node in nodes}
    gone = [node for node in existing.owner if node not in discovered] if existing else []
    if gone:
        say(f"{path}: kept nodes that were not found: {folded(gone)}")
    for why, names in grouped((node.why_not, node.name) for node in nodes if node.why_not).items():
        say(f"now {why}: {folded(names)}")
