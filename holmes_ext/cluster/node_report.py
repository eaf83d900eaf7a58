"""What one node tells the others about itself."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holmes_ext.cluster.addresses import egress_interface, interface_addresses
from holmes_ext.cluster.nic import Nic
from holmes_ext.cluster.sysfs.node import read_nics


@dataclass(frozen=True)
class NodeReport:
    """name: host name; identity: what no other node can share; ethernet: interface by which the node reaches the master."""

    name: str
    identity: str
    ethernet: str
    nics: tuple[Nic, ...]
    processes: int = 0

    def to_dict(self) -> dict[str, Any]:
        nics = [nic.to_dict() for nic in self.nics]
        return {"name": self.name, "identity": self.identity, "ethernet": self.ethernet, "nics": nics}

    @classmethod
    def from_dict(cls, document: dict[str, Any], processes: int) -> NodeReport:
        nics = tuple(Nic.from_dict(nic, where=f"node {document['name']}") for nic in document["nics"])
        return cls(document["name"], document["identity"], document["ethernet"], nics, processes)


def node_name(environ: Mapping[str, str]) -> str:
    """HOLMES_NODE, else the host name."""
    return environ.get("HOLMES_NODE") or socket.gethostname()


def short_name(host: str) -> str:
    """The host name up to its first dot: as one file says "gpu01" and one machine "gpu01.site.org"."""
    return host.split(".")[0]


def node_identity() -> str:
    """Boot id and network namespace: two hosts (or pods, or lab nodes) of one name still differ in it."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"


def report_node(environ: Mapping[str, str], master_addr: str) -> NodeReport:
    """This node's report; its NICs from HOLMES_SYSFS (default /sys)."""
    nics = read_nics(environ.get("HOLMES_SYSFS") or "/sys", interface_addresses())
    return NodeReport(node_name(environ), node_identity(), egress_interface(master_addr), nics)
