"""Tests before training whether neighbours in every planned group reach each other over their planned NICs.

    1. local rank 0 of each node   lists the pairs of nodes to test: neighbours in the ring of every planned
                                   group, over the group's fabric, and also over Ethernet
    2. local rank 0 of each node   listens on its node's address on every fabric, and stores the ports
    3. local rank 0 of each node   connects to the second node of every pair whose first node is its own, and
                                   stores the results
    4. rank 0 of the launcher      collects all results and stores a verdict. All ranks follow it:
        Ethernet failed                the job ends
        a fast network failed          the ports at fault are excluded, and their groups use the next fastest
                                       network (with --holmes-fallback fail the job ends)

Nodes exchange addresses and results through the job's key-value store. Every wait has a deadline.

The test uses sockets, as gloo does, and NCCL over Ethernet. For RDMA it shows only that the fabric carries IP
between two ports (IPoIB, or the network device of a RoCE NIC), not that verbs work. A port without an IP
address cannot be tested. Lines name such ports, and TCP windows that are too small for a link.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from holmes_ext.cluster.addresses import read_limits, shortfalls, sockets
from holmes_ext.cluster.fabric import ETHERNET
from holmes_ext.cluster.plugin_fabrics import plugins_of
from holmes_ext.errors import HolmesError, RemoteError
from holmes_ext.plan.traffic import NETWORK_APIS
from holmes_ext.runtime.deadline import Deadline
from holmes_ext.runtime.sockets import Listener, answer_hello, exchange_hello, listen
from holmes_ext.runtime.start.store import append_entry, collect_entries, wait_for_value
from holmes_ext.words import some_of

if TYPE_CHECKING:
    from holmes_ext.cluster.site import Site
    from holmes_ext.options import Options
    from holmes_ext.plan.engine import EngineTraits
    from holmes_ext.plan.plan import Plan
    from holmes_ext.runtime.planning import PlanMaker
    from holmes_ext.runtime.sockets import Guest
    from holmes_ext.runtime.start.launcher import Process

#: Seconds until the other end's kernel must accept a connection; enough for two lost packets.
CONNECT_S = 5.0
#: Seconds until the process at the other end must answer.
ANSWER_S = 10.0
#: Seconds until a node must have stored the ports that it listens on.
LISTEN_S = 15.0
#: Seconds until rank 0 must have the results of every node.
FINDINGS_S = 25.0
#: Seconds that other ranks wait for the verdict after FINDINGS_S.
_VERDICT_S = 10.0
_LEAST_WAIT_S = 0.05
_MOST_THREADS = 16  # pairs that a node tests at the same time
_MOST_CONNECTIONS = 1024  # of other nodes to a port of this node
_MOST_NAMED = 3  # failures or groups that a message lists


@dataclass(frozen=True)
class NeighbourPair:
    """Two nodes that must reach each other over a fabric (network)."""

    fabric: str
    first: str  # name of the node that connects
    second: str  # name of the node that listens
    kind: str  # of the first group that needs the connection, such as "data"
    ranks: tuple[int, ...]  # of this group


class ConnectionAttempt(NamedTuple):
    """Result of the connection that a node tried to open to another node."""

    fabric: str
    first: str  # name of the node that tried to connect
    second: str  # name of the node that should accept the connection
    error: str  # empty if the connection worked


class NodeResults(NamedTuple):
    """Results of all connection tests that a node has made, as the node stores them for rank 0."""

    node: str
    attempts: list[ConnectionAttempt]
    tcp_warning: str  # about TCP windows that are too small for a link; "" if they suffice


class PortKey(NamedTuple):
    """A node's port on a fabric (network)."""

    node: str
    fabric: str


