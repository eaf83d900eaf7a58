"""Measures the network between every two clusters of the running job, by TCP on Ethernet NICs.

    round 1:  a-b  c-d      round 2:  a-c  b-d      round 3:  a-d  b-c      pairs of a round share no uplink

For each pair: round trips of one byte, then one stream of one node, then as many nodes as both have
(MOST_NODES at most) with STREAMS among them. Of a stream what arrives in WINDOW_S (WINDOW_TRIPS round trips
at least) counts, once TCP has had LEAD_S and LEAD_TRIPS round trips to open its window: of PARTS equal parts
of that time the median, so that what piled up behind a lost packet or a busy host and then came at once is no
rate of the link. One process of each node takes part, the others wait. Where streams move PROGRAM_BPS each,
this program may be what bounds them: then the stated rate counts, if it is higher.
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
from typing import Any

from holmes_ext.cluster.fabric import ETHERNET
from holmes_ext.cluster.site import Site
from holmes_ext.cluster.wan import MeasuredPair
from holmes_ext.runtime.session import Session

PINGS, STREAMS, MOST_NODES = 11, 8, 8
LEAD_S, LEAD_TRIPS, WINDOW_S, WINDOW_TRIPS, PARTS = 0.8, 15, 1.0, 10, 10
#: Seconds after which a peer that says nothing has gone.
PATIENCE_S = 60.0
#: A pair whose one-way latency is above this many seconds, or whose nodes together get less than this part of
#: their NICs, is no flat network.
FLAT_S, FLAT_SHARE = 1e-3, 0.8
#: Bits/s of a stream that one thread of Python moves on any server of today.
PROGRAM_BPS = 4e9
_CHUNK = bytes(1 << 18)
_HEAD = struct.Struct("cdd")  # b"p" (echo bytes) or b"f" (flood), lead and window in seconds
_RATES = struct.Struct(f"{PARTS}d")
_Rates = Sequence[float]
_Cluster = Sequence[int]


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """All pairs of `count` clusters, by round: none is in two pairs of a round (the circle method)."""
    circle: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    schedule = []
    for _ in range(len(circle) - 1):
        pairs = [(circle[place], circle[-1 - place]) for place in range(len(circle) // 2)]
        schedule.append(
            sorted((min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None)
        )
        circle.insert(1, circle.pop())
    return schedule


def is_flat(site: Site, pairs: Sequence[MeasuredPair]) -> bool:
    """Whether the pairs show no more than the nodes' NICs."""
    count = {name: sum(node.cluster == name for node in site.nodes) for name in site.clusters}
    nodes = [min(MOST_NODES, *(count[name] for name in pair.clusters)) for pair in pairs]
    nic = site.fabric_by_name[ETHERNET].rate_bps
    least = [FLAT_SHARE * nic * number for number in nodes]
    return all(
        pair.latency_s <= FLAT_S and pair.rate_bps >= rate for pair, rate in zip(pairs, least)
    )


