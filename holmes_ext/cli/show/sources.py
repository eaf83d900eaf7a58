"""Command `holmes discover --from ...`: makes a cluster.toml from the node list of a scheduler.

The list comes from Slurm, Kubernetes or files (hostfile, topology, outputs of ibstat and the like), in place
of a job that looks at the NICs of its own nodes.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from holmes_ext.cluster.nic import CLUSTER_KINDS
from holmes_ext.cluster.sources import node_tools, slurm, write
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
from holmes_ext.document import read_text
from holmes_ext.errors import HolmesError
from holmes_ext.files import save
from holmes_ext.units import parse_rate
from holmes_ext.words import counted, did_you_mean, grouped, named_values, some_of

T = TypeVar("T")


class _Source(NamedTuple):
    """Program or file that lists nodes."""

    name: str  # in messages
    needs_file: bool
    is_per_node: bool = False  # whether it prints a single node, so that several files may be given


#: Value of --from -> source.
SOURCES = {
    "slurm": _Source("Slurm", needs_file=False),
    "kubernetes": _Source("Kubernetes", needs_file=True),
    "hostfile": _Source("the hostfile", needs_file=True),
    # Programs on a node. The files may have the output of several of them, so all are read alike.
    **{
        name: _Source(f"the output of {name}", needs_file=True, is_per_node=True)
        for name in ("ibstat", "ibv_devinfo", "nvidia-smi", "lspci")
    },
}
#: Name in --rate of the network that reaches every node.
_ETHERNET = "ethernet"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that make a cluster.toml to the parser of `holmes discover`."""
    title = "make a cluster.toml from the nodes that another program lists"
    add = parser.add_argument_group(title).add_argument
    add(
        "--from",
        dest="source",
        nargs="+",
        metavar=("slurm|kubernetes|hostfile|ibstat", "FILE"),
        help="read nodes from Slurm (scontrol), or from a FILE with the output of scontrol show node; from a "
        "FILE with the output of kubectl get nodes -o json; from a hostfile of mpirun, deepspeed, SGE, "
        "PBS or LSF; or from FILES named like the nodes, each with the output of ibstat, ibv_devinfo -v, "
        "nvidia-smi -L or lspci on it; FILE - is standard input",
    )
    add(
        "--output",
        metavar="FILE",
        help="write cluster.toml here; an existing file keeps its text, new nodes and clusters are added",
    )
    add(
        "--rate",
        action="append",
        default=[],
        metavar="NAME=RATE",
        help="rate of all fast NICs of a node of cluster NAME together, each way: a=400Gb/s; rate of a node "
        "on the network that reaches every node: ethernet=25Gb/s",
    )
    add(
        "--kind",
        action="append",
        default=[],
        metavar="NAME=KIND",
        help=f"kind of cluster NAME's fast NICs, if it cannot be detected: {', '.join(CLUSTER_KINDS)}",
    )
    add(
        "--partition",
        action="append",
        default=[],
        metavar="P",
        help="use only nodes of this Slurm partition; repeatable",
    )
    add(
        "--topology",
        metavar="FILE",
        help="read Slurm's topology from topology.conf or topology.yaml",
    )


