"""`holmes doctor`: is this machine, and is this command, fit for a job over several clusters? Nothing is started."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence

from holmes_ext import __version__
from holmes_ext.cluster.addresses import captured_addresses, interface_addresses
from holmes_ext.cluster.node_report import NodeReport, node_identity, node_name
from holmes_ext.cluster.spec import SiteSpec, load_spec
from holmes_ext.cluster.sysfs.node import read_nics
from holmes_ext.doctor import nics as checks
from holmes_ext.doctor import variables
from holmes_ext.doctor.finding import Finding
from holmes_ext.doctor.side_by_side import NodeCheck, compare, load_check
from holmes_ext.errors import HolmesError
from holmes_ext.runtime.start import launcher

_EPILOG = """\
Several nodes side by side, either way:

  srun (or torchrun --nproc-per-node 1, pdsh with its variables) holmes doctor --cluster cluster.toml
  holmes doctor --json > $(hostname).json   on each node, then   holmes doctor --cluster cluster.toml --nodes *.json

Exit status: 0 nothing wrong (notes do not count), 1 a problem was found, 2 bad input.
"""


def add_parser(subparsers) -> argparse.ArgumentParser:
    """Teach `holmes` the command `doctor`."""
    parser = subparsers.add_parser(
        "doctor", help="check this machine, its environment and a command, without starting a job", description=__doc__,
        epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--cluster", metavar="FILE", help="cluster.toml: check the nodes and the command against it")
    parser.add_argument("--nodes", metavar="FILE", nargs="+", default=[], help="what `holmes doctor --json` printed on other nodes: compare them")
    parser.add_argument(
        "--sysfs", metavar="DIR", default=os.environ.get("HOLMES_SYSFS") or "/sys", help="root of a /sys tree (default: this machine's)"
    )
    parser.add_argument("--check", action="store_true", help="import the frameworks and check the real functions, not their source")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="under a launcher: seconds to wait for the other nodes (default 60)")
    parser.add_argument("--json", action="store_true", help="print JSON: of one node alone what --nodes takes")
    parser.add_argument("words", metavar="-- COMMAND", nargs=argparse.REMAINDER, help="a training command to check")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the findings. 0: no problem; 1: some. HolmesError on bad input."""
    words = args.words[1:] if args.words[:1] == ["--"] else args.words
    if words and not args.words[0] == "--":
        raise HolmesError(f"{words[0]!r} is not an option of holmes doctor; write the command to check after --")
    spec = load_spec(args.cluster) if args.cluster else None
    process = launcher.detect(os.environ)
    if process.world_size > 1:
        documents = _gather(process, None if process.local_rank else check_node(args, words, spec).to_dict(), args.timeout)
        if process.rank:
            return 0
        together = [NodeCheck.from_dict(document, f"node {document['node']['name']}") for document in documents]
    else:
        together = [load_check(path) for path in args.nodes] or [check_node(args, words, spec)]
    _check_twice(together)
    differences = compare(together, spec) if len(together) > 1 or spec else []
    if args.json:
        both = [check.to_dict() for check in together]
        document = both[0] if len(both) == 1 and not differences else {"version": 1, "nodes": both, "differences": [f.to_dict() for f in differences]}
        print(json.dumps(document, indent=2))
    else:
        _print(together, differences)
    everything = [*differences, *(finding for check in together for finding in check.findings)]
    return 1 if any(finding.level == "problem" for finding in everything) else 0


def check_node(args: argparse.Namespace, words: Sequence[str], spec: SiteSpec | None) -> NodeCheck:
    """Everything that can be said of this node alone."""
    from holmes_ext.cli.patches import judge
    from holmes_ext.doctor import frameworks as health
    from holmes_ext.doctor.command import check_command
    from holmes_ext.patches import all_patches, installed_versions

    live = os.path.realpath(args.sysfs) == "/sys"
    addresses = None if not live and captured_addresses(args.sysfs) is not None else interface_addresses()
    nics = read_nics(args.sysfs, addresses)
    findings = checks.check_nics(nics) + checks.check_hcas(args.sysfs)
    findings += checks.rdma_limits(nics) if live else []
    findings += variables.check_variables(os.environ, nics)
    sys.stdout.flush()
    silent, out = open(os.devnull, "w"), sys.stdout
    sys.stdout = silent  # frameworks print while they are imported
    try:
        findings += health.check_patches(lambda patch: judge(patch, args.check))
        if args.check:
            findings += health.check_replaced(all_patches())
    finally:
        sys.stdout = out
        silent.close()
    findings += health.check_others()
    if words:
        findings += check_command(words, spec, os.environ)
    versions = {"Python": platform.python_version(), "holmes_ext": __version__, **installed_versions()}
    node = NodeReport(node_name(os.environ), node_identity(), "", nics)
    return NodeCheck(node, versions, variables.settings(os.environ), tuple(findings))


