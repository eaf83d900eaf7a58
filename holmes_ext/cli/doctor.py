"""`holmes doctor`: is this machine, and is this command, fit for a job over several clusters?"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.text import Text

import holmes_ext
from holmes_ext import __version__, extensions
from holmes_ext.cli.show.table import Column, Screen
from holmes_ext.cluster.addresses import (
    captured_addresses,
    egress_interface,
    interface_addresses,
    read_limits,
)
from holmes_ext.cluster.nccl import nccl_of_node
from holmes_ext.cluster.node_report import (
    NodeReport,
    lab_remark,
    node_identity,
    node_name,
    sysfs_root,
)
from holmes_ext.cluster.spec import SiteSpec, load_spec
from holmes_ext.cluster.sysfs.node import read_nics
from holmes_ext.doctor import frameworks, nccl, variables
from holmes_ext.doctor.allocation import allocated, check_nodes, for_srun, srun
from holmes_ext.doctor.command import check_command
from holmes_ext.doctor.finding import Finding
from holmes_ext.doctor.nics import check_hcas, check_machine, check_nics, rdma_limits
from holmes_ext.doctor.side_by_side import NodeCheck, compare, kind_of, load_check, part_for
from holmes_ext.doctor.tcp import check_tcp
from holmes_ext.document import Table
from holmes_ext.errors import HolmesError
from holmes_ext.patches import all_patches, installed_versions
from holmes_ext.runtime import session
from holmes_ext.runtime.start import launcher
from holmes_ext.units import format_rate
from holmes_ext.words import some_of

_EPILOG = """\
Several nodes side by side, in one of three ways:

  holmes doctor --slurm --cluster cluster.toml          in a Slurm allocation (salloc, a batch script)
  srun (or torchrun --nproc-per-node 1, pdsh with its variables) holmes doctor --cluster cluster.toml
  holmes doctor --json > $(hostname).json               on each node; then, on one of them,
  holmes doctor --cluster cluster.toml --nodes *.json

Exit status: 0 nothing wrong (notes do not count), 1 a problem was found, 2 bad input.
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="check this machine, its environment and a command, without starting a job",
        description="Checks whether anything on this machine, in its environment or in a command would stop "
        "a job over several clusters. Nothing is started.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--cluster", metavar="FILE", help="cluster.toml: check nodes and command against it"
    )
    parser.add_argument(
        "--nodes",
        metavar="FILE",
        nargs="+",
        default=[],
        help="what `holmes doctor --json` printed on other nodes: compare them",
    )
    parser.add_argument(
        "--sysfs",
        metavar="DIR",
        default=sysfs_root(os.environ),
        help="root of a /sys tree (default: this machine's)",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="import the frameworks and check the real functions, not their source",
    )
    parser.add_argument(
        "--slurm",
        metavar="OPTIONS",
        nargs="?",
        const="",
        help="on every node of the Slurm allocation, by srun, with --preflight; without an "
        "allocation OPTIONS are srun's: --slurm='--nodes 4 --partition gpu'",
    )
    parser.add_argument(
        "--preflight",
        action="store_true",
        help="under a launcher: try the links between the nodes, as at a job's start",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="under a launcher: seconds to wait for the other nodes (default: 60)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON: of one node alone what --nodes takes"
    )
    parser.add_argument(
        "words",
        metavar="-- COMMAND",
        nargs=argparse.REMAINDER,
        default=[],
        help="a training command to check",
    )


