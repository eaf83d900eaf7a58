"""Finds the network plugin that NCCL would load on this node, and the name of its network.

NCCL itself moves data over "IB" (verbs) and "Socket". Other networks, such as AWS EFA, come from a plugin: a
library libnccl-net*.so with a table ncclNetPlugin_vN, whose first field is the network's name:

    plugin                     name                                 NICs
    aws-ofi-nccl               Libfabric (to 1.11: AWS Libfabric)   EFA, Slingshot, Omni-Path
    GPUDirect-TCPX, -TCPXO     GPUDirectTCPX_v7, FasTrak            gVNIC of Google Cloud
    gIB                        gIB                                  RoCE of Google Cloud
    nccl-rdma-sharp-plugins    IBext_vN or UCX, set when it starts  InfiniBand, RoCE

The name is read from the file (elf.py), so no code of the plugin runs. The loader itself lists the libraries
that the plugin needs and that are missing, as for ldd(1). It does not run the plugin either.
"""

from __future__ import annotations

import glob
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from holmes_ext import extensions
from holmes_ext.cluster.fabric import is_built_in, kinds_of_network
from holmes_ext.cluster.nccl import (
    LAB_PLUGIN,
    FileSetting,
    NcclOfNode,
    file_settings,
    why_no_verbs,
)
from holmes_ext.cluster.nic import KINDS, Nic
from holmes_ext.words import some_of

if TYPE_CHECKING:
    from holmes_ext.cluster.elf import Library

#: Table of a plugin. NCCL takes the highest version that it knows.
_TABLE = re.compile("ncclNetPlugin_v([0-9]{1,2})")
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
#: Kind of NIC -> device files that a network plugin opens to use the NICs.
DEVICE_FILES = {
    "efa": "/dev/infiniband/uverbs*",
    "slingshot": "/dev/cxi*",
}
_DEFAULT = "libnccl-net.so"
#: Seconds for the loader to list the libraries of a plugin.
_LIST_S = 10.0
#: A line of the loader about a library that is missing.
_NOT_FOUND = re.compile(r"^\s*(\S+) => not found", re.MULTILINE)
#: Message of the loader about a library that is too old.
_TOO_OLD = re.compile(r"(\S+): version [`']?([^'`\s]+)'? not found \(required by")
#: Beginnings of the names of libraries that torch has loaded before NCCL loads a plugin.
_LOADED_BY_TORCH = ("libcu", "libnv", "libnccl")


@dataclass(frozen=True)
class NetPlugin:
    """Network plugin of NCCL on a node."""

    path: str = ""  # file of the plugin, "" if NCCL would find none
    network: str = ""  # NCCL's name of its network, "" without a plugin or if it cannot be read
    problem: str = ""  # reason why NCCL cannot use a plugin here, "" if it can

    @property
    def is_ready(self) -> bool:
        """True if NCCL can load the plugin."""
        return bool(self.path) and not self.problem


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
    has_rdma_nic = any(KINDS[nic.kind].verbs and nic.usable for nic in nics)
    plugin_setting = file_settings(environ).get("NCCL_NET_PLUGIN")
    requested_plugin = environ.get("NCCL_NET_PLUGIN")
    if requested_plugin is None and plugin_setting is not None:
        requested_plugin = plugin_setting.value
    plugin = find_net_plugin(environ, requested_plugin)
    # A plugin is reported because NCCL may prefer its network to the built-in "IB". Not so the plugin of
    # `holmes lab`, which emulates NICs of all kinds: its network is called "IB" and takes the place of the
    # built-in network.
    if os.path.basename(plugin.path) == LAB_PLUGIN:
        plugin = replace(plugin, path="")
    return NcclOfNode(
        no_verbs=why_no_verbs(environ) if has_rdma_nic else "",
        forced_net=forced.value,
        forced_in=forced.file,
        plugin=plugin.path,
        network=plugin.network,
        plugin_problem=plugin.problem or _why_no_device_file(environ, nics),
        requested_net=environ.get("NCCL_NET") or forced.value,
    )


def _why_no_device_file(environ: Mapping[str, str], nics: Sequence[Nic]) -> str:
    """Return the reason why a network plugin cannot open the NICs that need it, "" if it can.

    The NICs of a captured tree (HOLMES_SYSFS) are those of another machine: "".
    """
    if environ.get("HOLMES_SYSFS"):
        return ""
    for nic in nics:
        pattern = DEVICE_FILES.get(nic.plugin_kind or nic.kind, "")
        if pattern and nic.usable and not glob.glob(pattern):
            folder = os.path.dirname(pattern)
            return f"{nic.name} has no device file {pattern} (give a container --device={folder})"
    return ""


def may_carry(network: str, kind: str) -> bool:
    """Return whether the network of a plugin may use NICs of a kind, as far as its name shows.

    A network whose name is not known may use any kind that needs a plugin, except gVNIC: all of
    Google's machines have gVNIC, and most have no plugin for it.
    """
    if kind == "plugin":  # the user's word for NICs that the installed plugin uses
        return True
    # Only the plugin of `holmes lab` has a network called "IB": it emulates all kinds of NICs.
    if is_built_in(network):
        return True
    kinds = kinds_of_network(network)
    if kinds:
        return kind in kinds
    return KINDS[kind].plugin and kind != "gvnic"


