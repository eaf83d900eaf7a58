"""What TCP carries over a long link: the kernel's limits of a stream's window against bandwidth x round trip.

A stream has at most its window under way in a round trip: rate <= window / round trip (RFC 7323). The window
is what is data of tcp_wmem's (sender) and tcp_rmem's (receiver) maximum; the rest is the kernel's own
bookkeeping. Measured in a lab (1 Gb/s, 80 ms, Linux 6.18): with a wmem of 4 MiB a stream carries 268 Mb/s, of
2 MiB 135; with an rmem of 4 MiB 327 Mb/s, of 2 MiB 164.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from holmes_ext.cluster.wan import Wan
from holmes_ext.units import format_bytes, format_rate, format_seconds

#: Parts of tcp_wmem's and tcp_rmem's maximum that are data under way.
WMEM_SHARE, RMEM_SHARE = 0.64, 0.78
#: Most sockets that NCCL opens for a connection (its documentation: the product of the two variables).
MOST_SOCKETS = 64
#: Part of a link's rate that counts as all of it; the round trip (s) from which an idle window matters.
ENOUGH, LONG_S = 0.9, 5e-3


@dataclass(frozen=True)
class TcpLimits:
    """Of a network namespace. wmem, rmem: maxima in bytes; idle_restart: a window shrinks while its stream is
    idle; paced: BBR, which sends after a pause no faster than what was sent before it arrived."""

    wmem: int
    rmem: int
    idle_restart: bool
    paced: bool = False

    def stream_bps(self, trip_s: float) -> float:
        """What one stream carries at most, bits/s, between two hosts with these limits."""
        window = min(WMEM_SHARE * self.wmem, RMEM_SHARE * self.rmem)
        return 8 * window / trip_s if trip_s else float("inf")


@dataclass(frozen=True)
class Shortfall:
    """A link of which TCP, as it is set, carries less than its rate. rate_bps: of one node, to cluster
    `other`; streams: sockets of a connection; carries_bps: all of them; buffer: bytes that TCP would need."""

    cluster: str
    other: str
    rate_bps: float
    trip_s: float
    streams: int
    stream_bps: float
    limits: TcpLimits

    @property
    def carries_bps(self) -> float:
        return self.streams * self.stream_bps

    @property
    def buffer(self) -> int:
        return 1 << int(self.rate_bps * self.trip_s / 8 / WMEM_SHARE / self.streams).bit_length()

    @property
    def what(self) -> str:
        several = self.streams > 1
        who = (f"{self.streams} sockets of {format_rate(self.stream_bps)} carry" if several
               else "one stream carries")
        link = f"{format_rate(self.rate_bps)} from {self.cluster} to {self.other}"
        wmem, rmem = format_bytes(self.limits.wmem), format_bytes(self.limits.rmem)
        return (f"{who} {format_rate(self.carries_bps)} of the {link}: round trip "
                f"{format_seconds(self.trip_s)}, tcp_wmem {wmem}, tcp_rmem {rmem}")

    @property
    def mend(self) -> str:
        sockets = -(-self.rate_bps // self.stream_bps)
        result = (f'on all nodes: sysctl -w net.ipv4.tcp_wmem="4096 65536 {self.buffer}"'
                  f' net.ipv4.tcp_rmem="4096 131072 {self.buffer}"')
        if 1 < sockets <= MOST_SOCKETS:
            threads = -(-int(sockets) // 8)
            per_thread = -(-int(sockets) // threads)
            result += (f"; or, for NCCL alone, NCCL_SOCKET_NTHREADS={threads} "
                       f"NCCL_NSOCKS_PERTHREAD={per_thread}")
        return result


def read_limits(root: str | Path = "/proc/sys/net/ipv4") -> TcpLimits:
    """Of the caller's network namespace. (BBR keeps its window while a stream is idle.)"""
    wmem, rmem, (restart,), (control,) = (Path(root, f"tcp_{name}").read_text().split() for name in (
        "wmem", "rmem", "slow_start_after_idle", "congestion_control"))
    bbr = control.startswith("bbr")
    return TcpLimits(int(wmem[2]), int(rmem[2]), restart != "0" and not bbr, bbr)


def sockets(environ: Mapping[str, str]) -> int:
    """NCCL's for a connection: NCCL_SOCKET_NTHREADS x NCCL_NSOCKS_PERTHREAD, 1 where unset; gloo has one."""
    values = [environ.get(name, "") for name in ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD")]
    threads, per_thread = (int(text) if text.isdecimal() and int(text) else 1 for text in values)
    return min(MOST_SOCKETS, threads * per_thread)


def shortfalls(wan: Wan, ethernet_bps: float, clusters: Mapping[str, int], here: str, limits: TcpLimits,
               streams: int = 1) -> Iterator[Shortfall]:
    """For a node of cluster `here`, to every other of `clusters` (name -> nodes), when all nodes send."""
    for other in clusters:
        hops = wan.hops(here, other)
        trip = 2 * sum(hop.latency_s for hop in hops)
        senders = max(1, min(clusters[here], clusters[other]))
        rate = min([ethernet_bps, *(hop.rate_bps / senders for hop in hops)])
        stream = limits.stream_bps(trip)
        if streams * stream < ENOUGH * rate:
            yield Shortfall(here, other, rate, trip, streams, stream, limits)
