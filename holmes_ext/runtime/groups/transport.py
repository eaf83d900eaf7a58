"""The NIC for a process group, on the network that the plan has for it.

    gloo   binds to the interface in GLOO_SOCKET_IFNAME at the moment the group is made
    NCCL   takes the network ("IB", which is RoCE too, or "Socket") from the group's own options, config.net_name; which
           HCAs and interface that means is read once in a process, so it is set before the first communicator

One communicator cannot use RDMA and sockets both (NVIDIA/nccl#878), hence one transport for a whole group.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from holmes_ext.cluster.site import ETHERNET, Fabric, Node
from holmes_ext.plan.traffic import LOCAL

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True)
class Transport:
    """fabric: its name, or "local" inside a node; interface: of sockets; net_name: NCCL's, "" to let it choose."""

    fabric: str
    kind: str
    interface: str
    net_name: str


def transport_on(fabric: Fabric | None, here: Node) -> Transport:
    """Of a group whose network the plan says, as node `here` sees it; None: the group lies in one node."""
    if fabric is None:
        return Transport(LOCAL, LOCAL, "lo", "")
    net_name = "Socket" if fabric.kind == "ethernet" else "IB"
    return Transport(fabric.name, fabric.kind, here.port(fabric.name).interface, net_name)


@contextmanager
def gloo_interface(transport: Transport, environ: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """GLOO_SOCKET_IFNAME set for the groups made inside; a value that the user set stays."""
    if environ.get(GLOO_VARIABLE) or not transport.interface:
        yield
        return
    environ[GLOO_VARIABLE] = transport.interface
    try:
        yield
    finally:
        del environ[GLOO_VARIABLE]


def nccl_options(transport: Transport, given: Any, options_class: type) -> Any:
    """Options for one NCCL group: a fresh object with `given`'s settings (None: the defaults) and the net_name.

    A net_name that the user put into `given` stays. Never shared between groups: torch frees the name once for each
    communicator that carries it.
    """
    if given is not None and getattr(given.config, "net_name", None):
        return given
    fresh = options_class()
    if given is not None:
        _copy_settings(given.config, fresh.config)
        _copy_settings(given, fresh, skip={"config"})
    if transport.net_name:
        fresh.config.net_name = transport.net_name
    return fresh


def _copy_settings(source: Any, target: Any, skip: frozenset[str] | set[str] = frozenset()) -> None:
    for name in dir(source):
        value = getattr(source, name)
        if name.startswith("__") or name in skip or callable(value) or value == getattr(target, name):
            continue
        try:
            setattr(target, name, value)
        except AttributeError:  # read-only: the backend's name and the like, the same in both
            continue


def node_environment(here: Node, environ: MutableMapping[str, str]) -> list[str]:
    """Set, once for this node, which HCAs, GID index and socket interface NCCL is to use; returns lines for the user.

    A user's own setting wins, with a line that says so; NCCL_NET, which would override every group's choice, is unset.
    """
    rdma = [port for port in here.ports if port.hcas and port.usable]
    ethernet = here.port(ETHERNET)
    wanted = {"NCCL_SOCKET_IFNAME": f"={ethernet.interface}" if ethernet.interface else ""}
    wanted["NCCL_IB_HCA"] = "=" + ",".join(hca for port in rdma for hca in port.hcas) if rdma else ""
    indices = {port.gid_index for port in rdma if port.gid_index is not None}
    wanted["NCCL_IB_GID_INDEX"] = str(indices.pop()) if len(indices) == 1 else ""
    lines = []
    for name, value in wanted.items():
        if environ.get(name):
            lines.append(f"{name}={environ[name]} was set by you and stays (holmes would use {value or 'none'})")
        elif value:
            environ[name] = value
    if environ.get(GLOO_VARIABLE):
        lines.append(f"{GLOO_VARIABLE}={environ[GLOO_VARIABLE]} was set by you and stays: every gloo group uses it")
    if environ.get("NCCL_NET"):
        lines.append(f"NCCL_NET={environ['NCCL_NET']} is unset: it would override the network chosen for each group")
        del environ["NCCL_NET"]
    return lines
