"""What is wrong with the NICs of one node, as far as /sys tells: states, rates, GIDs, MTUs, drivers.

Pure functions of the NICs (cluster/sysfs/node.py), so that a tree captured on another machine is judged as
this one is; only rdma_limits() looks at the running machine.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from holmes_ext.cluster.nccl import no_verbs
from holmes_ext.cluster.nic import DEFAULT_SUBNET_PREFIX, KINDS, Nic
from holmes_ext.doctor.finding import Finding, note, problem
from holmes_ext.units import format_rate
from holmes_ext.words import grouped

#: Gb/s that a port of each adapter can do, by its hca_type (NVIDIA's adapter user manuals).
PORT_GBPS = {
    "MT4113": 56,
    "MT4115": 100,
    "MT4117": 25,
    "MT4119": 100,
    "MT4123": 200,
    "MT4125": 100,
    "MT4127": 25,
    "MT4129": 400,
    "MT4131": 800,
}
#: Kernel drivers of NICs whose RDMA side is a module of its own: net driver -> what makes class/infiniband.
RDMA_MODULES = {
    "mlx5_core": "mlx5_ib",
    "mlx4_core": "mlx4_ib",
    "mlx4_en": "mlx4_ib",
    "bnxt_en": "bnxt_re",
    "ice": "irdma",
    "i40e": "irdma",
}
DEFAULT_PREFIX = "the subnet prefix is the default one"
_LANES = re.compile(r"\((\d+)X")


def check_nics(nics: Sequence[Nic]) -> Iterator[Finding]:
    """Findings on the NICs of one node that stand for themselves."""
    in_use = [nic for nic in nics if not nic.skipped]
    for nic in in_use:
        yield from _check_state(nic)
    yield from _check_pcie(in_use)
    for kind in (name for name, nic_kind in KINDS.items() if nic_kind.layer):
        up = [nic for nic in in_use if nic.kind == kind and nic.up]
        yield from _check_siblings(up)
        yield from _check_mtus(kind, up)
    yield from _check_gid_indices(in_use)
    yield from _check_modules(nics)
    if not any(nic.usable and (nic.fast or nic.addresses) for nic in nics):
        yield problem(
            "NICs",
            "no NIC of this node can be used",
            "every one is down, without an address, or set aside",
            "see `holmes discover` for the reason of each",
        )


def check_machine(nics: Sequence[Nic], kind: str = "", live: bool = True) -> Iterator[Finding]:
    """What a node that trains has and this one lacks. kind: of its cluster, "" where nothing tells; live: the
    running machine, not a captured tree."""
    if live and not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/kfd").exists():
        yield note(
            "GPUs",
            "this machine has none (no /dev/nvidia0, no /dev/kfd)",
            "a job here would train on the CPU",
            "look at the nodes that train; on a login node or a laptop nothing is wrong",
        )
    if kind != "ethernet" and not any(nic.fast for nic in nics):
        yield note(
            "NICs",
            "none is InfiniBand or RoCE",
            "every process group of this node would go over Ethernet",
            "right for a cluster of kind ethernet; else `lspci | grep -i mell` and `holmes discover` "
            "say what is there, and whether its RDMA driver is loaded",
        )


def _check_state(nic: Nic) -> Iterator[Finding]:
    """The first thing that is wrong with it."""
    if KINDS[nic.kind].infiniband and nic.state_text.startswith("INIT"):
        yield problem(
            nic.name,
            f"the port is in state {nic.state_text}: no subnet manager has set it up",
            "the link is up, but the port has no LID: nothing can be sent",
            "start opensm on one node of the fabric, or the switch's subnet manager",
        )
    elif nic.fast and not nic.up:
        yield note(
            nic.name,
            f"the {nic.kind} port is {nic.state_text or 'down'}",
            "holmes plans without it; its node is slower than its cluster says",
            "check cable and switch port; `exclude` it in cluster.toml if that is meant so",
        )
    elif nic.kind == "roce" and nic.roce_v2_index is None:
        yield problem(
            nic.name,
            "the port has no RoCE v2 GID",
            "RoCE v1 frames do not pass routers, and NCCL's default GID index would be one of them",
            f"give {nic.ifname or 'its net device'} an IP address, or set cma_roce_mode to 2",
        )
    elif nic.up and nic.kind == "ethernet" and not nic.addresses and not nic.rdma:
        yield note(
            nic.name,
            "the interface is up and has no IP address",
            "sockets cannot use it",
            f"ip address add ADDRESS/PREFIX dev {nic.name}",
        )
    elif KINDS[nic.kind].infiniband and nic.up and nic.subnet_prefix == DEFAULT_SUBNET_PREFIX:
        yield note(
            nic.name,
            DEFAULT_PREFIX,
            "two InfiniBand clusters with this prefix cannot be told apart",
            "name the clusters in cluster.toml, or give each subnet manager its own prefix",
        )


def _check_pcie(nics: Sequence[Nic]) -> Iterator[Finding]:
    for nic in nics:
        if 0 < nic.max_rate_bps < nic.rate_bps and nic.fast:
            rates = f"PCIe carries {format_rate(nic.max_rate_bps)}, the link {format_rate(nic.rate_bps)}"
            yield problem(
                nic.name,
                rates,
                "the slot has fewer lanes or an older generation than the NIC needs",
                "move the card to a wider slot; check the riser and the BIOS's link speed",
            )


def _check_siblings(up: Sequence[Nic]) -> Iterator[Finding]:
    """A port that runs slower than another one of its kind and driver on this node."""
    for nic in up:
        best = max(
            (other for other in up if other.driver == nic.driver), key=lambda other: other.rate_bps
        )
        if 0 < nic.rate_bps < best.rate_bps:
            rates = (
                f"the link runs at {format_rate(nic.rate_bps)}, {best.name} at "
                f"{format_rate(best.rate_bps)}"
            )
            yield note(
                nic.name,
                rates,
                "a group is as fast as its slowest NIC, and the plan counts on all",
                "check cable and switch port (a bad lane trains the link down); `exclude` it if for "
                "storage",
            )


def _check_mtus(kind: str, up: Sequence[Nic]) -> Iterator[Finding]:
    mtus = {nic.name: nic.mtu for nic in up if nic.mtu}
    if len(set(mtus.values())) > 1:
        listed = ", ".join(f"{name} {mtu}" for name, mtu in mtus.items())
        yield problem(
            "MTU",
            f"the {kind} NICs differ in MTU (bytes): {listed}",
            "frames of the larger one are dropped on the way to the smaller: large messages hang",
            "ip link set DEVICE mtu BYTES, the same on all NICs of a fabric",
        )


def _check_gid_indices(nics: Sequence[Nic]) -> Iterator[Finding]:
    indices = {nic.name: nic.roce_v2_index for nic in nics if nic.kind == "roce" and nic.up}
    indices = {name: index for name, index in indices.items() if index is not None}
    if len(set(indices.values())) > 1:
        listed = ", ".join(f"{name} at {index}" for name, index in indices.items())
        yield note(
            "GID indices",
            f"the RoCE v2 GIDs have different indices: {listed}",
            "NCCL_IB_GID_INDEX is one number for the whole node, so holmes leaves it unset here",
            "NCCL 2.21 and newer find the index of each port themselves; else give the ports the same "
            "addresses setup",
        )


def _check_modules(nics: Sequence[Nic]) -> Iterator[Finding]:
    """Net devices of RDMA-capable drivers of which none shows an RDMA port."""
    silent = grouped(
        (RDMA_MODULES[nic.driver], nic.name)
        for nic in nics
        if nic.driver in RDMA_MODULES and not nic.fast and not nic.rdma
    )
    if not any(nic.fast for nic in nics):
        for module, names in silent.items():
            yield note(
                ", ".join(names),
                "the NIC can do RDMA, but /sys/class/infiniband shows no port of it",
                "its traffic would go over TCP",
                f"modprobe {module} (in a container: pass /dev/infiniband and use --network host)",
            )


def check_hcas(root: str | Path) -> Iterator[Finding]:
    """Links below what adapter and lanes can do, from class/infiniband of the /sys tree at `root`."""
    for rate_file in sorted(Path(root).glob("class/infiniband/*/ports/*/rate")):
        name = f"{rate_file.parents[2].name}:{rate_file.parent.name}"
        rate, adapter = _read(rate_file), _read(rate_file.parents[2] / "hca_type")
        gbps, lanes = re.match(r"[0-9]+(\.[0-9]+)?", rate), _LANES.search(rate)
        if not gbps or not _read(rate_file.parent / "state").endswith("ACTIVE"):
            continue
        if lanes and lanes[1] == "1":  # two lanes may be meant: HDR100 and NDR200 are 2X
            yield problem(
                name,
                f"the link runs on one lane ({rate})",
                "three of its four lanes are lost",
                "reseat or change the cable; look at `mlxlink` or the switch's port counters",
            )
        elif 10 <= float(gbps[0]) < PORT_GBPS.get(adapter, 0):
            rates = (
                f"the link runs at {float(gbps[0]):g} Gb/s, the adapter ({adapter}) can do "
                f"{PORT_GBPS[adapter]}"
            )
            yield note(
                name,
                rates,
                "switch, cable or a setting limits it",
                "check that switch port and cable are of the adapter's generation",
            )


def rdma_limits(nics: Iterable[Nic]) -> Iterator[Finding]:
    """What RDMA needs besides, of this machine: locked memory, device files, peer memory for GPUs."""
    if not any(nic.fast and nic.up for nic in nics):
        return
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY and os.geteuid() != 0:
        yield problem(
            "memlock",
            f"locked memory is limited to {soft} bytes",
            "RDMA registers its buffers as locked memory: ibv_reg_mr fails with ENOMEM",
            "`ulimit -l unlimited` (docker: --ulimit memlock=-1) for the job's user",
        )
    if why := no_verbs(
        {name: value for name, value in os.environ.items() if name != "NCCL_IB_DISABLE"}
    ):
        yield problem(
            "verbs",
            why,
            "NCCL finds no IB network here: all NCCL groups of this node go over TCP sockets",
            "docker: --device /dev/infiniband; else load ib_uverbs, install libibverbs",
        )
    modules = Path("/sys/module")
    if (modules / "nvidia").exists() and not any(
        (modules / n).exists() for n in ("nvidia_peermem", "nv_peer_mem")
    ):
        yield note(
            "nvidia_peermem",
            "the kernel module is not loaded",
            "without it (or dma-buf) GPU memory is copied through the host for every RDMA message",
            "modprobe nvidia_peermem",
        )


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")[:200].rstrip("\0").strip()
    except OSError:
        return ""
