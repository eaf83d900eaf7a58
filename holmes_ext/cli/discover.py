"""Command `holmes discover`: shows the NICs of a node, or makes a cluster.toml from a node list.

The table of NICs says for each NIC whether a job would use it, and why not. With --from,
show/sources.py reads the nodes that Slurm, Kubernetes or a hostfile list, and writes a cluster.toml, which
describes the clusters.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import chain
from typing import Any

from holmes_ext.cli.show import sources
from holmes_ext.cli.show.table import Column, Screen
from holmes_ext.cluster.addresses import captured_addresses
from holmes_ext.cluster.nic import DEFAULT_SUBNET_PREFIX, KINDS, Nic
from holmes_ext.cluster.node_report import lab_remark, sysfs_root
from holmes_ext.cluster.sysfs.node import read_nics, select
from holmes_ext.doctor.finding import Finding
from holmes_ext.doctor.nics import DEFAULT_PREFIX, check_nics
from holmes_ext.errors import HolmesError
from holmes_ext.units import format_rate

#: Shell command that captures the parts of /sys that `holmes discover` reads. Links stay links. Of
#: the devices behind them, only the named files are read: reading others (PCI BARs, vpd) may
#: disturb the machine. Each `find` begins with class/net, because without any path it would search
#: all of /sys. tar warns that files shrank (/sys reports 4096 bytes for each) and pads them with
#: NULs, which is harmless.
CAPTURE = (
    "cd /sys && ip -j addr > /tmp/ip_addr.json; "
    "R='realpath -eq --relative-to=.'; "
    "{ find class/net class/infiniband; "
    "find class/net $($R class/net/*) -maxdepth 2 -not -path '*/queues*' -not -path '*/statistics*'; "
    "find class/net $($R class/infiniband/*) -not -path '*counters*'; "
    "find class/net $($R class/net/*/device class/infiniband/*/device) -maxdepth 1 "
    "'(' -type l -o -name uevent -o -name numa_node -o -name 'current_link_*' -o -name net -o -name "
    "infiniband ')'; } 2>/dev/null | sort -u | tar -cz --no-recursion --ignore-failed-read --transform "
    '"flags=r;s,^,$(hostname)/," -f /tmp/$(hostname).tar.gz -T - -C /tmp ip_addr.json 2>/dev/null'
)

_EPILOG = f"""\
To show the NICs of another machine, run the command below there. It writes /tmp/HOSTNAME.tar.gz.
Unpack the file here with `tar -xzf HOSTNAME.tar.gz`, and pass the folder HOSTNAME to --sysfs:

{CAPTURE}

Exit status: 0 if at least one NIC is usable, 1 if none is, 2 on bad input.
"""


def add_parser(subparsers: Any) -> None:
    """Add the command `discover` with its options to the parser of `holmes`."""
    parser = subparsers.add_parser(
        "discover",
        help="show the NICs of this node that a job would use",
        description="Show the NICs of this node and mark those that a job would use. With --from, make a "
        "cluster.toml from the nodes that Slurm, Kubernetes, a hostfile or outputs of ibstat list.",
        epilog=_EPILOG.replace("%", "%%"),
    )
    parser.add_argument(
        "--sysfs",
        metavar="DIR",
        default=sysfs_root(os.environ),
        help="read the /sys tree in DIR that was captured on another machine (see below), with its "
        "addresses in DIR/ip_addr.json (default: this machine's /sys)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--include",
        metavar="P",
        action="append",
        nargs="+",
        default=[],
        help="use only NICs that match: mlx5_0, mlx5_0:1, or a network device; wildcards allowed",
    )
    parser.add_argument(
        "--exclude",
        metavar="P",
        action="append",
        nargs="+",
        default=[],
        help="do not use NICs that match",
    )
    sources.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print this machine's NICs as a table or JSON; with --from, make a cluster.toml instead.

    --from reads the nodes of a cluster from Slurm, Kubernetes or a host file.

    Returns:
        The exit status: 0 if at least one NIC is usable, otherwise 1. A NIC without RDMA is usable
        only if it has an address. With --from: the status of sources.run().

    Raises:
        HolmesError: the input is bad.
    """
    if args.source:
        return sources.run(args)
    for name in ("output", "rate", "kind", "partition", "topology"):
        if getattr(args, name):
            raise HolmesError(
                f"--{name} only applies to --from slurm, kubernetes or hostfile; add one"
            )
    real_root = os.path.realpath(args.sysfs)
    is_this_machine = real_root == "/sys"
    node = socket.gethostname() if is_this_machine else os.path.basename(real_root)
    # --sysfs may name a copy of /sys from another machine, perhaps without IP addresses.
    lacks_addresses = not is_this_machine and captured_addresses(args.sysfs) is None
    # The options may be given several times: each time with a list of patterns.
    include = list(chain.from_iterable(args.include))
    exclude = list(chain.from_iterable(args.exclude))
    nics = _mark_unused(read_nics(args.sysfs), include, exclude)
    # RDMA (`fast`) needs no address, but sockets do. Unknown addresses count as present.
    is_any_usable = any(
        nic.usable and (nic.fast or nic.addresses or lacks_addresses) for nic in nics
    )
    if args.json:
        document = {"version": 1, "node": node, "nics": [asdict(nic) for nic in nics]}
        print(json.dumps(document, indent=2))
    else:
        screen = Screen()
        _show_nics(screen, nics, node)
        if lacks_addresses:
            missing = f"{args.sysfs} holds no ip_addr.json (write it there with `ip -j addr`)"
            screen.line(f"note: IP addresses are unknown: {missing}")
        if not is_any_usable:
            screen.line(
                "note: no usable NIC: every one is down, without an address, or set aside for the "
                "reason given"
            )
    return 0 if is_any_usable else 1


