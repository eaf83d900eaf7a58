"""Environment variables that decide over networks: which of them contradict this node's NICs, or holmes.

NCCL's: docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html; gloo's: torch's c10d/ProcessGroupGloo.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from holmes_ext.cluster.nccl import SHARED
from holmes_ext.cluster.nic import Nic
from holmes_ext.doctor.finding import Finding, note, problem
from holmes_ext.options import names, variables
from holmes_ext.options import variable as twin
from holmes_ext.words import nearest

#: What must be alike on all nodes of a job, where it is set at all.
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
#: Of NCCL's branch whose communicators cross from one fabric to another.
CROSS_DC = ("NCCL_ALLNET_ENABLE", "NCCL_SCATTER_XDC")
_LEFT_ALONE = "holmes keeps your setting"


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Those of COMPARED that are set."""
    return {name: environ[name] for name in COMPARED if environ.get(name)}


def check_variables(environ: Mapping[str, str], nics: Sequence[Nic]) -> Iterator[Finding]:
    """Findings on the variables of `environ`, on a node with `nics`."""
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        if environ.get(variable):
            yield from _interfaces(variable, environ[variable], nics)
    yield from _hcas(environ.get("NCCL_IB_HCA", ""), [nic for nic in nics if nic.fast])
    yield from _gid_index(
        environ.get("NCCL_IB_GID_INDEX", ""), [n for n in nics if n.kind == "roce" and n.usable]
    )
    yield from _switches(environ, [nic.name for nic in nics if nic.fast and nic.usable])
    yield from _misspelt(environ)


def _interfaces(variable: str, value: str, nics: Sequence[Nic]) -> Iterator[Finding]:
    have = {name for nic in nics for name in nic.netdevs} | {"lo"}
    nccl = (
        variable == "NCCL_SOCKET_IFNAME"
    )  # a prefix, "=" for exact names, "^" for names to leave out
    prefixes = nccl and not value.startswith("=")
    wanted = (
        [] if value.startswith("^") else [name for name in value.lstrip("=").split(",") if name]
    )
    lost = [
        name
        for name in wanted
        if name not in have and not (prefixes and any(h.startswith(name) for h in have))
    ]
    if lost:
        what = f"{value!r} names {', '.join(lost)}, which this node does not have ({', '.join(sorted(have))})"
        yield problem(
            variable,
            what,
            "the library ends with an error, or waits for an interface that never comes "
            "(NVIDIA/nccl#1580)",
            f"unset {variable}: holmes sets it on each node",
        )
    elif variable == "GLOO_SOCKET_IFNAME":
        yield note(
            variable,
            f"{value!r} is set",
            "every gloo group uses it: groups inside a cluster stay off their fast NIC",
            f"unset {variable}",
        )
    elif nccl:
        yield note(
            variable, f"{value!r} is set", _LEFT_ALONE, f"unset {variable} unless it is meant so"
        )


def _hcas(value: str, ports: Sequence[Nic]) -> Iterator[Finding]:
    if not value or value.startswith("^"):
        return
    variable, exact = "NCCL_IB_HCA", value.startswith("=")
    names = [name for name in value.lstrip("=").split(",") if name]
    lost = [
        name
        for name in names
        if not any(
            name in (nic.device, nic.name)
            or not exact
            and nic.device.startswith(name.split(":")[0])
            for nic in ports
        )
    ]
    down = [nic.name for nic in ports if not nic.up and nic.name in names]
    if lost:
        have = ", ".join(nic.name for nic in ports) or "none"
        yield problem(
            variable,
            f"{value!r} names {', '.join(lost)}, which this node does not have (its HCAs: {have})",
            "NCCL skips it silently and takes what is left, or sockets; ranks then disagree and "
            "hang (NVIDIA/nccl#1277)",
            f"unset {variable}: holmes sets it on each node",
        )
    elif down:
        yield problem(
            variable,
            f"{value!r} names {', '.join(down)}, which is down",
            "NCCL leaves it out on this node only",
            "bring the port up or take it out",
        )
    else:
        yield note(
            variable, f"{value!r} is set", _LEFT_ALONE, f"unset {variable} unless it is meant so"
        )


def _gid_index(value: str, roce: Sequence[Nic]) -> Iterator[Finding]:
    if not value or not roce:
        return
    variable = "NCCL_IB_GID_INDEX"
    if not value.lstrip("-").isdecimal():
        yield problem(
            variable,
            f"{value!r} is no number",
            "NCCL takes it for 0, a RoCE v1 GID",
            f"unset {variable}",
        )
        return
    types = {
        nic.name: next((gid.type for gid in nic.gids if gid.index == int(value)), "empty")
        for nic in roce
    }
    wrong = [f"{name} ({type_})" for name, type_ in types.items() if type_ != "roce_v2"]
    if wrong and int(value) >= 0:
        best = ", ".join(f"{nic.name} {nic.roce_v2_index}" for nic in roce)
        yield problem(
            variable,
            f"entry {value} is no RoCE v2 GID of {', '.join(wrong)}",
            "connections over it fail (ibv_modify_qp: no route) or do not pass a router",
            f"unset it, or take the v2 index: {best}",
        )


def _switches(environ: Mapping[str, str], rdma: Sequence[str]) -> Iterator[Finding]:
    if environ.get("NCCL_IB_DISABLE", "0") not in ("", "0") and rdma:
        yield problem(
            "NCCL_IB_DISABLE",
            f"is set, though {', '.join(rdma)} can be used",
            "every NCCL group goes over TCP sockets",
            "unset NCCL_IB_DISABLE",
        )
    if environ.get("NCCL_NET"):
        yield note(
            "NCCL_NET",
            f"{environ['NCCL_NET']!r} is set",
            "it overrides the network of every group; holmes unsets it with a warning",
            "unset NCCL_NET",
        )
    if environ.get(SHARED, "0") != "0":
        yield note(
            SHARED,
            "is set",
            "a communicator that shares its parent's resources has its network too: NCCL refuses "
            "another (ncclInvalidUsage); holmes unsets it where groups have networks of their own",
            f"unset {SHARED}",
        )
    for name in sorted(set(CROSS_DC) & set(environ)):
        yield note(
            name,
            "is set",
            "of NCCL's branch for several data centres (NVIDIA/nccl#1659), which lets one"
            " communicator use several networks; holmes gives each group one, by name",
            f"unset {name}",
        )
    if environ.get("NCCL_COMM_ID"):
        yield note(
            "NCCL_COMM_ID",
            "is set",
            "one rendezvous address for all communicators; torch makes its own",
            "unset NCCL_COMM_ID",
        )


def _misspelt(environ: Mapping[str, str]) -> Iterator[Finding]:
    known = sorted(
        {*map(twin, names()), *variables(), "HOLMES_WORKER_PID"}
    )  # the last is set by holmes
    for name in sorted(environ):
        if (
            name.startswith("HOLMES_")
            and name not in known
            and not name.startswith(
                ("HOLMES_TEST", "HOLMES_LAB", "HOLMES_GPU_", "HOLMES_NCCL_SOURCE")
            )
        ):
            near = nearest(name, known)
            yield problem(
                name,
                "holmes reads no variable of this name",
                "the setting has no effect",
                f"write {near}" if near else f"known: {', '.join(known)}",
            )
