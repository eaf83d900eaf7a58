"""Defines a fabric: a network that connects some nodes, such as the InfiniBand of one cluster."""

from __future__ import annotations

from dataclasses import dataclass, field

ETHERNET = "ethernet"


@dataclass(frozen=True)
class Fabric:
    """Network over which any two attached nodes can communicate."""

    name: str
    kind: str  # kind of the NICs: "ib", "roce", "ethernet" or an extension's
    rate_bps: int  # bits/s of one node, in each direction
    latency_s: float
    #: NCCL's name of the network if an NCCL plugin provides it. "auto" leaves the choice to NCCL;
    #: "" stands for NCCL's built-in "IB" or "Socket", depending on the kind.
    net: str = field(default="", kw_only=True)

    @property
    def preference(self) -> tuple[int, bool, str]:
        """Return a sort key that is greatest for the fabric to prefer.

        The faster fabric is preferred; at equal rates RDMA goes before Ethernet.
        """
        return self.rate_bps, self.name != ETHERNET, self.name