def _show_nics(screen: Screen, nics: Sequence[Nic], node: str) -> None:
    """Print a table of the NICs and notes about them.

    Args:
        screen: Output.
        nics: All NICs of the node.
        node: Name of the node.
    """
    findings = list(check_nics(nics))  # of `holmes doctor`
    ordered = sorted(nics, key=_order_by_use)
    rows = [_row_of_nic(nic, findings) for nic in ordered]
    screen.table(COLUMNS, rows, f"NICs of {node}", [_style_of_row(nic) for nic in ordered])
    with_default_prefix = [finding.about for finding in findings if finding.what == DEFAULT_PREFIX]
    if with_default_prefix:
        screen.line(
            f"note: {', '.join(with_default_prefix)}: InfiniBand subnet prefix {DEFAULT_SUBNET_PREFIX} "
            "is the default; two clusters with this prefix cannot be told apart: say which nodes belong "
            "together in cluster.toml"
        )
    # Inside `holmes lab`, which emulates clusters on one machine: these NICs are not real.
    remark = lab_remark(os.environ)
    if remark:
        screen.line(f"note: {remark}")


def _style_of_row(nic: Nic) -> str:
    """Return the style of rich for a NIC's row."""
    if nic.skipped:
        return "dim"
    return "" if nic.up else "yellow"


def _mark_unused(nics: Sequence[Nic], include: Sequence[str], exclude: Sequence[str]) -> list[Nic]:
    """Return all NICs, with a reason in `skipped` for each NIC that a job would not use.

    Args:
        nics: All NICs of a node.
        include: Patterns of --include.
        exclude: Patterns of --exclude.

    Raises:
        HolmesError: a pattern matches no NIC.
    """
    chosen = {nic.name: nic for nic in select(nics, include, exclude)}
    # The names without --exclude, to tell which of the two options leaves a NIC out.
    included = {nic.name for nic in select(nics, include)}
    marked = []
    for nic in nics:
        if nic.name in chosen:
            marked.append(chosen[nic.name])
            continue
        by_option = "excluded (--exclude)" if nic.name in included else "not in --include"
        marked.append(replace(nic, skipped=nic.skipped or by_option))
    return marked


#: Columns of the table. Narrow terminals lose the ones first that only show where a NIC is located.
COLUMNS = (
    Column("NIC"),
    Column("kind"),
    Column("state"),
    Column("rate", right=True),
    Column("net device", wrap=10, drop=2),
    Column("addresses", wrap=18, drop=1),
    Column("v2 GID", right=True, drop=3),
    Column("subnet prefix", drop=4),
    Column("LID", right=True, drop=5),
    Column("NUMA", right=True, drop=6),
    Column("PCI", drop=7),
    Column("note", wrap=16),
)


def _row_of_nic(nic: Nic, findings: Sequence[Finding]) -> list[str]:
    """Return the cells of one NIC's row in the table of `holmes discover`, one for each of COLUMNS.

    The cells are: name, kind, state, rate; network devices, addresses; index of the RoCE v2 GID,
    subnet prefix, LID; NUMA node, PCI address; remarks. A cell is "" if the NIC has no such value.

    Args:
        nic: The NIC.
        findings: Findings of `holmes doctor` about all NICs of the node.
    """
    return [
        nic.name,
        nic.kind,
        nic.state,
        format_rate(nic.rate_bps) if nic.rate_bps else "",
        " ".join(nic.netdevs),
        " ".join(nic.addresses),
        "" if nic.roce_v2_index is None else str(nic.roce_v2_index),
        nic.subnet_prefix,
        str(nic.lid or ""),
        "" if nic.numa < 0 else str(nic.numa),
        nic.pci,
        "; ".join(_remarks_about(nic, findings)),
    ]


def _remarks_about(nic: Nic, findings: Sequence[Finding]) -> list[str]:
    """Return the remarks in a NIC's row: why no job uses it, its problems, and related devices.

    Args:
        nic: The NIC.
        findings: Findings of `holmes doctor` about all NICs.
    """
    problems = [
        finding.what
        for finding in findings
        if finding.about == nic.name and finding.what != DEFAULT_PREFIX
    ]
    # A note below the table has DEFAULT_PREFIX for all NICs together.
    if not problems and not nic.up:
        problems = [nic.state_text]
    remarks = [text for text in (nic.skipped, *problems) if text]
    kind = KINDS[nic.plugin_kind or nic.kind]
    if kind.plugin and not kind.verbs:
        effect = "NCCL needs a plugin" if nic.fast else "fast with a plugin of NCCL only"
        remarks.append(f"{kind.title}: {effect}")
    if nic.rdma:
        remarks.append(f"net device of {nic.rdma}")
    if nic.members:
        remarks.append(f"over {' '.join(nic.members)}")
    if nic.parent:
        remarks.append(f"virtual function of {nic.parent}")
    return remarks


def _order_by_use(nic: Nic) -> tuple[bool, bool, int, bool, int]:
    """Return a sort key that puts useful NICs first.

    The order is: NICs that are up, NICs that are down, NICs that no job uses (`skipped` has the reason).
    Each of these groups is sorted by kind, in the order of KINDS. Ethernet NICs with an address precede NICs
    without an address. Then the NIC with the higher rate comes first.
    """
    lacks_address = not nic.addresses and nic.kind == "ethernet"
    kind_rank = list(KINDS).index(nic.kind)
    return bool(nic.skipped), not nic.up, kind_rank, lacks_address, -nic.rate_bps
