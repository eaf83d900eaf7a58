"""Command `holmes doctor`: checks machines and a training command without starting a job.

The checks are in holmes_ext/doctor. This module runs them on one node or, by a launcher or srun, on
several, compares the nodes, and prints the findings. A finding is a problem or a note, with its
reason and remedy.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.text import Text

import holmes_ext
from holmes_ext.cli.show.table import Column, Screen
from holmes_ext.cluster.node_report import lab_remark, sysfs_root
from holmes_ext.cluster.spec import SiteSpec, load_spec
from holmes_ext.doctor.allocation import allocated, check_nodes, for_srun, srun
from holmes_ext.doctor.finding import Finding
from holmes_ext.doctor.node import check_node
from holmes_ext.doctor.side_by_side import NodeCheck, compare, load_check, part_for
from holmes_ext.document import Table
from holmes_ext.errors import HolmesError
from holmes_ext.runtime import session
from holmes_ext.runtime.start import launcher
from holmes_ext.units import format_rate
from holmes_ext.words import counted, some_of

_EPILOG = """\
Several nodes are compared in one of three ways:

  holmes doctor --slurm --cluster cluster.toml          in a Slurm allocation (salloc, a batch script)
  srun (or torchrun --nproc-per-node 1, pdsh with its variables) holmes doctor --cluster cluster.toml
  holmes doctor --json > $(hostname).json               on each node; then, on one of them,
  holmes doctor --cluster cluster.toml --nodes *.json

