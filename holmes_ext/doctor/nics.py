"""Checks the NICs of one node, as /sys describes them: states, rates, GIDs, MTUs and drivers.

All functions judge the NICs that they are given (cluster/sysfs/node.py), so the /sys of another machine
can be checked, too. Only rdma_limits() and check_machine() look at the running machine.
"""

from __future__ import annotations

import ipaddress
import os
import re
import resource
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from holmes_ext.cluster.nccl import why_no_verbs
from holmes_ext.cluster.nic import DEFAULT_SUBNET_PREFIX, KINDS, Nic
from holmes_ext.cluster.sysfs.node import FOREIGN
from holmes_ext.doctor.finding import Finding, note, problem
from holmes_ext.units import format_rate
from holmes_ext.words import grouped, some_of

#: Adapter, as the file hca_type has it -> rate of a port in Gb/s (NVIDIA's adapter user manuals).
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
#: Kernel driver of a network interface -> kernel module that adds RDMA, i.e. /sys/class/infiniband.
RDMA_MODULES = {
    "mlx5_core": "mlx5_ib",
    "mlx4_core": "mlx4_ib",
    "mlx4_en": "mlx4_ib",
    "bnxt_en": "bnxt_re",
    "ice": "irdma",
    "i40e": "irdma",
}
#: Kernel driver of an HCA -> its vendor.
VENDORS = {
    "mlx4_core": "NVIDIA (Mellanox)",
    "mlx5_core": "NVIDIA (Mellanox)",
    "bnxt_en": "Broadcom",
    "ice": "Intel",
    "irdma": "Intel",
    "ionic": "AMD (Pensando)",
    "qede": "Marvell",
    "hns3": "HiSilicon",
}
DEFAULT_PREFIX = "the subnet prefix is the default one"
#: Rate from which a NIC may reach GPU memory over a second PCIe function ("data direct").
_DATA_DIRECT_BPS = 800 * 10**9
_HOST_PREFIX_LENGTHS = (32, 128)  # of an address that says nothing about a subnet
_RATE = re.compile(r"[0-9]+(\.[0-9]+)?")  # Gb/s in the file rate, such as "100 Gb/sec (4X EDR)"
_LANES = re.compile(r"\((\d+)X")
_SLOWEST_CHECKED_GBPS = 10  # no finding about slower links: they are not meant for training
_MOST_READ = 200  # characters of a file


def check_nics(nics: Sequence[Nic], board_of: Mapping[str, str] | None = None) -> Iterator[Finding]:
    """Yield findings about the NICs of one node.

    Args:
        nics: All NICs of the node. Of those that a job does not use (`skipped`), only bonds, network
            namespaces and kernel modules are checked.
        board_of: HCA -> GUID of its card (see read_boards()), None if unknown.
    """
    in_use = [nic for nic in nics if not nic.skipped]
    for nic in in_use:
        yield from _check_state(nic)
    yield from _check_pcie(in_use, board_of or {})
    # Kinds with RDMA: `layer` is the link layer of their ports in /sys/class/infiniband, which is
    # "Ethernet" for RoCE. The kind "ethernet" (network devices for sockets) has no such port.
    fast_kinds = [name for name, nic_kind in KINDS.items() if nic_kind.layer]
    for kind in fast_kinds:
        up = [nic for nic in in_use if nic.kind == kind and nic.up]
        yield from _check_slower_than_others(up)
        if not KINDS[kind].infiniband:
            yield from _check_mtus(kind, up)
    yield from _check_gid_indices(in_use)
    yield from _check_infiniband_subnets(in_use)
    yield from _check_ip_subnets(in_use)
    yield from _check_vendors(in_use)
    yield from _check_bonds(nics)
    yield from _check_foreign(nics)
    # All NICs: a fast NIC, used or not, shows that a module is loaded.
    yield from _check_modules(nics)
    if not any(nic.usable and (nic.fast or nic.addresses) for nic in nics):
        yield problem(
            "NICs",
            what="no NIC of this node can be used",
            why="every one is down, without an address, or set aside",
            mend="see `holmes discover` for the reason of each",
        )