def run(
    store: dist.Store,
    prefix: str,
    process: Process,
    host: str,
    site: Site,
    plan: Plan,
    options: Options,
    engine: EngineTraits,
    maker: PlanMaker,
) -> tuple[Site, Plan, list[str]]:
    """Test all neighbours, and return the site and plan without the ports that failed.

    All ranks call this function, and get the same result within FINDINGS_S and _VERDICT_S.

    Args:
        store: The job's key-value store.
        prefix: Prefix of the store's keys of this start of the job.
        process: This rank, as the launcher numbered it.
        host: Name of this rank's node in `site`.
        site: The nodes, their ports and fabrics.
        plan: The plan for all ports of `site`.
        options, engine, maker: Make the plan for the ports that are left.

    Returns:
        The site, the plan, and lines for the user.

    Raises:
        HolmesError: On the launcher's rank 0: two nodes do not reach each other over Ethernet, or over a fast
            network and --holmes-fallback is "fail". On other ranks: there was no verdict.
        RemoteError: The error of rank 0, on all other ranks.
    """
    prefix = f"{prefix}/preflight"
    deadline = Deadline(FINDINGS_S)
    pairs = neighbour_pairs(plan) if process.local_rank == 0 else []
    listeners = None
    try:
        try:
            if process.local_rank == 0:
                listeners = NodeListeners(site, host, pairs, token=prefix)
                store.set(f"{prefix}/ports/{host}", json.dumps(listeners.ports))
                attempts = _test_pairs_of(store, prefix, site, host, pairs)
                results = NodeResults(host, attempts, tcp_warning(plan, site, host))
                entry = json.dumps(results).encode()
                append_entry(store, f"{prefix}/findings", entry, count=1, total=len(plan.nodes))
            if process.rank == 0:
                try:
                    all_results = _collect_results(store, prefix, plan, deadline)
                    verdict = decide(site, plan, pairs, all_results, options, engine, maker)
                except HolmesError as error:
                    verdict = {"error": str(error)}
                store.set(f"{prefix}/verdict", json.dumps(verdict))
            stored_verdict = wait_for_value(store, f"{prefix}/verdict", FINDINGS_S + _VERDICT_S)
        except (dist.DistError, RuntimeError):  # the store is lost
            stored_verdict = b""
        if not stored_verdict:
            raise HolmesError(
                f"preflight: rank {process.rank} on {host} got no verdict from the launcher's rank 0 at"
                f" {process.master_addr}:{process.master_port}; is it alive?"
            )
        verdict = json.loads(stored_verdict)
    finally:
        if listeners is not None:
            listeners.close()
    if "error" in verdict:
        if process.rank == 0:
            raise HolmesError(verdict["error"])
        raise RemoteError(verdict["error"])
    faults = {(node, fabric): reason for node, fabric, reason in verdict["faults"]}
    if faults:
        site = site.without(faults)
        plan = maker.on_ports(plan, site, options, engine=engine)
    return site, plan, verdict["lines"]


def neighbour_pairs(plan: Plan) -> list[NeighbourPair]:
    """Return the pairs of nodes to connect as a test, each with the fabric (network) to use.

    Two nodes are a pair if they have consecutive ranks in a planned process group. Each pair is
    tested over the group's fabric and over Ethernet. All ranks compute the same list.
    """
    pairs: dict[tuple[str, frozenset[str]], NeighbourPair] = {}  # (fabric, both nodes) -> pair
    for kind, ranks in tested_groups(plan):  # the planned groups
        next_ranks = ranks[1:] + ranks[:1]
        for rank, next_rank in zip(ranks, next_ranks):
            first = plan.node_of(rank)
            second = plan.node_of(next_rank)
            if first == second:
                continue  # ranks of the same node need no network
            groups = [ranks]
            if kind == "pipeline":  # these two ranks may get a faster group of their own
                groups.append((rank, next_rank))
            for fabric in _fabrics_of(plan, groups):  # of NCCL (verbs) and of gloo (sockets)
                key = (fabric, frozenset((first, second)))
                pairs.setdefault(key, NeighbourPair(fabric, first, second, kind, ranks))
    # Groups fall back to Ethernet where a fast network fails, so each pair must also be connected by it.
    for pair in list(pairs.values()):
        key = (ETHERNET, frozenset((pair.first, pair.second)))
        pairs.setdefault(key, replace(pair, fabric=ETHERNET))
    return list(pairs.values())


def tested_groups(plan: Plan) -> Iterable[tuple[str, tuple[int, ...]]]:
    """Yield the kind, such as "data", and the ranks of each group whose connections the preflight tests.

    These are all planned groups. Without parallel sizes the only planned group is that of all ranks. Then the
    ranks of each cluster are yielded as a group, too.
    """
    if plan.sizes is None:
        for ranks in plan.by_cluster(range(plan.world_size)).values():
            yield "cluster", tuple(ranks)
    yield from plan.groups()


