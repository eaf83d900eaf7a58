"""What NCCL is given on a node, and finds there: settings in files, verbs, a network plugin.

Read in NCCL's source, 2.18 to 2.30:

    files    src/misc/param.cc: when NCCL first runs in a process, NCCL_CONF_FILE (2.23 and newer) or
             ~/.nccl.conf, then /etc/nccl.conf, set what the environment lacks
    verbs    src/transport/net_ib*: no "IB" network with NCCL_IB_DISABLE, without libibverbs, or
             where no device opens; a communicator that asks for it by name then fails
             (ncclInvalidUsage), it does not fall back to sockets
    plugin   src/net.cc, src/plugin/: what NCCL_NET_PLUGIN names, or libnccl-net.so, goes before "IB" and
             "Socket" where a communicator asks for no network by name
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from holmes_ext.cluster.fabric import ETHERNET

if TYPE_CHECKING:
    from holmes_ext.cluster.fabric import Fabric
    from holmes_ext.cluster.nic import Nic
    from holmes_ext.cluster.site import Node


#: The value of cluster.toml's key `net` that leaves the network of a fabric's groups to NCCL.
AUTO = "auto"
#: "1": communicators share the resources of the one that they are split from, and so its network.
SHARED = "NCCL_COMM_SPLIT_SHARE_RESOURCES"
#: The lab's own plugin (lab/gpu): it is what answers to "IB" there.
LAB_PLUGIN = "libnccl-net-holmes.so"
#: Where a loader looks besides LD_LIBRARY_PATH and what /etc/ld.so.conf.d names.
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
    """no_verbs: why NCCL's own "IB" network finds nothing here, ""; forced_net: NCCL_NET in a file
    (forced_in); plugin: the network plugin that NCCL would load."""

    no_verbs: str = ""
    forced_net: str = ""
    forced_in: str = ""
    plugin: str = ""


def network_name(fabric: Fabric) -> str:
    """What a group on `fabric` asks NCCL for (config.net_name); "" lets it choose."""
    name = fabric.net or ("Socket" if fabric.kind == "ethernet" else "IB")
    return "" if name == AUTO else name


def variables_of(node: Node) -> dict[str, str]:
    """Which HCAs, GID index and socket interface NCCL is to use on `node`; "" where it is not told."""
    rdma = [port for port in node.ports if port.hcas and port.usable and not port.no_verbs]
    interface, indices = node.port(ETHERNET).interface, {port.gid_index for port in rdma}
    index = indices.pop() if len(indices) == 1 else None
    return {
        "NCCL_SOCKET_IFNAME": f"={interface}" if interface else "",
        "NCCL_IB_HCA": "=" + ",".join(hca for port in rdma for hca in port.hcas) if rdma else "",
        "NCCL_IB_GID_INDEX": "" if index is None else str(index),
    }


def nccl_of_node(environ: Mapping[str, str], nics: Sequence[Nic]) -> NcclOfNode:
    """NCCL_NET in `environ` does not count: holmes unsets it, and then a file's comes through."""
    unset = {name: value for name, value in environ.items() if name != "NCCL_NET"}
    forced, file = file_settings(unset).get("NCCL_NET", ("", ""))
    fast = any(nic.fast and nic.usable for nic in nics)
    plugin = net_plugin(environ)
    foreign_plugin = "" if os.path.basename(plugin) == LAB_PLUGIN else plugin
    return NcclOfNode(no_verbs(environ) if fast else "", forced, file, foreign_plugin)


def file_settings(
    environ: Mapping[str, str], system: str = "/etc/nccl.conf"
) -> dict[str, tuple[str, str]]:
    """variable -> (value, file) of what NCCL itself adds to the environment; what is set already stays."""
    result: dict[str, tuple[str, str]] = {}
    for file in (environ.get("NCCL_CONF_FILE") or f"{environ.get('HOME', '')}/.nccl.conf", system):
        try:
            text = Path(file).read_text(errors="replace")
        except OSError:
            continue
        for line in text.splitlines():
            name, equals, value = line.partition("=")
            if equals and not line.startswith("#") and name not in environ:
                result.setdefault(name, (value, file))
    return result


def no_verbs(
    environ: Mapping[str, str], devices: str = "/dev/infiniband", library: str = "libibverbs.so.1"
) -> str:
    """See NcclOfNode. Of NICs in a captured tree (HOLMES_SYSFS) only the variable tells."""
    value, where = environ.get("NCCL_IB_DISABLE", ""), ""
    if not value:
        value, where = file_settings(environ).get("NCCL_IB_DISABLE", ("", ""))
    if value.strip() not in ("", "0"):
        return f"NCCL_IB_DISABLE={value} is set" + (f" in {where}" if where else "")
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
    """Path of the first network plugin that NCCL would find, "" where none is."""
    asked = environ.get(
        "NCCL_NET_PLUGIN", file_settings(environ).get("NCCL_NET_PLUGIN", ("libnccl-net.so", ""))[0]
    )
    for name in filter(None, asked.split(",")):
        if name.lower() == "none":
            return ""
        names = [name] if "/" in name or name.endswith(".so") else [name, f"libnccl-net-{name}.so"]
        for folder in ("",) if "/" in name else _library_folders(environ):
            for candidate in names:
                if os.path.isfile(path := os.path.join(folder, candidate)):
                    return path
    return ""


def _library_folders(environ: Mapping[str, str]) -> Iterator[str]:
    yield from filter(None, environ.get("LD_LIBRARY_PATH", "").split(":"))
    for file in sorted(Path("/etc/ld.so.conf.d").glob("*.conf")):
        yield from (
            line.strip()
            for line in file.read_text(errors="replace").splitlines()
            if line.startswith("/")
        )
    yield from _FOLDERS
