"""Command `holmes lab`: runs jobs on emulated clusters, and manages labs.

The actions are `run`, `build`, `measure`, `shell` and `down`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holmes_ext.cli.show.table import Column, Screen
from holmes_ext.cluster.spec import load_spec
from holmes_ext.doctor.command.command_words import split_command
from holmes_ext.document import parse_json
from holmes_ext.errors import HolmesError
from holmes_ext.units import format_rate, format_seconds
from holmes_lab import state
from holmes_lab.cli import lab_gpu
from holmes_lab.cores import BOUND, BOUND_TEXT
from holmes_lab.lab import Lab
from holmes_lab.launchers.command import NEEDS, start_with_launcher
from holmes_lab.launchers.daemons import Daemons
from holmes_lab.measure import TOLERANCE, BetweenClustersRow, LinkRow, measure
from holmes_lab.process.job import TIMED_OUT
from holmes_lab.process.ranks import order_of_options
from holmes_lab.process.shell import run_on_host, running_host

#: Commands that start the processes of a job.
LAUNCHERS = (
    "torchrun",
    "torch.distributed.run",
    "torch.distributed.launch",
    "deepspeed",
    "srun",
    "mpirun",
    "mpiexec",
    "accelerate",
)
QUIET_TAIL = 20  # lines that --quiet shows of a rank that failed


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Add the command `lab` with its actions and options to the parser of `holmes`."""
    parser = subparsers.add_parser(
        "lab",
        help="emulate the clusters of a cluster.toml on this machine",
        description="Emulates the clusters of a cluster.toml on this machine: each node is a network "
        "namespace with NICs of the file's rates. Needs root or user namespaces, and iproute2.",
    )
    actions = parser.add_subparsers(dest="lab_action", required=True, metavar="ACTION")

    start = actions.add_parser(
        "run",
        help="run a command once for each process of each node",
        description="Runs COMMAND once for each process of each node, with torchrun's variables set: it "
        "takes the place of torchrun. Exit status: that of the first process that failed, 124 "
        "after --timeout, 125 after --gpu-standstill.",
        epilog="Example:\n\n"
        "  holmes lab run --cluster examples/clusters/two_clusters_4.toml -- python train.py --holmes",
    )
    _add_site(start)
    order = start.add_mutually_exclusive_group()
    order.add_argument(
        "--order", metavar="a0,b0,...", help="nodes in the launcher's order (or the file's)"
    )
    order.add_argument(
        "--interleave", action="store_true", help="take clusters' nodes in turn: a0,b0,a1,..."
    )
    start.add_argument(
        "--processes", type=int, metavar="N", help="of each node (default: the file's)"
    )
    start.add_argument(
        "--env", action="append", default=[], metavar="K=V", help="set a variable in every process"
    )
    start.add_argument(
        "--preload", metavar="M,N", help="import these once and fork every rank (python)"
    )
    start.add_argument(
        "--accelerator",
        metavar="JSON",
        help='emulate a GPU\'s speed: {"flops": 5e9, "classes": ["Block"]}; with --gpu '
        '{"flops": 5e9, "bytes": 2e9, "sms": 108}',
    )
    start.add_argument(
        "--sysctl",
        action="append",
        default=[],
        metavar="K=V",
        help="a kernel setting (sysctl) of every node's network",
    )
    start.add_argument(
        "--realtime", action="store_true", help="run the ranks under SCHED_RR where permitted"
    )
    start.add_argument(
        "--logs", type=Path, metavar="DIR", help="write each rank's output to DIR/rankN.log"
    )
    start.add_argument(
        "--timeout", type=float, metavar="S", help="end the job after S seconds (status 124)"
    )
    start.add_argument(
        "--launcher",
        choices=tuple(NEEDS),
        help="start the job by the real launcher, with its daemons in the nodes; COMMAND may "
        "begin with its program (srun, sbatch, mpirun, ...): then it is run as it stands "
        'on the host "login"',
    )
    start.add_argument(
        "--quiet",
        action="store_true",
        help="show only rank 0's output, and the last lines of ranks that fail",
    )
    lab_gpu.add_options(start)
    start.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND",
        help="what every process runs: python train.py ARGUMENTS",
    )

    prebuild = actions.add_parser(
        "build",
        help="build what `holmes lab run --gpu` needs, beforehand",
        description="Builds the libraries of the emulated GPU for the torch of a Python, into the user's "
        "cache, and checks NCCL's results, as the first `holmes lab run --gpu` would.",
    )
    prebuild.add_argument(
        "--nccl-source", metavar="DIR", help="a checkout of NCCL, or an archive of it (.tar.gz)"
    )
    prebuild.add_argument(
        "--python",
        default="python",
        metavar="P",
        help="the Python whose torch is used (default: python)",
    )

    links = actions.add_parser(
        "measure",
        help="achieved against configured bandwidth of every kind of link",
        description="Sends over every kind of link and compares with the file. Exit status 1 when one is off "
        "by more than 10 %.",
    )
    _add_site(links)
    links.add_argument("--json", action="store_true", help="print JSON instead of a table")

    shell = actions.add_parser(
        "shell",
        help="a shell on a host of a lab",
        description="Opens a shell on a node of a running lab (`holmes lab run` in another terminal); with "
        "--cluster, of a new lab that ends with the shell.",
        epilog="Example: a Slurm of four nodes to try things on\n\n"
        "  holmes lab shell --cluster examples/clusters/two_clusters_4.toml --launcher srun login",
    )
    which = shell.add_mutually_exclusive_group()
    which.add_argument("--cluster", metavar="FILE", help="cluster.toml of a lab of its own")
    which.add_argument(
        "--lab", metavar="DIR", help="directory of a lab that runs, where several do"
    )
    shell.add_argument(
        "--scale",
        type=float,
        default=1.0,
        metavar="S",
        help="with --cluster: multiply every rate by S",
    )
    shell.add_argument("--launcher", choices=tuple(NEEDS), help="with --cluster: its daemons, too")
    shell.add_argument(
        "host", metavar="NODE", help='its name; "login" is where launchers start jobs'
    )
    shell.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND",
        default=[],
        help="run this instead of a shell",
    )

    down = actions.add_parser(
        "down",
        help="end labs whose owner is gone and remove their files",
        description="Ends labs whose owner is gone, and removes their files.",
    )
    down.add_argument("--all", action="store_true", help="also end the labs that are in use")
    down.add_argument("--json", action="store_true", help="print JSON")


