"""Command `holmes lab run --gpu`: runs a job on emulated GPUs, and reports NCCL's networks and traffic.

The report has the network of each process group and the bytes of each NIC. Jobs that hang are ended.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from holmes_ext._pth import strip_flags
from holmes_ext.cli.show.table import Column, Screen
from holmes_ext.errors import HolmesError
from holmes_ext.files import save
from holmes_ext.units import parse_size
from holmes_lab.cli.gpu_build import BuildProgress
from holmes_lab.cores import BOUND, BOUND_TEXT
from holmes_lab.gpu import communicators
from holmes_lab.gpu.communicators import GroupNetwork, NicBytes, group_networks, nic_bytes
from holmes_lab.gpu.job import GpuClock, Gpus, parse_clock
from holmes_lab.gpu.libraries import Libraries, libraries
from holmes_lab.gpu.races import missing_waits
from holmes_lab.gpu.watcher import END_S, Watcher, wait_watched
from holmes_lab.lab import Lab
from holmes_lab.process.job import RunResult

GROUPS = (
    Column("run", drop=1),
    Column("group"),
    Column("communicators", right=True, drop=2),
    Column("ranks", right=True),
    Column("nodes", right=True),
    Column("NCCL's network"),
    Column("NICs", wrap=12),
)
NICS = (
    Column("run", drop=1),
    Column("node"),
    Column("NIC"),
    Column("kind"),
    Column("sent", right=True),
    Column("received", right=True),
)
LEAST_MEMORY_MB = 64  # memory of an emulated GPU that NCCL and torch take themselves
HUNG = 125  # exit status of a job that was ended because it hung
NOT_EMULATED = 2  # exit status of a job that used something that is not emulated
_MISSING = re.compile(r"emulated GPU: (.* not emulated.*|this machine has no .*)")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for emulated GPUs to the parser of `holmes lab run`."""
    what = "CUDA and NCCL without a GPU: the command needs the CUDA build of torch"
    gpu = parser.add_argument_group("emulated GPUs", what)
    gpu.add_argument(
        "--gpu",
        nargs="?",
        type=int,
        const=-1,
        metavar="N",
        help="run on N emulated GPUs of each node (default: one for each process)",
    )
    gpu.add_argument(
        "--gpu-memory",
        metavar="SIZE",
        help='memory of each GPU (default: "16GiB"); the memory in use is taken from this machine',
    )
    gpu.add_argument(
        "--gpu-order",
        choices=("launched", "random"),
        default="launched",
        help="random: delay kernels at random, so that a missing wait between streams gives wrong "
        "numbers, and report such waits (default: launched, the order of the launches)",
    )
    gpu.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="S",
        help="seed of --gpu-order random (default: 0)",
    )
    gpu.add_argument(
        "--gpu-standstill",
        type=float,
        default=END_S,
        metavar="S",
        help="end the job once no rank has progressed for S seconds while a stream has work "
        f"(status {HUNG}; default: {END_S:g}); a proven deadlock ends it at once",
    )
    gpu.add_argument(
        "--nccl-source", metavar="DIR", help="a checkout of NCCL, or an archive of it (.tar.gz)"
    )
    gpu.add_argument(
        "--beside-stock",
        action="store_true",
        help="run the command without its --holmes flags first, and show both",
    )
    gpu.add_argument("--gpu-report", metavar="FILE", help="write the networks and bytes as JSON")


def gpus_of(
    args: argparse.Namespace, command: Sequence[str], env: Mapping[str, str]
) -> Gpus | None:
    """Return the emulated GPUs of the options, None without --gpu.

    The libraries of the emulated GPU are built if they are not in the cache.

    Args:
        args: Options of `holmes lab run`.
        command: The command of the ranks. The torch of its Python is used.
        env: Further environment variables of the ranks.

    Raises:
        HolmesError: An option is not valid, or the libraries cannot be built.
    """
    if args.gpu is None:
        values = {
            "--gpu-memory": args.gpu_memory,
            "--nccl-source": args.nccl_source,
            "--gpu-report": args.gpu_report,
            "--beside-stock": args.beside_stock,
            "--gpu-order": args.gpu_order == "random",
            "--gpu-standstill": args.gpu_standstill != END_S,
        }
        for name, value in values.items():
            if value:
                raise HolmesError(f"holmes lab run: {name} is for emulated GPUs; add --gpu")
        return None
    if args.launcher is not None:
        raise HolmesError(
            f"--gpu: the ranks of --launcher {args.launcher} find no emulated GPUs; leave one out"
        )
    if args.gpu == 0 or args.gpu < -1:
        raise HolmesError(
            f"--gpu {args.gpu}: a node needs at least 1 GPU (without a number: one for each process)"
        )
    if args.gpu_standstill <= 0:
        raise HolmesError(f"--gpu-standstill {args.gpu_standstill:g}: seconds, more than 0")
    memory_mb = (
        16384 if args.gpu_memory is None else parse_size(args.gpu_memory, "--gpu-memory") >> 20
    )
    if memory_mb < LEAST_MEMORY_MB:
        raise HolmesError(
            f"--gpu-memory {args.gpu_memory}: NCCL and torch alone need {LEAST_MEMORY_MB} MB"
        )
    clock = GpuClock() if args.accelerator is None else parse_clock(args.accelerator)
    with BuildProgress() as progress:
        libs = libraries(command, {**os.environ, **env}, args.nccl_source, progress)
    return Gpus(
        libs,
        count=None if args.gpu < 0 else args.gpu,  # of each node; None: one for each process
        memory_mb=memory_mb,
        seed=args.seed if args.gpu_order == "random" else None,
        clock=clock,
    )


