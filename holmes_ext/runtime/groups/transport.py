"""Makes gloo and NCCL use the planned network for a new process group.

    gloo   uses the interface that the environment variable GLOO_SOCKET_IFNAME names when the group is made.
    NCCL   uses the network that config.net_name in the group's options names: "IB" (InfiniBand or RoCE),
           "Socket" (Ethernet) or that of a network plugin ("Libfabric"). Environment variables select the
           NICs of "IB" and "Socket" (NCCL_IB_HCA, NCCL_SOCKET_IFNAME). NCCL reads them once, so
           node_environment() sets them before the first communicator of the process.

A communicator cannot use RDMA and sockets at the same time (NVIDIA/nccl#878), so the whole group has a single
network.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from holmes_ext.cluster.fabric import is_same_network
from holmes_ext.cluster.nccl import SHARED, file_settings, network_name, variables_of
from holmes_ext.errors import HolmesError
from holmes_ext.plan.traffic import LOCAL
from holmes_ext.runtime.backend import options_of, traits_of

if TYPE_CHECKING:
    from holmes_ext.cluster.fabric import Fabric
    from holmes_ext.cluster.site import Node

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"


#: Settings that a new communicator does not take from its parent. A communicator that shares the resources of
#: its parent (ncclConfig_t.splitShare) has the parent's network: ncclCommSplit rejects another network with
#: ncclInvalidUsage. The name stands in NCCL's logs and is different for each communicator.
_NOT_COPIED = frozenset({"net_name", "split_share", "comm_name"})


@dataclass(frozen=True)
class Transport:
    """The network of a process group on one node: its name, and the node's interface."""

    fabric: str  # name of the network; "local" if the group is inside one node
    kind: str  # of NIC: "ib", "roce", "ethernet" or "local"
    interface: str  # network interface of this node, for sockets
    net_name: str  # NCCL's name of the network; "" if NCCL chooses


def transport_on(fabric: Fabric | None, node: Node) -> Transport:
    """Return the transport (network, and NIC on this node) of a process group on one of its nodes.

    Args:
        fabric: Network of the group; None if the group is inside one node.
        node: The node.
    """
    if fabric is None:
        return Transport(fabric=LOCAL, kind=LOCAL, interface="lo", net_name="")
    port = node.port(fabric.name)
    return Transport(
        fabric=fabric.name,
        kind=fabric.kind,
        interface=port.interface,
        net_name=network_name(fabric),  # NCCL's name: "IB" or "Socket"
    )


def as_made(
    planned: Transport,
    node: Node,
    backend: str,
    fabrics: Mapping[str, Fabric],
    options: Any = None,
    environ: Mapping[str, str] = os.environ,
) -> Transport:
    """Return the transport that a process group really has on one of its nodes.

    It is the planned transport, unless the user's GLOO_SOCKET_IFNAME or a net_name in the group's NCCL
    options sets another network.

    Args:
        planned: Transport that the plan has for the group.
        node: The node.
        backend: Backend of the group, such as "gloo".
        fabrics: Name of a network -> the network.
        options: ProcessGroupNCCL.Options that the group was made with; None if unknown.
        environ: Environment variables of this process.
    """
    if planned.fabric == LOCAL:
        return planned
    if backend == "gloo":
        interface = environ.get(GLOO_VARIABLE, planned.interface)
        return _gloo_transport(planned, node, interface, fabrics)
    if traits_of(backend).is_nccl and options is not None:
        net_name = getattr(options.config, "net_name", None)
        return _nccl_transport(planned, node, net_name or "", fabrics)
    return planned


def _gloo_transport(
    planned: Transport, node: Node, interface: str, fabrics: Mapping[str, Fabric]
) -> Transport:
    """Return the transport of a gloo group that uses `interface`: names separated by commas."""
    if interface == planned.interface:
        return planned
    names = interface.split(",")
    port = next((port for port in node.ports if port.interface in names), None)
    if port is None:
        return planned  # the network of the interface is not known
    return Transport(port.fabric, fabrics[port.fabric].kind, interface=interface, net_name="")


