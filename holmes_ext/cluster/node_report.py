"""What one node tells the others about itself."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from holmes_ext.cluster.addresses import egress_interface, interface_addresses
from holmes_ext.cluster.nccl import NcclOfNode, nccl_of_node
from holmes_ext.cluster.nic import Nic
from holmes_ext.cluster.sysfs.node import read_nics
from holmes_ext.document import Table


@dataclass(frozen=True)
class NodeReport:
    """name: host name; identity: what no other node can share; ethernet: interface towards the master;
    processes: started there, 0: not known; nccl: what NCCL would find."""

    name: str
    identity: str
    ethernet: str
    nics: tuple[Nic, ...]
    processes: int = 0
    nccl: NcclOfNode = NcclOfNode()

    def to_dict(self) -> dict[str, Any]:
        """Of its NICs what is not as by default: most is, and rank 0 reads those of thousands of nodes."""
        return {**asdict(self), "nics": [nic.to_dict() for nic in self.nics]}

    @classmethod
    def from_dict(cls, document: dict[str, Any], processes: int) -> NodeReport:
        return replace(
            Table(document, f"node {document.get('name')}").into(cls), processes=processes
        )


def node_name(environ: Mapping[str, str]) -> str:
    """HOLMES_NODE, else the host name."""
    return environ.get("HOLMES_NODE") or socket.gethostname()


def sysfs_root(environ: Mapping[str, str]) -> str:
    """HOLMES_SYSFS (the emulated NICs of `holmes lab`, a captured tree), else this machine's."""
    return environ.get("HOLMES_SYSFS") or "/sys"


def lab_scale(environ: Mapping[str, str]) -> float:
    """What carries of each announced rate: in the lab the factor of --scale, 1 elsewhere."""
    return float(environ.get("HOLMES_LAB_SCALE") or 1)


def lab_remark(environ: Mapping[str, str]) -> str:
    """A line for every command that shows NICs inside `holmes lab`; "" elsewhere."""
    scale = f"; they carry {lab_scale(environ):g} x the rates that they announce (--scale)"
    return (
        f"NICs are emulated (holmes lab){scale if lab_scale(environ) != 1 else ''}"
        if environ.get("HOLMES_LAB_NODE")
        else ""
    )


def node_identity() -> str:
    """Boot id and network namespace: two hosts (or pods, or lab nodes) of one name still differ in it."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"


def report_node(environ: Mapping[str, str], master_addr: str) -> NodeReport:
    """This node's report; its NICs from HOLMES_SYSFS (default /sys)."""
    nics = read_nics(sysfs_root(environ), interface_addresses())
    where = node_name(environ), node_identity(), egress_interface(master_addr)
    return NodeReport(*where, nics, nccl=nccl_of_node(environ, nics))
