"""A network over which nodes can talk."""

from __future__ import annotations

from dataclasses import dataclass, field

ETHERNET = "ethernet"


@dataclass(frozen=True)
class Fabric:
    """A network over which any two of its nodes can talk. rate_bps: bits/s of a node, each way; latency_s:
    seconds; net: NCCL's name of it where a plugin carries it, "auto": NCCL chooses, "": its IB or Socket."""

    name: str
    kind: str
    rate_bps: int
    latency_s: float
    net: str = field(default="", kw_only=True)

    @property
    def preference(self) -> tuple[int, bool, str]:
        """The greatest is the one to use; at equal rates RDMA goes before Ethernet."""
        return self.rate_bps, self.name != ETHERNET, self.name