def find_net_plugin(environ: Mapping[str, str], requested: str | None) -> NetPlugin:
    """Return the first network plugin that NCCL would find on this node.

    Args:
        environ: Environment of the process that uses NCCL. LD_LIBRARY_PATH is read from it.
        requested: Value of NCCL_NET_PLUGIN, None if it is not set. It lists names, which are tried in
            order. A name is a path, a library, or a suffix: "aws-ofi" stands for
            libnccl-net-aws-ofi.so. The name "none" ends the list.
    """
    path = _plugin_path(environ, _DEFAULT if requested is None else requested)
    if path:
        return NetPlugin(path, network_of(path), problem=_missing_libraries(path, environ))
    if requested is None:
        with_suffix = _plugins_with_suffix(environ)
        advice = "name the plugin's file with NCCL_NET_PLUGIN"
        if with_suffix:
            advice = f"{with_suffix[0]} exists: export NCCL_NET_PLUGIN={with_suffix[0]}"
        searched = f"no {_DEFAULT} is on LD_LIBRARY_PATH or in the loader's folders ({advice})"
    else:
        searched = f"NCCL_NET_PLUGIN={requested} names no library that exists"
    return NetPlugin(problem=searched)


def network_of(path: str) -> str:
    """Return NCCL's name of the network that a plugin provides, "" if the file does not show it.

    Args:
        path: File of the plugin, which is read and not loaded.
    """
    try:
        library = _library(path)
    except (OSError, ValueError):
        return ""
    # Version N -> address of the table ncclNetPlugin_vN. The first field of the table, at the same
    # address, points to the network's name.
    tables = {}
    for symbol in library.symbols:
        match = _TABLE.fullmatch(symbol.name)
        if match and symbol.address:
            tables[int(match[1])] = symbol.address
    for version in sorted(tables, reverse=True):
        name = library.text_pointed_to(tables[version])
        if name and name.isprintable():
            return name
    return ""


def _library(path: str) -> Library:
    """Return the reader of a library's file. The module that reads it is loaded on nodes with a plugin only.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is no library for 64-bit Linux.
    """
    reader: type[Library] = extensions.load("holmes_ext.cluster.elf:Library")
    return reader(path)


def _plugin_path(environ: Mapping[str, str], requested: str) -> str:
    """Return the path of the first plugin of a list (NCCL_NET_PLUGIN), "" if no folder has any."""
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
    if os.path.isdir(os.path.join(sys.prefix, "conda-meta")):
        yield os.path.join(sys.prefix, "lib")  # the python of conda has it as its DT_RPATH
    yield from filter(None, environ.get("LD_LIBRARY_PATH", "").split(":"))
    for file in [Path("/etc/ld.so.conf"), *sorted(Path("/etc/ld.so.conf.d").glob("*.conf"))]:
        if not file.is_file():
            continue
        for line in file.read_text(errors="replace").splitlines():
            if line.startswith("/"):
                yield line.strip()
    yield from _FOLDERS


def _plugins_with_suffix(environ: Mapping[str, str]) -> list[str]:
    """Return the plugins that NCCL loads only if NCCL_NET_PLUGIN names them, such as libnccl-net-ofi.so."""
    paths = []
    for folder in _library_folders(environ):
        paths += sorted(glob.glob(os.path.join(glob.escape(folder), "libnccl-net-*.so")))
    return paths


def _missing_libraries(path: str, environ: Mapping[str, str]) -> str:
    """Return a sentence about libraries that a plugin needs and the loader does not find, else "".

    A library also counts as missing if it is too old. The libraries of CUDA and NCCL do not count: torch
    has loaded them before NCCL loads the plugin.

    Args:
        path: File of the plugin.
        environ: Environment of the process that uses NCCL, for LD_LIBRARY_PATH.
    """
    # With this variable, the loader lists the libraries and runs none of them. ldd(1) uses it, too.
    tracing = {**environ, "LD_TRACE_LOADED_OBJECTS": "1"}
    tracing.pop("LD_PRELOAD", None)
    try:
        loader = _library(sys.executable).interpreter
        listed = subprocess.run(
            [loader, path],
            env=tracing,
            capture_output=True,
            text=True,
            timeout=_LIST_S,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return ""  # the needs of the plugin are not known
    missing = [
        name for name in _NOT_FOUND.findall(listed.stdout) if not name.startswith(_LOADED_BY_TORCH)
    ]
    if not missing:
        too_old = _TOO_OLD.search(listed.stdout + listed.stderr)
        return f"{path} needs version {too_old[2]} of {too_old[1]}" if too_old else ""
    return (
        f"{path} needs {some_of(missing)}, which the loader does not find (add the folder of the library "
        "to LD_LIBRARY_PATH)"
    )
