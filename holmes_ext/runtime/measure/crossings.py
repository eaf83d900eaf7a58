"""Measures the network between every two clusters of the running job, by TCP over Ethernet NICs.

Pairs of clusters are measured in rounds. The pairs of a round share no cluster, so they share no uplink:

    round 1:  a-b  c-d      round 2:  a-c  b-d      round 3:  a-d  b-c

For each pair, in this order:

    1. a node sends single bytes there and back: the round-trip time
    2. the same node sends a single stream
    3. as many nodes as both clusters have, at most MOST_NODES, send STREAMS streams in all

The rate of a stream is measured at the receiver. A lead of LEAD_S seconds, or LEAD_TRIPS round trips if
that is longer, is not counted: TCP opens its window. The following WINDOW_S seconds, or WINDOW_TRIPS
round trips, are divided into PARTS equal parts, and their median counts. So data that was held up by a
lost packet or a busy host and then arrives at once is not taken for the rate of the link.

One process of each node takes part; the other processes wait. If every stream moves PROGRAM_BPS, this
program may be the bottleneck: then the rate of the cluster file counts, if it is higher.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from holmes_ext.cluster.fabric import ETHERNET
from holmes_ext.cluster.site import Site
from holmes_ext.cluster.wan import MeasuredPair
from holmes_ext.runtime.session import Session

PINGS = 11  # round trips; the first trip is not counted
STREAMS = 8  # of all nodes of a cluster together
MOST_NODES = 8  # of a cluster
LEAD_S = 0.8
LEAD_TRIPS = 15
WINDOW_S = 1.0
WINDOW_TRIPS = 10
PARTS = 10
#: Seconds without data until a peer counts as lost.
PATIENCE_S = 60.0
#: Largest one-way latency of a flat network, in seconds.
FLAT_S = 1e-3
#: Smallest rate of a flat network, as a share of the rate of the nodes' NICs together.
FLAT_SHARE = 0.8
#: Bits/s of a stream that a single thread of Python reaches on any current server.
PROGRAM_BPS = 4e9

_CHUNK = bytes(1 << 18)  # that a sender passes to the kernel at once
_BUFFER_BYTES = 1 << 20  # of a receiver
_ECHO = b"p"  # first byte of a connection that wants each byte back
_FLOOD = b"f"  # first byte of a connection that sends a stream
_HEAD = struct.Struct("cdd")  # _ECHO or _FLOOD, lead and window in seconds
_RATES = struct.Struct(f"{PARTS}d")
_LINGER = struct.Struct("ii")  # struct linger: on or off, seconds

#: Bits/s in each part of the measured time.
_Rates = Sequence[float]
#: First rank of each node of a cluster.
_Cluster = Sequence[int]
#: Indices of two clusters that are measured.
_Pair = tuple[int, int]


class _Connection(NamedTuple):
    """Two ranks on nodes of different clusters. The first sends streams to the second."""

    sender: int
    receiver: int


class PairResult(NamedTuple):
    """Round-trip time and TCP rates between two clusters that a rank has measured in one round.

    In a round, each cluster is in at most one pair of clusters. Values that this rank has not
    measured are 0: a rank that does not send measures nothing.
    """

    trip_s: float  # round-trip time
    stream_bps: float  # of a single stream
    rates: _Rates  # bits/s of all streams of this sender, in each of the PARTS parts of the time


def rounds(count: int) -> list[list[_Pair]]:
    """Return all pairs of clusters in rounds, so that no cluster is in two pairs of a round.

    This is the circle method of round-robin tournaments: in each round, opposite positions of a circle are
    paired. Then all numbers but the first move on by one position.

    Args:
        count: Number of clusters. The pairs consist of the numbers 0 to count - 1.

    Returns:
        The pairs of each round, the smaller number first.
    """
    circle: list[int | None] = list(range(count))
    if count % 2:
        circle.append(None)  # the cluster that is paired with None has a break
    schedule = []
    for _ in range(len(circle) - 1):
        pairs = []
        for position in range(len(circle) // 2):
            first = circle[position]
            second = circle[-1 - position]
            if first is not None and second is not None:
                pairs.append((min(first, second), max(first, second)))
        schedule.append(sorted(pairs))
        circle.insert(1, circle.pop())  # position 0 stays, the last element moves to position 1
    return schedule


def is_flat(site: Site, pairs: Sequence[MeasuredPair]) -> bool:
    """Return whether the clusters are connected like nodes of a single network.

    Then latencies are short, and nodes reach most of their NICs' rate between all pairs of clusters.

    Args:
        site: Nodes and networks.
        pairs: Measured rate and latency between each pair of clusters.
    """
    node_counts = {name: len(_nodes_of(site, name)) for name in site.clusters}
    nic_bps = site.fabric_by_name[ETHERNET].rate_bps
    for pair in pairs:
        # Each sender had a receiver of its own; at most MOST_NODES took part.
        senders = min(MOST_NODES, *(node_counts[name] for name in pair.clusters))
        if pair.latency_s > FLAT_S or pair.rate_bps < FLAT_SHARE * nic_bps * senders:
            return False
    return True


def _nodes_of(site: Site, cluster: str) -> list[str]:
    return [node.name for node in site.nodes if node.cluster == cluster]


def streams_of(nodes: int) -> int:
    """Return the number of streams that each of `nodes` nodes sends at the same time."""
    return max(1, STREAMS // max(1, nodes))


def stated_bps(site: Site, source: str, target: str, nodes: int) -> float:
    """Return the rate between two clusters that the cluster file states, in bits/s.

    Args:
        site: Nodes and networks.
        source: Cluster that sends.
        target: Cluster that receives.
        nodes: Nodes that send at the same time.
    """
    nics_bps = nodes * site.fabric_by_name[ETHERNET].rate_bps
    # Hops are the links between clusters on the way; none if the file states no such links.
    hops_bps = [hop.rate_bps for hop in site.wan.hops(source, target)]
    return min([nics_bps, *hops_bps])


def _print_nothing(text: str) -> None:
    """Ignore a line about the progress of measure(), because its caller wants none."""


def measure(
    session: Session, tell: Callable[[str], None] = _print_nothing
) -> tuple[MeasuredPair, ...]:
    """Measure the latency and the TCP rate between every two clusters, over Ethernet NICs.

    All ranks call this function and get the same result.

    Args:
        session: The session of this process.
        tell: Called with a line about each round.

    Returns:
        For each pair of clusters: the one-way latency in seconds, the bits/s of several nodes
        together, and those of a single stream. Empty if the job has a single cluster.

    Raises:
        OSError: A node does not answer.
    """
    import torch.distributed as dist

    site = session.site
    plan = session.plan
    rank = dist.get_rank()
    first_ranks = plan.first_ranks
    clusters: list[_Cluster] = []
    for cluster in site.clusters:
        nodes = [name for name in plan.nodes if site.node_by_name[name].cluster == cluster]
        clusters.append([first_ranks[name] for name in nodes])
    if len(clusters) < 2:  # noqa: PLR2004 - a pair
        return ()

    own_node = site.node_by_name[plan.node_of(rank)]
    server = socket.create_server((own_node.port(ETHERNET).address, 0), backlog=2 * STREAMS)
    server.settimeout(PATIENCE_S)
    addresses: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(addresses, server.getsockname()[:2])

    schedule = rounds(len(clusters))
    own_results = []
    for number, pairs in enumerate(schedule, start=1):
        names = ", ".join(f"{site.clusters[a]}-{site.clusters[b]}" for a, b in pairs)
        tell(f"round {number} of {len(schedule)} between the clusters: {names}")
        sides = None
        for first, second in pairs:
            if rank in clusters[first] or rank in clusters[second]:
                sides = (clusters[first], clusters[second])
        own_results.append(_measure_pair(rank, sides, server, addresses, dist.barrier))
    all_results: list[list[PairResult]] = [[]] * dist.get_world_size()  # rank -> round -> result
    dist.all_gather_object(all_results, own_results)
    server.close()

    measured = []
    for round_index, pairs in enumerate(schedule):
        results = [rank_results[round_index] for rank_results in all_results]
        for first, second in pairs:
            connections = _connections(clusters[first], clusters[second])
            node_count = len(connections)  # of each of the two clusters
            senders = [connection.sender for connection in connections]
            rate_bps = _median([results[sender].rates for sender in senders])
            cluster_names = (site.clusters[first], site.clusters[second])
            # This program may be slower than the network: then the rate of the cluster file counts.
            if rate_bps >= PROGRAM_BPS * node_count * streams_of(node_count):
                rate_bps = max(rate_bps, stated_bps(site, *cluster_names, node_count))
            # The first sender has measured the latency and a single stream.
            first_result = results[senders[0]]
            latency_s = first_result.trip_s / 2
            stream_bps = round(first_result.stream_bps)
            pair = MeasuredPair(cluster_names, round(rate_bps), latency_s, stream_bps)
            measured.append(pair)

    def position(pair: MeasuredPair) -> list[int]:
        return [site.clusters.index(name) for name in pair.clusters]

    return tuple(sorted(measured, key=position))


def _connections(senders: _Cluster, receivers: _Cluster) -> list[_Connection]:
    """Pair the nodes of two clusters: the i-th node of the first sends to the i-th node of the second.

    Args:
        senders: First rank of each node of the cluster that sends.
        receivers: First rank of each node of the cluster that receives.
    """
    connections = [_Connection(*ranks) for ranks in zip(senders, receivers)]
    return connections[:MOST_NODES]


def _measure_pair(
    rank: int,
    sides: tuple[_Cluster, _Cluster] | None,
    server: socket.socket,
    addresses: Sequence[Any],
    barrier: Callable[[], object],
) -> PairResult:
    """Measure the network between two clusters, if this rank takes part; return its measurements.

    All ranks of the job call this function, because `barrier` separates the measurements. Ranks
    that take no part only wait at the barriers. Node i of a cluster sends to node i of the other
    cluster, over a connection for each such pair of nodes. First only the first node sends a single
    TCP stream, then all nodes send several streams each.

    Args:
        rank: This rank.
        sides: First ranks of the nodes of the cluster that sends, and of the cluster that receives.
            None if this rank takes no part.
        server: This node's listening socket.
        addresses: Rank -> address of its node's listening socket.
        barrier: Waits for all ranks.

    Returns:
        The round-trip time, the rate of the single stream, and the rates of all streams of this
        sender in PARTS equal parts of the time. Values that this rank has not measured are 0.
    """
    # Pairs of ranks (sender, receiver), for each pair of nodes.
    connections = _connections(*sides) if sides is not None else []
    receiver_of = {connection.sender: connection.receiver for connection in connections}
    receiver = receiver_of.get(rank)  # None: this rank does not send
    is_receiver = rank in receiver_of.values()
    is_in_first = bool(connections) and rank in connections[0]  # the first sender or its receiver
    trip_s = 0.0  # round-trip time of a small message
    results = []  # bits/s in PARTS parts of the time, for each measurement with this rank as sender
    if receiver is not None:
        trip_s = _ping(addresses[receiver])
    elif is_receiver:
        _serve(server, streams=1)  # answers the ping
    single_stream = (1, is_in_first)  # (streams of each sender, whether this rank takes part)
    all_streams = (streams_of(len(connections)), True)
    for streams, takes_part in (single_stream, all_streams):
        barrier()  # all pairs of the round begin together
        if takes_part and receiver is not None:
            results.append(_flood(addresses[receiver], streams, trip_s))
        elif takes_part and is_receiver:
            _serve(server, streams)
    barrier()

    # `results` is empty on ranks that do not send. The first sender has two results, of the single
    # stream and of all streams. Every other sender has only the latter.
    stream_bps = _median(results[:1]) if is_in_first else 0.0
    rates = results[-1] if results else (0.0,) * PARTS
    return PairResult(trip_s, stream_bps, rates)


def _median(rates: Sequence[_Rates]) -> float:
    """Return the bits/s of several senders together: the median over equal parts of the time.

    If nothing arrived in most parts, the mean is returned.
    """
    sums = [float(sum(part)) for part in zip(*rates)] or [0.0]
    return statistics.median(sums) or statistics.mean(sums)


def _connect(
    address: tuple[str, int], kind: bytes, lead_s: float = 0.0, window_s: float = 0.0
) -> socket.socket:
    """Connect to another node, and send a head: the use of the connection.

    Args:
        address: The other node's server.
        kind: _ECHO: the other node sends each byte back. _FLOOD: it receives a stream, and answers with the
            measured rates.
        lead_s: With _FLOOD, seconds at the beginning of the stream that are not measured.
        window_s: With _FLOOD, seconds after them that are measured.
    """
    connection = socket.create_connection(address, timeout=PATIENCE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(_HEAD.pack(kind, lead_s, window_s))
    return connection


def _ping(address: tuple[str, int]) -> float:
    """Return the median round-trip time of a single byte, in seconds."""
    with _connect(address, _ECHO) as connection:
        times = []
        for _ in range(PINGS):
            begin = time.perf_counter()
            connection.sendall(b"\0")
            connection.recv(1)
            times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def _flood(address: tuple[str, int], streams: int, trip_s: float) -> _Rates:
    """Send TCP streams to another node for a few seconds, and return the rates at which it received them.

    The receiver counts nothing in the first LEAD_S seconds, while TCP's windows grow. It divides
    the following WINDOW_S seconds into PARTS equal parts. Both times are longer if `trip_s` is
    long: at least LEAD_TRIPS and WINDOW_TRIPS round trips.

    Args:
        address: The other node's server.
        streams: Number of streams at the same time.
        trip_s: Round-trip time to the other node, in seconds.

    Returns:
        PARTS values: for each part of the time, the bits/s of all streams together.

    Raises:
        OSError: A stream broke off.
    """
    rates: list[_Rates] = []  # of each stream, as its receiver reports them
    lead_s = max(LEAD_S, LEAD_TRIPS * trip_s)
    window_s = max(WINDOW_S, WINDOW_TRIPS * trip_s)

    def send() -> None:
        with _connect(address, _FLOOD, lead_s, window_s) as connection:
            begin = time.monotonic()
            while time.monotonic() - begin < lead_s + window_s:
                connection.sendall(_CHUNK)
            connection.shutdown(socket.SHUT_WR)
            rates.append(_RATES.unpack(_receive_exactly(connection, _RATES.size)))
            # The receiver has stopped measuring, but megabytes may still be queued here. A normal close
            # would go on sending them, and disturb the next measurement. A reset drops them.
            linger = _LINGER.pack(1, 0)  # on, for 0 seconds: close() resets the connection
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    _together([send] * streams)  # a thread for each stream
    if len(rates) < streams:
        raise OSError(f"a stream to {address[0]} broke off")
    return tuple(sum(part) for part in zip(*rates))


def _serve(server: socket.socket, streams: int) -> None:
    """Accept `streams` connections from another node, and answer each in a thread."""
    connections = [server.accept()[0] for _ in range(streams)]
    _together([partial(_answer, connection) for connection in connections])


def _answer(connection: socket.socket) -> None:
    """Serve a connection: send each byte back, or measure a stream and send its rates.

    The connection begins with a head. Its first byte, _ECHO or _FLOOD, selects between the two.
    """
    with connection:
        connection.settimeout(PATIENCE_S)
        kind, lead_s, window_s = _HEAD.unpack(_receive_exactly(connection, _HEAD.size))
        if kind == _ECHO:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while connection.recv(1):
                connection.sendall(b"\0")
            return
        rates = _received_rates(connection, lead_s, window_s)
        connection.sendall(_RATES.pack(*rates))
        # The sender ends the connection with a reset.
        with contextlib.suppress(ConnectionResetError):
            _discard(connection)


def _received_rates(connection: socket.socket, lead_s: float, window_s: float) -> list[float]:
    """Receive a stream, and return its bits/s in each of the PARTS equal parts of a time window.

    Args:
        connection: Connection to read the stream from.
        lead_s: Seconds before the window. Nothing is counted in them.
        window_s: Length of the window, in seconds.
    """
    buffer = bytearray(_BUFFER_BYTES)
    window_begin = time.monotonic() + lead_s
    part_s = window_s / PARTS
    received_bytes = [0] * PARTS
    while True:
        size = connection.recv_into(buffer)
        if not size:
            break
        passed_s = time.monotonic() - window_begin
        if passed_s >= window_s:
            break
        if passed_s >= 0:  # the window has begun
            part = min(PARTS - 1, int(passed_s / part_s))  # min(): the division may round up
            received_bytes[part] += size
    return [8 * size / part_s for size in received_bytes]


def _discard(connection: socket.socket) -> None:
    """Receive data and drop it, until the sender closes the connection."""
    buffer = bytearray(_BUFFER_BYTES)
    while connection.recv_into(buffer):
        pass


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    """Return `size` bytes; raise ConnectionError if the connection ends before."""
    data = connection.recv(size, socket.MSG_WAITALL)
    if len(data) < size:
        raise ConnectionError("the other node has gone")
    return data


def _together(calls: Sequence[Callable[[], None]]) -> None:
    """Call functions at the same time in threads, and wait until all have returned."""
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