def check_machine(nics: Sequence[Nic], kind: str = "", live: bool = True) -> Iterator[Finding]:
    """Yield findings if a node has no GPU or no fast NIC.

    Args:
        nics: The NICs of the node.
        kind: Kind of the NICs of its cluster; "" if unknown.
        live: Whether the node is the running machine, and not a captured /sys.
    """
    has_gpu = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()
    if live and not has_gpu:
        yield note(
            "GPUs",
            what="this machine has none (no /dev/nvidia0, no /dev/kfd)",
            why="a job here would train on the CPU",
            mend="look at the nodes that train; on a login node or a laptop nothing is wrong",
        )
    if kind != "ethernet" and not any(nic.fast or nic.plugin_kind for nic in nics):
        yield note(
            "NICs",
            what="none is InfiniBand or RoCE, and none is of a kind that a network plugin of NCCL uses (EFA, "
            "Slingshot, gVNIC, Omni-Path)",
            why="every process group of this node would go over Ethernet",
            mend="right for a cluster of kind ethernet; else `lspci | grep -i mell` and `holmes discover` "
            "say what is there, and whether its RDMA driver is loaded",
        )


def _check_state(nic: Nic) -> Iterator[Finding]:
    """Yield a finding about the first fault of a NIC's state, if it has any.

    No subnet manager, the port is down, no RoCE v2 GID, no IP address, the default subnet prefix.
    """
    if KINDS[nic.kind].infiniband and nic.state_text.startswith("INIT"):
        yield problem(
            nic.name,
            what=f"the port is in state {nic.state_text}: no subnet manager has set it up",
            why="the link is up, but the port has no LID: nothing can be sent",
            mend="start opensm on one node of the fabric, or the switch's subnet manager",
        )
    elif nic.fast and not nic.up:
        yield note(
            nic.name,
            what=f"the {nic.kind} port is {nic.state_text or 'down'}",
            why="holmes plans without it; its node is slower than its cluster says",
            mend="check cable and switch port; `exclude` it in cluster.toml if that is meant so",
        )
    elif nic.kind == "roce" and nic.roce_v2_index is None:
        yield problem(
            nic.name,
            what="the port has no RoCE v2 GID",
            why="RoCE v1 frames do not pass routers, and NCCL's default GID index would be one of them",
            mend="give its net device an IP address, or set cma_roce_mode to 2",
        )
    elif nic.up and nic.kind == "ethernet" and not nic.addresses and not nic.rdma:
        yield note(
            nic.name,
            what="the interface is up and has no IP address",
            why="sockets cannot use it",
            mend="ip address add ADDRESS/PREFIX dev DEVICE; nothing, if nothing is to go over it",
        )
    elif KINDS[nic.kind].infiniband and nic.up and nic.subnet_prefix == DEFAULT_SUBNET_PREFIX:
        yield note(
            nic.name,
            what=DEFAULT_PREFIX,
            why="two InfiniBand clusters with this prefix cannot be told apart: a job on several nodes "
            "ends at start-up without a cluster.toml",
            mend="name the clusters in cluster.toml, or give each subnet manager its own prefix",
        )