def run(args: argparse.Namespace) -> int:
    """Print a cluster.toml for the nodes that Slurm, Kubernetes or files list. Return 0.

    With --output, the file is written instead. If it exists, only new nodes and clusters are added
    to it, and printed. Its other values stay, and a line names each that differs from --kind or
    --rate. If kinds or rates of NICs are missing and standard input is a terminal, the
    user is asked for them.

    Raises:
        HolmesError: the list of nodes cannot be read, or an argument is wrong or missing.
    """
    nodes = _read_listed_nodes(args)
    source_name = SOURCES[args.source[0]].name
    try:
        clusters = clusters_of(nodes)
    except HolmesError as error:
        raise HolmesError(f"{source_name}: {error}") from None
    existing = None
    additions = write.Additions(nodes={}, clusters=clusters)
    if args.output and os.path.exists(args.output):
        existing = load_spec(args.output)
        # Only the nodes that the file lacks: some join its clusters, others form new ones.
        additions = write.split(existing, clusters)

    kinds = named_values(args.kind, (), "--kind")
    rates = {
        name: parse_rate(text, f"--rate {name}")
        for name, text in named_values(args.rate, (), "--rate").items()
    }
    ethernet_bps = rates.pop(_ETHERNET, 0)
    # From here on, `kinds` and `rates` are those of new clusters. `kept` names values of the file that
    # differ from the options.
    kept = _drop_options_of_existing(existing, kinds, rates, ethernet_bps) if existing else []
    new_clusters, missing = completed(additions.clusters, kinds, rates)
    needs_ethernet_rate = not existing and not ethernet_bps
    if missing or needs_ethernet_rate:
        if not sys.stdin.isatty():
            raise _missing_values(missing, needs_ethernet_rate, source_name)
        new_clusters = _ask_for_missing_values(new_clusters)
        if needs_ethernet_rate:
            question = "rate of one node on the network that reaches every node (25Gb/s)"
            ethernet_bps = _ask(question, _parse_rate_of_user)
    additions = additions._replace(clusters=new_clusters)

    if existing:
        text = read_text(args.output, "name a cluster.toml")
        text = write.merged(text, args.output, additions.nodes, additions.clusters)
    else:
        text = write.new_file(new_clusters, ethernet_bps, source_name)
    if args.output:
        save(args.output, text, "the cluster file")
    else:
        sys.stdout.write(text)
    _print_changes(args.output, existing, nodes, additions)
    for value in kept:
        _say(f"{args.output}: {value} stays as the file has it; edit the file to change it")
    return 0


def _drop_options_of_existing(
    existing: SiteSpec, kinds: dict[str, str], rates: dict[str, int], ethernet_bps: int
) -> list[str]:
    """Remove the values of --kind and --rate for clusters that the existing cluster.toml has already.

    The file keeps its own values for these clusters, so only options for new clusters have an effect.

    Args:
        existing: Content of the file.
        kinds: Cluster -> value of --kind. It is changed.
        rates: Cluster -> value of --rate, bits/s. It is changed.
        ethernet_bps: Value of --rate for the network that reaches every node; 0: not given.

    Returns:
        Parts of the file whose values differ from the options, such as ["cluster a", "ethernet"], for
        a message.
    """
    kept = []
    for cluster in existing.clusters:
        kind = kinds.pop(cluster.name, cluster.kind)
        rate_bps = rates.pop(cluster.name, cluster.rate_bps)
        if kind != cluster.kind or rate_bps != cluster.rate_bps:
            kept.append(f"cluster {cluster.name}")
    if ethernet_bps not in (0, existing.ethernet_rate_bps):
        kept.append(_ETHERNET)
    return kept


def _read_listed_nodes(args: argparse.Namespace) -> list[FoundNode]:
    """Return the nodes that the source in --from lists.

    Raises:
        HolmesError: the source cannot be read, or an argument does not apply to it.
    """
    source, *files = args.source
    if source not in SOURCES:
        raise HolmesError(f"--from {source!r}: {did_you_mean(source, SOURCES)}")
    if source != "slurm" and (args.partition or args.topology):
        raise HolmesError(
            f"--partition and --topology only apply to --from slurm, not to --from {source}"
        )
    if SOURCES[source].is_per_node and files:
        outputs = node_tools.read_outputs(files)
        for output in outputs:
            for line in output.notes:
                _say(line)
        return [output.node for output in outputs]
    if SOURCES[source].needs_file and len(files) != 1:
        raise HolmesError(f"--from {source}: it is read from one file: --from {source} FILE")
    if len(files) > 1:
        raise HolmesError(f"--from {source}: it takes one file at most: --from {source} FILE")
    if source == "hostfile":
        return read_hostfile(files[0])
    if source == "kubernetes":
        return read_nodes(files[0])
    topology = None  # Slurm's own
    if args.topology:
        text = read_text(args.topology, "name a topology.conf or topology.yaml")
        topology = parse_topology(text, args.topology)
    if files:
        return slurm.nodes_of_file(files[0], args.partition, topology)
    return slurm.nodes_of_slurm(args.partition, topology)