def _fabrics_of(plan: Plan, groups: Sequence[tuple[int, ...]]) -> list[str]:
    """Return the names of the networks that groups of ranks may use, with verbs or with sockets."""
    names = []
    for ranks in groups:
        for network_api in NETWORK_APIS:
            fabric = plan.fabric_of(ranks, network_api)
            if fabric is not None and fabric.name not in names:
                names.append(fabric.name)
    return names


class NodeListeners:
    """Listening sockets of this node: a socket for each network that other nodes test it on."""

    def __init__(self, site: Site, host: str, pairs: Iterable[NeighbourPair], token: str):
        """Open a listening socket on each fabric (network) that other nodes test this node on.

        In each pair of nodes, the first node tests the second before training: it connects to the
        second, sends a line of JSON, and gets the answer {"node": host, "token": token}.

        Args:
            site, pairs: Addresses of all nodes, and the pairs of nodes to test.
            host: Name of this node.
            token: Identifies the job and its start.
        """
        self._listeners: list[Listener] = []
        #: Fabric -> number of the TCP port, or the reason why there is none.
        self.ports: dict[str, int | str] = {}
        self._hello = {"node": host, "token": token}
        for fabric in dict.fromkeys(pair.fabric for pair in pairs if pair.second == host):
            address = site.node_by_name[host].port(fabric).address
            if not address:
                continue
            try:
                listening = listen(address, 0)  # on any free TCP port
            except OSError as error:
                self.ports[fabric] = f"cannot listen on its own address {address}: {error.strerror}"
                continue
            listener = Listener(
                listening,
                self._reply,
                "holmes-preflight",
                strangers=_MOST_CONNECTIONS,
                per_address=_MOST_CONNECTIONS,
            )
            listener.start()
            self._listeners.append(listener)
            self.ports[fabric] = listener.port

    def _reply(self, guest: Guest) -> None:
        answer_hello(guest, self._hello, ANSWER_S)

    def close(self) -> None:
        """Close the listening sockets of this node."""
        for listener in self._listeners:
            listener.close()


def _test_pairs_of(
    store: Any, prefix: str, site: Site, host: str, pairs: list[NeighbourPair]
) -> list[ConnectionAttempt]:
    """Connect from node `host` to the second node of each pair whose first node is `host`.

    All pairs are tested at the same time. Pairs with a port that has no IP address are skipped.
    """
    ports: dict[str, dict[str, Any]] = {}  # node -> fabric -> TCP port, or why there is none
    deadline = Deadline(LISTEN_S)

    def attempt(pair: NeighbourPair) -> ConnectionAttempt:
        absent = "the process there has not come to its preflight"
        port = ports[pair.second].get(pair.fabric, absent)
        if isinstance(port, str):  # the reason why there is none
            error = port
        else:
            source, target = _addresses(site, pair)
            hello = {"node": host, "token": prefix}  # the prefix identifies the job and its start
            expected = {"node": pair.second, "token": prefix}
            error = exchange_hello(source, (target, port), hello, expected, CONNECT_S, ANSWER_S)
        return ConnectionAttempt(pair.fabric, pair.first, pair.second, error)

    own_pairs = [pair for pair in pairs if pair.first == host and all(_addresses(site, pair))]
    for other in dict.fromkeys(pair.second for pair in own_pairs):
        left_s = max(_LEAST_WAIT_S, deadline.left)
        stored_ports = wait_for_value(store, f"{prefix}/ports/{other}", left_s)
        ports[other] = json.loads(stored_ports or b"{}")
    if not own_pairs:
        return []
    with ThreadPoolExecutor(min(_MOST_THREADS, len(own_pairs))) as pool:
        return list(pool.map(attempt, own_pairs))


def _addresses(site: Site, pair: NeighbourPair) -> list[str]:
    """Return the IP addresses of both nodes on the pair's network; "" for a port without an address."""
    nodes = (pair.first, pair.second)
    return [site.node_by_name[node].port(pair.fabric).address for node in nodes]