def _check_pcie(nics: Sequence[Nic], board_of: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a finding for each fast NIC whose PCIe slots are slower than its link.

    Some cards reach one link over several slots (Socket Direct, DGX Spark): the slots' rates add up.
    The finding is only a note for NICs of 800 Gb/s or more. They may have a second PCIe function for
    GPU memory ("data direct"), whose rate is not known here.

    Args:
        nics: NICs of the node.
        board_of: HCA -> GUID of its card.
    """
    fast_nics = [nic for nic in nics if nic.fast]
    for nic in fast_nics:
        if not nic.max_rate_bps:  # the rate of the NIC's PCIe slot is not known
            continue
        board = board_of.get(nic.device, nic.device)
        slots = {  # PCI address without the function -> rate of the slot
            other.pci.rpartition(".")[0]: other.max_rate_bps
            for other in fast_nics
            if board_of.get(other.device, other.device) == board
        }
        pcie_bps = sum(slots.values())
        if pcie_bps < nic.rate_bps:
            make = note if nic.rate_bps >= _DATA_DIRECT_BPS else problem
            yield make(
                nic.name,
                what=f"PCIe carries {format_rate(pcie_bps)}, the link {format_rate(nic.rate_bps)}",
                why="the slot has fewer lanes or an older generation than the NIC needs",
                mend="move the card to a wider slot; check the riser and the BIOS's link speed",
            )


def read_boards(root: str | Path, nics: Iterable[Nic]) -> dict[str, str]:
    """Return the GUID of the card of each HCA. All PCIe functions of a card share it.

    Args:
        root: Folder of /sys, or of a captured copy.
        nics: The NICs of the node.
    """
    boards = {}
    for nic in nics:
        guid = _read_small_file(Path(root, "class/infiniband", nic.device, "sys_image_guid"))
        if nic.fast and guid.strip("0:"):
            boards[nic.device] = guid
    return boards


def _check_slower_than_others(up: Sequence[Nic]) -> Iterator[Finding]:
    """Yield a finding for each NIC that is slower than another NIC with the same driver on this node.

    Args:
        up: NICs of one kind that are up.
    """
    for nic in up:
        siblings = [other for other in up if other.driver == nic.driver]
        best = max(siblings, key=lambda other: other.rate_bps)
        if 0 < nic.rate_bps < best.rate_bps:
            rates = (
                f"the link runs at {format_rate(nic.rate_bps)}, {best.name} at "
                f"{format_rate(best.rate_bps)}"
            )
            yield note(
                nic.name,
                what=rates,
                why="a group is as fast as its slowest NIC, and the plan counts on all",
                mend="check cable and switch port (a bad lane trains the link down); `exclude` it if for "
                "storage",
            )


def _check_mtus(kind: str, up: Sequence[Nic]) -> Iterator[Finding]:
    """Yield a finding if NICs of one kind, driver and rate have different MTUs.

    NICs of another rate are left alone: mostly they are a front end or storage.

    Args:
        kind: Kind of the NICs, such as "roce".
        up: NICs of this kind that are up.
    """
    alike = grouped(((nic.driver, nic.rate_bps), nic) for nic in up if nic.mtu)
    for nics in alike.values():
        if len({nic.mtu for nic in nics}) > 1:
            listed = ", ".join(f"{nic.name} {nic.mtu}" for nic in nics)
            yield problem(
                "MTU",
                what=f"the {kind} NICs differ in MTU (bytes): {listed}",
                why="NCCL takes the smaller MTU of both ends, so these links are slower; where a switch has "
                "the smaller one, large messages are dropped and hang",
                mend="ip link set DEVICE mtu BYTES, the same on all NICs of a fabric; `exclude` those that "
                "are not for training in cluster.toml",
            )


def _check_gid_indices(nics: Sequence[Nic]) -> Iterator[Finding]:
    """Yield a finding if the RoCE v2 GIDs of the NICs with an IP address have different indices."""
    indices = {}
    for nic in nics:
        if nic.kind == "roce" and nic.up and nic.addresses and nic.roce_v2_index is not None:
            indices[nic.name] = nic.roce_v2_index
    if len(set(indices.values())) > 1:
        listed = ", ".join(f"{name} at {index}" for name, index in indices.items())
        yield note(
            "GID indices",
            what=f"the RoCE v2 GIDs have different indices: {listed}",
            why="NCCL_IB_GID_INDEX is one number for the whole node, so holmes leaves it unset here",
            mend="NCCL 2.21 and newer find the index of each port themselves; else give the ports the same "
            "addresses setup",
        )


def _check_infiniband_subnets(nics: Sequence[Nic]) -> Iterator[Finding]:
    """Yield a finding if the InfiniBand ports of a node are in several subnets."""
    ports_in = grouped(
        (nic.subnet_prefix, nic.name)
        for nic in nics
        if KINDS[nic.kind].infiniband and nic.up and nic.subnet_prefix
    )
    if len(ports_in) > 1:
        listed = "; ".join(f"{prefix}: {', '.join(names)}" for prefix, names in ports_in.items())
        yield note(
            "InfiniBand subnets",
            what=f"the ports of this node are in {len(ports_in)}: {listed}",
            why="NCCL may connect ports of two subnets, which fails without an InfiniBand router (error 12, "
            "NVIDIA/nccl#733)",
            mend="`exclude` the ports that are not for training in cluster.toml; for rails, "
            "NCCL_CROSS_NIC=0 keeps each connection in its subnet",
        )


def _check_ip_subnets(nics: Sequence[Nic]) -> Iterator[Finding]:
    """Yield a finding for each IP subnet with several NICs of a node."""
    names_in: dict[str, dict[str, None]] = {}  # subnet -> net devices, or ports without any
    for nic in nics:
        if not nic.up:
            continue
        # A RoCE port is in the list twice. Its second entry, the net device, names the port in `rdma`.
        is_second_entry = bool(nic.rdma)
        # InfiniBand addresses its ports by LID: the IP addresses (IPoIB) do not matter to verbs.
        if is_second_entry or KINDS[nic.kind].infiniband:
            continue
        for subnet in ip_subnets(nic):
            names_in.setdefault(subnet, {})[nic.ifname or nic.name] = None
    for subnet, names in names_in.items():
        if len(names) > 1:
            yield note(
                some_of(names),
                what=f"{len(names)} NICs of this node are in one IP subnet, {subnet}",
                why="by default Linux sends all of their sockets through one of them, and answers ARP "
                "on any: RoCE frames may then reach the wrong port",
                mend="give each NIC a subnet of its own; or, as clouds do, a routing rule for each "
                "address and sysctl net.ipv4.conf.all.arp_ignore=1 arp_announce=2",
            )


def ip_subnets(nic: Nic) -> list[str]:
    """Return the IP subnets of a NIC, without those that hold a single host or are link-local."""
    networks = [ipaddress.ip_interface(address).network for address in nic.addresses]
    return [
        str(network)
        for network in networks
        if network.prefixlen not in _HOST_PREFIX_LENGTHS and not network.is_link_local
    ]


def _check_vendors(nics: Sequence[Nic]) -> Iterator[Finding]:
    """Yield a finding if the fast NICs of one kind are from several vendors."""
    for kind, of_kind in grouped((nic.kind, nic) for nic in nics if nic.fast and nic.up).items():
        names_of = grouped((vendor_of(nic), nic.name) for nic in of_kind)
        if len(names_of) > 1:
            listed = "; ".join(
                f"{vendor}: {', '.join(names)}" for vendor, names in names_of.items()
            )
            yield note(
                "vendors",
                what=f"the {kind} NICs of this node are of {len(names_of)}: {listed}",
                why="NCCL uses all of them for every group: rates, congestion control and GID tables differ "
                "between vendors",
                mend="`exclude` those that are not for training in cluster.toml",
            )


def vendor_of(nic: Nic) -> str:
    """Return the vendor of a NIC, or the name of its driver if the vendor is not known."""
    return VENDORS.get(nic.driver, nic.driver or "unknown")


def _check_bonds(nics: Sequence[Nic]) -> Iterator[Finding]:
    """Yield a finding for each bond that has a member without a link."""
    nic_of = {nic.device: nic for nic in nics if not nic.fast}
    for nic in nics:
        if nic.fast or nic.skipped or nic.driver not in ("bond", "team"):
            continue
        members = [nic_of[name] for name in nic.members if name in nic_of]
        lost = [f"{member.name} ({member.state_text})" for member in members if not member.up]
        if lost and nic.up:
            yield note(
                nic.name,
                what=f"the {nic.driver} runs without its member {', '.join(lost)}",
                why="it carries a part of its rate, and fails with the next link",
                mend="check cable and switch port of the member",
            )


def _check_foreign(nics: Sequence[Nic]) -> Iterator[Finding]:
    """Yield a finding if no RDMA port can be used, because their net devices are in another namespace."""
    foreign = [nic.name for nic in nics if nic.skipped == FOREIGN and nic.up]
    if foreign and not any(nic.fast and nic.usable for nic in nics):
        yield problem(
            some_of(foreign),
            what="/sys shows the RoCE port, but its net device is in another network namespace",
            why='a connection over it fails with "No such device" (NVIDIA/nccl#925), so holmes leaves it out '
            "and groups go over TCP",
            mend="give the container the host's network (hostNetwork: true, --network host), or a virtual "
            "function with its net device (SR-IOV network operator)",
        )


def _check_modules(nics: Sequence[Nic]) -> Iterator[Finding]:
    """Yield findings about NICs that can do RDMA and whose kernel module for it is not loaded.

    A node that has an RDMA port of any kind is not checked: its other NICs may be meant for Ethernet
    only.
    """
    if any(nic.kind != "ethernet" for nic in nics):
        return
    # Kernel module -> names of the NICs that need it. `rdma` of an Ethernet NIC names the RoCE port
    # of the same hardware; "" if the kernel shows none.
    without_rdma = grouped(
        (RDMA_MODULES[nic.driver], nic.name)
        for nic in nics
        if nic.driver in RDMA_MODULES and not nic.fast and not nic.rdma
    )
    for module, names in without_rdma.items():
        yield note(
            ", ".join(names),
            what="the NIC can do RDMA, but /sys/class/infiniband shows no port of it",
            why="its traffic would go over TCP",
            mend=f"modprobe {module} (in a container: pass /dev/infiniband and use --network host)",
        )


def check_hcas(root: str | Path, nics: Sequence[Nic]) -> Iterator[Finding]:
    """Yield findings about InfiniBand and RoCE ports with a link below the adapter's full rate.

    An InfiniBand link that runs on one of its four lanes is a problem. (Ethernet of 10 to 100 Gb/s may
    have one lane.) A lower rate is a note, because the switch, the cable or a setting may limit it.

    Args:
        root: Folder of /sys, or of a captured copy.
        nics: The NICs of the node. Those that are down, or that a job does not use (`skipped`), are not
            checked.
    """
    for nic in nics:
        if not nic.fast or not nic.usable:
            continue
        hca = Path(root, "class/infiniband", nic.device)
        rate = _read_small_file(hca / "ports" / str(nic.port) / "rate")
        adapter = _read_small_file(hca / "hca_type")
        rate_match = _RATE.match(rate)
        lanes = _LANES.search(rate)
        if rate_match is None:
            continue
        rate_gbps = float(rate_match[0])
        # An InfiniBand link has four lanes. A single lane is a fault; two may be meant (HDR100 and NDR200).
        if KINDS[nic.kind].infiniband and lanes and lanes[1] == "1":
            yield problem(
                nic.name,
                what=f"the link runs on one lane ({rate})",
                why="three of its four lanes are lost",
                mend="reseat or change the cable; look at `mlxlink` or the switch's port counters",
            )
        # PORT_GBPS: adapter ("MT4129") -> full rate of a port; adapters without an entry are not
        # checked.
        elif _SLOWEST_CHECKED_GBPS <= rate_gbps < PORT_GBPS.get(adapter, 0):
            rates = (
                f"the link runs at {rate_gbps:g} Gb/s, the adapter ({adapter}) can do "
                f"{PORT_GBPS[adapter]}"
            )
            yield note(
                nic.name,
                what=rates,
                why="switch, cable or a setting limits it",
                mend="check that switch port and cable are of the adapter's generation",
            )


def rdma_limits(nics: Iterable[Nic]) -> Iterator[Finding]:
    """Yield findings about settings of this machine that RDMA needs: locked memory, devices, modules."""
    if not any(nic.fast and nic.up for nic in nics):
        return
    # The superuser may lock any amount of memory.
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY and os.geteuid() != 0:
        yield problem(
            "memlock",
            what=f"locked memory is limited to {soft} bytes",
            why="RDMA registers its buffers as locked memory: ibv_reg_mr fails with ENOMEM",
            mend="`ulimit -l unlimited` (docker: --ulimit memlock=-1) for the job's user",
        )
    if not any(KINDS[nic.kind].verbs and nic.up for nic in nics):
        return
    # check_variables() has a finding of its own about NCCL_IB_DISABLE.
    environ = {name: value for name, value in os.environ.items() if name != "NCCL_IB_DISABLE"}
    reason = why_no_verbs(environ)
    if reason:
        yield problem(
            "verbs",
            what=reason,
            why="NCCL finds no IB network here: all NCCL groups of this node go over TCP sockets",
            mend="docker: --device /dev/infiniband; else load ib_uverbs, install libibverbs",
        )
    modules = Path("/sys/module")
    peer_modules = [modules / "nvidia_peermem", modules / "nv_peer_mem"]
    has_peer_module = any(module.exists() for module in peer_modules)
    if (modules / "nvidia").exists() and not has_peer_module:
        yield note(
            "nvidia_peermem",
            what="the kernel module is not loaded",
            why="without it (or dma-buf) GPU memory is copied through the host for every RDMA message",
            mend="modprobe nvidia_peermem",
        )


def _read_small_file(path: Path) -> str:
    """Return the content of a small file; "" if it cannot be read."""
    try:
        return path.read_text(errors="replace")[:_MOST_READ].rstrip("\0").strip()
    except OSError:
        return ""