def _nccl_transport(
    planned: Transport, node: Node, net_name: str, fabrics: Mapping[str, Fabric]
) -> Transport:
    """Return the transport of an NCCL group on one of its nodes: the planned transport, or the program's.

    The program may have set another net_name in the group's options than the plan has. NCCL then
    uses the program's network.

    Args:
        planned: Transport that the plan has for the group.
        node: The node.
        net_name: NCCL's name of the network in the group's options: "IB", "Socket" or the name of a
            plugin. "": the options name none, so the planned network is used.
        fabrics: Name of a network -> the network.
    """
    # planned.net_name is "" if the plan leaves the choice to NCCL, e.g. inside a node.
    if not net_name or not planned.net_name or net_name == planned.net_name:
        return planned
    for port in node.ports:
        fabric = fabrics[port.fabric]
        if network_name(fabric) == net_name:
            return Transport(fabric.name, fabric.kind, interface="", net_name=net_name)
    # The node has no such network, so only NCCL's name of it is available.
    return Transport(fabric=net_name, kind="", interface="", net_name=net_name)


@contextmanager
def gloo_interface(
    transport: Transport, environ: MutableMapping[str, str] = os.environ
) -> Iterator[None]:
    """Let the gloo groups that are made inside the `with` block use the interface of a transport.

    gloo reads the interface from GLOO_SOCKET_IFNAME when a group is made. A value that the user has set
    stays.
    """
    if environ.get(GLOO_VARIABLE) or not transport.interface:
        yield
        return
    environ[GLOO_VARIABLE] = transport.interface
    try:
        yield
    finally:
        del environ[GLOO_VARIABLE]


def nccl_options(
    transport: Transport,
    given: Any,
    options_class: type,
    timeout: timedelta | None = None,
    parent: Any = None,
    comm_name: str = "",
) -> Any:
    """Return the options of an NCCL group, with the net_name of `transport`.

    Each group gets a new options object, with a copy of the given settings. A shared object would
    not do: each communicator frees the net_name of its options, so the same string would be freed
    twice. If the program has set a net_name itself, its options are returned unchanged.

    Args:
        transport: Network of the group.
        given: Options that the program gave for the group, or None.
        options_class: torch's ProcessGroupNCCL.Options.
        timeout: Timeout of the group's operations; None to leave it as it is.
        parent: Options of the group that the new group is split from; None if it is not split.
            Their settings are copied if `given` is None.
        comm_name: Name of the communicator in NCCL's logs. Ignored if torch has no such option, or the
            program has given a name.
    """
    if given is not None and getattr(given.config, "net_name", None):
        return given
    settings = parent if given is None else given
    fresh = options_class()
    if settings is not None:
        # _NOT_COPIED names the fields of a config that belong to a single communicator.
        _copy_settings(settings.config, fresh.config, skip=_NOT_COPIED)
        _copy_settings(settings, fresh, skip={"config"})
    if transport.net_name:
        fresh.config.net_name = transport.net_name
    if hasattr(fresh.config, "comm_name"):  # torch 2.15 and newer
        given_name = getattr(given.config, "comm_name", None) if given is not None else None
        fresh.config.comm_name = given_name or comm_name or None
    if timeout is not None:
        fresh._timeout = timeout
    return fresh


def settings_of(group: Any) -> Any:
    """Return a copy of a group's NCCL options for another group, without its network and name."""
    from torch.distributed import ProcessGroupNCCL

    fresh = ProcessGroupNCCL.Options()
    options = options_of(group)
    _copy_settings(options.config, fresh.config, skip=_NOT_COPIED)
    fresh.is_high_priority_stream = options.is_high_priority_stream
    return fresh