def tcp_warning(plan: Plan, site: Site, host: str) -> str:
    """Return a warning if TCP windows of node `host` are too small for a link between clusters; else "".

    It names the link that loses the largest share of its rate.
    """
    if not plan.wan:
        return ""
    node_counts = {name: len(nodes) for name, nodes in plan.clusters.items()}
    ethernet_bps = site.fabric_by_name[ETHERNET].rate_bps
    cluster = site.node_by_name[host].cluster
    streams = sockets(os.environ)  # parallel TCP connections that NCCL opens between two ranks
    limits = read_limits()
    shortages = list(shortfalls(plan.wan, ethernet_bps, node_counts, cluster, limits, streams))
    if not shortages:
        return ""
    worst = min(shortages, key=lambda shortage: shortage.carries_bps / shortage.rate_bps)
    return f"node {host}: {worst.what}; {worst.mend}"  # the problem and its remedy, in words


def _collect_results(store: Any, prefix: str, plan: Plan, deadline: Deadline) -> list[NodeResults]:
    """Return each node's test results, in the plan's order; raise HolmesError if any is missing."""
    results: dict[str, NodeResults] = {}
    for entry in collect_entries(store, f"{prefix}/findings", deadline.left):
        node, attempts, warning = json.loads(entry)
        results[node] = NodeResults(
            node, [ConnectionAttempt(*fields) for fields in attempts], warning
        )
    missing = [node for node in plan.nodes if node not in results]
    if not missing:
        return [results[node] for node in plan.nodes]
    # A node that has not even stored its ports delays its neighbours, so it is named.
    without_ports = [node for node in missing if not store.check([f"{prefix}/ports/{node}"])]
    node = without_ports[0] if without_ports else missing[0]
    rank = plan.first_rank(node)
    raise HolmesError(
        f"preflight: node {node} (rank {rank}) did not finish it within {FINDINGS_S:g} s; "
        "is its process alive? (--holmes-preflight off skips it)"
    )


def decide(
    site: Site,
    plan: Plan,
    pairs: Sequence[NeighbourPair],
    results: Sequence[NodeResults],
    options: Options,
    engine: EngineTraits,
    maker: PlanMaker,
) -> dict[str, Any]:
    """Decide from all connection tests: return the NIC ports to exclude, or raise an error to end the job.

    Args:
        site, plan: The nodes with their ports, and the plan that was tested.
        pairs: The pairs of nodes that were tested.
        results: Each node's connection attempts and their errors.
        options, engine, maker: The maker makes the plan without the excluded ports, from the options of
            holmes and the traits of the framework's engine.

    Returns:
        JSON: "faults", [node, fabric, reason] of each port to exclude, and "lines" for the user.

    Raises:
        HolmesError: Ethernet failed, or a fast network and the user forbids a fallback.
    """
    lines_on_plugins = plugins_of(site, [pair.fabric for pair in pairs])
    lines = [*_untested_fabrics(site, pairs), *lines_on_plugins]
    warnings = [result.tcp_warning for result in results if result.tcp_warning]
    if warnings:  # a single line is enough: nodes usually have the same settings
        count = f" ({len(warnings)} nodes are short of it)" if len(warnings) > 1 else ""
        lines.append(f"preflight: TCP{count}: {warnings[0]}")
    attempts = [attempt for result in results for attempt in result.attempts]
    failures = [attempt for attempt in attempts if attempt.error]
    if not failures:
        return {"faults": [], "lines": lines}
    pair_of = {(pair.fabric, pair.first, pair.second): pair for pair in pairs}
    descriptions = {}  # failure -> its description
    for failure in failures:
        pair = pair_of[failure.fabric, failure.first, failure.second]
        descriptions[failure] = _describe(site, plan, pair, failure.error)
    on_ethernet = [text for failure, text in descriptions.items() if failure.fabric == ETHERNET]
    if on_ethernet:
        raise HolmesError(
            f"preflight: {some_of(on_ethernet, _MOST_NAMED, '; ')}; every node must reach the "
            "others over Ethernet: fix its cable, VLAN, addresses or firewall, or name the right interface "
            "in cluster.toml"
        )
    summary = f"preflight: {some_of(descriptions.values(), _MOST_NAMED, '; ')}"
    if options.fallback == "fail":
        raise HolmesError(f"{summary}; fix that, or use --holmes-fallback ethernet to avoid it")

    faults = ports_at_fault(attempts)
    new_plan = maker.on_ports(plan, site.without(faults), options, engine=engine)
    moved = _moved_groups(plan, new_plan)
    consequence = "no planned group needs it"
    if moved:
        consequence = f"therefore {some_of(moved, _MOST_NAMED, '; ')}"
    message = f"{summary}; {consequence} (--holmes-fallback fail would end the job)"
    return {
        "faults": [
            [node, fabric, f"found by the preflight: {reason}"]
            for (node, fabric), reason in faults.items()
        ],
        "lines": [message, *lines],
    }


