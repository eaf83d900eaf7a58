"""Checks environment variables that choose networks: they may contradict this node's NICs, or holmes.

The variables of NCCL are described at docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html, those
of gloo in torch's c10d/ProcessGroupGloo.cpp.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from holmes_ext.cluster.nccl import SHARED
from holmes_ext.cluster.nic import KINDS, Nic
from holmes_ext.doctor.finding import Finding, note, problem
from holmes_ext.doctor.nccl_names import (
    check_hca_names,
    check_socket_names,
    missing_interfaces,
)
from holmes_ext.options import names, variables
from holmes_ext.options import variable as variable_of_flag
from holmes_ext.words import nearest

#: Variables that must have the same value on all nodes of a job: `holmes doctor` compares the
#: nodes' values.
COMPARED = (
    "NCCL_SOCKET_IFNAME",
    "NCCL_IB_HCA",
    "NCCL_IB_GID_INDEX",
    "NCCL_IB_DISABLE",
    "NCCL_NET",
    "NCCL_NET_PLUGIN",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_IB_TC",
    "NCCL_P2P_DISABLE",
    "NCCL_CROSS_NIC",
    "NCCL_SOCKET_NTHREADS",
    "NCCL_NSOCKS_PERTHREAD",
    SHARED,
    "GLOO_SOCKET_IFNAME",
    "TP_SOCKET_IFNAME",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "HOLMES",
    "HOLMES_DISABLE",
)
#: Variables of a branch of NCCL that lets a communicator use several networks.
CROSS_DC = ("NCCL_ALLNET_ENABLE", "NCCL_SCATTER_XDC")


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return those set variables that must be equal on all nodes of a job (COMPARED)."""
    return {name: environ[name] for name in COMPARED if environ.get(name)}


def check_variables(
    environ: Mapping[str, str], nics: Sequence[Nic], unused: Collection[str] = ()
) -> Iterator[Finding]:
    """Yield findings about environment variables on a node.

    There are findings about three groups of variables:
        NCCL_SOCKET_IFNAME, NCCL_IB_HCA, NCCL_IB_GID_INDEX, GLOO_SOCKET_IFNAME, TP_SOCKET_IFNAME:
            they must select NICs or GIDs of this node that reach the other nodes
        NCCL_IB_DISABLE, NCCL_NET, ...: they override the networks that holmes chooses for groups
        HOLMES_...: variables that holmes does not read, for example misspelt ones

    Args:
        environ: The environment variables.
        nics: The NICs of the node.
        unused: Names of the NICs that cluster.toml leaves out.
    """
    for variable in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        if environ.get(variable):
            yield from _check_whole_names(variable, environ[variable], nics)
    yield from check_socket_names(environ.get("NCCL_SOCKET_IFNAME", ""), nics)
    fast_nics = [nic for nic in nics if nic.fast]
    roce_nics = [nic for nic in nics if nic.kind == "roce" and nic.usable]
    yield from check_hca_names(environ.get("NCCL_IB_HCA", ""), fast_nics, unused)
    yield from check_gid_index(environ.get("NCCL_IB_GID_INDEX", ""), roce_nics)
    verbs_nics = [nic.name for nic in fast_nics if nic.usable and KINDS[nic.kind].verbs]
    yield from _check_network_overrides(environ, verbs_nics)
    yield from _check_unknown_variables(environ)


def _check_whole_names(variable: str, value: str, nics: Sequence[Nic]) -> Iterator[Finding]:
    """Yield a finding about a variable that lists network interfaces, all of which must exist.

    Args:
        variable: GLOO_SOCKET_IFNAME or TP_SOCKET_IFNAME.
        value: Whole names, separated by commas.
        nics: The NICs of the node.
    """
    existing = {name for nic in nics for name in nic.netdevs} | {"lo"}
    missing = [name for name in value.split(",") if name and name not in existing]
    if missing:
        yield missing_interfaces(variable, value, missing, existing)
    elif variable == "GLOO_SOCKET_IFNAME":  # TP_SOCKET_IFNAME: only RPC (TensorPipe) uses it
        yield note(
            variable,
            what=f"{value!r} is set",
            why="every gloo group uses it: groups inside a cluster stay off their fast NIC",
            mend=f"unset {variable}",
        )