def refuse_forced(transport: Transport, forced_nets: Mapping[str, str]) -> None:
    """Raise an error if a configuration file of NCCL forces another network than the planned one.

    Such a file sets NCCL_NET for every communicator, and overrides the net_name of a group.

    Args:
        transport: Planned network of a group.
        forced_nets: Value of NCCL_NET -> the file that sets it.

    Raises:
        HolmesError: names the file and the line to delete.
    """
    for net, file in forced_nets.items():
        if transport.net_name and not is_same_network(net, transport.net_name):
            raise HolmesError(
                f"NCCL_NET={net} in {file} overrides the network of every group, and a group on "
                f"{transport.fabric} is planned over {transport.net_name}; take the line out of the file"
            )


def _copy_settings(source: Any, target: Any, skip: frozenset[str] | set[str] = frozenset()) -> None:
    """Set the attributes of `target` to the values that they have in `source`.

    Methods, attributes that start with "__" and those named in `skip` are left as they are.
    """
    for name in dir(source):
        value = getattr(source, name)
        if (
            name.startswith("__")
            or name in skip
            or callable(value)
            or value == getattr(target, name)
        ):
            continue
        try:
            setattr(target, name, value)
        except AttributeError:  # read-only, e.g. the name of the backend: the same in both
            continue


def node_environment(
    node: Node, environ: MutableMapping[str, str], fabrics: Sequence[Fabric] = ()
) -> list[str]:
    """Set NCCL's HCAs, GID index and socket interface for this node in `environ`.

    Variables that the user has set stay. Two variables are unset:

        NCCL_NET                           would override the network of every group
        NCCL_COMM_SPLIT_SHARE_RESOURCES    would give a split communicator the network of its
                                           parent. On a node with a single network this does no
                                           harm, so there the variable stays.

    Args:
        node: This node.
        environ: Environment variables of this process. They are changed.
        fabrics: Networks of the job, to name the network of the user's NCCL_NET.

    Returns:
        A message for each variable that the user has set, or that was unset.
    """
    lines = []
    in_files = file_settings(environ)  # variable -> its value and the file of NCCL that sets it
    # Variable of NCCL -> value for this node; "" if NCCL's own default is right.
    for name, value in variables_of(node).items():
        holmes_would = f"holmes would use {value or 'none'}"
        if environ.get(name):
            lines.append(f"{name}={environ[name]} was set by you and stays ({holmes_would})")
        elif name in in_files:
            given, file = in_files[name]
            lines.append(f"{name}={given} is set in {file} and stays ({holmes_would})")
        elif value:
            environ[name] = value
    if environ.get(GLOO_VARIABLE):
        lines.append(
            f"{GLOO_VARIABLE}={environ[GLOO_VARIABLE]} was set by you and stays: every gloo group uses it"
        )
    if environ.get("NCCL_NET"):
        lines.append(_unset_net_message(environ["NCCL_NET"], node, fabrics))
        del environ["NCCL_NET"]

    # SHARED is NCCL_COMM_SPLIT_SHARE_RESOURCES.
    if environ.get(SHARED, "0") != "0" and len(node.ports) > 1:
        reason = "a group with a network of its own cannot share its parent's resources"
        lines.append(f"{SHARED}={environ[SHARED]} is unset: {reason}")
        del environ[SHARED]
    return lines


def _unset_net_message(requested: str, node: Node, fabrics: Sequence[Fabric]) -> str:
    """Return the message that NCCL_NET is unset, with the groups that request its network by name.

    Args:
        requested: Value of NCCL_NET, the network of NCCL that the user wants for every group.
        node: This node.
        fabrics: Networks of the job.
    """
    message = f"NCCL_NET={requested} is unset: it would override the network chosen for each group"
    usable_fabrics = {port.fabric for port in node.ports if not port.no_verbs}
    matching = []
    for fabric in fabrics:
        name = network_name(fabric)
        if fabric.name in usable_fabrics and name and is_same_network(name, requested):
            matching.append(f"groups on {fabric.name} request {name!r} by name")
    return f"{message}; {'; '.join(matching) or 'no group of this node uses it'}"