def run(args: argparse.Namespace) -> int:
    """Print the findings. 0: no problem; 1: some. HolmesError on bad input."""
    words = args.words[1:] if args.words[:1] == ["--"] else args.words
    if words and not args.words[0] == "--":
        raise HolmesError(
            f"{words[0]!r} is not an option of holmes doctor; write the command to check after --"
        )
    spec = load_spec(args.cluster) if args.cluster else None
    if args.slurm is not None:
        return _over_allocation(args, words, spec)
    process = launcher.detect(os.environ)
    if args.preflight and process.world_size < 2:
        raise HolmesError(
            "--preflight tries the links between nodes: start it on several by a launcher, or --slurm"
        )
    faults = False
    if process.world_size > 1:
        documents = _gather(
            process, None if process.local_rank else check_node(args, words, spec), args.timeout
        )
        faults = args.preflight and _preflight(args, process)
        if process.rank:
            return 0
        together = [
            NodeCheck.from_table(Table(document, "a node's report")) for document in documents
        ]
        spec = spec and part_for(spec, together)  # a file may describe more than the job has
    else:
        together = [load_check(path) for path in args.nodes] or [check_node(args, words, spec)]
    for name, count in Counter(check.node.name for check in together).items():
        if count > 1:
            raise HolmesError(
                f"two of the reports are from a node called {name!r}; give each node once"
                " (HOLMES_NODE renames one)"
            )
    differences = compare(together, spec) if len(together) > 1 or spec else []
    if args.json:
        nodes = [check.to_dict() for check in together]
        compared = {
            "version": 1,
            "nodes": nodes,
            "differences": [asdict(finding) for finding in differences],
        }
        print(json.dumps(nodes[0] if len(nodes) == 1 and not differences else compared, indent=2))
    else:
        _print(together, differences)
    everything = [*differences, *(finding for check in together for finding in check.findings)]
    return 1 if faults or any(finding.level == "problem" for finding in everything) else 0


def _over_allocation(args: argparse.Namespace, words: Sequence[str], spec: SiteSpec | None) -> int:
    """This command on every node of the allocation; srun's exit status, which is the greatest of theirs."""
    if spec is not None:
        check_nodes(allocated(os.environ), spec)
    program = [
        sys.executable,
        "-m",
        "holmes_ext.cli.main",
        "doctor",
        "--preflight",
        f"--timeout={args.timeout:g}",
    ]
    program += [f"--cluster={os.path.abspath(args.cluster)}"] if args.cluster else []
    program += ["--check"] * args.check + ["--json"] * args.json + (["--", *words] if words else [])
    command = srun(os.environ, args.slurm, program)
    try:
        return subprocess.run(command, env=for_srun(os.environ)).returncode
    except FileNotFoundError:
        raise HolmesError(
            "--slurm: there is no `srun` on this machine; run it on a login node of the Slurm "
            "cluster (module load slurm?)"
        ) from None


def _preflight(args: argparse.Namespace, process: launcher.Process) -> bool:
    """Try the links between all nodes, as at a job's start; whether a port is left out. HolmesError on rank 0
    (RemoteError elsewhere) where no job could start."""
    holmes_ext.enable_on_nodes(args.cluster)
    current = session.require()
    assert current.store is not None
    done = current.store.add(f"{current.round}/doctor", 1)
    limit = time.monotonic() + args.timeout
    # the store lives in rank 0
    while process.rank == 0 and done < process.world_size and time.monotonic() < limit:
        time.sleep(0.05)
        done = current.store.add(f"{current.round}/doctor", 0)
    return any(port.fault for node in current.site.nodes for port in node.ports)


def check_node(args: argparse.Namespace, words: Sequence[str], spec: SiteSpec | None) -> NodeCheck:
    """Everything that can be said of this node alone."""
    live = os.path.realpath(args.sysfs) == "/sys"
    captured = not live and captured_addresses(args.sysfs) is not None
    environ = dict(os.environ) if live else {**os.environ, "HOLMES_SYSFS": args.sysfs}
    nics = read_nics(args.sysfs, None if captured else interface_addresses())
    findings = [*check_nics(nics), *check_hcas(args.sysfs)]
    findings += rdma_limits(nics) if live else []
    findings += check_machine(nics, kind_of(node_name(os.environ), spec), live)
    findings += variables.check_variables(os.environ, nics)
    if spec and (spec.wan or spec.pairs):
        findings += check_tcp(spec, node_name(os.environ), read_limits(), os.environ)
    # frameworks print when imported
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        findings += frameworks.check_patches(
            frameworks.fit_of(patch, args.check) for patch in all_patches()
        )
        findings += frameworks.check_replaced(all_patches()) if args.check else []
    findings += [*frameworks.check_stock_versions(), *frameworks.check_others()]
    findings += frameworks.check_compilers(environ) if live else []
    findings += check_command(words, spec, os.environ) if words else []
    findings += [
        found for check in extensions.objects("doctor_checks").values() for found in check()
    ]
    frameworks_found = installed_versions(patch.feature for patch in all_patches())
    versions = {"Python": platform.python_version(), "holmes_ext": __version__, **frameworks_found}
    node_nccl = nccl_of_node(environ, nics)
    ethernet = egress_interface("127.0.0.1") if live else ""
    node = NodeReport(node_name(os.environ), node_identity(), ethernet, nics, nccl=node_nccl)
    findings += nccl.check_nccl(node_nccl, environ)
    lines = nccl.handed_over(node, spec, environ)
    return NodeCheck(node, versions, variables.settings(os.environ), tuple(findings), tuple(lines))