def check_gid_index(value: str, roce_nics: Sequence[Nic]) -> Iterator[Finding]:
    """Yield a finding if NCCL_IB_GID_INDEX is not the index of a RoCE v2 GID of every RoCE NIC.

    Args:
        value: Value of the variable, "" if it is not set.
        roce_nics: The usable RoCE NICs of the node.
    """
    if not value or not roce_nics:
        return
    variable = "NCCL_IB_GID_INDEX"
    if not value.lstrip("-").isdecimal():
        yield problem(
            variable,
            what=f"{value!r} is no number",
            why="NCCL takes it for 0, a RoCE v1 GID",
            mend=f"unset {variable}",
        )
        return
    wrong = []
    for nic in roce_nics:
        types = [gid.type for gid in nic.gids if gid.index == int(value)]
        gid_type = types[0] if types else "empty"
        if gid_type != "roce_v2":
            wrong.append(f"{nic.name} ({gid_type})")
    if wrong and int(value) >= 0:  # with a negative value, NCCL finds the index itself
        best = ", ".join(f"{nic.name} {nic.roce_v2_index}" for nic in roce_nics)
        yield problem(
            variable,
            what=f"entry {value} is no RoCE v2 GID of {', '.join(wrong)}",
            why="connections over it fail (ibv_modify_qp: no route) or do not pass a router",
            mend=f"unset it, or take the v2 index: {best}",
        )


def _check_network_overrides(
    environ: Mapping[str, str], rdma_nics: Sequence[str]
) -> Iterator[Finding]:
    """Yield findings about environment variables that override the networks of NCCL's groups.

    They are NCCL_IB_DISABLE, NCCL_NET, NCCL_COMM_ID and NCCL_COMM_SPLIT_SHARE_RESOURCES. The last
    makes a communicator use its parent's network. NCCL_ALLNET_ENABLE and NCCL_SCATTER_XDC belong
    to a branch of NCCL for several data centres.

    Args:
        environ: The environment variables.
        rdma_nics: Names of the usable InfiniBand and RoCE NICs.
    """
    if environ.get("NCCL_IB_DISABLE", "0") not in ("", "0") and rdma_nics:
        yield problem(
            "NCCL_IB_DISABLE",
            what=f"is set, though {', '.join(rdma_nics)} can be used",
            why="every NCCL group goes over TCP sockets",
            mend="unset NCCL_IB_DISABLE",
        )
    if environ.get("NCCL_NET"):
        yield note(
            "NCCL_NET",
            what=f"{environ['NCCL_NET']!r} is set",
            why="it overrides the network of every group, so holmes unsets it with a warning; if it names "
            "the installed plugin's network, groups on the plugin's NICs request that network by name",
            mend="nothing to do; the settings below these findings show the network of each group",
        )
    if environ.get(SHARED, "0") != "0":
        yield note(
            SHARED,
            what="is set",
            why="a communicator that shares its parent's resources has its network too: NCCL refuses "
            "another (ncclInvalidUsage); holmes unsets it where groups have networks of their own",
            mend=f"unset {SHARED}",
        )
    for name in sorted(set(CROSS_DC) & set(environ)):
        yield note(
            name,
            what="is set",
            why="of NCCL's branch for several data centres (NVIDIA/nccl#1659), which lets one"
            " communicator use several networks; holmes gives each group one, by name",
            mend=f"unset {name}",
        )
    if environ.get("NCCL_COMM_ID"):
        yield note(
            "NCCL_COMM_ID",
            what="is set",
            why="one rendezvous address for all communicators; torch makes its own",
            mend="unset NCCL_COMM_ID",
        )


#: Prefixes of variables that only holmes's tests and `holmes lab` (emulated clusters) read.
_INTERNAL_PREFIXES = ("HOLMES_TEST", "HOLMES_LAB", "HOLMES_GPU_", "HOLMES_NCCL_SOURCE")


def _check_unknown_variables(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a finding for each variable HOLMES_... that holmes does not read, e.g. because it is misspelt."""
    set_by_holmes = "HOLMES_WORKER_PID"
    known = sorted({*map(variable_of_flag, names()), *variables(), set_by_holmes})
    for name in sorted(environ):
        is_of_holmes = name.startswith("HOLMES_") and not name.startswith(_INTERNAL_PREFIXES)
        if not is_of_holmes or name in known:
            continue
        similar = nearest(name, known)
        yield problem(
            name,
            what="holmes reads no variable of this name",
            why="the setting has no effect",
            mend=f"write {similar}" if similar else f"known: {', '.join(known)}",
        )
