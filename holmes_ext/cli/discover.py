"""`holmes discover`: the NICs of this node, or of a captured /sys tree; or a scheduler's clusters."""

from __future__ import annotations

import argparse
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, replace
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

# Links are kept as links; of the devices behind them only the named files are read: reading others
# (PCI BARs, vpd) may disturb the machine. Each `find` begins with class/net because without any
# path it would walk all of /sys. tar warns that files shrank (sysfs claims 4096 bytes for each) and
# pads them: both are fine.
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
To look at another machine, run this there (it makes /tmp/HOSTNAME.tar.gz), unpack it here with
`tar -xzf HOSTNAME.tar.gz`, and give the folder HOSTNAME to --sysfs:

{CAPTURE}

Exit status: 0 with at least one usable NIC, 1 with none, 2 on bad input.
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "discover",
        help="show the NICs of this node and which of them a job would use",
        description="Shows the NICs of this node and which of them a job would use; with --from the clusters "
        "that Slurm, Kubernetes or a hostfile know, as a cluster.toml.",
        epilog=_EPILOG.replace("%", "%%"),
    )
    parser.add_argument(
        "--sysfs",
        metavar="DIR",
        default=sysfs_root(os.environ),
        help="root of a /sys tree captured on another machine (how: see below), with its "
        "addresses in DIR/ip_addr.json; default: this machine's",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--include",
        metavar="P",
        action="append",
        nargs="+",
        default=[],
        help="use only NICs that match: mlx5_0, mlx5_0:1, or a net device; wildcards allowed",
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
    """Print table or JSON. Returns 0 with a usable NIC, 1 with none; HolmesError on bad input."""
    if args.source:
        return sources.run(args)
    if stray := [
        name for name in ("output", "rate", "kind", "partition", "topology") if getattr(args, name)
    ]:
        raise HolmesError(
            f"--{stray[0]} only applies to --from slurm, kubernetes or hostfile; add one"
        )
    real = os.path.realpath(args.sysfs)
    nics = _mark(read_nics(args.sysfs), sum(args.include, []), sum(args.exclude, []))
    no_addresses = real != "/sys" and captured_addresses(args.sysfs) is None
    node = socket.gethostname() if real == "/sys" else os.path.basename(real)
    # sockets need an address
    useful = any(nic.usable and (nic.fast or nic.addresses or no_addresses) for nic in nics)
    if args.json:
        print(
            json.dumps(
                {"version": 1, "node": node, "nics": [asdict(nic) for nic in nics]}, indent=2
            )
        )
        return 0 if useful else 1
    screen, ordered = Screen(), sorted(nics, key=_by_use)
    styles = ["dim" if nic.skipped else "" if nic.up else "yellow" for nic in ordered]
    findings = list(check_nics(nics))
    screen.table(COLUMNS, [_cells(nic, findings) for nic in ordered], f"NICs of {node}", styles)
    if default := [finding.about for finding in findings if finding.what == DEFAULT_PREFIX]:
        screen.line(
            f"note: {', '.join(default)}: InfiniBand subnet prefix {DEFAULT_SUBNET_PREFIX} is the "
            f"default; two clusters with this prefix cannot be told apart: say which nodes belong "
            f"together in cluster.toml"
        )
    if remark := lab_remark(os.environ):
        screen.line(f"note: {remark}")
    if no_addresses:
        missing = f"{args.sysfs} holds no ip_addr.json (write it there with `ip -j addr`)"
        screen.line(f"note: IP addresses are unknown: {missing}")
    if not useful:
        screen.line(
            "note: no usable NIC: every one is down, without an address, or set aside for the reason given"
        )
    return 0 if useful else 1


def _mark(nics: Sequence[Nic], include: Sequence[str], exclude: Sequence[str]) -> list[Nic]:
    """All NICs; those that `select` leaves out say in `skipped` why."""
    chosen = {nic.name: nic for nic in select(nics, include, exclude)}
    included = {nic.name for nic in select(nics, include)}
    why = {
        nic.name: "excluded (--exclude)" if nic.name in included else "not in --include"
        for nic in nics
    }
    return [
        chosen.get(nic.name) or replace(nic, skipped=nic.skipped or why[nic.name]) for nic in nics
    ]


#: Narrow terminals lose the right ones of the middle first, which only say where a NIC sits.
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


def _cells(nic: Nic, findings: Sequence[Finding]) -> list[str]:
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
        "; ".join(_remarks(nic, findings)),
    ]


def _remarks(nic: Nic, findings: Sequence[Finding]) -> list[str]:
    """Why it is set aside or down, what `holmes doctor` finds, what else it is."""
    problems = [
        finding.what
        for finding in findings
        if finding.about == nic.name and finding.what != DEFAULT_PREFIX
    ]
    related = {
        "net device of": nic.rdma,
        "over": " ".join(nic.members),
        "virtual function of": nic.parent,
    }
    remarks = [nic.skipped, *(problems or ["" if nic.up else nic.state_text])]
    return [text for text in remarks if text] + [
        f"{what} {name}" for what, name in related.items() if name
    ]


def _by_use(nic: Nic) -> tuple[bool, bool, int, bool, int]:
    """Usable first, fast kinds first, fast NICs first; then what is down; then what is set aside."""
    bare = not nic.addresses and nic.kind == "ethernet"
    return bool(nic.skipped), not nic.up, list(KINDS).index(nic.kind), bare, -nic.rate_bps
