"""How long a message takes on a fabric: a curve through measured sizes, or its rate and latency.

    seconds                    /
       |                     /      slope -> 8 / rate_bps, for large messages
       |          __________/
       |_________/                  small ones cost what they cost, whatever their size
       +--------------------------- bytes

A message is a fixed part, which nothing shares, and a flow of its bits, which shares a NIC with others
(planner/simulate/events.py): fixed_s(size) + 8 size / rate_bps = seconds(size).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import ceil

from holmes_ext.cluster.fabric import Fabric
from holmes_ext.cluster.site import Site, fabrics_of_spec
from holmes_ext.cluster.spec import SiteSpec
from holmes_ext.cluster.wan import Between
from holmes_ext.errors import HolmesError

#: What the cores that all nodes of a lab share are called among the NICs.
CORES = "cores"


@dataclass(frozen=True)
class Curve:
    """Seconds of a message by its bytes. points: (bytes, seconds), by bytes; without them latency and rate
    say everything. Between two points the line through them; below the first its seconds (never less); beyond
    the last the rate of the last."""

    rate_bps: float
    latency_s: float = 0.0
    points: tuple[tuple[float, float], ...] = ()
    source: str = "link curve"

    def __post_init__(self) -> None:
        if not 0 < self.rate_bps < 1e18 or not 0 <= self.latency_s < 1e6:
            problem = f"{self.source}: rate {self.rate_bps} b/s, latency {self.latency_s} s"
            raise HolmesError(
                f"{problem}; the rate must be above 0, the latency 0 or more, both finite"
            )
        before = (0.0, 0.0)
        for size, seconds in self.points:
            if not before[0] < size < 1e18 or not max(before[1], 1e-300) <= seconds < 1e6:
                problem = (
                    f"{self.source}: {size:g} bytes in {seconds:g} s after {before[0]:g} bytes in "
                    f"{before[1]:g} s"
                )
                raise HolmesError(f"{problem}; sizes and times must be above 0, and increase")
            before = size, seconds

    def seconds(self, size: float) -> float:
        """Of a message of `size` bytes that has the link for itself; 0 for nothing."""
        if size <= 0:
            return 0.0
        if not self.points:
            return self.latency_s + 8 * size / self.rate_bps
        place = bisect_left(self.points, (size, 0.0))
        if place == 0:
            return self.points[0][1]
        low, start = self.points[place - 1]
        if place == len(self.points):
            return start + 8 * (size - low) / self.rate_bps
        high, end = self.points[place]
        return start + (end - start) * (size - low) / (high - low)

    def fixed_s(self, size: float) -> float:
        """What `seconds` holds besides the bits at rate_bps."""
        return max(0.0, self.seconds(size) - 8 * size / self.rate_bps)

    @property
    def least_s(self) -> float:
        """The latency with which, at rate_bps, no message takes longer than its seconds here."""
        return min((self.fixed_s(size) for size, _ in self.points), default=self.latency_s)

    def scaled(self, factor: float) -> Curve:
        """The same with `factor` times the rate."""
        rate = factor * self.rate_bps
        points = tuple((size, self.fixed_s(size) + 8 * size / rate) for size, _ in self.points)
        return replace(self, rate_bps=rate, points=points)


def fit(samples: Iterable[tuple[float, float]], source: str = "link curve") -> Curve:
    """The curve through measured (bytes, seconds). Seconds are made to grow (the least of what follows
    counts); rate: between the last two sizes, at most a tenth above the last one's own."""
    points: list[tuple[float, float]] = []
    floor = float("inf")
    for size, seconds in sorted(samples, reverse=True):
        floor = min(floor, seconds)
        points.insert(0, (float(size), floor))
    if len(points) < 2 or points[0][0] <= 0 or points[0][1] <= 0:
        raise HolmesError(f"{source}: a curve needs two or more points, sizes and times above 0")
    (low, start), (high, end) = points[-2:]
    last_bps = 8 * high / end
    rate = min(8 * (high - low) / (end - start), 1.1 * last_bps) if end > start else last_bps
    return Curve(max(rate, last_bps), points[0][1], tuple(points), source)