Exit status: 0 without a problem (notes do not count), 1 if a problem was found, 2 on bad input.
"""


#: Seconds between two looks at the store while rank 0 waits.
_POLL_S = 0.05
#: Nodes that a finding names.
_MOST_NAMED = 6


def add_parser(subparsers: Any) -> None:
    """Add the command `doctor` with its options to the parser of `holmes`."""
    parser = subparsers.add_parser(
        "doctor",
        help="check this machine, its environment and a command, without starting a job",
        description="Check whether anything on this machine, in its environment or in a command would stop "
        "a job over several clusters. No job is started; --slurm and --preflight run on other nodes, too.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--cluster", metavar="FILE", help="check nodes and command against a cluster.toml"
    )
    parser.add_argument(
        "--nodes",
        metavar="FILE",
        nargs="+",
        default=[],
        help="compare nodes, from the output of `holmes doctor --json` on each",
    )
    parser.add_argument(
        "--sysfs",
        metavar="DIR",
        default=sysfs_root(os.environ),
        help="read the /sys tree in DIR (default: this machine's /sys)",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        # "The real functions" are those of the frameworks that holmes patches. Without --check, only the
        # source files of the frameworks are read, which is faster and runs none of their code.
        help="import the frameworks and check the real functions, not their source",
    )
    parser.add_argument(
        "--slurm",
        metavar="OPTIONS",
        nargs="?",
        const="",
        help="check every node of the Slurm allocation with srun and --preflight; without an "
        "allocation, pass OPTIONS to srun: --slurm='--nodes 4 --partition gpu'",
    )
    parser.add_argument(
        "--preflight",
        action="store_true",
        help="try the links between the nodes, as at the start of a job; needs a launcher",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="wait S seconds for the other nodes of a launcher (default: 60)",
    )
    # --nodes reads the JSON of each node: `holmes doctor --json > a0.json` on each node, then `holmes doctor
    # --nodes *.json` on one of them.
    parser.add_argument(
        "--json", action="store_true", help="print JSON, for one node in the format of --nodes"
    )
    parser.add_argument(
        "words",
        metavar="-- COMMAND",
        nargs=argparse.REMAINDER,
        default=[],
        help="check a training command",
    )


def run(args: argparse.Namespace) -> int:
    """Check one node or several, and print the findings.

    Returns:
        The exit status: 1 if a problem was found. Also 1 if --preflight, which tries the
        connections between all nodes, found a node's port to a network that cannot be used.
        Otherwise 0.

    Raises:
        HolmesError: the input is bad, or a node did not report.
    """
    if args.words and args.words[0] != "--":
        raise HolmesError(
            f"{args.words[0]!r} is not an option of holmes doctor; write the command to check after --"
        )
    words = args.words[1:]  # the training command to check, after "--"; [] if there is none
    spec = load_spec(args.cluster) if args.cluster else None
    if args.slurm is not None:
        return _run_on_allocation(args, words, spec)
    process = launcher.detect(os.environ)
    if args.preflight and process.world_size <= 1:
        raise HolmesError(
            "--preflight tries the links between nodes: start it on several by a launcher, or --slurm"
        )
    has_unusable_port = False
    if process.world_size > 1:  # started by a launcher on several nodes
        check = None
        if process.local_rank == 0:  # one process of each node checks it
            check = check_node(args.sysfs, words, spec, imports=args.check)
        documents = _collect_checks(process, check, args.timeout)
        has_unusable_port = args.preflight and _run_preflight(args, process)
        if process.rank:
            return 0
        checks = [NodeCheck.from_table(Table(doc, "a node's report")) for doc in documents]
        spec = spec and part_for(spec, checks)  # a file may describe more nodes than the job has
    elif args.nodes:
        checks = [load_check(path) for path in args.nodes]
    else:
        checks = [check_node(args.sysfs, words, spec, imports=args.check)]
    _check_distinct_names(checks)
    differences = compare(checks, spec)
    if args.json:
        _print_json(checks, differences)
    else:
        _print_report(checks, differences)
    findings = [*differences, *(finding for check in checks for finding in check.findings)]
    has_problem = any(finding.level == "problem" for finding in findings)
    return 1 if has_unusable_port or has_problem else 0


def _check_distinct_names(checks: Sequence[NodeCheck]) -> None:
    """Raise HolmesError if two checks are of nodes with the same name."""
    for name, count in Counter(check.node.name for check in checks).items():
        if count > 1:
            raise HolmesError(
                f"two of the reports are from a node called {name!r}; give each node once"
                " (HOLMES_NODE renames one)"
            )


def _print_json(checks: Sequence[NodeCheck], differences: Sequence[Finding]) -> None:
    """Print the check of a single node, or those of all nodes with their differences, as JSON.

    Args:
        checks: Results of each node.
        differences: Findings about several nodes.
    """
    nodes = [check.to_dict() for check in checks]
    if len(nodes) == 1 and not differences:
        print(json.dumps(nodes[0], indent=2))
        return
    document = {
        "version": 1,
        "nodes": nodes,
        "differences": [asdict(finding) for finding in differences],
    }
    print(json.dumps(document, indent=2))


def _run_on_allocation(
    args: argparse.Namespace, words: Sequence[str], spec: SiteSpec | None
) -> int:
    """Run `holmes doctor --preflight` on every node of a Slurm allocation, by srun.

    Args:
        args: Arguments of this command.
        words: The training command to check.
        spec: Content of cluster.toml, None if there is none.

    Returns:
        The exit status of srun: the greatest of all nodes.

    Raises:
        HolmesError: a node of the allocation is in no cluster, or srun is not installed.
    """
    if spec is not None:
        check_nodes(allocated(os.environ), spec)
    program = [sys.executable, "-m", "holmes_ext.cli.main", "doctor", "--preflight"]
    program.append(f"--timeout={args.timeout:g}")
    if args.cluster:
        program.append(f"--cluster={os.path.abspath(args.cluster)}")
    if args.check:
        program.append("--check")
    if args.json:
        program.append("--json")
    if words:
        program += ["--", *words]
    command = srun(os.environ, args.slurm, program)
    try:
        return subprocess.run(command, env=for_srun(os.environ)).returncode
    except FileNotFoundError:
        raise HolmesError(
            "--slurm: there is no `srun` on this machine; run it on a login node of the Slurm "
            "cluster (module load slurm?)"
        ) from None


def _run_preflight(args: argparse.Namespace, process: launcher.Process) -> bool:
    """Try the links between all nodes, as at the start of a job ("preflight").

    enable_on_nodes() tries them. Then rank 0 waits until the other ranks have finished too, because
    they need the store that lives in rank 0. All ranks must call this function.

    Args:
        args: Arguments of this command.
        process: This process, with its rank.

    Returns:
        True if a port (connection of a node to one network) cannot be used.

    Raises:
        HolmesError: no job could start (on rank 0).
        RemoteError: no job could start (on other ranks).
    """
    holmes_ext._enable_on_nodes(args.cluster)
    current = session.require()
    assert current.store is not None
    key = f"{current.key_prefix}/doctor"  # counts the ranks that need the store no longer
    finished_ranks = current.store.add(key, 1)
    if process.rank == 0:
        deadline = time.monotonic() + args.timeout
        while finished_ranks < process.world_size and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            finished_ranks = current.store.add(key, 0)  # reads the counter
    return any(port.fault for node in current.site.nodes for port in node.ports)


def _collect_checks(
    process: launcher.Process, check: NodeCheck | None, timeout_s: float
) -> list[dict[str, Any]]:
    """Send the check of this node to rank 0; return the checks of all nodes on rank 0, else [].

    Args:
        process: This process.
        check: The check of this node; None on all but one of its ranks.
        timeout_s: Seconds to wait for other nodes.

    Raises:
        HolmesError: torch is not installed, or a rank did not report in time.
    """
    try:
        from holmes_ext.runtime.start.store import open_store  # which imports torch

        store = open_store(process, timeout_s)
    except ModuleNotFoundError:
        raise HolmesError(
            "torch is not installed, so the nodes cannot talk to each other; run `holmes "
            "doctor --json` on each without a launcher, and compare the files with "
            "--nodes"
        ) from None
    document = check.to_dict() if check is not None else None
    store.set(f"doctor/{process.rank}", json.dumps(document))
    if process.rank != 0:
        return []
    # The store lives in rank 0, so rank 0 reads it until every rank has reported.
    documents = []
    for rank in range(process.world_size):
        try:
            document = json.loads(store.get(f"doctor/{rank}"))
        except RuntimeError:  # torch.distributed.DistError
            master = f"{process.master_addr}:{process.master_port}"
            raise HolmesError(
                f"the launcher's rank {rank} of {process.world_size} did not report within {timeout_s:g} s; "
                f"can it reach {master}?"
            ) from None
        if document is not None:
            documents.append(document)
    return documents


def _print_report(checks: Sequence[NodeCheck], differences: Sequence[Finding]) -> None:
    """Print a table of the nodes (if there are several), the findings, and a summary.

    Args:
        checks: Check of each node.
        differences: Findings about several nodes.
    """
    screen = Screen()
    first = checks[0]
    if len(checks) > 1:
        screen.table(COLUMNS, [_row_of_node(check) for check in checks])
    # Equal findings of several nodes are printed once, with the names of the nodes. Differences between nodes
    # are findings about no single node: "nodes compared" stands in place of a name.
    nodes_of_finding: dict[Finding, list[str]] = {
        finding: ["nodes compared"] for finding in differences
    }
    for check in checks:
        for finding in check.findings:
            nodes_of_finding.setdefault(finding, []).append(check.node.name)
    # Sorting is stable: findings of one level keep their order.
    problems_first = sorted(nodes_of_finding, key=lambda finding: finding.level != "problem")
    for finding in problems_first:
        has_subject = len(checks) > 1
        _print_finding(screen, finding, nodes_of_finding[finding] if has_subject else [])
    if len(checks) == 1 and first.nccl:
        screen.line(Text("NCCL settings of a job on this node:", "bold"))
        for line in first.nccl:
            screen.line(f"    {line}")
    remark = lab_remark(os.environ)  # in `holmes lab`, which emulates nodes: the NICs are not real
    if remark:
        screen.line(f"note: {remark}")
    levels: Counter[str] = Counter()
    for finding, names in nodes_of_finding.items():
        levels[finding.level] += len(names)
    counts = ", ".join(counted(levels[level], level) for level in ("problem", "note"))
    versions = ", ".join(f"{name} {version}" for name, version in first.versions.items())
    nodes = f"{len(checks)} nodes" if len(checks) > 1 else f"node {first.node.name}"
    screen.line(f"holmes doctor: {nodes} ({versions}): {counts}")


def _print_finding(screen: Screen, finding: Finding, nodes: Sequence[str]) -> None:
    """Print a finding with its reason and remedy.

    Args:
        screen: Output.
        finding: The finding.
        nodes: Names of the nodes that have it, [] to leave the nodes out.
    """
    line = Text(f"{finding.level}: ", "bold red" if finding.level == "problem" else "yellow")
    if nodes:
        line.append(f"{some_of(nodes, _MOST_NAMED)}: ", "bold")
    line.append(f"{finding.about}: {finding.what}", "")
    screen.line(line)
    screen.line(f"    why: {finding.why}\n    fix: {finding.mend}")


#: Columns of the table of nodes.
COLUMNS = (
    Column("node"),
    Column("fast NICs"),
    Column("Ethernet", drop=1),
    Column("settings", drop=2),
    Column("problems", right=True),
    Column("notes", right=True),
)


def _row_of_node(check: NodeCheck) -> list[str]:
    """Return the cells of one node's row in the table of compared nodes, one for each of COLUMNS.

    The cells are name, InfiniBand and RoCE ports, Ethernet devices, environment variables, number
    of problems, and number of notes.
    """
    fast_nics = []
    ethernet_nics = []
    for nic in check.node.nics:
        if nic.fast and not nic.skipped:
            state = format_rate(nic.rate_bps) if nic.up else f"({nic.state_text})"
            fast_nics.append(f"{nic.name} {nic.kind} {state}")
        elif not nic.fast and nic.usable and nic.addresses and not nic.rdma:
            ethernet_nics.append(f"{nic.name} {nic.addresses[0]}")
    levels = [finding.level for finding in check.findings]
    return [
        check.node.name,
        "\n".join(fast_nics) or "none",
        "\n".join(ethernet_nics) or "none",
        "\n".join(f"{name}={value}" for name, value in check.settings.items()),
        str(levels.count("problem")),
        str(levels.count("note")),
    ]