def _gather(
    process: launcher.Process, check: NodeCheck | None, timeout_s: float
) -> list[dict[str, Any]]:
    """The checks of all nodes, on rank 0, through a store of the launcher's addresses; [] elsewhere."""
    try:
        from holmes_ext.runtime.start.store import open_store  # which imports torch

        store = open_store(process, timeout_s)
    except ModuleNotFoundError:
        raise HolmesError(
            "torch is not installed, so the nodes cannot talk to each other; run `holmes "
            "doctor --json` on each without a launcher, and compare the files with "
            "--nodes"
        ) from None
    store.set(f"doctor/{process.rank}", json.dumps(check and check.to_dict()))
    documents = []
    # the store lives in rank 0, which ends last
    for rank in range(0 if process.rank else process.world_size):
        try:
            documents.append(json.loads(store.get(f"doctor/{rank}")))
        except RuntimeError:  # torch.distributed.DistError is one
            place = f"{process.master_addr}:{process.master_port}"
            raise HolmesError(
                f"rank {rank} of {process.world_size} did not report within {timeout_s:g} s; "
                f"can it reach {place}?"
            ) from None
    return [document for document in documents if document is not None]


def _print(together: Sequence[NodeCheck], differences: Sequence[Finding]) -> None:
    screen = Screen()
    if len(together) > 1:
        screen.table(COLUMNS, [_row(check) for check in together])
    owners: dict[Finding, list[str]] = {finding: ["nodes compared"] for finding in differences}
    for check in together:
        for finding in check.findings:
            owners.setdefault(finding, []).append(check.node.name)
    for finding, names in sorted(owners.items(), key=lambda item: item[0].level != "problem"):
        head = Text(f"{finding.level}: ", "bold red" if finding.level == "problem" else "yellow")
        head.append(
            f"{some_of(names, 6)}: " if len(together) > 1 or finding in differences else "", "bold"
        )
        screen.line(head.append(f"{finding.about}: {finding.what}", ""))
        screen.line(f"    why: {finding.why}\n    fix: {finding.mend}")
    if len(together) == 1 and together[0].nccl:
        screen.line(Text("NCCL settings of a job on this node:", "bold"))
        for line in together[0].nccl:
            screen.line(f"    {line}")
    if remark := lab_remark(os.environ):
        screen.line(f"note: {remark}")
    levels = Counter(finding.level for finding, names in owners.items() for _ in names)
    counts = ", ".join(
        f"{levels[level]} {level}{'s' * (levels[level] != 1)}" for level in ("problem", "note")
    )
    versions = ", ".join(f"{name} {version}" for name, version in together[0].versions.items())
    nodes = f"{len(together)} nodes" if len(together) > 1 else f"node {together[0].node.name}"
    screen.line(f"holmes doctor: {nodes} ({versions}): {counts}")


#: What stands side by side.
COLUMNS = (
    Column("node"),
    Column("fast NICs"),
    Column("Ethernet", drop=1),
    Column("settings", drop=2),
    Column("problems", right=True),
    Column("notes", right=True),
)


def _row(check: NodeCheck) -> list[str]:
    nics = check.node.nics
    ethernet = [n for n in nics if not n.fast and n.usable and n.addresses and not n.rdma]
    levels = [finding.level for finding in check.findings]
    return [
        check.node.name,
        "\n".join(
            f"{nic.name} {nic.kind} {format_rate(nic.rate_bps) if nic.up else f'({nic.state_text})'}"
            for nic in nics
            if nic.fast and not nic.skipped
        )
        or "none",
        "\n".join(f"{nic.name} {nic.addresses[0]}" for nic in ethernet) or "none",
        "\n".join(f"{name}={value}" for name, value in check.settings.items()),
        str(levels.count("problem")),
        str(levels.count("note")),
    ]