def ports_at_fault(attempts: Sequence[ConnectionAttempt]) -> dict[tuple[str, str], str]:
    """Find the NIC ports that caused failed connections, and return each with the reason.

    A port is at fault if two or more connections with it were tried and all failed. If neither end of a
    failed connection is at fault by this rule, both ends are excluded, since either may be the cause.
    """
    errors_of: dict[PortKey, list[str]] = defaultdict(list)  # "" for a connection that worked
    for attempt in attempts:
        for node in (attempt.first, attempt.second):
            errors_of[PortKey(node, attempt.fabric)].append(attempt.error)
    unreachable = {port for port, errors in errors_of.items() if len(errors) > 1 and all(errors)}

    reasons: dict[tuple[str, str], str] = {}  # (node, fabric) of a port -> reason
    for attempt in attempts:
        if not attempt.error:
            continue
        first = PortKey(attempt.first, attempt.fabric)
        second = PortKey(attempt.second, attempt.fabric)
        suspects = [port for port in (first, second) if port in unreachable]
        if not suspects:
            suspects = [first, second]
        for port in suspects:
            other_end = second if port == first else first
            reasons.setdefault(port, f"between it and {other_end.node}: {attempt.error}")
    return reasons


def _describe(site: Site, plan: Plan, pair: NeighbourPair, error: str) -> str:
    """Describe a failed connection in words: both ends, the network, the group that needs it, the error."""
    first = _describe_end(site, plan, pair, pair.first)
    second = _describe_end(site, plan, pair, pair.second)
    group = f"the {pair.kind} group of ranks {some_of(pair.ranks)}"
    return f"{first} does not reach {second} over {pair.fabric}, for {group}: {error}"


def _describe_end(site: Site, plan: Plan, pair: NeighbourPair, node: str) -> str:
    """Describe a node's end of a connection in words, e.g. "node b0 (rank 2, eth0, 10.0.0.3)"."""
    port = site.node_by_name[node].port(pair.fabric)
    ranks = [rank for rank in pair.ranks if plan.node_of(rank) == node]
    numbers = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
    return f"node {node} (rank {numbers}, {port.name}, {port.address})"


def _moved_groups(before: Plan, after: Plan) -> list[str]:
    """Return a clause for every planned group that uses another network in the new plan."""
    clauses = []
    for kind, ranks in before.groups():
        for network_api in NETWORK_APIS:  # verbs (NCCL) and sockets (gloo)
            old = before.fabric_of(ranks, network_api)
            new = after.fabric_of(ranks, network_api)
            if old is not None and new is not None and old.name != new.name:
                clauses.append(
                    f"the {kind} group of ranks {some_of(ranks)} goes over {new.name} on all its ranks"
                )
                break  # a single clause for each group is enough
    if not clauses and before.sizes is None:  # without sizes, the plan does not know the groups
        clauses.append(
            "every group that needs it goes over the next fastest fabric that its ranks share, on all of them"
        )
    return clauses


def _untested_fabrics(site: Site, pairs: Iterable[NeighbourPair]) -> list[str]:
    """Return a line for every fast network with ports that have no IP address: sockets cannot test those."""
    ports_without_address: dict[str, dict[str, str]] = defaultdict(dict)  # fabric -> node -> port
    for pair in pairs:
        for node in (pair.first, pair.second):
            port = site.node_by_name[node].port(pair.fabric)
            if not port.address and pair.fabric != ETHERNET:
                ports_without_address[pair.fabric][node] = port.name

    lines = []
    for fabric, port_of in ports_without_address.items():
        node, port_name = next(iter(port_of.items()))
        more = len(port_of) - 1  # the message names the first node, and counts the others
        verb = "nodes have" if more > 1 else "node has"
        others = f", and {more} more {verb} none" if more else ""
        lines.append(
            f"preflight: not tried on {fabric}: {node} ({port_name}) has no IP address there{others}; "
            f"the ports are up, no more is known"
        )
    return lines
