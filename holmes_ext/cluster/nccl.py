"""NCCL's view of a node: settings in configuration files, RDMA verbs, and a network plugin.

The rules come from NCCL's source, versions 2.18 to 2.30:

    files    src/misc/param.cc: when NCCL first runs in a process, it sets environment variables
             that are unset from NCCL_CONF_FILE (2.23 and newer) or ~/.nccl.conf, then from
             /etc/nccl.conf. The home directory is that of the user database, not $HOME. A line is
             NAME=VALUE without blanks around "=": blanks, quotes and "# comment" become part of it
    verbs    src/transport/net_ib*: there is no "IB" network with NCCL_IB_DISABLE, without
             libibverbs, or if no device can be opened. A communicator that requests "IB" by name
             then fails with ncclInvalidUsage; it does not fall back to sockets
    plugin   src/net.cc, src/plugin/: the plugin named by NCCL_NET_PLUGIN, or libnccl-net.so, goes
             before "IB" and "Socket" if a communicator requests no network by name
"""

from __future__ import annotations

import ctypes
import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from holmes_ext.cluster.fabric import ETHERNET, is_provisional
from holmes_ext.document import read_text
from holmes_ext.errors import HolmesError

if TYPE_CHECKING:
    from holmes_ext.cluster.fabric import Fabric
    from holmes_ext.cluster.site import Node


#: Value of the key `net` in cluster.toml that leaves the network of a fabric's groups to NCCL.
AUTO = "auto"
#: Variable that is "1" if communicators share the resources, and so the network, of their parent.
SHARED = "NCCL_COMM_SPLIT_SHARE_RESOURCES"
#: Network plugin of `holmes lab` (lab/gpu), which provides the "IB" network there.
LAB_PLUGIN = "libnccl-net-holmes.so"


@dataclass(frozen=True)
class NcclOfNode:
    """NCCL settings and libraries of one node."""

    no_verbs: str = ""  # reason why NCCL's built-in "IB" network has no device, "" if it has
    forced_net: str = ""  # NCCL_NET in a configuration file
    forced_in: str = ""  # path of that file
    plugin: str = ""  # path of the network plugin that NCCL would load
    #: NCCL's name of the plugin's network, "" if the file does not show it. "IB" in `holmes lab`.
    network: str = ""
    plugin_problem: str = ""  # reason why NCCL cannot use a network plugin, "" if it can
    requested_net: str = ""  # NCCL_NET in the user's environment, or else in a configuration file

    @property
    def request_name(self) -> str:
        """Name by which groups can request the plugin's network, "" if it is not known."""
        return "" if is_provisional(self.network) else self.network

    @property
    def has_plugin(self) -> bool:
        """True if NCCL can load a network plugin."""
        return bool(self.plugin or self.network) and not self.plugin_problem


class FileSetting(NamedTuple):
    """Value of an environment variable that a configuration file of NCCL sets."""

    value: str
    file: str


def network_name(fabric: Fabric) -> str:
    """Return the network that a communicator on a fabric requests from NCCL (config.net_name).

    An empty name lets NCCL choose. NCCL then prefers the network of a plugin.

    Args:
        fabric: The fabric. Its `net` is that of a plugin, the user's choice in cluster.toml, or "".
    """
    if fabric.net == AUTO:
        return ""
    if fabric.net:
        return fabric.net
    return "Socket" if fabric.kind == "ethernet" else "IB"


def variables_of(node: Node) -> dict[str, str]:
    """Return the variables that select the HCAs, GID index and socket interface of NCCL on a node.

    A variable with an empty value is to stay unset.
    """
    # `verbs`: NCCL's network "IB" can use NICs of this kind. `no_verbs`: the reason why it cannot use
    # those of this node all the same, "" if it can.
    rdma_ports = [
        port
        for port in node.ports
        if port.hcas and port.verbs and port.usable and not port.no_verbs
    ]
    hcas = [hca for port in rdma_ports for hca in port.hcas]
    gid_indices = {port.gid_index for port in rdma_ports}
    gid_index = None
    # NCCL takes one index for all HCAs of a node.
    if len(gid_indices) == 1:
        (gid_index,) = gid_indices
    interface = node.port(ETHERNET).interface
    # "=" makes NCCL match whole names; without it, names are prefixes.
    return {
        "NCCL_SOCKET_IFNAME": f"={interface}" if interface else "",
        "NCCL_IB_HCA": "=" + ",".join(hcas) if hcas else "",
        "NCCL_IB_GID_INDEX": "" if gid_index is None else str(gid_index),
    }


def file_settings(
    environ: Mapping[str, str], system: str = "/etc/nccl.conf"
) -> dict[str, FileSetting]:
    """Return the variables that NCCL itself reads from configuration files.

    Variables that are set in `environ` are left out, because NCCL does not overwrite them.

    Args:
        environ: Environment of the process that uses NCCL.
        system: Path of the system-wide file.
    """
    settings: dict[str, FileSetting] = {}
    # NCCL reads the user's file first, and the first value of a variable counts.
    for file in (environ.get("NCCL_CONF_FILE") or _file_in_home(), system):
        try:
            text = read_text(file, advice="", errors="replace")
        except HolmesError:
            continue
        for line in text.split("\n"):  # the "\r" of a file from Windows becomes part of the value
            name, equals, value = line.partition("=")
            if equals and not line.startswith("#") and name not in environ:
                settings.setdefault(name, FileSetting(value, file))
    return settings


def _file_in_home() -> str:
    """Return the path of the user's configuration file of NCCL, "" for a user without a home directory."""
    try:
        return f"{pwd.getpwuid(os.getuid()).pw_dir}/.nccl.conf"
    except KeyError:  # a container may run with a user id that has no entry
        return ""


def why_no_verbs(
    environ: Mapping[str, str], devices: str = "/dev/infiniband", library: str = "libibverbs.so.1"
) -> str:
    """Return the reason why NCCL's built-in "IB" network has no device, "" if it has.

    With NICs from a captured tree (HOLMES_SYSFS), only NCCL_IB_DISABLE is checked.

    Args:
        environ: Environment of the process that uses NCCL.
        devices: Folder with the device files of verbs.
        library: Name of the verbs library.
    """
    disabled = FileSetting(environ.get("NCCL_IB_DISABLE", ""), file="")
    if not disabled.value:
        disabled = file_settings(environ).get("NCCL_IB_DISABLE", disabled)
    if disabled.value.strip() not in ("", "0"):
        in_file = f" in {disabled.file}" if disabled.file else ""
        return f"NCCL_IB_DISABLE={disabled.value} is set{in_file}"
    if environ.get("HOLMES_SYSFS"):
        return ""
    verbs = sorted(Path(devices).glob("uverbs*"))
    if not verbs:
        return (
            f"there is no {devices}/uverbs* (load ib_uverbs; give a container --device={devices})"
        )
    if not any(os.access(path, os.R_OK | os.W_OK) for path in verbs):
        return f"{verbs[0]} cannot be opened by this user"
    try:
        ctypes.CDLL(library)
    except OSError:
        return f"{library} cannot be loaded (install rdma-core's libibverbs)"
    return ""