def build(args: argparse.Namespace) -> int:
    """Build the libraries of the emulated GPU (`holmes lab build`), and print where they are."""
    with BuildProgress() as progress:
        libs = libraries([args.python], os.environ, args.nccl_source, progress)
    print(
        f"emulated GPU for torch {libs.torch.version} with NCCL {libs.source.name}: {libs.nccl.parent}"
    )
    return 0


@dataclass
class GpuRun:
    """Run of a command on emulated GPUs: its result, NCCL's networks, traffic, and faults that were found."""

    name: str  # "stock" or "holmes" with --beside-stock, else ""
    result: RunResult
    groups: list[GroupNetwork]  # the network that NCCL chose for each process group
    nics: list[NicBytes]  # bytes of each NIC
    hang: tuple[str, ...] = ()  # lines that explain why the job hung; empty if it did not
    #: Lines about missing waits between streams; empty if none was found.
    races: tuple[str, ...] = ()


def run(
    lab: Lab,
    command: Sequence[str],
    args: argparse.Namespace,
    gpus: Gpus,
    labels: Sequence[str],
    **options: Any,
) -> RunResult:
    """Run a command on emulated GPUs, and print the networks that NCCL chose and each NIC's bytes.

    With --beside-stock, the command runs twice: first without its flags --holmes... (stock training), and
    then as given. The printed tables show both runs. The second run is left out if the first one fails.

    Args:
        lab: The emulated clusters.
        command: The command of the ranks.
        args: Options of `holmes lab run`.
        gpus: The emulated GPUs.
        labels: "NODE:LOCAL_RANK" of each rank.
        options: Further arguments of Lab.start().

    Returns:
        The result of the last run. Its status is HUNG if the job was ended because it hung.
    """
    plain = list(command)
    strip_flags(plain)
    if args.beside_stock and plain == list(command):
        raise HolmesError(
            "--beside-stock: the command has no --holmes flag, so there is nothing to compare with stock"
        )
    named = {"stock": plain, "holmes": list(command)} if args.beside_stock else {"": list(command)}
    runs = []
    for name, words in named.items():
        if name:
            print(f"holmes lab: {name}", file=sys.stderr, flush=True)
        runs.append(
            run_watched(lab, name, words, labels, args.gpu_standstill, gpus=gpus, **options)
        )
        if runs[-1].result.returncode:
            break
    show(runs, gpus.libraries)
    if args.gpu_report:
        write_report(args.gpu_report, runs, gpus.libraries)
    return runs[-1].result


def run_watched(
    lab: Lab,
    name: str,
    command: Sequence[str],
    labels: Sequence[str],
    end_s: float = END_S,
    **options: Any,
) -> GpuRun:
    """Run a job, and end it if it hangs: if it is deadlocked, or makes no progress for `end_s` seconds.

    Args:
        lab: The emulated clusters.
        name: Name of the run.
        command: The command of the ranks.
        labels: "NODE:LOCAL_RANK" of each rank.
        end_s: Seconds without progress.
        options: Further arguments of Lab.start(). `order` is required: names of the nodes in the
            order of their ranks; None: all nodes of the lab.

    Returns:
        The run. Its status is HUNG if the job was ended because it hung, or NOT_EMULATED if a rank failed
        because the emulated GPU lacks something, such as an operator, or this machine had no memory left.
    """
    bytes_before = lab.counters()
    killed_before = killed_for_memory()
    job = lab.start(command, **options)
    assert job.watch is not None  # folder of the watch files that each rank writes
    run = wait_watched(job, Watcher(job.watch, end_s=end_s), labels, print_lines)
    if run.hang:
        result = replace(run.result, returncode=HUNG, first_failed=None)
    else:
        result = run.result
        was_killed = killed_for_memory() > killed_before
        missing = find_missing_emulation(result, was_killed)
        if missing:
            rank = result.first_failed
            print_lines([f"rank {rank} ended because of the emulation: {missing}"])
            result = replace(result, returncode=NOT_EMULATED)
    by_name = {node.name: node for node in lab.nodes}
    nodes = [by_name[node] for node in options["order"] or by_name]
    names = [node.name for node in nodes]
    node_of_rank = [names.index(label.split(":")[0]) for label in labels]  # labels: "a0:1"
    return GpuRun(
        name,
        result,
        groups=group_networks(communicators.read(job.watch), nodes, node_of_rank),
        nics=nic_bytes(bytes_before, lab.counters(), nodes),
        hang=run.hang,
        races=tuple(missing_waits(job.watch)),  # lines about data races between CUDA streams
    )


