"""Compares the nodes and processes that a command starts with those of cluster.toml.

A job may run on fewer nodes than the file has. More nodes, other hosts, or another number of processes on a
node end it at start-up.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

from holmes_ext.cluster.node_report import NodeReport
from holmes_ext.cluster.spec import SiteSpec
from holmes_ext.doctor.command.launch import LaunchedNodes
from holmes_ext.doctor.finding import Finding, note, problem
from holmes_ext.words import counted, some_of

_MOST_NAMED = 4  # hosts that a finding lists
_JOB_ENDS = "the job ends at start-up"
_JOB_WAITS = "the job waits for ranks that never come, or ends at start-up"


def started_part(spec: SiteSpec, launches: Sequence[LaunchedNodes]) -> SiteSpec:
    """Return the part of cluster.toml with the nodes that a command starts, as far as they are known.

    If only their number is known, the first nodes of the file are taken. If neither names nor number are
    known, the result is the whole content.

    Args:
        spec: Content of cluster.toml.
        launches: Nodes and processes that the launchers of the command start, the outermost first: srun
            before the torchrun that it starts.
    """
    nodes = list(spec.cluster_by_node)
    known_hosts = _known_hosts(launches, spec)
    if known_hosts:
        return spec.only(set(known_hosts))
    count = node_count(launches) or _nodes_that_ranks_fill(launches, spec)
    return spec.only(set(nodes[:count])) if 0 < count < len(nodes) else spec


def _known_hosts(launches: Sequence[LaunchedNodes], spec: SiteSpec) -> list[str]:
    """Return the nodes that a launcher names, as cluster.toml calls them.

    The first launcher whose hosts are all in the file counts. If there is none, the result is [].
    """
    for launch in launches:
        known = [spec.known_as(host) for host in launch.hosts]
        if known and all(known):
            return known
    return []


def _nodes_that_ranks_fill(launches: Sequence[LaunchedNodes], spec: SiteSpec) -> int:
    """Return the number of nodes that the ranks of `mpirun -np N` fill, 0 if it is unknown.

    Args:
        launches: Nodes and processes that the launchers of the command start, the outermost first.
        spec: Content of cluster.toml, with the number of processes on each node.
    """
    sizes = {cluster.processes for cluster in spec.clusters}
    world_size = launches[-1].world_size if len(launches) == 1 else 0
    if len(sizes) > 1 or world_size % max(sizes):
        return 0
    return world_size // max(sizes)


def node_count(launches: Sequence[LaunchedNodes]) -> int:
    """Return the number of nodes that a command starts, 0 if it is unknown.

    Args:
        launches: Nodes and processes that its launchers start, the outermost first.
    """
    return next((launch.nodes for launch in launches if launch.nodes), 0)


def check_launchers(launches: Sequence[LaunchedNodes]) -> Iterator[Finding]:
    """Yield findings about launchers that would fail, or that contradict each other.

    Args:
        launches: Nodes and processes that the launchers of the command start, the outermost first.
    """
    for launch in launches:
        if launch.error:
            yield problem(
                launch.launcher,
                what=launch.error,
                why="the job does not start as it is meant",
                mend="correct the option or the file",
            )
    if len(launches) > 1:
        yield from _check_nested(launches[0], launches[-1])


def with_own_name(
    launches: Sequence[LaunchedNodes], node: NodeReport | None
) -> list[LaunchedNodes]:
    """Replace the IP address of a node by the node's name, in the hosts that launchers start.

    Args:
        launches: Nodes and processes that the launchers of a command start.
        node: The node whose addresses are known; None if there is none.
    """
    if node is None:
        return list(launches)
    addresses = _addresses_of(node)
    result = []
    for launch in launches:
        hosts = {}  # host -> its number of processes
        for host, count in launch.hosts.items():
            name = node.name if host in addresses else host
            hosts[name] = count
        result.append(replace(launch, hosts=hosts))
    return result


def _addresses_of(node: NodeReport) -> set[str]:
    """Return the IP addresses of a node's NICs, without the length of their network's prefix."""
    return {address.partition("/")[0] for nic in node.nics for address in nic.addresses}


def check_launch(
    launches: Sequence[LaunchedNodes], spec: SiteSpec, node: NodeReport | None = None
) -> Iterator[Finding]:
    """Yield findings if a command starts other nodes or processes than cluster.toml allows.

    Args:
        launches: Nodes and processes that the launchers of the command start, the outermost first.
        spec: Content of cluster.toml.
        node: The node on which the command is checked, with its addresses; None if it is not known.
    """
    yield from _check_node_count(launches, spec)
    for position, launch in enumerate(launches):
        yield from _check_hosts(launch, spec)
        if node is not None:
            yield from _check_own_address(launch, spec, node)
        # Number of processes that each inner launcher starts, 0 if it is not known.
        inner_counts = [inner.processes for inner in launches[position + 1 :]]
        # srun starts the same number on each host, which _check_processes() compares.
        if launch.launcher != "srun" and all(inner_counts):
            yield from _check_slots(launch, spec, ranks_per_process=prod(inner_counts))
    yield from _check_processes(launches, spec)


def check_gpus(launches: Sequence[LaunchedNodes], gpus: int) -> Iterator[Finding]:
    """Yield a finding if a command starts more processes on a node than the scheduler gives it GPUs.

    Args:
        launches: Nodes and processes that the launchers of the command start, the outermost first.
        gpus: GPUs of the job on each node, 0 if they are not known.
    """
    # Processes that each launcher starts on a node; 0 if it is not known.
    counts = [launch.processes or max(launch.hosts.values(), default=0) for launch in launches]
    if not gpus or not launches or not counts[-1]:
        return
    # Each process of a launcher starts the next launcher (mpirun: torchrun), so the numbers multiply.
    processes = prod(count or 1 for count in counts)
    if processes > gpus:
        flags = [launch.process_flag or launch.host_flag for launch in launches]
        yield problem(
            " x ".join(flag for flag, count in zip(flags, counts) if count),
            what=f"starts {counted(processes, 'process')} on a node, but Slurm gives the job "
            f"{counted(gpus, 'GPU')} there (--gpus-per-node, --gres or --gpus)",
            why='the ranks without a GPU end with "invalid device ordinal"',
            mend="request as many GPUs as processes on each node",
        )


def _check_nested(outer: LaunchedNodes, inner: LaunchedNodes) -> Iterator[Finding]:
    """Yield a finding if the inner launcher waits for another number of nodes than the outer launcher starts.

    Args:
        outer: srun or mpirun.
        inner: The launcher that it starts, such as torchrun.
    """
    # Number of times that the outer launcher starts the inner one. It should be inner.nodes: torchrun, for
    # example, is started once on each node, and waits until as many nodes have started it.
    starts = outer.world_size or sum(outer.hosts.values()) or outer.nodes * (outer.processes or 1)
    if not starts or not inner.nodes or inner.nodes == starts:
        return
    yield problem(
        inner.node_flag,
        what=f"is {inner.nodes}, but {outer.launcher} starts {inner.launcher} {starts} times",
        why=_JOB_WAITS if inner.nodes > starts else "it starts several jobs, or ends at start-up",
        mend=f"start {inner.launcher} once on each node, and give it the number of nodes",
    )


def _check_node_count(launches: Sequence[LaunchedNodes], spec: SiteSpec) -> Iterator[Finding]:
    """Yield a finding if a command starts more or fewer nodes than cluster.toml has.

    More nodes are a problem. Fewer are a note with the nodes that the sizes are checked for.

    Args:
        launches: Nodes and processes that the launchers of the command start, the outermost first.
        spec: Content of cluster.toml.
    """
    total = len(spec.cluster_by_node)
    count = node_count(launches)
    flag = next((launch.node_flag for launch in launches if launch.nodes), "")
    if count > total:
        yield problem(
            flag,
            what=f"is {count}, but the clusters have {counted(total, 'node')}",
            why=_JOB_WAITS,
            mend=f"add the nodes to a cluster in {spec.source}, or start fewer",
        )
    elif 0 < count < total:
        part = started_part(spec, launches)
        names = some_of(part.cluster_by_node, _MOST_NAMED)
        yield note(
            flag,
            what=f"the job has {count} of the {total} nodes of {spec.source}",
            why=f"sizes are checked for {names}"
            + ("" if _known_hosts(launches, spec) else ": which nodes it gets is not known here"),
            mend="nothing, if that is meant",
        )


def _check_hosts(launch: LaunchedNodes, spec: SiteSpec) -> Iterator[Finding]:
    """Yield a finding about hosts of a hostfile or option that are in no cluster of cluster.toml.

    Host names are a problem. IP addresses may belong to nodes of the file, which has no addresses. They are a
    note. It is left out if there is a problem.

    Args:
        launch: Nodes and processes that a launcher starts.
        spec: Content of cluster.toml.
    """
    unknown = [host for host in launch.hosts if not spec.known_as(host)]
    addresses = [host for host in unknown if _is_address(host)]
    names = [host for host in unknown if not _is_address(host) and host != "localhost"]
    if names:
        yield problem(
            launch.host_flag,
            what=f"{some_of(names, _MOST_NAMED)} {'is' if len(names) == 1 else 'are'} in no cluster of "
            f"{spec.source}",
            why=f"{_JOB_ENDS}, unless the node calls itself by a name of the file (`hostname`)",
            mend="write the same names into both, or start other hosts",
        )
    elif addresses:
        yield note(
            launch.host_flag,
            what=f"{some_of(addresses, _MOST_NAMED)}: IP addresses are not compared with {spec.source}",
            why="the file has host names, and a node reports its own (`hostname`)",
            mend="nothing, if these are nodes of the file",
        )


def _check_own_address(
    launch: LaunchedNodes, spec: SiteSpec, node: NodeReport
) -> Iterator[Finding]:
    """Yield a finding if a launcher starts all nodes of cluster.toml by addresses, none of them this node's.

    Args:
        launch: Nodes and processes that the launcher starts.
        spec: Content of cluster.toml.
        node: This node. If it is in no cluster, or its addresses are not known, there is no finding.
    """
    addresses = _addresses_of(node)
    has_all_nodes = len(launch.hosts) == len(spec.cluster_by_node)
    are_addresses = all(_is_address(host) for host in launch.hosts)
    if has_all_nodes and are_addresses and addresses and spec.known_as(node.name):
        yield note(
            launch.host_flag,
            what=f"has as many addresses as {spec.source} has nodes, and none is one of {node.name} "
            f"({some_of(sorted(addresses), _MOST_NAMED)})",
            why="another node may be started in its place",
            mend=f"compare the addresses with those of {node.name} (ip addr)",
        )


def _check_slots(
    launch: LaunchedNodes, spec: SiteSpec, ranks_per_process: int
) -> Iterator[Finding]:
    """Yield a finding if a launcher starts another number of processes on a host than cluster.toml has.

    Args:
        launch: Nodes and processes that the launcher starts.
        spec: Content of cluster.toml.
        ranks_per_process: Ranks that each process of the launcher starts. If mpirun starts `torchrun
            --nproc-per-node 8`, they are 8. If it starts the training script, the process is a rank: 1.
    """
    for host, started in launch.hosts.items():
        count = started * ranks_per_process
        cluster = spec.cluster_by_node.get(spec.known_as(host))
        sizes = {cluster.processes} if cluster else {one.processes for one in spec.clusters}
        if count and count not in sizes:
            where = f"in {spec.source}" if cluster else f"on every node of {spec.source}"
            expected = " or ".join(str(size) for size in sorted(sizes))
            yield problem(
                launch.host_flag,
                what=f"starts {counted(count, 'process')} on {host}, but key "
                f"'processes' is {expected} {where}",
                why=_JOB_ENDS,
                mend="make the slots and the key agree",
            )
            return  # one example is enough


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _check_processes(launches: Sequence[LaunchedNodes], spec: SiteSpec) -> Iterator[Finding]:
    """Yield a finding if a command starts another number of processes on a node than cluster.toml has.

    Args:
        launches: Nodes and processes that the launchers of the command start, the outermost first.
        spec: Content of cluster.toml.
    """
    part = started_part(spec, launches)
    numbers = [launch.processes for launch in launches]
    flags = [launch.process_flag for launch in launches if launch.processes]

    # Processes on a node: the product of the numbers of all launchers. The innermost launcher must have a
    # number. An outer launcher without a number starts the inner one once on each node.
    if not launches or any(launch.hosts and launch.launcher != "srun" for launch in launches):
        return
    if numbers[-1]:
        processes = 1
        for number in numbers:
            processes *= number or 1
        # If the command names no hosts, it may run on any nodes of the file.
        possible = part.clusters if _known_hosts(launches, spec) else spec.clusters
        wrong = [cluster for cluster in possible if cluster.processes != processes]
        # Nodes with different numbers of GPUs have a torchrun command of their own each.
        is_of_some_node = launches[0].launcher == "torchrun" and len(wrong) < len(possible)
        if wrong and not is_of_some_node:
            yield problem(
                " x ".join(flags),
                what=f"is {processes}, but node {wrong[0].nodes[0]} has "
                f"{counted(wrong[0].processes, 'process')} in {spec.source}",
                why=_JOB_ENDS,
                mend="make them agree (key 'processes')",
            )
        return

    # No launcher has a number for each node. mpirun, for example, has only the number of all processes.
    total = launches[-1].world_size
    sizes = {cluster.processes for cluster in part.clusters}
    most = sum(cluster.processes * len(cluster.nodes) for cluster in part.clusters)
    is_multiple = any(total % size == 0 for size in sizes)
    if total and len(launches) == 1 and (total > most or not is_multiple):
        yield problem(
            launches[-1].world_flag,
            what=f"is {total}, but the nodes of {spec.source} have {' or '.join(map(str, sorted(sizes)))} "
            f"processes each, {most} together",
            why=_JOB_ENDS,
            mend="start as many processes on each node as the key 'processes' says",
        )
