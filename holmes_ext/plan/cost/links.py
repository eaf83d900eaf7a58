"""Time of a message on a fabric: a curve through measured sizes, or a rate and a latency.

    seconds                    /
       |                     /      slope -> 8 / rate_bps, for large messages
       |          __________/
       |_________/                  a small message takes the same time, whatever its size
       +--------------------------- bytes

The simulation (planner/simulate/events.py) divides this time into a fixed part, and the time of the bits at
the NIC's rate. Only the latter is longer if other messages use the NIC:

    seconds(size) = fixed_s(size) + 8 size / rate_bps
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

#: Name, among the NICs, of the CPU cores that all nodes of a lab share.
CORES = "cores"
#: Rates in bits/s, and sizes in bytes, that are too large to be true.
_TOO_LARGE = 1e18
_TOO_LONG_S = 1e6
_SHORTEST_S = 1e-300  # above 0
#: Largest rate of a fitted curve, as a multiple of the rate of the largest message.
_MOST_ABOVE_LAST = 1.1
#: Least number of points of a fitted curve: its slope, 8 / rate, is that between the last two.
_LEAST_POINTS = 2


@dataclass(frozen=True)
class Curve:
    """Time of a message by its size, for a message that has the link for itself.

    Between two measured points the curve is a straight line. Below the first point the time is constant, and
    beyond the last point it grows at rate_bps. Without points, latency and rate define the curve.
    """

    rate_bps: float  # bits/s of large messages
    latency_s: float = 0.0
    points: tuple[tuple[float, float], ...] = ()  # (bytes, seconds), both increasing
    source: str = "link curve"  # for messages

    def __post_init__(self) -> None:
        """Raise HolmesError if rate or latency is out of range, or if the points do not increase."""
        if not 0 < self.rate_bps < _TOO_LARGE or not 0 <= self.latency_s < _TOO_LONG_S:
            problem = f"{self.source}: rate {self.rate_bps} b/s, latency {self.latency_s} s"
            raise HolmesError(
                f"{problem}; the rate must be above 0, the latency 0 or more, both finite"
            )
        last_size = last_s = 0.0
        for size, seconds in self.points:
            is_size_greater = last_size < size < _TOO_LARGE
            is_time_valid = max(last_s, _SHORTEST_S) <= seconds < _TOO_LONG_S
            if not is_size_greater or not is_time_valid:
                problem = (
                    f"{self.source}: {size:g} bytes in {seconds:g} s after {last_size:g} bytes in "
                    f"{last_s:g} s"
                )
                raise HolmesError(f"{problem}; sizes and times must be above 0, and increase")
            last_size = size
            last_s = seconds

    def seconds(self, size: float) -> float:
        """Return the seconds that a message of `size` bytes takes; 0 for no bytes."""
        if size <= 0:
            return 0.0
        if not self.points:
            return self.latency_s + 8 * size / self.rate_bps
        following = bisect_left(self.points, (size, 0.0))  # first point with at least this size
        if following == 0:
            return self.points[0][1]
        low, low_s = self.points[following - 1]
        if following == len(self.points):
            return low_s + 8 * (size - low) / self.rate_bps
        high, high_s = self.points[following]
        return low_s + (high_s - low_s) * (size - low) / (high - low)

    def fixed_s(self, size: float) -> float:
        """Return the part of a message's time that does not shrink at a higher rate, in seconds.

        It is the time of the message without that of its bits at rate_bps.
        """
        return max(0.0, self.seconds(size) - 8 * size / self.rate_bps)

    @property
    def least_s(self) -> float:
        """Return the least fixed part of a message's time over all measured sizes, in seconds.

        least_s + 8 size / rate_bps is at most seconds(size), for every measured size.
        """
        return min((self.fixed_s(size) for size, _ in self.points), default=self.latency_s)

    def scaled(self, factor: float) -> Curve:
        """Return a copy of this curve for a link with `factor` times the rate."""
        rate = factor * self.rate_bps
        points = tuple((size, self.fixed_s(size) + 8 * size / rate) for size, _ in self.points)
        return replace(self, rate_bps=rate, points=points)


def fit(samples: Iterable[tuple[float, float]], source: str = "link curve") -> Curve:
    """Fit a curve of time by size through measured messages.

    A larger message cannot truly be faster. So if one was measured to be faster, its time also counts for
    the smaller messages. The rate of large messages is the slope between the two largest sizes, but at
    most 10 % above bits / seconds of the largest.

    Args:
        samples: (bytes, seconds) of each message.
        source: Name of the samples in error messages.

    Raises:
        HolmesError: There are less than two samples, or a size or time is not above 0.
    """
    points: list[tuple[float, float]] = []  # ascending
    least_s = float("inf")  # of this message and all larger ones
    for size, seconds in sorted(samples, reverse=True):
        least_s = min(least_s, seconds)
        points.insert(0, (float(size), least_s))
    if len(points) < _LEAST_POINTS or points[0][0] <= 0 or points[0][1] <= 0:
        raise HolmesError(f"{source}: a curve needs two or more points, sizes and times above 0")
    (low, low_s), (high, high_s) = points[-2:]  # the two largest messages
    last_bps = 8 * high / high_s  # contains the latency, so the true rate is not below it
    rate_bps = last_bps
    if high_s > low_s:
        slope_bps = 8 * (high - low) / (high_s - low_s)
        # Two measurements with small errors can have a slope that is far too steep.
        rate_bps = min(slope_bps, _MOST_ABOVE_LAST * last_bps)
    smallest_message_s = points[0][1]
    return Curve(
        rate_bps=max(rate_bps, last_bps),
        latency_s=smallest_message_s,  # nearly all of this time is latency
        points=tuple(points),
        source=source,
    )


@dataclass(frozen=True)
class Link:
    """Times of a message between two nodes on a fabric (such as InfiniBand or Ethernet)."""

    name: str  # of the fabric
    send: Curve  # a single message between two nodes
    #: A step of a ring all-reduce (it has 2 (ranks - 1)), by the bytes that a rank passes on: size / ranks.
    ring: Curve
    #: CPU seconds of a byte, at both ends together, if the nodes share their cores (a lab). On other clusters
    #: the curves contain this time.
    host_s: float = 0.0

    @classmethod
    def of(cls, fabric: Fabric) -> Link:
        """Return a link with the rate and latency of a fabric that was not measured."""
        curve = Curve(fabric.rate_bps, fabric.latency_s, source=f"fabric {fabric.name}")
        return cls(fabric.name, curve, curve)

    @property
    def rate_bps(self) -> float:
        """Return the rate of large messages, in bits/s."""
        return max(self.send.rate_bps, self.ring.rate_bps)

    def scaled(self, factor: float) -> Link:
        """Return a copy of this link with `factor` times the rate."""
        return replace(self, send=self.send.scaled(factor), ring=self.ring.scaled(factor))


@dataclass(frozen=True)
class Links:
    """Measured times of messages on the fabrics of a site, and on the links between its clusters.

    `holmes probe` measures them. Fabrics and links without measurement are as cluster.toml describes them.
    """

    #: Name of a fabric -> its link. A fabric that is missing has the rate and latency of cluster.toml.
    measured: Mapping[str, Link] = field(default_factory=dict)
    pairs: tuple[Between, ...] = ()  # measured links between clusters, in place of [[between]]
    #: CPU seconds of a message of a hierarchical all-reduce over gloo, besides its bytes: a call and a thread
    #: at both ends (runtime/reduce/direct.py).
    host_message_s: float = 0.0
    #: CPU seconds of a byte that is gathered or scattered, relative to an all-reduced byte. These collectives
    #: copy their tensors.
    host_gather: float = 1.0
    host_scatter: float = 1.0

    def of(self, fabric: Fabric) -> Link:
        """Return the message times of a fabric, as measured or as cluster.toml describes it."""
        return self.measured.get(fabric.name) or Link.of(fabric)

    def line(self, fabric: Fabric) -> Fabric:
        """Return a copy of `fabric` with a rate and a latency that no measured message beats.

        They define a straight line below the measured curves of time by size. So times computed
        from these two numbers are lower bounds.
        """
        if fabric.name not in self.measured:
            return fabric
        link = self.measured[fabric.name]
        # The largest rate and the least latency of both curves: the line lies below both.
        return replace(
            fabric,
            rate_bps=ceil(link.rate_bps),
            latency_s=min(link.send.least_s, link.ring.least_s),
        )

    def site(self, site: Site) -> Site:
        """Return a copy of `site` with measured rates and latencies, for predictions in closed form."""
        fabrics = tuple(map(self.line, site.fabrics))
        return replace(site, fabrics=fabrics, wan=site.wan.measured(self.pairs))

    def on_cores(
        self, fabric: Fabric, senders: float, messages: float = 0.0
    ) -> tuple[tuple[str, float], ...]:
        """Return how much a flow uses the CPU cores that all nodes of a lab share.

        In a lab, all emulated nodes run on a single machine, so copying bytes costs CPU time that all of
        them share. The simulation treats the cores like a NIC with a rate of `core_bps`.

        Args:
            fabric: Fabric of the flow.
            senders: Number of nodes that send the flow at the same time.
            messages: Messages that a hierarchical all-reduce sends, from all nodes, for each byte
                of the flow; each message costs CPU time beyond that of its bytes.

        Returns:
            ((CORES, use),), or () if the flow uses no cores. Each bit/s of the flow occupies `use`
            bits/s of the rate `core_bps`. Example: at use 2, a flow of 1 Gbit/s occupies 2 Gbit/s.
        """
        # CPU seconds for each byte of the flow. Each sender copies its own bytes; `messages` already
        # counts the messages of all senders.
        copy_s = self.of(fabric).host_s * senders
        cpu_byte_s = copy_s + self.host_message_s * messages
        if not cpu_byte_s:
            return ()
        cpu_bit_s = cpu_byte_s / 8
        return ((CORES, cpu_bit_s * self.core_bps),)

    @property
    def core_bps(self) -> float:
        """Return the rate, in bits/s, at which a CPU core copies bytes of the fabric that it copies fastest.

        The simulation treats a core as a NIC with this rate. If no fabric uses shared cores, the
        rate does not matter, and the result is 1.
        """
        return max((8 / link.host_s for link in self.measured.values() if link.host_s), default=1.0)

    def scaled(self, name: str, factor: float) -> Links:
        """Return a copy of these links in which the fabric `name` has `factor` times the rate."""
        if name not in self.measured:
            return self
        changed = {**self.measured, name: self.measured[name].scaled(factor)}
        return replace(self, measured=changed)

    @classmethod
    def of_spec(cls, spec: SiteSpec) -> Links:
        """Return the measurements of `holmes probe` that a cluster.toml contains.

        Every fabric has two curves of time by size: of single messages, and of the messages of a
        ring. If only the first or the second was measured, it stands for the other, too.
        """
        measured = {}
        for fabric in fabrics_of_spec(spec):
            points = spec.links.get(fabric.name)
            if points and (points.send or points.ring):
                source = f"{spec.source}: key 'link.{fabric.name}'"
                # Curves through the (bytes, seconds) of measured messages.
                send = fit(points.send or points.ring, source)
                ring = fit(points.ring or points.send, source)
                measured[fabric.name] = Link(fabric.name, send, ring)
        return cls(measured, spec.pairs)