@dataclass(frozen=True)
class Link:
    """A fabric as the simulation sees it. send: one message between two nodes; ring: one step of a ring of
    all-reduces, bytes being those that one rank passes on (size / ranks), of which an all-reduce makes 2
    (ranks - 1). host_s: CPU seconds of a byte sent, at both ends together, where nodes share their cores (a
    lab); elsewhere the curves hold them."""

    name: str
    send: Curve
    ring: Curve
    host_s: float = 0.0

    @classmethod
    def of(cls, fabric: Fabric) -> Link:
        curve = Curve(fabric.rate_bps, fabric.latency_s, source=f"fabric {fabric.name}")
        return cls(fabric.name, curve, curve)

    @property
    def rate_bps(self) -> float:
        return max(self.send.rate_bps, self.ring.rate_bps)

    def scaled(self, factor: float) -> Link:
        return replace(self, send=self.send.scaled(factor), ring=self.ring.scaled(factor))


@dataclass(frozen=True)
class Links:
    """Measured links by fabric name; a fabric that is not here has its rate and latency from cluster.toml.
    pairs: of clusters, in place of their [[between]].

    What gloo's other operations take of shared cores: host_message_s: CPU seconds of a message of a
    hierarchical
    sum (runtime/reduce/direct.py: a call and a thread at both ends) besides its bytes; host_gather,
    host_scatter: those of a byte that is gathered or scattered, to an all-reduced one's (their tensors are
    copied in and out)."""

    measured: Mapping[str, Link] = field(default_factory=dict)
    pairs: tuple[Between, ...] = ()
    host_message_s: float = 0.0
    host_gather: float = 1.0
    host_scatter: float = 1.0

    def of(self, fabric: Fabric) -> Link:
        return self.measured.get(fabric.name) or Link.of(fabric)

    def line(self, fabric: Fabric) -> Fabric:
        """`fabric` with a rate and a latency under both curves: no closed form is slower than they are."""
        if fabric.name not in self.measured:
            return fabric
        link = self.measured[fabric.name]
        return replace(
            fabric,
            rate_bps=ceil(link.rate_bps),
            latency_s=min(link.send.least_s, link.ring.least_s),
        )

    def site(self, site: Site) -> Site:
        """`site` for predictions in closed form: line() in place of what cluster.toml states."""
        return replace(
            site, fabrics=tuple(map(self.line, site.fabrics)), wan=site.wan.measured(self.pairs)
        )

    def on_cores(
        self, fabric: Fabric, senders: float, messages: float = 0.0
    ) -> tuple[tuple[str, float], ...]:
        """(CORES, bit/s of core_bps for each bit/s) of a flow that `senders` nodes send at once, if it uses
        shared cores. messages: of a hierarchical sum, for each byte."""
        seconds = self.of(fabric).host_s * senders + self.host_message_s * messages
        return ((CORES, seconds / 8 * self.core_bps),) if seconds else ()

    @property
    def core_bps(self) -> float:
        """Bits/s that keep a core busy, on the fabric where a byte costs it least; 1 where none does."""
        return max((8 / link.host_s for link in self.measured.values() if link.host_s), default=1.0)

    def scaled(self, name: str, factor: float) -> Links:
        """What-if: the link `name` with `factor` times its measured rate."""
        changed = {
            key: link.scaled(factor) if key == name else link for key, link in self.measured.items()
        }
        return replace(self, measured=changed)

    @classmethod
    def of_spec(cls, spec: SiteSpec) -> Links:
        """What `holmes probe` wrote to cluster.toml; a ring that was not measured is like single messages."""
        measured = {}
        for fabric in fabrics_of_spec(spec):
            points = spec.links.get(fabric.name)
            if points and (points.send or points.ring):
                where = f"{spec.source}: key 'link.{fabric.name}'"
                send = fit(points.send or points.ring, where)
                ring = fit(points.ring or points.send, where)
                measured[fabric.name] = Link(fabric.name, send, ring)
        return cls(measured, spec.pairs)