def _gather(process: launcher.Process, document: dict | None, timeout_s: float) -> list[dict]:
    """The documents of all nodes, on rank 0, through a store of the launcher's addresses; [] elsewhere."""
    import torch.distributed as dist

    from holmes_ext.runtime.start.store import open_store

    store = open_store(process, timeout_s)
    store.set(f"doctor/{process.rank}", json.dumps(document))
    if process.rank:
        return []
    found = []
    for rank in range(process.world_size):  # the store lives in this process: it ends when all have reported
        try:
            found.append(json.loads(store.get(f"doctor/{rank}")))
        except (dist.DistError, RuntimeError):
            raise HolmesError(
                f"rank {rank} of {process.world_size} did not report within {timeout_s:g} s; can it reach {process.master_addr}:{process.master_port}?"
            ) from None
    return [document for document in found if document is not None]


def _check_twice(together: Sequence[NodeCheck]) -> None:
    names = [check.node.name for check in together]
    for name in names:
        if names.count(name) > 1:
            raise HolmesError(f"two of the checks are of a node called {name!r}; give each node once (HOLMES_NODE renames one)")


def _print(together: Sequence[NodeCheck], differences: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    if len(together) > 1:
        console.print(_side_by_side(together, Table, Text))
    rows = [("nodes compared", finding) for finding in differences]
    rows += [(check.node.name, finding) for check in together for finding in check.findings]
    rows.sort(key=lambda row: row[1].level != "problem")
    for where, finding in _merge(rows, len(together)):
        head = Text(f"{finding.level}: ", style="bold red" if finding.level == "problem" else "yellow")
        head.append(f"{where}: " if where else "", style="bold").append(f"{finding.about}: {finding.what}", style="")
        console.print(head, soft_wrap=True)
        console.print(Text(f"    why:  {finding.why}\n    mend: {finding.mend}"), soft_wrap=True)
    serious = sum(finding.level == "problem" for _, finding in rows)
    versions = ", ".join(f"{name} {version}" for name, version in together[0].versions.items())
    nodes = f"{len(together)} nodes" if len(together) > 1 else f"node {together[0].node.name}"
    console.print(
        Text(
            f"holmes doctor: {nodes} ({versions}): {serious} problem{'s' * (serious != 1)}, {len(rows) - serious} note{'s' * (len(rows) - serious != 1)}"
        ),
        soft_wrap=True,
    )


def _merge(rows: Sequence[tuple[str, Finding]], nodes: int) -> list[tuple[str, Finding]]:
    """One row for each finding, with all the nodes that have it; no name where there is one node only."""
    owners: dict[Finding, list[str]] = {}
    for where, finding in rows:
        owners.setdefault(finding, []).append(where)
    if nodes == 1:
        return [("", finding) for finding in owners]
    return [(", ".join(names[:6]) + (f", and {len(names) - 6} more" if len(names) > 6 else ""), finding) for finding, names in owners.items()]


def _side_by_side(together: Sequence[NodeCheck], table_class, text_class):
    table = table_class("node", "fast NICs", "Ethernet", "settings", "problems", "notes")
    for check in together:
        fast = [
            f"{nic.name} {nic.kind} {nic.rate_bps / 1e9:g} Gb/s{'' if nic.up else ' (' + nic.state_text + ')'}"
            for nic in check.node.nics
            if nic.kind != "ethernet" and not nic.skipped
        ]
        ethernet = [
            f"{nic.name} {' '.join(nic.addresses[:1])}"
            for nic in check.node.nics
            if nic.kind == "ethernet" and nic.usable and nic.addresses and not nic.rdma
        ]
        counts = [sum(finding.level == level for finding in check.findings) for level in ("problem", "note")]
        cells = (
            check.node.name,
            "\n".join(fast) or "none",
            "\n".join(ethernet) or "none",
            "\n".join(f"{k}={v}" for k, v in check.settings.items()),
            *map(str, counts),
        )
        table.add_row(*(text_class(cell) for cell in cells))
    return table