def _add_site(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe the emulated clusters: --cluster and --scale."""
    parser.add_argument("--cluster", required=True, metavar="FILE", help="cluster.toml")
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        metavar="S",
        help="multiply every rate by S (default: 1.0)",
    )


def run(args: argparse.Namespace) -> int:
    """Run `holmes lab ACTION`, and return the exit status.

    ACTION is run, build, measure, shell or down (args.lab_action). `run` and `shell` execute a command in
    emulated clusters, and return its status. `measure` measures the emulated links, and returns 1 if a link
    differs from its configuration by more than 10 %.
    """
    return {
        "run": _run,
        "build": lab_gpu.build,
        "measure": _measure,
        "shell": _shell,
        "down": _down,
    }[args.lab_action](args)


def _run(args: argparse.Namespace) -> int:
    """Run a job on emulated clusters (`holmes lab run`), and return its exit status."""
    spec = load_spec(args.cluster)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise HolmesError(
            "holmes lab run: no command; write it after --, for example: -- python train.py"
        )
    if args.launcher is None:
        refuse_launcher(command)
    env = dict(_key_value(text) for text in args.env)
    order = order_of_options(spec, is_interleaved=args.interleave, listed=args.order)
    preload = args.preload.split(",") if args.preload else ()
    sysctl = dict(_key_value(text, "--sysctl") for text in args.sysctl)
    gpus = lab_gpu.gpus_of(args, command, env)
    printer = _Printer(args.quiet, [])
    options: dict[str, Any] = {  # keyword arguments of Lab.start()
        "order": order,
        "processes": args.processes,
        "env": env,
        "logs": args.logs,
        "timeout": args.timeout,
        "on_line": printer,
    }
    if gpus is None:
        options["accelerator"] = _configuration(args.accelerator)
    with Lab(
        spec, args.scale, realtime=args.realtime, sysctl=sysctl, login=args.launcher is not None
    ) as lab:
        if args.launcher is None:
            for name in order or [node.name for node in lab.nodes]:
                processes = args.processes or spec.cluster_of(name).processes
                printer.labels += [f"{name}:{local}" for local in range(processes)]
        if gpus is not None:
            result = lab_gpu.run(
                lab, command, args, gpus, printer.labels, preload=preload, **options
            )
        elif args.launcher is None:
            result = lab.run(command, preload=preload, **options)
        else:
            job, printer.labels = start_with_launcher(lab, args.launcher, command, **options)
            result = job.wait()
    if result.emulated:
        print(
            "holmes lab: the timings of this run come from an emulated accelerator", file=sys.stderr
        )
    if result.busy > BOUND and args.accelerator:
        print(
            f"holmes lab: its timings are {BOUND_TEXT}, which were {result.busy:.0%} busy",
            file=sys.stderr,
        )
    has_timed_out = result.returncode == TIMED_OUT and result.first_failed is None
    if args.timeout is not None and has_timed_out:
        print(f"holmes lab: ended after {args.timeout:g} s (--timeout)", file=sys.stderr)
    elif result.first_failed is not None:
        printer.failed(result.first_failed, result.returncode, result.lines)
    return result.returncode


def refuse_launcher(command: Sequence[str]) -> None:
    """Reject a command that is itself a launcher, because it would start a whole job on each node.

    torchrun with --nnodes is accepted: its processes on all nodes form one job.

    Raises:
        HolmesError: The command is a launcher. The message has the command without it.
    """
    words = [Path(word).name for word in command]
    # A launcher is the first word (torchrun), or the third (python -m torch.distributed.run).
    launcher = next((name for name in LAUNCHERS if name in words[:3]), "")
    if not launcher:
        return
    has_node_flags = any(word.startswith(("--nnodes", "--nnode-")) for word in words)
    if "torch" in launcher and has_node_flags:
        return
    try:
        parsed = split_command(command)
        # Without a script, split_command() counts the module's name as the launcher's last word.
        program = [parsed.script] if parsed.script else ["-m", parsed.launcher[-1]]
        script = " ".join(["python", *program, *parsed.arguments])
    except HolmesError:  # neither a script nor a module was found: show an example
        script = "python train.py"
    raise HolmesError(
        f"holmes lab run starts every process itself, as a launcher does; {launcher} in it would "
        "make a job of its own on each node. Without it: holmes lab run --cluster FILE "
        f"[--processes N] -- {script:.200}"
    )


class _Printer:
    """Printer of the output of all ranks, with stdout on stdout and stderr on stderr."""

    def __init__(self, quiet: bool, labels: list[str]):
        """Prepare to print the output of all ranks, or of rank 0 only.

        Args:
            quiet: Whether only rank 0 is printed.
            labels: "NODE:LOCAL_RANK" of each rank, printed before each of its lines.
        """
        self.quiet, self.labels = quiet, labels

    def __call__(self, rank: int, line: str, stream: str) -> None:
        file = sys.stdout if stream == "stdout" else sys.stderr
        if not self.quiet:
            print(f"[{self.labels[rank]}] {line}", file=file, flush=True)
        elif rank == 0:
            print(line, file=file, flush=True)

    def failed(self, rank: int, status: int, lines: dict[int, list[tuple[str, str]]]) -> None:
        """Print which rank failed first, and its last lines if they were not printed before.

        Args:
            rank: The rank that failed first.
            status: Exit status of the rank.
            lines: Rank -> pairs ("stdout" or "stderr", line).
        """
        if self.quiet and rank != 0:  # with --quiet, only the output of rank 0 was printed
            for _, line in lines[rank][-QUIET_TAIL:]:
                print(f"[{self.labels[rank]}] {line}", file=sys.stderr)
        print(
            f"holmes lab: rank {rank} ({self.labels[rank]}) failed first, with status {status}",
            file=sys.stderr,
        )


def _key_value(text: str, flag: str = "--env") -> tuple[str, str]:
    """Divide the value K=V of an option, or raise HolmesError if it has another form."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise HolmesError(f"{flag}: {text!r} is not K=V")
    return name, value


def _configuration(text: str | None) -> dict[str, Any] | None:
    """Return the settings in the JSON value of --accelerator, None without the option."""
    if text is None:
        return None
    return parse_json(text, "--accelerator", "give an object").values


def _shell(args: argparse.Namespace) -> int:
    """Run a shell or a command on a host of a lab (`holmes lab shell`), and return its exit status.

    A lab is a set of emulated nodes. It runs already, or with --cluster is started for the command.
    With --launcher, the services that this launcher needs on the nodes are started, too: sshd for
    mpirun and deepspeed, Slurm for srun. A new lab then also has the host "login", where users of a
    cluster start jobs.
    """
    argv = (args.command[1:] if args.command[:1] == ["--"] else args.command) or [
        os.environ.get("SHELL") or "sh"
    ]
    if argv[0].startswith("-"):
        raise HolmesError(
            f"{argv[0]!r} comes after the node; options go before it, a command after --:"
            f" holmes lab shell [--cluster FILE] {args.host} -- COMMAND"
        )
    if args.cluster is None:
        if args.launcher:
            raise HolmesError(
                "--launcher: a running lab keeps the launcher that it was started with; give "
                "--cluster FILE for a new lab"
            )
        host = running_host(args.host, args.lab)
        return run_on_host(host.holder, argv, {**os.environ, **host.variables})
    with Lab(load_spec(args.cluster), args.scale, login=args.launcher is not None) as lab:
        lab.holder(args.host)  # raises an error for an unknown host, before the daemons start
        if args.launcher:
            Daemons(lab, NEEDS[args.launcher])  # they run until the lab ends
        host = running_host(args.host, str(lab.directory))
        return run_on_host(host.holder, argv, {**os.environ, **host.variables})


_LINK_COLUMNS = (
    Column("link"),
    Column("nodes", drop=2),
    Column("message", right=True, drop=1),
    Column("configured", right=True),
    Column("achieved", right=True),
    Column("ratio", right=True),
    Column("", wrap=13),  # the verdict
)
_BETWEEN_COLUMNS = (
    Column("between"),
    Column("what"),
    Column("configured", right=True),
    Column("achieved", right=True),
    Column("", wrap=13),  # the verdict
)


def _measure(args: argparse.Namespace) -> int:
    """Measure all links of emulated clusters (`holmes lab measure`), and print a table or JSON.

    Returns:
        The exit status: 0 if all links are as configured, else 1. Each rate may differ by 10 %, in
        a cluster and between clusters. The round trip between two clusters may differ by 5 %, or by
        1 ms if that is more. The rates of messages below 128 KiB are not judged.
    """
    rows, rows_between_clusters = measure(load_spec(args.cluster), args.scale)
    if args.json:
        links = [dataclasses.asdict(row) for row in rows]
        between = [dataclasses.asdict(row) for row in rows_between_clusters]
        print(
            json.dumps(
                {"cluster": args.cluster, "scale": args.scale, "rows": links, "between": between}
            )
        )
    else:
        title = f"{args.cluster}, scale {args.scale:g}: achieved against configured bandwidth"
        Screen().table(_LINK_COLUMNS, [_cells(row) for row in rows], title)
        if rows_between_clusters:
            cells = [_between_cells(row) for row in rows_between_clusters]
            Screen().table(_BETWEEN_COLUMNS, cells, "between the clusters")
    # The rate of a small message is only shown (row.counts is false).
    judged = [row.within for row in rows if row.counts]
    judged += [row.within for row in rows_between_clusters]
    return 0 if all(judged) else 1


def _between_cells(row: BetweenClustersRow) -> list[str]:
    """Return the cells of a measurement between clusters: of a rate or a round trip.

    They are: clusters, name of the measurement, configured value, achieved value, verdict.
    """
    is_round_trip = row.what == "round trip"
    show = format_seconds if is_round_trip else format_rate
    if row.within:
        verdict = "ok"
    elif is_round_trip:
        verdict = "off by more than 1 ms and 5 %"
    else:
        verdict = f"off by > {100 * TOLERANCE:g} %"
    return ["-".join(row.clusters), row.what, show(row.configured), show(row.achieved), verdict]


def _cells(row: LinkRow) -> list[str]:
    """Return the cells of a measured link: network, nodes, message, rates, their ratio, verdict.

    The rate of a small message (row.counts is false) is only shown: a large part of its time is
    that of its acknowledgement, so it may miss the configured rate.
    """
    if row.within:
        verdict = "ok"
    elif row.counts:
        verdict = f"off by more than {100 * TOLERANCE:g} %"
    else:
        verdict = "small message"
    return [
        row.link,
        "-".join(row.nodes),
        f"{row.message_bytes >> 10} KiB",
        format_rate(row.configured_bps),
        format_rate(row.achieved_bps),
        f"{row.ratio:.3f}",
        verdict,
    ]


def _down(args: argparse.Namespace) -> int:
    """End labs whose owner has ended (--all: all labs), and print which were ended (`holmes lab down`)."""
    labs = state.clear(running_too=args.all)
    if args.json:
        print(json.dumps([dataclasses.asdict(lab) for lab in labs]))
        return 0
    for lab in labs:
        owner = f"owner {lab.owner} {'runs' if lab.owner_alive else 'is gone'}"
        if not lab.cleared:
            print(f"{lab.directory} ({lab.source}; {owner}): in use, left alone; --all ends it")
        else:
            ended = (
                f"keeper {lab.keeper} ended with all its processes, " if lab.keeper_alive else ""
            )
            print(f"{lab.directory} ({lab.source}; {owner}): {ended}files removed")
    if not labs:
        print("no lab has left anything behind")
    return 0
