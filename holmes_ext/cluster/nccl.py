"""NCCL's view of a node: settings in configuration files, RDMA verbs, and a network plugin.

The rules come from NCCL's source, versions 2.18 to 2.30:

    files    src/misc/param.cc: when NCCL first runs in a process, it sets environment variables
             that are unset from NCCL_CONF_FILE (2.23 and newer) or ~/.nccl.conf, then from
             /etc/nccl.conf
    verbs    src/transport/net_ib*: there is no "IB" network with NCCL_IB_DISABLE, without
             libibverbs, or if no device can be opened. A communicator that requests "IB" by name
             then fails with ncclInvalidUsage; it does not fall back to sockets
    plugin   src/net.cc, src/plugin/: the plugin named by NCCL_NET_PLUGIN, or libnccl-net.so, goes
             before "IB" and "Socket" if a communicator requests no network by name
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from holmes_ext.cluster.fabric import ETHERNET

if TYPE_CHECKING:
    from holmes_ext.cluster.fabric import Fabric
    from holmes_ext.cluster.nic import Nic
    from holmes_ext.cluster.site import Node


#: Value of the key `net` in cluster.toml that leaves the network of a fabric's groups to NCCL.
AUTO = "auto"
#: Variable that is "1" if communicators share the resources, and so the network, of their parent.
SHARED = "NCCL_COMM_SPLIT_SHARE_RESOURCES"
#: Network plugin of `holmes lab` (lab/gpu), which provides the "IB" network there.
LAB_PLUGIN = "libnccl-net-holmes.so"
#: Folders that the loader searches after LD_LIBRARY_PATH and the folders in /etc/ld.so.conf.d.
_FOLDERS = (
    "/lib64",
    "/usr/lib64",
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/local/lib",
    "/usr/lib",
)


@dataclass(frozen=True)
class NcclOfNode:
    """NCCL settings and libraries of one node."""

    no_verbs: str = ""  # reason why NCCL's built-in "IB" network has no device, "" if it has
    forced_net: str = ""  # NCCL_NET in a configuration file
    forced_in: str = ""  # path of that file
    plugin: str = ""  # path of the network plugin that NCCL would load


class FileSetting(NamedTuple):
    """Value of an environment variable that a configuration file of NCCL sets."""

    value: str
    file: str


def network_name(fabric: Fabric) -> str:
    """Return the network that a communicator on a fabric requests from NCCL (config.net_name).

    An empty name lets NCCL choose.

    Args:
        fabric: The fabric. Its `net` is the user's choice in cluster.toml, "" without one.
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
    rdma_ports = [port for port in node.ports if port.hcas and port.usable and not port.no_verbs]
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


def nccl_of_node(environ: Mapping[str, str], nics: Sequence[Nic]) -> NcclOfNode:
    """Return the NCCL settings and libraries of this node.

    Args:
        environ: Environment of the process that uses NCCL.
        nics: All NICs of the node.
    """
    # holmes unsets NCCL_NET in each job. NCCL then takes its value from a configuration file, if
    # one has it.
    without_net = {name: value for name, value in environ.items() if name != "NCCL_NET"}
    forced = file_settings(without_net).get("NCCL_NET", FileSetting("", ""))
    has_fast_nic = any(nic.fast and nic.usable for nic in nics)
    plugin = net_plugin(environ)
    # A plugin is reported because NCCL may prefer its network to the built-in "IB". Not so the
    # plugin of `holmes lab`, which emulates NICs on machines that have none: its network is called
    # "IB".
    if os.path.basename(plugin) == LAB_PLUGIN:
        plugin = ""
    return NcclOfNode(
        no_verbs=why_no_verbs(environ) if has_fast_nic else "",
        forced_net=forced.value,
        forced_in=forced.file,
        plugin=plugin,
    )


def file_settings(
    environ: Mapping[str, str], system: str = "/etc/nccl.conf"
) -> dict[str, FileSetting]:
    """Return the variables that NCCL itself reads from configuration files.

    Variables that are set in `environ` are left out, because NCCL does not overwrite them.

    Args:
        environ: Environment of the process that uses NCCL.
        system: Path of the system-wide file.
    """
    user_file = environ.get("NCCL_CONF_FILE") or f"{environ.get('HOME', '')}/.nccl.conf"
    settings: dict[str, FileSetting] = {}
    # NCCL reads the user's file first, and the first value of a variable counts.
    for file in (user_file, system):
        try:
            text = Path(file).read_text(errors="replace")
        except OSError:
            continue
        for line in text.splitlines():
            name, equals, value = line.partition("=")
            if equals and not line.startswith("#") and name not in environ:
                settings.setdefault(name, FileSetting(value, file))
    return settings


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


def net_plugin(environ: Mapping[str, str]) -> str:
    """Return the path of the first network plugin that NCCL would find, "" if there is none.

    NCCL_NET_PLUGIN lists names that are tried in order. Each is a path, a library, or a suffix:
    "aws-ofi" stands for libnccl-net-aws-ofi.so. "none" ends the list.
    """
    if "NCCL_NET_PLUGIN" in environ:
        requested = environ["NCCL_NET_PLUGIN"]
    else:
        default = FileSetting("libnccl-net.so", file="")
        requested = file_settings(environ).get("NCCL_NET_PLUGIN", default).value
    for name in filter(None, requested.split(",")):
        if name.lower() == "none":
            return ""
        path = _find_plugin(name, environ)
        if path:
            return path
    return ""


def _find_plugin(name: str, environ: Mapping[str, str]) -> str:
    """Return the path of the network plugin that NCCL_NET_PLUGIN names, "" if no folder has it.

    Args:
        name: A path, the file name of a library, or "ucx" for "libnccl-net-ucx.so".
        environ: Environment of the process that uses NCCL, for LD_LIBRARY_PATH.
    """
    if "/" in name:
        return name if os.path.isfile(name) else ""
    candidates = [name]
    if not name.endswith(".so"):
        candidates.append(f"libnccl-net-{name}.so")
    for folder in _library_folders(environ):
        for candidate in candidates:
            path = os.path.join(folder, candidate)
            if os.path.isfile(path):
                return path
    return ""


def _library_folders(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the folders in which the loader searches for libraries, in its order."""
    yield from filter(None, environ.get("LD_LIBRARY_PATH", "").split(":"))
    for file in sorted(Path("/etc/ld.so.conf.d").glob("*.conf")):
        for line in file.read_text(errors="replace").splitlines():
            if line.startswith("/"):
                yield line.strip()
    yield from _FOLDERS
