"""`holmes discover`: print the NICs of this node, or of a /sys tree captured on another machine."""

import argparse
import json
import os
import socket
import sys

from holmes_ext.cluster.addresses import captured_addresses
from holmes_ext.cluster.nic import DEFAULT_SUBNET_PREFIX, KINDS, Nic
from holmes_ext.cluster.sysfs.node import read_nics, select
from holmes_ext.errors import HolmesError

# Links are kept as links; of the devices behind them only the named files are read: reading others (PCI BARs, vpd)
# may disturb the machine. Each `find` begins with class/net because without any path it would walk all of
# /sys. tar warns that files shrank (sysfs claims 4096 bytes for each) and pads them: both are fine.
CAPTURE = (
    "cd /sys && ip -j addr > /tmp/ip_addr.json; "
    "R='realpath -eq --relative-to=.'; "
    "{ find class/net class/infiniband; "
    "find class/net $($R class/net/*) -maxdepth 2 -not -path '*/queues*' -not -path '*/statistics*'; "
    "find class/net $($R class/infiniband/*) -not -path '*counters*'; "
    "find class/net $($R class/net/*/device class/infiniband/*/device) -maxdepth 1 "
    "'(' -type l -o -name uevent -o -name numa_node -o -name 'current_link_*' -o -name net -o -name infiniband ')'; "
    "} 2>/dev/null | sort -u | "
    "tar -cz --no-recursion --ignore-failed-read --transform \"flags=r;s,^,$(hostname)/,\" "
    "-f /tmp/$(hostname).tar.gz -T - -C /tmp ip_addr.json 2>/dev/null"
)

_EPILOG = f"""\
To look at another machine, run this there (it makes /tmp/HOSTNAME.tar.gz), unpack it here with
`tar -xzf HOSTNAME.tar.gz`, and give the folder HOSTNAME to --sysfs:

{CAPTURE}

Exit status: 0 with at least one usable NIC, 1 with none, 2 on bad input.
"""


def add_parser(subparsers) -> argparse.ArgumentParser:
    """Add `discover` to the subparsers of the `holmes` command; its `run` default is this module's."""
    parser = subparsers.add_parser(
        "discover", help="show the NICs of this node and which of them a job would use",
        description="Show the NICs of this node and which of them a job would use.",
        epilog=_EPILOG.replace("%", "%%"), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sysfs", metavar="DIR", default="/sys",
                        help="root of a /sys tree captured on another machine (how: see below), with its addresses "
                             "in DIR/ip_addr.json; default: this machine's")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--include", metavar="P", action="append", nargs="+", default=[],
                        help="use only NICs that match: mlx5_0, mlx5_0:1, or a net device; wildcards allowed")
    parser.add_argument("--exclude", metavar="P", action="append", nargs="+", default=[],
                        help="do not use NICs that match")
    parser.set_defaults(run=run)
    return parser


def run(args) -> int:
    """Print table or JSON. Returns 0 with a usable NIC, 1 with none, 2 on bad input (after one line on stderr)."""
    try:
        captured = os.path.realpath(args.sysfs) != "/sys"
        nics = read_nics(args.sysfs)
        no_addresses = captured and captured_addresses(args.sysfs) is None
        nics = _mark(nics, sum(args.include, []), sum(args.exclude, []))
    except HolmesError as error:
        print(f"holmes discover: {error}", file=sys.stderr)
        return 2
    node = os.path.basename(os.path.realpath(args.sysfs)) if captured else socket.gethostname()
    if args.json:
        print(json.dumps({"version": 1, "node": node, "nics": [nic.to_dict() for nic in nics]}, indent=2))
    else:
        _print_table(node, nics, _notes(args.sysfs, nics, no_addresses))
    return 0 if any(_is_useful(nic, no_addresses) for nic in nics) else 1


def _mark(nics, include, exclude) -> "tuple[Nic, ...]":
    """All NICs; those that `select` leaves out say in `skipped` why."""
    chosen = {nic.name: nic for nic in select(nics, include, exclude)}
    included = {nic.name for nic in select(nics, include)}
    return tuple(chosen.get(nic.name) or nic.set_aside(
        nic.skipped or ("excluded (--exclude)" if nic.name in included else "not in --include")) for nic in nics)