def streams_of(nodes: int) -> int:
    """Streams of each of `nodes` nodes that send at once."""
    return max(1, STREAMS // max(1, nodes))


def stated_bps(site: Site, source: str, target: str, nodes: int) -> float:
    """What the file says that `nodes` nodes of cluster `source` together get to `target`."""
    nics = nodes * site.fabric_by_name[ETHERNET].rate_bps
    return min([nics, *(hop.rate_bps for hop in site.wan.hops(source, target))])


def measure(
    session: Session, tell: Callable[[str], None] = lambda text: None
) -> tuple[MeasuredPair, ...]:
    """Every pair of clusters, alike on all ranks (all call it); () for one cluster. OSError: no answer."""
    import torch.distributed as dist

    site, plan = session.site, session.plan
    rank, node = dist.get_rank(), plan.nodes[dist.get_rank() // plan.processes]
    first = {name: index * plan.processes for index, name in enumerate(plan.nodes)}
    clusters = [
        [first[name] for name in plan.nodes if site.node_by_name[name].cluster == cluster]
        for cluster in site.clusters
    ]
    if len(clusters) < 2:
        return ()
    server = socket.create_server(
        (site.node_by_name[node].port(ETHERNET).address, 0), backlog=2 * STREAMS
    )
    server.settimeout(PATIENCE_S)
    addresses: list = [None] * dist.get_world_size()
    dist.all_gather_object(addresses, server.getsockname()[:2])
    measured, my_results = [], []
    for number, pairs in enumerate(schedule := rounds(len(clusters)), start=1):
        listed = ", ".join(f"{site.clusters[a]}-{site.clusters[b]}" for a, b in pairs)
        tell(f"round {number} of {len(schedule)} between the clusters: {listed}")
        sides = next(
            ((clusters[a], clusters[b]) for a, b in pairs if rank in (*clusters[a], *clusters[b])),
            None,
        )
        my_results.append(_pair(rank, sides, server, addresses, dist.barrier))
    all_results: list = [None] * dist.get_world_size()
    dist.all_gather_object(all_results, my_results)
    for number, pairs in enumerate(schedule):
        for a, b in pairs:
            ends = list(zip(clusters[a], clusters[b]))[:MOST_NODES]
            trip, stream, _ = all_results[ends[0][0]][number]
            together = _median([all_results[sender][number][2] for sender, _ in ends])
            names = site.clusters[a], site.clusters[b]
            if together >= PROGRAM_BPS * len(ends) * streams_of(len(ends)):
                together = max(together, stated_bps(site, *names, len(ends)))
            measured.append(MeasuredPair(names, round(together), trip / 2, round(stream)))
    server.close()
    return tuple(
        sorted(measured, key=lambda pair: [site.clusters.index(name) for name in pair.clusters])
    )


def _pair(
    rank: int,
    sides: tuple[_Cluster, _Cluster] | None,
    server: socket.socket,
    addresses: Sequence[Any],
    barrier: Callable[[], object],
) -> tuple[float, float, _Rates]:
    """(seconds of a round trip, bits/s of one stream, of all this sender's in each part of the time), 0 where
    not measured. All ranks pass the same barriers."""
    ends = list(zip(*sides))[:MOST_NODES] if sides else []
    receiver = next((there for here, there in ends if here == rank), None)
    receives = rank in [there for _, there in ends]
    leads = bool(ends) and rank in ends[0]
    trip, results = 0.0, []
    if receiver is not None:
        trip = _ping(addresses[receiver])
    elif receives:
        _serve(server, 1)
    for streams, part in ((1, leads), (streams_of(len(ends)), True)):
        barrier()
        if part and receiver is not None:
            results.append(_flood(addresses[receiver], streams, trip))
        elif part and receives:
            _serve(server, streams)
    barrier()
    stream = _median(results[:1]) if leads else 0.0
    return trip, stream, results[-1] if results else (0.0,) * PARTS


def _median(rates: Sequence[_Rates]) -> float:
    """Bits/s of these together, over the parts of the time; their mean where most parts brought nothing."""
    together = [float(sum(part)) for part in zip(*rates)] or [0.0]
    return statistics.median(together) or statistics.mean(together)


def _connect(
    address: tuple[str, int], kind: bytes, lead: float = 0.0, window: float = 0.0
) -> socket.socket:
    connection = socket.create_connection(address, timeout=PATIENCE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(_HEAD.pack(kind, lead, window))
    return connection


def _ping(address: tuple[str, int]) -> float:
    with _connect(address, b"p") as connection:
        times = []
        for _ in range(PINGS):
            begin = time.perf_counter()
            connection.sendall(b"\0")
            connection.recv(1)
            times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def _flood(address: tuple[str, int], streams: int, trip: float) -> _Rates:
    """Bits/s of all the streams that arrived, in each part of the time; trip: seconds there and back."""
    rates: list[_Rates] = []
    lead, window = max(LEAD_S, LEAD_TRIPS * trip), max(WINDOW_S, WINDOW_TRIPS * trip)

    def send() -> None:
        with _connect(address, b"f", lead, window) as connection:
            begin = time.monotonic()
            while time.monotonic() - begin < lead + window:
                connection.sendall(_CHUNK)
            connection.shutdown(socket.SHUT_WR)
            rates.append(_RATES.unpack(_exactly(connection, _RATES.size)))
            # What is still queued here is dropped; the reset comes when what is on its way has arrived.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    _together([send] * streams)
    if len(rates) < streams:
        raise OSError(f"a stream to {address[0]} broke off")
    return tuple(map(sum, zip(*rates)))


def _serve(server: socket.socket, streams: int) -> None:
    connections = [server.accept()[0] for _ in range(streams)]
    _together([partial(_answer, connection) for connection in connections])


def _answer(connection: socket.socket) -> None:
    with connection:
        connection.settimeout(PATIENCE_S)
        kind, lead, window = _HEAD.unpack(_exactly(connection, _HEAD.size))
        if kind == b"p":
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while connection.recv(1):
                connection.sendall(b"\0")
            return
        buffer, begin = bytearray(1 << 20), time.monotonic() + lead
        part_s, counted = window / PARTS, [0] * PARTS
        while (size := connection.recv_into(buffer)) and (
            passed := time.monotonic() - begin
        ) < window:
            if passed >= 0:
                counted[min(PARTS - 1, int(passed / part_s))] += size
        connection.sendall(_RATES.pack(*(8 * size / part_s for size in counted)))
        with contextlib.suppress(ConnectionResetError):  # how the sender ends it
            while connection.recv_into(buffer):
                pass


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = connection.recv(size, socket.MSG_WAITALL)
    if len(data) < size:
        raise ConnectionError("the other node has gone")
    return data


def _together(calls: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
