"""Environment variables that decide over networks: which of them contradict this node's NICs, or holmes.

NCCL's: docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html; gloo's: torch/csrc/distributed/c10d/ProcessGroupGloo.cpp.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from holmes_ext.cluster.nic import Nic
from holmes_ext.doctor.finding import Finding, note, problem
from holmes_ext.options import NAMES

#: What must be alike on all nodes of a job, where it is set at all.
COMPARED = (
    "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_IB_DISABLE", "NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_ALGO", "NCCL_PROTO", "NCCL_IB_TC",
    "NCCL_P2P_DISABLE", "NCCL_CROSS_NIC", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "CUDA_DEVICE_MAX_CONNECTIONS", "HOLMES", "HOLMES_DISABLE",
)  # fmt: skip
#: HOLMES_* that are no twins of flags.
_OWN = ("HOLMES_NODE", "HOLMES_SYSFS", "HOLMES_DISABLE", "HOLMES_WORKER_PID")


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Those of COMPARED that are set."""
    return {name: environ[name] for name in COMPARED if environ.get(name)}


def check_variables(environ: Mapping[str, str], nics: Sequence[Nic]) -> list[Finding]:
    """Findings on the variables of `environ`, on a node with `nics`."""
    return [*_interfaces(environ, nics), *_hcas(environ, nics), *_gid_index(environ, nics), *_switches(environ, nics), *_misspelt(environ)]


def _interfaces(environ: Mapping[str, str], nics: Sequence[Nic]) -> list[Finding]:
    names = {name for nic in nics for name in nic.netdevs} | {"lo"}
    findings = []
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        value = environ.get(variable, "")
        if not value:
            continue
        exact, value_ = value.startswith("="), value.lstrip("=")
        wanted = [name for name in value_.split(",") if name]
        nccl = variable == "NCCL_SOCKET_IFNAME"  # a prefix, "=" for exact names, "^" for names to leave out
        if not value.startswith("^"):
            lost = [name for name in wanted if not any(have == name or nccl and not exact and have.startswith(name) for have in names)]
            if lost:
                why = "the library ends with an error, or waits for an interface that never comes (NVIDIA/nccl#1580)"
                findings.append(
                    problem(
                        variable,
                        f"{value!r} names {', '.join(lost)}, which this node does not have ({', '.join(sorted(names))})",
                        why,
                        f"unset {variable}: holmes sets it on each node",
                    )
                )
                continue
        if variable == "GLOO_SOCKET_IFNAME":
            findings.append(
                note(variable, f"{value!r} is set", "every gloo group uses it: groups inside a cluster stay off their fast NIC", f"unset {variable}")
            )
        elif nccl:
            findings.append(note(variable, f"{value!r} is set", "holmes leaves a setting of yours alone", f"unset {variable} unless it is meant so"))
    return findings


def _hcas(environ: Mapping[str, str], nics: Sequence[Nic]) -> list[Finding]:
    value = environ.get("NCCL_IB_HCA", "")
    if not value or value.startswith("^"):
        return []
    ports = [nic for nic in nics if nic.kind != "ethernet"]
    exact = value.startswith("=")
    lost = [
        name for name in value.lstrip("=").split(",")
        if name and not any(name in (nic.device, nic.name) or not exact and nic.device.startswith(name.split(":")[0]) for nic in ports)
    ]  # fmt: skip
    if lost:
        have = ", ".join(nic.name for nic in ports) or "none"
        why = "NCCL skips it silently and takes what is left, or sockets; ranks then disagree and hang (NVIDIA/nccl#1277)"
        return [
            problem(
                "NCCL_IB_HCA",
                f"{value!r} names {', '.join(lost)}, which this node does not have (its HCAs: {have})",
                why,
                "unset NCCL_IB_HCA: holmes sets it on each node",
            )
        ]
    down = [nic.name for nic in ports if not nic.up and nic.name in value.lstrip("=").split(",")]
    if down:
        return [
            problem(
                "NCCL_IB_HCA",
                f"{value!r} names {', '.join(down)}, which is down",
                "NCCL leaves it out on this node only",
                "bring the port up or take it out",
            )
        ]
    return [note("NCCL_IB_HCA", f"{value!r} is set", "holmes leaves a setting of yours alone", "unset NCCL_IB_HCA unless it is meant so")]


def _gid_index(environ: Mapping[str, str], nics: Sequence[Nic]) -> list[Finding]:
    value = environ.get("NCCL_IB_GID_INDEX", "")
    roce = [nic for nic in nics if nic.kind == "roce" and nic.usable]
    if not value or not roce:
        return []
    if not value.lstrip("-").isdecimal():
        return [problem("NCCL_IB_GID_INDEX", f"{value!r} is no number", "NCCL takes it for 0, a RoCE v1 GID", "unset NCCL_IB_GID_INDEX")]
    types = {nic.name: next((gid.type for gid in nic.gids if gid.index == int(value)), "empty") for nic in roce}
    wrong = [f"{name} ({type_})" for name, type_ in types.items() if type_ != "roce_v2"]
    if wrong and int(value) >= 0:
        why = "connections over it fail (ibv_modify_qp: no route) or do not pass a router"
        best = ", ".join(f"{nic.name} {nic.roce_v2_index}" for nic in roce)
        return [
            problem("NCCL_IB_GID_INDEX", f"entry {value} is no RoCE v2 GID of {', '.join(wrong)}", why, f"unset it, or take the v2 index: {best}")
        ]
    return []


def _switches(environ: Mapping[str, str], nics: Sequence[Nic]) -> list[Finding]:
    findings = []
    rdma = [nic.name for nic in nics if nic.kind != "ethernet" and nic.usable]
    if environ.get("NCCL_IB_DISABLE", "0") not in ("", "0") and rdma:
        findings.append(
            problem(
                "NCCL_IB_DISABLE", f"is set, though {', '.join(rdma)} can be used", "every NCCL group goes over TCP sockets", "unset NCCL_IB_DISABLE"
            )
        )
    if environ.get("NCCL_NET"):
        why = "it overrides the network of every group; holmes unsets it with a warning"
        findings.append(note("NCCL_NET", f"{environ['NCCL_NET']!r} is set", why, "unset NCCL_NET"))
    if environ.get("NCCL_COMM_ID"):
        findings.append(note("NCCL_COMM_ID", "is set", "one rendezvous address for all communicators; torch makes its own", "unset NCCL_COMM_ID"))
    return findings


def _misspelt(environ: Mapping[str, str]) -> list[Finding]:
    known = {f"HOLMES_{name.upper()}" for name in NAMES} | set(_OWN) | {"HOLMES"}
    findings = []
    for name in sorted(environ):
        if name.startswith("HOLMES_") and name not in known and not name.startswith(("HOLMES_TEST", "HOLMES_LAB")):
            near = difflib.get_close_matches(name, known, 1)
            findings.append(
                problem(
                    name,
                    "holmes reads no variable of this name",
                    "the setting has no effect",
                    f"write {near[0]}" if near else f"known: {', '.join(sorted(known))}",
                )
            )
    return findings
