"""The NIC for a process group, on the network that the plan has for it.

    gloo   binds to the interface in GLOO_SOCKET_IFNAME at the moment the group is made
    NCCL   takes the network ("IB", which is RoCE too, or "Socket") from the group's own options,
           config.net_name; which HCAs and interface that means is read once in a process, so it
           is set before the first communicator

One communicator cannot use RDMA and sockets both (NVIDIA/nccl#878), hence one transport for a whole group.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from holmes_ext.cluster.nccl import SHARED, file_settings, network_name, variables_of
from holmes_ext.cluster.site import Fabric, Node
from holmes_ext.errors import HolmesError
from holmes_ext.plan.traffic import LOCAL
from holmes_ext.runtime.groups.backend import options_of

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"


#: Communicators that share a parent's resources (ncclConfig_t.splitShare) have its network: ncclCommSplit
#: refuses another with ncclInvalidUsage.
_OF_ONE_NETWORK = frozenset({"net_name", "split_share"})


@dataclass(frozen=True)
class Transport:
    """fabric: its name, or "local"; interface: of sockets; net_name: NCCL's, "" to let it choose."""

    fabric: str
    kind: str
    interface: str
    net_name: str


def transport_on(fabric: Fabric | None, here: Node) -> Transport:
    """Of a group whose network the plan says, as node `here` sees it; None: the group lies in one node."""
    if fabric is None:
        return Transport(LOCAL, LOCAL, "lo", "")
    return Transport(fabric.name, fabric.kind, here.port(fabric.name).interface, network_name(fabric))


def as_made(
    planned: Transport, here: Node, backend: str, fabrics: Mapping[str, Fabric], options: Any = None,
    environ: Mapping[str, str] = os.environ,
) -> Transport:
    """`planned`, or what the user's GLOO_SOCKET_IFNAME, or net_name in NCCL's `options`, makes of it."""
    if planned.fabric == LOCAL:
        return planned
    if backend == "gloo" and (given := environ.get(GLOO_VARIABLE, planned.interface)) != planned.interface:
        named = (port for port in here.ports if port.interface in given.split(","))
        port = next(named, None)  # None: which network that is, nobody knows
        return Transport(port.fabric, fabrics[port.fabric].kind, given, "") if port is not None else planned
    net = getattr(options.config, "net_name", None) if backend == "nccl" and options is not None else None
    if net and planned.net_name and net != planned.net_name:
        fast = next((port.fabric for port in here.ports if network_name(fabrics[port.fabric]) == net), net)
        return Transport(fast, fabrics[fast].kind if fast in fabrics else "", "", net)
    return planned


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


def nccl_options(
    transport: Transport, given: Any, options_class: type, timeout: Any = None, parent: Any = None
) -> Any:
    """For one NCCL group: a fresh object with the settings of `given` (None: of `parent`, which is split, or
    the defaults), the net_name (one in `given` stays), and the timeout. Never shared: torch frees the name
    once for each communicator."""
    if given is not None and getattr(given.config, "net_name", None):
        return given
    fresh, settings = options_class(), parent if given is None else given
    if settings is not None:
        _copy_settings(settings.config, fresh.config, skip=_OF_ONE_NETWORK)
        _copy_settings(settings, fresh, skip={"config"})
    if transport.net_name:
        fresh.config.net_name = transport.net_name
    if timeout is not None:
        fresh._timeout = timeout
    return fresh


def settings_of(group: Any) -> Any:
    """Fresh, with the NCCL group's settings, for a group of its own network and members."""
    from torch.distributed import ProcessGroupNCCL

    fresh, options = ProcessGroupNCCL.Options(), options_of(group)
    _copy_settings(options.config, fresh.config, skip=_OF_ONE_NETWORK)
    fresh.is_high_priority_stream = options.is_high_priority_stream
    return fresh


def refuse_forced(transport: Transport, forced_nets: Mapping[str, str]) -> None:
    """HolmesError where a file of NCCL's forces another network: it sets NCCL_NET again and again."""
    for net, file in forced_nets.items():
        if transport.net_name and net.lower() != transport.net_name.lower():
            raise HolmesError(
                f"NCCL_NET={net} in {file} overrides the network of every group, and a group on "
                f"{transport.fabric} is planned over {transport.net_name}; take the line out of the file"
            )


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
    """Set, once for this node, NCCL's HCAs, GID index and socket interface; returns lines for the user, whose
    own settings win. NCCL_NET, which would override every group's choice, is unset."""
    lines, in_files = [], file_settings(environ)
    for name, value in variables_of(here).items():
        if environ.get(name):
            lines.append(
                f"{name}={environ[name]} was set by you and stays (holmes would use {value or 'none'})")
        elif name in in_files:
            given, file = in_files[name]
            lines.append(f"{name}={given} is set in {file} and stays (holmes would use {value or 'none'})")
        elif value:
            environ[name] = value
    if environ.get(GLOO_VARIABLE):
        lines.append(
            f"{GLOO_VARIABLE}={environ[GLOO_VARIABLE]} was set by you and stays: every gloo group uses it")
    if environ.get("NCCL_NET"):
        lines.append(
            f"NCCL_NET={environ['NCCL_NET']} is unset: it would override the network chosen for each group")
        del environ["NCCL_NET"]
    if environ.get(SHARED, "0") != "0" and len(here.ports) > 1:
        why = "a group with a network of its own cannot share its parent's resources"
        lines.append(f"{SHARED}={environ[SHARED]} is unset: {why}")
        del environ[SHARED]
    return lines