def killed_for_memory() -> int:
    """Return how many processes the kernel has killed for lack of memory since this machine started."""
    return int(Path("/proc/vmstat").read_text().split("oom_kill ")[1].split()[0])


def find_missing_emulation(result: RunResult, killed: bool = False) -> str:
    """Return the missing part of the emulation that made the first rank fail, "" if it failed otherwise.

    That is an operator, a kernel or a CUDA call that is not emulated, or memory of this machine. It
    is found in the last lines of the rank's output.

    Args:
        result: The failed run.
        killed: Whether the kernel has killed a process for lack of memory during the run.
    """
    if killed and result.returncode == 128 + signal.SIGKILL:
        return (
            "this machine had no memory left; run fewer ranks, or give NCCL small buffers: "
            "--env NCCL_BUFFSIZE=262144 --env NCCL_MAX_P2P_NCHANNELS=4"
        )
    output = result.outputs[result.first_failed] if result.first_failed is not None else ""
    return next(
        (
            match[1].strip()
            for line in reversed(output.splitlines())
            if (match := _MISSING.search(line))
        ),
        "",
    )


def show(runs: Sequence[GpuRun], libraries: Libraries) -> None:
    """Print the report of all runs on stderr, because stdout has the output of the ranks.

    Args:
        runs: The runs.
        libraries: Libraries of the emulated GPU, for the versions of torch and NCCL.
    """
    screen = Screen(stderr=True)
    for run in runs:
        print_lines(run.hang)
        print_lines(run.races)
    versions = f"emulated GPU, torch {libraries.torch.version}, NCCL {libraries.source.name}"
    rows_of_groups = []
    rows_of_nics = []
    for run in runs:
        run_name = run.name if len(runs) > 1 else ""  # the column is left out for a single run
        for group in run.groups:
            rows_of_groups.append(
                [
                    run_name,
                    group.group or "-",
                    str(len(group.ranks)),
                    str(len(group.ranks[0])),
                    str(group.nodes),
                    group.network,
                    " ".join(group.nics),
                ]
            )
        for nic in run.nics:
            sent, received = _megabytes(nic.sent), _megabytes(nic.received)
            rows_of_nics.append([run_name, nic.node, nic.nic, nic.kind, sent, received])
    if rows_of_groups:
        title = f"{versions}: the network that NCCL chose for each group"
        screen.table(GROUPS, rows_of_groups, title)
    else:
        screen.line(f"{versions}: no communicator was made")
    for run in runs:
        busy = f"this machine's cores were {run.result.busy:.0%} busy"
        timing = f": its times are {BOUND_TEXT}" if run.result.busy > BOUND else ""
        screen.line(f"{run.name} ran {run.result.seconds:.1f} s; {busy}{timing}".lstrip())
    screen.table(
        NICS,
        rows_of_nics,
        "emulated GPU: bytes of each NIC, from start to end of the job (headers included)",
    )


def print_lines(lines: Sequence[str]) -> None:
    """Print lines on stderr, each behind "holmes lab: ".

    They are not wrapped or cut at the width of the terminal, so that all names in them are complete.
    """
    for line in lines:
        print(f"holmes lab: {line}", file=sys.stderr, flush=True)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.3f} MB"


def write_report(file: str, runs: Sequence[GpuRun], libs: Libraries) -> None:
    """Write the networks and bytes of all runs as JSON (--gpu-report).

    The times of a run describe this machine instead of the emulated GPUs if its cores were too
    busy: "cores_busy" is their load from 0 to 1, and "bound_by_cores" says whether it was above
    BOUND. "hang" has lines that explain why a job hung. "missing_waits" has lines about streams
    that use the same memory without waiting for each other (races).

    Args:
        file: Path of the report.
        runs: The runs.
        libs: Libraries of the emulated GPU, for the versions of torch and NCCL.
    """
    document = {
        "version": 1,
        "emulated": "GPU",
        "torch": libs.torch.version,
        "nccl": libs.source.name,
        "runs": [
            {
                "name": run.name,
                "status": run.result.returncode,
                "seconds": run.result.seconds,
                "cores_busy": round(run.result.busy, 3),
                "bound_by_cores": run.result.busy > BOUND,
                "hang": list(run.hang),
                "missing_waits": list(run.races),
                "groups": [asdict(group) for group in run.groups],
                "nics": [asdict(nic) for nic in run.nics],
            }
            for run in runs
        ],
    }
    save(file, json.dumps(document) + "\n", "the report")
