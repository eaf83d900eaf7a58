"""Compares the nodes and processes that a training command starts with those of cluster.toml."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from holmes_ext.cli.show.training import Training, lines_before_error, training_of
from holmes_ext.cluster.spec import SiteSpec
from holmes_ext.doctor.command.command_words import split_command
from holmes_ext.doctor.command.launch import StatedNodes, stated_nodes
from holmes_ext.errors import HolmesError
from holmes_ext.words import some_of

MAX_LISTED_NODES = 4


def training_on_nodes(args: argparse.Namespace, spec: SiteSpec) -> tuple[SiteSpec, Training]:
    """Return the clusters that `holmes plan` plans for, and the job that its arguments describe.

    --nodelist names the nodes of the job. Without it, the command's launcher may name them.

    Args:
        args: Arguments of `holmes plan`.
        spec: Content of cluster.toml, or the part that --nodelist names.

    Raises:
        HolmesError: An argument or file is wrong, or the command names only a part of a model.
    """
    words = [] if args.nodelist else args.command or []
    # node_lines: lines for the user on the nodes that are planned for
    used_spec, node_lines = nodes_of_command(words, spec)
    with lines_before_error(node_lines):  # if training_of() raises, these lines are printed first
        job = training_of(args, used_spec)
    return used_spec, replace(job, lines=(*job.lines, *node_lines))


class NodesOfCommand(NamedTuple):
    """Clusters that `holmes plan` plans for, and lines for the user about the command's nodes."""

    spec: SiteSpec
    lines: tuple[str, ...]


def nodes_of_command(words: Sequence[str], spec: SiteSpec) -> NodesOfCommand:
    """Return the part of cluster.toml that a command starts on.

    If the command names its hosts, and the file has all of them, only those count. If it names only a
    number of nodes, the plan is for all nodes of the file: it is not known which of them the job
    gets.

    Args:
        words: The training command; without a launcher, all nodes count.
        spec: Content of cluster.toml.
    """
    try:
        start = stated_nodes(split_command(words))
    except HolmesError:  # only the arguments of a script: there is no launcher
        return NodesOfCommand(spec, ())
    lines = []
    names = [spec.known_as(host) for host in start.hosts]
    count = len(spec.cluster_by_node)
    if names and all(names):
        spec = spec.only(set(names))
        if len(names) < count:
            listed = some_of(names, MAX_LISTED_NODES)
            lines.append(f"read: nodes {listed} of the {count} in {spec.source} (by the command)")
    elif names:
        unknown = [host for host, name in zip(start.hosts, names) if not name]
        lines.append(
            f"not counted: {start.nodes_option}: {spec.source} does not know "
            f"{some_of(unknown, MAX_LISTED_NODES)}; {_all_nodes(count)}"
        )
    elif start.nodes_option and start.nodes != count:
        lines.append(f"not counted: {start.nodes_option}: {_all_nodes(count)}")
    return NodesOfCommand(spec, (*lines, *_lines_about_processes(start, spec)))


def _all_nodes(count: int) -> str:
    nodes = "the 1 node" if count == 1 else f"all {count} nodes"
    return f"the plan is for {nodes} of cluster.toml; --nodelist LIST before -- names the job's"


def _lines_about_processes(start: StatedNodes, spec: SiteSpec) -> list[str]:
    """Return a line if a command starts another number of processes per node than cluster.toml says."""
    others = [
        f"{cluster.processes} in {cluster.name}"
        for cluster in spec.clusters
        if cluster.processes != start.processes
    ]
    if not start.processes or not others:
        return []
    return [
        f"not counted: {start.processes_option}: the plan is for the processes on each node that "
        f"cluster.toml has ({some_of(others, MAX_LISTED_NODES)}; key 'processes')"
    ]
