"""Defines a fabric (a network that connects some nodes), and the meaning of NCCL's network names.

A fabric is, for example, the InfiniBand of one cluster. NCCL's networks are its own, "IB" and
"Socket", and those of network plugins, such as "Libfabric".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase

ETHERNET = "ethernet"
#: Networks that NCCL has without a plugin, in lower case.
BUILT_IN_NETWORKS = ("ib", "socket")
#: Names, in lower case, that releases of one plugin (aws-ofi-nccl) use for the same network. The
#: plugin takes the name in NCCL_NET if it is among them, else its first.
_SAME_NETWORK = frozenset({"libfabric", "aws libfabric", "ofi"})
#: Beginning of the name in the file of nccl-rdma-sharp-plugins, which changes it when it starts.
_PROVISIONAL_NAME = "nccl rdma plugin"
#: Pattern of a network's name in lower case -> kinds of NICs that the network uses.
_KINDS_OF_NETWORK = {
    "libfabric": ("efa", "slingshot", "opa"),
    "aws libfabric": ("efa", "slingshot", "opa"),
    "ofi": ("efa", "slingshot", "opa"),
    "fastrak": ("gvnic",),
    "gpudirecttcpx*": ("gvnic",),
    "gib": ("roce",),
    "ibext*": ("ib", "roce"),
    "nccl rdma plugin*": ("ib", "roce"),
    "ucx*": ("ib", "roce"),
    "psm*": ("opa",),
}


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
    def preference(self) -> tuple[int, bool, float, str]:
        """Return a sort key that is greatest for the fabric to prefer.

        The faster fabric is preferred. At equal rates RDMA goes before Ethernet, then the fabric
        with the lower latency; the name decides between fabrics that are equal in all of these.
        """
        return self.rate_bps, self.name != ETHERNET, -self.latency_s, self.name


def is_built_in(network: str) -> bool:
    """Return whether a network of NCCL, such as "IB" or "Socket", works without a network plugin."""
    return network.lower() in BUILT_IN_NETWORKS


def is_same_network(name: str, other: str) -> bool:
    """Return whether two names mean the same network. NCCL compares names without case.

    "Libfabric", "AWS Libfabric" and "OFI" are names of the same network in releases of
    aws-ofi-nccl.
    """
    names = {name.lower(), other.lower()}
    return len(names) == 1 or names <= _SAME_NETWORK


def kinds_of_network(network: str) -> tuple[str, ...]:
    """Return the kinds of NICs that the network of a plugin uses, () if its name is not known."""
    for pattern, kinds in _KINDS_OF_NETWORK.items():
        if fnmatchcase(network.lower(), pattern):
            return kinds
    return ()


def is_provisional(network: str) -> bool:
    """Return whether a plugin's network has this name in the plugin's file, and another when it runs.

    The file of nccl-rdma-sharp-plugins has the name "NCCL RDMA Plugin v10". When the plugin starts, it
    changes the name to "IBext_v10" or "UCX".
    """
    return network.lower().startswith(_PROVISIONAL_NAME)