def _is_useful(nic: Nic, no_addresses: bool) -> bool:
    """Whether a job could use it: sockets need an address, verbs do not."""
    return nic.usable and (nic.kind != "ethernet" or bool(nic.addresses) or no_addresses)


def _notes(root, nics, no_addresses: bool) -> "list[str]":
    notes = []
    default = [nic.name for nic in nics if nic.kind == "ib" and nic.usable
               and nic.subnet_prefix == DEFAULT_SUBNET_PREFIX]
    if default:
        notes.append(f"{', '.join(default)}: InfiniBand subnet prefix {DEFAULT_SUBNET_PREFIX} is the default; two clusters "
                     "with this prefix cannot be told apart: say which nodes belong together in cluster.toml")
    if no_addresses:
        notes.append(f"IP addresses are unknown: {root} holds no ip_addr.json (write it there with `ip -j addr`)")
    if not any(_is_useful(nic, no_addresses) for nic in nics):
        notes.append("no usable NIC: every one is down, without an address, or set aside for the reason given")
    return notes


_COLUMNS = {  # title: text of a NIC
    "NIC": lambda n: n.name,
    "kind": lambda n: n.kind,
    "state": lambda n: n.state,
    "rate": lambda n: _show_rate(n.rate_bps),
    "net device": lambda n: " ".join(n.netdevs) if n.kind != "ethernet" else n.ifname,
    "addresses": lambda n: " ".join(n.addresses),
    "v2 GID": lambda n: "" if n.roce_v2_index is None else str(n.roce_v2_index),
    "subnet prefix": lambda n: n.subnet_prefix,
    "LID": lambda n: str(n.lid) if n.lid else "",
    "NUMA": lambda n: "" if n.numa < 0 else str(n.numa),
    "PCI": lambda n: n.pci,
    "note": lambda n: "; ".join(_remarks(n)),
}


def _show_rate(bps: int) -> str:
    if not bps:
        return ""
    unit, size = ("Gb/s", 1e9) if bps >= 1e9 else ("Mb/s", 1e6)
    return f"{bps / size:.4g} {unit}"


def _remarks(nic: Nic) -> "list[str]":
    remarks = [nic.skipped] if nic.skipped else []
    if not nic.up:
        remarks.append(nic.state_text)
    if nic.kind == "ib" and nic.state_text == "INIT":
        remarks.append("no subnet manager has set it up")
    if nic.up and nic.kind == "ethernet" and not nic.addresses and not nic.skipped:
        remarks.append("no address")
    if nic.rdma:
        remarks.append(f"net device of {nic.rdma}")
    if nic.members:
        remarks.append(f"over {' '.join(nic.members)}")
    if nic.parent:
        remarks.append(f"virtual function of {nic.parent}")
    if nic.kind == "roce" and nic.up and nic.roce_v2_index is None:
        remarks.append("no RoCE v2 GID")
    if 0 < nic.max_rate_bps < nic.rate_bps:
        remarks.append(f"PCIe carries only {_show_rate(nic.max_rate_bps)}")
    return remarks


def _by_use(nic: Nic):
    """Usable first, fast kinds first, fast NICs first; then what is down; then what is set aside."""
    return (bool(nic.skipped), not nic.up, KINDS.index(nic.kind), not nic.addresses and nic.kind == "ethernet",
            -nic.rate_bps)


def _print_table(node: str, nics, notes) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 250, highlight=False)
    table = Table(title=f"NICs of {node}", title_justify="left")
    shown = {title: text for title, text in _COLUMNS.items() if any(text(nic) for nic in nics)}
    for title in shown:
        table.add_column(title, justify="right" if title in ("rate", "v2 GID", "LID", "NUMA") else "left",
                         overflow="fold")
    for nic in sorted(nics, key=_by_use):
        style = "dim" if nic.skipped else "" if nic.up else "yellow"
        table.add_row(*(Text(text(nic)) for text in shown.values()), style=style)
    console.print(table)
    for note in notes:
        console.print(Text(f"note: {note}"), soft_wrap=True)