def _missing_values(
    missing: Sequence[MissingValue], needs_ethernet_rate: bool, source_name: str
) -> HolmesError:
    """Return the error that lists the missing values and the options that give them.

    Args:
        missing: Kinds and rates that clusters lack.
        needs_ethernet_rate: Whether the rate of the network that reaches every node is missing,
            too.
        source_name: Name of the source of the nodes, such as "Slurm".
    """
    values = [f"{value.name} of cluster {value.cluster!r}" for value in missing]
    options = [f"--{value.name} {value.cluster}=..." for value in missing]
    if needs_ethernet_rate:
        values.append("rate of the network that reaches every node")
        options.append(f"--rate {_ETHERNET}=...")
    return HolmesError(f"{source_name} has no {some_of(values)}; give {' '.join(options)}")


def _ask_for_missing_values(clusters: Sequence[FoundCluster]) -> list[FoundCluster]:
    """Ask the user for missing kinds and rates, and return the complete clusters.

    Raises:
        HolmesError: standard input has ended.
    """
    kinds: dict[str, str] = {}
    rates: dict[str, int] = {}
    for cluster in clusters:
        kind = cluster.kind
        if not kind:
            nodes = folded(cluster.nodes)
            question = (
                f"cluster {cluster.name} ({nodes:.60}): its fast NICs ({', '.join(CLUSTER_KINDS)})"
            )
            kind = kinds[cluster.name] = _ask(question, _parse_kind_of_user)
        if kind != _ETHERNET and not cluster.rate_bps:
            nics = f"all its {kind} NICs together"
            question = f"cluster {cluster.name}: rate of one node, {nics}, each way (400Gb/s)"
            rates[cluster.name] = _ask(question, _parse_rate_of_user)
    return completed(clusters, kinds, rates).clusters


def _parse_rate_of_user(text: str) -> int:
    return parse_rate(text, "rate")


def _parse_kind_of_user(text: str) -> str:
    """Return a kind of NIC that the user typed, or raise HolmesError if there is no such kind."""
    if text not in CLUSTER_KINDS:
        raise HolmesError(f"{text!r:.40} is not one of {', '.join(CLUSTER_KINDS)}")
    return text


def _ask(question: str, read: Callable[[str], T]) -> T:
    """Ask the user a question until the answer is valid, and return the answer.

    Args:
        question: The question, without a colon.
        read: Converts the answer, or raises HolmesError if it is not valid.

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


def _say(text: str) -> None:
    """Print a line on standard error."""
    print(f"holmes discover: {text}", file=sys.stderr)


def _print_changes(
    path: str | None,
    existing: SiteSpec | None,
    nodes: Sequence[FoundNode],
    additions: write.Additions,
) -> None:
    """Print the new nodes and clusters of the file, and the nodes that are missing or cannot be used now.

    Args:
        path: The file, None for standard output.
        existing: Content of the file before, None for a new file.
        nodes: All nodes that the source lists.
        additions: Nodes and clusters that were added.
    """
    for name, added in additions.nodes.items():
        _say(f"{path}: cluster {name}: added {folded(added)}")
    for cluster in additions.clusters:
        _say(
            f"{path or 'found'}: cluster {cluster.name}: {len(cluster.nodes)} x "
            f"{counted(cluster.processes, 'process')}, {cluster.kind}: {folded(cluster.nodes)}"
        )
    if existing:
        if not additions.nodes and not additions.clusters:
            _say(f"{path}: it has all of these nodes already; nothing was changed")
        found = {node.name for node in nodes}
        names_in_file = list(existing.cluster_by_node)
        not_found = [name for name in names_in_file if name not in found]
        if not_found:
            _say(f"{path}: kept nodes that were not found: {folded(not_found)}")
    # why_not: reason why no job can use the node now ("not ready", "down"), "" if one can.
    unavailable = grouped((node.why_not, node.name) for node in nodes if node.why_not)
    for reason, names in unavailable.items():
        _say(f"now {reason}: {folded(names)}")
